//! What tests of whole machines stand on: images made before, a data directory each, one frozen template for all.

// Each test program uses a part of it.
#![allow(dead_code)]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use mainbrella_engine::driver::{Driver, EgressOrder, ForkOrder, Instance, LaunchOrder, SaveOrder};
use mainbrella_engine::image::ImageStore;
use mainbrella_engine::microvm::{AcceleratorChoice, MicroVm, MicroVmConfig, StoredImages};
use mainbrella_guest_protocol::host::{GuestClient, LinkOptions, connect};
use mainbrella_guest_protocol::proto::mainbrella::guest::v1 as pb;
use mainbrella_types::{GenerationKey, SizeClass, SnapshotKey, TemplateName};

/// User ids of these tests; each driver below takes a range of its own, and so does each program that runs tests.
pub static NEXT_UID: std::sync::LazyLock<std::sync::atomic::AtomicU32> =
    std::sync::LazyLock::new(|| (1_950_000_000 + std::process::id() % 4096 * 10_000).into());

pub fn images() -> Arc<StoredImages> {
    let data =
        std::env::var_os("MAINBRELLA_TEST_DATA").map_or_else(|| PathBuf::from("/var/tmp/mb-image"), PathBuf::from);
    let target = std::env::current_exe().expect("own path").ancestors().nth(3).expect("target").to_owned();
    let agent = std::env::var_os("MAINBRELLA_TEST_AGENT")
        .map_or_else(|| target.join("x86_64-unknown-linux-musl/guest/mainbrella-guest"), PathBuf::from);
    assert!(agent.is_file(), "no guest agent at {}", agent.display());
    Arc::new(StoredImages::new(ImageStore::open(&data).expect("image store"), agent))
}

/// A data directory whose only use is the frozen template that all tests of this file share: freezing takes seconds.
pub fn shared() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("vm-microvm")
}

pub fn config(data: &Path, waiting: usize) -> MicroVmConfig {
    let launcher =
        std::env::current_exe().expect("own path").ancestors().nth(2).expect("target").join("examples/microvm");
    assert!(launcher.is_file(), "{} is missing: cargo build -p mainbrella-engine --examples", launcher.display());
    MicroVmConfig {
        launcher,
        accelerator: AcceleratorChoice::Tcg,
        waiting,
        uids: Some((NEXT_UID.fetch_add(100, std::sync::atomic::Ordering::Relaxed), 100)),
        ..MicroVmConfig::new(data.to_owned())
    }
}

/// A data directory of its own whose `frozen` is the shared one.
pub fn data_dir() -> tempfile::TempDir {
    let t = tempfile::tempdir().expect("temp dir");
    link_frozen(t.path());
    t
}

pub fn link_frozen(data: &Path) {
    std::fs::create_dir_all(shared().join("frozen")).expect("mkdir");
    std::os::unix::fs::symlink(shared().join("frozen"), data.join("frozen")).expect("link");
}

pub async fn open(config: &MicroVmConfig) -> Arc<MicroVm> {
    // Tests run in threads or processes of their own: one of them freezes, the others wait for it.
    std::fs::create_dir_all(shared()).expect("mkdir");
    let gate = std::fs::File::create(shared().join("lock")).expect("lock file");
    let gate = tokio::task::spawn_blocking(move || {
        rustix::fs::flock(&gate, rustix::fs::FlockOperation::LockExclusive).expect("lock");
        gate
    })
    .await
    .expect("lock");
    let freezer = MicroVm::open(self::config(&shared(), 0), images()).await.expect("driver");
    freezer.freeze(&template(), SizeClass::Micro).await.expect("freeze");
    freezer.shutdown().await;
    drop(gate);
    MicroVm::open(config.clone(), images()).await.expect("driver")
}

pub fn template() -> TemplateName {
    "python".parse().expect("valid")
}

pub fn order() -> LaunchOrder {
    let key = GenerationKey::new(uuid::Uuid::now_v7());
    LaunchOrder {
        key,
        template: template(),
        size: SizeClass::Micro,
        egress: Default::default(),
        snapshot: None,
        disk_only: false,
    }
}

pub async fn client(machine: &dyn Instance) -> GuestClient {
    let stream = machine.dial().await.expect("dial");
    let options = LinkOptions { deadline: Duration::from_secs(30), call_timeout: Duration::from_secs(30) };
    let client = connect(stream, options).await.expect("link");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    let request = pb::ConfigureRequest {
        clock_realtime_ns: i64::try_from(now.as_nanos()).expect("before 2262"),
        entropy: vec![7; 64],
        hostname: "tested".into(),
        ..Default::default()
    };
    client.rpc().configure(request).await.expect("configure");
    client
}

/// Does what precedes a pause or a fork: user processes are frozen, and the link is closed.
pub async fn quiesce(client: GuestClient) {
    let request = pb::QuiesceRequest { freeze: true, sync: true, ..Default::default() };
    client.rpc().quiesce(request).await.expect("quiesce");
    client.close();
}

