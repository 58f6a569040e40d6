//! Creating: idempotency, slots, failures, restarts of the service.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{Machine, Service, send};
use mainbrella_engine::fake::FakeDriver;
use serde_json::{Value, json};
use tempfile::TempDir;

const KEY: (&str, &str) = ("idempotency-key", "k-1");

fn body() -> Value {
    json!({"catalogId": "python", "size": "micro", "metadata": {"a": "1"}, "ttlSeconds": 600})
}

#[tokio::test]
async fn a_machine_is_what_was_asked_for() {
    let s = Service::start().await;
    let before = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as i64;
    let reply = s.post("/v1/machines", body()).await;
    assert_eq!(reply.status, 201);
    assert!(!reply.headers.contains_key("idempotency-replayed"));
    let m = reply.json();
    assert_eq!((&m["state"], &m["catalogId"], &m["size"]), (&json!("running"), &json!("python"), &json!("micro")));
    assert_eq!(m["limits"], json!({"memoryMib": 512, "vcpus": 1, "diskMib": 4096}));
    assert_eq!(
        (&m["internet"], &m["isolation"], &m["idleTimeoutSeconds"], &m["idleDeadlineMs"]),
        (&json!(false), &json!("shared-kernel"), &Value::Null, &Value::Null)
    );
    let deadline = m["hardDeadlineMs"].as_i64().unwrap();
    assert!((before + 600_000..before + 610_000).contains(&deadline), "{deadline}");
    assert!(m["startedAtMs"].is_i64() && m["endedAtMs"].is_null() && m["reason"].is_null());
    assert_eq!(s.get(&format!("/v1/machines/{}", m["id"].as_str().unwrap())).await.ok(), m);
    assert_eq!(s.get(&Machine::of(&m).path("")).await.ok(), m);
}

#[tokio::test]
async fn the_same_key_and_body_give_the_same_machine_and_another_body_a_conflict() {
    let s = Service::start().await;
    let first = s.post_with("/v1/machines", body(), &[KEY]).await;
    assert_eq!(first.status, 201);
    let again = s.post_with("/v1/machines", body(), &[KEY]).await;
    assert_eq!((again.status.as_u16(), &again.headers["idempotency-replayed"]), (200, &"true".parse().unwrap()));
    assert_eq!(Machine::of(&again.json()).created_at, Machine::of(&first.json()).created_at);
    // Spelled differently, meant the same.
    let spelled: Value = serde_json::from_str(
        r#"{ "ttlSeconds":600, "metadata":{"a":"1"}, "persistent":false, "slot":null, "size":"micro", "catalogId":"python", "env":{} }"#,
    )
    .unwrap();
    assert_eq!(s.post_with("/v1/machines", spelled, &[KEY]).await.status, 200);
    let mut other = body();
    other["ttlSeconds"] = json!(601);
    assert_eq!(s.post_with("/v1/machines", other, &[KEY]).await.code(), "idempotency_conflict");
    assert_eq!(s.driver.alive(), 1);
    // After its end the key still names that machine, not a new one.
    let m = Machine::of(&first.json());
    assert_eq!(s.post(&m.path("/stop"), json!({})).await.ok()["outcome"], "stopped");
    let late = s.post_with("/v1/machines", body(), &[KEY]).await;
    assert_eq!((late.status.as_u16(), &late.json()["state"]), (200, &json!("stopped")));
    assert_eq!(s.driver.alive(), 0);
}

#[tokio::test]
async fn concurrent_creates_with_one_key_make_one_machine() {
    let s = Service::with(FakeDriver::new(Duration::from_millis(300)), |_| {}).await;
    let calls = (0..20).map(|_| s.post_with("/v1/machines", body(), &[KEY]));
    let replies = futures::future::join_all(calls).await;
    let made = replies.iter().filter(|r| r.status == 201).count();
    assert_eq!(made, 1);
    assert!(
        replies.iter().all(|r| r.status == 201 || (r.status == 200 && r.headers.contains_key("idempotency-replayed")))
    );
    let ids: std::collections::HashSet<String> = replies.iter().map(|r| Machine::of(&r.json()).id).collect();
    assert_eq!((ids.len(), s.driver.alive()), (1, 1));
    assert!(replies.iter().all(|r| r.json()["state"] == "running"), "a replay waits for the first to finish");
}

