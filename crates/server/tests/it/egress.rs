//! What machines may reach, through HTTP, over the fake driver.

use std::sync::atomic::Ordering;

use mainbrella_engine::fake::FakeDriver;
use mainbrella_types::{GenerationKey, ProjectId};
use serde_json::{Value, json};

use crate::common::{Machine, Reply, Service};

async fn online() -> Service {
    Service::with(FakeDriver::default().with_internet(), |_| {}).await
}

async fn make(s: &Service, network: Value) -> Reply {
    let mut body = json!({"catalogId": "python"});
    body.as_object_mut().unwrap().extend(network.as_object().unwrap().clone());
    s.post("/v1/machines", body).await
}

async fn put(s: &Service, machine: &Machine, policy: Value) -> Reply {
    let request = s
        .request(http::Method::PUT, &machine.path("/egress"))
        .header("content-type", "application/json")
        .body(policy.to_string().into())
        .unwrap();
    s.send(request).await
}

/// The internal name of a machine.
async fn key(s: &Service, machine: &Machine) -> GenerationKey {
    let id = machine.id.parse().unwrap();
    let record = s.state.store.newest_in_slot(&ProjectId::default_project(), &id).await.unwrap();
    record.unwrap().key
}

async fn explain(s: &Service, machine: &Machine, question: &str) -> Reply {
    s.get(&format!("{}&{question}", machine.path("/egress/explain"))).await
}

#[tokio::test]
async fn a_create_gets_what_it_asked_for_and_is_told_so() {
    let s = online().await;
    let list = json!({"policy": "allow-list", "rules": ["packages.example", "*.Files.Example.", "93.184.216.34:5432"]});
    let told =
        json!({"policy": "allow-list", "rules": ["packages.example", "*.files.example", "93.184.216.34/32:5432"]});
    for (asked, internet, egress) in [
        (json!({}), true, json!({"policy": "open"})),
        (json!({"internet": null, "egress": null}), true, json!({"policy": "open"})),
        (json!({"internet": true}), true, json!({"policy": "open"})),
        (json!({"internet": false}), false, json!({"policy": "off"})),
        (json!({"egress": {"policy": "off"}}), false, json!({"policy": "off"})),
        (json!({"egress": list}), true, told.clone()),
        (json!({"internet": true, "egress": list}), true, told.clone()),
        (json!({"egress": {"policy": "allow-list"}}), true, json!({"policy": "allow-list"})),
        (
            json!({"egress": {"policy": "allow-list", "dryRun": true}}),
            true,
            json!({"policy": "allow-list", "dryRun": true}),
        ),
    ] {
        let m = make(&s, asked.clone()).await.ok();
        assert_eq!((&m["internet"], &m["egress"]), (&json!(internet), &egress), "{asked}");
        assert_eq!(m["capabilities"]["internet"], internet, "{asked}");
        let again = s.get(&format!("/v1/machines/{}", m["id"].as_str().unwrap())).await.ok();
        assert_eq!(again["egress"], egress, "{asked}");
    }
}

#[tokio::test]
async fn what_contradicts_itself_or_is_no_rule_makes_nothing() {
    let s = online().await;
    let many: Vec<String> = (0..257).map(|n| format!("h{n}.example")).collect();
    for asked in [
        json!({"internet": false, "egress": {"policy": "open"}}),
        json!({"internet": true, "egress": {"policy": "off"}}),
        json!({"egress": {"policy": "open", "rules": ["example.org"]}}),
        json!({"egress": {"policy": "ajar"}}),
        json!({"egress": {"rules": ["example.org"]}}),
        json!({"egress": {"policy": "allow-list", "rules": ["10.0.0.0/8"]}}),
        json!({"egress": {"policy": "allow-list", "rules": ["0.0.0.0/0"]}}),
        json!({"egress": {"policy": "allow-list", "rules": ["169.254.169.254"]}}),
        json!({"egress": {"policy": "allow-list", "rules": ["https://example.org"]}}),
        json!({"egress": {"policy": "allow-list", "rules": many}}),
        json!({"egress": {"policy": "allow-list", "rules": ["example.org"], "allow": []}}),
    ] {
        assert_eq!(make(&s, asked.clone()).await.code(), "invalid_request", "{asked}");
    }
    assert_eq!(s.driver.alive(), 0);
}

