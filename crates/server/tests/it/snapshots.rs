//! Snapshots through HTTP, over the fake driver: saved, listed, restored, ended, and whole after every fault.

use std::sync::atomic::Ordering;
use std::time::Duration;

use mainbrella_engine::Driver as _;
use mainbrella_engine::fake::FakeDriver;
use mainbrella_server::reconcile;
use mainbrella_types::{GenerationKey, Millis, ProjectId, SizeClass, SnapshotKey, SnapshotKind, SnapshotRecord};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::common::{Machine, Service};

fn id(v: &Value) -> String {
    v["id"].as_str().unwrap().to_owned()
}

fn workspace() -> Value {
    json!({"name": "Project files", "kind": "workspace"})
}

async fn write(s: &Service, m: &Machine, name: &str) {
    let body = json!({"path": format!("/workspace/{name}"), "recursive": true});
    assert!(s.post(&m.path("/files/mkdir"), body).await.status.is_success());
}

async fn has(s: &Service, m: &Machine, name: &str) -> bool {
    s.get(&format!("{}&path=/workspace/{name}", m.path("/files/stat"))).await.status == 200
}

async fn key_of(s: &Service, m: &Machine) -> GenerationKey {
    let slot = m.id.parse().unwrap();
    s.state.store.newest_in_slot(&ProjectId::default_project(), &slot).await.unwrap().unwrap().key
}

/// Waits for something that is done in the background.
async fn eventually(mut done: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !done().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.expect("it happens");
}

/// One round of what is put right from time to time.
async fn round(s: &Service, mut done: impl AsyncFnMut() -> bool) {
    let stop = CancellationToken::new();
    let running = tokio::spawn(reconcile::run(s.state.clone(), stop.clone()));
    eventually(&mut done).await;
    stop.cancel();
    running.await.unwrap();
}

async fn on_host(s: &Service) -> usize {
    s.driver.snapshots().await.unwrap().len()
}

