//! The jail really holds: a shell inside it tries what a VMM in hostile hands would. Needs root; the launcher is the
//! `microvm` example, which is built along with the tests.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mainbrella_engine::cgroup::{Cgroups, Controller, Limits};
use mainbrella_engine::jail::{Ground, JailError, JailSpec, Started, Walls, probe, start};
use mainbrella_engine::microvm::process::Process;
use mainbrella_engine::microvm::sealed_memory::{anonymous, bounded_log};

const UID: u32 = 1_899_999_000;

fn launcher() -> PathBuf {
    let me = std::env::current_exe().expect("own path");
    let path = me.parent().and_then(|p| p.parent()).expect("target folder").join("examples/microvm");
    assert!(path.is_file(), "{} is missing: cargo build -p mainbrella-engine --examples", path.display());
    path
}

fn spec(script: &str, scratch: &Path) -> JailSpec {
    JailSpec {
        tap: None,
        program: "/usr/bin/dash".into(),
        argv: vec!["sh".into(), "-c".into(), script.into()],
        walls: Walls::all(true),
        uid: Some(UID),
        groups: vec![],
        cgroup_join: vec![],
        scratch: scratch.to_owned(),
        read_only: ["/usr", "/lib", "/lib64", "/etc/ld.so.cache"].map(PathBuf::from).to_vec(),
        devices: ["/dev/null", "/dev/zero", "/dev/urandom"].map(PathBuf::from).to_vec(),
        file_size_max: 1 << 20,
        descriptors: vec![1, 2, 3],
    }
}

/// Runs `spec` to its end and returns what it wrote.
fn run(spec: &JailSpec) -> String {
    let log = bounded_log(32 * 1024).expect("log");
    let memory = anonymous("m", 4096).expect("memory");
    let passed: Vec<BorrowedFd<'_>> = vec![log.as_fd(), log.as_fd(), memory.as_fd()];
    let started = start(&launcher(), spec, &passed, |_| Ok(())).expect("starts");
    wait(started);
    let mut bytes = vec![0u8; 32 * 1024];
    let n = log.read_at(&mut bytes, 0).expect("read");
    String::from_utf8_lossy(&bytes[..n]).trim_end_matches('\0').to_owned()
}