pub async fn shell(client: &GuestClient, script: &str) -> String {
    let request = pb::StartJobRequest {
        job_id: uuid::Uuid::now_v7().to_string(),
        argv: ["/bin/sh", "-c", script].iter().map(|a| a.as_bytes().to_vec()).collect(),
        timeout_ms: 60_000,
        forget_when_followed: true,
        ..Default::default()
    };
    let mut stream = client.streams().run_job(request).await.expect("run");
    let mut out = Vec::new();
    while let Some(event) = stream.message().await.expect("event") {
        let event = event.to_owned_message();
        if let Some(pb::job_event::Event::Output(o)) = event.event {
            out.extend_from_slice(&o.data);
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Whether a process has ended; the host's first process may take a while to bury it.
pub fn gone(proc: &Path) -> bool {
    std::fs::read_to_string(proc.join("stat"))
        .is_ok_and(|s| s.rsplit_once(") ").is_some_and(|(_, r)| r.starts_with(['Z', 'X'])))
        || !proc.exists()
}

/// Nothing of this driver is left on the host.
pub fn assert_nothing_left(data: &Path, config: &MicroVmConfig) {
    for dir in ["machines", "waiting", "tmp", "jail"] {
        let left: Vec<_> = std::fs::read_dir(data.join(dir)).expect("list").flatten().map(|e| e.path()).collect();
        assert!(left.is_empty(), "{left:?}");
    }
    let (first, count) = config.uids.expect("given");
    let uids = first..first + count;
    for p in std::fs::read_dir("/proc").expect("proc").flatten() {
        use std::os::unix::fs::MetadataExt;
        if let Ok(m) = p.metadata() {
            assert!(!uids.contains(&m.uid()) || gone(&p.path()), "a process is left: {:?}", p.path());
        }
    }
}

/// A small file system for a data directory, gone with its owner.
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    pub fn mount(at: &Path, mib: u32) -> Self {
        use rustix::mount::{MountFlags, mount};
        let options = std::ffi::CString::new(format!("size={mib}m")).expect("text");
        mount("none", at, "tmpfs", MountFlags::empty(), Some(options.as_c_str())).expect("mount");
        Self(at.to_owned())
    }

    /// Takes all that is free, until what is returned is dropped.
    pub fn fill(&self) -> std::fs::File {
        use std::io::Write;
        let mut file = tempfile::tempfile_in(&self.0).expect("a file");
        for piece in [1 << 20, 4096] {
            while file.write_all(&vec![1; piece]).is_ok() {}
        }
        file
    }

    pub fn grow(&self, mib: u32) {
        use rustix::mount::{MountFlags, mount_remount};
        let options = std::ffi::CString::new(format!("size={mib}m")).expect("text");
        mount_remount(&self.0, MountFlags::empty(), options.as_c_str()).expect("remount");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

/// Name of the variable that says what the service that is killed shall do.
pub const KILLED: &str = "MAINBRELLA_TEST_KILLED";

/// The service that [`kill_during`] starts and kills; nothing unless it is told what to do. It takes over the machine it is told of, says
/// `now`, does what it is told and says `done`.
pub async fn service_to_be_killed() {
    let Ok(text) = std::env::var(KILLED) else { return };
    let words: Vec<&str> = text.split(' ').collect();
    let [verb, key, uid, data] = words[..] else { panic!("{text}") };
    let key: GenerationKey = key.parse().expect("a key");
    let c = MicroVmConfig { uids: Some((uid.parse().expect("a number"), 100)), ..config(Path::new(data), 0) };
    let driver = MicroVm::open(c, images()).await.expect("driver");
    let egress = EgressOrder::default();
    // A machine that is dropped is let go of, not ended; it is kept until the work is done.
    let found = driver.adopt(&key, &egress).await.expect("adopt");
    println!("\nnow");
    match verb {
        "pause" => drop(driver.pause(&key).await.expect("pause")),
        "resume" => drop(driver.resume(&key, &egress).await.expect("resume")),
        "fork" => {
            let children = [(); 2].map(|()| ForkOrder { key: order().key, egress: egress.clone() });
            drop(driver.fork(&key, &children).await.expect("fork"));
        }
        // Adopting it began that already.
        "flatten" => tokio::time::sleep(Duration::from_secs(5)).await,
        "workspace" | "full" => {
            let snapshot = SnapshotKey::new(uuid::Uuid::now_v7());
            let order = SaveOrder { snapshot, kind: verb.parse().expect("a kind") };
            driver.save(&key, &order).await.expect("save").durable.await.expect("durable");
        }
        "restore" => {
            let snapshot = driver.snapshots().await.expect("list")[0];
            drop(driver.launch(&LaunchOrder { snapshot: Some(snapshot), ..order() }).await.expect("launch"));
        }
        "forget" => {
            let snapshot = driver.snapshots().await.expect("list")[0];
            driver.forget(&snapshot).await.expect("forget");
        }
        _ => panic!("{verb}"),
    }
    println!("\ndone");
    drop(found);
}

/// Lets a service, which the test `the_service_that_is_killed` of the same program becomes, begin `verb` and kills it `ms` later.
/// Says whether it was done by then.
pub fn kill_during(verb: &str, key: &GenerationKey, c: &MicroVmConfig, ms: u64) -> bool {
    let uid = c.uids.expect("given").0;
    let mut service = Command::new(std::env::current_exe().expect("own path"))
        .args(["--exact", "the_service_that_is_killed", "--nocapture"])
        .env(KILLED, format!("{verb} {key} {uid} {}", c.data_dir.display()))
        .stdout(Stdio::piped())
        .spawn()
        .expect("spawn");
    let mut lines = BufReader::new(service.stdout.take().expect("piped")).lines();
    let begun = lines.by_ref().map_while(Result::ok).any(|l| l == "now");
    assert!(begun, "the service did not come up");
    std::thread::sleep(Duration::from_millis(ms));
    service.kill().expect("kill");
    service.wait().expect("wait");
    lines.map_while(Result::ok).any(|l| l == "done")
}