#[tokio::test]
async fn a_saved_workspace_is_listed_changed_restored_and_deleted() {
    let s = Service::with(FakeDriver::default().with_internet(), |_| {}).await;
    let persistence = s.get("/v1/capabilities").await.ok()["persistence"].clone();
    assert_eq!((&persistence["snapshots"], &persistence["memorySnapshot"]), (&json!(true), &json!(true)));
    let egress = json!({"policy": "allow-list", "rules": ["a.example"]});
    let body = json!({"catalogId": "python", "egress": egress, "env": {"A": "1", "B": "1"}, "metadata": {"a": "b"}});
    let m = Machine::of(&s.post("/v1/machines", body).await.ok());
    write(&s, &m, "kept").await;
    let reply = s.post(&m.path("/snapshots"), workspace()).await;
    assert_eq!(reply.status, 201);
    let saved = reply.json();
    assert_eq!(
        (&saved["name"], &saved["kind"], &saved["archived"]),
        (&json!("Project files"), &json!("workspace"), &json!(false))
    );
    assert_eq!((&saved["size"], &saved["catalogId"], &saved["egress"]), (&json!("small"), &json!("python"), &egress));
    assert_eq!(saved["source"], json!(format!("{}@{}", m.id, m.created_at)));
    assert!(saved["bytes"].as_u64().unwrap() > 0 && saved["templateDigest"].is_string() && saved.get("env").is_none());
    assert!(saved["expiresAtMs"].is_null() && saved.get("stopOutcome").is_none());
    write(&s, &m, "later").await;
    let at = format!("/v1/snapshots/{}", id(&saved));
    assert_eq!(s.get(&at).await.ok(), saved);
    assert_eq!(s.get("/v1/snapshots").await.ok(), json!({"snapshots": [saved], "nextCursor": null}));
    let full = s.post(&m.path("/snapshots"), json!({"name": "all", "kind": "full", "ttlSeconds": 60})).await.ok();
    assert_eq!(full["expiresAtMs"].as_i64().unwrap() - full["createdAtMs"].as_i64().unwrap(), 60_000);
    let of = async |q: &str| s.get(&format!("/v1/snapshots?{q}")).await.ok()["snapshots"].as_array().unwrap().len();
    assert_eq!((of("kind=full").await, of("name=Project+files").await, of("archived=true").await), (1, 1, 0));
    let page = s.get("/v1/snapshots?limit=1").await.ok();
    assert_eq!(page["snapshots"][0]["id"], full["id"]);
    let rest = s.get(&format!("/v1/snapshots?limit=1&cursor={}", page["nextCursor"].as_str().unwrap())).await.ok();
    assert_eq!((&rest["snapshots"][0]["id"], &rest["nextCursor"]), (&saved["id"], &json!(null)));
    let changed = s.patch(&at, json!({"name": "Other", "archived": true})).await.ok();
    assert_eq!((&changed["name"], &changed["archived"]), (&json!("Other"), &json!(true)));
    assert_eq!(s.patch(&at, json!({})).await.ok(), changed);

    // An archived one is as good, and the source may be gone.
    assert!(s.post(&m.path("/stop"), json!({})).await.status.is_success());
    let body = json!({"env": {"B": "2"}, "metadata": {"c": "d"}, "ttlSeconds": 120, "size": "small", "catalogId": "python",
                      "templateDigest": saved["templateDigest"], "internet": true, "egress": egress});
    let reply = s.post(&format!("{at}/restore"), body).await;
    assert_eq!(reply.status, 201, "{:?}", reply.body);
    let back = reply.json();
    assert_eq!(
        (&back["restoredFrom"], &back["egress"], &back["metadata"]),
        (&saved["id"], &egress, &json!({"c": "d"}))
    );
    let back = Machine::of(&back);
    assert!(has(&s, &back, "kept").await && !has(&s, &back, "later").await);
    for (name, value) in [("A", "MQo="), ("B", "Mgo=")] {
        let run = s.post(&back.path("/commands/run"), json!({"command": ["printenv", name]})).await.ok();
        assert_eq!(run["stdoutBase64"], value, "{run}");
    }
    assert_eq!(s.delete(&at).await.status, 204);
    for gone in [
        s.delete(&at).await,
        s.get(&at).await,
        s.patch(&at, json!({})).await,
        s.post(&format!("{at}/restore"), json!({})).await,
    ] {
        assert_eq!(gone.code(), "not_found");
    }
    assert_eq!(on_host(&s).await, 1);
    assert!(has(&s, &back, "kept").await, "what was started from it goes on");
    assert_eq!(s.get("/v1/snapshots/..%2fetc").await.code(), "not_found");
}

#[tokio::test]
async fn a_key_stands_for_one_save_and_for_one_restore() {
    let s = Service::start().await;
    let m = s.machine().await;
    s.driver.host.save_lasts_ms.store(150, Ordering::SeqCst);
    let key = [("idempotency-key", "k")];
    // Ten at once are one; those that come while it is in progress wait for it.
    let path = m.path("/snapshots");
    let ten = (0..10).map(|_| s.post_with(&path, workspace(), &key));
    let replies = futures::future::join_all(ten).await;
    let ids: std::collections::HashSet<String> = replies.iter().map(|r| id(&r.ok())).collect();
    assert_eq!((ids.len(), on_host(&s).await), (1, 1));
    assert_eq!(replies.iter().filter(|r| r.status == 201).count(), 1);
    assert!(replies.iter().filter(|r| r.status == 200).all(|r| r.headers["idempotency-replayed"] == "true"));
    let other = json!({"name": "Other", "kind": "workspace"});
    assert_eq!(s.post_with(&m.path("/snapshots"), other, &key).await.code(), "idempotency_conflict");
    let second = s.machine().await;
    assert_eq!(s.post_with(&second.path("/snapshots"), workspace(), &key).await.code(), "idempotency_conflict");

    let at = format!("/v1/snapshots/{}", ids.iter().next().unwrap());
    let first = s.post_with(&format!("{at}/restore"), json!({}), &key).await;
    let again = s.post_with(&format!("{at}/restore"), json!({}), &key).await;
    assert_eq!((first.status.as_u16(), again.status.as_u16(), id(&first.json())), (201, 200, id(&again.json())));
    assert_eq!(
        s.post_with(&format!("{at}/restore"), json!({"persistent": true}), &key).await.code(),
        "idempotency_conflict"
    );
    // The machine may be gone, and the snapshot.
    assert!(s.post(&m.path("/stop"), json!({})).await.status.is_success());
    assert_eq!(s.post_with(&m.path("/snapshots"), workspace(), &key).await.status, 200);
    assert_eq!(s.post(&m.path("/snapshots"), workspace()).await.code(), "machine_not_running");
    assert_eq!(s.delete(&at).await.status, 204);
    assert_eq!(s.post_with(&m.path("/snapshots"), workspace(), &key).await.code(), "not_found");
    assert_eq!(id(&s.post_with(&format!("{at}/restore"), json!({}), &key).await.ok()), id(&first.json()));
}

