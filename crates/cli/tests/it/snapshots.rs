//! Saving, restoring, snapshots, and workspaces as archives.

use serde_json::json as value;

use crate::support::{Reply, Service, error, json, machine, run, run_with};

const AT: &str = "m-1@2026-10-08T12:00:00.000Z";
const ID: &str = "s-0123456789abcdef0123456789abcdef";

fn saved(more: serde_json::Value) -> serde_json::Value {
    let now = jiff::Timestamp::now().as_millisecond();
    let mut whole = value!({
        "id": ID, "name": "Project files", "kind": "workspace", "source": AT, "catalogId": "python",
        "templateDigest": null, "size": "small", "internet": false, "egress": {"policy": "off"}, "bytes": 1_572_864,
        "createdAtMs": now - 65_000, "expiresAtMs": null, "archived": false, "addedLater": 1,
    });
    whole.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    whole
}

#[test]
fn a_machine_is_saved_once_whatever_the_network_does() {
    let service = Service::start([Reply::Cut(vec![]), json(201, saved(value!({ "stopOutcome": "stopped" })))]);
    let said = run(&service, &["save", AT, "Project files", "--full", "--stop", "--ttl", "1d"]);
    let note = "mainbrella: 1.5 MiB saved; the machine is stopped\n";
    assert_eq!(said, format!("code: 0\n--- stdout\n{ID}\n--- stderr\n{note}"));
    let requests = service.requests();
    assert_eq!(requests[0].line, "POST /v1/machines/m-1/snapshots?createdAt=2026-10-08T12%3A00%3A00.000Z");
    let body = value!({ "name": "Project files", "kind": "full", "stop": true, "ttlSeconds": 86_400 });
    assert_eq!(requests[0].json(), body);
    assert_eq!(requests[0].header("idempotency-key"), requests[1].header("idempotency-key"));

    let service = Service::start([json(201, saved(value!({})))]);
    let said = run(&service, &["save", AT, "n", "--idempotency-key", "k", "--json"]);
    assert!(said.contains(&format!("\"id\": \"{ID}\"")) && said.contains("\"bytes\": 1572864"), "{said}");
    let [request] = service.requests().try_into().expect("one request");
    assert_eq!(request.json(), value!({ "name": "n", "kind": "workspace", "stop": false }));
    assert_eq!(request.header("idempotency-key"), Some("k"));

    let service = Service::start([Reply::Cut(vec![])]);
    let said = run(&service, &["save", AT, "n", "--idempotency-key", "k"]);
    assert!(said.starts_with("code: 5\n") && said.contains("--idempotency-key k finds what was made"), "{said}");
    let service = Service::start([error(409, "snapshot_limit", "This project already has 100 snapshots.")]);
    assert!(run(&service, &["save", AT, "n"]).starts_with("code: 6\n"));
}

#[test]
fn a_machine_is_started_from_a_snapshot() {
    let service = Service::start([json(201, machine("m-2", 60))]);
    let words =
        ["restore", ID, "--slot", "mine", "--ttl", "2h", "--label", "a=b", "-e", "X=y", "--idempotency-key", "k"];
    assert_eq!(run(&service, &words), "code: 0\n--- stdout\nm-2@2026-10-08T12:00:00.000Z\n--- stderr\n");
    let [request] = service.requests().try_into().expect("one request");
    assert_eq!(request.line, format!("POST /v1/snapshots/{ID}/restore"));
    let body = value!({
        "slot": "mine", "ttlSeconds": 7200, "persistent": false, "metadata": {"a": "b"}, "env": {"X": "y"},
    });
    assert_eq!((request.json(), request.header("idempotency-key")), (body, Some("k")));
    let service = Service::start([json(201, machine("m-2", 60))]);
    let words = ["restore", ID, "--idle", "10m", "--on-idle", "pause", "--auto-resume", "off"];
    assert!(run(&service, &words).starts_with("code: 0\n"));
    let body = service.requests()[0].json();
    assert_eq!((&body["onIdle"], &body["autoResume"]), (&value!("pause"), &value!(false)));
    for (code, exit) in [("snapshot_damaged", 6), ("snapshot_mismatch", 6)] {
        let service = Service::start([error(409, code, "It is not as it was saved.")]);
        assert!(run(&service, &["restore", ID]).starts_with(&format!("code: {exit}\n")), "{code}");
        assert_eq!(service.requests().len(), 1);
    }
}

