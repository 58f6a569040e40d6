//! One job: its log, its input, its process, and those who follow it.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use connectrpc::ConnectError;
use mainbrella_guest_protocol::limits::JOB_FOLLOWERS_MAX;
use mainbrella_guest_protocol::{fault, pb};
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

use super::log::{Happened, Log};
use super::request::Checked;
use super::spawn::TerminalSize;
use super::stdin::Stdin;
use crate::Reaper;

/// What one job may hold of output nobody took while all together hold too much, bytes: a thousand of them still fit
/// the smallest machine.
const UNSENT_SPENT: usize = 32 * 1024;

/// Memory all jobs together may hold of output.
#[derive(Debug)]
pub(crate) struct Budget {
    held: AtomicUsize,
    most: usize,
}

impl Budget {
    /// An eighth of the machine's memory, within 8 and 64 MiB.
    pub(crate) fn of_this_machine() -> Self {
        let pages = rustix::system::sysinfo();
        let total = (pages.totalram as usize).saturating_mul(pages.mem_unit as usize);
        Self { held: AtomicUsize::new(0), most: (total / 8).clamp(8 << 20, 64 << 20) }
    }

    pub(crate) fn is_spent(&self) -> bool {
        self.held.load(Ordering::Relaxed) > self.most
    }

    fn changed(&self, from: usize, to: usize) {
        if to >= from {
            self.held.fetch_add(to - from, Ordering::Relaxed);
        } else {
            self.held.fetch_sub(from - to, Ordering::Relaxed);
        }
    }
}

/// How a job was told to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Ending {
    #[default]
    ByItself,
    TimedOut,
    Cancelled,
}

#[derive(Debug)]
struct State {
    log: Log,
    held: usize,
    pid: i32,
    ending: Ending,
    followers: usize,
}

/// A job, running or finished.
#[derive(Debug)]
pub(crate) struct Job {
    id: String,
    birth: u64,
    forget_when_followed: bool,
    reaper: Reaper,
    budget: Arc<Budget>,
    state: Mutex<State>,
    /// Something was logged, or taken from the log.
    changed: Notify,
    pub(crate) stdin: Stdin,
    terminal: Mutex<Option<Arc<AsyncFd<OwnedFd>>>>,
}

