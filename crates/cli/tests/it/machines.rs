//! Verbs on machines and keys.

use serde_json::json as value;

use crate::support::{KEY, Reply, Service, error, json, machine, mainbrella, run, run_with, snapshot, told};

#[test]
fn create_prints_the_name_and_sends_what_was_asked() {
    let service = Service::start([json(201, machine("m-1", 90))]);
    let words = [
        "create",
        "node",
        "--size",
        "micro",
        "--slot",
        "mine",
        "--ttl",
        "90m",
        "--idle",
        "1500ms",
        "--persistent",
        "--label",
        "a=b=c",
        "-e",
        "X=",
        "--idempotency-key",
        "k-1",
        "--internet",
        "off",
    ];
    snapshot("create", run(&service, &words));
    let [request] = service.requests().try_into().expect("one request");
    assert_eq!(request.line, "POST /v1/machines");
    assert_eq!(request.header("idempotency-key"), Some("k-1"));
    assert_eq!(
        request.json(),
        value!({
            "catalogId": "node", "size": "micro", "slot": "mine", "ttlSeconds": 5400, "idleTimeoutSeconds": 2,
            "internet": false, "persistent": true, "metadata": {"a": "b=c"}, "env": {"X": ""},
        })
    );
}

#[test]
fn a_create_whose_answer_is_lost_is_repeated_under_one_key() {
    let service =
        Service::start([Reply::Cut(vec![]), error(503, "overloaded", "Busy."), json(200, machine("m-1", 90))]);
    assert!(run(&service, &["create"]).starts_with("code: 0\n--- stdout\nm-1@"));
    let requests = service.requests();
    assert_eq!(requests.len(), 3);
    let keys: std::collections::HashSet<_> = requests.iter().map(|r| r.header("idempotency-key")).collect();
    assert_eq!(keys.len(), 1);
    assert!(requests.iter().all(|r| r.body == requests[0].body));

    let failed = Service::start([error(502, "create_failed", "The machine could not be made.")]);
    snapshot("create failed", run(&failed, &["create"]));
    assert_eq!(failed.requests().len(), 1, "a machine that could not be made is an outcome");

    let lost = Service::start([Reply::Cut(vec![])]);
    snapshot("create lost", run(&lost, &["create", "--idempotency-key", "mine"]));
    assert_eq!(lost.requests().len(), 5, "attempts are bounded");
}

#[test]
fn a_machine_that_is_online_against_the_order_is_stopped() {
    let mut online = machine("m-1", 90);
    online["internet"] = true.into();
    let stopped = value!({ "outcome": "stopped", "machine": online });
    let service = Service::start([json(201, online), json(200, stopped)]);
    snapshot("create online", run(&service, &["create", "--internet", "off"]));
    assert_eq!(service.requests()[1].line, "POST /v1/machines/m-1/stop?createdAt=2026-10-08T12%3A00%3A00.000Z");
}

fn ended(id: &str) -> serde_json::Value {
    let mut m = machine(id, 90);
    m["state"] = "failed".into();
    m["endedAtMs"] = (jiff::Timestamp::now().as_millisecond() - 7_230_000).into();
    m["reason"] = value!({"code": "vmm_died", "message": "Its VMM \u{1b}[31mended."});
    m
}

