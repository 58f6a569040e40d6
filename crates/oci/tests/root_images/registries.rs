//! Images in registries: a real one, and ones that mean harm or break.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use crate::registry::Registry;
use crate::support::{Blobs, INDEX, MANIFEST, Packed, blobs, compare, descriptor, sample};
use mainbrella_oci::{Access, Credentials, Digest, Image, OciError, Quiet, Source};
use tempfile::TempDir;

fn fetch(name: &str, access: &Access) -> (TempDir, Result<Image, OciError>) {
    let work = tempfile::tempdir().unwrap();
    let source: Source = name.parse().unwrap();
    let image = source.fetch(work.path(), access, &Quiet);
    (work, image)
}

#[test]
fn an_image_of_a_real_registry_comes_out_file_by_file() {
    let registry = Registry::start();
    let tree = sample();
    let blobs = blobs(&tree, &[Packed::Gzip, Packed::Plain, Packed::Gzip]);
    let parts = blobs.all.iter().map(|(digest, bytes)| (digest.to_string(), bytes.as_slice()));
    registry.push("team/app", "1.0", parts, &blobs.manifest);
    let name = format!("{}/team/app:1.0", registry.address);
    let (work, image) = fetch(&name, &Access::default());
    let image = image.unwrap();
    assert_eq!((image.digest, image.name.as_str()), (Digest::of(&blobs.manifest), name.as_str()));
    compare(&image, &work.path().join("root"), &tree);
    // By its digest, and through an index that has it for one of several platforms.
    let (_work, by_digest) = fetch(&format!("{}/team/app@{}", registry.address, image.digest), &Access::default());
    assert_eq!(by_digest.unwrap().digest, image.digest);
    let own = descriptor(MANIFEST, &blobs.manifest);
    let own = format!("{},\"platform\":{{\"os\":\"linux\",\"architecture\":\"amd64\"}}}}", own.trim_end_matches('}'));
    let index = format!("{{\"schemaVersion\":2,\"mediaType\":\"{INDEX}\",\"manifests\":[{own}]}}");
    registry.put(INDEX, "/v2/team/app/manifests/multi", index.as_bytes());
    let (_work, by_index) = fetch(&format!("{}/team/app:multi", registry.address), &Access::default());
    assert_eq!(by_index.unwrap().digest, image.digest);
    for none in ["team/app:2.0", "team/none:1.0"] {
        let (_work, e) = fetch(&format!("{}/{none}", registry.address), &Access::default());
        assert!(matches!(e.unwrap_err(), OciError::NotFound(_)), "{none}");
    }
}

type Answer = (String, BTreeMap<String, String>);

/// A registry that answers as it is told: the function gets path and headers, and writes what it likes.
struct Scripted {
    address: String,
    asked: Arc<Mutex<Vec<Answer>>>,
}

fn scripted(answer: impl Fn(&str, &BTreeMap<String, String>, &mut TcpStream) + Send + Sync + 'static) -> Scripted {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let (log, answer) = (Arc::clone(&asked), Arc::new(answer));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (log, answer) = (Arc::clone(&log), Arc::clone(&answer));
            std::thread::spawn(move || {
                let mut reader = BufReader::new(stream);
                let mut line = Vec::new();
                // TLS is tried first: that is no line of text.
                if reader.read_until(b'\n', &mut line).is_err() || !line.starts_with(b"GET ") {
                    return;
                }
                let path = String::from_utf8_lossy(&line).split(' ').nth(1).unwrap_or_default().to_owned();
                let mut headers = BTreeMap::new();
                loop {
                    let mut line = String::new();
                    if reader.read_line(&mut line).unwrap_or(0) == 0 || line.trim().is_empty() {
                        break;
                    }
                    if let Some((name, value)) = line.trim().split_once(": ") {
                        headers.insert(name.to_ascii_lowercase(), value.to_owned());
                    }
                }
                log.lock().unwrap().push((path.clone(), headers.clone()));
                answer(&path, &headers, reader.get_mut());
            });
        }
    });
    Scripted { address, asked }
}

fn say(to: &mut TcpStream, status: &str, headers: &str, body: &[u8]) {
    let head = format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    // Who asked may have had enough.
    let _ = to.write_all(head.as_bytes()).and_then(|()| to.write_all(body));
}

