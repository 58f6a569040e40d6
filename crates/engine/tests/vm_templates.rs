//! Templates that were built or captured, on the real driver. Needs what `vm_microvm` needs.

mod ground;

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use ground::*;
use mainbrella_engine::driver::{Driver, ForkOrder, Instance, LaunchOrder, SaveOrder};
use mainbrella_engine::image::BuiltProbe;
use mainbrella_engine::microvm::{
    BootFiles, Images, MicroVm, MicroVmConfig, START_OUTPUT, StartCommand, StoredImages, TemplateContent,
};
use mainbrella_engine::{DriverError, EgressOrder};
use mainbrella_guest_protocol::host::GuestClient;
use mainbrella_types::{GenerationKey, SizeClass, SnapshotKey, SnapshotKind, TemplateName};

/// The images of this host, and templates that are made of snapshots of the driver under test.
struct WithBuilt {
    others: Arc<StoredImages>,
    built: Mutex<HashMap<TemplateName, TemplateContent>>,
}

impl WithBuilt {
    fn add(&self, name: &str, content: TemplateContent) -> TemplateName {
        let name: TemplateName = name.parse().expect("a name");
        self.built.lock().expect("lock").insert(name.clone(), content);
        name
    }
}

impl Images for WithBuilt {
    fn boot_files(&self, template: &TemplateName) -> Result<BootFiles, DriverError> {
        match self.built.lock().expect("lock").get(template) {
            Some(content) => Ok(BootFiles { content: Some(content.clone()), ..self.others.base_files()? }),
            None => self.others.boot_files(template),
        }
    }

    fn base_files(&self) -> Result<BootFiles, DriverError> {
        self.others.base_files()
    }

    fn list(&self) -> Result<Vec<(TemplateName, String, u64)>, DriverError> {
        let mut list = self.others.list()?;
        list.extend(self.built.lock().expect("lock").iter().map(|(name, c)| (name.clone(), c.digest.clone(), 0)));
        Ok(list)
    }
}

/// A driver that freezes for itself, and has what the others froze.
async fn ground(data: &Path, waiting: usize) -> (MicroVmConfig, Arc<WithBuilt>, Arc<MicroVm>) {
    let c = config(data, waiting);
    drop(open(&c).await);
    for entry in std::fs::read_dir(shared().join("frozen")).expect("list").flatten() {
        std::os::unix::fs::symlink(entry.path(), data.join("frozen").join(entry.file_name())).expect("link");
    }
    let images = Arc::new(WithBuilt { others: images(), built: Mutex::default() });
    let driver = MicroVm::open(c.clone(), images.clone()).await.expect("driver");
    (c, images, driver)
}

async fn launch(
    driver: &MicroVm,
    template: &TemplateName,
    size: SizeClass,
) -> (GenerationKey, Box<dyn Instance>, GuestClient) {
    let order = LaunchOrder { template: template.clone(), size, ..order() };
    let machine = driver.launch(&order).await.expect("launch");
    let guest = client(&*machine).await;
    (order.key, machine, guest)
}

/// A snapshot of a new machine after `script`.
async fn made(driver: &MicroVm, script: &str, kind: SnapshotKind) -> SnapshotKey {
    let (key, machine, guest) = launch(driver, &template(), SizeClass::Micro).await;
    shell(&guest, script).await;
    let snapshot = SnapshotKey::new(uuid::Uuid::now_v7());
    quiesce(guest).await;
    let saving = driver.save(&key, &SaveOrder { snapshot, kind }).await.expect("save");
    saving.durable.await.expect("durable");
    driver.destroy(&key).await.expect("destroy");
    drop(machine);
    snapshot
}

fn content(snapshot: SnapshotKey, start: Option<StartCommand>) -> TemplateContent {
    let digest = format!("sha256:{snapshot}");
    TemplateContent { snapshot, kind: SnapshotKind::Workspace, size: SizeClass::Micro, digest, start }
}

