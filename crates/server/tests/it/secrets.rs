//! Secrets outside the machines, through HTTP, over the fake driver.

use std::sync::atomic::Ordering;

use http::Method;
use mainbrella_engine::Journal as _;
use mainbrella_engine::fake::FakeDriver;
use mainbrella_server::journal::StoreJournal;
use mainbrella_server::vault::Vault;
use mainbrella_types::{GenerationKey, HostName, ProjectId};
use serde_json::{Value, json};

use crate::common::{Machine, Reply, Service};

const VALUE: &str = "Bearer hush-hush-0123";

async fn online() -> Service {
    Service::with(FakeDriver::default().with_internet(), |_| {}).await
}

async fn send(s: &Service, method: Method, machine: &Machine, path: &str, body: Option<Value>) -> Reply {
    let request = s.request(method, &machine.path(path)).header("content-type", "application/json");
    s.send(request.body(body.map_or_else(String::new, |b| b.to_string()).into()).unwrap()).await
}

async fn put(s: &Service, machine: &Machine, name: &str, body: Value) -> Reply {
    send(s, Method::PUT, machine, &format!("/secrets/{name}"), Some(body)).await
}

fn github() -> Value {
    json!({"host": "API.github.example.", "header": "Authorization", "value": VALUE})
}

async fn key(s: &Service, machine: &Machine) -> GenerationKey {
    let id = machine.id.parse().unwrap();
    s.state.store.newest_in_slot(&ProjectId::default_project(), &id).await.unwrap().unwrap().key
}