#[test]
fn snapshots_are_listed_shown_changed_and_deleted() {
    let page = |cursor: Option<&str>| {
        json(
            200,
            value!({ "snapshots": [saved(value!({})), saved(value!({ "archived": true }))], "nextCursor": cursor }),
        )
    };
    let service = Service::start([page(Some("n1")), page(None)]);
    let said = run(&service, &["snapshots", "list", "--kind", "workspace", "--name", "a b", "--limit", "3"]);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.iter().filter(|l| l.starts_with(ID)).count(), 3, "{said}");
    assert!(said.contains("1.5 MiB") && said.contains("Project files (archived)") && said.contains("there are more"));
    let requests = service.requests();
    assert_eq!(requests[0].line, "GET /v1/snapshots?kind=workspace&name=a%20b&limit=3");
    assert_eq!(requests[1].line, "GET /v1/snapshots?kind=workspace&name=a%20b&limit=3&cursor=n1");

    let ends = jiff::Timestamp::now().as_millisecond() + 3_600_500;
    let service = Service::start([json(200, saved(value!({ "expiresAtMs": ends })))]);
    let said = run(&service, &["snapshots", "get", ID]);
    for fact in ["Project files", AT, "internet    off", "1.5 MiB", "is removed  in 60m"] {
        assert!(said.contains(fact), "{fact}: {said}");
    }
    let service = Service::start([json(200, saved(value!({ "name": "Other" })))]);
    let said = run(&service, &["snapshots", "update", ID, "--name", "Other", "--archived", "true", "--json"]);
    assert!(said.contains("\"name\": \"Other\""), "{said}");
    let [request] = service.requests().try_into().expect("one request");
    assert_eq!(request.line, format!("PATCH /v1/snapshots/{ID}"));
    assert_eq!(request.json(), value!({ "name": "Other", "archived": true }));

    let service = Service::start([Reply::Answer(204, vec![], vec![])]);
    let said = run(&service, &["snapshots", "rm", ID, "s-2"]);
    assert_eq!(said, format!("code: 0\n--- stdout\n{ID} deleted\ns-2 deleted\n--- stderr\n"));
    let lines: Vec<String> = service.requests().into_iter().map(|r| r.line).collect();
    assert_eq!(lines, [format!("DELETE /v1/snapshots/{ID}"), "DELETE /v1/snapshots/s-2".to_owned()]);

    let silent = Service::start([]);
    for words in [&["snapshots"][..], &["snapshots", "rm"], &["snapshots", "update", ID], &["save", AT]] {
        assert!(run(&silent, words).starts_with("code: 2\n"), "{words:?}");
    }
    assert!(silent.requests().is_empty());
}