#[tokio::test]
async fn a_machine_is_stopped_only_when_it_is_saved() {
    let s = Service::start().await;
    let m = s.machine().await;
    write(&s, &m, "kept").await;
    let (body, key) = (json!({"name": "n", "kind": "workspace", "stop": true}), [("idempotency-key", "k")]);
    s.driver.host.save.store(1, Ordering::SeqCst);
    assert_eq!(s.post_with(&m.path("/snapshots"), body.clone(), &key).await.code(), "internal");
    assert_eq!(s.get(&m.path("")).await.ok()["state"], "running");
    let reply = s.post_with(&m.path("/snapshots"), body.clone(), &key).await;
    assert_eq!((reply.status.as_u16(), &reply.json()["stopOutcome"]), (201, &json!("stopped")));
    assert_eq!(s.get(&m.path("")).await.ok()["state"], "stopped");
    let again = s.post_with(&m.path("/snapshots"), body, &key).await;
    assert_eq!((again.status.as_u16(), &again.json()["stopOutcome"]), (200, &json!("stopped")));
    let back = s.post(&format!("/v1/snapshots/{}/restore", id(&again.json())), json!({})).await.ok();
    assert!(has(&s, &Machine::of(&back), "kept").await);
}

#[tokio::test]
async fn what_was_not_saved_is_refused_with_what_was() {
    let s = Service::with(FakeDriver::default().with_internet(), |_| {}).await;
    let m = Machine::of(&s.post("/v1/machines", json!({"catalogId": "python", "internet": false})).await.ok());
    let at = format!("/v1/snapshots/{}/restore", s.saved(&m).await);
    for other in [
        json!({"size": "medium"}),
        json!({"catalogId": "node"}),
        json!({"templateDigest": "sha256:other"}),
        json!({"internet": true}),
        json!({"egress": {"policy": "open"}}),
    ] {
        let refused = s.post(&at, other.clone()).await.error();
        assert_eq!(refused.code, "snapshot_mismatch", "{other}");
        let told = ["python", "small", "without internet"].iter().all(|what| refused.hint.contains(what));
        assert!(told && refused.message.contains(other.as_object().unwrap().keys().next().unwrap()), "{refused:?}");
    }
    for bad in [
        json!({"slot": "A B"}),
        json!({"ttlSeconds": 1}),
        json!({"internet": false, "egress": {"policy": "open"}}),
        json!({"name": "x"}),
        json!({"metadata": {"a": "\u{0}"}}),
    ] {
        assert_eq!(s.post(&at, bad.clone()).await.code(), "invalid_request", "{bad}");
    }
    for bad in [
        json!({"name": "", "kind": "full"}),
        json!({"name": "x".repeat(129), "kind": "full"}),
        json!({"name": "a\nb", "kind": "full"}),
        json!({"name": "n", "kind": "half"}),
        json!({"name": "n"}),
        json!({"name": "n", "kind": "full", "ttlSeconds": 59}),
        json!({"name": "n", "kind": "full", "ttlSeconds": 31_536_001u64}),
    ] {
        assert_eq!(s.post(&m.path("/snapshots"), bad.clone()).await.code(), "invalid_request", "{bad}");
    }
    for bad in ["limit=0", "limit=1001", "cursor=x", "kind=half", "archived=1", "name=", "state=x"] {
        assert_eq!(s.get(&format!("/v1/snapshots?{bad}")).await.code(), "invalid_request", "{bad}");
    }
    assert_eq!(s.driver.alive(), 1);
    assert_eq!(s.post(&at, json!({"internet": false, "size": "small"})).await.ok()["internet"], false);
}

