//! Directories, trees and watches over HTTP.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{Machine, Reply, Service};
use bytes::Bytes;
use http::{Method, Request};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use mainbrella_engine::ExitReport;
use serde_json::{Value, json};
use tokio::net::TcpStream;

async fn put(s: &Service, m: &Machine, path: &str) {
    s.put(&format!("{}&path={path}", m.path("/files/content")), "x").await.ok();
}

async fn post(s: &Service, m: &Machine, verb: &str, body: Value) -> Reply {
    s.post(&m.path(&format!("/files/{verb}")), body).await
}

#[tokio::test]
async fn a_directory_comes_in_pages_and_odd_names_are_told() {
    let s = Service::start().await;
    let m = s.machine().await;
    for n in 0..120 {
        put(&s, &m, &format!("/d/f{n}")).await;
    }
    put(&s, &m, "/d/re%22port%0A").await;
    let at = |q: &str| format!("{}&{q}", m.path("/files/list"));
    let page = s.get(&at("path=/d")).await.ok();
    assert_eq!((page["entries"].as_array().unwrap().len(), &page["nextOffset"]), (100, &json!(100)));
    let rest = s.get(&at("path=/d/&offset=100&limit=1000")).await.ok();
    assert_eq!((rest["entries"].as_array().unwrap().len(), &rest["nextOffset"]), (21, &Value::Null));
    let first = &page["entries"][0];
    let expected = json!({"name": "f0", "path": "/d/f0", "nameBase64": null, "type": "file", "size": 1, "mode": "0644",
        "uid": 0, "gid": 0, "mtime": 1_790_000_000, "symlinkTarget": null});
    assert_eq!(first, &expected);
    assert_eq!(rest["entries"][20]["path"], "/d/re\"port\n");
    for (bad, code) in [
        ("path=/none", "file_not_found"),
        ("path=/d/f1", "file_error"),
        ("path=d", "invalid_request"),
        ("", "invalid_request"),
        ("path=/d&limit=0", "invalid_request"),
        ("path=/d&limit=1001", "invalid_request"),
        ("path=/d&offset=-1", "invalid_request"),
        ("path=/d&offset=1000001", "invalid_request"),
        ("path=/d&what=1", "invalid_request"),
    ] {
        assert_eq!(s.get(&at(bad)).await.code(), code, "{bad}");
    }
    s.driver.guest.hostile_listing.store(true, Ordering::SeqCst);
    assert_eq!(s.get(&at("path=/d")).await.code(), "guest_unavailable");
}

#[tokio::test]
async fn names_and_modes_change_by_the_contract() {
    let s = Service::start().await;
    let m = s.machine().await;
    let made = post(&s, &m, "mkdir", json!({"path": "/w"})).await.ok();
    assert_eq!((&made["type"], &made["mode"], &made["name"]), (&json!("directory"), &json!("0755"), &json!("w")));
    assert_eq!(post(&s, &m, "mkdir", json!({"path": "/w"})).await.code(), "file_exists");
    assert_eq!(
        post(&s, &m, "mkdir", json!({"path": "/w", "recursive": true, "mode": "0700"})).await.ok()["mode"],
        "0755"
    );
    assert_eq!(post(&s, &m, "mkdir", json!({"path": "/a/b"})).await.code(), "file_not_found");
    put(&s, &m, "/w/a").await;
    put(&s, &m, "/w/b").await;
    assert_eq!(post(&s, &m, "move", json!({"source": "/w/a", "destination": "/w/b"})).await.code(), "file_exists");
    let moved = post(&s, &m, "move", json!({"source": "/w/a", "destination": "/w/c"})).await.ok();
    assert_eq!((&moved["path"], &moved["type"]), (&json!("/w/c"), &json!("file")));
    assert_eq!(post(&s, &m, "chmod", json!({"path": "/w/c", "mode": "0640"})).await.ok()["mode"], "0640");
    let stat = s.get(&format!("{}&path=/w/c&followSymlinks=true", m.path("/files/stat"))).await.ok();
    assert_eq!((&stat["mode"], &stat["size"]), (&json!("0640"), &json!(1)));
    assert_eq!(s.get(&format!("{}&path=/w/a", m.path("/files/stat"))).await.code(), "file_not_found");
    assert_eq!(s.get(&format!("{}&path=/", m.path("/files/stat"))).await.ok()["name"], "/");
    for (verb, bad) in [
        ("mkdir", json!({"path": "/"})),
        ("mkdir", json!({"path": "w"})),
        ("mkdir", json!({"path": "/x", "mode": "9"})),
        ("mkdir", json!({"path": "/x", "parents": true})),
        ("move", json!({"source": "/", "destination": "/x"})),
        ("move", json!({"source": "/w", "destination": "/w/.."})),
        ("move", json!({"source": "/w"})),
        ("chmod", json!({"path": "/.", "mode": "0755"})),
        ("chmod", json!({"path": "/w", "mode": "rwx"})),
        ("remove", json!({"path": "//"})),
        ("remove", json!({"path": "/a\u{0}b"})),
    ] {
        assert_eq!(post(&s, &m, verb, bad.clone()).await.code(), "invalid_request", "{verb} {bad}");
    }
}

