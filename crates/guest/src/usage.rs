//! What the guest observes of its own load.

use std::io;

use mainbrella_guest_protocol::pb;

use crate::UserCgroup;

/// Reads it now. Parts that cannot be read are 0.
pub(crate) fn read(cgroup: Option<&UserCgroup>) -> pb::UsageResponse {
    let (total, available) = memory().unwrap_or_default();
    let disk = rustix::fs::statvfs("/").ok();
    let (cpu, processes) = match cgroup {
        Some(cgroup) => (cgroup.cpu_usage_us().unwrap_or(0), cgroup.process_count().unwrap_or(0)),
        None => (own_cpu().unwrap_or(0), 0),
    };
    pb::UsageResponse {
        memory_total_bytes: total,
        memory_available_bytes: available,
        disk_total_bytes: disk.as_ref().map_or(0, |d| d.f_blocks * d.f_frsize),
        disk_available_bytes: disk.as_ref().map_or(0, |d| d.f_bavail * d.f_frsize),
        cpu_usage_us: cpu,
        process_count: processes,
        ..Default::default()
    }
}

fn memory() -> io::Result<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let bytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let kib: Option<u64> = line.and_then(|line| line.split_whitespace().next()).and_then(|n| n.parse().ok());
        kib.unwrap_or(0) * 1024
    };
    Ok((bytes("MemTotal:"), bytes("MemAvailable:")))
}

fn own_cpu() -> Option<u64> {
    // SAFETY: rusage is plain numbers, for which zero is a value; the call fills it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        (libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage) == 0).then_some(usage)?
    };
    let us = |t: libc::timeval| (t.tv_sec as u64) * 1_000_000 + t.tv_usec as u64;
    Some(us(usage.ru_utime) + us(usage.ru_stime))
}