#[test]
fn list_follows_pages_and_hides_what_has_ended() {
    let mut idle = machine("m-2", 90);
    idle["idleDeadlineMs"] = (jiff::Timestamp::now().as_millisecond() + 150_000).into();
    let pages = || {
        [
            json(200, value!({"machines": [machine("m-1", 90), ended("m-0")], "nextCursor": "c 1"})),
            json(200, value!({"machines": [idle.clone()], "nextCursor": null})),
        ]
    };
    let service = Service::start(pages());
    snapshot("list", run(&service, &["list", "--label", "own er=é&x"]));
    let lines: Vec<String> = service.requests().into_iter().map(|r| r.line).collect();
    assert_eq!(
        lines,
        [
            "GET /v1/machines?metadata.own%20er=%C3%A9%26x&limit=101",
            "GET /v1/machines?metadata.own%20er=%C3%A9%26x&limit=101&cursor=c%201"
        ]
    );
    snapshot("list all", run(&Service::start(pages()), &["list", "-a"]));
    snapshot("list limited", run(&Service::start(pages()), &["list", "-n", "1"]));
    let said = run(&Service::start(pages()), &["list", "--all", "--json"]);
    let text =
        said.strip_prefix("code: 0\n--- stdout\n").and_then(|s| s.strip_suffix("--- stderr\n")).expect("only JSON");
    let list: serde_json::Value = serde_json::from_str(text).expect("JSON");
    let ids: Vec<_> = list["machines"].as_array().expect("a list").iter().map(|m| m["id"].clone()).collect();
    assert_eq!(ids, ["m-1", "m-0", "m-2"]);
    snapshot("list empty", run(&Service::start([json(200, value!({"machines": [], "nextCursor": null}))]), &["list"]));
}

#[test]
fn get_shows_a_machine_and_harmless_text() {
    let said = run(&Service::start([json(200, ended("m-0"))]), &["get", "m-0"]);
    assert!(said.contains("reason         vmm_died: Its VMM \\u{1b}[31mended."), "{said}");
    assert!(said.contains("(2h ago)") && !said.contains('\u{1b}'), "{said}");
    let service = Service::start([json(200, machine("m-1", 90))]);
    run(&service, &["get", "m-1@2026-10-08T14:00:00+02:00"]);
    assert_eq!(service.requests()[0].line, "GET /v1/machines/m-1?createdAt=2026-10-08T12%3A00%3A00.000Z");
}

#[test]
fn stop_acts_on_each_and_says_what_is_uncertain() {
    let outcome = |o: &str| json(200, value!({"outcome": o, "machine": machine("m-1", 90)}));
    let at = "m-1@2026-10-08T12:00:00.000Z";
    snapshot(
        "stop",
        run(&Service::start([Reply::Cut(vec![]), outcome("uncertain"), outcome("stopped")]), &["stop", at]),
    );
    snapshot("stop uncertain", run(&Service::start([outcome("uncertain")]), &["stop", at]));
    let service = Service::start([
        error(404, "not_found", "There is no machine gone."),
        json(200, machine("m-1", 90)),
        outcome("stopped"),
    ]);
    snapshot("stop one of two", run(&service, &["stop", "gone", "m-1"]));
}

#[test]
fn extend_sends_only_what_was_given() {
    let service = Service::start([json(200, machine("m-1", 90))]);
    assert!(run(&service, &["extend", "m-1@2026-10-08T12:00:00.000Z", "--ttl", "2h", "--json"]).starts_with("code: 0"));
    assert_eq!(service.requests()[0].json(), value!({"ttlSeconds": 7200}));
}

#[test]
fn keys_are_made_listed_and_revoked() {
    let now = jiff::Timestamp::now().as_millisecond();
    let made =
        value!({"id": "89abcdef", "name": "ci", "role": "user", "createdAtMs": now, "secret": "mb_89abcdef_shown"});
    snapshot("key create", run(&Service::start([json(201, made.clone())]), &["key", "create", "ci"]));
    let keys = value!({"keys": [
        {"id": "01234567", "name": "first key", "role": "admin", "createdAtMs": now - 200_000, "revokedAtMs": null},
        {"id": "89abcdef", "name": "ci\n", "role": "user", "createdAtMs": now - 200_000, "revokedAtMs": now - 130_000},
    ]});
    snapshot("key list", run(&Service::start([json(200, keys)]), &["key", "list"]));
    let revoke = Service::start([Reply::Answer(204, vec![], vec![])]);
    snapshot("key revoke", run(&revoke, &["key", "revoke", "89abcdef"]));
    assert_eq!(revoke.requests()[0].line, "DELETE /v1/keys/89abcdef");

    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("key");
    let service = Service::start([json(201, made)]);
    let path = file.to_str().expect("UTF-8");
    let said = run(&service, &["key", "create", "ci", "--output", path]);
    assert!(said.starts_with("code: 0\n--- stdout\n--- stderr\nkey 89abcdef is in"), "{said}");
    use std::os::unix::fs::PermissionsExt as _;
    assert_eq!(std::fs::metadata(&file).expect("there").permissions().mode() & 0o777, 0o600);
    assert_eq!(std::fs::read_to_string(&file).expect("text"), "mb_89abcdef_shown\n");
    assert!(
        run(&service, &["key", "create", "ci", "--output", path]).starts_with("code: 1"),
        "an existing file is not replaced"
    );
    assert_eq!(service.requests().len(), 1, "no key is made without a place for it");
}

