//! Commands of other users than root, and what a template says of who they are.

use std::fs;

use bytes::Bytes;
use mainbrella_client::api::{
    CommandLine, CreateContext, CreateMachine, MakeDirectory, OutputKind, RestoreSnapshot, RunCode, RunCommand,
    SaveSnapshot, SnapshotKind, StartJob, TerminalSize,
};
use mainbrella_client::{MachineRef, Upload};
use mainbrella_tests::{Machine, Service};
use mainbrella_types::ErrorCode;

use crate::code;
use crate::images::{Layer, command, save};
use crate::jobs::Heard;

async fn of(m: &Machine, user: &str, text: &str) -> String {
    let order = RunCommand { user: Some(user.to_owned()), ..Machine::shell_order(text) };
    m.run(&order).await.unwrap_or_else(|e| panic!("as {user}: {e:?}")).text()
}

/// What `text` says on a terminal.
async fn on_terminal(m: &Machine, user: Option<&str>, text: &str) -> String {
    let mut body = StartJob::new(CommandLine::Text(text.to_owned()));
    (body.user, body.pty) = (user.map(str::to_owned), Some(TerminalSize { cols: 80, rows: 24 }));
    let job = m.client.start_job(&m.name, &body, None).await.expect("started").job;
    Heard::all(m, &job).await.text[0].clone()
}

