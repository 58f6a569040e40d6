//! Forking through HTTP, over the fake driver.

use mainbrella_engine::fake::FakeDriver;
use serde_json::json;

use crate::common::{Machine, Service};

#[tokio::test]
async fn children_are_machines_of_their_own_and_a_repeat_gives_the_same() {
    let s = Service::with(FakeDriver::default().with_internet(), |_| {}).await;
    assert_eq!(s.get("/v1/capabilities").await.ok()["persistence"]["fork"], json!(true));
    let body = json!({"catalogId": "python", "metadata": {"a": "1", "b": "2"}, "env": {"X": "y"}, "egress": {"policy": "allow-list", "rules": ["a.example"]}});
    let trunk = Machine::of(&s.post("/v1/machines", body).await.ok());
    let asked = json!({"count": 3, "metadata": {"b": "3"}, "ttlSeconds": 60});
    let first = s.post_with(&trunk.path("/fork"), asked.clone(), &[("idempotency-key", "k")]).await;
    assert_eq!(first.status, 201);
    let made = first.json();
    let children = made["children"].as_array().unwrap();
    assert_eq!(children.len(), 3);
    for child in children {
        assert_eq!((&child["state"], &child["catalogId"]), (&json!("running"), &json!("python")));
        assert_eq!(child["metadata"], json!({"a": "1", "b": "3"}));
        assert_eq!(child["egress"], json!({"policy": "allow-list", "rules": ["a.example"]}));
        assert_eq!(child["forkedFrom"], json!(format!("{}@{}", trunk.id, trunk.created_at)));
        let run = s.post(&Machine::of(child).path("/commands/run"), json!({"command": "exit 5"})).await.ok();
        assert_eq!(run["exitCode"], json!(5));
    }
    assert_eq!(s.get(&trunk.path("")).await.ok()["forkedFrom"], json!(null));
    let again = s.post_with(&trunk.path("/fork"), asked, &[("idempotency-key", "k")]).await;
    assert_eq!((again.status.as_u16(), again.headers["idempotency-replayed"].to_str().unwrap()), (200, "true"));
    let ids = |v: &serde_json::Value| -> Vec<String> {
        v["children"].as_array().unwrap().iter().map(|c| c["id"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(ids(&again.json()), ids(&made));
    let other = s.post_with(&trunk.path("/fork"), json!({"count": 2}), &[("idempotency-key", "k")]).await;
    assert_eq!(other.code(), "idempotency_conflict");
    assert_eq!(s.driver.alive(), 4);
    for bad in [json!({"count": 0}), json!({"count": 9}), json!({"n": 1}), json!({"ttlSeconds": 1})] {
        assert_eq!(s.post(&trunk.path("/fork"), bad.clone()).await.code(), "invalid_request", "{bad}");
    }
}

#[tokio::test]
async fn a_host_without_room_or_power_refuses_and_makes_nothing() {
    let s = Service::with(FakeDriver::default(), |c| c.max_machines_per_project = 3).await;
    let m = s.machine().await;
    assert_eq!(s.post(&m.path("/fork"), json!({"count": 3})).await.code(), "overloaded");
    assert_eq!(s.driver.alive(), 1);
    assert_eq!(s.post(&m.path("/fork"), json!({"count": 2})).await.status, 201);
    let s = Service::with(FakeDriver::default().without_snapshots(), |_| {}).await;
    let m = s.machine().await;
    assert_eq!(s.post(&m.path("/fork"), json!({})).await.code(), "unsupported");
}

#[tokio::test]
async fn a_child_is_given_secrets_of_its_own_and_its_gateway_adds_them() {
    let s = Service::with(FakeDriver::default().with_internet(), |_| {}).await;
    let trunk = s.machine().await;
    let made = s.post(&trunk.path("/fork"), json!({})).await.ok();
    let child = Machine::of(&made["children"][0]);
    let id = child.id.parse().unwrap();
    let record = s.state.store.newest_in_slot(&mainbrella_types::ProjectId::default_project(), &id).await.unwrap();
    let body = json!({"host": "api.example", "header": "authorization", "value": "v"});
    let request = s.request(http::Method::PUT, &child.path("/secrets/one")).header("content-type", "application/json");
    assert_eq!(s.send(request.body(body.to_string().into()).unwrap()).await.status, 200);
    let gateway = s.driver.secrets(&record.unwrap().key).unwrap();
    assert!(gateway.cover(&"api.example".parse().unwrap(), 443), "what is on record is in force in its own seat");
}

#[tokio::test]
async fn the_receipt_says_what_was_done_for_random_numbers() {
    use std::sync::atomic::Ordering;
    let s = Service::start().await;
    s.driver.guest.registered.store(3, Ordering::SeqCst);
    s.driver.guest.unanswered.store(1, Ordering::SeqCst);
    let trunk = s.machine().await;
    let made = s.post(&trunk.path("/fork"), json!({"count": 2})).await.ok();
    for receipt in made["receipts"].as_array().unwrap() {
        let hooks = json!([{"name": "10-hook", "exitCode": 3, "timedOut": false}]);
        assert_eq!(receipt["random"], json!({"kernel": true, "hooks": hooks, "registered": 3, "acknowledged": 2}));
    }
    assert_eq!(made["receipts"].as_array().unwrap().len(), 2);
}
