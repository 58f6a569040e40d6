//! Managed jobs over HTTP: pages, event streams, WebSockets, input, and what is refused.

use std::time::{Duration, Instant};

use crate::common::{Machine, Service};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures::{SinkExt as _, StreamExt as _};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper_util::rt::TokioIo;
use mainbrella_engine::fake::FakeDriver;
use mainbrella_engine::{Driver as _, ExitReport};
use mainbrella_store::KeyRole;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::{Message, client::IntoClientRequest};
use tokio_tungstenite::{WebSocketStream, client_async};

fn id(job: &Value) -> String {
    job["id"].as_str().unwrap().to_owned()
}

fn path(m: &Machine, job: &Value, rest: &str) -> String {
    m.path(&format!("/jobs/{}{rest}", id(job)))
}

async fn ended(s: &Service, m: &Machine, job: &Value) -> Value {
    let job = s.get(&path(m, job, "/wait")).await.ok();
    assert_eq!(job["state"], "ended", "{job}");
    job
}

/// An event stream as it comes in.
struct Events {
    body: hyper::body::Incoming,
    text: String,
    _driving: tokio::task::JoinHandle<()>,
}

impl Events {
    async fn open(s: &Service, path: &str, last: Option<u64>) -> Self {
        let stream = TcpStream::connect(s.address).await.unwrap();
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        let driving = tokio::spawn(async move { drop(connection.await) });
        let mut request = Request::builder()
            .uri(path)
            .header("host", "localhost")
            .header("authorization", format!("Bearer {}", s.admin))
            .header("accept", "text/event-stream");
        if let Some(last) = last {
            request = request.header("last-event-id", last);
        }
        let reply = sender.send_request(request.body(Empty::<Bytes>::new()).unwrap()).await.unwrap();
        assert_eq!(
            (reply.status(), &reply.headers()["content-type"]),
            (StatusCode::OK, &"text/event-stream".parse().unwrap())
        );
        Self { body: reply.into_body(), text: String::new(), _driving: driving }
    }

    /// The next event; `None` at the proper end. Comments are passed over.
    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some((block, rest)) = self.text.split_once("\n\n") {
                let (block, rest) = (block.to_owned(), rest.to_owned());
                self.text = rest;
                let field = |name: &str| block.lines().find_map(|l| l.strip_prefix(name).map(str::to_owned));
                if let Some(data) = field("data: ") {
                    let event: Value = serde_json::from_str(&data).unwrap();
                    assert_eq!(field("id: ").unwrap(), event["cursor"].to_string());
                    assert_eq!(field("event: ").unwrap(), event["type"].as_str().unwrap());
                    return Some(event);
                }
                assert!(block.starts_with(':'), "{block}");
                continue;
            }
            let frame = tokio::time::timeout(Duration::from_secs(20), self.body.frame()).await.expect("alive");
            match frame {
                None => return None,
                Some(frame) => self.text.push_str(std::str::from_utf8(&frame.unwrap().into_data().unwrap()).unwrap()),
            }
        }
    }

    async fn rest(&mut self) -> Vec<Value> {
        let mut all = Vec::new();
        while let Some(event) = self.next().await {
            all.push(event);
        }
        all
    }
}

fn bytes(events: &[Value]) -> Vec<u8> {
    let mut all = Vec::new();
    for e in events.iter().filter(|e| e["type"] == "output") {
        assert_eq!(e["offset"], all.len());
        all.extend(STANDARD.decode(e["dataBase64"].as_str().unwrap()).unwrap());
    }
    all
}

