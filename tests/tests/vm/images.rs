//! Templates made of images of containers: imported by the command, machines made of them by the service.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use mainbrella_client::api::CreateMachine;
use mainbrella_tests::{Machine, Service, program};
use sha2::{Digest, Sha256};
use tar::EntryType;

fn sha(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// Path, permissions and content of a file.
pub(super) type Has = (String, u32, Vec<u8>);

/// A layer on its way, and what it has.
pub(super) struct Layer(tar::Builder<Vec<u8>>, Vec<Has>);

impl Layer {
    pub(super) fn new() -> Self {
        Self(tar::Builder::new(Vec::new()), Vec::new())
    }

    fn put(mut self, path: &str, kind: EntryType, mode: u32, content: &[u8], link: &str) -> Self {
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1_700_000_000);
        header.set_size(content.len() as u64);
        if link.is_empty() {
            self.0.append_data(&mut header, path, content).expect("appended");
        } else {
            self.0.append_link(&mut header, path, link).expect("appended");
        }
        self
    }

    pub(super) fn dir(self, path: &str) -> Self {
        self.put(path, EntryType::Directory, 0o755, b"", "")
    }

    pub(super) fn file(mut self, path: &str, mode: u32, content: &[u8]) -> Self {
        self.1.push((path.to_owned(), mode, content.to_vec()));
        self.put(path, EntryType::Regular, mode, content, "")
    }

    pub(super) fn link(self, path: &str, to: &str) -> Self {
        self.put(path, EntryType::Symlink, 0o777, b"", to)
    }

    pub(super) fn end(self) -> (Vec<u8>, Vec<Has>) {
        (self.0.into_inner().expect("written"), self.1)
    }
}

/// Debian's busybox and a program of ours, as `docker save` writes an image of two layers; and the files it has at the end.
fn image(to: &Path) -> Vec<Has> {
    let busybox = fs::read("/bin/busybox").expect("busybox-static is installed; `./run test` does that");
    let mut below = Layer::new().dir("bin").dir("etc").dir("srv").dir("srv/app").file("bin/busybox", 0o755, &busybox);
    for name in ["sh", "cat", "ls", "id", "sha256sum", "stat", "env", "mkdir", "sleep", "httpd", "wget"] {
        below = below.link(&format!("bin/{name}"), "busybox");
    }
    // As most images have it: the search path is set anew, and files of a folder are read.
    let profile = b"export PATH=/bin\nfor f in /etc/profile.d/*.sh; do [ ! -r \"$f\" ] || . \"$f\"; done\n";
    let below = below
        .file("etc/profile", 0o644, profile)
        .file("srv/app/old", 0o644, b"gone in the end")
        .file("srv/app/data", 0o640, &(0..300_000u32).map(|i| ((i * 7) >> 3) as u8).collect::<Vec<_>>())
        .link("etc/resolv.conf", "/run/not/there")
        .link("dev", "/srv");
    let (below, mut files) = below.end();
    let above = Layer::new()
        .file("srv/app/.wh.old", 0o644, b"")
        .file("opt/tools/hello", 0o4755, b"#!/bin/sh\necho hello from $WHO\n")
        .dir("usr")
        .link("usr/bin", "/bin");
    let (above, more) = above.end();
    files.extend(more);
    files.retain(|(path, ..)| !path.ends_with("/old") && !path.contains(".wh."));

    let config =
        "{\"Env\":[\"PATH=/opt/tools:/bin\",\"WHO=the image\"],\"WorkingDir\":\"/srv/app\",\"Cmd\":[\"hello\"]}";
    save(to, config, &[&below, &above]);
    files
}

/// Writes an image of these layers as `docker save` does.
pub(super) fn save(to: &Path, config: &str, layers: &[&[u8]]) {
    let digests: Vec<_> = layers.iter().map(|layer| format!("\"sha256:{}\"", sha(layer))).collect();
    let config = format!(
        "{{\"os\":\"linux\",\"architecture\":\"amd64\",\"config\":{config},\"rootfs\":{{\"type\":\"layers\",\"diff_ids\":[{}]}}}}",
        digests.join(",")
    );
    let name = format!("{}.json", sha(config.as_bytes()));
    let places: Vec<_> = (0..layers.len()).map(|n| format!("{n}/layer.tar")).collect();
    let manifest = format!("[{{\"Config\":\"{name}\",\"RepoTags\":[\"small:1\"],\"Layers\":{places:?}}}]");
    let mut saved = Layer::new().file(&name, 0o644, config.as_bytes());
    for (place, layer) in places.iter().zip(layers) {
        saved = saved.file(place, 0o644, layer);
    }
    fs::write(to, saved.file("manifest.json", 0o644, manifest.as_bytes()).end().0).expect("written");
}