#[tokio::test]
async fn limits_and_hosts_that_cannot_are_told() {
    let s = Service::with(FakeDriver::default(), |c| c.max_snapshots_per_project = 1).await;
    let m = s.machine().await;
    let first = s.saved(&m).await;
    assert_eq!(s.post(&m.path("/snapshots"), workspace()).await.code(), "snapshot_limit");
    assert_eq!(on_host(&s).await, 1);
    assert_eq!(s.delete(&format!("/v1/snapshots/{first}")).await.status, 204);
    s.saved(&m).await;
    assert_eq!(s.post(&m.path("/pause"), json!({})).await.status, 200);
    assert_eq!(s.post(&m.path("/snapshots"), workspace()).await.code(), "machine_not_running");
    let s = Service::with(FakeDriver::default().without_snapshots(), |_| {}).await;
    let m = s.machine().await;
    assert_eq!(s.get("/v1/capabilities").await.ok()["persistence"]["snapshots"], false);
    assert_eq!(s.post(&m.path("/snapshots"), workspace()).await.code(), "unsupported");
}

#[tokio::test]
async fn a_save_that_fails_leaves_nothing_and_its_key_is_free() {
    let s = Service::start().await;
    let m = s.machine().await;
    let key = [("idempotency-key", "k")];
    for (fault, code) in [(&s.driver.host.save, "internal"), (&s.driver.host.save_host_full, "host_full")] {
        fault.store(1, Ordering::SeqCst);
        assert_eq!(s.post_with(&m.path("/snapshots"), workspace(), &key).await.code(), code);
        assert_eq!(s.get("/v1/snapshots").await.ok()["snapshots"], json!([]));
        assert!(s.state.store.snapshots_of_host("local").await.unwrap().is_empty());
        let run = s.post(&m.path("/commands/run"), json!({"command": "exit 5"})).await.ok();
        assert_eq!(run["exitCode"], json!(5), "the machine goes on");
    }
    assert_eq!(s.post_with(&m.path("/snapshots"), workspace(), &key).await.status, 201);
}

#[tokio::test]
async fn a_save_goes_on_when_its_caller_goes_away() {
    let s = Service::start().await;
    let m = s.machine().await;
    s.driver.host.save_lasts_ms.store(300, Ordering::SeqCst);
    let path = m.path("/snapshots");
    let call = s.post_with(&path, workspace(), &[("idempotency-key", "k")]);
    assert!(tokio::time::timeout(Duration::from_millis(100), call).await.is_err(), "it was left");
    let again = s.post_with(&path, workspace(), &[("idempotency-key", "k")]).await;
    assert_eq!((again.status.as_u16(), on_host(&s).await), (200, 1));
}