#[tokio::test]
async fn a_job_from_its_start_to_its_end_as_documented() {
    let s = Service::start().await;
    let m = s.machine().await;
    let job = s.job(&m, json!({"command": "echo hello world", "cwd": "/tmp"})).await;
    let keys: Vec<&str> = job.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(
        keys,
        [
            "command",
            "cursor",
            "cwd",
            "endedAt",
            "exit",
            "id",
            "pid",
            "pty",
            "startedAt",
            "state",
            "stderrBytes",
            "stderrOmittedBytes",
            "stdin",
            "stdinAcceptedBytes",
            "stdoutBytes",
            "stdoutOmittedBytes",
            "timeoutMs"
        ]
    );
    assert_eq!(
        (&job["command"], &job["cwd"], &job["timeoutMs"]),
        (&json!("echo hello world"), &json!("/tmp"), &json!(300_000))
    );
    assert!(job["pid"].is_u64() && job["startedAt"].as_str().unwrap().ends_with('Z'));
    let over = ended(&s, &m, &job).await;
    assert_eq!(over["exit"], json!({"cause": "exited", "code": 0, "signal": null}));
    assert!(over["endedAt"].is_string());
    assert_eq!(s.get(&path(&m, &job, "")).await.ok(), over);

    let page = s.get(&path(&m, &job, "/events")).await.ok();
    let events = page["events"].as_array().unwrap();
    assert_eq!((events.len(), &page["hasMore"], &page["nextCursor"]), (3, &json!(false), &json!(3)));
    assert_eq!((&events[0]["type"], &events[0]["pid"]), (&json!("started"), &job["pid"]));
    assert_eq!(events[1]["dataBase64"], STANDARD.encode("hello world\n"));
    assert_eq!((&events[1]["stream"], &events[1]["offset"]), (&json!("stdout"), &json!(0)));
    let exit: Vec<&str> = events[2].as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(exit, ["cause", "code", "cursor", "durationMs", "signal", "stderrBytes", "stdoutBytes", "time", "type"]);
    let first = s.get(&format!("{}&limit=1", path(&m, &job, "/events"))).await.ok();
    assert_eq!((&first["hasMore"], &first["nextCursor"]), (&json!(true), &json!(1)));
    assert_eq!(Events::open(&s, &path(&m, &job, "/events"), None).await.rest().await, *events);

    let raw = s.get(&format!("{}&offset=6&length=3", path(&m, &job, "/output"))).await;
    assert_eq!((&raw.body[..], &raw.headers["x-mainbrella-size"]), (&b"wor"[..], &"12".parse().unwrap()));
    assert!(raw.headers.get("x-mainbrella-omitted").is_none());
    assert_eq!(s.get(&format!("{}&stream=stderr", path(&m, &job, "/output"))).await.body, "");

    let list = s.get(&m.path("/jobs")).await.ok();
    assert_eq!(list, json!({"executions": [over], "nextCursor": null}));
    for wrong in ["../../x", "x", &"x".repeat(32), &"0".repeat(33)] {
        let wrong = wrong.replace('/', "%2F");
        assert_eq!(s.get(&format!("{}&cursor={wrong}", m.path("/jobs"))).await.code(), "invalid_request", "{wrong}");
    }
    assert_eq!(s.delete(&path(&m, &job, "")).await.status, 204);
    assert_eq!(s.get(&path(&m, &job, "")).await.code(), "not_found");
}

#[tokio::test]
async fn a_start_is_refused_when_it_cannot_be_and_happens_once_under_a_key() {
    let s = Service::start().await;
    let m = s.machine().await;
    let start = |body: Value, headers: Vec<(&'static str, &'static str)>| {
        let (s, path) = (&s, m.path("/jobs"));
        async move { s.post_with(&path, body, &headers).await }
    };
    assert_eq!(start(json!({"command": "no-such-program"}), vec![]).await.code(), "command_not_started");
    let nobody = start(json!({"command": "true", "user": "nobody"}), vec![]).await;
    assert_eq!(nobody.code(), "command_not_started");
    assert_eq!(start(json!({"command": "true", "user": "a b"}), vec![]).await.code(), "invalid_request");
    assert_eq!(start(json!({"command": "true", "timeoutMs": 0}), vec![]).await.code(), "invalid_request");
    assert_eq!(start(json!({"command": "true", "shell": 1}), vec![]).await.code(), "invalid_request");
    assert_eq!(s.get(&m.path("/jobs")).await.ok()["executions"], json!([]), "nothing is left of them");
    let key = vec![("idempotency-key", "start 1")];
    let first = start(json!({"command": "hang"}), key.clone()).await;
    assert_eq!((first.status.as_u16(), first.headers.get("idempotency-replayed")), (201, None));
    let again = start(json!({"command": "hang", "stdin": false}), key.clone()).await;
    assert_eq!((again.status.as_u16(), &again.headers["idempotency-replayed"]), (200, &"true".parse().unwrap()));
    assert_eq!(again.json()["id"], first.json()["id"]);
    assert_eq!(start(json!({"command": "true"}), key).await.code(), "idempotency_conflict");
    let many = vec![("idempotency-key", "a"), ("idempotency-key", "b")];
    assert_eq!(start(json!({"command": "true"}), many).await.code(), "invalid_request");
}

