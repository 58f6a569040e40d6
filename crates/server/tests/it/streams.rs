//! What every stream of events has in common: its headers, and an end that is one when the service goes down or the key is
//! revoked.

use std::time::{Duration, Instant};

use crate::common::{Machine, Service};
use bytes::Bytes;
use http::{Method, Request};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;

/// Every kind of stream, the event it begins with, and the one that is its last word when it has to end early.
const KINDS: [(&str, &str, Option<&str>); 3] =
    [("job", "started", None), ("watch", "ready", Some("error")), ("code", "stdout", Some("failed"))];

struct Open {
    body: Incoming,
    text: String,
    driving: tokio::task::JoinHandle<hyper::Result<()>>,
}

impl Open {
    async fn new(s: &Service, key: &str, m: &Machine, kind: &str) -> Self {
        let (method, path, body) = match kind {
            "job" => {
                let id = s.job(m, json!({"command": ["hang"]})).await["id"].as_str().unwrap().to_owned();
                (Method::GET, m.path(&format!("/jobs/{id}/events")), Value::Null)
            }
            "watch" => (Method::GET, format!("{}&path=/w", m.path("/files/watch")), Value::Null),
            _ => {
                let id = s.post(&m.path("/contexts"), json!({"language": "python"})).await.ok()["id"].clone();
                let path = m.path(&format!("/contexts/{}/run", id.as_str().unwrap()));
                (Method::POST, path, json!({"code": "print begun\nsleep 60000"}))
            }
        };
        let stream = TcpStream::connect(s.address).await.unwrap();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        let driving = tokio::spawn(connection);
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", s.address.to_string())
            .header("authorization", format!("Bearer {key}"))
            .header("accept", "text/event-stream");
        let mut text = Bytes::new();
        if !body.is_null() {
            request = request.header("content-type", "application/json");
            text = body.to_string().into();
        }
        let reply = sender.send_request(request.body(Full::new(text)).unwrap()).await.unwrap();
        assert_eq!(reply.status(), 200, "{kind}");
        for (name, value) in
            [("content-type", "text/event-stream"), ("x-accel-buffering", "no"), ("cache-control", "no-store")]
        {
            assert_eq!(reply.headers()[name], value, "{kind}");
        }
        Self { body: reply.into_body(), text: String::new(), driving }
    }

    /// The data of the next event; `None` at the proper end.
    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some((block, rest)) = self.text.split_once("\n\n") {
                let data =
                    block.lines().find_map(|l| l.strip_prefix("data: ")).map(|d| serde_json::from_str(d).unwrap());
                self.text = rest.to_owned();
                match data {
                    Some(data) => return Some(data),
                    None => continue,
                }
            }
            let frame = tokio::time::timeout(Duration::from_secs(20), self.body.frame()).await.expect("in time");
            // A connection that is cut is an error here, and no end.
            let data = frame?.expect("a proper end").into_data().unwrap();
            self.text.push_str(std::str::from_utf8(&data).unwrap());
        }
    }

    async fn ends_with(mut self, kind: &str, last: Option<&str>, code: &str) {
        if let Some(last) = last {
            let event = self.next().await.unwrap_or_else(|| panic!("{kind} says why it ends"));
            assert_eq!((event["type"].as_str(), event["code"].as_str()), (Some(last), Some(code)), "{kind}");
            assert!(event["hint"].as_str().is_some_and(|h| h.ends_with('.')), "{event}");
        }
        assert!(self.next().await.is_none(), "{kind}");
        drop(self.body);
        self.driving.abort();
    }
}

async fn machine(s: &Service) -> Machine {
    let m = s.machine().await;
    s.post(&m.path("/files/mkdir"), json!({"path": "/w"})).await.ok();
    m
}

#[tokio::test]
async fn every_stream_ends_properly_when_the_service_goes_down() {
    let s = Service::start().await;
    let m = machine(&s).await;
    let mut open = Vec::new();
    for (kind, first, last) in KINDS {
        let mut stream = Open::new(&s, &s.admin, &m, kind).await;
        assert_eq!(stream.next().await.unwrap()["type"], first, "{kind}");
        open.push((kind, last, stream));
    }
    let begin = Instant::now();
    let reading = tokio::spawn(async move {
        for (kind, last, stream) in open {
            stream.ends_with(kind, last, "shutting_down").await;
        }
    });
    let (_dir, _driver, finished) = s.end().await;
    reading.await.unwrap();
    assert!(finished && begin.elapsed() < Duration::from_secs(4), "nobody was cut off: {:?}", begin.elapsed());
}

#[tokio::test]
async fn every_stream_ends_when_its_key_is_revoked() {
    let s = Service::start().await;
    let m = machine(&s).await;
    for (kind, first, last) in KINDS {
        let made = s.post("/v1/keys", json!({"name": "ci", "role": "user"})).await.ok();
        let mut stream = Open::new(&s, made["secret"].as_str().unwrap(), &m, kind).await;
        assert_eq!(stream.next().await.unwrap()["type"], first, "{kind}");
        assert_eq!(s.delete(&format!("/v1/keys/{}", made["id"].as_str().unwrap())).await.status, 204);
        stream.ends_with(kind, last, "unauthenticated").await;
    }
}
