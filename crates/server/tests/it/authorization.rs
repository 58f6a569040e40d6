//! Every operation of the description, under every kind of caller. The list is the description itself; what is open
//! or for admins only stands in `authorization-exceptions.json`, and must stand there.

use crate::common::{Machine, Service};
use bytes::Bytes;
use http::{Method, Request};
use mainbrella_engine::fake::FakeDriver;
use mainbrella_store::KeyRole;
use serde_json::{Value, json};

struct Operation {
    id: String,
    method: Method,
    path: String,
    open: bool,
}

fn operations() -> Vec<Operation> {
    let d = crate::common::document();
    let mut list = Vec::new();
    for (path, item) in d["paths"].as_object().unwrap() {
        for (method, o) in item.as_object().unwrap() {
            list.push(Operation {
                id: o["operationId"].as_str().unwrap().to_owned(),
                method: Method::from_bytes(method.to_uppercase().as_bytes()).unwrap(),
                path: path.clone(),
                // A signed URL is a credential of its own, see `signed.rs`.
                open: !o["security"].as_array().unwrap().iter().any(|s| s.get("apiKey").is_some()),
            });
        }
    }
    let signed = exceptions("signed");
    let (rest, found): (Vec<_>, Vec<_>) = list.into_iter().partition(|o: &Operation| !signed.contains(&o.id));
    assert_eq!(
        found.iter().filter(|o| o.open).count(),
        signed.len(),
        "what is listed as signed is there, and needs no key"
    );
    rest
}

/// So that each finds what it needs, and none spoils it for another.
fn turn(id: &str) -> u32 {
    match id {
        "writeFile" | "uploadTree" | "importWorkspace" => 0,
        "removeFile" => 2,
        "forkMachine" | "saveSnapshot" => 2,
        "deleteSnapshot" => 6,
        "pauseMachine" => 3,
        "resumeMachine" => 4,
        "stopMachine" => 5,
        "createTemplate" => 2,
        "tagTemplate" => 3,
        "getTemplate" => 4,
        "removeTemplate" => 5,
        "sendBuildContext" => 2,
        "cancelBuild" => 3,
        _ => 1,
    }
}

fn exceptions(kind: &str) -> Vec<String> {
    let all: Value = serde_json::from_str(include_str!("authorization-exceptions.json")).unwrap();
    serde_json::from_value(all[kind].clone()).unwrap()
}

/// A request that a right caller would have accepted.
fn request(s: &Service, o: &Operation, machine: &Machine, key_id: &str, authorization: Option<&str>) -> Request<Bytes> {
    request_on(s, o, machine, &serde_json::Value::Null, key_id, authorization)
}

/// A job for `o` to act on, where it acts on one.
async fn job_for(s: &Service, o: &Operation, machine: &Machine) -> Value {
    if !o.path.contains("{jobId}") && !o.path.contains("{pid}") {
        return Value::Null;
    }
    let ended = matches!(o.id.as_str(), "forgetJob" | "jobEvents");
    let command = if ended { "true" } else { "cat" };
    let job = s.job(machine, json!({"command": command, "pty": {"cols": 80, "rows": 24}})).await;
    if ended {
        s.get(&machine.path(&format!("/jobs/{}/wait", job["id"].as_str().unwrap()))).await;
    }
    job
}

