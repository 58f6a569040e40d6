//! All processes of the machine, from /proc, within bounds.
//!
//! Everything read here is in the hands of the processes themselves: names may hold any byte, and a process may be
//! gone between two reads. What is gone is left out.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use connectrpc::ConnectError;
use mainbrella_guest_protocol::limits::{PROCESS_ARGV_MAX, PROCESSES_BYTES_MAX, PROCESSES_MAX};
use mainbrella_guest_protocol::{fault, pb};

/// The kernel's own threads are children of this one.
const KERNEL_THREADS: u32 = 2;
/// What a process costs in a list beside its texts, bytes; generous.
const EACH: usize = 96;

/// Every process under `proc` but the kernel's threads, by number. `jobs`: session to job.
pub(crate) fn list(proc: &Path, jobs: &HashMap<i32, String>) -> pb::ListProcessesResponse {
    let names = std::fs::read_dir(proc).into_iter().flatten().flatten();
    let mut pids: Vec<u32> = names.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    let clock = Clock::read(proc);
    let mut answer = pb::ListProcessesResponse::default();
    let mut size = 0;
    for pid in pids {
        let Some(process) = read(proc, pid, &clock, jobs) else { continue };
        size += EACH
            + process.command.len()
            + process.job_id.len()
            + process.argv.iter().map(|arg| arg.len() + 4).sum::<usize>();
        if answer.processes.len() >= PROCESSES_MAX || size > PROCESSES_BYTES_MAX {
            answer.truncated = true;
            break;
        }
        answer.processes.push(process);
    }
    answer
}

/// Units of the kernel's times.
struct Clock {
    boot_ms: i64,
    ticks_per_second: u64,
    page: u64,
}

impl Clock {
    fn read(proc: &Path) -> Self {
        // Worked out anew each time: the wall clock of a restored machine is not the template's.
        let uptime = std::fs::read_to_string(proc.join("uptime")).unwrap_or_default();
        let uptime: f64 = uptime.split(' ').next().and_then(|text| text.parse().ok()).unwrap_or(0.0);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        Self {
            boot_ms: i64::try_from(now).unwrap_or(0) - (uptime * 1000.0) as i64,
            ticks_per_second: rustix::param::clock_ticks_per_second().max(1),
            page: rustix::param::page_size() as u64,
        }
    }
}

fn read(proc: &Path, pid: u32, clock: &Clock, jobs: &HashMap<i32, String>) -> Option<pb::Process> {
    let dir = proc.join(pid.to_string());
    let stat = std::fs::read(dir.join("stat")).ok()?;
    let stat = Stat::parse(&stat)?;
    if pid == KERNEL_THREADS || stat.ppid == KERNEL_THREADS {
        return None;
    }
    let ticks_ms = |ticks: u64| ticks.saturating_mul(1000) / clock.ticks_per_second;
    Some(pb::Process {
        pid,
        ppid: stat.ppid,
        uid: std::fs::metadata(&dir).ok()?.uid(),
        state: char::from(stat.state).to_string(),
        command: stat.command.to_vec(),
        argv: arguments(&dir.join("cmdline")),
        started_at_ms: clock.boot_ms.saturating_add(i64::try_from(ticks_ms(stat.start_ticks)).unwrap_or(i64::MAX)),
        cpu_time_ms: ticks_ms(stat.cpu_ticks),
        rss_bytes: stat.rss_pages.saturating_mul(clock.page),
        job_id: jobs.get(&stat.session).cloned().unwrap_or_default(),
        ..Default::default()
    })
}

#[derive(Debug, PartialEq, Eq)]
struct Stat<'a> {
    command: &'a [u8],
    state: u8,
    ppid: u32,
    session: i32,
    cpu_ticks: u64,
    start_ticks: u64,
    rss_pages: u64,
}

impl<'a> Stat<'a> {
    /// `PID (NAME) STATE PPID …`; the name may hold anything, brackets and line breaks too, so it ends at the last one.
    fn parse(stat: &'a [u8]) -> Option<Self> {
        let open = stat.iter().position(|byte| *byte == b'(')?;
        let close = stat.iter().rposition(|byte| *byte == b')')?;
        let command = stat.get(open + 1..close)?;
        let rest = std::str::from_utf8(stat.get(close + 2..)?).ok()?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        // Numbered as proc(5) does, from the state, which is 3.
        let field = |number: usize| fields.get(number - 3).copied();
        let number = |at: usize| field(at)?.parse::<u64>().ok();
        let state = *field(3)?.as_bytes().first()?;
        Some(Self {
            command,
            state: if state.is_ascii_alphabetic() { state } else { b'?' },
            ppid: field(4)?.parse().ok()?,
            session: field(6)?.parse().ok()?,
            cpu_ticks: number(14)?.saturating_add(number(15)?),
            start_ticks: number(22)?,
            rss_pages: number(24)?,
        })
    }
}