#[test]
fn templates_are_asked_of_the_service_or_looked_up_here() {
    let list = value!({"templates": [{"name": "python", "digest": "sha256:0123456789abcdef", "imageBytes": 146_000_000, "frozenSizes": ["small"]}]});
    snapshot("template list", run(&Service::start([json(200, list)]), &["template", "list"]));
    let dir = tempfile::tempdir().expect("a folder");
    let mut command = mainbrella();
    command.env("MAINBRELLA_DATA_DIR", dir.path()).args(["--url", "http://127.0.0.1:1", "template", "list"]);
    snapshot("template list here", told(&mut command, b""));
    for words in [["template", "rm", "none"], ["template", "build", "none"]] {
        let mut command = mainbrella();
        command.env("MAINBRELLA_DATA_DIR", dir.path()).args(words);
        let said = told(&mut command, b"").replace(dir.path().to_str().expect("UTF-8"), "DIR");
        snapshot(words.join(" "), said);
    }
}

#[test]
fn what_takes_room_is_a_table() {
    let report = value!({"freeBytes": 5_368_709_120_u64, "totalBytes": 10_737_418_240_u64, "parts": [
        {"part": "templates", "items": 2, "bytes": 209_715_200}, {"part": "snapshots", "items": 0, "bytes": 4096},
    ]});
    snapshot("df", run(&Service::start([json(200, report)]), &["df"]));
}

#[test]
fn doctor_needs_no_service_and_its_json_is_stable() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut command = mainbrella();
    command.env("MAINBRELLA_DATA_DIR", dir.path()).args(["--url", "http://127.0.0.1:1", "doctor", "--json"]);
    let out = command.output().expect("it runs");
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).expect("JSON");
    let checks = report["checks"].as_array().expect("a list");
    let find =
        |name: &str| checks.iter().find(|c| c["name"] == name).unwrap_or_else(|| panic!("{name} is not checked"));
    for name in [
        "system",
        "memory",
        "qemu-system-x86_64",
        "mmdebstrap",
        "mkfs.erofs",
        "nft",
        "/dev/kvm",
        "in use",
        "control groups",
        "disk space",
    ] {
        assert!(["ok", "warn", "fail"].contains(&find(name)["level"].as_str().expect("text")), "{name}");
    }
    assert_eq!(find("templates")["level"], "fail");
    assert_eq!(find("templates")["fix"], "mainbrella template build python");
    assert_eq!(find("answers")["level"], "warn");
    assert_eq!((report["ok"].as_bool(), out.status.code()), (Some(false), Some(1)));
    for check in checks {
        assert!(check["level"] == "ok" || !check["detail"].as_str().expect("text").is_empty(), "{check}");
    }

    // With a service and a key that does not work.
    let health = json(200, value!({"status": "ok", "version": env!("CARGO_PKG_VERSION")}));
    let service = Service::start([health, error(401, "unauthenticated", "The API key is not valid.")]);
    let said = run(&service, &["doctor", "--json"]);
    assert!(said.contains("the key in MAINBRELLA_API_KEY does not work: The API key is not valid."), "{said}");
    assert!(!said.contains(KEY));
}