#[tokio::test]
async fn what_could_not_be_acknowledged_is_gone_after_a_restart_and_what_was_is_whole() {
    let s = Service::start().await;
    let m = s.machine().await;
    write(&s, &m, "kept").await;
    let kept = s.saved(&m).await;
    let lost = s.saved(&m).await;
    // The store goes away between a save and its acknowledgement.
    s.driver.host.save_lasts_ms.store(300, Ordering::SeqCst);
    let (store, path) = (s.state.store.clone(), m.path("/snapshots"));
    let (reply, ()) = tokio::join!(s.post_with(&path, workspace(), &[("idempotency-key", "k")]), async {
        eventually(async || on_host(&s).await == 3).await;
        store.close().await;
    });
    assert!(reply.status.is_server_error(), "{:?}", reply.body);
    assert_eq!(on_host(&s).await, 3);
    let (dir, driver, _) = s.end().await;
    driver.host.save_lasts_ms.store(0, Ordering::SeqCst);
    // Nobody's: no record names it.
    let stray = SnapshotKey::new(uuid::Uuid::now_v7());
    let order = mainbrella_engine::SaveOrder { snapshot: stray, kind: SnapshotKind::Workspace };
    let machine = driver.inventory().await.unwrap()[0];
    driver.save(&machine, &order).await.unwrap();
    driver.damage(&lost.parse().unwrap());
    // The first removal fails, and is tried again.
    driver.host.forget.store(1, Ordering::SeqCst);
    let s = Service::on(dir, driver, |_| {}).await;
    round(&s, async || on_host(&s).await == 1).await;
    let listed = s.get("/v1/snapshots").await.ok();
    let listed: Vec<String> = listed["snapshots"].as_array().unwrap().iter().map(id).collect();
    assert_eq!(listed, [lost.clone(), kept.clone()], "what was acknowledged stays on record");
    let back = s.post(&format!("/v1/snapshots/{kept}/restore"), json!({})).await.ok();
    assert!(has(&s, &Machine::of(&back), "kept").await);
    let alive = s.driver.alive();
    assert_eq!(s.post(&format!("/v1/snapshots/{lost}/restore"), json!({})).await.code(), "snapshot_damaged");
    assert_eq!(s.driver.alive(), alive);
    // The key of the save that was not acknowledged is free.
    let again = s.post_with(&m.path("/snapshots"), workspace(), &[("idempotency-key", "k")]).await;
    assert_eq!(again.status, 201);
}

#[tokio::test]
async fn a_removal_that_fails_is_tried_again_until_nothing_is_left() {
    let s = Service::start().await;
    let m = s.machine().await;
    let full = s.post(&m.path("/snapshots"), json!({"name": "n", "kind": "full"})).await.ok();
    s.driver.host.forget.store(1, Ordering::SeqCst);
    assert_eq!(s.delete(&format!("/v1/snapshots/{}", id(&full))).await.status, 204);
    assert_eq!(s.get("/v1/snapshots").await.ok()["snapshots"], json!([]));
    assert_eq!(on_host(&s).await, 1);
    round(&s, async || s.state.engine.snapshot_remains().await.unwrap().is_empty()).await;
}

#[tokio::test]
async fn time_ends_a_snapshot_and_what_is_left_of_it() {
    let s = Service::start().await;
    let m = s.machine().await;
    let (kept, key) = (s.saved(&m).await, SnapshotKey::new(uuid::Uuid::now_v7()));
    let now = s.state.now();
    let short = SnapshotRecord {
        key,
        project: ProjectId::default_project(),
        host: "local".into(),
        name: "short".into(),
        kind: SnapshotKind::Workspace,
        saved: false,
        source: format!("{}@{}", m.id, m.created_at).parse().unwrap(),
        template: "python".parse().unwrap(),
        template_digest: String::new(),
        size: SizeClass::Small,
        egress: Default::default(),
        env: Default::default(),
        bytes: 0,
        created_at: Millis(now.0 - 100_000),
        expires_at: Some(Millis(now.0 - 1)),
        archived: false,
    };
    s.state.store.begin_save(&short, None, 10).await.unwrap();
    let order = mainbrella_engine::SaveOrder { snapshot: key, kind: SnapshotKind::Workspace };
    s.driver.save(&key_of(&s, &m).await, &order).await.unwrap();
    s.state.store.finish_save(&key, 1).await.unwrap();
    let at = format!("/v1/snapshots/{key}");
    assert_eq!(s.get(&at).await.code(), "not_found", "before anybody looks after it");
    assert_eq!(s.post(&format!("{at}/restore"), json!({})).await.code(), "not_found");
    round(&s, async || on_host(&s).await == 1).await;
    assert_eq!(s.get(&format!("/v1/snapshots/{kept}")).await.status, 200);
}

