//! Full disks: the machine's, and the host's.

use std::path::{Path, PathBuf};
use std::time::Duration;

use mainbrella_client::api::{CommandLine, StartJob, State};
use mainbrella_tests::{Machine, Service, Setup, host};
use mainbrella_types::ErrorCode;
use sha2::{Digest, Sha256};

use crate::code;

#[tokio::test(flavor = "multi_thread")]
async fn a_full_guest_disk_is_said_and_survived() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    m.write("/root/kept", "kept").await.expect("write");
    // Space is taken without being written: quick, and no load on the host.
    m.sh("for s in 3G 500M 100M 20M 5M 1M; do i=0; while fallocate -l $s /root/fill-$s-$i 2>/dev/null; do i=$((i+1)); done; done; rm -f /root/fill-*-99; sync").await;
    m.sh("head -c 50M /dev/zero > /root/last").await;
    let piece = |_| bytes::Bytes::from(vec![1u8; 256 * 1024]);
    assert_eq!(code(m.write_stream("/root/kept", 32 << 20, piece).await), ErrorCode::GuestDiskFull);
    assert_eq!(m.read("/root/kept").await.expect("read"), b"kept", "what was there is untouched");
    assert_eq!(m.text("echo works").await, "works\n");
    let full = m.sh("head -c 30M /dev/zero > /root/x").await;
    assert!(full.raw.exit_code != 0 && full.error().contains("No space left"), "{}", full.error());
    m.sh("rm -f /root/fill-* /root/last /root/x").await;
    assert_eq!(m.write_stream("/root/kept", 32 << 20, piece).await.expect("write"), 32 << 20);
    assert_eq!(
        m.text("ls -A /root | grep -v '^\\.[bp]' | tr '\\n' ' '").await,
        "kept ",
        "no half-written file is left"
    );
    service.finish().await;
}