fn listed(rules: &[&str]) -> serde_json::Value {
    let mut m = machine("m-1", 90);
    m["internet"] = true.into();
    m["egress"] = value!({"policy": "allow-list", "rules": rules});
    m
}

#[test]
fn a_create_takes_rules_from_files_and_from_the_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("rules");
    std::fs::write(&file, "# what pip needs\npackages.example\n*.files.example # and this\n").expect("written");
    let path = file.to_str().expect("UTF-8");
    let service = Service::start([json(201, listed(&["a.example", "packages.example", "*.files.example"]))]);
    let said = run(&service, &["create", "--egress", path, "--allow", "a.example"]);
    assert!(said.starts_with("code: 0\n"), "{said}");
    let expected = value!({"policy": "allow-list", "rules": ["a.example", "packages.example", "*.files.example"]});
    assert_eq!(service.requests()[0].json()["egress"], expected);

    std::fs::write(&file, r#"{"policy": "allow-list", "rules": ["b.example"], "dryRun": true}"#).expect("written");
    let mut dry = listed(&["b.example"]);
    dry["egress"]["dryRun"] = true.into();
    let service = Service::start([json(201, dry.clone())]);
    assert!(run(&service, &["create", "--egress", path]).starts_with("code: 0\n"));
    assert_eq!(service.requests()[0].json()["egress"], dry["egress"]);

    // What is no policy is told before anything is asked of the service.
    let silent = Service::start([]);
    for words in [
        &["create", "--allow", "10.0.0.0/8"][..],
        &["create", "--allow", "https://a.example"],
        &["create", "--dry-run"],
        &["create", "--egress", "/nonexistent/rules"],
        &["create", "--egress", path, "--allow", "a.example"],
        &["egress", "set", "m-1"],
        &["egress", "set", "m-1", "open", "--allow", "a.example"],
        &["egress", "set", "m-1", "ajar"],
        &["egress", "explain", "m-1", ":443"],
    ] {
        let said = run(&silent, words);
        assert!(!said.starts_with("code: 0") && said.contains("--- stdout\n--- stderr\n"), "{words:?}: {said}");
    }
    assert!(silent.requests().is_empty());

    let other = Service::start([
        json(201, machine("m-1", 90)),
        json(200, value!({"outcome": "stopped", "machine": machine("m-1", 90)})),
    ]);
    assert!(run(&other, &["create", "--allow", "a.example"]).contains("did not get the network setting"));
    assert!(other.requests()[1].line.contains("/stop"));
}

#[test]
fn egress_is_shown_changed_explained_and_its_log_followed() {
    let service = Service::start([json(200, listed(&["a.example", "*.b.example:8443"]))]);
    snapshot("egress show", run(&service, &["egress", "show", "m-1"]));
    let service = Service::start([json(200, machine("m-1", 90)), json(200, listed(&["a.example"]))]);
    let said = run(&service, &["egress", "set", "m-1", "--allow", "a.example"]);
    assert!(said.contains("what 1 rule allows"), "{said}");
    let request = &service.requests()[1];
    assert_eq!(request.line, "PUT /v1/machines/m-1/egress?createdAt=2026-10-08T12%3A00%3A00.000Z");
    assert_eq!(request.json(), value!({"policy": "allow-list", "rules": ["a.example"]}));
    let locked = error(409, "egress_locked", "The machine has no internet.");
    let service = Service::start([json(200, machine("m-1", 90)), locked]);
    assert!(run(&service, &["egress", "set", "m-1", "open"]).starts_with("code: 6\n"));

    let explanation = value!({
        "host": "in.example", "port": 22, "outcome": "denied", "allowedBy": null, "deniedBy": "reserved",
        "reason": "In.example resolves to 10.0.0.1, which is private: no machine may reach it.",
        "addresses": [{"address": "10.0.0.1", "reserved": "private"}],
    });
    let service = Service::start([json(200, machine("m-1", 90)), json(200, explanation)]);
    snapshot("egress explain", run(&service, &["egress", "explain", "m-1", "in.example:22"]));
    assert!(service.requests()[1].line.ends_with("&host=in.example&port=22"), "{}", service.requests()[1].line);

    let event = |n: u64, host: &str| {
        value!({"sequence": n, "timeMs": 1_790_000_000_000_u64, "outcome": "denied", "name": host, "address": null, "port": 443,
            "rule": "no-rule", "reason": "No rule of the allow-list matches."})
    };
    let page = |events: Vec<serde_json::Value>, more: bool| {
        value!({"id": "m-1", "createdAt": "2026-10-08T12:00:00.000Z", "nextCursor": events.last().map_or(value!(0), |e| e["sequence"].clone()),
            "events": events, "hasMore": more, "denied": 9, "wouldDeny": 0})
    };
    let pages = [page(vec![event(1, "a.example")], true), page(vec![event(7, "b\u{1b}[31m.example")], false)];
    let [first, second] = pages.map(|p| json(200, p));
    let service = Service::start([json(200, machine("m-1", 90)), first, second]);
    snapshot("egress log", run(&service, &["egress", "log", "m-1"]));
    assert!(service.requests()[2].line.contains("&cursor=1&"), "{}", service.requests()[2].line);
}