#[tokio::test]
async fn a_removal_that_goes_half_way_says_what_is_left() {
    let s = Service::start().await;
    let m = s.machine().await;
    for path in ["/t/a", "/t/sub/b", "/t/sub/immutable"] {
        put(&s, &m, path).await;
    }
    assert_eq!(post(&s, &m, "remove", json!({"path": "/t"})).await.code(), "file_error");
    let done = post(&s, &m, "remove", json!({"path": "/t", "recursive": true})).await.ok();
    let expected = json!({"removed": 2, "remaining": ["/t/sub/immutable"], "remainingCount": 1, "reason": "operation not permitted"});
    assert_eq!(done, expected);
    put(&s, &m, "/u").await;
    let done = post(&s, &m, "remove", json!({"path": "/u"})).await.ok();
    assert_eq!(done, json!({"removed": 1, "remaining": [], "remainingCount": 0, "reason": null}));
    assert_eq!(post(&s, &m, "remove", json!({"path": "/u"})).await.code(), "file_not_found");
}

#[tokio::test]
async fn trees_go_both_ways_and_a_broken_one_is_cut_off() {
    let s = Service::start().await;
    let m = s.machine().await;
    let at = |path: &str| format!("{}&path={path}", m.path("/files/tree"));
    let archive: Vec<u8> = (0..2_000_000u32).map(|i| (i % 251) as u8).collect();
    let done = s.put(&at("/t"), archive.clone()).await.ok();
    assert_eq!(done, json!({"entries": 1, "bytes": 2_000_000, "skipped": 0}));
    let back = s.get(&at("/t")).await;
    assert_eq!(back.headers["content-type"], "application/x-tar");
    assert!(back.body == archive);
    assert_eq!(s.put(&at("/t"), "evil").await.code(), "invalid_request");
    assert_eq!(s.get(&at("/none")).await.code(), "file_not_found");
    s.driver.guest.broken_tree.store(true, Ordering::SeqCst);
    let stream = TcpStream::connect(s.address).await.unwrap();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request = s.request(Method::GET, &at("/t")).body(Full::new(Bytes::new())).unwrap();
    let reply = sender.send_request(request).await.unwrap();
    assert_eq!(reply.status(), 200);
    assert!(reply.into_body().collect().await.is_err(), "a broken tree does not end as a whole one");
}

/// An open stream of events.
struct Events {
    body: hyper::body::Incoming,
    rest: String,
}

impl Events {
    async fn open(s: &Service, path: &str, bearer: &str) -> Self {
        let stream = TcpStream::connect(s.address).await.unwrap();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let request = Request::builder().uri(path).header("host", "localhost").header("authorization", bearer);
        let reply = sender.send_request(request.body(Full::new(Bytes::new())).unwrap()).await.unwrap();
        assert_eq!(
            (reply.status().as_u16(), &reply.headers()["content-type"]),
            (200, &"text/event-stream".parse().unwrap())
        );
        Self { body: reply.into_body(), rest: String::new() }
    }