/// A small file system for a data directory, gone with its owner.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(at: &Path, mib: u32) -> Self {
        use rustix::mount::{MountFlags, mount};
        let options = std::ffi::CString::new(format!("size={mib}m")).expect("text");
        mount("none", at, "tmpfs", MountFlags::empty(), Some(options.as_c_str())).expect("mount");
        Self(at.to_owned())
    }

    fn free_kib(&self) -> u64 {
        let s = rustix::fs::statvfs(&self.0).expect("statvfs");
        s.f_bavail * s.f_frsize / 1024
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_host_disk_stops_who_writes_and_corrupts_nothing() {
    let place = tempfile::Builder::new().prefix("mb-full-").tempdir().expect("temp dir");
    let disk = SmallDisk::mount(place.path(), 200);
    let data = place.path().join("data");
    let mut service = Service::with(Setup { data_dir: Some(data.clone()), ..Setup::default() }).await;
    let (writer, other) = (service.machine().await, service.machine().await);
    // What it has written is on its disk: a machine that needs room is stopped, and this one needs none.
    other.text("echo calm > /root/f; sync; cat /root/f").await;
    let ballast = data.join("ballast");
    std::fs::write(&ballast, vec![1u8; 90 << 20]).expect("ballast");

    let bytes = 120 << 20;
    let script = format!("seq 1 20000000 | head -c {bytes} > /root/big; sync; echo written");
    let mut order = Machine::shell_order(&script);
    order.timeout_ms = Some(110_000);
    let writing = {
        let writer = writer.clone();
        tokio::spawn(async move { writer.run(&order).await })
    };
    let late = {
        let other = other.clone();
        let script = "seq 1 100000; while [ ! -e /run/go ]; do sleep 0.1; done; seq 100001 200000; exit 7";
        let mut order = Machine::shell_order(script);
        order.timeout_ms = Some(110_000);
        order.output_limit_bytes = Some(16 << 20);
        tokio::spawn(async move { other.run(&order).await })
    };
    host::until("the host's disk is full", Duration::from_secs(60), async || disk.free_kib() < 512).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    // Now there is not a byte left.
    let rest = data.join("ballast-2");
    fill(&rest);
    // Everything else answers, commands too: what they say is kept in memory.
    assert_eq!(other.text("cat /root/f").await, "calm\n");
    other.text("touch /run/go").await;
    let out = late.await.expect("joined").expect("a command that ran before the disk was full goes on");
    assert_eq!((out.raw.exit_code, out.raw.stdout_omitted), (7, None));
    assert!(out.text() == numbers(1, 200_000), "{} bytes", out.text().len());
    let mut order = Machine::shell_order("seq 1 2000000; echo last >&2; exit 3");
    order.output_limit_bytes = Some(64 << 10);
    let out = other.run(&order).await.expect("beginning and end are kept");
    let gap = out.raw.stdout_omitted.expect("and the rest is not");
    let all = numbers(1, 2_000_000);
    let text = out.text();
    let (head, tail) = text.split_at(usize::try_from(gap.offset).expect("small"));
    assert_eq!((out.raw.exit_code, out.error().as_str(), out.raw.stdout_bytes), (3, "last\n", all.len() as u64));
    assert!(all.starts_with(head) && all.ends_with(tail) && head.len() > 30_000 && tail.len() > 30_000);
    assert_eq!(head.len() as u64 + gap.length + tail.len() as u64, all.len() as u64);
    // A job promises that its log lasts: that cannot be had now. (Logs that went to memory gave some room back.)
    let again = data.join("ballast-3");
    fill(&again);
    let job = StartJob::new(CommandLine::Text("true".to_owned()));
    assert_eq!(code(other.client.start_job(&other.name, &job, None).await), ErrorCode::HostFull);
    assert_eq!(service.list().await.len(), 2);
    service.client().capabilities().await.expect("capabilities");
    let refused = service.machine_refused().await;
    assert!(matches!(refused, ErrorCode::HostFull | ErrorCode::CreateFailed), "{refused:?}");
    for file in [&ballast, &rest, &again] {
        std::fs::remove_file(file).expect("room again");
    }
    let job = other.client.start_job(&other.name, &job, None).await.expect("started").job;
    assert_eq!(
        other
            .client
            .wait_job(&other.name, &job.id, Duration::from_secs(30))
            .await
            .expect("ended")
            .exit
            .and_then(|e| e.code),
        Some(0)
    );
    let record = writer.record().await;
    if record.state == State::Failed {
        assert_eq!(record.reason.expect("reason").code, "host_full");
    } else {
        let out = writing.await.expect("joined").expect("the machine went on");
        assert_eq!(out.text(), "written\n", "{}", out.error());
        let told = writer.text("echo 3 > /proc/sys/vm/drop_caches; sha256sum /root/big | cut -d' ' -f1").await;
        assert_eq!(told.trim(), hex::encode(sequence_digest(bytes)), "what was written is what is read");
    }
    assert_eq!(other.text("echo 3 > /proc/sys/vm/drop_caches; cat /root/f").await, "calm\n");
    writer.stop().await;
    let next = service.machine().await;
    assert_eq!(next.text("echo new").await, "new\n");
    for text in ["No space left", "full"] {
        service.expect_error(text);
    }
    service.finish().await;
    drop(disk);
    assert!(host::mounts_below(place.path()).is_empty());
}

/// Takes all the room there is.
fn fill(path: &Path) {
    let mut file = std::fs::File::create(path).expect("created");
    for size in [1 << 20, 4096, 1] {
        let piece = vec![1u8; size];
        while std::io::Write::write_all(&mut file, &piece).is_ok() {}
    }
}

/// What `seq` says.
fn numbers(from: u32, to: u32) -> String {
    (from..=to).map(|n| format!("{n}\n")).collect()
}

/// Digest of the first `bytes` of `seq`'s output.
fn sequence_digest(bytes: usize) -> [u8; 32] {
    let mut text = String::with_capacity(bytes + 32);
    let mut i = 1u64;
    while text.len() < bytes {
        text.push_str(&i.to_string());
        text.push('\n');
        i += 1;
    }
    Sha256::digest(&text.as_bytes()[..bytes]).into()
}
