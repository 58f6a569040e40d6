//! Previews through the whole service: issued, listed, renewed, revoked; and what they lead to.
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{self, Machine, Reply, Service};
use bytes::Bytes;
use http::Request;
use mainbrella_engine::fake::FakeDriver;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const PORT: u16 = 3000;

/// In every machine a server that says hello, or on `/stream` something every 50 ms.
fn serve_hello(driver: &FakeDriver) {
    driver.ports.listen(
        PORT,
        Arc::new(|mut stream| {
            tokio::spawn(async move {
                let mut head = vec![0; 4096];
                let n = stream.read(&mut head).await.unwrap_or(0);
                if !head[..n].starts_with(b"GET /stream ") {
                    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello").await;
                    return;
                }
                let mut text: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\n";
                while stream.write_all(text).await.is_ok() {
                    text = b"data: 2\n\n";
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            });
        }),
    );
}

async fn service() -> Service {
    let s = Service::start().await;
    serve_hello(&s.driver);
    s
}

/// Goes where a URL of a preview leads.
async fn visit(s: &Service, url: &str) -> Reply {
    let host = url.strip_prefix("http://").unwrap().split('/').next().unwrap();
    let path = &url["http://".len() + host.len()..];
    let request = Request::get(path).header("host", host).body(Bytes::new()).unwrap();
    common::send(s.ingress.unwrap(), request).await
}

fn text(v: &Value, name: &str) -> String {
    v[name].as_str().unwrap_or_else(|| panic!("{name} in {v}")).to_owned()
}

async fn issue(s: &Service, machine: &Machine) -> Value {
    let reply = s.post(&machine.path("/previews"), json!({"port": PORT})).await;
    assert_eq!(reply.status, 201, "{:?}", reply.body);
    reply.json()
}

#[tokio::test]
async fn a_preview_leads_to_its_port_by_both_urls_until_it_is_revoked() {
    let s = service().await;
    let machine = s.machine().await;
    let before = s.state.now().0;
    let preview = issue(&s, &machine).await;
    assert_eq!(preview["port"], PORT);
    let ttl = preview["expiresAt"].as_i64().unwrap() - before;
    assert!((900_000..905_000).contains(&ttl), "{ttl}");
    let (url, path_url) = (text(&preview, "url"), text(&preview, "pathUrl"));
    for url in [&url, &path_url] {
        let reply = visit(&s, url).await;
        assert_eq!((reply.status.as_u16(), &reply.body[..]), (200, &b"hello"[..]), "{url}");
    }
    let listed = s.get(&machine.path("/previews")).await;
    assert_eq!(listed.ok()["previews"][0]["id"], preview["id"]);
    let token = url.strip_prefix("http://").unwrap().split('.').next().unwrap();
    assert!(!String::from_utf8_lossy(&listed.body).contains(token), "metadata only");
    let at = machine.path(&format!("/previews/{}", text(&preview, "id")));
    assert_eq!(s.delete(&at).await.status, 204);
    assert_eq!(visit(&s, &url).await.status, 410);
    assert_eq!(visit(&s, &path_url).await.status, 410);
    assert_eq!(s.get(&machine.path("/previews")).await.ok()["previews"], json!([]));
    assert_eq!(s.delete(&at).await.status, 204, "idempotent");
    assert_eq!(s.delete(&machine.path("/previews/pv-other")).await.code(), "not_found");
}

#[tokio::test]
async fn what_is_asked_for_is_checked() {
    let s = service().await;
    let machine = s.machine().await;
    for bad in [
        json!({}),
        json!({"port": 80}),
        json!({"port": 1023}),
        json!({"port": 65536}),
        json!({"port": -1}),
        json!({"port": "3000"}),
        json!({"port": 3000, "ttlSeconds": 59}),
        json!({"port": 3000, "ttlSeconds": 3601}),
        json!({"port": 3000, "more": 1}),
    ] {
        assert_eq!(s.post(&machine.path("/previews"), bad.clone()).await.code(), "invalid_request", "{bad}");
    }
    let other = Machine { created_at: "2020-01-01T00:00:00.000Z".into(), ..machine.clone() };
    assert_eq!(s.post(&other.path("/previews"), json!({"port": 3000})).await.code(), "generation_mismatch");
    let short = s.post("/v1/machines", json!({"catalogId": "python", "ttlSeconds": 100})).await.ok();
    let preview = issue(&s, &Machine::of(&short)).await;
    assert_eq!(preview["expiresAt"], short["hardDeadlineMs"], "clipped to the machine's own end");
    for _ in 0..8 {
        issue(&s, &machine).await;
    }
    assert_eq!(s.post(&machine.path("/previews"), json!({"port": PORT})).await.code(), "preview_limit");
    assert_eq!(s.get(&machine.path("/previews")).await.ok()["previews"].as_array().unwrap().len(), 8);
    assert!(s.post(&machine.path("/stop"), json!({})).await.status.is_success());
    assert_eq!(s.post(&machine.path("/previews"), json!({"port": PORT})).await.code(), "machine_not_running");
}

#[tokio::test]
async fn a_lost_response_is_asked_for_again_under_its_key() {
    let s = service().await;
    let machine = s.machine().await;
    let key = [("idempotency-key", "one")];
    let path = machine.path("/previews");
    let first = s.post_with(&path, json!({"port": PORT}), &key).await;
    assert_eq!(first.status, 201);
    let again = s.post_with(&path, json!({"port": PORT, "ttlSeconds": 900}), &key).await;
    assert_eq!((again.status.as_u16(), again.headers["idempotency-replayed"].to_str().unwrap()), (200, "true"));
    assert_eq!(again.json(), first.json(), "the URL too");
    assert_eq!(s.post_with(&path, json!({"port": 3001}), &key).await.code(), "idempotency_conflict");
    assert_eq!(s.get(&path).await.ok()["previews"].as_array().unwrap().len(), 1);
    // Ten at once are one.
    let ten = (0..10).map(|_| s.post_with(&path, json!({"port": PORT}), &[("idempotency-key", "two")]));
    let urls: std::collections::HashSet<String> =
        futures::future::join_all(ten).await.iter().map(|r| text(&r.ok(), "url")).collect();
    assert_eq!(urls.len(), 1);
    // The key that URLs are made with is gone: the preview is there, its URL is not.
    let id = text(&first.json(), "id");
    let (dir, driver, _) = s.end().await;
    std::fs::remove_file(dir.path().join("keys/previews.key")).unwrap();
    let s = Service::on(dir, driver, |_| {}).await;
    let reply = s.post_with(&path, json!({"port": PORT}), &key).await;
    let body: Value = serde_json::from_slice(&reply.body).unwrap();
    assert_eq!(
        (body["code"].as_str().unwrap(), body["previewId"].as_str().unwrap()),
        ("preview_reconciliation_required", id.as_str())
    );
    let at = machine.path(&format!("/previews/{id}"));
    assert_eq!(s.delete(&at).await.status, 204);
    assert_eq!(s.post_with(&path, json!({"port": PORT}), &key).await.code(), "preview_ended");
    assert_eq!(s.post(&at.replace("?", "/renew?"), json!({})).await.code(), "preview_ended");
}

#[tokio::test]
async fn an_hour_is_renewed_without_another_url() {
    let s = service().await;
    let machine = s.machine().await;
    let made = s.post(&machine.path("/previews"), json!({"port": PORT, "ttlSeconds": 60})).await.ok();
    let at = machine.path(&format!("/previews/{}/renew", text(&made, "id")));
    let renewed = s.post(&at, json!({"ttlSeconds": 3600})).await.ok();
    let moved = renewed["expiresAt"].as_i64().unwrap() - made["expiresAt"].as_i64().unwrap();
    // The machine's own hour began a moment earlier.
    assert!((3_530_000..=3_545_000).contains(&moved), "{moved}");
    assert!(renewed.get("url").is_none() && renewed.get("pathUrl").is_none());
    let shorter = s.post(&at, json!({"ttlSeconds": 60})).await.ok();
    assert_eq!(shorter["expiresAt"], renewed["expiresAt"]);
    assert_eq!(visit(&s, &text(&made, "url")).await.status, 200);
    for (rest, body, code) in [
        ("/previews/pv-other/renew", json!({}), "not_found"),
        ("/previews/pv-other/renew", json!({"ttlSeconds": 5}), "invalid_request"),
    ] {
        assert_eq!(s.post(&machine.path(rest), body).await.code(), code);
    }
}

/// Reads a stream until it breaks off; how long that took.
async fn until_broken(s: &Service, url: &str, act: impl Future<Output = ()>) -> Duration {
    let host = url.strip_prefix("http://").unwrap().trim_end_matches('/');
    let mut stream = TcpStream::connect(s.ingress.unwrap()).await.unwrap();
    stream.write_all(format!("GET /stream HTTP/1.1\r\nhost: {host}\r\n\r\n").as_bytes()).await.unwrap();
    let mut buffer = [0; 4096];
    let n = stream.read(&mut buffer).await.unwrap();
    assert!(buffer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&buffer[..n]));
    act.await;
    let begin = Instant::now();
    let ended = async { while matches!(stream.read(&mut buffer).await, Ok(n) if n > 0) {} };
    tokio::time::timeout(Duration::from_secs(5), ended).await.expect("it ends");
    begin.elapsed()
}

