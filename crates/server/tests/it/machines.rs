//! Using machines: fencing, leases, lists, commands, files.

use crate::common::{Machine, Service};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::Method;
use mainbrella_engine::ExitReport;
use mainbrella_engine::fake::FakeDriver;
use serde_json::{Value, json};

async fn slot(s: &Service, name: &str) -> Machine {
    Machine::of(&s.post("/v1/machines", json!({"catalogId": "python", "slot": name})).await.ok())
}

fn text(v: &Value) -> String {
    String::from_utf8(STANDARD.decode(v.as_str().unwrap()).unwrap()).unwrap()
}

#[tokio::test]
async fn every_call_acts_on_the_generation_it_names_or_on_none() {
    let s = Service::start().await;
    let old = slot(&s, "a").await;
    s.post(&old.path("/stop"), json!({})).await.ok();
    let new = slot(&s, "a").await;
    assert!(new.created_at > old.created_at);
    let calls = [
        (Method::GET, "", ""),
        (Method::POST, "/extend", r#"{"ttlSeconds":60}"#),
        (Method::POST, "/stop", ""),
        (Method::POST, "/commands/run", r#"{"command":"true"}"#),
        (Method::GET, "/files/content", ""),
        (Method::PUT, "/files/content", "data"),
        (Method::GET, "/files/list", ""),
        (Method::GET, "/files/stat", ""),
        (Method::GET, "/files/tree", ""),
        (Method::PUT, "/files/tree", "data"),
        (Method::GET, "/files/watch", ""),
    ];
    let future = Machine { created_at: "2100-01-01T00:00:00.000Z".into(), ..new.clone() };
    for (method, rest, body) in &calls {
        for (machine, expected) in [
            (&old, "generation_mismatch"),
            (&future, "generation_mismatch"),
            (&Machine { id: "nobody".into(), ..old.clone() }, "not_found"),
            (&Machine { id: "A".into(), ..old.clone() }, "not_found"),
            (&Machine { created_at: "yesterday".into(), ..old.clone() }, "invalid_request"),
        ] {
            let mut path = machine.path(rest);
            if rest.starts_with("/files") {
                path.push_str("&path=/tmp/x");
            }
            let request = s.request(method.clone(), &path).header("content-type", "application/json");
            let reply = s.send(request.body(Bytes::from(*body)).unwrap()).await;
            assert_eq!(reply.code(), expected, "{method} {path}");
        }
        let bare = format!("/v1/machines/a{rest}");
        let request = s.request(method.clone(), &bare).header("content-type", "application/json");
        let reply = s.send(request.body(Bytes::from(*body)).unwrap()).await;
        match *rest {
            "" => assert_eq!(reply.ok()["createdAt"], new.created_at.as_str(), "without createdAt: the newest"),
            _ => assert_eq!(reply.code(), "invalid_request", "{bare}"),
        }
    }
    assert_eq!(s.get(&new.path("")).await.ok()["state"], "running", "the newer one was left alone");
    assert_eq!(s.driver.alive(), 1);
}

#[tokio::test]
async fn stop_is_idempotent_and_a_stopped_machine_says_why_it_cannot_be_used() {
    let s = Service::start().await;
    let m = s.machine().await;
    for _ in 0..2 {
        let stopped = s.post(&m.path("/stop"), json!({})).await.ok();
        assert_eq!((&stopped["outcome"], &stopped["machine"]["state"]), (&json!("stopped"), &json!("stopped")));
        assert_eq!(stopped["machine"]["reason"]["code"], "stop_requested");
        assert!(stopped["machine"]["endedAtMs"].is_i64());
    }
    assert_eq!(s.driver.alive(), 0);
    let run = s.post(&m.path("/commands/run"), json!({"command": "true"})).await.error();
    assert_eq!(run.code, "machine_not_running");
    assert!(run.message.contains("stopped"), "{run:?}");
    assert_eq!(s.post(&m.path("/extend"), json!({"ttlSeconds": 60})).await.code(), "machine_not_running");
    assert_eq!(s.get(&m.path("")).await.ok()["state"], "stopped");
}

#[tokio::test]
async fn a_machine_that_cannot_be_removed_yet_is_uncertain_until_it_is() {
    let s = Service::start().await;
    let m = s.machine().await;
    s.driver.host.destroy.store(1, std::sync::atomic::Ordering::SeqCst);
    let first = s.post(&m.path("/stop"), json!({})).await.ok();
    assert!(first["outcome"] == "uncertain" || first["outcome"] == "stopped");
    for _ in 0..100 {
        if s.post(&m.path("/stop"), json!({})).await.ok()["outcome"] == "stopped" {
            assert_eq!(s.driver.alive(), 0);
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    panic!("never stopped");
}

#[tokio::test]
async fn a_machine_whose_vmm_died_is_failed_with_the_reason_and_never_replaced() {
    let s = Service::start().await;
    let m = s.machine().await;
    let key = s.state.store.living("local").await.unwrap()[0].key;
    s.driver.kill(&key, ExitReport::Vmm("it was killed".into()));
    for _ in 0..100 {
        let now = s.get(&m.path("")).await.ok();
        if now["state"] == "failed" {
            assert_eq!(now["reason"]["code"], "vmm_died");
            assert_eq!(
                s.post(&m.path("/commands/run"), json!({"command": "true"})).await.code(),
                "machine_not_running"
            );
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    panic!("never failed");
}

#[tokio::test]
async fn extend_says_what_becomes_of_an_unused_machine() {
    let s = Service::start().await;
    let made = s.post("/v1/machines", json!({"catalogId": "python", "persistent": true})).await.ok();
    let m = Machine::of(&made);
    let at = m.path("/extend");
    assert_eq!(s.post(&at, json!({"onIdle": "pause"})).await.code(), "invalid_request", "it has no idle timeout");
    let of = async |body: Value| {
        let now = s.post(&at, body).await.ok();
        assert_eq!(s.get(&m.path("")).await.ok()["onIdle"], now["onIdle"], "on record");
        (now["onIdle"].clone(), now["autoResume"].clone())
    };
    let (stop, pause) = (json!("stop"), json!("pause"));
    assert_eq!(of(json!({"autoResume": true})).await, (stop.clone(), json!(true)));
    assert_eq!(of(json!({"autoResume": false})).await, (stop.clone(), json!(false)));
    let whole = json!({"onIdle": "pause", "idleTimeoutSeconds": 60});
    assert_eq!(of(whole).await, (pause.clone(), json!(true)));
    assert_eq!(of(json!({"ttlSeconds": 60})).await, (pause.clone(), json!(true)), "what is not said stays");
    assert_eq!(of(json!({"onIdle": "pause", "autoResume": false})).await, (pause, json!(false)));
    assert_eq!(of(json!({"onIdle": "stop"})).await, (stop, json!(false)));

    let cannot = Service::with(FakeDriver::default().without_snapshots(), |_| {}).await;
    let m = cannot.machine().await;
    for body in [json!({"onIdle": "pause", "idleTimeoutSeconds": 60}), json!({"autoResume": true})] {
        assert_eq!(cannot.post(&m.path("/extend"), body).await.code(), "unsupported");
    }
}

#[tokio::test]
async fn extend_never_shortens_and_looking_never_extends() {
    let s = Service::start().await;
    let m = s.machine().await;
    let before = s.get(&m.path("")).await.ok();
    let hard = |v: &Value| v["hardDeadlineMs"].as_i64().unwrap();
    let shorter = s.post(&m.path("/extend"), json!({"ttlSeconds": 10})).await.ok();
    assert_eq!(hard(&shorter), hard(&before));
    let longer = s.post(&m.path("/extend"), json!({"ttlSeconds": 7200, "idleTimeoutSeconds": 60})).await.ok();
    assert!(hard(&longer) > hard(&before) + 3_000_000);
    assert_eq!(longer["idleTimeoutSeconds"], 60);
    assert!(longer["idleDeadlineMs"].is_i64());
    tokio::time::sleep(std::time::Duration::from_millis(30)).await;
    let seen = s.get(&m.path("")).await.ok();
    assert_eq!((hard(&seen), &seen["idleDeadlineMs"]), (hard(&longer), &longer["idleDeadlineMs"]));
    for bad in [
        json!({}),
        json!({"ttlSeconds": 1}),
        json!({"ttlSeconds": 604_801}),
        json!({"idleTimeoutSeconds": 1}),
        json!({"ttl": 60}),
    ] {
        assert_eq!(s.post(&m.path("/extend"), bad.clone()).await.code(), "invalid_request", "{bad}");
    }
}

#[tokio::test]
async fn lists_are_paged_newest_first_and_filtered() {
    let s = Service::start().await;
    for i in 0..7 {
        let body = json!({"catalogId": "python", "slot": format!("m{i}"), "metadata": {"parity": (i % 2).to_string(), "a b&c": "x=y"}});
        s.post("/v1/machines", body).await.ok();
    }
    let mut seen = Vec::new();
    let mut cursor = String::new();
    loop {
        let page = s.get(&format!("/v1/machines?limit=3{cursor}")).await.ok();
        seen.extend(page["machines"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap().to_owned()));
        match page["nextCursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    assert_eq!(seen, ["m6", "m5", "m4", "m3", "m2", "m1", "m0"]);
    let ids = |path: &str| {
        let (s, path) = (&s, path.to_owned());
        async move {
            let page = s.get(&path).await.ok();
            page["machines"]
                .as_array()
                .unwrap()
                .iter()
                .map(|m| m["id"].as_str().unwrap().to_owned())
                .collect::<Vec<_>>()
        }
    };
    assert_eq!(ids("/v1/machines?metadata.parity=1").await, ["m5", "m3", "m1"]);
    assert_eq!(ids("/v1/machines?metadata.parity=0&metadata.a%20b%26c=x%3Dy&limit=2").await, ["m6", "m4"]);
    assert_eq!(ids("/v1/machines?metadata.parity=2").await, Vec::<String>::new());
    let m3 = Machine::of(&s.get("/v1/machines/m3").await.ok());
    s.post(&m3.path("/stop"), json!({})).await.ok();
    assert_eq!(ids("/v1/machines?state=stopped").await, ["m3"]);
    assert_eq!(ids("/v1/machines?state=running&metadata.parity=1").await, ["m5", "m1"]);
    for bad in
        ["limit=0", "limit=1001", "limit=x", "cursor=x", "state=dead", "stat=running", "limit=1&limit=2", "limit=%ff"]
    {
        assert_eq!(s.get(&format!("/v1/machines?{bad}")).await.code(), "invalid_request", "{bad}");
    }
}

#[tokio::test]
async fn commands_report_what_happened() {
    let s = Service::start().await;
    let m = s.machine().await;
    let run = |body: Value| {
        let (s, m) = (&s, &m);
        async move { s.post(&m.path("/commands/run"), body).await }
    };
    let r = run(json!({"command": "echo hi"})).await.ok();
    assert_eq!(
        (text(&r["stdoutBase64"]).as_str(), &r["exitCode"], &r["timedOut"], &r["signal"]),
        ("hi\n", &json!(0), &json!(false), &Value::Null)
    );
    let r = run(json!({"command": "exit 7"})).await;
    assert_eq!((r.status.as_u16(), &r.json()["exitCode"]), (200, &json!(7)), "a non-zero exit is a normal result");
    let r = run(json!({"command": ["cat"], "stdinBase64": STANDARD.encode("given")})).await.ok();
    assert_eq!(text(&r["stdoutBase64"]), "given");
    let r = run(json!({"command": "hang", "timeoutMs": 50})).await.ok();
    assert_eq!((&r["exitCode"], &r["timedOut"]), (&json!(-1), &json!(true)));
    let r = run(json!({"command": "flood 100000", "outputLimitBytes": 1000})).await.ok();
    assert_eq!(r["stdoutBytes"], 100_000);
    assert_eq!(r["stdoutOmitted"]["length"], 99_000);
    assert_eq!(STANDARD.decode(r["stdoutBase64"].as_str().unwrap()).unwrap().len(), 1000);
    assert_eq!(run(json!({"command": ["no-such-program"]})).await.code(), "command_not_started");
    let r = run(json!({"command": "printenv USER", "user": "app:1000"})).await.ok();
    assert_eq!(text(&r["stdoutBase64"]), "app\n");
    let r = run(json!({"command": "printenv USER", "user": "nobody"})).await;
    assert_eq!(r.code(), "command_not_started");
    let said = r.json().to_string();
    assert!(said.contains("no such user in the machine") && said.contains("/etc/passwd"), "{said}");
    assert_eq!(run(json!({"command": "true", "user": ""})).await.code(), "invalid_request");
    let many = futures::future::join_all((0..200).map(|_| run(json!({"command": "exit 7"})))).await;
    assert!(many.iter().all(|r| r.json()["exitCode"] == 7));
}

#[tokio::test]
async fn files_go_both_ways_byte_for_byte_whatever_their_name() {
    let s = Service::start().await;
    let m = s.machine().await;
    let content: Vec<u8> = (0..3_000_000u32).map(|i| (i % 251) as u8).collect();
    for name in [
        "/tmp/re%22port",
        "/tmp/a%0Ab",
        "/tmp/x%5C",
        "/tmp/%C3%A9",
        "/tmp/-dash%20%2B%26%3D",
        &format!("/tmp/{}", "n".repeat(255)),
    ] {
        let path = format!("{}&path={name}", m.path("/files/content"));
        let written = s.put(&format!("{path}&mode=0600"), content.clone()).await.ok();
        assert_eq!(written, json!({"size": 3_000_000}), "{name}");
        let read = s.get(&path).await;
        assert_eq!(read.status, 200, "{name}");
        assert!(read.body == content, "{name}: content differs");
        assert_eq!(read.headers["content-type"], "application/octet-stream");
        assert_eq!(read.headers["x-mainbrella-size"], "3000000");
        assert_eq!(read.headers["x-mainbrella-mode"], "0600");
        assert!(read.headers.contains_key("x-mainbrella-mtime"));
        let part = s.get(&format!("{path}&offset=1000&length=10")).await;
        assert_eq!(part.body, content[1000..1010]);
    }
    let at = |q: &str| format!("{}&{q}", m.path("/files/content"));
    assert_eq!(s.get(&at("path=/tmp/none")).await.code(), "file_not_found");
    for bad in [
        "path=tmp/x",
        "path=/a%00b",
        "path=",
        "",
        "path=/tmp/x&offset=-1",
        "path=/tmp/x&length=x",
        "path=/%ff",
        "path=/tmp/x&what=1",
    ] {
        assert_eq!(s.get(&at(bad)).await.code(), "invalid_request", "{bad}");
        assert_eq!(s.put(&at(bad), "x").await.code(), "invalid_request", "{bad}");
    }
    let too_long = format!("path=/tmp/{}", "n".repeat(256));
    assert_eq!(s.put(&at(&too_long), "x").await.code(), "invalid_request");
    for bad in ["path=/tmp/x&mode=9", "path=/tmp/x&exclusive=maybe", "path=/tmp/x&createParents=1"] {
        assert_eq!(s.put(&at(bad), "x").await.code(), "invalid_request", "{bad}");
    }
    s.driver.guest.disk_full.store(true, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(s.put(&at("path=/tmp/full"), content).await.code(), "guest_disk_full");
}

#[tokio::test]
async fn an_upload_that_is_announced_too_large_is_refused_before_it_is_sent() {
    let s = Service::start().await;
    let m = s.machine().await;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut stream = tokio::net::TcpStream::connect(s.address).await.unwrap();
    let head = format!(
        "PUT {}&path=/tmp/x HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {}\r\ncontent-length: 5368709121\r\n\r\n",
        m.path("/files/content"),
        s.admin
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut reply = vec![0; 4096];
    let n = stream.read(&mut reply).await.unwrap();
    let reply = String::from_utf8_lossy(&reply[..n]).into_owned();
    assert!(reply.starts_with("HTTP/1.1 413") && reply.contains("payload_too_large"), "{reply}");
}

#[tokio::test]
async fn capabilities_say_what_the_driver_says_and_nothing_more() {
    let s = Service::start().await;
    let c = s.get("/v1/capabilities").await.ok();
    assert_eq!(
        (&c["driver"], &c["isolation"]["kind"], &c["isolation"]["accelerator"]),
        (&json!("fake"), &json!("shared-kernel"), &Value::Null)
    );
    assert_eq!(
        c["networking"],
        json!({
            "internet": false, "internetControl": true, "internetDefault": false, "egressAllowList": false, "egressChange": false,
            "egressSecrets": false
        })
    );
    assert_eq!(c["previews"], json!({"supported": true, "idempotent": true, "renewal": true}));
    assert_eq!(c["templates"], json!(["node", "python"]));
    assert_eq!(c["sizes"].as_array().unwrap().len(), 4);
    assert!(c["isolation"]["jail"].as_object().unwrap().values().all(|v| v == false));
    assert_eq!(c["observability"]["lifecycleEvents"], json!(false));
    let events = s.post("/v1/machines/x/events", json!({})).await;
    assert_eq!(events.code(), "not_found", "what is false is not there");
    let powers = c["persistence"].as_object().unwrap();
    assert!(powers.len() == 6 && powers.values().all(|v| v == true), "{powers:?}");
    assert!(
        c["files"].as_object().unwrap().values().all(|v| v == true),
        "every verb of files is there: {}",
        c["files"]
    );
    assert_eq!(c["execution"]["codeContexts"], json!(["python"]));
    let powers = c["execution"].as_object().unwrap().iter().filter(|(name, _)| *name != "codeContexts");
    assert!(powers.clone().count() > 8 && powers.clone().all(|(_, v)| v == true), "{}", c["execution"]);
    let disk = s.get("/v1/disk").await.ok();
    assert!(disk["totalBytes"].as_u64() > disk["freeBytes"].as_u64(), "{disk}");
    assert!(disk["parts"].as_array().unwrap().iter().any(|p| p["part"] == "jobs" && p["bytes"].is_u64()), "{disk}");
    let t = s.get("/v1/templates").await.ok();
    assert_eq!(t["templates"][1]["name"], "python");
    assert_eq!(t["templates"][1]["frozenSizes"], json!(["small"]));
}