    /// The next event; `None` at the end.
    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some((frame, rest)) = self.rest.split_once("\n\n") {
                let (frame, rest) = (frame.to_owned(), rest.to_owned());
                self.rest = rest;
                match frame.strip_prefix("data: ") {
                    Some(data) => return Some(serde_json::from_str(data).unwrap()),
                    None => assert!(frame.starts_with(':'), "{frame}"),
                }
                continue;
            }
            let frame = tokio::time::timeout(Duration::from_secs(15), self.body.frame()).await.expect("in time")?;
            self.rest.push_str(std::str::from_utf8(&frame.unwrap().into_data().unwrap()).unwrap());
        }
    }
}

#[tokio::test]
async fn a_watch_is_told_as_events_and_ends_with_its_reason() {
    let s = Service::start().await;
    let m = s.machine().await;
    post(&s, &m, "mkdir", json!({"path": "/w"})).await.ok();
    let made = s.post("/v1/keys", json!({"name": "ci", "role": "user"})).await.ok();
    let (admin, user) = (format!("Bearer {}", s.admin), format!("Bearer {}", made["secret"].as_str().unwrap()));
    let path = format!("{}&path=/w", m.path("/files/watch"));
    let mut one = Events::open(&s, &path, &admin).await;
    let mut two = Events::open(&s, &format!("{path}&recursive=false"), &user).await;
    for events in [&mut one, &mut two] {
        assert_eq!(events.next().await.unwrap(), json!({"type": "ready", "path": "/w"}));
    }
    put(&s, &m, "/w/sub/a%0Ab").await;
    put(&s, &m, "/w/b").await;
    post(&s, &m, "move", json!({"source": "/w/b", "destination": "/w/c"})).await.ok();
    assert_eq!(one.next().await.unwrap(), json!({"type": "created", "path": "/w/sub/a\nb"}));
    for events in [&mut one, &mut two] {
        assert_eq!(events.next().await.unwrap(), json!({"type": "created", "path": "/w/b"}));
        assert_eq!(events.next().await.unwrap(), json!({"type": "renamed", "path": "/w/b", "newPath": "/w/c"}));
    }
    // A revoked key ends its watch; the other goes on.
    assert_eq!(s.delete(&format!("/v1/keys/{}", made["id"].as_str().unwrap())).await.status, 204);
    let last = two.next().await.unwrap();
    assert_eq!((&last["type"], &last["code"]), (&json!("error"), &json!("unauthenticated")));
    assert!(two.next().await.is_none());
    post(&s, &m, "remove", json!({"path": "/w", "recursive": true})).await.ok();
    while one.next().await.unwrap()["type"] != "ended" {}
    assert!(one.next().await.is_none());
    assert_eq!(s.get(&path).await.code(), "file_not_found");
    // A machine that dies ends it with an error, soon.
    post(&s, &m, "mkdir", json!({"path": "/w"})).await.ok();
    let mut three = Events::open(&s, &path, &admin).await;
    three.next().await.unwrap();
    let key = s.state.store.living("local").await.unwrap()[0].key;
    let begin = std::time::Instant::now();
    s.driver.kill(&key, ExitReport::Vmm("it was killed".into()));
    // (The scripted guest may answer once more, which is told as an overflow.)
    let mut last = three.next().await.unwrap();
    while last["type"] == "overflow" {
        last = three.next().await.unwrap();
    }
    assert_eq!((&last["type"], &last["code"]), (&json!("error"), &json!("machine_not_running")));
    assert!(begin.elapsed() < Duration::from_secs(3) && three.next().await.is_none());
    // A service that goes down lets nobody wait.
    let n = s.machine().await;
    post(&s, &n, "mkdir", json!({"path": "/w"})).await.ok();
    let mut four = Events::open(&s, &format!("{}&path=/w", n.path("/files/watch")), &admin).await;
    four.next().await.unwrap();
    s.state.closing.cancel();
    assert_eq!(four.next().await.unwrap()["code"], "shutting_down");
    assert!(four.next().await.is_none());
}
