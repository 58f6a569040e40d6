//! The ingress of previews beside nginx: each on one thread of its own, in front of the same small application, in turn.
//! What a machine adds is not in it: both connect to the application directly.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Empty, Full};
use hyper::client::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use mainbrella_preview::{Dial, DialFault, Ingress, Io, NoRoute, Public, Route, Routes, Token};
use mainbrella_types::GenerationKey;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use super::{milliseconds, some};
use crate::Fault;
use crate::table::{Row, Target, Unit};
use crate::world::World;

const NGINX: &str = "/usr/sbin/nginx";
/// Connections, each with one request at a time.
const CONNECTIONS: usize = 16;
/// How long requests are counted for one sample.
const WINDOW: Duration = Duration::from_secs(1);
/// Requests of one connection alone, whose times are compared.
const ALONE: usize = 2000;
/// Bytes of a reply.
const REPLY: usize = 1024;

pub(super) async fn run(world: &World, rows: &mut Vec<Row>) -> Result<(), Fault> {
    if !Path::new(NGINX).exists() {
        return Err("nginx is not there: install the Debian package nginx-light".into());
    }
    let closing = CancellationToken::new();
    let _ends = closing.clone().drop_guard();
    let application = thread(closing.clone(), application)?;
    let ours = thread(closing.clone(), move |listener, closing| ingress(listener, application, closing))?;
    let nginx = Nginx::start(application)?;
    wait(nginx.address).await?;
    let host = format!("{}.localhost", token().expose());
    let ways = [(ours, host.as_str()), (nginx.address, "localhost")];
    let mut rates: [Vec<f64>; 2] = Default::default();
    let windows = world.scale.windows;
    for n in 0..=windows {
        for (i, (address, host)) in ways.iter().enumerate() {
            let rate = count(*address, host).await?;
            // The first window warms both.
            if n > 0 {
                rates[i].push(rate);
                crate::progress("preview", (n - 1) * 2 + i + 1, windows * 2);
            }
        }
    }
    let [ours_rate, nginx_rate] = rates;
    rows.push(Row {
        group: "preview",
        what: "preview proxy, 1 KiB replies".to_owned(),
        measured: some(Unit::RequestsPerSecond, ours_rate)?,
        beside: Some(("nginx", some(Unit::RequestsPerSecond, nginx_rate)?)),
        target: Target::ratio(0.8),
    });
    let direct = times(application, "localhost").await?;
    let through = times(ours, &host).await?;
    let beside = times(nginx.address, "localhost").await?;
    let added = |times: &[Duration]| p99(times).saturating_sub(p99(&direct));
    rows.push(Row {
        group: "preview",
        what: "preview proxy, time added to the p99 of one connection".to_owned(),
        measured: milliseconds(&[added(&through)])?,
        beside: Some(("nginx", milliseconds(&[added(&beside)])?)),
        target: Target::value(2.0),
    });
    Ok(())
}

fn p99(times: &[Duration]) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort();
    sorted.get(sorted.len() * 99 / 100).copied().unwrap_or_default()
}

/// Runs a server on a thread of its own until `closing`; where it listens.
fn thread<F, W>(closing: CancellationToken, serve: F) -> Result<SocketAddr, Fault>
where
    F: FnOnce(TcpListener, CancellationToken) -> W + Send + 'static,
    W: Future<Output = ()>,
{
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::spawn(move || {
        runtime.block_on(async {
            let Ok(listener) = TcpListener::from_std(listener) else { return };
            tokio::select! {
                () = closing.cancelled() => {}
                () = serve(listener, closing.clone()) => {}
            }
        });
    });
    Ok(address)
}