#[tokio::test]
async fn what_a_machine_is_being_made_from_is_removed_only_afterwards() {
    let s = Service::with(FakeDriver::new(Duration::from_millis(400)), |_| {}).await;
    let m = s.machine().await;
    write(&s, &m, "kept").await;
    let at = format!("/v1/snapshots/{}", s.saved(&m).await);
    let restore = format!("{at}/restore");
    let (made, ()) = tokio::join!(s.post(&restore, json!({})), async {
        eventually(async || s.get("/v1/machines").await.ok()["machines"].as_array().unwrap().len() == 2).await;
        assert_eq!(s.delete(&at).await.status, 204);
    });
    assert!(has(&s, &Machine::of(&made.ok()), "kept").await);
    round(&s, async || on_host(&s).await == 0).await;
}

#[tokio::test]
async fn a_workspace_is_exported_and_imported_packed_or_not() {
    use std::io::{Read as _, Write as _};

    let s = Service::start().await;
    let m = s.machine().await;
    let at = m.path("/workspace");
    assert_eq!(s.get(&at).await.code(), "file_not_found");
    let archive: Vec<u8> = (0..200_000u32).flat_map(|n| n.to_le_bytes()).collect();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(&archive).unwrap();
    let packed = encoder.finish().unwrap();
    for body in [packed.clone(), archive.clone()] {
        let done = s.put(&at, body).await.ok();
        assert_eq!(done, json!({"entries": 1, "bytes": archive.len(), "skipped": 0}));
        let reply = s.get(&at).await;
        assert_eq!((reply.status.as_u16(), reply.headers["content-type"].to_str().unwrap()), (200, "application/gzip"));
        let mut got = Vec::new();
        flate2::read::GzDecoder::new(&reply.body[..]).read_to_end(&mut got).unwrap();
        assert!(got == archive && reply.body.len() < archive.len());
    }
    for broken in [&packed[..packed.len() - 5], &packed[..100], b"evil archive"] {
        let refused = s.put(&at, broken.to_vec()).await.error();
        assert_eq!(refused.code, "invalid_request", "{refused:?}");
    }
    assert!(s.put(&at, packed[..100].to_vec()).await.error().message.contains("gzip"));
    assert_eq!(s.get(&m.path("/workspace").replace('?', "?path=%2Fetc&")).await.code(), "invalid_request");
}