#[test]
fn a_secret_is_set_from_where_nobody_reads_it_listed_and_removed() {
    let named = "m-1@2026-10-08T12:00:00.000Z";
    let secret = value!({ "name": "github", "host": "api.github.com", "port": 443, "header": "authorization",
        "username": null, "createdAt": "2026-10-08T12:00:01.000Z", "addedLater": 1 });
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("token");
    std::fs::write(&file, "Bearer s3cr3t\n").expect("written");
    let from_file = file.to_str().expect("UTF-8");
    let words = ["secret", "set", named, "github", "--host", "api.github.com", "--header", "Authorization"];
    let sources: [(&[&str], &str); 3] =
        [(&["--value-file", from_file], ""), (&["--value-file", "-"], "Bearer s3cr3t\r\n"), (&[], "Bearer s3cr3t")];
    for (more, input) in sources {
        let service = Service::start([json(200, secret.clone())]);
        let said = run_with(&service, &[&words[..], more].concat(), input.as_bytes());
        assert_eq!(said, "code: 0\n--- stdout\ngithub set for api.github.com:443\n--- stderr\n", "{more:?}");
        let [request] = service.requests().try_into().expect("one request");
        let line = "PUT /v1/machines/m-1/secrets/github?createdAt=2026-10-08T12%3A00%3A00.000Z";
        let body =
            value!({ "host": "api.github.com", "port": 443, "header": "Authorization", "value": "Bearer s3cr3t" });
        assert_eq!((request.line.as_str(), request.json()), (line, body));
    }

    let basic = ["secret", "set", named, "git", "--host", "git.example:8443", "--basic", "me", "--value-env", "TOKEN"];
    let service = Service::start([json(200, secret.clone())]);
    let mut command = mainbrella();
    command.env("MAINBRELLA_API_URL", &service.url).env("MAINBRELLA_API_KEY", KEY).env("TOKEN", "s3cr3t").args(basic);
    assert!(told(&mut command, b"").starts_with("code: 0\n"));
    assert_eq!(
        service.requests()[0].json(),
        value!({ "host": "git.example", "port": 8443, "username": "me", "value": "s3cr3t" })
    );

    let service = Service::start([error(409, "secret_limit", "The machine has 16 secrets.")]);
    let said = run_with(&service, &words, b"Bearer s3cr3t");
    assert!(said.starts_with("code: 6\n") && !said.contains("s3cr3t"), "{said}");

    // What cannot be read is told before anything is asked of the service.
    let silent = Service::start([]);
    for more in [&["--value-file", "/nonexistent/token"][..], &["--value-env", "TOKEN"], &[]] {
        let said = run(&silent, &[&words[..], more].concat());
        assert!(!said.starts_with("code: 0") && said.contains("--- stdout\n--- stderr\n"), "{more:?}: {said}");
    }
    assert!(silent.requests().is_empty());

    let list = value!({ "secrets": [secret] });
    let service = Service::start([json(200, list.clone())]);
    let said = run(&service, &["secret", "list", named]);
    assert!(said.contains("github") && said.contains("api.github.com:443"), "{said}");
    assert!(said.contains("header authorization"), "{said}");
    let service = Service::start([json(200, list)]);
    assert!(run(&service, &["secret", "list", named, "--json"]).contains("\"username\": null"));

    for (removed, what) in [(true, "github removed"), (false, "there was no secret github")] {
        let service = Service::start([json(200, value!({ "removed": removed }))]);
        let said = run(&service, &["secret", "remove", named, "github"]);
        assert!(said.starts_with("code: 0\n") && said.contains(what), "{said}");
        assert!(service.requests()[0].line.starts_with("DELETE /v1/machines/m-1/secrets/github?createdAt="));
    }
}

