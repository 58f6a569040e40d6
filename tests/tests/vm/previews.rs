//! Previews of servers in real machines: bound to loopback, with no network of the machine's own.

use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use mainbrella_client::api::{CommandLine, CreatePreview, Preview, StartJob};
use mainbrella_tests::{Machine, Service, Setup, host};
use mainbrella_types::ErrorCode;
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

use crate::code;

const APP: &str = include_str!("preview_app.py");
const PORT: u32 = 3000;
/// Long enough for Python to start under emulation, and to hash what is large.
const PATIENCE: Duration = Duration::from_secs(120);

/// A service whose previews are at a known port.
pub(super) async fn service() -> (Service, u16) {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port();
    let arguments = vec!["--preview-listen".to_owned(), format!("127.0.0.1:{port}")];
    (Service::with(Setup { arguments, ..Setup::default() }).await, port)
}

/// A machine in which the application runs.
async fn machine(service: &mut Service, name: &str) -> Machine {
    let m = service.machine().await;
    m.write("/workspace/app.py", APP).await.expect("written");
    let command = ["python3", "/workspace/app.py", &PORT.to_string(), name].map(str::to_owned).to_vec();
    m.client.start_job(&m.name, &StartJob::new(CommandLine::Argv(command)), None).await.expect("started");
    m
}

async fn preview(m: &Machine) -> Preview {
    let body = CreatePreview { port: PORT, ttl_seconds: None };
    m.client.create_preview(&m.name, &body, &uuid::Uuid::new_v4().to_string()).await.expect("a preview")
}

/// A connection to the host of a URL, which is on this machine, and the first line and headers of a request to it.
async fn connect(url: &str, request: &str) -> (BufReader<TcpStream>, String) {
    let host = url.strip_prefix("http://").expect("http").split('/').next().expect("a host");
    let port = host.rsplit_once(':').expect("a port").1;
    let stream = TcpStream::connect(format!("127.0.0.1:{port}")).await.expect("connected");
    (BufReader::new(stream), format!("{request} HTTP/1.1\r\nHost: {host}\r\n"))
}

/// Reads the head of a reply: its status, and its headers in lower case.
async fn head(stream: &mut BufReader<TcpStream>) -> (u16, String) {
    let mut text = String::new();
    while !text.ends_with("\r\n\r\n") && stream.read_line(&mut text).await.expect("a line") > 0 {}
    let status = text.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or_else(|| panic!("no reply: {text:?}"));
    (status, text.to_lowercase())
}

fn length(headers: &str) -> usize {
    let line = headers.lines().find_map(|l| l.strip_prefix("content-length: "));
    line.and_then(|l| l.trim().parse().ok()).unwrap_or_else(|| panic!("no length: {headers}"))
}

/// The reply to a small request.
pub(super) async fn get(url: &str, path: &str) -> (u16, String) {
    let (mut stream, request) = connect(url, &format!("GET {path}")).await;
    stream.write_all(format!("{request}\r\n").as_bytes()).await.expect("sent");
    let (status, headers) = head(&mut stream).await;
    let mut body = vec![0; length(&headers)];
    stream.read_exact(&mut body).await.expect("a body");
    (status, String::from_utf8(body).expect("text"))
}

/// Waits until the application listens; until then there is a page that says so.
async fn ready(url: &str) {
    let mut seen = Vec::new();
    host::until("the application", PATIENCE, async || {
        let (status, text) = get(url, "/who").await;
        assert!(status == 200 || (status == 502 && text.contains("listens")), "{status} {text}");
        seen.push(status);
        status == 200
    })
    .await;
    eprintln!("the application answers after {} looks", seen.len());
}

/// Sends a message over a WebSocket that was just opened, as a client must: masked, here with zeros.
async fn exchange(stream: &mut BufReader<TcpStream>, text: &str) {
    let mut frame = vec![0x81, 0x80 | u8::try_from(text.len()).expect("short"), 0, 0, 0, 0];
    frame.extend(text.as_bytes());
    stream.write_all(&frame).await.expect("sent");
    let mut reply = vec![0; 2 + text.len()];
    stream.read_exact(&mut reply).await.expect("an answer");
    assert_eq!(&reply[2..], text.as_bytes());
}