fn probe(script: &str, patience_ms: u64) -> BuiltProbe {
    BuiltProbe {
        argv: ["/bin/sh", "-c", script].map(str::to_owned).to_vec(),
        interval_ms: 100,
        timeout_ms: 10_000,
        start_period_ms: patience_ms,
        start_interval_ms: 100,
        retries: 1,
    }
}

fn start(argv: &[&str], probe: Option<BuiltProbe>) -> StartCommand {
    StartCommand { argv: argv.iter().map(|a| (*a).to_owned()).collect(), probe, ports: Vec::new() }
}

/// A server that answers with something it drew when it started, and is ready a while after that.
const SERVER: &str = r#"mkdir -p /srv && cat > /srv/app.py <<'END'
import http.server, os, time
drawn = os.urandom(8).hex()
class Answer(http.server.BaseHTTPRequestHandler):
    log_message = lambda *said: None
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(drawn.encode())
print("starting", flush=True)
time.sleep(1)
http.server.ThreadingHTTPServer(("", 8000), Answer).serve_forever()
END
echo built > /srv/note; dd if=/dev/urandom of=/srv/big bs=1M count=5; sync"#;
const ASK: &str = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8000/').read().decode())";

async fn ask(guest: &GuestClient) -> String {
    shell(guest, &format!("python3 -c \"{ASK}\" 2>&1")).await
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_of_a_built_template_have_its_files_and_its_server_running() {
    let t = tempfile::tempdir().expect("temp dir");
    let (c, images, driver) = ground(t.path(), 1).await;
    let snapshot = made(&driver, SERVER, SnapshotKind::Workspace).await;
    let argv = ["python3", "/srv/app.py"];
    let command = start(&argv, Some(probe(&format!("python3 -c \"{ASK}\""), 60_000)));
    let app = images.add("app:v1", content(snapshot, Some(command)));
    driver.prepare(&app, SizeClass::Micro).await.expect("prepare");

    let (one, machine, guest) = launch(&driver, &app, SizeClass::Micro).await;
    let drawn = ask(&guest).await;
    assert!(drawn.trim().len() == 16, "{drawn}");
    assert_eq!(shell(&guest, &format!("cat /srv/note {START_OUTPUT}")).await, "built\nstarting\n");
    let digest = shell(&guest, "sha256sum /srv/big").await;
    // It was started once, for all of them.
    let (two, _second, other) = launch(&driver, &app, SizeClass::Micro).await;
    assert_eq!(ask(&other).await, drawn);
    shell(&other, "echo changed > /srv/note").await;
    assert_eq!(shell(&guest, "cat /srv/note").await, "built\n");
    assert_eq!(shell(&guest, "dmesg | grep -ciE 'ext4.*(error|corrupt)'").await, "0\n");

    // It is a machine like any other: forked, and its disk saved, which then starts without what ran.
    quiesce(guest).await;
    let child = GenerationKey::new(uuid::Uuid::now_v7());
    let orders = [ForkOrder { key: child, egress: EgressOrder::default() }];
    let mut forked = driver.fork(&one, &orders).await.expect("fork");
    let copy = forked.children.remove(0).expect("child");
    let guest = client(&*copy).await;
    assert_eq!((ask(&guest).await, shell(&guest, "sha256sum /srv/big").await), (drawn.clone(), digest.clone()));
    let saved = SnapshotKey::new(uuid::Uuid::now_v7());
    shell(&guest, "echo more > /srv/more").await;
    quiesce(guest).await;
    let order_save = SaveOrder { snapshot: saved, kind: SnapshotKind::Workspace };
    driver.save(&child, &order_save).await.expect("save").durable.await.expect("durable");
    for key in [&one, &two, &child] {
        driver.destroy(key).await.expect("destroy");
    }
    drop((machine, copy));
    let order = LaunchOrder { template: app.clone(), snapshot: Some(saved), ..order() };
    let back = driver.launch(&order).await.expect("from what was saved");
    let guest = client(&*back).await;
    assert_eq!(shell(&guest, "cat /srv/note /srv/more; sha256sum /srv/big").await, format!("built\nmore\n{digest}"));
    assert!(ask(&guest).await.contains("refused"), "nothing was started");
    driver.destroy(&order.key).await.expect("destroy");

    // In a larger size it is started anew, and has a larger disk.
    let (large, _machine, guest) = launch(&driver, &app, SizeClass::Small).await;
    let others = ask(&guest).await;
    assert!(others.trim().len() == 16 && others != drawn, "{others}");
    let size = shell(&guest, "df -m --output=size / | tail -n 1").await;
    assert!(size.trim().parse::<u32>().expect("a number") > 7000, "{size}");
    assert_eq!(shell(&guest, "sha256sum /srv/big").await, digest);
    driver.destroy(&large).await.expect("destroy");
    let grown = content(snapshot, None);
    let grown = images.add("grown:v1", TemplateContent { size: SizeClass::Small, digest: "sha256:g".into(), ..grown });
    let refused = driver.prepare(&grown, SizeClass::Micro).await.expect_err("too small");
    assert!(matches!(refused, DriverError::Unsupported(_)), "{refused}");

    driver.forget(&saved).await.expect("forget");
    driver.forget(&snapshot).await.expect("forget");
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}

/// A server that counts what it is asked for, and connections.
const COUNTING: &str = r#"mkdir -p /srv && cat > /srv/app.py <<'END'
import socketserver
counts = {"connections": 0, "probes": 0}
class Answer(socketserver.StreamRequestHandler):
    def handle(self):
        counts["connections"] += 1
        if self.rfile.readline() == b"probe\n":
            counts["probes"] += 1
        self.wfile.write(f"{counts['connections']} {counts['probes']}".encode())
socketserver.TCPServer(("", 8000), Answer).serve_forever()
END
cat > /srv/ask.py <<'END'
import socket, sys
s = socket.create_connection(("127.0.0.1", 8000)); s.sendall(sys.argv[1].encode() + b"\n"); print(s.recv(99).decode())
END
sync"#;

#[tokio::test(flavor = "multi_thread")]
async fn what_runs_in_a_waiting_vmm_has_answered_once_more() {
    let t = tempfile::tempdir().expect("temp dir");
    let (c, images, driver) = ground(t.path(), 1).await;
    let snapshot = made(&driver, COUNTING, SnapshotKind::Workspace).await;
    let argv = ["python3", "/srv/app.py"];
    let probed = start(&argv, Some(probe("python3 /srv/ask.py probe", 60_000)));
    let listening = StartCommand { ports: vec![8000], ..start(&argv, None) };
    let hanging = start(
        &argv,
        Some(probe("test ! -e /srv/tried || sleep 1000; touch /srv/tried; python3 /srv/ask.py probe", 60_000)),
    );
    // Connections and probes as a user of a waiting VMM finds them: when it was captured, in the VMM, and the user's own.
    for (name, command, expected) in
        [("probed", probed, "3 2"), ("listening", listening, "3 0"), ("hanging", hanging, "2 1")]
    {
        let made = TemplateContent { digest: format!("sha256:{name}"), ..content(snapshot, Some(command)) };
        let app = images.add(&format!("{name}:v1"), made);
        driver.prepare(&app, SizeClass::Micro).await.expect("prepare");
        while driver.waiting(&app, SizeClass::Micro).await == 0 {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        let (key, _machine, guest) = launch(&driver, &app, SizeClass::Micro).await;
        assert_eq!(shell(&guest, "python3 /srv/ask.py user").await.trim(), expected, "{name}");
        assert_eq!(shell(&guest, "pgrep -f 'sleep [1]000' | wc -l").await, "0\n", "{name}: its probe is over");
        driver.destroy(&key).await.expect("destroy");
    }
    driver.forget(&snapshot).await.expect("forget");
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_command_that_does_not_get_ready_is_told_with_what_it_said() {
    let t = tempfile::tempdir().expect("temp dir");
    let (c, images, driver) = ground(t.path(), 0).await;
    let snapshot = made(&driver, SERVER, SnapshotKind::Workspace).await;
    let says = "echo out; echo err >&2; exit 3";
    for (n, (command, why, said)) in [
        (start(&["/bin/sh", "-c", says], None), "it ended with code 3", "out\nerr"),
        (
            start(&["/bin/sh", "-c", "echo up; sleep 1000"], Some(probe("echo not yet; exit 4", 1500))),
            "the last time with code 4",
            "up\nThe probe said:\nnot yet",
        ),
        (start(&["/bin/sh", "-c", "sleep 1000"], Some(probe("sleep 1000", 500))), "a time-out", ""),
        (start(&["/no/such/program"], None), "`/no/such/program` cannot be started", ""),
    ]
    .into_iter()
    .enumerate()
    {
        let digest = format!("sha256:{n}");
        let name =
            images.add(&format!("bad:v{}", n + 1), TemplateContent { digest, ..content(snapshot, Some(command)) });
        match driver.prepare(&name, SizeClass::Micro).await {
            Err(DriverError::StartFailed { why: seen, output }) => {
                assert!(seen.contains(why) && output == said, "{seen} | {output}");
            }
            other => panic!("{name}: {other:?}"),
        }
    }
    // What it is made of is read before it is used.
    let layer = std::fs::read_dir(t.path().join("disks")).expect("list").flatten().next().expect("a disk").path();
    let file = std::fs::File::options().write(true).open(layer.join("disk.qcow2")).expect("open");
    file.write_all_at(b"damage", 300_000).expect("write");
    drop(file);
    let name = images.add("bad:v9", TemplateContent { digest: "sha256:9".into(), ..content(snapshot, None) });
    let refused = driver.prepare(&name, SizeClass::Micro).await.expect_err("damaged");
    assert!(matches!(refused, DriverError::Damaged(_)), "{refused}");
    driver.forget(&snapshot).await.expect("forget");
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_ran_becomes_a_template_whose_machines_go_on_where_it_was() {
    let t = tempfile::tempdir().expect("temp dir");
    let (c, images, driver) = ground(t.path(), 1).await;
    let counter = "i=0; while :; do i=$((i+1)); echo $i > /run/n; sleep 0.05; done";
    let script = format!("echo warm > /root/file; setsid sh -c '{counter}' >/dev/null 2>&1 & sleep 1; cat /run/n");
    let ran = made(&driver, &script, SnapshotKind::Full).await;
    let own = SnapshotKey::new(uuid::Uuid::now_v7());
    driver.duplicate(&ran, &own).await.expect("duplicate");
    assert!(driver.duplicate(&ran, &own).await.is_err(), "it is there");
    driver.forget(&ran).await.expect("forget");
    let captured = TemplateContent { kind: SnapshotKind::Full, digest: "sha256:full".into(), ..content(own, None) };
    let name = images.add("warm:v1", captured);
    assert_eq!(driver.inherited(&name).await.expect("looked up"), Some(own));
    driver.prepare(&name, SizeClass::Micro).await.expect("prepare");
    for _ in 0..2 {
        let (key, _machine, guest) = launch(&driver, &name, SizeClass::Micro).await;
        let first: u32 = shell(&guest, "cat /run/n").await.trim().parse().expect("a number");
        let out = shell(&guest, "sleep 1; cat /run/n; cat /root/file; dmesg | grep -ciE 'ext4.*(error|corrupt)'").await;
        let mut lines = out.lines();
        let later: u32 = lines.next().and_then(|n| n.parse().ok()).expect("a number");
        assert!(first > 2 && later > first, "{first} {out}");
        assert_eq!(lines.collect::<Vec<_>>(), ["warm", "0"]);
        driver.destroy(&key).await.expect("destroy");
    }
    let refused = driver.prepare(&name, SizeClass::Small).await.expect_err("another size");
    assert!(matches!(refused, DriverError::Unsupported(_)), "{refused}");
    driver.forget(&own).await.expect("forget");
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
    assert_eq!(std::fs::read_dir(t.path().join("disks")).expect("list").count(), 0);
}
