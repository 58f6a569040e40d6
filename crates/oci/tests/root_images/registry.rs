//! A real registry, for the time of a test. Also of tests of whole machines, which include this file.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// Debian's registry on a port of this host.
pub struct Registry {
    child: Child,
    /// Where it is asked: `HOST:PORT`.
    pub address: String,
    _dir: TempDir,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Registry {
    /// Starts an empty one.
    ///
    /// # Panics
    /// When it does not come up.
    pub fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let text = format!(
            "version: 0.1\nlog:\n  accesslog:\n    disabled: true\n  level: error\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: 127.0.0.1:{port}\n",
            dir.path().join("data").display()
        );
        fs::write(dir.path().join("config.yml"), text).unwrap();
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(dir.path().join("config.yml"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("docker-registry is installed; `./run test` does that");
        let address = format!("127.0.0.1:{port}");
        let until = Instant::now() + Duration::from_secs(60);
        while TcpStream::connect(&address).is_err() {
            assert!(Instant::now() < until, "the registry does not come up");
            std::thread::sleep(Duration::from_millis(50));
        }
        Self { child, address, _dir: dir }
    }

    /// Sends something; where the answer says it went on.
    pub fn put(&self, kind: &str, path: &str, bytes: &[u8]) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let method = if path.contains("/uploads/") && !path.contains("digest=") { "POST" } else { "PUT" };
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            self.address,
            bytes.len()
        )
        .unwrap();
        stream.write_all(bytes).unwrap();
        let mut answer = String::new();
        let mut location = String::new();
        for line in BufReader::new(stream).lines() {
            let line = line.unwrap();
            if answer.is_empty() {
                answer.clone_from(&line);
            }
            if let Some(at) = line.to_ascii_lowercase().strip_prefix("location: ") {
                location = line[line.len() - at.len()..].to_owned();
            }
        }
        assert!(answer.contains(" 20"), "{answer}");
        location
    }

    /// Puts an image in: its blobs with their digests, and the manifest that names them.
    pub fn push<'a>(&self, name: &str, tag: &str, blobs: impl Iterator<Item = (String, &'a [u8])>, manifest: &[u8]) {
        for (digest, bytes) in blobs {
            let to = self.put("application/octet-stream", &format!("/v2/{name}/blobs/uploads/"), b"");
            let path = to.split_once(&self.address).map_or(to.as_str(), |(_, path)| path);
            let join = if path.contains('?') { '&' } else { '?' };
            self.put("application/octet-stream", &format!("{path}{join}digest={digest}"), bytes);
        }
        self.put(MANIFEST, &format!("/v2/{name}/manifests/{tag}"), manifest);
    }
}