/// The command for people, to be run.
pub(super) fn client_command(service: &Service, arguments: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.env("MAINBRELLA_API_URL", service.url()).arg("--data-dir").arg(service.data()).args(arguments);
    command
}

pub(super) fn command(service: &Service, arguments: &[&str]) -> Output {
    client_command(service, arguments).output().expect("run")
}

async fn create(service: &mut Service, env: &[(&str, &str)]) -> Machine {
    let mut body = CreateMachine::new("small");
    body.size = "micro".to_owned();
    body.env = env.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect::<BTreeMap<_, _>>();
    service.create(&body).await.expect("created")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_of_an_image_has_its_files_its_environment_and_its_directory() {
    let mut service = Service::start().await;
    let work = tempfile::tempdir().expect("dir");
    let archive = work.path().join("small.tar");
    let files = image(&archive);
    let source = format!("local:{}", archive.display());
    let made = command(&service, &["--json", "template", "import", "small", &source]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let made: serde_json::Value = serde_json::from_slice(&made.stdout).expect("json");
    assert!(made["sourceDigest"].as_str().is_some_and(|d| d.starts_with("sha256:")), "{made}");

    let machine = create(&mut service, &[]).await;
    for (path, mode, content) in &files {
        let said = machine.text(&format!("sha256sum < /{path}; stat -c '%a %u %g' /{path}")).await;
        assert_eq!(said.trim(), format!("{}  -\n{mode:o} 0 0", sha(content)), "{path}");
    }
    assert_eq!(machine.text("ls /srv/app").await.trim(), "data", "what a layer says is gone is gone");
    assert_eq!(
        machine.text("pwd; id -u; hello; echo $PATH").await,
        "/srv/app\n0\nhello from the image\n/opt/tools:/bin\n"
    );
    // A program without a shell finds the same.
    let out = machine.run(&Machine::argv_order(&["hello"])).await.expect("run");
    assert_eq!(out.text(), "hello from the image\n");
    // What every machine has: devices of its own though the image had a link there, a name server, a workspace, a network.
    let said = machine.text("ls -d /workspace /dev/null /proc/self/fd; cat /etc/resolv.conf; cat /etc/hostname").await;
    assert!(said.contains("/dev/null") && said.contains("nameserver") && said.contains("/workspace"), "{said}");
    machine.write("/workspace/x", "written").await.expect("written");
    assert_eq!(machine.text("cat /workspace/x").await, "written");
    machine.stop().await;

    // What a create says comes on top; two machines of it have names of their own.
    let other = create(&mut service, &[("WHO", "the create"), ("MORE", "1")]).await;
    assert_eq!(other.text("hello; echo $MORE").await, "hello from the create\n1\n");
    let third = create(&mut service, &[]).await;
    let id = "cat /etc/machine-id";
    assert_ne!(other.text(id).await, third.text(id).await);
    // Paused and resumed it goes on.
    third.client.pause(&third.name).await.expect("paused");
    third.client.resume(&third.name).await.expect("resumed");
    assert_eq!(third.text("hello").await, "hello from the image\n");

    // A second import of the same makes the same; a damaged one leaves it as it is.
    let again = command(&service, &["--json", "template", "import", "small", &source]);
    let again: serde_json::Value = serde_json::from_slice(&again.stdout).expect("json");
    assert_eq!(again["digest"], made["digest"]);
    let mut bytes = fs::read(&archive).expect("read");
    let at = bytes.windows(10).position(|w| w == b"hello from").expect("there");
    bytes[at] ^= 1;
    fs::write(&archive, bytes).expect("written");
    let damaged = command(&service, &["template", "import", "small", &source]);
    assert!(!damaged.status.success() && String::from_utf8_lossy(&damaged.stderr).contains("digest"));
    let list: serde_json::Value =
        serde_json::from_slice(&command(&service, &["--json", "template", "list"]).stdout).expect("json");
    let small = list["templates"].as_array().expect("a list").iter().find(|t| t["name"] == "small").expect("listed");
    assert_eq!(small["digest"], made["digest"]);
    for (arguments, code) in [
        (["template", "import", "python", source.as_str()], 2),
        (["template", "import", "x", "no-registry"], 2),
        (["template", "import", "x", "local:/no/such/file"], 1),
        (["template", "import", "x", "127.0.0.1:1/x"], 5),
    ] {
        assert_eq!(command(&service, &arguments).status.code(), Some(code), "{arguments:?}");
    }
    let left = fs::read_dir(service.data().join("tmp")).expect("tmp").flatten();
    assert_eq!(left.filter(|e| e.file_name().to_string_lossy().starts_with("image-")).count(), 0);
    service.look();
    service.finish().await;
}
