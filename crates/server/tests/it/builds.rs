//! Builds of templates, and what becomes of them, over a driver without machines.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::{Method, Request};
use mainbrella_engine::fake::FakeDriver;
use mainbrella_store::KeyRole;
use serde_json::{Value, json};
use std::io::Write as _;

use crate::common::{Machine, Service};

const EMPTY: [u8; 1024] = [0; 1024];

async fn begin(s: &Service, body: Value) -> String {
    let made = s.post("/v1/builds", body).await;
    assert_eq!(made.status, 201, "{:?}", made.body);
    assert_eq!(made.json()["state"], "awaiting-context");
    made.json()["id"].as_str().unwrap().to_owned()
}

/// The events of a build, to its end.
async fn events(s: &Service, id: &str, cursor: u64) -> Vec<Value> {
    let request = s.request(Method::GET, &format!("/v1/builds/{id}/events?cursor={cursor}"));
    let reply = s.send(request.header("accept", "text/event-stream").body(Bytes::new()).unwrap()).await;
    assert_eq!(reply.headers["content-type"], "text/event-stream");
    let text = String::from_utf8(reply.body.to_vec()).unwrap();
    let data = text.lines().filter_map(|l| l.strip_prefix("data: ")).map(|l| serde_json::from_str(l).unwrap());
    data.collect()
}

async fn built(s: &Service, body: Value) -> Value {
    let id = begin(s, body).await;
    let sent = s.put(&format!("/v1/builds/{id}/context"), EMPTY.to_vec()).await;
    assert_eq!((sent.status.as_u16(), sent.json()["state"].as_str()), (202, Some("queued")));
    let all = events(s, &id, 0).await;
    assert_eq!(all.last().unwrap()["kind"], "done");
    s.get(&format!("/v1/builds/{id}")).await.ok()
}

#[tokio::test]
async fn a_recipe_becomes_a_template_that_machines_start_from() {
    let s = Service::start().await;
    let recipe = "FROM python\nENV A=1\nRUN echo hello\nUSER app\nEXPOSE 80\nLABEL k=v\nCMD [\"serve\"]\n";
    let build = built(&s, json!({"name": "app", "tags": ["stable"], "recipe": recipe, "size": "micro"})).await;
    assert_eq!((&build["state"], &build["template"]), (&json!("succeeded"), &json!("app:v1")), "{build}");
    assert_eq!((&build["steps"], &build["stepsDone"], &build["stepsCached"]), (&json!(1), &json!(1), &json!(0)));
    let id = build["id"].as_str().unwrap();
    let all = events(&s, id, 0).await;
    let kinds: Vec<_> = all.iter().map(|e| e["kind"].as_str().unwrap()).collect();
    assert!(kinds.starts_with(&["step", "output"]), "{all:?}");
    assert_eq!(all[1]["text"], "hello");
    assert!(all.iter().enumerate().all(|(n, e)| e["sequence"] == n as u64 + 1));
    assert_eq!(events(&s, id, 2).await, all[2..]);
    let page = s.get(&format!("/v1/builds/{id}/events?limit=2")).await.ok();
    assert_eq!((page["events"].as_array().unwrap().len(), &page["nextCursor"]), (2, &json!(2)));
    // No machine is left, and its snapshots are not taken for leftovers.
    assert_eq!(s.driver.alive(), 0);
    mainbrella_server::reconcile::recover(&s.state).await.unwrap();
    assert_eq!(s.state.engine.snapshots().await.unwrap().len(), 2);

    let shown = s.get("/v1/templates/app:stable").await.ok();
    assert_eq!((&shown["name"], &shown["kind"], &shown["version"]), (&json!("app:v1"), &json!("built"), &json!(1)));
    assert_eq!(shown["tags"], json!(["app", "app:stable"]));
    let d = &shown["details"];
    assert_eq!((&d["start"], &d["user"], &d["size"]), (&json!(["serve"]), &json!("app"), &json!("micro")));
    assert_eq!((&d["recipe"], &d["ports"], &d["env"]["A"]), (&json!(recipe), &json!(["80/tcp"]), &json!("1")));
    for name in ["app", "app:stable", "app:v1"] {
        let made = s.post("/v1/machines", json!({"catalogId": name, "size": "micro"})).await;
        assert_eq!((made.status.as_u16(), &made.json()["catalogId"]), (201, &json!("app:v1")), "{name}");
    }
    let unknown = s.post("/v1/machines", json!({"catalogId": "app:none"})).await.error();
    assert_eq!(unknown.code, "template_not_found");
    assert!(unknown.hint.contains("app, app:stable, app:v1"), "{}", unknown.hint);

    // The same again builds nothing; another command makes another version.
    let again = built(&s, json!({"name": "app", "recipe": recipe, "size": "micro"})).await;
    assert_eq!((&again["template"], &again["stepsCached"]), (&json!("app:v1"), &json!(1)));
    let next = built(&s, json!({"name": "app", "recipe": recipe.replace("serve", "other"), "size": "micro"})).await;
    assert_eq!((&next["template"], &next["stepsCached"]), (&json!("app:v2"), &json!(1)));
    assert_eq!(s.get("/v1/templates/app").await.ok()["name"], "app:v2");
    assert_eq!(s.get("/v1/builds").await.ok()["builds"][0]["template"], "app:v2");

    // Tags are moved and removed; a version with a tag is not.
    assert_eq!(s.delete("/v1/templates/app:v2").await.code(), "template_in_use");
    let put = |path: &str, body: Value| {
        let request = s.request(Method::PUT, path).header("content-type", "application/json");
        s.send(request.body(body.to_string().into()).unwrap())
    };
    assert_eq!(put("/v1/templates/app", json!({"source": "app:v1"})).await.ok()["name"], "app:v1");
    assert_eq!(put("/v1/templates/app:v9", json!({"source": "app:v1"})).await.code(), "invalid_request");
    assert_eq!(put("/v1/templates/python:x", json!({"source": "python"})).await.code(), "invalid_request");
    assert_eq!(put("/v1/templates/app:x", json!({"source": "nothing"})).await.code(), "template_not_found");
    assert_eq!(s.delete("/v1/templates/app:v2").await.ok()["versions"], json!(["app:v2"]));
    assert_eq!(s.delete("/v1/templates/app:stable").await.ok()["tags"], json!(["app:stable"]));
    assert_eq!(s.delete("/v1/templates/app:stable").await.code(), "template_not_found");
    assert_eq!(s.delete("/v1/templates/python").await.code(), "invalid_request");
    let all = s.delete("/v1/templates/app?all=true").await.ok();
    assert_eq!(all, json!({"versions": ["app:v1"], "tags": ["app"]}));
    assert_eq!(s.get("/v1/templates/app").await.code(), "template_not_found");
    // The cached step is what is left.
    assert_eq!(s.state.engine.snapshots().await.unwrap().len(), 1);
}

