//! What people get wrong, and what the network does.

use std::os::unix::fs::PermissionsExt as _;

use crate::support::{KEY, Reply, Service, error, json, machine, mainbrella, run, snapshot, told};

#[test]
fn wrong_words_are_usage_mistakes() {
    let service = Service::start([json(200, machine("m-1", 90))]);
    let cases: &[&[&str]] = &[
        &["frobnicate"],
        &["get", "Not/A/Machine"],
        &["get", "m-1@yesterday"],
        &["create", "--ttl", "1.5h"],
        &["create", "--label", "novalue"],
        &["create", "--internet", "maybe"],
        &["list", "--state", "sleeping"],
        &["exec", "m-1"],
        &["exec", "m-1", "-c", "a", "--", "b"],
        &["extend", "m-1"],
        &["stop"],
        &["cp", "a", "b"],
        &["cp", "m-1:/a", "m-2:/b"],
        &["cp", "m-1:a", "./b"],
        &["cp", "./b", "m-1:/x", "--mode", "rwx"],
        &["cp", "/", "m-1:/x"],
        &["cp", "m-1:/", "/tmp/"],
        &["serve", "--pool-size", "many"],
        &["--url", "http://10.0.0.1", "list"],
        &["--url", "https://me:secret@host", "list"],
    ];
    for words in cases {
        snapshot(format!("wrong {}", words.join(" ")), run(&service, words));
        let sent = service.requests();
        assert!(sent.is_empty(), "{words:?}: {sent:?} was sent");
    }
}

#[test]
fn answers_have_exit_codes_of_their_own() {
    let cases = [
        (400, "invalid_request", "Size must be micro, small, medium or large."),
        (401, "unauthenticated", "The API key is not valid."),
        (403, "forbidden", "This call needs a key with the role admin."),
        (404, "not_found", "There is no machine m-1."),
        (409, "generation_mismatch", "The slot holds a newer machine."),
        (422, "unsupported", "This host has no network for machines."),
        (500, "internal", "Something went wrong."),
        (503, "overloaded", "Too many machines are being made."),
        (418, "from_the_future", "A code this command does not know."),
    ];
    for (status, code, message) in cases {
        let service = Service::start([error(status, code, message)]);
        snapshot(format!("answer {code}"), run(&service, &["get", "m-1"]));
        snapshot(format!("answer {code} json"), run(&service, &["get", "m-1", "--json"]));
        assert!(run(&service, &["exec", "m-1", "--", "true"]).starts_with("code: 125"), "exec keeps its codes apart");
    }
}

#[test]
fn a_broken_network_is_told_plainly() {
    let silent = Service::start([Reply::Cut(vec![])]);
    snapshot("network cut", run(&silent, &["get", "m-1"]));
    let half = Service::start([Reply::Cut(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{".to_vec())]);
    snapshot("network cut in the answer", run(&half, &["get", "m-1"]));
    let redirect =
        Service::start([Reply::Answer(307, vec![("location".into(), "http://127.0.0.1:1/".into())], vec![])]);
    snapshot("network redirect", run(&redirect, &["get", "m-1"]));
    let page = Service::start([Reply::Answer(200, vec![], b"<html>".to_vec())]);
    snapshot("network not json", run(&page, &["get", "m-1"]));
    let proxy = Service::start([Reply::Answer(502, vec![], b"<html>".to_vec())]);
    snapshot("network proxy", run(&proxy, &["get", "m-1"]));
    let mut command = mainbrella();
    command.env("MAINBRELLA_API_KEY", KEY).args(["--url", "http://127.0.0.1:1", "list"]);
    snapshot("network nothing there", told(&mut command, b""));
}

#[test]
fn the_key_comes_from_a_file_or_the_environment_and_is_never_shown() {
    let service = Service::start([json(200, machine("m-1", 90))]);
    let with = |change: &dyn Fn(&mut std::process::Command)| {
        let mut command = mainbrella();
        command.env("MAINBRELLA_API_URL", &service.url).args(["get", "m-1"]);
        change(&mut command);
        told(&mut command, b"")
    };
    snapshot("key none", with(&|_| ()));
    snapshot(
        "key odd",
        with(&|c| {
            c.env("MAINBRELLA_API_KEY", "mb_x\u{e9}y");
        }),
    );
    snapshot(
        "key file missing",
        with(&|c| {
            c.args(["--api-key-file", "/nonexistent/key"]);
        }),
    );
    assert!(service.requests().is_empty());

    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("key");
    std::fs::write(&file, format!("{KEY}\n")).expect("written");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).expect("set");
    let path = file.to_str().expect("UTF-8");
    let said = with(&|c| {
        c.args(["--api-key-file", path]);
    });
    assert!(said.starts_with("code: 0") && said.contains("can be read by other users"), "{said}");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).expect("set");
    let said = with(&|c| {
        c.env("MAINBRELLA_API_KEY", "other").args(["--api-key-file", path]);
    });
    assert!(said.ends_with("--- stderr\n"), "{said}");

    // The first key of a service on this machine.
    std::fs::create_dir(dir.path().join("keys")).expect("made");
    std::fs::rename(&file, dir.path().join("keys/admin.key")).expect("moved");
    let said = with(&|c| {
        c.env("MAINBRELLA_DATA_DIR", dir.path());
    });
    assert!(said.starts_with("code: 0"), "{said}");
    for request in service.requests() {
        assert_eq!(request.header("authorization"), Some(format!("Bearer {KEY}").as_str()));
    }
    // It is offered to this machine only.
    let mut command = mainbrella();
    command.env("MAINBRELLA_DATA_DIR", dir.path()).args(["--url", "https://mainbrella.invalid", "list"]);
    assert!(told(&mut command, b"").starts_with("code: 4"));
}

#[test]
fn env_is_safe_to_evaluate() {
    let service = Service::start([json(200, machine("m-1", 90))]);
    let said = run(&service, &["env", "--data-dir", "/srv/it's here"]);
    let here = std::path::Path::new(env!("CARGO_BIN_EXE_mainbrella")).parent().and_then(|p| p.to_str()).expect("UTF-8");
    snapshot("env", said.replace(here, "/HERE"));
    assert!(service.requests().is_empty());
}