impl Reply {
    fn said(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

fn host(text: &str) -> HostName {
    text.parse().unwrap()
}

#[tokio::test]
async fn a_secret_is_in_force_at_once_and_its_value_is_told_by_nothing() {
    let s = online().await;
    let machine = s.machine().await;
    let reply = put(&s, &machine, "github", github()).await;
    assert_eq!(reply.status, 200, "{:?}", reply.json());
    let told = reply.json();
    assert_eq!(
        (&told["name"], &told["host"], &told["port"]),
        (&json!("github"), &json!("api.github.example"), &json!(443))
    );
    assert_eq!((&told["header"], &told["username"]), (&json!("authorization"), &Value::Null));
    let basic = json!({"host": "git.example", "port": 8443, "username": "x-access-token", "value": "p4ss"});
    assert_eq!(put(&s, &machine, "git", basic).await.status, 200);
    let list = send(&s, Method::GET, &machine, "/secrets", None).await;
    let names: Vec<_> = list.json()["secrets"].as_array().unwrap().iter().map(|s| s["name"].clone()).collect();
    assert_eq!(names, [json!("git"), json!("github")]);

    let key = key(&s, &machine).await;
    let gateway = s.driver.secrets(&key).unwrap();
    assert!(gateway.cover(&host("api.github.example"), 443) && gateway.cover(&host("git.example"), 8443));
    assert!(!gateway.cover(&host("git.example"), 443) && !gateway.cover(&host("github.example"), 443));

    let get = s.get(&machine.path("")).await;
    let said = [reply.said(), list.said(), get.said()].concat();
    let stored = s.state.store.secrets(&key).await.unwrap();
    assert!(!said.contains("hush") && !said.contains("p4ss"));
    for record in stored {
        assert!(!record.sealed.windows(4).any(|w| w == b"hush" || w == b"p4ss"), "encrypted at rest");
    }
    for file in std::fs::read_dir(s.dir.path()).unwrap().flatten().filter(|f| f.path().is_file()) {
        let bytes = std::fs::read(file.path()).unwrap();
        assert!(!bytes.windows(9).any(|w| w == b"hush-hush"), "{}", file.path().display());
    }

    // Replaced, removed, removed again.
    let other = json!({"host": "other.example", "header": "x-key", "value": "v"});
    assert_eq!(put(&s, &machine, "github", other).await.status, 200);
    assert!(!gateway.cover(&host("api.github.example"), 443) && gateway.cover(&host("other.example"), 443));
    for (name, removed) in [("github", true), ("github", false), ("git", true)] {
        let reply = send(&s, Method::DELETE, &machine, &format!("/secrets/{name}"), None).await;
        assert_eq!((reply.status.as_u16(), reply.json()), (200, json!({"removed": removed})), "{name}");
    }
    assert!(!gateway.cover(&host("other.example"), 443) && !gateway.name(&host("git.example")));
    assert_eq!(s.state.store.authority(&key).await.unwrap(), None, "with the last one the authority goes");
}

#[tokio::test]
async fn what_is_no_secret_is_refused_without_a_word_of_its_value() {
    let s = online().await;
    let machine = s.machine().await;
    for (name, body) in [
        ("UPPER", github()),
        ("a%20b", github()),
        ("x", json!({"host": "a.example", "value": VALUE})),
        ("x", json!({"host": "a.example", "header": "x", "username": "y", "value": VALUE})),
        ("x", json!({"host": "10.0.0.1", "header": "x", "value": VALUE})),
        ("x", json!({"host": "*.example", "header": "x", "value": VALUE})),
        ("x", json!({"host": "a.example", "port": 0, "header": "x", "value": VALUE})),
        ("x", json!({"host": "a.example", "header": "Host", "value": VALUE})),
        ("x", json!({"host": "a.example", "header": "a b", "value": VALUE})),
        ("x", json!({"host": "a.example", "username": "a:b", "value": VALUE})),
        ("x", json!({"host": "a.example", "header": "x", "value": "hush\r\nX-Evil: 1"})),
        ("x", json!({"host": "a.example", "header": "x", "value": ""})),
        ("x", json!({"host": "a.example", "header": "x", "value": "hush".repeat(2049)})),
        ("x", json!({"host": "a.example", "header": "x", "value": VALUE, "more": 1})),
    ] {
        let reply = put(&s, &machine, name, body.clone()).await;
        assert_eq!((reply.status.as_u16(), &reply.json()["code"]), (400, &json!("invalid_request")), "{body}");
        assert!(!reply.said().contains("hush"), "{}", reply.said());
    }
    assert_eq!(send(&s, Method::GET, &machine, "/secrets", None).await.json(), json!({"secrets": []}));
}

#[tokio::test]
async fn a_machine_has_sixteen_and_each_may_still_be_replaced() {
    let s = online().await;
    let machine = s.machine().await;
    let puts = (0..20).map(|n| {
        let (s, machine) = (&s, &machine);
        let body = json!({"host": "a.example", "header": format!("x-{n}"), "value": "v"});
        async move { put(s, machine, &format!("s{n}"), body).await }
    });
    let replies = futures::future::join_all(puts).await;
    assert_eq!(replies.iter().filter(|r| r.status == 200).count(), 16);
    let refused = replies.iter().find(|r| r.status != 200).unwrap();
    assert_eq!((refused.status.as_u16(), &refused.json()["code"]), (409, &json!("secret_limit")));
    let list = send(&s, Method::GET, &machine, "/secrets", None).await.json();
    let first = list["secrets"][0]["name"].as_str().unwrap().to_owned();
    assert_eq!(put(&s, &machine, &first, github()).await.status, 200);
}

#[tokio::test]
async fn a_machine_without_a_way_out_has_nothing_to_add_a_secret_to() {
    let s = online().await;
    let made = s.post("/v1/machines", json!({"catalogId": "python", "internet": false})).await.json();
    let machine = Machine::of(&made);
    let reply = put(&s, &machine, "x", github()).await;
    assert_eq!((reply.status.as_u16(), &reply.json()["code"]), (409, &json!("egress_locked")));
    let key = key(&s, &machine).await;
    assert!(s.state.store.secrets(&key).await.unwrap().is_empty(), "nothing was kept");
}

#[tokio::test]
async fn secrets_outlive_the_service_and_end_with_their_machine() {
    let s = online().await;
    let machine = s.machine().await;
    assert_eq!(put(&s, &machine, "github", github()).await.status, 200);
    let key = key(&s, &machine).await;
    let (dir, driver, _) = s.end().await;
    let s = Service::on(dir, driver, |_| {}).await;
    assert!(s.driver.secrets(&key).unwrap().cover(&host("api.github.example"), 443), "in force again");
    assert_eq!(s.post(&machine.path("/stop"), json!({})).await.status, 200);
    assert!(s.state.store.secrets(&key).await.unwrap().is_empty());
    assert_eq!(s.state.store.authority(&key).await.unwrap(), None);
    assert_eq!(send(&s, Method::GET, &machine, "/secrets", None).await.json(), json!({"secrets": []}));
    let reply = put(&s, &machine, "github", github()).await;
    assert_eq!(&reply.json()["code"], &json!("machine_not_running"));
}

#[tokio::test]
async fn where_the_machine_does_not_take_the_authority_the_call_says_so_and_what_is_on_record_is_in_force() {
    let s = online().await;
    let machine = s.machine().await;
    s.driver.guest.no_trust.store(true, Ordering::SeqCst);
    let reply = put(&s, &machine, "github", github()).await;
    assert_eq!((reply.status.as_u16(), &reply.json()["code"]), (504, &json!("guest_unavailable")));
    let gateway = s.driver.secrets(&key(&s, &machine).await).unwrap();
    assert!(gateway.cover(&host("api.github.example"), 443), "as the list says");
    // A machine that believes nothing keeps nobody from taking a secret away.
    let other = json!({"host": "git.example", "username": "me", "value": "v"});
    assert_eq!(put(&s, &machine, "git", other).await.status, 504);
    assert_eq!(send(&s, Method::DELETE, &machine, "/secrets/git", None).await.json(), json!({"removed": true}));
    assert!(!gateway.name(&host("git.example")) && gateway.name(&host("api.github.example")));
    s.driver.guest.no_trust.store(false, Ordering::SeqCst);
    assert_eq!(put(&s, &machine, "github", github()).await.status, 200);
    assert!(gateway.cover(&host("api.github.example"), 443));
}

#[tokio::test]
async fn two_that_fill_one_header_of_one_host_are_refused_and_a_paused_machine_can_be_rid_of_one() {
    let s = online().await;
    let machine = s.machine().await;
    assert_eq!(put(&s, &machine, "one", github()).await.status, 200);
    for rival in [
        json!({"host": "api.github.example", "header": "AUTHORIZATION", "value": "v"}),
        json!({"host": "api.github.example", "username": "u", "value": "v"}),
    ] {
        assert_eq!(&put(&s, &machine, "two", rival).await.json()["code"], &json!("invalid_request"));
    }
    let fine = json!({"host": "api.github.example", "header": "x-other", "value": "v"});
    assert_eq!(put(&s, &machine, "two", fine).await.status, 200);
    assert_eq!(put(&s, &machine, "one", github()).await.status, 200, "it may be replaced");
    let gateway = s.driver.secrets(&key(&s, &machine).await).unwrap();
    assert_eq!(s.post(&machine.path("/pause"), json!({})).await.status, 200);
    assert_eq!(send(&s, Method::DELETE, &machine, "/secrets/one", None).await.json(), json!({"removed": true}));
    assert_eq!(send(&s, Method::DELETE, &machine, "/secrets/two", None).await.json(), json!({"removed": true}));
    assert!(!gateway.name(&host("api.github.example")), "also while it is paused");
}

async fn children(s: &Service, trunk: &Machine, body: Value, key: Option<&str>) -> Reply {
    let headers: Vec<_> = key.map(|key| ("idempotency-key", key)).into_iter().collect();
    s.post_with(&trunk.path("/fork"), body, &headers).await
}

/// What a receipt says of the secrets, as `name=outcome`.
fn outcomes(receipt: &Value) -> Vec<String> {
    let all = receipt["secrets"].as_array().unwrap().iter();
    all.map(|s| format!("{}={}", s["name"].as_str().unwrap(), s["outcome"].as_str().unwrap())).collect()
}

#[tokio::test]
async fn children_of_a_fork_get_what_each_secret_or_the_fork_says_under_authorities_of_their_own() {
    let s = online().await;
    let trunk = s.machine().await;
    for (name, place, on_fork) in
        [("kept", "a.example", "drop"), ("shared", "b.example", "inherit"), ("renewed", "c.example", "drop")]
    {
        let body =
            json!({"host": place, "header": "authorization", "value": format!("{name}-hush-hush"), "onFork": on_fork});
        let told = put(&s, &trunk, name, body).await.ok();
        assert_eq!(told["onFork"], json!(on_fork));
    }
    let asked = json!({"count": 2, "secrets": {"renewed": {"reissue": "another-hush-hush"}}});
    let reply = children(&s, &trunk, asked.clone(), Some("k")).await;
    let made = reply.ok();
    assert!(!reply.said().contains("hush"), "no value is told");
    let source = key(&s, &trunk).await;
    let mut authorities = vec![s.state.store.authority(&source).await.unwrap().unwrap()];
    for (n, child) in made["children"].as_array().unwrap().iter().enumerate() {
        assert_eq!(outcomes(&made["receipts"][n]), ["kept=dropped", "renewed=reissued", "shared=inherited"]);
        assert_eq!(made["receipts"][n]["id"], child["id"]);
        let child = Machine::of(child);
        let own = key(&s, &child).await;
        let gateway = s.driver.secrets(&own).unwrap();
        let covered = ["a.example", "b.example", "c.example"].map(|name| gateway.cover(&host(name), 443));
        assert_eq!(covered, [false, true, true], "in force in its own seat from its first moment");
        let journal = StoreJournal::new(s.state.store.clone(), "here", Vault::new(s.dir.path()));
        let kept = journal.secrets(&own).await.unwrap().unwrap();
        let values: Vec<_> = kept.secrets.iter().map(|s| s.value.reveal().to_owned()).collect();
        assert_eq!(values, ["another-hush-hush", "shared-hush-hush"]);
        authorities.push(s.state.store.authority(&own).await.unwrap().unwrap());
        let list = send(&s, Method::GET, &child, "/secrets", None).await.ok();
        assert_eq!(list["secrets"].as_array().unwrap().len(), 2);
        // They are its own from here on.
        send(&s, Method::DELETE, &trunk, "/secrets/shared", None).await.ok();
        assert!(gateway.cover(&host("b.example"), 443));
    }
    authorities.sort();
    authorities.dedup();
    assert_eq!(authorities.len(), 3, "no two have the same authority");
    // A repeat finds them, though the source has that secret no more; another value is another request.
    let again = children(&s, &trunk, asked, Some("k")).await.ok();
    assert_eq!((&again["children"][0]["id"], &again["receipts"]), (&made["children"][0]["id"], &json!([])));
    let other = json!({"count": 2, "secrets": {"renewed": {"reissue": "a-third-hush"}}});
    assert_eq!(children(&s, &trunk, other, Some("k")).await.code(), "idempotency_conflict");
    // After a restart they are in force again, and nowhere on disk as they are.
    let child = Machine::of(&made["children"][0]);
    let own = key(&s, &child).await;
    for file in std::fs::read_dir(s.dir.path()).unwrap().flatten().filter(|f| f.path().is_file()) {
        let bytes = std::fs::read(file.path()).unwrap();
        assert!(!bytes.windows(9).any(|w| w == b"hush-hush"), "{}", file.path().display());
    }
    let (dir, driver, _) = s.end().await;
    let s = Service::on(dir, driver, |_| {}).await;
    assert!(s.driver.secrets(&own).unwrap().cover(&host("c.example"), 443));
    // What a child has, its own children get by the same rule.
    let grandchild = children(&s, &child, json!({}), None).await.ok();
    assert_eq!(outcomes(&grandchild["receipts"][0]), ["renewed=dropped", "shared=inherited"]);
}

#[tokio::test]
async fn what_a_fork_says_of_secrets_is_checked_and_one_that_fails_leaves_none() {
    let s = online().await;
    let trunk = s.machine().await;
    let body = json!({"host": "a.example", "header": "authorization", "value": "v", "onFork": "inherit"});
    put(&s, &trunk, "one", body).await.ok();
    for secrets in [
        json!({"none": "drop"}),
        json!({"one": "copy"}),
        json!({"one": {"reissue": ""}}),
        json!({"one": {"reissue": "x", "more": 1}}),
        json!({"one": {"value": "x"}}),
    ] {
        let refused = children(&s, &trunk, json!({"secrets": secrets}), None).await;
        assert_eq!(refused.code(), "invalid_request", "{secrets}");
    }
    assert_eq!(s.driver.alive(), 1);
    // A guest that does not believe its new authority is no child.
    s.driver.guest.no_trust.store(true, Ordering::SeqCst);
    let failed = children(&s, &trunk, json!({}), Some("k")).await;
    assert_eq!(failed.code(), "create_failed");
    s.driver.guest.no_trust.store(false, Ordering::SeqCst);
    let record = s.get("/v1/machines?limit=10").await.ok();
    let child = record["machines"].as_array().unwrap().iter().find(|m| m["state"] == "failed").unwrap().clone();
    let own = key(&s, &Machine::of(&child)).await;
    assert!(s.state.store.secrets(&own).await.unwrap().is_empty(), "what has ended keeps none");
    // Without any there is nothing to believe.
    s.driver.guest.no_trust.store(true, Ordering::SeqCst);
    let made = children(&s, &trunk, json!({"secrets": {"one": "drop"}}), None).await.ok();
    assert_eq!(outcomes(&made["receipts"][0]), ["one=dropped"]);
    let own = key(&s, &Machine::of(&made["children"][0])).await;
    assert_eq!(s.state.store.authority(&own).await.unwrap(), None);
}