/// As [`request`], on a job.
fn request_on(
    s: &Service,
    o: &Operation,
    machine: &Machine,
    job: &Value,
    key_id: &str,
    authorization: Option<&str>,
) -> Request<Bytes> {
    let id = match o.path.split('/').nth(2) {
        Some("keys") => key_id,
        Some("snapshots") => &machine.snapshot,
        Some("builds") => &machine.build,
        _ => &machine.id,
    };
    let mut uri =
        o.path.replace("{id}", id).replace("{contextId}", &machine.context).replace("{previewId}", &machine.preview);
    // The first version that is made of a snapshot, or what means it.
    let template = if matches!(o.id.as_str(), "tagTemplate" | "removeTemplate") { "made:t" } else { "made" };
    uri = uri.replace("{name}", if o.path.starts_with("/v1/templates") { template } else { "token" });
    uri = uri.replace("{jobId}", job["id"].as_str().unwrap_or("0"));
    uri = uri.replace("{pid}", &job["pid"].as_u64().unwrap_or(7).to_string());
    let wait = o.id == "waitForJob";
    if o.path.starts_with("/v1/machines/{id}") {
        uri.push_str(&format!("?createdAt={}", machine.created_at));
    }
    if o.path.contains("/files/") && matches!(o.method, Method::GET | Method::PUT) {
        let tree = matches!(o.id.as_str(), "downloadTree" | "downloadSnapshotTree" | "uploadTree");
        let dir = matches!(o.id.as_str(), "listFiles" | "listSnapshotFiles" | "watchFiles");
        uri.push(if uri.contains('?') { '&' } else { '?' });
        uri.push_str(if tree {
            "path=/tree"
        } else if dir {
            "path=/tmp"
        } else {
            "path=/tmp/f"
        });
    }
    if o.id == "explainEgress" {
        uri.push_str("&host=example.org");
    }
    if wait {
        uri.push_str("&timeoutMs=10");
    }
    let body = match o.id.as_str() {
        "createMachine" => json!({"catalogId": "python"}).to_string(),
        "setEgress" => json!({"policy": "open"}).to_string(),
        "putSecret" => json!({"host": "a.example", "header": "x-key", "value": "v"}).to_string(),
        "forkMachine" => json!({"count": 1}).to_string(),
        "saveSnapshot" => json!({"name": "n", "kind": "workspace"}).to_string(),
        "updateSnapshot" => json!({"archived": true}).to_string(),
        "restoreSnapshot" => json!({}).to_string(),
        "extendMachine" => json!({"ttlSeconds": 60}).to_string(),
        "runCommand" => json!({"command": "true"}).to_string(),
        "startJob" => json!({"command": "true"}).to_string(),
        "signalJob" | "signalProcess" => json!({"signal": "TERM"}).to_string(),
        "resizeJob" => json!({"cols": 100, "rows": 30}).to_string(),
        "createContext" => json!({"language": "python"}).to_string(),
        "runCode" => json!({"code": "print hello"}).to_string(),
        "createBuild" => json!({"name": "app"}).to_string(),
        "sendBuildContext" => "\0".repeat(1024),
        "createTemplate" => json!({"name": "made", "snapshotId": machine.snapshot}).to_string(),
        "tagTemplate" => json!({"source": "made"}).to_string(),
        "createKey" => json!({"name": "n", "role": "user"}).to_string(),
        "makeDirectory" => json!({"path": "/tmp/d", "recursive": true}).to_string(),
        "moveFile" => json!({"source": "/tmp/f", "destination": "/tmp/g"}).to_string(),
        "changeMode" => json!({"path": "/tmp", "mode": "0755"}).to_string(),
        "removeFile" => json!({"path": "/tmp", "recursive": true}).to_string(),
        "createPreview" => json!({"port": 3000}).to_string(),
        "renewPreview" => json!({"ttlSeconds": 60}).to_string(),
        "createFileUrl" => json!({"path": "/tmp/f", "method": "GET"}).to_string(),
        "uploadTree" | "importWorkspace" => "an archive".to_owned(),
        _ => String::new(),
    };
    let mut builder = Request::builder().method(o.method.clone()).uri(uri).header("host", s.address.to_string());
    if !body.is_empty() {
        builder = builder.header("content-type", "application/json");
    }
    if let Some(a) = authorization {
        builder = builder.header("authorization", a);
    }
    builder.body(body.into()).unwrap()
}

#[tokio::test]
async fn open_operations_are_exactly_the_listed_ones() {
    let open: Vec<String> = operations().into_iter().filter(|o| o.open).map(|o| o.id).collect();
    assert_eq!(open, exceptions("open"));
}

