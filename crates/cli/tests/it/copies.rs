//! `cp`, both ways.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;

use serde_json::json as value;

use crate::support::{KEY, Reply, Service, error, json, machine, mainbrella, run, run_with, snapshot, told};

const AT: &str = "m-1@2026-10-08T12:00:00.000Z";

fn file(bytes: &[u8], mode: &str) -> Reply {
    let headers = vec![
        ("x-mainbrella-mode".to_owned(), mode.to_owned()),
        ("x-mainbrella-size".to_owned(), bytes.len().to_string()),
    ];
    Reply::Answer(200, headers, bytes.to_vec())
}

fn written(size: usize) -> Reply {
    json(200, value!({ "size": size }))
}

#[test]
fn a_file_goes_in_with_its_bits_and_its_name() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("re\"port\na&b=c");
    let bytes: Vec<u8> = (0..700_000u32).map(|n| (n % 251) as u8).collect();
    std::fs::write(&path, &bytes).expect("written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o750)).expect("set");
    let service = Service::start([json(200, machine("m-1", 90)), written(bytes.len())]);
    let said = run(&service, &["cp", path.to_str().expect("UTF-8"), "m-1:/in/"]);
    assert_eq!(said, "code: 0\n--- stdout\n--- stderr\n");
    let requests = service.requests();
    assert_eq!(
        requests[1].line,
        "PUT /v1/machines/m-1/files/content?createdAt=2026-10-08T12%3A00%3A00.000Z&path=%2Fin%2Fre%22port%0Aa%26b%3Dc\
         &createParents=true&exclusive=false&mode=0750"
    );
    assert_eq!(requests[1].header("content-length"), Some("700000"));
    assert_eq!(requests[1].body, bytes);
}

#[test]
fn standard_input_and_output_work() {
    let service = Service::start([written(5)]);
    run_with(&service, &["cp", "-n", "--mode", "600", "-", &format!("{AT}:/x")], b"\xff\x00abc");
    let request = &service.requests()[0];
    assert_eq!(request.body, b"\xff\x00abc");
    assert!(request.line.ends_with("exclusive=true&mode=0600"), "{}", request.line);
    let bytes: Vec<u8> = (0..=255).collect();
    let service = Service::start([file(&bytes, "0644")]);
    let mut command = mainbrella();
    command.env("MAINBRELLA_API_URL", &service.url).env("MAINBRELLA_API_KEY", KEY).args([
        "cp",
        &format!("{AT}:/x"),
        "-",
    ]);
    assert_eq!(command.output().expect("it runs").stdout, bytes);
}

#[test]
fn a_file_comes_out_whole_or_not_at_all() {
    let dir = tempfile::tempdir().expect("a folder");
    let target = dir.path().join("target");
    std::fs::write(&target, "older").expect("written");
    let word = target.to_str().expect("UTF-8");
    let cut = Reply::Cut(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nonly this".to_vec());
    snapshot("cp cut", run(&Service::start([cut]), &["cp", &format!("{AT}:/x"), word]));
    assert_eq!(std::fs::read(&target).expect("there"), b"older");
    let missing = Service::start([error(404, "file_not_found", "No such file or directory in the machine.")]);
    snapshot("cp missing", run(&missing, &["cp", &format!("{AT}:/x"), word]));
    assert_eq!(std::fs::read_dir(dir.path()).expect("listed").count(), 1, "nothing half-made is left");

    assert_eq!(
        run(&Service::start([file(b"newer", "4751")]), &["cp", &format!("{AT}:/x"), word]),
        "code: 0\n--- stdout\n--- stderr\n"
    );
    assert_eq!(std::fs::read(&target).expect("there"), b"newer");
    let mode = std::fs::metadata(&target).expect("there").permissions().mode() & 0o7777;
    assert_eq!(mode, 0o751, "a set-user-id bit of a machine is not taken over");
    assert_eq!(std::fs::read_dir(dir.path()).expect("listed").count(), 1);
}

#[test]
fn targets_that_are_folders_links_devices_or_there_already() {
    let dir = tempfile::tempdir().expect("a folder");
    let word = |p: &str| dir.path().join(p).to_str().expect("UTF-8").to_owned();
    let get = |remote: &str, to: &str, more: &[&str]| {
        let (service, from) = (Service::start([file(b"data", "0600")]), format!("{AT}:{remote}"));
        let words: Vec<&str> = ["cp"].into_iter().chain(more.iter().copied()).chain([from.as_str(), to]).collect();
        run(&service, &words).replace(dir.path().to_str().expect("UTF-8"), "DIR")
    };
    assert!(get("/a/name", &word(""), &[]).starts_with("code: 0"));
    assert_eq!(std::fs::read(dir.path().join("name")).expect("there"), b"data");
    std::fs::create_dir_all(dir.path().join("taken/name")).expect("made");
    snapshot("cp onto a folder", get("/a/name", &word("taken"), &[]));
    snapshot("cp onto a file with -n", get("/a/name", &word("name"), &["-n"]));
    snapshot("cp into no folder", get("/a/name", &word("none/here"), &[]));
    std::fs::write(dir.path().join("real"), "older").expect("written");
    std::os::unix::fs::symlink("real", dir.path().join("link")).expect("made");
    assert!(get("/a", &word("link"), &[]).starts_with("code: 0"));
    assert_eq!(std::fs::read(dir.path().join("real")).expect("there"), b"data");
    assert!(dir.path().join("link").is_symlink());
    assert!(get("/a", "/dev/null", &[]).starts_with("code: 0"));
    assert!(std::path::Path::new("/dev/null").metadata().is_ok_and(|m| !m.is_file()), "a device is not replaced");
}

#[test]
fn local_names_may_be_any_bytes() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join(OsStr::from_bytes(b"odd \xff\xfe"));
    std::fs::write(&path, "x").expect("written");
    let service = Service::start([written(1)]);
    let put = |to: &str| {
        let mut command = mainbrella();
        command.env("MAINBRELLA_API_URL", &service.url).env("MAINBRELLA_API_KEY", KEY).arg("cp").arg(&path).arg(to);
        told(&mut command, b"")
    };
    snapshot("cp keeps no odd name", put(&format!("{AT}:/in/")));
    assert!(put(&format!("{AT}:/in/plain")).starts_with("code: 0"));
    assert_eq!(service.requests().len(), 1);
}

#[test]
fn a_write_is_sent_once() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("f");
    std::fs::write(&path, "x").expect("written");
    let service = Service::start([Reply::Cut(vec![])]);
    snapshot("cp lost", run(&service, &["cp", path.to_str().expect("UTF-8"), &format!("{AT}:/x")]));
    assert_eq!(service.requests().len(), 1);
}