#[tokio::test]
async fn what_was_saved_is_read_without_a_machine_and_never_written() {
    let s = Service::with(FakeDriver::default(), |c| c.max_machines_per_project = 1).await;
    let m = s.machine().await;
    let data: Vec<u8> = (0..300_000u32).map(|n| (n % 251) as u8).collect();
    let path = format!("{}&path=/srv/deep/data&createParents=true&mode=0640", m.path("/files/content"));
    assert!(s.put(&path, data.clone()).await.status.is_success());
    assert!(s.put(&m.path("/workspace"), data.clone()).await.status.is_success());
    let files = s.saved(&m).await;
    let full = id(&s.post(&m.path("/snapshots"), json!({"name": "all", "kind": "full"})).await.ok());
    for saved in [&files, &full] {
        let at = format!("/v1/snapshots/{saved}");
        let get = async |what: &str| s.get(&format!("{at}/{what}")).await;
        let listed = get("files/list?path=/srv").await.ok();
        assert_eq!((&listed["entries"][0]["path"], &listed["nextOffset"]), (&json!("/srv/deep"), &json!(null)));
        let stat = get("files/stat?path=/srv/deep/data").await.ok();
        assert_eq!((&stat["size"], &stat["mode"]), (&json!(data.len()), &json!("0640")));
        let content = get("files/content?path=/srv/deep/data").await;
        assert!(content.body == data && content.headers["x-mainbrella-mode"] == "0640");
        assert_eq!(get("files/content?path=/srv/deep/data&offset=2&length=3").await.body, data[2..5]);
        let tree = get("files/tree?path=/workspace").await;
        assert_eq!((tree.status.as_u16(), &tree.headers["content-type"]), (200, &"application/x-tar".parse().unwrap()));
        assert_eq!(tree.body, data);
        let packed = get("workspace").await;
        assert!(packed.status == 200 && packed.body.starts_with(&[0x1f, 0x8b]));
        assert_eq!(get("files/stat?path=/none").await.code(), "file_not_found");
        assert_eq!(get("files/list?path=relative").await.code(), "invalid_request");
        assert_eq!(get("files/list").await.code(), "invalid_request");
        assert_eq!(get("files/content?path=/a&createdAt=2026-01-01T00:00:00Z").await.code(), "invalid_request");
        for write in ["files/content?path=/workspace/new", "files/tree?path=/workspace", "workspace"] {
            assert_eq!(s.put(&format!("{at}/{write}"), "x").await.status, 405, "{write}");
        }
    }
    // The machine and one for each of the two; whoever lists or counts machines sees the first alone.
    assert_eq!((s.driver.alive(), s.state.engine.living()), (3, 1));
    assert_eq!(s.get("/v1/machines").await.ok()["machines"].as_array().unwrap().len(), 1);
    assert!(s.post(&m.path("/stop"), json!({})).await.status.is_success());
    assert_eq!(s.post("/v1/machines", json!({"catalogId": "python"})).await.status, 201);
    assert_eq!(s.delete(&format!("/v1/snapshots/{full}")).await.status, 204);
    assert_eq!(s.driver.alive(), 2, "what read it is gone");
    let gone = s.get(&format!("/v1/snapshots/{full}/files/list?path=/")).await;
    assert_eq!(gone.code(), "not_found");
    s.driver.damage(&files.parse().unwrap());
    let damaged = s.get(&format!("/v1/snapshots/{files}/files/list?path=/")).await;
    assert_eq!(damaged.code(), "snapshot_damaged", "even while a machine still has it");
}

#[tokio::test]
async fn only_so_many_are_read_at_once() {
    let s = Service::start().await;
    let m = s.machine().await;
    let mut held = Vec::new();
    for _ in 0..mainbrella_types::limits::SNAPSHOT_READERS_MAX {
        let key: SnapshotKey = s.saved(&m).await.parse().unwrap();
        let order =
            mainbrella_engine::ReadOrder { snapshot: key, template: "python".parse().unwrap(), size: SizeClass::Small };
        held.push(s.state.engine.read_snapshot(&order).await.unwrap());
    }
    let one_more = format!("/v1/snapshots/{}/files/list?path=/", s.saved(&m).await);
    let refused = s.get(&one_more).await.error();
    assert!(refused.code == "overloaded" && refused.hint.contains("in a minute"), "{refused:?}");
    held.pop();
    assert_eq!(s.get(&one_more).await.status, 200);
}

#[tokio::test]
async fn a_machine_from_a_snapshot_pauses_when_unused_where_that_is_asked_for() {
    let s = Service::start().await;
    let m = s.machine().await;
    let at = format!("/v1/snapshots/{}/restore", s.saved(&m).await);
    let of = async |body: Value| {
        let made = s.post(&at, body).await.ok();
        (made["onIdle"].clone(), made["autoResume"].clone())
    };
    let (stop, pause) = (json!("stop"), json!("pause"));
    assert_eq!(of(json!({})).await, (stop, json!(false)));
    assert_eq!(of(json!({"onIdle": "pause", "idleTimeoutSeconds": 60})).await, (pause.clone(), json!(true)));
    let never = json!({"onIdle": "pause", "idleTimeoutSeconds": 60, "autoResume": false});
    assert_eq!(of(never).await, (pause, json!(false)));
    let unbounded = json!({"onIdle": "pause", "persistent": true});
    assert_eq!(s.post(&at, unbounded).await.code(), "invalid_request");
    assert_eq!(s.post(&at, json!({"onIdle": "sleep"})).await.code(), "invalid_request");
}
