//! The one place that waits for children.
//!
//! A job's exit status must reach the job even when the child dies before anybody knows its number, and even
//! when thousands of orphans die beside it. So forking and noting the child's number happen under one lock, and
//! so do collecting a status and giving it away.

use std::collections::HashMap;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use crate::port::watch;

/// Whose deaths are waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReapMode {
    /// Every child and orphan of the process: for PID 1, or a process that is all ours.
    All,
    /// Only children started here: other parts of the process have children of their own.
    Known,
}

/// A raw status as `waitpid` gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitStatus(pub i32);

impl WaitStatus {
    /// The exit code, when the process ended by itself.
    pub fn code(self) -> Option<i32> {
        libc::WIFEXITED(self.0).then(|| libc::WEXITSTATUS(self.0))
    }

    /// The signal, when one ended it.
    pub fn signal(self) -> Option<i32> {
        libc::WIFSIGNALED(self.0).then(|| libc::WTERMSIG(self.0))
    }
}

type Waiting = HashMap<i32, oneshot::Sender<WaitStatus>>;

/// Starts children and hands each its own exit status. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Reaper {
    mode: ReapMode,
    waiting: Arc<Mutex<Waiting>>,
}

fn lock(waiting: &Mutex<Waiting>) -> MutexGuard<'_, Waiting> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Reaper {
    /// Begins to reap, on the current runtime.
    ///
    /// # Errors
    /// When SIGCHLD cannot be listened to, or the process cannot become the parent of its orphans.
    pub fn start(mode: ReapMode) -> io::Result<Self> {
        let reaper = Self { mode, waiting: Arc::default() };
        if mode == ReapMode::All {
            // SAFETY: prctl with these arguments takes no pointers.
            if unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) } != 0 {
                return Err(io::Error::last_os_error());
            }
            let mut died = signal(SignalKind::child())?;
            let waiting = Arc::downgrade(&reaper.waiting);
            tokio::spawn(async move {
                while died.recv().await.is_some() {
                    match waiting.upgrade() {
                        Some(waiting) => reap_all(&waiting),
                        None => return,
                    }
                }
            });
        }
        Ok(reaper)
    }

    /// Runs `fork`, which gives the number of a new child, and notes the child. The receiver gets its status.
    ///
    /// # Errors
    /// What `fork` failed with, or that the child cannot be watched (it is killed and reaped then).
    pub fn spawn(&self, fork: impl FnOnce() -> io::Result<i32>) -> io::Result<(i32, oneshot::Receiver<WaitStatus>)> {
        let (sender, receiver) = oneshot::channel();
        let mut waiting = lock(&self.waiting);
        let pid = fork()?;
        waiting.insert(pid, sender);
        if self.mode == ReapMode::Known
            && let Err(error) = watch_one(pid, self.waiting.clone())
        {
            waiting.remove(&pid);
            // SAFETY: plain calls on a child of ours that nobody else waits for.
            unsafe {
                libc::kill(pid, libc::SIGKILL);
                libc::waitpid(pid, std::ptr::null_mut(), 0);
            }
            return Err(error);
        }
        Ok((pid, receiver))
    }

    /// Sends a signal to the child `pid` and its process group, if it was not yet reaped: a number that was is
    /// perhaps somebody else's. Says whether it was sent.
    pub fn signal_group(&self, pid: i32, signal: i32) -> bool {
        let waiting = lock(&self.waiting);
        if !waiting.contains_key(&pid) {
            return false;
        }
        // SAFETY: takes no pointers; the lock keeps the number the child's.
        unsafe {
            // A child that has not yet made its group is still reached by its number.
            if libc::killpg(pid, signal) == 0 { true } else { libc::kill(pid, signal) == 0 }
        }
    }

    /// Kills what is left of the process group `group` whose leader was reaped. Groups keep their number from
    /// being used again as long as they have a member.
    pub fn kill_rest_of_group(&self, group: i32) {
        let waiting = lock(&self.waiting);
        if !waiting.contains_key(&group) {
            // SAFETY: takes no pointers.
            unsafe { libc::killpg(group, libc::SIGKILL) };
        }
    }

    /// Runs `f` while no child is being started: nothing is between its fork and its cgroup then.
    pub fn exclusively<T>(&self, f: impl FnOnce() -> T) -> T {
        let _guard = lock(&self.waiting);
        f()
    }
}

fn reap_all(waiting: &Mutex<Waiting>) {
    loop {
        let mut status = 0;
        let mut waiting = lock(waiting);
        // SAFETY: `status` outlives the call.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
        if pid <= 0 {
            return;
        }
        if let Some(sender) = waiting.remove(&pid) {
            let _ = sender.send(WaitStatus(status));
        }
    }
}

/// Waits for one child by its own descriptor, so that nobody else's child is ever touched.
fn watch_one(pid: i32, waiting: Arc<Mutex<Waiting>>) -> io::Result<()> {
    // SAFETY: takes no pointers; a child that nobody reaped keeps its number.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call just gave us this descriptor, and it is close-on-exec by its nature.
    let fd = watch(unsafe { OwnedFd::from_raw_fd(fd as i32) })?;
    tokio::spawn(async move {
        loop {
            let Ok(mut ready) = fd.readable().await else { return };
            let mut waiting = lock(&waiting);
            let mut status = 0;
            // SAFETY: `status` outlives the call; the child is ours and unreaped.
            let got = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
            if got == 0 {
                ready.clear_ready();
                continue;
            }
            // Somebody else took the status: dropping the sender tells the job.
            let sender = waiting.remove(&pid);
            if got == pid
                && let Some(sender) = sender
            {
                let _ = sender.send(WaitStatus(status));
            }
            return;
        }
    });
    Ok(())
}