#[tokio::test]
async fn a_host_that_cannot_enforce_it_refuses() {
    let s = Service::start().await;
    let c = s.get("/v1/capabilities").await.ok();
    assert_eq!(c["networking"]["egressAllowList"], false);
    for asked in [json!({"internet": true}), json!({"egress": {"policy": "allow-list", "rules": ["a.example"]}})] {
        let refused = make(&s, asked.clone()).await.error();
        assert_eq!(refused.code, "unsupported", "{asked}");
        assert!(refused.hint.contains("doctor"), "{}", refused.hint);
    }
    // The default is what the host can do, and is told.
    let m = make(&s, json!({})).await.ok();
    assert_eq!((&m["internet"], &m["egress"]), (&json!(false), &json!({"policy": "off"})));
    assert_eq!(put(&s, &Machine::of(&m), json!({"policy": "open"})).await.code(), "egress_locked");
}

#[tokio::test]
async fn a_policy_is_changed_live_and_survives_a_restart() {
    let s = online().await;
    let m = Machine::of(&make(&s, json!({})).await.ok());
    let key = key(&s, &m).await;
    let list = json!({"policy": "allow-list", "rules": ["a.example:22"]});
    let changed = put(&s, &m, list.clone()).await.ok();
    assert_eq!((&changed["egress"], &changed["internet"]), (&list, &json!(true)));
    assert_eq!(s.driver.egress(&key).unwrap().to_string(), "allow-list a.example:22");
    let (dir, driver, _) = s.end().await;
    let s = Service::on(dir, driver, |_| {}).await;
    assert_eq!(s.driver.egress(&key).unwrap().to_string(), "allow-list a.example:22");
    assert_eq!(s.get(&format!("/v1/machines/{}", m.id)).await.ok()["egress"], list);
    // Tightened to nothing, it stays so, over another restart too.
    assert_eq!(put(&s, &m, json!({"policy": "off"})).await.ok()["internet"], false);
    for policy in [json!({"policy": "open"}), list.clone(), json!({"policy": "allow-list"})] {
        assert_eq!(put(&s, &m, policy.clone()).await.code(), "egress_locked", "{policy}");
    }
    assert_eq!(put(&s, &m, json!({"policy": "off"})).await.ok()["internet"], false, "as it is");
    let (dir, driver, _) = s.end().await;
    let s = Service::on(dir, driver, |_| {}).await;
    assert_eq!(s.driver.egress(&key).unwrap().to_string(), "off");
    assert_eq!(put(&s, &m, json!({"policy": "open"})).await.code(), "egress_locked");
    assert_eq!(s.driver.egress(&key).unwrap().to_string(), "off");
}

#[tokio::test]
async fn what_cannot_be_put_in_force_is_said_and_mended_by_setting_it_again() {
    let s = online().await;
    let m = Machine::of(&make(&s, json!({})).await.ok());
    s.driver.host.egress.store(1, Ordering::SeqCst);
    let list = json!({"policy": "allow-list", "rules": ["a.example"]});
    let failed = put(&s, &m, list.clone()).await.error();
    assert_eq!(failed.code, "internal");
    assert!(failed.message.contains("on record") && failed.message.contains("nothing"), "{}", failed.message);
    assert_eq!(explain(&s, &m, "host=a.example").await.ok()["outcome"], "denied");
    put(&s, &m, list).await.ok();
    assert_eq!(explain(&s, &m, "host=a.example").await.ok()["outcome"], "allowed");
    // At creation it is the end of the machine.
    s.driver.host.egress.store(1, Ordering::SeqCst);
    assert_eq!(make(&s, json!({})).await.code(), "create_failed");
    assert_eq!(s.driver.alive(), 1);
}

#[tokio::test]
async fn only_the_generation_that_is_meant_is_changed() {
    let s = online().await;
    let m = Machine::of(&make(&s, json!({"slot": "box"})).await.ok());
    let mut other = m.clone();
    other.created_at = "2020-01-01T00:00:00.000Z".into();
    assert_eq!(put(&s, &other, json!({"policy": "off"})).await.code(), "generation_mismatch");
    s.post(&m.path("/stop"), json!({})).await;
    assert_eq!(put(&s, &m, json!({"policy": "off"})).await.code(), "machine_not_running");
    assert_eq!(explain(&s, &m, "host=a.example").await.code(), "machine_not_running");
    assert_eq!(s.get(&m.path("/egress/log")).await.ok()["events"], json!([]));
    let next = Machine::of(&make(&s, json!({"slot": "box"})).await.ok());
    assert_eq!(put(&s, &m, json!({"policy": "off"})).await.code(), "generation_mismatch");
    assert_eq!(s.get(&m.path("/egress/log")).await.code(), "generation_mismatch");
    assert_eq!(s.get(&next.path("/egress/log")).await.ok()["denied"], 0);
}