#[tokio::test]
async fn no_operation_can_be_reached_without_a_valid_key() {
    // Every one of them fails, from one address.
    let s = Service::with(FakeDriver::default(), |c| c.auth_failures_per_minute = 1_000_000).await;
    let machine = s.machine().await;
    let revoked = s.key("default", KeyRole::Admin).await;
    assert_eq!(s.delete(&format!("/v1/keys/{}", revoked.id())).await.status, 204);
    let unknown = mainbrella_server::auth::token::Token::generate().unwrap();
    // The public id of a real key with another secret.
    let forged = format!("{}{}", &s.admin[..12], &unknown.expose()[12..]);
    let callers = [
        None,
        Some("Bearer garbage".to_owned()),
        Some("Bearer ".to_owned()),
        Some(format!("Basic {}", s.admin)),
        Some(s.admin.clone()),
        Some(format!("Bearer {}", unknown.expose())),
        Some(format!("Bearer {forged}")),
        Some(format!("Bearer {} x", s.admin)),
        Some(format!("Bearer {}", revoked.expose())),
    ];
    for o in operations() {
        for caller in &callers {
            let reply = s.send(request(&s, &o, &machine, "00000000", caller.as_deref())).await;
            if o.open {
                assert_eq!(reply.status, 200, "{}", o.id);
            } else {
                assert_eq!(
                    (reply.status.as_u16(), reply.code().as_str()),
                    (401, "unauthenticated"),
                    "{} as {caller:?}",
                    o.id
                );
                assert_eq!(reply.headers["www-authenticate"], "Bearer");
            }
        }
    }
    assert_eq!(s.driver.alive(), 1, "nothing was made or ended on the way");
}

#[tokio::test]
async fn a_user_key_does_everything_but_what_is_listed_as_admin() {
    let s = Service::with(FakeDriver::default().with_internet(), |_| {}).await;
    let user = format!("Bearer {}", s.key("default", KeyRole::User).await.expose());
    let admin = format!("Bearer {}", s.admin);
    let other_key = s.key("default", KeyRole::User).await;
    let mut forbidden = Vec::new();
    let mut list = operations();
    list.sort_by_key(|o| (turn(&o.id), matches!(o.id.as_str(), "moveFile" | "closeContext" | "revokePreview")));
    let mut machine = s.machine().await;
    let context = s.post(&machine.path("/contexts"), json!({"language": "python"})).await.ok();
    machine.context = context["id"].as_str().unwrap().to_owned();
    let preview = s.post(&machine.path("/previews"), json!({"port": 3000})).await.ok();
    machine.preview = preview["id"].as_str().unwrap().to_owned();
    let file = format!("{}&path=/tmp/f&createParents=true", machine.path("/files/content"));
    let tree = format!("{}&path=/tree", machine.path("/files/tree"));
    for put in [file, tree, machine.path("/workspace")] {
        assert!(s.put(&put, "data").await.status.is_success(), "{put}");
    }
    machine.snapshot = s.post(&machine.path("/snapshots"), json!({"name": "n", "kind": "full"})).await.ok()["id"]
        .as_str()
        .unwrap()
        .to_owned();
    machine.build = s.post("/v1/builds", json!({"name": "app"})).await.ok()["id"].as_str().unwrap().to_owned();
    for o in &list {
        let job = job_for(&s, o, &machine).await;
        let reply = s.send(request_on(&s, o, &machine, &job, other_key.id(), Some(&user))).await;
        if reply.status == 403 {
            assert_eq!(reply.code(), "forbidden");
            forbidden.push(o.id.clone());
        } else {
            assert!(reply.status.is_success(), "{}: {} {:?}", o.id, reply.status, reply.body);
            continue;
        }
        let reply = s.send(request(&s, o, &machine, other_key.id(), Some(&admin))).await;
        assert!(reply.status.is_success(), "{}: {} {:?}", o.id, reply.status, reply.body);
    }
    forbidden.sort();
    assert_eq!(forbidden, exceptions("admin"));
}