#[tokio::test]
async fn concurrent_creates_of_one_slot_make_one_machine() {
    let s = Service::start().await;
    let body = json!({"catalogId": "python", "slot": "mine"});
    let replies = futures::future::join_all((0..50).map(|_| s.post("/v1/machines", body.clone()))).await;
    assert_eq!(replies.iter().filter(|r| r.status == 201).count(), 1);
    assert!(replies.iter().filter(|r| r.status != 201).all(|r| r.code() == "slot_in_use"));
    assert_eq!(s.driver.alive(), 1);
}

#[tokio::test]
async fn a_key_outlives_a_restart_of_the_service_and_so_does_the_machine() {
    let s = Service::start().await;
    let first = s.post_with("/v1/machines", body(), &[KEY]).await;
    let m = Machine::of(&first.json());
    let (dir, driver, _) = s.end().await;
    let s = Service::on(dir, driver, |_| {}).await;
    assert_eq!(s.get(&m.path("")).await.ok()["state"], "running");
    let again = s.post_with("/v1/machines", body(), &[KEY]).await;
    assert_eq!((again.status.as_u16(), Machine::of(&again.json()).created_at), (200, m.created_at.clone()));
    assert_eq!(s.post(&m.path("/commands/run"), json!({"command": "true"})).await.ok()["exitCode"], 0);
}

#[tokio::test]
async fn a_create_whose_caller_went_away_goes_on() {
    let s = Service::with(FakeDriver::new(Duration::from_millis(400)), |_| {}).await;
    let request = s
        .request(http::Method::POST, "/v1/machines")
        .header("content-type", "application/json")
        .header("idempotency-key", "gone")
        .body(body().to_string().into())
        .unwrap();
    let address = s.address;
    let call = tokio::spawn(async move { send(address, request).await });
    tokio::time::sleep(Duration::from_millis(150)).await;
    call.abort();
    let again = s.post_with("/v1/machines", body(), &[("idempotency-key", "gone")]).await;
    assert_eq!((again.status.as_u16(), &again.json()["state"]), (200, &json!("running")));
    assert_eq!(s.driver.alive(), 1);
}

#[tokio::test]
async fn a_creation_that_was_under_way_at_the_end_is_finished_by_the_next_service() {
    let s =
        Service::with(FakeDriver::new(Duration::from_millis(500)), |c| c.shutdown_grace = Duration::from_millis(50))
            .await;
    let request = s
        .request(http::Method::POST, "/v1/machines")
        .header("content-type", "application/json")
        .header("idempotency-key", "k-1")
        .body(body().to_string().into())
        .unwrap();
    let address = s.address;
    let call = tokio::spawn(async move { send(address, request).await });
    tokio::time::sleep(Duration::from_millis(150)).await;
    let (dir, driver, finished) = s.end().await;
    assert!(!finished);
    call.abort();
    let s = Service::on(dir, driver, |_| {}).await;
    let again = s.post_with("/v1/machines", body(), &[KEY]).await;
    assert_eq!((again.status.as_u16(), &again.json()["state"]), (200, &json!("running")));
    assert_eq!(s.driver.alive(), 1);
}

#[tokio::test]
async fn a_failed_creation_says_so_every_time_and_stays_inspectable() {
    let s = Service::start().await;
    s.driver.host.launch.store(1, Ordering::SeqCst);
    let mut named = body();
    named["slot"] = json!("broken");
    let first = s.post_with("/v1/machines", named.clone(), &[KEY]).await;
    assert_eq!(first.code(), "create_failed");
    assert!(first.error().message.contains("broken@"), "{:?}", first.error());
    assert_eq!(s.post_with("/v1/machines", named.clone(), &[KEY]).await.code(), "create_failed");
    let m = s.get("/v1/machines/broken").await.ok();
    assert_eq!((&m["state"], &m["reason"]["code"]), (&json!("failed"), &json!("create_failed")));
    // A new attempt takes the slot with a later generation.
    let second = s.post("/v1/machines", named).await.ok();
    assert!(second["createdAt"].as_str() > m["createdAt"].as_str());
    s.driver.host.launch_host_full.store(1, Ordering::SeqCst);
    assert_eq!(s.post("/v1/machines", body()).await.code(), "host_full");
    assert_eq!(s.driver.alive(), 1);
}