/// Arguments of a process, the last ones shortened or left out where they are long.
fn arguments(path: &Path) -> Vec<Vec<u8>> {
    use std::io::Read as _;
    let mut bytes = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(PROCESS_ARGV_MAX as u64).read_to_end(&mut bytes));
    if read.is_err() || bytes.is_empty() {
        return Vec::new();
    }
    if bytes.last() == Some(&0) {
        bytes.pop();
    }
    bytes.split(|byte| *byte == 0).map(<[u8]>::to_vec).collect()
}

/// Sends `signal` to one process of the user.
///
/// # Errors
/// A number that names no process of the user, or what the system answered.
pub(crate) fn signal(pid: u32, signal: i32) -> Result<(), ConnectError> {
    if !(1..=64).contains(&signal) {
        return Err(ConnectError::invalid_argument("signal: 1 to 64"));
    }
    let gone = || fault("kill", libc::ESRCH, "no such process");
    let pid = i32::try_from(pid).ok().filter(|pid| *pid > 1).ok_or_else(gone)?;
    if u32::try_from(pid).is_ok_and(|pid| pid == std::process::id()) {
        return Err(gone());
    }
    // SAFETY: takes no pointers; the number is that of one process, never of a group.
    if unsafe { libc::kill(pid, signal) } == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    Err(fault("kill", error.raw_os_error().unwrap_or(0), "the process was not signalled"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_name_may_hold_anything() {
        let rest = "S 1 7 7 0 -1 4194560 1 2 3 4 50 25 0 0 20 0 1 0 900 1000 12 0 0";
        for name in ["sh", "a) S 9 9 (b", ")", "", "x\ny", "\u{fffd}"] {
            let text = format!("7 ({name}) {rest}");
            let stat = Stat::parse(text.as_bytes()).unwrap();
            assert_eq!(stat.command, name.as_bytes());
            assert_eq!((stat.state, stat.ppid, stat.session), (b'S', 1, 7));
            assert_eq!((stat.cpu_ticks, stat.start_ticks, stat.rss_pages), (75, 900, 12));
        }
    }

    #[test]
    fn this_process_is_in_the_list_with_what_is_true_of_it() {
        let own = std::process::id();
        // SAFETY: takes no pointers.
        let session = unsafe { libc::getsid(0) };
        let list = list(Path::new("/proc"), &HashMap::from([(session, "mine".to_owned())]));
        let me = list.processes.iter().find(|process| process.pid == own).unwrap();
        assert_eq!(me.job_id, "mine");
        assert!(me.rss_bytes > 100_000 && !me.argv.is_empty(), "{me:?}");
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as i64;
        assert!((now - 3_600_000..=now + 1000).contains(&me.started_at_ms), "{me:?} at {now}");
        assert!(list.processes.is_sorted_by_key(|process| process.pid));
        assert!(list.processes.iter().all(|process| process.ppid != KERNEL_THREADS));
    }

    #[test]
    fn a_list_is_bounded_whatever_there_is() {
        let proc = tempfile::tempdir().unwrap();
        for pid in 10..1010 {
            let dir = proc.path().join(pid.to_string());
            std::fs::create_dir(&dir).unwrap();
            let stat = format!("{pid} (x) S 1 7 7 0 -1 4194560 1 2 3 4 50 25 0 0 20 0 1 0 900 1000 12 0 0");
            std::fs::write(dir.join("stat"), stat).unwrap();
            std::fs::write(dir.join("cmdline"), vec![b'a'; 100_000]).unwrap();
        }
        let list = list(proc.path(), &HashMap::new());
        assert!(list.truncated && list.processes.len() > 100, "{}", list.processes.len());
        assert!(
            list.processes.iter().all(|process| process.argv.iter().map(Vec::len).sum::<usize>() <= PROCESS_ARGV_MAX)
        );
        use buffa::Message as _;
        assert!(list.encode_to_vec().len() < mainbrella_guest_protocol::limits::RESPONSE_BYTES_MAX);
    }

    #[test]
    fn only_a_process_can_be_signalled() {
        for pid in [0, 1, u32::MAX, std::process::id(), 4_000_000] {
            let error = signal(pid, 15).unwrap_err();
            assert!(error.message.unwrap().starts_with("[kill 3]"), "{pid}");
        }
        assert!(signal(4_000_000, 0).is_err() && signal(4_000_000, 65).is_err());
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        signal(child.id(), 10).unwrap();
        use std::os::unix::process::ExitStatusExt as _;
        assert_eq!(child.wait().unwrap().signal(), Some(10));
    }

    proptest! {
        #[test]
        fn no_stat_whatever_is_in_it_does_harm(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = Stat::parse(&bytes);
        }
    }
}