#[tokio::test]
async fn what_belongs_to_another_project_does_not_exist() {
    let s = Service::start().await;
    let mut machine = s.machine().await;
    machine.snapshot = s.saved(&machine).await;
    let ours = s.key("default", KeyRole::User).await;
    let foreign = format!("Bearer {}", s.key("neighbour", KeyRole::Admin).await.expose());
    // Templates and what they are built by are everybody's.
    let own = |o: &&Operation| o.path.contains("{id}") && !o.path.starts_with("/v1/builds");
    for o in operations().iter().filter(own) {
        let reply = s.send(request(&s, o, &machine, ours.id(), Some(&foreign))).await;
        assert_eq!((reply.status.as_u16(), reply.code().as_str()), (404, "not_found"), "{}", o.id);
    }
    let list = s
        .send(request(&s, operations().iter().find(|o| o.id == "listMachines").unwrap(), &machine, "", Some(&foreign)))
        .await;
    assert_eq!(list.ok()["machines"], json!([]));
    let snapshots = operations().into_iter().find(|o| o.id == "listSnapshots").unwrap();
    let snapshots = s.send(request(&s, &snapshots, &machine, "", Some(&foreign))).await;
    assert_eq!(snapshots.ok()["snapshots"], json!([]));
    let keys = s
        .send(request(&s, operations().iter().find(|o| o.id == "listKeys").unwrap(), &machine, "", Some(&foreign)))
        .await;
    assert_eq!(keys.ok()["keys"].as_array().unwrap().len(), 1, "only its own");
    // The same slot name in two projects is two machines.
    let body = json!({"catalogId": "python", "slot": machine.id}).to_string();
    let create = Request::builder()
        .method("POST")
        .uri("/v1/machines")
        .header("host", "localhost")
        .header("content-type", "application/json")
        .header("authorization", &foreign)
        .body(Bytes::from(body))
        .unwrap();
    assert_eq!(s.send(create).await.status, 201);
    assert_eq!(s.get(&machine.path("")).await.ok()["createdAt"], machine.created_at);
}

#[tokio::test]
async fn revoking_takes_effect_at_once_and_ends_what_is_open() {
    let s = Service::start().await;
    let machine = s.machine().await;
    let made = s.post("/v1/keys", json!({"name": "ci", "role": "user"})).await.ok();
    let bearer = format!("Bearer {}", made["secret"].as_str().unwrap());
    let (id, list) = (made["id"].as_str().unwrap().to_owned(), operations());
    let get = list.iter().find(|o| o.id == "getMachine").unwrap();
    assert_eq!(s.send(request(&s, get, &machine, "", Some(&bearer))).await.status, 200);

    let running = Request::builder()
        .method("POST")
        .uri(machine.path("/commands/run"))
        .header("host", "localhost")
        .header("content-type", "application/json")
        .header("authorization", &bearer)
        .body(Bytes::from(json!({"command": "hang", "timeoutMs": 60_000}).to_string()))
        .unwrap();
    let address = s.address;
    let running = tokio::spawn(async move { crate::common::send(address, running).await });
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    assert!(!running.is_finished());
    assert_eq!(s.delete(&format!("/v1/keys/{id}")).await.status, 204);
    let ended = tokio::time::timeout(std::time::Duration::from_secs(2), running).await.unwrap().unwrap();
    assert_eq!(ended.code(), "unauthenticated");
    assert_eq!(s.send(request(&s, get, &machine, "", Some(&bearer))).await.status, 401);
    assert_eq!(s.delete(&format!("/v1/keys/{id}")).await.status, 204, "idempotent");
    assert_eq!(s.delete("/v1/keys/nothing").await.code(), "not_found");
    let keys = s.get("/v1/keys").await;
    assert!(!String::from_utf8_lossy(&keys.body).contains(made["secret"].as_str().unwrap()));
    let revoked = keys.ok()["keys"].as_array().unwrap().iter().find(|k| k["id"] == id.as_str()).unwrap().clone();
    assert!(revoked["revokedAtMs"].is_i64() && revoked.get("secret").is_none());
}
