//! Templates from recipes, their versions and tags, against a scripted service.

use std::fs;

use serde_json::{Value, json as value};

use crate::support::{KEY, Reply, Request, Service, error, json, mainbrella, run, snapshot, told};

const ID: &str = "00000000000000000000000000000000";

fn build(state: &str, more: Value) -> Value {
    let mut whole = value!({
        "id": ID, "name": "app", "tags": [], "state": state, "egress": {"policy": "open"}, "timeoutSeconds": 1800,
        "steps": 2, "stepsDone": 2, "stepsCached": 1, "createdAtMs": 1000, "startedAtMs": 2000, "endedAtMs": 14_000,
        "addedLater": 1,
    });
    whole.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    whole
}

/// The log of a build as an event stream; the numbers after `after`.
fn log(events: &[Value], after: u64) -> Reply {
    let numbered = events.iter().enumerate().map(|(n, event)| {
        let mut event = event.clone();
        event["sequence"] = value!(n + 1);
        event["atMs"] = value!(5);
        (n as u64 + 1, event)
    });
    let text: String = numbered.filter(|(n, _)| *n > after).map(|(n, e)| format!("id: {n}\ndata: {e}\n\n")).collect();
    Reply::Answer(200, vec![("content-type".to_owned(), "text/event-stream".to_owned())], text.into_bytes())
}

fn cursor(request: &Request) -> u64 {
    let (_, query) = request.line.split_once("cursor=").expect("a cursor");
    query.parse().expect("a number")
}

/// A service that builds: `events` come in two connections, as if the first had been lost.
fn builder(events: Vec<Value>, end: Value) -> Service {
    Service::answering(move |request| {
        let (method, path) = request.line.split_once(' ').expect("a line");
        match (method, path.trim_start_matches("/v1/builds")) {
            ("POST", "") => json(201, build("awaiting-context", value!({}))),
            ("PUT", _) => json(202, build("queued", value!({}))),
            ("GET", p) if p.contains("/events") => match cursor(request) {
                0 => log(&events[..1], 0),
                after => log(&events, after),
            },
            ("GET", _) => json(200, end.clone()),
            ("POST", p) if p.ends_with("/cancel") => json(200, build("cancelled", value!({}))),
            _ => error(404, "not_found", "There is no such path."),
        }
    })
}

fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    fs::write(dir.path().join("Dockerfile"), "FROM python\nRUN make\n").expect("written");
    fs::write(dir.path().join(".dockerignore"), "secret\n").expect("written");
    fs::write(dir.path().join("secret"), "not sent").expect("written");
    fs::write(dir.path().join("app.py"), "print()").expect("written");
    dir
}

fn from(service: &Service, dir: &tempfile::TempDir, words: &[&str]) -> String {
    let mut command = mainbrella();
    command.env("MAINBRELLA_API_URL", &service.url).env("MAINBRELLA_API_KEY", KEY).env("TOKEN", "from outside");
    command.args(["template", "build", "app"]).args(words).arg("--from").arg(dir.path());
    told(&mut command, b"").replace(&service.url, "http://SERVICE")
}

#[test]
fn a_template_is_built_from_a_folder() {
    let events = vec![
        value!({"kind": "step", "step": 1, "steps": 2, "line": 2, "text": "RUN make", "cached": true}),
        value!({"kind": "step", "step": 2, "steps": 2, "line": 3, "text": "COPY . .", "cached": false}),
        value!({"kind": "output", "stream": "stdout", "text": "a\tb\u{7}"}),
        value!({"kind": "notice", "text": "app is now app:v2"}),
        value!({"kind": "done", "state": "succeeded", "template": "app:v2"}),
    ];
    let service = builder(events, build("succeeded", value!({"template": "app:v2"})));
    let dir = folder();
    let words = ["app:1.2", "--tag", "app:stable", "--build-arg", "A=1", "--build-arg", "TOKEN", "--size", "micro"];
    snapshot("template build from", from(&service, &dir, &words));
    let requests = service.requests();
    let body = value!({
        "name": "app", "tags": ["1.2", "stable"], "recipe": "FROM python\nRUN make\n", "recipePath": "Dockerfile",
        "arguments": {"A": "1", "TOKEN": "from outside"}, "size": "micro",
    });
    assert_eq!(requests[0].json(), body);
    assert_eq!(requests[1].line, format!("PUT /v1/builds/{ID}/context"));
    let sent = String::from_utf8_lossy(&requests[1].body);
    assert!(sent.contains("app.py") && sent.contains("print()") && !sent.contains("not sent"), "{sent}");
    let cursors: Vec<u64> = requests.iter().filter(|r| r.line.contains("/events")).map(cursor).collect();
    assert_eq!(cursors, [0, 1], "it goes on where it broke");
}

