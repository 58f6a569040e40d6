//! `context` and what is below it.

use serde_json::{Value, json as value};

use crate::support::{Reply, Service, error, json, run, run_with, snapshot};

const AT: &str = "m-1@2026-10-08T12:00:00.000Z";

fn context(state: &str) -> Value {
    let at = jiff::Timestamp::now() - jiff::SignedDuration::from_millis(185_000);
    value!({"id": "ctx-1", "language": "python", "state": state, "createdAt": at.to_string(), "addedLater": 1})
}

fn result(changes: &Value) -> Reply {
    let mut r = value!({
        "executionCount": 4, "status": "ok", "stdout": "", "stderr": "", "results": [], "error": null, "truncated": false,
        "stdoutOmitted": null, "stderrOmitted": null, "durationMs": 5,
    });
    for (k, v) in changes.as_object().expect("an object") {
        r[k] = v.clone();
    }
    json(200, r)
}

#[test]
fn contexts_are_made_listed_and_ended() {
    let service = Service::start([json(201, context("idle"))]);
    let said = run(&service, &["context", "create", AT, "-C", "/tmp", "-e", "A=b"]);
    assert_eq!(said, "code: 0\n--- stdout\nctx-1\n--- stderr\n");
    let made = &service.requests()[0];
    assert_eq!(made.line, "POST /v1/machines/m-1/contexts?createdAt=2026-10-08T12%3A00%3A00.000Z");
    assert_eq!(made.json(), value!({"language": "python", "cwd": "/tmp", "env": {"A": "b"}}));
    let all = Service::start([json(200, value!({"contexts": [context("busy"), context("dead")]}))]);
    snapshot("context list", run(&all, &["context", "list", AT]));
    for verb in ["restart", "interrupt"] {
        let service = Service::start([json(200, context("idle"))]);
        assert_eq!(run(&service, &["context", verb, AT, "ctx-1"]), "code: 0\n--- stdout\nctx-1 idle\n--- stderr\n");
        assert!(service.requests()[0].line.contains(&format!("/contexts/ctx-1/{verb}?")));
    }
    let service = Service::start([json(204, value!(null))]);
    assert_eq!(run(&service, &["context", "rm", AT, "a", "b/c"]), "code: 0\n--- stdout\n--- stderr\n");
    let lines: Vec<_> = service.requests().iter().map(|r| r.line.split('?').next().map(str::to_owned)).collect();
    assert_eq!(
        lines,
        [Some("DELETE /v1/machines/m-1/contexts/a".into()), Some("DELETE /v1/machines/m-1/contexts/b%2Fc".into())]
    );
}

#[test]
fn code_comes_from_the_command_line_a_file_or_standard_input() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("code.py");
    std::fs::write(&file, "from_file()\n").expect("written");
    let file = file.to_str().expect("UTF-8");
    let cases: [(&[&str], &str); 5] = [
        (&["print(1)"], "print(1)"),
        (&["-1"], "-1"),
        (&["--file", file], "from_file()\n"),
        (&["--file", "-"], "from_stdin()\n"),
        (&[], "from_stdin()\n"),
    ];
    for (words, code) in cases {
        let service = Service::start([result(&value!({}))]);
        let words: Vec<&str> =
            ["context", "run", AT, "ctx-1", "-t", "5s"].into_iter().chain(words.iter().copied()).collect();
        let said = run_with(&service, &words, b"from_stdin()\n");
        assert_eq!(said, "code: 0\n--- stdout\n--- stderr\n", "{words:?}");
        assert_eq!(service.requests()[0].json(), value!({"code": code, "timeoutMs": 5000}));
    }
    let service = Service::start([result(&value!({}))]);
    let long = "x".repeat(1024 * 1024 + 1);
    let said = run_with(&service, &["context", "run", AT, "ctx-1"], long.as_bytes());
    assert!(said.starts_with("code: 2") && said.contains("longer than 1 MiB"), "{said}");
    let said = run(&service, &["context", "run", AT, "ctx-1", "--file", "/no/such"]);
    assert!(said.starts_with("code: 3"), "{said}");
    assert!(service.requests().is_empty());
}

#[test]
fn what_code_does_is_told_and_its_end_is_the_exit_code() {
    let tell = |changes: &Value| run(&Service::start([result(changes)]), &["context", "run", AT, "ctx-1", "x"]);
    let shown = value!([
        {"type": "display", "data": {"text/plain": "<Figure>", "image/png": "aGk="}},
        {"type": "result", "data": {"text/plain": "42"}},
    ]);
    snapshot("context ok", tell(&value!({"stdout": "out\n", "stderr": "err\n", "results": shown})));
    let exception = value!({"name": "E", "value": "no", "traceback": ["Traceback:", "E: no"]});
    snapshot("context error", tell(&value!({"status": "error", "error": exception})));
    snapshot("context timed out", tell(&value!({"status": "timed_out", "stdout": "so far\n"})));
    snapshot("context interrupted", tell(&value!({"status": "interrupted"})));
    snapshot(
        "context cut",
        tell(&value!({"truncated": true, "stdout": "ab", "stdoutOmitted": {"offset": 1, "length": 7}})),
    );
    let dead = Service::start([error(409, "context_dead", "The context's kernel was ended by signal 9.")]);
    snapshot("context dead", run(&dead, &["context", "run", AT, "ctx-1", "x"]));
    let json = run(&Service::start([result(&value!({}))]), &["context", "run", AT, "ctx-1", "x", "--json"]);
    assert!(json.contains("\"executionCount\": 4"), "{json}");
}

#[test]
fn rich_results_are_saved_by_their_type() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("new");
    let shown = value!([
        {"type": "display", "data": {"text/plain": "<Figure>", "image/png": "iVBORw=="}},
        {"type": "result", "data": {"text/html": "<b>é</b>", "application/json": {"a": [1]}, "text/plain": "x"}},
    ]);
    let service = Service::start([result(&value!({"results": shown}))]);
    let words = ["context", "run", AT, "ctx-1", "x", "--out", out.to_str().expect("UTF-8")];
    for again in ["", "-2"] {
        let said = run(&service, &words);
        assert!(said.starts_with("code: 0\n--- stdout\n<Figure>\nx\n--- stderr\nsaved "), "{said}");
        let file =
            |name: &str, ending: &str| std::fs::read(out.join(format!("{name}{again}.{ending}"))).expect("saved");
        assert_eq!(file("4-1", "png"), b"\x89PNG");
        assert_eq!(file("4-2", "html"), "<b>é</b>".as_bytes());
        assert_eq!(file("4-2", "json"), b"{\"a\":[1]}");
    }
    assert_eq!(std::fs::read_dir(&out).expect("listed").count(), 6);
}
