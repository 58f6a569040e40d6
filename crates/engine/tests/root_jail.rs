//! The jail really holds: a shell inside it tries what a VMM in hostile hands would. Needs root.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use mainbrella_engine::jail::{JailSpec, Walls, start};
use mainbrella_engine::microvm::process::Process;
use mainbrella_engine::microvm::sealed_memory::{anonymous, bounded_log};

const UID: u32 = 1_899_999_000;

/// The example binary is the launcher, as the service binary is in production.
fn launcher() -> PathBuf {
    let me = std::env::current_exe().expect("own path");
    let path = me.parent().and_then(|p| p.parent()).expect("target folder").join("examples/microvm");
    assert!(path.is_file(), "{} is built along with the tests", path.display());
    path
}

/// Runs `script` in a jail and returns what it wrote.
fn in_jail(script: &str, walls: Walls, scratch: &std::path::Path) -> String {
    let log = bounded_log(32 * 1024).expect("log");
    let memory = anonymous("m", 4096).expect("memory");
    let spec = JailSpec {
        program: "/usr/bin/dash".into(),
        argv: vec!["sh".into(), "-c".into(), script.into()],
        walls,
        uid: Some(UID),
        groups: vec![],
        cgroup_join: vec![],
        scratch: scratch.to_owned(),
        read_only: ["/usr", "/lib", "/lib64", "/etc/ld.so.cache"].map(PathBuf::from).to_vec(),
        devices: ["/dev/null", "/dev/zero", "/dev/urandom"].map(PathBuf::from).to_vec(),
        file_size_max: 1 << 20,
        descriptors: vec![1, 2, 3],
    };
    let started = start(&launcher(), &spec, &[log.as_fd(), log.as_fd(), memory.as_fd()], |_| Ok(())).expect("starts");
    let until = Instant::now() + Duration::from_secs(20);
    if let Ok(p) = Process::open(started.pid, started.start_time) {
        while !p.ended() {
            assert!(Instant::now() < until, "the script does not end");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    let mut text = String::new();
    let mut bytes = vec![0u8; 32 * 1024];
    let n = log.read_at(&mut bytes, 0).expect("read");
    (&bytes[..n]).read_to_string(&mut text).expect("text");
    text.trim_end_matches('\0').to_owned()
}

#[test]
fn descriptors_can_be_opened_again_and_files_cannot() {
    let t = tempfile::tempdir().expect("temp dir");
    let out = in_jail("ls -la / /proc /proc/self/ 2>&1 | head -60; id; ls -la /proc/self/fd; exec 4<>/proc/self/fd/3 && echo opened", Walls::all(true), t.path());
    assert!(out.contains("opened"), "{out}");
    let _ = File::open(t.path());
}
