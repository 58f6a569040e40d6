//! Processes that are not our children: identity that survives the reuse of a process id, signals, waiting, cause of death.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Start time of a process, clock ticks since boot (`/proc/PID/stat`, field 22).
///
/// # Errors
/// When there is no such process.
pub fn start_time(pid: i32) -> io::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name in field 2 may hold anything, so count from its closing parenthesis.
    let rest = text.rsplit_once(')').map_or("", |(_, r)| r);
    rest.split_whitespace()
        .nth(19)
        .and_then(|f| f.parse().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "unexpected form of /proc/PID/stat"))
}

/// A handle on one process, whatever happens to its number.
#[derive(Debug)]
pub struct Process {
    fd: OwnedFd,
    pid: i32,
}

impl Process {
    /// A handle on the process `pid` if it is the one that started at `started`.
    ///
    /// # Errors
    /// `NotFound` when that process is gone (or the number belongs to another one now).
    pub fn open(pid: i32, started: u64) -> io::Result<Self> {
        let gone = || io::Error::new(io::ErrorKind::NotFound, "the process is gone");
        let fd = pidfd_open(Pid::from_raw(pid).ok_or_else(gone)?, PidfdFlags::NONBLOCK).map_err(|e| match e {
            rustix::io::Errno::SRCH => gone(),
            other => other.into(),
        })?;
        // Looked at after the handle is held: it cannot change any more.
        if start_time(pid).ok() == Some(started) { Ok(Self { fd, pid }) } else { Err(gone()) }
    }

    /// Its number.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Whether it has ended.
    #[must_use]
    pub fn ended(&self) -> bool {
        let mut fds = [rustix::event::PollFd::new(&self.fd, rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|n| n > 0)
    }

    /// Kills it. A process that is gone is success.
    ///
    /// # Errors
    /// When we may not.
    pub fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.fd, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Resolves when it has ended.
    ///
    /// # Errors
    /// When the reactor does not take the descriptor.
    pub async fn wait(&self) -> io::Result<()> {
        // SAFETY: an `OwnedFd` names the same open descriptor for as long as it lives.
        let fd = unsafe { AsyncFd::register_with_interest(self.fd.try_clone()?, Interest::READABLE) }
            .map_err(io::Error::from)?;
        fd.readable().await.map(drop)
    }

    /// Kills it and waits until it is gone.
    ///
    /// # Errors
    /// `TimedOut` when it is still there after `patience` (a process in an uninterruptible wait).
    pub async fn end(&self, patience: Duration) -> io::Result<()> {
        self.kill()?;
        tokio::time::timeout(patience, self.wait())
            .await
            .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, format!("process {} does not end", self.pid)))?
    }

    /// How it ended, for kernels that tell (6.15 and newer) about processes that are not children.
    #[must_use]
    pub fn cause(&self) -> Option<String> {
        /// `struct pidfd_info` in its first published size.
        #[repr(C)]
        #[derive(Default)]
        struct Info {
            mask: u64,
            cgroup: u64,
            ids: [u32; 11],
            exit_code: i32,
        }
        const INFO_EXIT: u64 = 1 << 3;
        // _IOWR(0xFF, 11, struct pidfd_info)
        const GET_INFO: libc::c_ulong = (3 << 30) | ((size_of::<Info>() as libc::c_ulong) << 16) | (0xFF << 8) | 11;
        let mut info = Info { mask: INFO_EXIT, ..Info::default() };
        // SAFETY: the kernel writes at most the size encoded in the request, which is that of `info`.
        let done = unsafe { libc::ioctl(self.fd.as_raw_fd(), GET_INFO as _, &raw mut info) };
        if done != 0 || info.mask & INFO_EXIT == 0 {
            return None;
        }
        let status = info.exit_code;
        Some(if libc::WIFSIGNALED(status) {
            format!("killed by signal {}", libc::WTERMSIG(status))
        } else {
            format!("exit status {}", libc::WEXITSTATUS(status))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_process_is_known_by_number_and_start_time_and_its_end_is_seen() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().expect("sleep");
        let pid = i32::try_from(child.id()).expect("pid");
        let started = start_time(pid).expect("alive");
        assert!(Process::open(pid, started + 1).is_err(), "another life of the same number is refused");
        let p = Process::open(pid, started).expect("open");
        assert!(!p.ended());
        p.end(Duration::from_secs(5)).await.expect("ends");
        assert!(p.ended());
        child.wait().expect("reap");
        assert!(Process::open(pid, started).is_err());
        p.kill().expect("killing what is gone is success");
        if let Some(cause) = p.cause() {
            assert_eq!(cause, "killed by signal 9");
        }
    }
}