impl Job {
    pub(crate) fn new(request: &Checked, birth: u64, reaper: Reaper, budget: Arc<Budget>) -> Self {
        let log = Log::new(request.output_limit, request.acked);
        let state = State { log, held: 0, pid: 0, ending: Ending::ByItself, followers: 0 };
        Self {
            id: request.id.clone(),
            birth,
            forget_when_followed: request.forget_when_followed,
            reaper,
            budget,
            state: Mutex::new(state),
            changed: Notify::new(),
            stdin: Stdin::new(&request.stdin, request.stdin_open),
            terminal: Mutex::new(None),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the log and wakes those who wait for it.
    pub(crate) fn with_log<T>(&self, f: impl FnOnce(&mut Log) -> T) -> T {
        let mut state = self.lock();
        let result = f(&mut state.log);
        let held = state.log.held();
        self.budget.changed(state.held, held);
        state.held = held;
        drop(state);
        self.changed.notify_waiters();
        result
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    pub(crate) fn birth(&self) -> u64 {
        self.birth
    }

    pub(crate) fn forgets_itself(&self) -> bool {
        self.forget_when_followed
    }

    pub(crate) fn reaper(&self) -> &Reaper {
        &self.reaper
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.lock().log.is_finished()
    }

    /// Whether the process has to wait until a follower took something.
    pub(crate) fn is_full(&self) -> bool {
        let state = self.lock();
        // When all jobs together hold too much, nobody gets far ahead of its followers.
        state.log.is_full() || (self.budget.is_spent() && state.log.unsent() > UNSENT_SPENT)
    }

    /// Waits until there is room for output.
    pub(crate) async fn room(&self) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if !self.is_full() {
                return;
            }
            changed.await;
        }
    }

    pub(crate) fn set_pid(&self, pid: i32) {
        self.lock().pid = pid;
    }

    pub(crate) fn set_terminal(&self, terminal: Option<Arc<AsyncFd<OwnedFd>>>) {
        *self.terminal.lock().unwrap_or_else(PoisonError::into_inner) = terminal;
    }

    pub(crate) fn ending(&self) -> Ending {
        self.lock().ending
    }

    /// Notes how the job is being ended; the first reason stands.
    pub(crate) fn end(&self, ending: Ending) {
        let mut state = self.lock();
        if state.ending == Ending::ByItself {
            state.ending = ending;
        }
    }

    /// Whether forgetting it loses what the host has not said to hold.
    pub(crate) fn is_owed(&self) -> bool {
        self.lock().log.is_owed()
    }

    pub(crate) fn pid(&self) -> i32 {
        self.lock().pid
    }

    pub(crate) fn status(&self) -> pb::JobStatus {
        let input = self.stdin.standing();
        let state = self.lock();
        pb::JobStatus {
            job_id: self.id.clone(),
            pid: state.pid as u32,
            finished: state.log.is_finished(),
            exit: state.log.exit().cloned().map(buffa::MessageField::some).unwrap_or_default(),
            last_sequence: state.log.last_sequence(),
            acked_sequence: state.log.acked().unwrap_or(0),
            stdin_accepted: input.accepted,
            stdin_pending: input.pending,
            stdin_open: input.open,
            ..Default::default()
        }
    }

    /// Sends `signal` to the process group; says whether there was one.
    pub(crate) fn signal(&self, signal: i32) -> bool {
        let (pid, finished) = {
            let state = self.lock();
            (state.pid, state.log.is_finished())
        };
        pid > 0 && !finished && self.reaper.signal_group(pid, signal)
    }

    /// Asks the process group to end, and ends what is left of it after `grace`.
    pub(crate) fn cancel(self: &Arc<Self>, grace: Duration) -> bool {
        self.end(Ending::Cancelled);
        if grace.is_zero() {
            return self.signal(libc::SIGKILL);
        }
        let delivered = self.signal(libc::SIGTERM);
        if delivered {
            // One that stopped would otherwise never see it.
            self.signal(libc::SIGCONT);
            let job = self.clone();
            tokio::spawn(async move {
                tokio::time::sleep(grace).await;
                if !job.signal(libc::SIGKILL) {
                    let pid = job.lock().pid;
                    job.reaper.kill_rest_of_group(pid);
                }
            });
        }
        delivered
    }

    /// Gives the terminal another size; the process hears of it by SIGWINCH.
    pub(crate) fn resize(&self, size: TerminalSize) -> Result<(), ConnectError> {
        let terminal = self.terminal.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(terminal) = terminal else {
            return Err(ConnectError::failed_precondition("the job has no terminal, or it has ended"));
        };
        rustix::termios::tcsetwinsize(terminal.get_ref(), size.winsize())
            .map_err(|errno| fault("pty", errno.raw_os_error(), "the terminal was not resized"))
    }

    /// A place among the followers, from after event `after`.
    pub(crate) fn seat(self: Arc<Self>, after: u64) -> Result<Seat, ConnectError> {
        {
            let mut state = self.lock();
            if after > state.log.last_sequence() {
                return Err(ConnectError::out_of_range("after_sequence is past the last event"));
            }
            if state.followers >= JOB_FOLLOWERS_MAX {
                return Err(ConnectError::resource_exhausted("too many followers of one job"));
            }
            state.followers += 1;
        }
        Ok(Seat { job: self, after, ended: false })
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let held = self.lock().held;
        self.budget.changed(held, 0);
    }
}

/// One follower of a job.
#[derive(Debug)]
pub(crate) struct Seat {
    job: Arc<Job>,
    after: u64,
    ended: bool,
}

impl Seat {
    pub(crate) fn job(&self) -> &Job {
        &self.job
    }

    /// The next event; `None` after the last one.
    pub(crate) async fn next(&mut self) -> Option<(u64, Happened)> {
        if self.ended {
            return None;
        }
        loop {
            let mut changed = std::pin::pin!(self.job.changed.notified());
            changed.as_mut().enable();
            let after = self.after;
            if let Some((sequence, event)) = self.job.take_event(after) {
                self.after = sequence;
                self.ended = event.is_last();
                return Some((sequence, event));
            }
            if self.job.is_finished() {
                self.ended = true;
                return None;
            }
            changed.await;
        }
    }
}

impl Job {
    fn take_event(&self, after: u64) -> Option<(u64, Happened)> {
        let mut state = self.lock();
        let was_full = state.log.is_full() || self.budget.is_spent();
        let event = state.log.take_after(after);
        let held = state.log.held();
        self.budget.changed(state.held, held);
        state.held = held;
        drop(state);
        if was_full && event.is_some() {
            self.changed.notify_waiters();
        }
        event
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut state = self.job.lock();
        state.followers -= 1;
    }
}