#[test]
fn a_build_that_fails_says_where_and_ends_so() {
    let failure =
        value!({"reason": "step", "message": "The command exited with code 3.", "line": 2, "instruction": "RUN make"});
    let events = vec![
        value!({"kind": "step", "step": 1, "steps": 1, "line": 2, "text": "RUN make", "cached": false}),
        value!({"kind": "done", "state": "failed", "failure": failure}),
    ];
    let service = builder(events.clone(), build("failed", value!({"failure": failure})));
    snapshot("template build failed", from(&service, &folder(), &["--no-internet", "--no-cache", "--pull"]));
    let asked = service.requests()[0].json();
    assert_eq!((&asked["internet"], &asked["noCache"], &asked["pull"]), (&value!(false), &value!(true), &value!(true)));
    let service = builder(events, build("cancelled", value!({})));
    assert!(from(&service, &folder(), &["--timeout", "60"]).starts_with("code: 130\n"));
    // What is refused is refused before anything is sent.
    let service = Service::start([error(403, "forbidden", "This call needs a key with the role admin.")]);
    assert!(from(&service, &folder(), &[]).starts_with("code: 4\n"));
    let service = Service::start([]);
    for words in [&["other"][..], &["--file", "/nonexistent/Recipe"], &["--build-arg", "UNSET_NAME"], &["--force"]] {
        let said = from(&service, &folder(), words);
        assert!(!said.starts_with("code: 0\n"), "{words:?}: {said}");
    }
    assert!(service.requests().is_empty());
}

fn version(name: &str, tags: &[&str]) -> Value {
    value!({
        "name": name, "digest": "sha256:0123456789abcdef", "imageBytes": 1_572_864, "frozenSizes": ["micro"],
        "kind": "built", "version": 2, "tags": tags, "createdAtMs": 5, "base": "python",
    })
}

fn details() -> Value {
    let mut whole = version("app:v2", &["app", "app:stable"]);
    whole["details"] = value!({
        "size": "micro", "origin": "python", "baseDigest": "sha256:1", "key": "k", "recipe": "FROM python\nUSER app\n",
        "env": {"A": "1"}, "workdir": "/srv", "user": "app", "start": ["python3", "x.py"], "ports": ["80/tcp"],
        "probe": {"argv": ["true"], "intervalMs": 1, "timeoutMs": 1, "startPeriodMs": 0, "startIntervalMs": 1, "retries": 3},
        "labels": {"k": "v"},
    });
    whole
}

#[test]
fn versions_are_looked_at_tagged_and_removed() {
    snapshot("template inspect", run(&Service::start([json(200, details())]), &["template", "inspect", "app"]));
    let service = Service::start([json(200, details())]);
    assert_eq!(
        run(&service, &["template", "tag", "app:v2", "app:stable"]),
        "code: 0\n--- stdout\napp:stable is app:v2\n--- stderr\n"
    );
    let asked = &service.requests()[0];
    assert_eq!((asked.line.as_str(), asked.json()), ("PUT /v1/templates/app:stable", value!({"source": "app:v2"})));
    let list = value!({"templates": [version("app:v1", &[]), version("app:v2", &["app"])]});
    let removed = |name: &str| json(200, value!({"versions": [name], "tags": []}));
    // A name the service has versions of is asked of the service.
    let service = Service::start([json(200, list.clone()), json(200, value!({"versions": [], "tags": ["app"]}))]);
    assert_eq!(run(&service, &["template", "rm", "app"]), "code: 0\n--- stdout\napp removed\n--- stderr\n");
    assert_eq!(service.requests()[1].line, "DELETE /v1/templates/app");
    let service = Service::start([json(200, list.clone()), removed("app:v1")]);
    assert!(run(&service, &["template", "rm", "app", "--all"]).starts_with("code: 0\n"));
    assert_eq!(service.requests()[1].line, "DELETE /v1/templates/app?all=true");
    let in_use = error(409, "template_in_use", "The tag app means app:v2.");
    let service = Service::start([json(200, list.clone()), in_use]);
    assert!(run(&service, &["template", "rm", "app:v2"]).starts_with("code: 6\n"));
    let service = Service::start([json(200, list), removed("app:v1")]);
    assert_eq!(run(&service, &["template", "prune"]), "code: 0\n--- stdout\napp:v1 removed\n--- stderr\n");
    assert_eq!(service.requests()[1].line, "DELETE /v1/templates/app:v1");
    let service = Service::start([json(201, details())]);
    let said = run(&service, &["template", "create", "warm", "--snapshot", "s-1", "--tag", "x"]);
    assert_eq!(said, "code: 0\n--- stdout\napp:v2\n--- stderr\n");
    assert_eq!(service.requests()[0].json(), value!({"name": "warm", "snapshotId": "s-1", "tags": ["x"]}));
}

#[test]
fn builds_are_listed() {
    let now = jiff::Timestamp::now().as_millisecond();
    let failure = value!({"reason": "step", "message": "The command exited with code 3."});
    let list = value!({"builds": [
        build("running", value!({"createdAtMs": now - 5000})),
        build("failed", value!({"createdAtMs": now - 65_000, "failure": failure})),
        build("succeeded", value!({"createdAtMs": now - 7_200_000, "template": "app:v2"})),
    ]});
    snapshot("template builds", run(&Service::start([json(200, list)]), &["template", "builds"]));
}

#[test]
fn the_log_of_a_build_is_shown_again_and_ends_as_it_did() {
    let events = vec![
        value!({"kind": "step", "step": 1, "steps": 2, "line": 2, "text": "RUN make", "cached": false}),
        value!({"kind": "output", "stream": "stdout", "text": "done"}),
        value!({"kind": "done", "state": "succeeded"}),
    ];
    let over = build("succeeded", value!({"template": "app:v1"}));
    let service = builder(events.clone(), over);
    snapshot("template builds one", run(&service, &["template", "builds", ID]));
    assert!(service.requests().iter().all(|r| r.line.starts_with("GET ")));
    let failed = build(
        "failed",
        value!({"failure": {"reason": "step", "message": "It ended with code 2.", "line": 2, "instruction": "RUN make"}}),
    );
    snapshot("template builds failed", run(&builder(events, failed), &["template", "builds", ID]));
}