fn wait(started: Started) {
    let until = Instant::now() + Duration::from_secs(20);
    if let Ok(p) = Process::open(started.pid, started.start_time) {
        while !p.ended() {
            assert!(Instant::now() < until, "it does not end");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[test]
fn only_what_was_handed_in_can_be_reached() {
    let t = tempfile::tempdir().expect("temp dir");
    let other = t.path().join("machines/other");
    fs::create_dir_all(&other).expect("mkdir");
    fs::write(other.join("disk.qcow2"), "secret").expect("write");
    let scratch = t.path().join("scratch");
    fs::create_dir(&scratch).expect("mkdir");
    let out = run(&spec(
        &format!(
            "exec 4<>/proc/self/fd/3 && echo reopened
             for f in /etc/shadow /etc/passwd {}/disk.qcow2 /proc/1/root/etc/shadow /sys /root /dev/kvm /proc/sys /proc/kcore; do
               cat $f >/dev/null 2>&1 || ls $f >/dev/null 2>&1 && echo reached $f; done
             for d in / /tmp /usr /dev /proc; do (: > $d/made) 2>/dev/null && echo wrote $d; done
             echo done",
            other.display()
        ),
        &scratch,
    ));
    assert_eq!(out, "reopened\ndone\n");
    assert_eq!(fs::read_dir(&scratch).expect("list").count(), 0, "nothing shows outside its mount namespace");
}

#[test]
fn it_sees_and_signals_nobody_and_has_no_way_back_to_root() {
    let t = tempfile::tempdir().expect("temp dir");
    let me = std::process::id();
    let out = run(&spec(
        &format!(
            "kill -0 {me} 2>/dev/null && echo signalled
             kill -9 -1 2>/dev/null && true
             grep -E '^(Uid|Gid|Groups|NoNewPrivs|Cap...):' /proc/self/status | tr -s '\\t ' ' '
             unshare -U true 2>/dev/null && echo user namespace
             mount -t tmpfs none /usr 2>/dev/null && echo mounted
             setpriv --reuid=0 true 2>/dev/null && echo root
             ls /proc | grep -c '^[0-9]'
             cat /proc/net/dev 2>/dev/null | grep -c :"
        ),
        t.path(),
    ));
    let caps: Vec<&str> = out.lines().filter(|l| l.starts_with("Cap")).collect();
    assert_eq!(caps.len(), 5, "{out}");
    assert!(caps.iter().all(|l| l.ends_with(" 0000000000000000")), "{out}");
    assert!(out.contains(&format!("Uid: {UID} {UID} {UID} {UID}\nGid: {UID} {UID} {UID} {UID}\nGroups:")), "{out}");
    assert!(out.contains("NoNewPrivs: 1"), "{out}");
    for bad in ["signalled", "mounted", "root"] {
        assert!(!out.lines().any(|l| l == bad), "{bad}: {out}");
    }
    // A user namespace of its own would be without rights over anything here; whether the kernel grants it differs.
    let last: Vec<&str> = out.lines().rev().take(2).collect();
    assert!(last[1].parse::<u32>().expect("count") <= 4, "it sees only its own processes: {out}");
    assert!(last[0].parse::<u32>().expect("count") <= 1, "it has no interface but an idle lo: {out}");
}

#[test]
fn a_wall_that_cannot_be_built_fails_the_start_and_says_which() {
    let log = bounded_log(1024).expect("log");
    let s = JailSpec { scratch: "/nonexistent/scratch".into(), descriptors: vec![1], ..spec("true", Path::new("/")) };
    let e = start(&launcher(), &s, &[log.as_fd()], |_| Ok(())).expect_err("fails");
    assert!(matches!(&e, JailError::Stage { stage, errno: 2, .. } if stage == "mount namespace"), "{e:?}");

    let t = tempfile::tempdir().expect("temp dir");
    let s = JailSpec { program: "/usr/bin/no-such-program".into(), descriptors: vec![1], ..spec("true", t.path()) };
    let e = start(&launcher(), &s, &[log.as_fd()], |_| Ok(())).expect_err("fails");
    assert!(matches!(&e, JailError::Stage { stage, errno: 2, .. } if stage == "starting the program"), "{e:?}");

    let s = JailSpec {
        cgroup_join: vec!["/nonexistent/cgroup.procs".into()],
        descriptors: vec![1],
        ..spec("true", t.path())
    };
    let e = start(&launcher(), &s, &[log.as_fd()], |_| Ok(())).expect_err("fails");
    assert!(matches!(&e, JailError::Stage { stage, .. } if stage == "joining the control group"), "{e:?}");
}

#[test]
fn what_is_not_on_record_never_runs() {
    let t = tempfile::tempdir().expect("temp dir");
    let log = bounded_log(1024).expect("log");
    let s = JailSpec { descriptors: vec![1], ..spec("echo ran; sleep 100", t.path()) };
    let mut seen = None;
    let e = start(&launcher(), &s, &[log.as_fd()], |started| {
        seen = Some(started);
        Err(std::io::Error::other("the disk is full"))
    })
    .expect_err("fails");
    assert!(matches!(e, JailError::Launcher(..)), "{e:?}");
    wait(seen.expect("it existed"));
    let mut bytes = [0u8; 8];
    log.read_exact_at(&mut bytes, 0).expect("read");
    assert_eq!(bytes, [0; 8], "the program did not start");
}

#[test]
fn the_real_control_groups_take_limits_hold_processes_and_go() {
    let g = Cgroups::discover(&format!("test-{}", std::process::id())).expect("mount table");
    if !(g.has(Controller::Memory) && g.has(Controller::Cpu) && g.has(Controller::Pids)) {
        eprintln!("this host has no memory, cpu or pids controller");
    }
    let t = tempfile::tempdir().expect("temp dir");
    g.create("k", &Limits { memory_bytes: 64 << 20, cpu_percent: 50, pids: 8 }).expect("create");
    let log = bounded_log(1024).expect("log");
    let s = JailSpec {
        cgroup_join: g.join_files("k"),
        descriptors: vec![1],
        // More tasks than allowed: the shell cannot fork any more and says so by its exit.
        ..spec("for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 100 & done; sleep 100", t.path())
    };
    let started = start(&launcher(), &s, &[log.as_fd()], |_| Ok(())).expect("starts");
    let groups = fs::read_to_string(format!("/proc/{}/cgroup", started.pid)).expect("alive");
    for c in [Controller::Memory, Controller::Cpu, Controller::Pids] {
        assert_eq!(g.shows_membership(&groups, "k", c), g.has(c), "{c:?} in {groups}");
    }
    std::thread::sleep(Duration::from_millis(100));
    if g.has(Controller::Pids) {
        let pids = g.usage("k").pids.expect("counted");
        assert!((1..=8).contains(&pids), "{pids}");
    }
    assert!(g.list().contains(&"k".to_owned()));
    g.remove("k", Duration::from_secs(10)).expect("removed with all that was in it");
    wait(started);
    g.remove("k", Duration::ZERO).expect("again is success");
    assert!(g.list().is_empty());
    g.remove_instance();
}

#[test]
fn the_probe_sees_every_wall_on_a_running_vmm() {
    let t = tempfile::tempdir().expect("temp dir");
    let cgroups = Cgroups::discover(&format!("test-probe-{}", std::process::id())).expect("mount table");
    let launcher = launcher();
    let ground = Ground {
        launcher: &launcher,
        qemu: Path::new("/usr/bin/qemu-system-x86_64"),
        scratch: t.path(),
        cgroups: &cgroups,
        uid: Some(UID),
    };
    let p = probe(&ground).expect("probe");
    let r = p.report();
    assert!(
        r.own_uid && r.no_new_privs && r.seccomp && r.mount_namespace && r.pid_namespace && r.network_namespace,
        "{p:?}"
    );
    assert_eq!(r.memory_limit, cgroups.has(Controller::Memory));
    // Whatever is not there is explained.
    let walls = [r.landlock, r.memory_limit, r.cpu_limit, r.pids_limit];
    assert!(p.missing().len() >= walls.iter().filter(|w| !**w).count(), "{p:?}");
    cgroups.remove_instance();
}