#[tokio::test]
async fn revoking_stopping_and_dying_cut_what_is_open_within_a_second() {
    let s = service().await;
    for how in ["revoke", "stop", "kill"] {
        let machine = s.machine().await;
        let preview = issue(&s, &machine).await;
        let url = text(&preview, "url");
        let act = async {
            match how {
                "revoke" => {
                    let at = machine.path(&format!("/previews/{}", text(&preview, "id")));
                    assert_eq!(s.delete(&at).await.status, 204);
                }
                "stop" => assert!(s.post(&machine.path("/stop"), json!({})).await.status.is_success()),
                _ => {
                    let slot = machine.id.parse().unwrap();
                    let project = mainbrella_types::ProjectId::default_project();
                    let key = s.state.store.newest_in_slot(&project, &slot).await.unwrap().unwrap().key;
                    s.driver.kill(&key, mainbrella_engine::ExitReport::Vmm("killed".into()));
                }
            }
        };
        let took = until_broken(&s, &url, act).await;
        assert!(took < Duration::from_secs(1), "{how}: {took:?}");
        let after = visit(&s, &url).await;
        assert_eq!(after.status, 410, "{how}");
    }
}

#[tokio::test]
async fn a_preview_ends_with_its_time() {
    let s = service().await;
    // A machine whose hard deadline is near clips its previews to it.
    let machine = Machine::of(&s.post("/v1/machines", json!({"catalogId": "python", "ttlSeconds": 10})).await.ok());
    let preview = issue(&s, &machine).await;
    let url = text(&preview, "url");
    let left = preview["expiresAt"].as_i64().unwrap() - s.state.now().0;
    let took = until_broken(&s, &url, tokio::time::sleep(Duration::from_millis(left as u64))).await;
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert_eq!(visit(&s, &url).await.status, 410);
}