#[tokio::test]
async fn input_signals_cancel_and_resize() {
    let s = Service::start().await;
    let m = s.machine().await;
    let cat = s.job(&m, json!({"command": "cat", "stdin": true})).await;
    let write = |job: Value, data: Vec<u8>, eof: bool| {
        let uri = format!("{}&eof={eof}", path(&m, &job, "/stdin"));
        s.send(s.request(Method::POST, &uri).body(data.into()).unwrap())
    };
    let done = write(cat.clone(), b"one".to_vec(), false).await.ok();
    assert_eq!((&done["acceptedBytes"], &done["closed"]), (&json!(3), &json!(false)));
    assert_eq!(write(cat.clone(), vec![0; 65_537], false).await.code(), "payload_too_large");
    assert_eq!(write(cat.clone(), vec![], true).await.ok()["closed"], true);
    assert_eq!(ended(&s, &m, &cat).await["stdinAcceptedBytes"], 3);
    assert_eq!(write(cat, vec![1], false).await.code(), "job_ended");
    let hang = s.job(&m, json!({"command": "hang"})).await;
    assert_eq!(write(hang.clone(), vec![1], false).await.code(), "stdin_closed");
    assert_eq!(s.delete(&path(&m, &hang, "")).await.code(), "job_running");
    let signal = |job: Value, signal: Value| {
        let path = path(&m, &job, "/signal");
        let s = &s;
        async move { s.post(&path, json!({"signal": signal})).await }
    };
    for bad in [json!("NO"), json!(0), json!(65), json!(1.5), json!(null)] {
        assert_eq!(signal(hang.clone(), bad).await.code(), "invalid_request");
    }
    assert_eq!(signal(hang.clone(), json!("SIGUSR1")).await.status, 200);
    assert_eq!(ended(&s, &m, &hang).await["exit"], json!({"cause": "signalled", "code": null, "signal": 10}));
    assert_eq!(signal(hang, json!(15)).await.code(), "job_ended");

    let hang = s.job(&m, json!({"command": "hang"})).await;
    let bare = s.send(s.request(Method::POST, &path(&m, &hang, "/cancel")).body(Bytes::new()).unwrap()).await;
    assert_eq!(bare.ok()["id"], hang["id"]);
    assert_eq!(ended(&s, &m, &hang).await["exit"]["cause"], "cancelled");
    assert_eq!(s.post(&path(&m, &hang, "/cancel"), json!({"graceMs": 0})).await.ok()["exit"]["cause"], "cancelled");
    assert_eq!(s.post(&path(&m, &hang, "/cancel"), json!({"graceMs": 60_001})).await.code(), "invalid_request");

    let size = s.job(&m, json!({"command": "size", "pty": {"cols": 80, "rows": 24}})).await;
    let resized = s.post(&path(&m, &size, "/resize"), json!({"cols": 132, "rows": 43})).await.ok();
    assert_eq!(resized["pty"], json!({"cols": 132, "rows": 43}));
    let mut events = Events::open(&s, &path(&m, &size, "/events"), Some(1)).await;
    let said = [events.next().await.unwrap(), events.next().await.unwrap()];
    assert_eq!(bytes(&said), b"24 80\n43 132\n");
    let list = s.get(&m.path("/processes")).await.ok();
    let own = list["processes"].as_array().unwrap().iter().find(|p| p["jobId"] == size["id"]).unwrap().clone();
    assert_eq!(own["pid"], size["pid"]);
    let kill = m.path(&format!("/processes/{}/signal", own["pid"]));
    assert_eq!(s.post(&kill, json!({"signal": 9})).await.status, 204);
    assert_eq!(events.next().await.unwrap()["signal"], 9);
    assert_eq!(events.next().await, None, "the stream ends after the exit");
    assert_eq!(s.post(&kill, json!({"signal": 9})).await.code(), "not_found");
}

#[tokio::test]
async fn a_stream_goes_on_where_the_last_one_broke_over_a_restart_of_the_service() {
    let s = Service::start().await;
    let m = s.machine().await;
    let job = s.job(&m, json!({"command": "count 400 3"})).await;
    let mut all = Vec::new();
    for _ in 0..5 {
        let cursor = all.last().map_or(0, |e: &Value| e["cursor"].as_u64().unwrap());
        // Sometimes by the query, sometimes by the header, which goes further.
        let mut events =
            Events::open(&s, &format!("{}&cursor={}", path(&m, &job, "/events"), cursor / 2), Some(cursor)).await;
        for _ in 0..20 {
            all.push(events.next().await.unwrap());
        }
    }
    let begun = Instant::now();
    let open = Events::open(&s, &path(&m, &job, "/events"), Some(5)).await;
    let (dir, driver, finished) = s.end().await;
    assert!(finished && begun.elapsed() < Duration::from_secs(3), "open streams do not hold the service up");
    drop(open);
    let s = Service::on(dir, driver, |_| {}).await;
    let cursor = all.last().unwrap()["cursor"].as_u64();
    all.extend(Events::open(&s, &path(&m, &job, "/events"), cursor).await.rest().await);
    let cursors: Vec<u64> = all.iter().map(|e| e["cursor"].as_u64().unwrap()).collect();
    assert_eq!(cursors, (1..=cursors.len() as u64).collect::<Vec<_>>());
    let whole: String = (1..=400).map(|n| format!("{n}\n")).collect();
    assert_eq!(String::from_utf8(bytes(&all)).unwrap(), whole);
    let future = s.get(&format!("{}&cursor=100000", path(&m, &job, "/events"))).await;
    assert_eq!(future.code(), "invalid_request");
}