#[tokio::test]
async fn what_fails_says_where_and_why() {
    let s = Service::start().await;
    let build = built(&s, json!({"name": "app", "recipe": "FROM python\n\nRUN exit 3\n"})).await;
    let failure = &build["failure"];
    assert_eq!((&build["state"], &failure["reason"], &failure["line"]), (&json!("failed"), &json!("step"), &json!(3)));
    assert_eq!(failure["message"], "The command exited with code 3.");
    let build = built(&s, json!({"name": "app", "recipe": "FROM debian:12\n"})).await;
    assert_eq!(build["failure"]["reason"], "base");
    let build = built(&s, json!({"name": "app"})).await;
    assert_eq!(build["failure"]["reason"], "recipe", "{build}");
    s.driver.host.save.store(1, Ordering::SeqCst);
    let build = built(&s, json!({"name": "app", "recipe": "FROM python\nRUN echo x\n"})).await;
    assert_eq!(build["failure"]["reason"], "internal");
    s.driver.host.launch.store(1, Ordering::SeqCst);
    let build = built(&s, json!({"name": "app", "recipe": "FROM python\nRUN echo x\n"})).await;
    assert_eq!(build["failure"]["reason"], "machine");
    assert_eq!((s.driver.alive(), s.state.engine.snapshots().await.unwrap().len()), (0, 0));
    for (body, says) in [
        (json!({"name": "app", "recipe": "FROM python\nADD x y\n"}), "line 2"),
        (json!({"name": "app:v1"}), "name"),
        (json!({"name": "app", "tags": ["v1"]}), "version"),
        (json!({"name": "app", "tags": ["A B"]}), "tags"),
        (json!({"name": "python"}), "python"),
        (json!({"name": "app", "timeoutSeconds": 1}), "timeoutSeconds"),
        (json!({"name": "app", "size": "giant"}), "micro, small"),
        (json!({"name": "app", "recipePath": ""}), "recipePath"),
    ] {
        let refused = s.post("/v1/builds", body.clone()).await.error();
        assert_eq!(refused.code, "invalid_request", "{body}");
        assert!(refused.message.contains(says), "{body}: {}", refused.message);
    }
    assert_eq!(s.get(&format!("/v1/builds/{}", "0".repeat(32))).await.code(), "not_found");
    assert_eq!(s.get("/v1/builds/none").await.code(), "not_found");
}