/// Answers as a registry with this image does.
fn serve(blobs: &Blobs, path: &str, to: &mut TcpStream) {
    let wanted = path.rsplit('/').next().and_then(|d| d.parse::<Digest>().ok());
    match wanted.and_then(|d| blobs.all.get(&d)) {
        Some(bytes) => say(to, "200 OK", "", bytes),
        None if path.ends_with("/manifests/latest") => say(to, "200 OK", "", &blobs.manifest),
        None if path == "/v2/" => say(to, "200 OK", "", b"{}"),
        None => say(to, "404 Not Found", "", b""),
    }
}

fn credentials() -> Access {
    Access { credentials: Some(Credentials { user: "me".into(), password: "secret".into() }), ..Access::default() }
}

#[test]
fn tokens_are_had_where_the_registry_says_and_credentials_go_nowhere_else() {
    let tree = sample();
    let image = blobs(&tree, &[Packed::Gzip]);
    let registry = scripted(move |path, headers, to| {
        let own = headers["host"].clone();
        if path.starts_with("/token?") {
            let fine = headers.get("authorization").is_some_and(|a| a == "Basic bWU6c2VjcmV0");
            let scope = path.contains("scope=repository%3Aa%3Apull") && path.contains("service=s");
            if fine && scope {
                say(to, "200 OK", "", b"{\"token\":\"t0\"}")
            } else {
                say(to, "401 Unauthorized", "", b"")
            }
        } else if headers.get("authorization").is_some_and(|a| a == "Bearer t0") {
            serve(&image, path, to);
        } else {
            let ask = format!("WWW-Authenticate: Bearer realm=\"http://{own}/token\",service=\"s\"\r\n");
            say(to, "401 Unauthorized", &ask, b"");
        }
    });
    let name = format!("{}/a", registry.address);
    let (work, got) = fetch(&name, &credentials());
    compare(&got.unwrap(), &work.path().join("root"), &tree);
    let (_work, e) = fetch(&name, &Access::default());
    assert!(matches!(e.unwrap_err(), OciError::Denied(_)));
    // A realm elsewhere without TLS, and one with credentials in it, are not asked.
    let spy = scripted(|_, _, to| say(to, "200 OK", "", b"{\"token\":\"t\"}"));
    for realm in [format!("http://{}/token", spy.address), "ftp://x/".to_owned(), "https://u:p@x/".to_owned()] {
        let evil = scripted(move |path, _, to| {
            let ask = format!("WWW-Authenticate: Bearer realm=\"{realm}\"\r\n");
            if path == "/v2/" { say(to, "200 OK", "", b"") } else { say(to, "401 Unauthorized", &ask, b"") }
        });
        let (_work, e) = fetch(&format!("{}/a", evil.address), &credentials());
        assert!(matches!(e.unwrap_err(), OciError::Answer { .. }));
    }
    // Redirects: to another place without TLS never; within the registry, with them.
    let to_spy = spy.address.clone();
    let evil = scripted(move |path, _, to| {
        if path == "/v2/" {
            say(to, "200 OK", "", b"")
        } else {
            say(to, "307 Temporary Redirect", &format!("Location: http://{to_spy}{path}\r\n"), b"")
        }
    });
    let (_work, e) = fetch(&format!("{}/a", evil.address), &credentials());
    assert!(matches!(e.unwrap_err(), OciError::Answer { .. }));
    assert!(spy.asked.lock().unwrap().is_empty(), "nobody else was asked anything");
    let circle = scripted(|path, _, to| {
        if path == "/v2/" {
            say(to, "200 OK", "", b"")
        } else {
            say(to, "302 Found", &format!("Location: {path}\r\n"), b"")
        }
    });
    let (_work, e) = fetch(&format!("{}/a", circle.address), &Access::default());
    assert!(matches!(e.unwrap_err(), OciError::Answer { .. }));
    assert!(circle.asked.lock().unwrap().len() < 20);
}