#[tokio::test]
async fn a_wait_ends_with_the_job_the_time_or_the_service_and_a_dead_machine_ends_everything() {
    let s = Service::start().await;
    let m = s.machine().await;
    let job = s.job(&m, json!({"command": "hang"})).await;
    let begun = Instant::now();
    let waited = s.get(&format!("{}&timeoutMs=150", path(&m, &job, "/wait"))).await.ok();
    assert!(waited["state"] == "running" && begun.elapsed() >= Duration::from_millis(150));
    assert_eq!(s.get(&format!("{}&timeoutMs=60001", path(&m, &job, "/wait"))).await.code(), "invalid_request");
    let mut events = Events::open(&s, &path(&m, &job, "/events"), None).await;
    assert_eq!(events.next().await.unwrap()["type"], "started");
    let keys = s.driver.inventory().await.unwrap();
    let killed = Instant::now();
    s.driver.kill(&keys[0], ExitReport::Vmm("its VMM was killed".into()));
    let exit = events.next().await.unwrap();
    assert_eq!((&exit["type"], &exit["cause"]), (&json!("exit"), &json!("lost")));
    assert!(killed.elapsed() < Duration::from_secs(2) && events.next().await.is_none());
    // What was there stays readable; nothing can be done any more.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(s.get(&path(&m, &job, "")).await.ok()["exit"]["cause"], "lost");
    assert_eq!(s.get(&m.path("/jobs")).await.ok()["executions"].as_array().unwrap().len(), 1);
    assert_eq!(s.post(&m.path("/jobs"), json!({"command": "true"})).await.code(), "machine_not_running");
    assert_eq!(s.post(&path(&m, &job, "/cancel"), json!({})).await.ok()["exit"]["cause"], "lost");
    assert_eq!(s.get(&m.path("/processes")).await.code(), "machine_not_running");
}

#[tokio::test]
async fn a_blocking_run_says_whether_it_waited_long_enough() {
    let s = Service::start().await;
    let m = s.machine().await;
    let done = s.post(&m.path("/commands/run"), json!({"command": "echo hi"})).await.ok();
    assert_eq!((&done["stillRunning"], &done["exitCode"]), (&json!(false), &json!(0)));
    let part = s.post(&m.path("/commands/run"), json!({"command": "count 50 40", "waitMs": 900})).await.ok();
    assert_eq!(
        (&part["stillRunning"], &part["exitCode"], &part["timedOut"]),
        (&json!(true), &json!(-1), &json!(false))
    );
    let begun = STANDARD.decode(part["stdoutBase64"].as_str().unwrap()).unwrap();
    assert!(begun.starts_with(b"1\n2\n"));
    let job = json!({"id": part["jobId"]});
    assert_eq!(ended(&s, &m, &job).await["exit"]["code"], 0);
    let all = s.get(&path(&m, &job, "/output")).await;
    assert!(all.body.starts_with(&begun) && all.body.ends_with(b"\n50\n"));
    let timed_out = s.post(&m.path("/commands/run"), json!({"command": "hang", "timeoutMs": 50})).await.ok();
    assert_eq!((&timed_out["timedOut"], &timed_out["stillRunning"]), (&json!(true), &json!(false)));
}

type Socket = WebSocketStream<TcpStream>;

async fn socket(s: &Service, path: &str, key: &str) -> Socket {
    let mut request = format!("ws://{}{path}", s.address).into_client_request().unwrap();
    request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
    client_async(request, TcpStream::connect(s.address).await.unwrap()).await.unwrap().0
}

