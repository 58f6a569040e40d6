//! Looking at the host: processes, control groups, mounts.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use sha2::{Digest, Sha256};

/// Name of the control group folder of the service with this data directory.
#[must_use]
pub fn instance(data: &Path) -> String {
    let path = std::path::absolute(data).unwrap_or_else(|_| data.to_owned());
    hex::encode(&Sha256::digest(path.as_os_str().as_encoded_bytes())[..6])
}

/// Sends a signal; a process that is gone is fine.
pub fn signal(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = kill_process(pid, signal);
    }
}

/// Whether a process runs. One that has ended and is not buried yet does not.
#[must_use]
pub fn alive(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|s| s.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X'])))
}

/// A line `NAME:\tVALUE` of `/proc/PID/status`.
///
/// # Panics
/// When the process is gone or the line is missing.
#[must_use]
pub fn status(pid: i32, name: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
    let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {name} in the status of {pid}")).trim().to_owned()
}

/// KiB from such a line.
///
/// # Panics
/// When it is not a number.
#[must_use]
pub fn status_kib(pid: i32, name: &str) -> u64 {
    status(pid, name).trim_end_matches(" kB").trim().parse().expect("a number of KiB")
}

/// Names of network links in this namespace.
#[must_use]
pub fn links() -> Vec<String> {
    let text = fs::read_to_string("/proc/net/dev").unwrap_or_default();
    text.lines().filter_map(|l| Some(l.split_once(':')?.0.trim().to_owned())).collect()
}

/// Names of packet filter tables for all of IP in this namespace.
#[must_use]
pub fn tables() -> Vec<String> {
    let listed = std::process::Command::new("nft").args(["list", "tables", "inet"]).output();
    let text = listed.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    text.lines().filter_map(|l| l.strip_prefix("table inet ")).map(|n| n.trim().to_owned()).collect()
}

/// Processes whose command line has `text` in it.
#[must_use]
pub fn processes_with(text: &str) -> Vec<i32> {
    processes(|dir| {
        fs::read(dir.join("cmdline")).is_ok_and(|c| String::from_utf8_lossy(&c).replace('\0', " ").contains(text))
    })
}

/// Processes in control groups of this instance.
#[must_use]
pub fn processes_of(instance: &str) -> Vec<i32> {
    let part = format!("/mainbrella/{instance}/");
    processes(|dir| fs::read_to_string(dir.join("cgroup")).is_ok_and(|c| c.contains(&part)))
}

fn processes(wanted: impl Fn(&Path) -> bool) -> Vec<i32> {
    let me = std::process::id();
    fs::read_dir("/proc")
        .expect("proc")
        .flatten()
        .filter_map(|e| Some((e.file_name().to_str()?.parse::<i32>().ok()?, e.path())))
        .filter(|(pid, dir)| u32::try_from(*pid) != Ok(me) && wanted(dir) && alive(*pid))
        .map(|(pid, _)| pid)
        .collect()
}

/// Folders of control groups of this instance, its own last, in every hierarchy.
#[must_use]
pub fn groups_of(instance: &str) -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let hierarchies = fs::read_dir(root).into_iter().flatten().flatten().map(|e| e.path());
    let mut groups = Vec::new();
    for own in hierarchies.chain([root.to_owned()]).map(|h| h.join("mainbrella").join(instance)) {
        let inner = fs::read_dir(&own).into_iter().flatten().flatten();
        groups.extend(inner.filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()));
        groups.extend(own.is_dir().then_some(own));
    }
    groups
}

/// Mount points at or below `dir`.
#[must_use]
pub fn mounts_below(dir: &Path) -> Vec<String> {
    let text = fs::read_to_string("/proc/self/mountinfo").expect("mount table");
    let points = text.lines().filter_map(|l| l.split(' ').nth(4).map(str::to_owned));
    points.filter(|p| Path::new(p).starts_with(dir)).collect()
}

/// Names in a folder; none when there is no such folder.
#[must_use]
pub fn names_in(dir: &Path) -> BTreeSet<String> {
    fs::read_dir(dir).into_iter().flatten().flatten().filter_map(|e| e.file_name().into_string().ok()).collect()
}

/// Space a tree takes, bytes, each file once.
#[must_use]
pub fn disk_usage(dir: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|e| match e.metadata() {
            Ok(m) if m.is_dir() => disk_usage(&e.path()),
            Ok(m) => m.blocks() * 512,
            Err(_) => 0,
        })
        .sum()
}

/// Waits until `done`, at most `patience`.
///
/// # Panics
/// When it takes longer; `what` is told.
pub async fn until(what: &str, patience: Duration, mut done: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + patience;
    while !done().await {
        assert!(Instant::now() < end, "{what}: not within {patience:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