#[test]
fn a_transfer_that_breaks_off_goes_on_where_it_was() {
    let tree = sample();
    let image = blobs(&tree, &[Packed::Plain]);
    let first = Digest::of(&tree.layers[0]);
    for resumes in [true, false] {
        let tree_layers = tree.layers[0].clone();
        let blobs = Blobs { manifest: image.manifest.clone(), config: image.config.clone(), all: image.all.clone() };
        let broken = Mutex::new(0);
        let registry = scripted(move |path, headers, to| {
            if !path.ends_with(&first.to_string()) {
                return serve(&blobs, path, to);
            }
            let from: usize = match headers.get("range") {
                Some(range) if resumes => range.trim_start_matches("bytes=").trim_end_matches('-').parse().unwrap(),
                _ => 0,
            };
            let rest = &tree_layers[from..];
            let mut broken = broken.lock().unwrap();
            *broken += 1;
            if *broken > 2 {
                let range = format!("Content-Range: bytes {from}-{}/{}\r\n", tree_layers.len() - 1, tree_layers.len());
                let (status, headers) = if from > 0 { ("206 Partial Content", range.as_str()) } else { ("200 OK", "") };
                return say(to, status, headers, rest);
            }
            let (status, more) = if from > 0 {
                ("206 Partial Content", format!("Content-Range: bytes {from}-9/10\r\n"))
            } else {
                ("200 OK", String::new())
            };
            let head = format!("HTTP/1.1 {status}\r\n{more}Content-Length: {}\r\n\r\n", rest.len());
            let _ = to.write_all(head.as_bytes()).and_then(|()| to.write_all(&rest[..rest.len() / 3]));
        });
        let (work, got) = fetch(&format!("{}/a", registry.address), &Access::default());
        compare(&got.unwrap(), &work.path().join("root"), &tree);
        let asked = registry.asked.lock().unwrap();
        let ranges = asked.iter().filter(|(p, h)| p.ends_with(&first.to_string()) && h.contains_key("range")).count();
        assert_eq!(ranges, 2);
    }
}

#[test]
fn what_a_registry_says_is_bounded_and_not_believed() {
    let image = Arc::new(blobs(&sample(), &[Packed::Gzip]));
    let endless = |to: &mut TcpStream| {
        let _ = to.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
        let piece = vec![b' '; 1 << 16];
        while to
            .write_all(b"10000\r\n")
            .and_then(|()| to.write_all(&piece))
            .and_then(|()| to.write_all(b"\r\n"))
            .is_ok()
        {}
    };
    let registry = scripted(move |path, _, to| if path == "/v2/" { say(to, "200 OK", "", b"") } else { endless(to) });
    let (_work, e) = fetch(&format!("{}/a", registry.address), &Access::default());
    assert!(matches!(e.unwrap_err(), OciError::Limit { .. }));
    // A layer that does not end is over at its size.
    let own = Arc::clone(&image);
    let layer = own
        .all
        .keys()
        .find(|d| !own.config.is_empty() && **d != Digest::of(&own.config) && **d != Digest::of(&own.manifest))
        .copied()
        .unwrap();
    let registry = scripted(
        move |path, _, to| if path.ends_with(&layer.to_string()) { endless(to) } else { serve(&own, path, to) },
    );
    let (_work, e) = fetch(&format!("{}/a", registry.address), &Access::default());
    assert!(matches!(e.unwrap_err(), OciError::Digest(_)));
    // Other content than what was asked for, each document in turn.
    for digest in image.all.keys().copied().collect::<Vec<_>>() {
        let own = Arc::clone(&image);
        let tag = digest == Digest::of(&own.manifest);
        let name = if tag { format!("@{digest}") } else { String::new() };
        let registry = scripted(move |path, _, to| {
            if !path.ends_with(&digest.to_string()) {
                return serve(&own, path, to);
            }
            let mut other = own.all[&digest].clone();
            let last = other.len() - 1;
            other[last] ^= 0x20;
            say(to, "200 OK", "", &other);
        });
        let (_work, e) = fetch(&format!("{}/a{name}", registry.address), &Access::default());
        assert!(matches!(e.unwrap_err(), OciError::Digest(_)));
    }
    let broken =
        scripted(
            |path, _, to| {
                if path == "/v2/" { say(to, "200 OK", "", b"") } else { say(to, "500 Oops", "", b"\x1b[31m") }
            },
        );
    let (_work, e) = fetch(&format!("{}/a", broken.address), &Access::default());
    let e = e.unwrap_err();
    assert!(matches!(e, OciError::Answer { .. }) && !e.to_string().contains('\x1b'), "{e}");
}

#[test]
fn a_registry_that_is_not_there_is_said_to_be_unreachable() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (_work, e) = fetch(&format!("127.0.0.1:{port}/a"), &Access::default());
    assert!(matches!(e.unwrap_err(), OciError::Unreachable { .. }));
}