#[tokio::test]
async fn contexts_are_taken_packed_or_not_and_cancelled_builds_take_none() {
    let s = Service::start().await;
    let id = begin(&s, json!({"name": "app", "recipe": "FROM python\nRUN hang\n"})).await;
    let path = format!("/v1/builds/{id}/context");
    assert_eq!(s.put(&path, "no archive".repeat(100)).await.code(), "invalid_request");
    assert_eq!(s.put(&path, Bytes::new()).await.code(), "invalid_request");
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    packed.write_all(&EMPTY).unwrap();
    assert_eq!(s.put(&path, packed.finish().unwrap()).await.status, 202);
    assert_eq!(s.put(&path, EMPTY.to_vec()).await.code(), "build_state");
    while s.driver.alive() == 0 {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    // Its machine is one of the project's, and says what it is for.
    let machines = s.get("/v1/machines").await.ok();
    assert_eq!(machines["machines"][0]["metadata"]["mainbrella.build"], id);
    assert_eq!(s.post(&format!("/v1/builds/{id}/cancel"), json!({})).await.status, 200);
    let all = events(&s, &id, 0).await;
    assert_eq!(all.last().unwrap()["state"], "cancelled");
    assert_eq!((s.driver.alive(), s.state.engine.snapshots().await.unwrap().len()), (0, 0));
    let id = begin(&s, json!({"name": "app"})).await;
    assert_eq!(s.post(&format!("/v1/builds/{id}/cancel"), json!({})).await.ok()["state"], "cancelled");
    assert_eq!(s.put(&format!("/v1/builds/{id}/context"), EMPTY.to_vec()).await.code(), "build_state");
}

#[tokio::test]
async fn only_admins_of_the_default_project_build_and_everybody_looks() {
    let s = Service::start().await;
    let other = format!("Bearer {}", s.key("neighbour", KeyRole::Admin).await.expose());
    let user = format!("Bearer {}", s.key("default", KeyRole::User).await.expose());
    let build = built(&s, json!({"name": "app", "recipe": "FROM python\nCMD [\"x\"]\n"})).await;
    let ask = |method: Method, path: String, body: Value, bearer: &str| {
        let request = Request::builder().method(method).uri(path).header("host", s.address.to_string());
        let request = request.header("content-type", "application/json").header("authorization", bearer);
        s.send(request.body(body.to_string().into()).unwrap())
    };
    for bearer in [&other, &user] {
        let refused = ask(Method::POST, "/v1/builds".into(), json!({"name": "mine"}), bearer).await.error();
        assert_eq!(refused.code, "forbidden");
        assert_eq!(ask(Method::DELETE, "/v1/templates/app".into(), json!({}), bearer).await.code(), "forbidden");
        let path = format!("/v1/builds/{}", build["id"].as_str().unwrap());
        assert_eq!(ask(Method::GET, path, json!({}), bearer).await.ok()["template"], "app:v1");
        assert_eq!(ask(Method::GET, "/v1/templates/app".into(), json!({}), bearer).await.status, 200);
        let made = ask(Method::POST, "/v1/machines".into(), json!({"catalogId": "app"}), bearer).await;
        assert_eq!(made.ok()["catalogId"], "app:v1");
    }
}

#[tokio::test]
async fn a_full_snapshot_becomes_a_template_of_its_own() {
    let s = Service::start().await;
    let machine = s.machine().await;
    let save = async |kind: &str| {
        let saved = s.post(&machine.path("/snapshots"), json!({"name": "n", "kind": kind})).await.ok();
        saved["id"].as_str().unwrap().to_owned()
    };
    let (files, full) = (save("workspace").await, save("full").await);
    let refused = s.post("/v1/templates", json!({"name": "warm", "snapshotId": files})).await.error();
    assert_eq!(refused.code, "invalid_request");
    let made = s.post("/v1/templates", json!({"name": "warm", "snapshotId": full, "tags": ["x"]})).await;
    assert_eq!((made.status.as_u16(), &made.json()["kind"]), (201, &json!("full")), "{:?}", made.body);
    assert_eq!(made.json()["tags"], json!(["warm", "warm:x"]));
    // It does not need the snapshot any more, and the reconciler leaves it its own.
    assert_eq!(s.delete(&format!("/v1/snapshots/{full}")).await.status, 204);
    mainbrella_server::reconcile::recover(&s.state).await.unwrap();
    assert_eq!(s.state.engine.snapshots().await.unwrap().len(), 2);
    let of = s.post("/v1/machines", json!({"catalogId": "warm"})).await.ok();
    assert_eq!(s.get(&Machine::of(&of).path("")).await.ok()["catalogId"], "warm:v1");
    // Nothing is built on a machine with its memory.
    let build = built(&s, json!({"name": "app", "recipe": "FROM warm\n"})).await;
    assert_eq!(build["failure"]["reason"], "base");
    let missing = s.post("/v1/templates", json!({"name": "warm", "snapshotId": full})).await;
    assert_eq!(missing.code(), "not_found");
}

#[tokio::test]
async fn a_service_that_cannot_save_builds_nothing() {
    let s = Service::with(FakeDriver::default().without_snapshots(), |_| {}).await;
    assert_eq!(s.post("/v1/builds", json!({"name": "app"})).await.code(), "unsupported");
}
