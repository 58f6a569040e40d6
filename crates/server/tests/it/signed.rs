//! Signed URLs: what they open, and everything that ends them.

use std::sync::Arc;

use crate::common::{Machine, Reply, Service};
use bytes::Bytes;
use http::{Method, Request};
use mainbrella_engine::fake::FakeDriver;
use mainbrella_store::KeyRole;
use serde_json::{Value, json};

/// The path of a URL that was made for this body.
async fn url(s: &Service, m: &Machine, bearer: &str, body: Value) -> String {
    let request = Request::builder()
        .method(Method::POST)
        .uri(m.path("/files/urls"))
        .header("host", s.address.to_string())
        .header("content-type", "application/json")
        .header("authorization", bearer)
        .body(Bytes::from(body.to_string()))
        .unwrap();
    let made = s.send(request).await.ok();
    assert_eq!(made["method"], body["method"]);
    let prefix = format!("http://{}", s.address);
    made["url"].as_str().unwrap().strip_prefix(&prefix).expect("an address that is ours").to_owned()
}

/// A request without a key.
async fn bare(s: &Service, method: Method, path: &str, body: &'static str) -> Reply {
    let request = Request::builder().method(method).uri(path).header("host", s.address.to_string());
    s.send(request.body(Bytes::from(body)).unwrap()).await
}

fn admin(s: &Service) -> String {
    format!("Bearer {}", s.admin)
}

#[tokio::test]
async fn a_url_reads_or_writes_one_file_without_a_key() {
    let s = Service::start().await;
    let m = s.machine().await;
    let up = url(&s, &m, &admin(&s), json!({"path": "/tmp/a b\"é", "method": "PUT", "maxBytes": 10})).await;
    let down = url(&s, &m, &admin(&s), json!({"path": "/tmp/a b\"é", "method": "GET", "expiresInSeconds": 3600})).await;
    assert_eq!(bare(&s, Method::GET, &down, "").await.code(), "file_not_found");
    assert_eq!(bare(&s, Method::PUT, &up, "0123456789").await.ok(), json!({"size": 10}));
    assert_eq!(bare(&s, Method::PUT, &up, "0123456789x").await.code(), "payload_too_large");
    let read = bare(&s, Method::GET, &down, "").await;
    assert_eq!(
        (read.status.as_u16(), &read.body[..], &read.headers["x-mainbrella-size"]),
        (200, &b"0123456789"[..], &"10".parse().unwrap())
    );
    assert_eq!(read.headers["content-disposition"], "attachment; filename*=UTF-8''a%20b%22%C3%A9");
    assert_eq!(read.headers["cache-control"], "no-store");
    assert_eq!(bare(&s, Method::GET, &format!("{down}?offset=3&length=4"), "").await.body, "3456");
    assert_eq!(bare(&s, Method::GET, &format!("{down}?path=/etc/shadow"), "").await.code(), "invalid_request");
    // Each only for its method, and for nothing else.
    assert_eq!(bare(&s, Method::GET, &up, "").await.code(), "unauthenticated");
    assert_eq!(bare(&s, Method::PUT, &down, "x").await.code(), "unauthenticated");
    assert_eq!(bare(&s, Method::GET, &down, "").await.body, "0123456789");
}

#[tokio::test]
async fn what_was_tampered_with_is_refused() {
    let s = Service::start().await;
    let m = s.machine().await;
    let down = url(&s, &m, &admin(&s), json!({"path": "/tmp/f", "method": "GET"})).await;
    let token = down.strip_prefix("/v1/files/").unwrap();
    let (text, seal) = token.split_once('.').unwrap();
    let other = url(&s, &m, &admin(&s), json!({"path": "/tmp/g", "method": "GET"})).await;
    let other_text = other.strip_prefix("/v1/files/").unwrap().split('.').next().unwrap();
    for bad in [
        text.to_owned(),
        format!("{text}."),
        format!(".{seal}"),
        format!("{other_text}.{seal}"),
        format!("{text}A.{seal}"),
        format!("{text}.{}", &seal[..seal.len() - 1]),
        format!("{text}.{seal}.{seal}"),
        "x".repeat(50_000),
        "%00".to_owned(),
    ] {
        let reply = bare(&s, Method::GET, &format!("/v1/files/{bad}"), "").await;
        assert_eq!((reply.status.as_u16(), reply.code().as_str()), (401, "unauthenticated"), "{bad:.80}");
    }
    assert_eq!(bare(&s, Method::GET, &down, "").await.code(), "file_not_found", "the right one is not refused");
    // An API key is no token, and a token no API key.
    let request = Request::builder()
        .uri("/v1/machines")
        .header("host", "localhost")
        .header("authorization", format!("Bearer {token}"));
    assert_eq!(s.send(request.body(Bytes::new()).unwrap()).await.code(), "unauthenticated");
}