async fn frame(socket: &mut Socket) -> Message {
    loop {
        let message = tokio::time::timeout(Duration::from_secs(10), socket.next()).await.unwrap().unwrap().unwrap();
        if !matches!(message, Message::Ping(_) | Message::Pong(_)) {
            return message;
        }
    }
}

async fn told(socket: &mut Socket) -> Value {
    match frame(socket).await {
        Message::Text(text) => serde_json::from_str(&text).unwrap(),
        other => panic!("{other:?}"),
    }
}

async fn say(socket: &mut Socket, frame: Value) {
    socket.send(Message::text(frame.to_string())).await.unwrap();
}

#[tokio::test]
async fn a_socket_carries_events_out_and_input_in() {
    let s = Service::start().await;
    let m = s.machine().await;
    let cat = s.job(&m, json!({"command": "cat", "stdin": true})).await;
    let mut ws = socket(&s, &path(&m, &cat, "/events"), &s.admin).await;
    assert_eq!(told(&mut ws).await["type"], "started");
    say(&mut ws, json!({"type": "stdin", "dataBase64": STANDARD.encode("ping")})).await;
    assert_eq!(told(&mut ws).await["dataBase64"], STANDARD.encode("ping"));
    say(&mut ws, json!({"type": "resize", "cols": 80, "rows": 24})).await;
    assert_eq!(told(&mut ws).await["code"], "invalid_request", "it has no terminal");
    for bad in [json!({"type": "stdin", "dataBase64": "?"}), json!({"type": "dance"}), json!([1])] {
        say(&mut ws, bad).await;
        let error = told(&mut ws).await;
        assert_eq!((&error["type"], &error["code"]), (&json!("error"), &json!("invalid_request")));
    }
    say(&mut ws, json!({"type": "eof"})).await;
    assert_eq!(told(&mut ws).await["type"], "exit");
    assert!(matches!(frame(&mut ws).await, Message::Close(Some(c)) if u16::from(c.code) == 1000));

    let size = s.job(&m, json!({"command": "size", "pty": {"cols": 80, "rows": 24}})).await;
    let mut ws = socket(&s, &format!("{}&cursor=2", path(&m, &size, "/events")), &s.admin).await;
    say(&mut ws, json!({"type": "resize", "cols": 100, "rows": 30})).await;
    assert_eq!(told(&mut ws).await["dataBase64"], STANDARD.encode("30 100\n"));
    say(&mut ws, json!({"type": "signal", "signal": "HUP"})).await;
    assert_eq!(told(&mut ws).await["signal"], 1);
}

#[tokio::test]
async fn a_socket_ends_with_its_key_the_service_or_what_is_no_frame_and_holds_a_place() {
    let s = Service::with(FakeDriver::default(), |c| c.max_requests = 4).await;
    let m = s.machine().await;
    let hang = s.job(&m, json!({"command": "hang"})).await;
    let events = path(&m, &hang, "/events");
    let user = s.key("default", KeyRole::User).await;
    let mut revoked = socket(&s, &events, user.expose()).await;
    assert_eq!(told(&mut revoked).await["type"], "started");
    assert_eq!(s.delete(&format!("/v1/keys/{}", user.id())).await.status, 204);
    assert!(matches!(frame(&mut revoked).await, Message::Close(Some(c)) if u16::from(c.code) == 1008));
    drop(revoked);
    let mut large = socket(&s, &events, &s.admin).await;
    told(&mut large).await;
    large.send(Message::text("x".repeat(200_000))).await.unwrap();
    assert!(!matches!(
        tokio::time::timeout(Duration::from_secs(5), large.next()).await.unwrap(),
        Some(Ok(Message::Text(_)))
    ));
    drop(large);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let mut open = Vec::new();
    for _ in 0..3 {
        let mut ws = socket(&s, &events, &s.admin).await;
        assert_eq!(told(&mut ws).await["type"], "started");
        open.push(ws);
    }
    // A handshake has the place of its request beside that of its socket.
    let mut request = format!("ws://{}{events}", s.address).into_client_request().unwrap();
    request.headers_mut().insert("authorization", format!("Bearer {}", s.admin).parse().unwrap());
    let refused = client_async(request, TcpStream::connect(s.address).await.unwrap()).await.unwrap_err();
    assert!(
        matches!(refused, tokio_tungstenite::tungstenite::Error::Http(r) if r.status() == 503),
        "three sockets, three places"
    );
    let (_, _, finished) = s.end().await;
    assert!(finished);
    for mut ws in open {
        assert!(matches!(frame(&mut ws).await, Message::Close(Some(c)) if u16::from(c.code) == 1012));
    }
}