#[tokio::test]
async fn previews_survive_the_service_and_die_with_their_machine_meanwhile() {
    let s = service().await;
    let (kept, lost) = (s.machine().await, s.machine().await);
    let (to_kept, to_lost) = (issue(&s, &kept).await, issue(&s, &lost).await);
    let (project, slot) = (mainbrella_types::ProjectId::default_project(), lost.id.parse().unwrap());
    let key = s.state.store.newest_in_slot(&project, &slot).await.unwrap().unwrap().key;
    let (dir, driver, _) = s.end().await;
    driver.kill(&key, mainbrella_engine::ExitReport::Vmm("killed".into()));
    let s = Service::on(dir, driver, |_| {}).await;
    let moved = |v: &Value| {
        let url = text(v, "pathUrl");
        let path = url.splitn(4, '/').nth(3).unwrap().to_owned();
        format!("http://{}/{path}", s.ingress.unwrap())
    };
    assert_eq!(visit(&s, &moved(&to_kept)).await.body, "hello");
    let gone = visit(&s, &moved(&to_lost)).await.status.as_u16();
    assert!(gone == 404 || gone == 410, "{gone}");
}

#[tokio::test]
async fn where_nothing_is_issued_what_exists_is_listed_and_revoked() {
    let s = service().await;
    let machine = s.machine().await;
    let preview = issue(&s, &machine).await;
    assert_eq!(s.get("/v1/capabilities").await.ok()["previews"]["supported"], true);
    let (dir, driver, _) = s.end().await;
    let s = Service::on(dir, driver, |c| c.preview_listen = None).await;
    assert_eq!(s.get("/v1/capabilities").await.ok()["previews"]["supported"], false);
    assert_eq!(s.post(&machine.path("/previews"), json!({"port": PORT})).await.code(), "unsupported");
    assert_eq!(s.get(&machine.path("/previews")).await.ok()["previews"][0]["id"], preview["id"]);
    assert_eq!(s.delete(&machine.path(&format!("/previews/{}", text(&preview, "id")))).await.status, 204);
}

#[tokio::test]
async fn neither_tokens_nor_keys_are_kept_in_clear() {
    let s = service().await;
    let machine = s.machine().await;
    let url = text(&issue(&s, &machine).await, "url");
    let token = url.strip_prefix("http://").unwrap().split('.').next().unwrap().to_owned();
    let (dir, _, _) = s.end().await;
    fn files(dir: &std::path::Path, found: &mut Vec<std::path::PathBuf>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { files(&path, found) } else { found.push(path) }
        }
    }
    let mut all = Vec::new();
    files(dir.path(), &mut all);
    assert!(all.iter().any(|f| f.ends_with("keys/previews.key")) && all.len() >= 3);
    for file in all {
        let content = std::fs::read(&file).unwrap();
        assert!(!content.windows(token.len()).any(|w| w == token.as_bytes()), "{}", file.display());
    }
}

#[tokio::test]
async fn a_preview_of_a_paused_machine_says_so_and_leads_on_when_it_is_resumed() {
    let s = service().await;
    let machine = s.machine().await;
    let url = text(&issue(&s, &machine).await, "url");
    assert_eq!(s.post(&machine.path("/pause"), json!({})).await.status, 200);
    let reply = visit(&s, &url).await;
    assert_eq!((reply.status.as_u16(), reply.headers["x-mainbrella-preview"].to_str().unwrap()), (503, "paused"));
    assert_eq!(s.get(&machine.path("/previews")).await.ok()["previews"].as_array().unwrap().len(), 1, "it is there");
    assert_eq!(s.post(&machine.path("/resume"), json!({})).await.status, 200);
    assert_eq!(&visit(&s, &url).await.body[..], b"hello");
}