#[test]
fn a_preview_is_made_shown_once_listed_renewed_and_revoked() {
    let preview = |more: serde_json::Value| {
        let now = jiff::Timestamp::now().as_millisecond();
        let mut whole = value!({ "id": "pv-1", "port": 3000, "createdAtMs": now - 65_000, "expiresAt": now + 840_500 });
        whole.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        whole
    };
    let urls = value!({ "url": "http://token.localhost:8788/", "pathUrl": "http://localhost:8788/p/token/" });
    let named = "m-1@2026-10-08T12:00:00.000Z";
    // A lost answer is asked for again under the same key.
    let service = Service::start([Reply::Cut(vec![]), json(201, preview(urls.clone()))]);
    let said = run(&service, &["preview", "create", named, "3000", "--ttl", "15m"]);
    assert!(said.starts_with("code: 0\n--- stdout\nhttp://token.localhost:8788/\n--- stderr\n"), "{said}");
    let requests = service.requests();
    assert_eq!(requests[0].line, "POST /v1/machines/m-1/previews?createdAt=2026-10-08T12%3A00%3A00.000Z");
    assert_eq!(requests[0].json(), value!({ "port": 3000, "ttlSeconds": 900 }));
    assert_eq!(requests[0].header("idempotency-key"), requests[1].header("idempotency-key"));

    let service = Service::start([json(201, preview(urls))]);
    let said = run(&service, &["preview", "create", named, "3000", "--path", "--idempotency-key", "k"]);
    assert!(said.contains("http://localhost:8788/p/token/") && !said.contains("token.localhost"), "{said}");
    assert_eq!(service.requests()[0].header("idempotency-key"), Some("k"));

    let service = Service::start([json(200, value!({ "previews": [preview(value!({}))] }))]);
    let said = run(&service, &["preview", "list", named]);
    assert!(said.contains("pv-1") && said.contains("3000") && said.contains("14m"), "{said}");

    let service = Service::start([json(200, preview(value!({})))]);
    assert!(run(&service, &["preview", "renew", named, "pv-1", "--ttl", "1h"]).contains("pv-1 lasts 14m"));
    let [request] = service.requests().try_into().expect("one request");
    assert_eq!(
        (request.line.split('?').next(), request.json()),
        (Some("POST /v1/machines/m-1/previews/pv-1/renew"), value!({ "ttlSeconds": 3600 }))
    );

    let service = Service::start([error(410, "preview_ended", "This preview has ended.")]);
    assert!(run(&service, &["preview", "renew", named, "pv-1"]).starts_with("code: 6\n"));

    let service = Service::start([Reply::Answer(204, vec![], vec![])]);
    assert!(run(&service, &["preview", "revoke", named, "pv-1"]).contains("pv-1 revoked"));
    assert!(service.requests()[0].line.starts_with("DELETE /v1/machines/m-1/previews/pv-1?"));
}