/// Replies with a KiB.
async fn application(listener: TcpListener, _closing: CancellationToken) {
    let reply = Bytes::from(vec![b'x'; REPLY]);
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        let reply = reply.clone();
        let service = service_fn(move |_| {
            let reply = reply.clone();
            async move { Ok::<_, Infallible>(Response::new(Full::new(reply))) }
        });
        tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

fn token() -> Token {
    Token::of(b"one token to measure")
}

struct One {
    route: Arc<Route>,
    application: SocketAddr,
}

#[async_trait::async_trait]
impl Routes for One {
    async fn find(&self, asked: &Token) -> Result<Arc<Route>, NoRoute> {
        if *asked == token() { Ok(Arc::clone(&self.route)) } else { Err(NoRoute::Unknown) }
    }
}

#[async_trait::async_trait]
impl Dial for One {
    async fn dial(&self, _: &Route) -> Result<Box<dyn Io>, DialFault> {
        let stream = TcpStream::connect(self.application).await.map_err(|_| DialFault::NothingListens)?;
        let _ = stream.set_nodelay(true);
        Ok(Box::new(stream))
    }
}

async fn ingress(listener: TcpListener, application: SocketAddr, closing: CancellationToken) {
    let port = listener.local_addr().map_or(0, |a| a.port());
    let public = Public { https: false, domain: "localhost".into(), port, behind_proxy: false };
    let route = Route::new("bench".into(), GenerationKey::new(uuid::Uuid::now_v7()), 3000);
    let one = Arc::new(One { route, application });
    let ingress = Ingress::new(public, Arc::clone(&one) as Arc<dyn Routes>, one);
    mainbrella_preview::serve(listener, ingress, None, 1000, closing).await;
}

/// A real nginx with one worker, as a reverse proxy that keeps its connections.
struct Nginx {
    child: Child,
    address: SocketAddr,
    _dir: tempfile::TempDir,
}

impl Nginx {
    fn start(application: SocketAddr) -> Result<Self, Fault> {
        let dir = tempfile::tempdir()?;
        let address = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let at = dir.path().display();
        let config = format!(
            "daemon off; worker_processes 1; pid {at}/pid; error_log {at}/log crit;\n\
             events {{ worker_connections 1024; }}\n\
             http {{ access_log off; client_body_temp_path {at}/b; proxy_temp_path {at}/p; fastcgi_temp_path {at}/f;\n\
             uwsgi_temp_path {at}/u; scgi_temp_path {at}/s; keepalive_requests 1000000;\n\
             upstream application {{ server {application}; keepalive 64; keepalive_requests 1000000; }}\n\
             server {{ listen {address}; location / {{ proxy_pass http://application; proxy_http_version 1.1;\n\
             proxy_set_header Connection \"\"; proxy_set_header Host $host; proxy_set_header X-Forwarded-For $remote_addr;\n\
             proxy_set_header X-Forwarded-Host $host; proxy_set_header X-Forwarded-Proto http; }} }} }}\n"
        );
        let file = dir.path().join("nginx.conf");
        std::fs::write(&file, config)?;
        let child = Command::new(NGINX)
            .arg("-c")
            .arg(&file)
            .arg("-p")
            .arg(dir.path())
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self { child, address, _dir: dir })
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        // QUIT, not KILL: the master takes its worker along.
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let _ = self.child.wait();
    }
}

async fn wait(address: SocketAddr) -> Result<(), Fault> {
    for _ in 0..250 {
        if TcpStream::connect(address).await.is_ok() {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Err("nginx does not listen".into())
}

async fn connect(address: SocketAddr) -> Result<http1::SendRequest<Empty<Bytes>>, Fault> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    Ok(sender)
}

async fn ask(sender: &mut http1::SendRequest<Empty<Bytes>>, host: &str) -> Result<(), Fault> {
    sender.ready().await?;
    let response = sender.send_request(Request::get("/").header("host", host).body(Empty::new())?).await?;
    let status = response.status();
    let body = response.into_body().collect().await?.to_bytes();
    if status != 200 || body.len() != REPLY {
        return Err(format!("a proxy answered {status} with {} bytes", body.len()).into());
    }
    Ok(())
}

/// Requests a second over a window.
async fn count(address: SocketAddr, host: &str) -> Result<f64, Fault> {
    let begin = Instant::now();
    let one = || async {
        let mut sender = connect(address).await?;
        let mut answered = 0u32;
        while begin.elapsed() < WINDOW {
            ask(&mut sender, host).await?;
            answered += 1;
        }
        Ok::<u32, Fault>(answered)
    };
    let all: Vec<u32> = futures::future::try_join_all((0..CONNECTIONS).map(|_| one())).await?;
    Ok(f64::from(all.iter().sum::<u32>()) / begin.elapsed().as_secs_f64())
}

/// Times of requests of one connection alone.
async fn times(address: SocketAddr, host: &str) -> Result<Vec<Duration>, Fault> {
    let mut sender = connect(address).await?;
    let mut times = Vec::with_capacity(ALONE);
    for _ in 0..ALONE {
        let begin = Instant::now();
        ask(&mut sender, host).await?;
        times.push(begin.elapsed());
    }
    Ok(times)
}