#[tokio::test]
async fn what_cannot_be_made_is_refused_before_anything_is_written() {
    let s = Service::with(FakeDriver::default(), |c| c.max_machines_per_project = 1).await;
    for (body, code) in [
        (json!({"catalogId": "ruby"}), "template_not_found"),
        (json!({"catalogId": "../etc"}), "invalid_request"),
        (json!({"catalogId": "python", "internet": true}), "unsupported"),
        (json!({"catalogId": "python", "size": "huge"}), "invalid_request"),
        (json!({"catalogId": "python", "slot": "A/b"}), "invalid_request"),
        (json!({"catalogId": "python", "ttlSeconds": 9}), "invalid_request"),
        (json!({"catalogId": "python", "ttlSeconds": u64::MAX}), "invalid_request"),
        (json!({"catalogId": "python", "ttlSeconds": -1}), "invalid_request"),
        (json!({"catalogId": "python", "idleTimeoutSeconds": 0}), "invalid_request"),
        (json!({"catalogId": "python", "metadata": {"": "x"}}), "invalid_request"),
        (json!({"catalogId": "python", "metadata": {"a": "x\u{0}"}}), "invalid_request"),
        (json!({"catalogId": "python", "env": {"A=B": "x"}}), "invalid_request"),
        (json!({"catalogId": "python", "pool": 1}), "invalid_request"),
        (json!({}), "invalid_request"),
        (json!([]), "invalid_request"),
    ] {
        assert_eq!(s.post("/v1/machines", body.clone()).await.code(), code, "{body}");
    }
    let long = "k".repeat(256);
    for bad in ["", long.as_str()] {
        assert_eq!(s.post_with("/v1/machines", body(), &[("idempotency-key", bad)]).await.code(), "invalid_request");
    }
    assert_eq!(s.get("/v1/machines").await.ok()["machines"], json!([]));

    let first = s.post_with("/v1/machines", body(), &[KEY]).await;
    assert_eq!(first.status, 201);
    let full = s.post("/v1/machines", body()).await;
    assert_eq!(full.code(), "overloaded");
    assert!(full.headers.contains_key("retry-after"));
    assert_eq!(
        s.post_with("/v1/machines", body(), &[KEY]).await.status,
        200,
        "a repeated create still finds its machine"
    );
    s.post(&Machine::of(&first.json()).path("/stop"), json!({})).await.ok();
    assert_eq!(s.post("/v1/machines", body()).await.status, 201, "room again");
}

#[tokio::test]
async fn persistent_machines_have_no_idle_timeout_unless_one_is_given() {
    let s = Service::with(FakeDriver::default(), |c| c.idle_timeout = Some(Duration::from_secs(300))).await;
    let idle = |body: Value| {
        let s = &s;
        async move { s.post("/v1/machines", body).await.ok()["idleTimeoutSeconds"].clone() }
    };
    assert_eq!(idle(json!({"catalogId": "python"})).await, json!(300));
    assert_eq!(idle(json!({"catalogId": "python", "persistent": true})).await, Value::Null);
    assert_eq!(idle(json!({"catalogId": "python", "persistent": true, "idleTimeoutSeconds": 60})).await, json!(60));
}

#[tokio::test]
async fn creations_beyond_the_bound_are_refused_not_queued() {
    let s = Service::on(Arc::new(TempDir::new().unwrap()), FakeDriver::new(Duration::from_millis(500)), |c| {
        c.max_creating = 2
    })
    .await;
    let replies = futures::future::join_all((0..5).map(|_| s.post("/v1/machines", body()))).await;
    assert_eq!(replies.iter().filter(|r| r.status == 201).count(), 2);
    assert!(replies.iter().filter(|r| r.status != 201).all(|r| r.code() == "overloaded"));
}