const WHO: &str = "echo $(id -u):$(id -g):$(id -G) $HOME $USER $(pwd)";

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_of_an_image_is_the_images_users() {
    let mut service = Service::start().await;
    let work = tempfile::tempdir().expect("dir");
    let archive = work.path().join("owned.tar");
    let busybox = fs::read("/bin/busybox").expect("busybox-static is installed; `./run test` does that");
    let mut layer = Layer::new().dir("bin").dir("etc").dir("home").file("bin/busybox", 0o755, &busybox);
    for name in ["sh", "cat", "id", "stat", "tty", "mkdir", "touch", "ls"] {
        layer = layer.link(&format!("bin/{name}"), "busybox");
    }
    let layer = layer
        .file(
            "etc/passwd",
            0o644,
            b"root:x:0:0:root:/root:/bin/sh\napp:x:1000:1001::/home/app:/bin/sh\nweb:x:33:33::/:/bin/sh\n",
        )
        .file("etc/group", 0o644, b"root:x:0:\napp:x:1001:\nlogs:x:50:web,app\n")
        .file("etc/secret", 0o600, b"of root")
        .end()
        .0;
    save(&archive, "{\"Env\":[\"PATH=/bin\"],\"User\":\"app\"}", &[&layer]);
    let source = format!("local:{}", archive.display());
    let made = command(&service, &["template", "import", "owned", &source]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let mut body = CreateMachine::new("owned");
    body.size = "micro".to_owned();
    let m = service.create(&body).await.expect("created");

    // The image's user, its place and its groups; and others who are asked for.
    assert_eq!(m.text(WHO).await, "1000:1001:1001 50 /home/app app /workspace\n");
    assert_eq!(of(&m, "root", WHO).await, "0:0:0 /root root /workspace\n");
    assert_eq!(of(&m, "web:app", WHO).await, "33:1001:1001 / web /workspace\n");
    assert_eq!(of(&m, "4321", WHO).await, "4321:0:0 / /workspace\n");
    assert_eq!(
        of(&m, "4321", "cat /etc/secret 2>&1; touch /workspace/x 2>&1").await.matches("Permission denied").count(),
        2
    );
    let closed = m.sh("cat /etc/secret; echo own >/workspace/own && stat -c '%u %g' /workspace /workspace/own; cat /proc/self/status").await;
    assert!(closed.error().contains("Permission denied"), "{}", closed.error());
    assert!(closed.text().starts_with("1000 1001\n1000 1001\n"), "{}", closed.text());
    assert!(closed.text().contains("CapEff:\t0000000000000000"), "{}", closed.text());
    for nobody in ["nobody", "app:nobody"] {
        let order = RunCommand { user: Some(nobody.to_owned()), ..Machine::shell_order("true") };
        let refused = m.client.run(&m.name, &order).await;
        let text = format!("{refused:?}");
        assert_eq!(code(refused), ErrorCode::CommandNotStarted);
        assert!(text.contains("no such") && text.contains("in the machine"), "{text}");
    }
    let order = RunCommand { user: Some("a b".to_owned()), ..Machine::shell_order("true") };
    assert_eq!(code(m.client.run(&m.name, &order).await), ErrorCode::InvalidRequest);
    // A terminal is that of who it was opened for, and can be opened by its name.
    let tty = "stat -c %u $(tty); echo again >$(tty); id -u";
    assert_eq!(on_terminal(&m, None, tty).await, "1000\r\nagain\r\n1000\r\n");
    assert_eq!(on_terminal(&m, Some("33"), tty).await, "33\r\nagain\r\n33\r\n");

    // Files that are written from outside belong to the image's user; what is there keeps its owner.
    m.write("/workspace/written/by/api", "x").await.expect("written");
    let directory = MakeDirectory { path: "/workspace/made".to_owned(), recursive: true, mode: None };
    m.client.make_directory(&m.name, &directory).await.expect("made");
    m.write("/etc/secret", "still").await.expect("written");
    let tree = Layer::new().dir("in").file("in/file", 0o640, b"unpacked").end().0;
    let upload = Upload { bytes: futures::stream::iter([Ok::<_, std::io::Error>(Bytes::from(tree))]), length: None };
    m.client.upload_tree(&m.name, "/workspace/tree", upload).await.expect("unpacked");
    let stat = "cd /workspace; stat -c '%u:%g %n' written written/by/api made tree tree/in tree/in/file /etc/secret";
    assert_eq!(
        m.text(stat).await,
        "1000:1001 written\n1000:1001 written/by/api\n1000:1001 made\n1000:1001 tree\n1000:1001 tree/in\n\
         1000:1001 tree/in/file\n0:0 /etc/secret\n"
    );
    m.stop().await;
    service.finish().await;
}

/// Files of a machine's disk say it, not those of the image below: as in templates that were built.
#[tokio::test(flavor = "multi_thread")]
async fn a_saved_disk_says_who_its_commands_run_as() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    m.text(
        "useradd -m -u 1234 app && mkdir -p /etc/mainbrella && echo app >/etc/mainbrella/user \
         && printf '/srv\\0FROM=the disk\\0' >/etc/mainbrella/commands",
    )
    .await;
    assert_eq!(m.text("id -u").await, "0\n", "read once, at boot");
    let body = SaveSnapshot { name: "owned".to_owned(), kind: SnapshotKind::Workspace, stop: true, ttl_seconds: None };
    let saved = m.client.save(&m.name, &body, "save owned").await.expect("saved");
    let made = m.client.restore(&saved.id, &RestoreSnapshot::default(), "restore owned").await.expect("restored");
    service.look();
    let back = service.attach(MachineRef::from(&made.machine));
    assert_eq!(
        back.text("echo $(id -un) $HOME $FROM $(pwd); stat -c %U /workspace").await,
        "app /home/app the disk /srv\napp\n"
    );
    // Without its user the machine runs what names another one, and says of the rest why not.
    of(&back, "root", "sed -i s/^app:/ppa:/ /etc/passwd").await;
    assert_eq!(code(back.client.run(&back.name, &Machine::shell_order("true")).await), ErrorCode::CommandNotStarted);
    let refused = back.client.create_context(&back.name, &CreateContext::new("python")).await;
    assert_eq!(code(refused.map(|context| context.id)), ErrorCode::CommandNotStarted);
    back.write("/workspace/roots", "x").await.expect("written");
    of(&back, "root", "sed -i s/^ppa:/app:/ /etc/passwd").await;
    assert_eq!(back.text("stat -c %U /workspace/roots").await, "root\n");
    // Jupyter kernels run as the same.
    let context = back.client.create_context(&back.name, &CreateContext::new("python")).await.expect("a context");
    let text = "import os, getpass\nopen('kept', 'w').close()\n(os.getuid(), getpass.getuser(), os.stat('kept').st_uid, os.getcwd())";
    let body = RunCode { code: format!("import os; os.chdir('/workspace')\n{text}"), timeout_ms: Some(120_000) };
    let ran = back.client.run_code(&back.name, &context.id, &body).await.expect("ran");
    let value = ran.results.iter().find(|r| r.r#type == OutputKind::Result).unwrap_or_else(|| panic!("{ran:?}"));
    let value = mainbrella_client::api::context::bundle_text(&value.data, "text/plain").expect("text");
    assert_eq!(value, "(1234, 'app', 1234, '/workspace')");
    back.stop().await;
    back.client.delete_snapshot(&saved.id).await.expect("deleted");
    service.finish().await;
}