#[tokio::test]
async fn an_explanation_names_the_rule_and_the_reason() {
    let s = online().await;
    let rules = json!({"policy": "allow-list", "rules": ["*.example.org", "93.184.216.0/24:22"]});
    let m = Machine::of(&make(&s, json!({"egress": rules})).await.ok());
    for (question, outcome, allowed_by, denied_by) in [
        ("host=a.example.org", "allowed", json!("*.example.org"), Value::Null),
        ("host=A.Example.Org.&port=80", "allowed", json!("*.example.org"), Value::Null),
        ("host=a.example.org&port=22", "denied", Value::Null, json!("port")),
        ("host=example.org", "denied", Value::Null, json!("no-rule")),
        ("host=93.184.216.34&port=22", "allowed", json!("93.184.216.0/24:22"), Value::Null),
        ("host=%5B::ffff:10.0.0.1%5D", "denied", Value::Null, json!("reserved")),
        ("host=169.254.169.254&port=80", "denied", Value::Null, json!("reserved")),
    ] {
        let said = explain(&s, &m, question).await.ok();
        assert_eq!(
            (&said["outcome"], &said["allowedBy"], &said["deniedBy"]),
            (&json!(outcome), &allowed_by, &denied_by),
            "{question}"
        );
        assert!(said["reason"].as_str().unwrap().ends_with('.'), "{said}");
    }
    let said = explain(&s, &m, "host=a.example.org").await.ok();
    assert_eq!(said["addresses"], json!([{"address": "93.184.216.34", "reserved": null}]));
    for bad in [
        "",
        "port=443",
        "host=",
        "host=a%20b",
        "host=a.example&port=0",
        "host=a.example&port=99999",
        "host=http://a.example/",
    ] {
        assert_eq!(explain(&s, &m, bad).await.code(), "invalid_request", "{bad}");
    }
    let off = Machine::of(&make(&s, json!({"internet": false})).await.ok());
    let said = explain(&s, &off, "host=a.example.org").await.ok();
    assert_eq!((&said["outcome"], &said["deniedBy"]), (&json!("denied"), &json!("off")));
}

#[tokio::test]
async fn the_log_is_read_in_pages_and_outlives_machine_and_service() {
    let s = online().await;
    let m = Machine::of(&make(&s, json!({"egress": {"policy": "allow-list"}})).await.ok());
    let key = key(&s, &m).await;
    let log = s.state.engine.machine(&key).unwrap().egress_log();
    for n in 0..30u16 {
        log.record(mainbrella_engine::Denied {
            verdict: mainbrella_engine::Verdict::Denied,
            name: Some("evil.example"),
            address: None,
            port: n,
            rule: mainbrella_types::DenyRule::NoRule,
            reason: "no rule of the allow-list matches",
        });
    }
    let page = async |s: &Service, rest: &str| s.get(&format!("{}{rest}", m.path("/egress/log"))).await;
    let first = page(&s, "&limit=20").await.ok();
    assert_eq!((&first["hasMore"], &first["nextCursor"], &first["denied"]), (&json!(true), &json!(20), &json!(30)));
    let event = &first["events"][0];
    assert_eq!(
        (&event["sequence"], &event["outcome"], &event["name"]),
        (&json!(1), &json!("denied"), &json!("evil.example"))
    );
    assert_eq!((&event["rule"], &event["address"], &event["port"]), (&json!("no-rule"), &Value::Null, &json!(0)));
    assert_eq!(event["reason"], "No rule of the allow-list matches.");
    assert_eq!((&first["id"], &first["createdAt"]), (&json!(m.id), &json!(m.created_at)));
    let rest = page(&s, "&cursor=20").await.ok();
    assert_eq!((rest["events"].as_array().unwrap().len(), &rest["hasMore"]), (10, &json!(false)));
    assert_eq!(page(&s, "&cursor=30").await.ok()["nextCursor"], 30);
    for bad in ["&limit=0", "&limit=1001", "&limit=x", "&cursor=-1", "&after=1"] {
        assert_eq!(page(&s, bad).await.code(), "invalid_request", "{bad}");
    }
    s.post(&m.path("/stop"), json!({})).await;
    let (dir, driver, _) = s.end().await;
    let s = Service::on(dir, driver, |_| {}).await;
    let kept = page(&s, "").await.ok();
    assert_eq!((kept["events"].as_array().unwrap().len(), &kept["denied"]), (30, &json!(30)));
}
