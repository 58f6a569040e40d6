//! Templates built on images of a registry, and templates of machines that ran.

use std::path::Path;

use mainbrella_client::api::{CreateMachine, CreateTemplate, SaveSnapshot, SnapshotKind};
use mainbrella_tests::Service;

use crate::images::{Layer, command, sha};

#[path = "../../../crates/oci/tests/root_images/registry.rs"]
mod registry;

const OCI: &str = "application/vnd.oci.image";

/// Pushes an image of busybox, whose command ends at once as that of most images does.
fn push(registry: &registry::Registry, name: &str, tag: &str, said: &str) {
    let busybox = std::fs::read("/bin/busybox").expect("busybox-static is installed; `./run test` does that");
    let mut layer = Layer::new().dir("bin").file("bin/busybox", 0o755, &busybox);
    for link in ["sh", "cat", "id", "env", "mkdir", "ls", "stat", "httpd", "wget", "sleep"] {
        layer = layer.link(&format!("bin/{link}"), "busybox");
    }
    let users = b"root:x:0:0::/:/bin/sh\nweb:x:77:77::/srv:/bin/sh\n";
    let layer = layer.dir("etc").file("etc/passwd", 0o644, users).file("etc/said", 0o644, said.as_bytes()).end().0;
    let config = format!(
        "{{\"os\":\"linux\",\"architecture\":\"amd64\",\"config\":{{\"Env\":[\"PATH=/bin\",\"OF=the image\"],\"Cmd\":[\"sh\"]}},\
         \"rootfs\":{{\"type\":\"layers\",\"diff_ids\":[\"sha256:{}\"]}}}}",
        sha(&layer)
    );
    let part = |kind: &str, bytes: &[u8]| {
        format!("{{\"mediaType\":\"{OCI}.{kind}\",\"size\":{},\"digest\":\"sha256:{}\"}}", bytes.len(), sha(bytes))
    };
    let manifest = format!(
        "{{\"schemaVersion\":2,\"mediaType\":\"{OCI}.manifest.v1+json\",\"config\":{},\"layers\":[{}]}}",
        part("config.v1+json", config.as_bytes()),
        part("layer.v1.tar", &layer)
    );
    let blobs = [config.as_bytes(), &layer].map(|bytes| (format!("sha256:{}", sha(bytes)), bytes));
    registry.push(name, tag, blobs.into_iter(), manifest.as_bytes());
}

fn build(service: &Service, dir: &Path, more: &[&str]) -> (bool, String) {
    let dir = dir.display().to_string();
    let made =
        command(service, &[&["template", "build", "site", "--from", dir.as_str(), "--size", "micro"], more].concat());
    let said = format!("{}{}", String::from_utf8_lossy(&made.stdout), String::from_utf8_lossy(&made.stderr));
    (made.status.success(), said)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recipe_may_begin_with_an_image_of_a_registry() {
    let registry = registry::Registry::start();
    push(&registry, "team/base", "1", "first\n");
    let mut service = Service::start().await;
    let dir = tempfile::tempdir().expect("a folder");
    let recipe = format!(
        "FROM {}/team/base:1\nWORKDIR /srv\nRUN cat /etc/said > told && echo \"$OF\" >> told\nUSER web\nRUN [\"id\", \"-u\"]\n",
        registry.address
    );
    std::fs::write(dir.path().join("Dockerfile"), recipe).expect("written");
    let (made, said) = build(&service, dir.path(), &[]);
    assert!(made && said.contains("77"), "{said}");
    let mut body = CreateMachine::new("site");
    body.size = "micro".to_owned();
    let machine = service.create(&body).await.expect("created");
    assert_eq!(
        machine.text("cat told; id -u; pwd; env | grep OF=").await,
        "first\nthe image\n77\n/srv\nOF=the image\n"
    );
    machine.stop().await;
    // What was fetched is used until somebody wants it anew.
    push(&registry, "team/base", "1", "second\n");
    let (made, said) = build(&service, dir.path(), &[]);
    assert!(made && said.contains("nothing has changed"), "{said}");
    let (made, said) = build(&service, dir.path(), &["--pull"]);
    assert!(made && said.contains("site:v2"), "{said}");
    let machine = service.create(&body).await.expect("created");
    assert_eq!(machine.text("cat told").await, "second\nthe image\n");
    machine.stop().await;
    // What cannot be had is said with its line.
    for (from, why) in [
        (format!("{}/team/none:1", registry.address), "line 1"),
        ("local:/etc".to_owned(), "import"),
        ("debian:12".to_owned(), "line 1"),
    ] {
        std::fs::write(dir.path().join("Dockerfile"), format!("FROM {from}\nRUN true\n")).expect("written");
        let (made, said) = build(&service, dir.path(), &[]);
        assert!(!made && said.contains(why), "{from}: {said}");
    }
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_ran_becomes_a_template_of_its_own() {
    let mut service = Service::start().await;
    let machine = service.machine().await;
    let counter = "i=0; while :; do i=$((i+1)); echo $i > /run/n; sleep 0.05; done";
    machine.sh(&format!("echo kept > /workspace/file; setsid sh -c '{counter}' >/dev/null 2>&1 & sleep 1")).await;
    let body = SaveSnapshot { name: "ready".to_owned(), kind: SnapshotKind::Full, ttl_seconds: None, stop: true };
    let saved = machine.client.save(&machine.name, &body, "s").await.expect("saved");
    let body = CreateTemplate { name: "ready".to_owned(), snapshot_id: saved.id.clone(), tags: Vec::new() };
    let made = service.client().create_template(&body);
    assert_eq!(made.await.expect("made").template.name, "ready:v1");
    // The template stands by itself.
    service.client().delete_snapshot(&saved.id).await.expect("deleted");
    let mut body = CreateMachine::new("ready");
    body.size = "micro".to_owned();
    for _ in 0..2 {
        let machine = service.create(&body).await.expect("created");
        let out = machine
            .text("a=$(cat /run/n); sleep 1; b=$(cat /run/n); [ $b -gt $a ] && echo goes on; cat /workspace/file")
            .await;
        assert_eq!(out, "goes on\nkept\n");
        machine.stop().await;
    }
    body.size = "small".to_owned();
    let refused = service.client().create(&body, None).await.expect_err("another size");
    assert!(refused.to_string().contains("micro"), "{refused}");
    service.crash().await;
    body.size = "micro".to_owned();
    let machine = service.create(&body).await.expect("created");
    machine.stop().await;
    service.finish().await;
}
