//! Pausing through HTTP, over the fake driver.

use mainbrella_engine::fake::FakeDriver;
use serde_json::json;

use crate::common::{Machine, Service};

#[tokio::test]
async fn a_machine_is_paused_and_resumed_on_its_generation_and_told_so() {
    let s = Service::start().await;
    assert_eq!(s.get("/v1/capabilities").await.ok()["persistence"]["pauseResume"], json!(true));
    let m = s.machine().await;
    for _ in 0..2 {
        let paused = s.post(&m.path("/pause"), json!({})).await.ok();
        assert_eq!((&paused["state"], &paused["createdAt"]), (&json!("paused"), &json!(m.created_at)));
    }
    let refused = s.post(&m.path("/commands/run"), json!({"command": "true"})).await;
    assert_eq!((refused.status.as_u16(), refused.code().as_str()), (409, "machine_not_running"));
    assert!(refused.error().hint.contains("resume"), "{:?}", refused.error());
    let list = s.get("/v1/machines").await.ok();
    assert_eq!(list["machines"][0]["state"], json!("paused"));
    for _ in 0..2 {
        assert_eq!(s.post(&m.path("/resume"), json!({})).await.ok()["state"], json!("running"));
    }
    let run = s.post(&m.path("/commands/run"), json!({"command": "exit 7"})).await.ok();
    assert_eq!(run["exitCode"], json!(7));
    let other = format!("/v1/machines/{}/pause?createdAt=2020-01-01T00:00:00.000Z", m.id);
    assert_eq!(s.post(&other, json!({})).await.code(), "generation_mismatch");
}

#[tokio::test]
async fn a_host_that_cannot_save_memory_says_so_beforehand() {
    let s = Service::with(FakeDriver::default().without_snapshots(), |_| {}).await;
    assert_eq!(s.get("/v1/capabilities").await.ok()["persistence"]["pauseResume"], json!(false));
    let m = s.machine().await;
    let refused = s.post(&m.path("/pause"), json!({})).await;
    assert_eq!((refused.status.as_u16(), refused.code().as_str()), (422, "unsupported"));
}

#[tokio::test]
async fn what_becomes_of_an_unused_machine_is_asked_for_at_its_creation_and_told() {
    let s = Service::start().await;
    let plain = s.machine().await;
    let plain = s.get(&plain.path("")).await.ok();
    assert_eq!((&plain["onIdle"], &plain["autoResume"]), (&json!("stop"), &json!(false)));
    let body = json!({"catalogId": "python", "idleTimeoutSeconds": 600, "onIdle": "pause"});
    let made = s.post("/v1/machines", body).await.ok();
    assert_eq!((&made["onIdle"], &made["autoResume"]), (&json!("pause"), &json!(true)));
    let m = Machine::of(&made);
    s.post(&m.path("/pause"), json!({})).await.ok();
    let seen = s.get(&m.path("")).await.ok();
    assert_eq!((&seen["state"], &seen["idleDeadlineMs"]), (&json!("paused"), &json!(null)), "it is never idle");
    let ran = s.post(&m.path("/commands/run"), json!({"command": "exit 3"})).await.ok();
    assert_eq!(ran["exitCode"], json!(3), "the call brought it back");
    assert_eq!(s.get(&m.path("")).await.ok()["state"], json!("running"));
    // Asleep by request only, and back by request only.
    let body = json!({"catalogId": "python", "idleTimeoutSeconds": 600, "onIdle": "pause", "autoResume": false});
    let m = Machine::of(&s.post("/v1/machines", body).await.ok());
    s.post(&m.path("/pause"), json!({})).await.ok();
    assert_eq!(s.post(&m.path("/commands/run"), json!({"command": "true"})).await.code(), "machine_not_running");
    // There is nothing to wait for.
    let body = json!({"catalogId": "python", "onIdle": "pause", "persistent": true});
    assert_eq!(s.post("/v1/machines", body).await.code(), "invalid_request");
    let body = json!({"catalogId": "python", "onIdle": "sleep", "idleTimeoutSeconds": 600});
    assert_eq!(s.post("/v1/machines", body).await.code(), "invalid_request");
    let s = Service::with(FakeDriver::default().without_snapshots(), |_| {}).await;
    let body = json!({"catalogId": "python", "idleTimeoutSeconds": 600, "onIdle": "pause"});
    assert_eq!(s.post("/v1/machines", body).await.code(), "unsupported");
    assert_eq!(s.get("/v1/capabilities").await.ok()["persistence"]["autoPause"], json!(false));
}