#[tokio::test]
async fn a_url_ends_with_its_key_its_machine_and_its_time() {
    let s = Service::start().await;
    let m = Machine::of(&s.post("/v1/machines", json!({"catalogId": "python", "slot": "a"})).await.ok());
    s.put(&format!("{}&path=/f", m.path("/files/content")), "x").await.ok();
    let user = s.key("default", KeyRole::User).await;
    let bearer = format!("Bearer {}", user.expose());
    let by_user = url(&s, &m, &bearer, json!({"path": "/f", "method": "GET"})).await;
    let by_admin = url(&s, &m, &admin(&s), json!({"path": "/f", "method": "GET"})).await;
    let soon = url(&s, &m, &admin(&s), json!({"path": "/f", "method": "GET", "expiresInSeconds": 10})).await;
    assert_eq!(bare(&s, Method::GET, &by_user, "").await.body, "x");
    assert_eq!(s.delete(&format!("/v1/keys/{}", user.id())).await.status, 204);
    assert_eq!(bare(&s, Method::GET, &by_user, "").await.code(), "unauthenticated");
    assert_eq!(bare(&s, Method::GET, &soon, "").await.body, "x");
    tokio::time::sleep(std::time::Duration::from_millis(10_100)).await;
    let expired = bare(&s, Method::GET, &soon, "").await.error();
    assert!(expired.message.contains("expired"), "{expired:?}");
    // Another generation in the slot is another machine.
    s.post(&m.path("/stop"), json!({})).await.ok();
    assert_eq!(bare(&s, Method::GET, &by_admin, "").await.code(), "machine_not_running");
    let n = Machine::of(&s.post("/v1/machines", json!({"catalogId": "python", "slot": "a"})).await.ok());
    s.put(&format!("{}&path=/f", n.path("/files/content")), "secret of the newer one").await.ok();
    assert_eq!(bare(&s, Method::GET, &by_admin, "").await.code(), "generation_mismatch");
}

#[tokio::test]
async fn asking_is_checked_and_a_url_outlives_a_restart() {
    let s = Service::start().await;
    let m = s.machine().await;
    for bad in [
        json!({"path": "f", "method": "GET"}),
        json!({"path": "/f", "method": "DELETE"}),
        json!({"path": "/f", "method": "get"}),
        json!({"path": "/f", "method": "GET", "expiresInSeconds": 9}),
        json!({"path": "/f", "method": "GET", "expiresInSeconds": 3601}),
        json!({"path": "/f", "method": "GET", "maxBytes": 1}),
        json!({"path": "/f", "method": "PUT", "maxBytes": 5_368_709_121u64}),
        json!({"path": "/f", "method": "PUT", "host": "x"}),
        json!({"path": "/f"}),
    ] {
        assert_eq!(s.post(&m.path("/files/urls"), bad.clone()).await.code(), "invalid_request", "{bad}");
    }
    let behind = s
        .post_with(&m.path("/files/urls"), json!({"path": "/f", "method": "GET"}), &[("x-forwarded-proto", "https")])
        .await
        .ok();
    assert!(behind["url"].as_str().unwrap().starts_with("https://127.0.0.1:"));
    let until = behind["expiresAt"].as_str().unwrap().parse::<mainbrella_types::CreatedAt>().unwrap();
    let left = until.0.0 - s.state.now().0;
    assert!((880_000..=900_000).contains(&left), "{left}");
    s.put(&format!("{}&path=/f", m.path("/files/content")), "x").await.ok();
    let down = url(&s, &m, &admin(&s), json!({"path": "/f", "method": "GET"})).await;
    let (dir, driver, _) = s.end().await;
    let s = Service::on(dir, driver, |_| {}).await;
    assert_eq!(bare(&s, Method::GET, &down, "").await.body, "x");
    let stranger = Service::on(Arc::new(tempfile::TempDir::new().unwrap()), FakeDriver::default(), |_| {}).await;
    assert_eq!(bare(&stranger, Method::GET, &down, "").await.code(), "unauthenticated");
}