async fn socket(url: &str, path: &str) -> BufReader<TcpStream> {
    let (mut stream, request) = connect(url, &format!("GET {path}")).await;
    let rest = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    stream.write_all(format!("{request}{rest}").as_bytes()).await.expect("sent");
    let (status, headers) = head(&mut stream).await;
    assert!(status == 101 && headers.contains("s3pplmbitxaq9kygzzhzrbk+xoo="), "{headers}");
    stream
}

async fn ends(stream: &mut BufReader<TcpStream>) {
    let mut rest = Vec::new();
    let ended = tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut rest)).await;
    // An end or a reset, but an end.
    drop(ended.expect("it ends"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_on_loopback_is_reached_in_every_way_and_cut_off_within_a_second() {
    let (mut service, port) = service().await;
    let m = machine(&mut service, "one").await;
    let made = preview(&m).await;
    let (url, path_url) = (made.url.clone().expect("told"), made.path_url.clone().expect("told"));
    assert!(url.ends_with(&format!(".localhost:{port}/")), "{url}");
    ready(&url).await;
    let (status, who) = get(&url, "/who").await;
    let host = url.strip_prefix("http://").expect("http").trim_end_matches('/');
    assert_eq!((status, who.lines().next()), (200, Some(format!("host: {host}").as_str())));
    assert!(who.contains("x-forwarded-proto: http"));
    // The path form: everything behind the token.
    let base = path_url.strip_prefix("http://").and_then(|u| u.split_once('/')).expect("a path").1;
    let gateway = format!("http://127.0.0.1:{port}/");
    assert_eq!(get(&gateway, &format!("/{base}who")).await.0, 200);

    // A WebSocket in both forms.
    let mut sockets = [socket(&url, "/ws").await, socket(&gateway, &format!("/{base}ws")).await];
    for stream in &mut sockets {
        for n in 0..20 {
            exchange(stream, &format!("message {n}")).await;
        }
    }

    // A large body each way; the service holds none of it.
    const SIZE: usize = 64 << 20;
    let before = host::status_kib(service.pid(), "VmRSS");
    let begin = Instant::now();
    let (mut stream, request) = connect(&url, "POST /count").await;
    stream.write_all(format!("{request}Content-Length: {SIZE}\r\n\r\n").as_bytes()).await.expect("sent");
    let (piece, mut sum) = (vec![7u8; 1 << 20], Sha256::new());
    for _ in 0..SIZE / piece.len() {
        stream.write_all(&piece).await.expect("sent");
        sum.update(&piece);
    }
    let (status, headers) = head(&mut stream).await;
    let mut body = vec![0; length(&headers)];
    stream.read_exact(&mut body).await.expect("a body");
    let told = String::from_utf8(body).expect("text");
    assert_eq!((status, told), (200, format!("{SIZE} {}", hex::encode(sum.finalize()))));
    eprintln!("64 MiB up in {:?}", begin.elapsed());
    let begin = Instant::now();
    let (mut stream, request) = connect(&url, &format!("GET /bytes/{SIZE}")).await;
    stream.write_all(format!("{request}\r\n").as_bytes()).await.expect("sent");
    assert_eq!(length(&head(&mut stream).await.1), SIZE);
    let (mut left, mut buffer) = (SIZE, vec![0; 1 << 20]);
    while left > 0 {
        let n = stream.read(&mut buffer).await.expect("read");
        assert!(n > 0, "{left} bytes are missing");
        left -= n;
    }
    eprintln!("64 MiB down in {:?}", begin.elapsed());
    let grown = host::status_kib(service.pid(), "VmRSS").saturating_sub(before);
    assert!(grown < 24 << 10, "the service grew by {} MiB", grown >> 10);

    // Events as they come, and then everything is cut.
    let (mut stream, request) = connect(&url, "GET /events").await;
    stream.write_all(format!("{request}\r\n").as_bytes()).await.expect("sent");
    assert_eq!(head(&mut stream).await.0, 200);
    let mut line = String::new();
    while !line.contains("data: 3") {
        line.clear();
        stream.read_line(&mut line).await.expect("an event");
    }
    m.client.revoke_preview(&m.name, &made.id).await.expect("revoked");
    let begin = Instant::now();
    ends(&mut stream).await;
    for socket in &mut sockets {
        ends(socket).await;
    }
    assert!(begin.elapsed() < Duration::from_secs(1), "cut after {:?}", begin.elapsed());
    assert_eq!(get(&url, "/who").await.0, 410);
    assert!(!service.log().contains(host.split('.').next().expect("a token")), "tokens are not logged");

    // With its machine a preview ends as well.
    let second = preview(&m).await;
    let url = second.url.expect("told");
    let mut socket = socket(&url, "/ws").await;
    exchange(&mut socket, "still there").await;
    m.stop().await;
    let begin = Instant::now();
    ends(&mut socket).await;
    assert!(begin.elapsed() < Duration::from_secs(1));
    assert_eq!(get(&url, "/").await.0, 410);
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_preview_survives_a_killed_service_and_leads_to_no_other_machine() {
    let (mut service, _) = service().await;
    let (one, two) = (machine(&mut service, "one").await, machine(&mut service, "two").await);
    let (to_one, to_two) = (preview(&one).await, preview(&two).await);
    let (url, other) = (to_one.url.clone().expect("told"), to_two.url.expect("told"));
    ready(&url).await;
    ready(&other).await;
    let sid = |page: String| page.split("script=").nth(1).and_then(|t| t.split(';').next()).map(str::to_owned);
    assert_eq!(sid(get(&url, "/").await.1).as_deref(), Some("one"));
    assert_eq!(sid(get(&other, "/").await.1).as_deref(), Some("two"));
    two.stop().await;
    service.crash().await;
    assert_eq!(sid(get(&url, "/").await.1).as_deref(), Some("one"), "the same URL leads to the same machine");
    assert_eq!(get(&other, "/").await.0, 404, "one whose machine is gone leads nowhere");
    let m = Machine { client: service.client().clone(), name: one.name.clone() };
    assert_eq!(m.client.previews(&m.name).await.expect("listed").previews.len(), 1);
    assert_eq!(
        code(m.client.create_preview(&two.name, &CreatePreview { port: PORT, ttl_seconds: None }, "k").await),
        ErrorCode::MachineNotRunning
    );
    m.client.revoke_preview(&m.name, &to_one.id).await.expect("revoked");
    assert_eq!(get(&url, "/").await.0, 410);
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_real_browser_sees_two_applications_apart() {
    let found = ["/usr/bin/chromium", "/usr/bin/chromedriver"].iter().all(|p| Path::new(p).exists());
    assert!(found, "Debian packages chromium and chromium-driver are needed; ./run test installs them");
    let (mut service, _) = service().await;
    let (one, two) = (machine(&mut service, "one").await, machine(&mut service, "two").await);
    let urls = [preview(&one).await.url.expect("told"), preview(&two).await.url.expect("told")];
    ready(&urls[0]).await;
    ready(&urls[1]).await;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vm/browser.py");
    let looked = tokio::task::spawn_blocking(move || {
        std::process::Command::new("python3").arg(script).args(&urls).output().expect("python3")
    });
    let looked = looked.await.expect("it ran");
    assert!(looked.status.success(), "{}", String::from_utf8_lossy(&looked.stderr));
    let told: serde_json::Value = serde_json::from_slice(&looked.stdout).expect("JSON");
    for (page, name) in [("one", "one"), ("two", "two"), ("one again", "one")] {
        let told = &told[page];
        let who = told["who"].as_str().unwrap_or_default();
        assert!(who.contains(&format!("sid={name}")), "the session's cookie comes back: {told}");
        let foreign = if name == "one" { "two" } else { "one" };
        assert!(!who.contains(&format!("={foreign}")) && !told["cookie"].to_string().contains(foreign), "{told}");
        assert_eq!((&told["socket"], &told["event"]), (&"ping".into(), &"0".into()), "{told}");
        assert!(told["posted"].as_str().is_some_and(|p| p.starts_with("100000 ")), "{told}");
    }
    service.finish().await;
}