#[test]
fn a_workspace_goes_out_and_in_as_one_archive() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("w.tar.gz");
    let path = file.to_str().expect("UTF-8");
    let archive = vec![0x1f; 300_000];
    let service = Service::start([Reply::Answer(200, vec![], archive.clone())]);
    assert_eq!(run(&service, &["export", AT, path]), "code: 0\n--- stdout\n--- stderr\n");
    assert_eq!(std::fs::read(&file).expect("written"), archive);
    assert_eq!(service.requests()[0].line, "GET /v1/machines/m-1/workspace?createdAt=2026-10-08T12%3A00%3A00.000Z");
    let silent = Service::start([]);
    assert!(run(&silent, &["export", AT, path, "--no-clobber"]).starts_with("code: 6\n"));
    assert!(run(&silent, &["export", AT, dir.path().to_str().expect("UTF-8")]).starts_with("code: 2\n"));
    assert!(silent.requests().is_empty());
    let service = Service::start([Reply::Answer(200, vec![], b"packed".to_vec())]);
    assert_eq!(run(&service, &["export", AT, "-"]), "code: 0\n--- stdout\npacked--- stderr\n");
    // A cut is no end, and leaves what was there.
    let service = Service::start([Reply::Cut(b"HTTP/1.1 200 X\r\ncontent-length: 9\r\n\r\nhalf".to_vec())]);
    assert!(!run(&service, &["export", AT, path]).starts_with("code: 0"));
    assert_eq!(std::fs::read(&file).expect("there"), archive);
    assert_eq!(std::fs::read_dir(dir.path()).expect("there").count(), 1);

    let done = || json(200, value!({ "entries": 3, "bytes": 10, "skipped": 1 }));
    let service = Service::start([done()]);
    let said = run(&service, &["import", AT, path, "--json"]);
    assert!(said.starts_with("code: 0\n") && said.contains("\"entries\": 3"), "{said}");
    let [request] = service.requests().try_into().expect("one request");
    assert!(request.line.starts_with("PUT /v1/machines/m-1/workspace?createdAt="), "{}", request.line);
    assert_eq!(request.body, archive);
    let service = Service::start([done()]);
    assert!(run_with(&service, &["import", AT, "-"], b"packed").starts_with("code: 0\n"));
    assert_eq!(service.requests()[0].body, b"packed");
    let service = Service::start([error(400, "invalid_request", "The body is not a whole gzip stream.")]);
    assert!(run(&service, &["import", AT, path]).starts_with("code: 2\n"));
}

#[test]
fn files_of_a_snapshot_are_listed_and_copied_without_a_machine() {
    let place = |path: &str| format!("snapshot:{ID}:{path}");
    let entry = |name: &str, kind: &str| {
        value!({ "name": name, "path": format!("/w/{name}"), "type": kind, "size": 3, "mode": "0644", "uid": 0, "gid": 0,
                 "mtime": 1 })
    };
    let service = Service::start([
        json(200, entry("w", "directory")),
        json(200, value!({ "entries": [entry("a", "file")], "nextOffset": null })),
    ]);
    assert_eq!(run(&service, &["ls", &place("/w")]), "code: 0\n--- stdout\na\n--- stderr\n");
    let lines: Vec<String> = service.requests().into_iter().map(|r| r.line).collect();
    assert_eq!(lines[0], format!("GET /v1/snapshots/{ID}/files/stat?path=%2Fw&followSymlinks=true"));
    assert!(lines[1].starts_with(&format!("GET /v1/snapshots/{ID}/files/list?path=%2Fw&offset=0")), "{lines:?}");

    let dir = tempfile::tempdir().expect("temp dir");
    let target = dir.path().join("copy");
    let target = target.to_str().expect("UTF-8");
    let service = Service::start([Reply::Answer(200, vec![], b"one".to_vec())]);
    assert!(run(&service, &["cp", &place("/w/a"), target]).starts_with("code: 0\n"));
    assert_eq!(std::fs::read(target).expect("copied"), b"one");
    assert_eq!(service.requests()[0].line, format!("GET /v1/snapshots/{ID}/files/content?path=%2Fw%2Fa"));
    let service = Service::start([Reply::Answer(200, vec![], b"one".to_vec())]);
    assert!(run(&service, &["export", &format!("snapshot:{ID}"), target]).starts_with("code: 0\n"));
    assert_eq!(service.requests()[0].line, format!("GET /v1/snapshots/{ID}/workspace"));

    let service = Service::start([]);
    let said = run(&service, &["cp", target, &place("/w/a")]);
    assert!(said.starts_with("code: 2\n") && said.contains("nothing is written into a snapshot"), "{said}");
    let said = run(&service, &["ls", "snapshot:other:/w"]);
    assert!(said.starts_with("code: 2\n") && said.contains("snapshot:ID:/path"), "{said}");
    assert!(service.requests().is_empty());
}
