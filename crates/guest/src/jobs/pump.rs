//! The task of one job: carries its output, its input and its end between process and log.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mainbrella_guest_protocol::pb;
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;
use tokio::sync::Semaphore;

use super::job::{Ending, Job};
use super::log::{Happened, Output};
use super::request::Checked;
use super::spawn::{self, Channels, Failure, Started};
use crate::UserCgroup;
use crate::port::watch;
use crate::reaper::WaitStatus;

/// Most bytes taken from one pipe before the other has its turn: what a pipe holds.
const TURN: usize = 64 * 1024;
/// A terminal's last output arrives a moment after the process has ended.
const TERMINAL_QUIET: Duration = Duration::from_millis(30);
/// End of input, as a terminal knows it.
const CONTROL_D: u8 = 4;

struct Source {
    output: Output,
    fd: Arc<AsyncFd<OwnedFd>>,
    open: bool,
}

enum Read {
    Bytes(usize),
    Nothing,
    End,
}

impl Source {
    fn new(output: Output, fd: OwnedFd) -> io::Result<Self> {
        Ok(Self { output, fd: Arc::new(watch(fd)?), open: true })
    }

    fn read_now(&self, buffer: &mut [u8]) -> Read {
        loop {
            return match rustix::io::read(self.fd.get_ref(), &mut *buffer) {
                Ok(0) => Read::End,
                Ok(n) => Read::Bytes(n),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => Read::Nothing,
                // A terminal whose last process is gone gives EIO.
                Err(_) => Read::End,
            };
        }
    }

    /// Waits for something to read and reads it.
    async fn read(&self, buffer: &mut [u8]) -> Read {
        loop {
            let Ok(mut ready) = self.fd.readable().await else { return Read::End };
            match self.read_now(buffer) {
                Read::Nothing => ready.clear_ready(),
                other => return other,
            }
        }
    }
}

/// Starts the process and the task. What goes wrong is told by the job's log.
pub(crate) fn launch(job: &Arc<Job>, request: &Checked, cgroup: Option<&UserCgroup>, leftovers: Arc<Semaphore>) {
    let procs = match cgroup.map(UserCgroup::open_procs).transpose() {
        Ok(procs) => procs,
        Err(error) => return not_started(job, "fork", error.raw_os_error().unwrap_or(0)),
    };
    let born = Instant::now();
    match spawn::start(job.reaper(), &request.program, procs.as_ref()) {
        Err(Failure { stage, errno }) => not_started(job, stage, errno),
        Ok(started) => {
            job.set_pid(started.pid);
            let (job, timeout) = (job.clone(), request.timeout);
            tokio::spawn(async move { Pump { job, born, leftovers }.run(started, timeout).await });
        }
    }
}

pub(crate) fn not_started(job: &Job, stage: &'static str, errno: i32) {
    job.stdin.close();
    job.with_log(|log| log.push(Happened::NotStarted { errno, stage }));
}

struct Pump {
    job: Arc<Job>,
    born: Instant,
    leftovers: Arc<Semaphore>,
}

impl Pump {
    async fn run(self, started: Started, timeout: Option<Duration>) {
        let Started { pid, mut exited, channels, verdict } = started;
        let mut sources = Vec::with_capacity(2);
        let mut input = None;
        let terminal = matches!(channels, Channels::Pty { .. });
        let registered = match channels {
            Channels::Pipes { stdin, stdout, stderr } => [(Output::Stdout, stdout), (Output::Stderr, stderr)]
                .into_iter()
                .try_for_each(|(output, fd)| Source::new(output, fd).map(|source| sources.push(source)))
                .and_then(|()| stdin.map(watch).transpose())
                .map(|stdin| input = stdin.map(Arc::new)),
            Channels::File { stdin } => stdin.map(watch).transpose().map(|stdin| input = stdin.map(Arc::new)),
            Channels::Pty { master } => Source::new(Output::Stdout, master).map(|source| {
                self.job.set_terminal(Some(source.fd.clone()));
                input = Some(source.fd.clone());
                sources.push(source);
            }),
        };
        if let Err(error) = registered {
            self.job.signal(libc::SIGKILL);
            return not_started(&self.job, "fork", error.raw_os_error().unwrap_or(0));
        }
        match self.verdict(verdict, timeout).await {
            Some(Failure { stage, errno }) => {
                let _ = (&mut exited).await;
                self.job.set_terminal(None);
                return not_started(&self.job, stage, errno);
            }
            None => self.job.with_log(|log| log.push(Happened::Started { pid: pid as u32 })),
        }
        let feeder = match input {
            Some(fd) => Some(tokio::spawn(feed(self.job.clone(), fd, terminal)).abort_handle()),
            None => {
                self.job.stdin.close();
                None
            }
        };
        let status = self.carry(&mut sources, &mut exited, timeout).await;
        if let Some(feeder) = feeder {
            feeder.abort();
        }
        self.job.stdin.close();
        self.job.set_terminal(None);
        if terminal {
            self.drain_terminal(&mut sources[0]).await;
        } else {
            for source in sources {
                self.drain_pipe(source);
            }
        }
        let exit = self.exit_event(status);
        self.job.with_log(|log| log.finish(exit));
    }

    /// Carries output until the process has ended.
    /// What became of the child before it was the program. The time limit holds here already: a child can stand
    /// still on its way (where processes of the user are frozen, or a file system does not answer).
    async fn verdict(&self, fd: OwnedFd, timeout: Option<Duration>) -> Option<Failure> {
        let verdict = read_verdict(fd);
        let mut verdict = std::pin::pin!(verdict);
        if let Some(until) = timeout.and_then(|t| tokio::time::Instant::from_std(self.born).checked_add(t)) {
            if let Ok(verdict) = tokio::time::timeout_at(until, &mut verdict).await {
                return verdict;
            }
            self.job.end(Ending::TimedOut);
            self.job.signal(libc::SIGKILL);
        }
        verdict.await
    }

    async fn carry(
        &self,
        sources: &mut [Source],
        exited: &mut tokio::sync::oneshot::Receiver<WaitStatus>,
        timeout: Option<Duration>,
    ) -> Option<WaitStatus> {
        let mut buffer = vec![0u8; 8 * 1024];
        let until = timeout.and_then(|timeout| tokio::time::Instant::from_std(self.born).checked_add(timeout));
        let alarm = async move {
            match until {
                Some(until) => tokio::time::sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        let mut alarm = std::pin::pin!(alarm);
        let mut alarmed = false;
        let mut first_turn = 0;
        loop {
            let full = self.job.is_full();
            tokio::select! {
                status = &mut *exited => return status.ok(),
                () = &mut alarm, if !alarmed => {
                    alarmed = true;
                    self.job.end(Ending::TimedOut);
                    self.job.signal(libc::SIGKILL);
                }
                () = self.job.room(), if full => {}
                () = any_readable(sources, first_turn), if !full && sources.iter().any(|source| source.open) => {
                    // Each output has one turn, so that a flood on one never keeps the other waiting.
                    for i in 0..sources.len() {
                        let i = (i + first_turn) % sources.len();
                        self.turn(&mut sources[i], &mut buffer);
                    }
                    first_turn = (first_turn + 1) % sources.len();
                }
            }
        }
    }

    fn turn(&self, source: &mut Source, buffer: &mut Vec<u8>) {
        if !source.open {
            return;
        }
        match source.read_now(buffer) {
            Read::Bytes(n) => {
                self.job.with_log(|log| log.write(source.output, &buffer[..n]));
                // Who writes much gets a larger buffer; most never need one.
                if n == buffer.len() && n < TURN {
                    buffer.resize(TURN, 0);
                }
            }
            Read::Nothing => {}
            Read::End => source.open = false,
        }
    }

    /// Takes what was in the pipe when the process ended, and no more: a background process that holds the pipe
    /// may write for ever.
    fn drain_pipe(&self, source: Source) {
        if !source.open {
            return;
        }
        let mut left = rustix::io::ioctl_fionread(source.fd.get_ref()).unwrap_or(0) as usize;
        let mut buffer = vec![0u8; left.clamp(1, TURN)];
        while left > 0 {
            let most = left.min(buffer.len());
            match source.read_now(&mut buffer[..most]) {
                Read::Bytes(n) => {
                    self.job.with_log(|log| log.write(source.output, &buffer[..n]));
                    left -= n;
                }
                Read::Nothing => break,
                Read::End => return,
            }
        }
        if let Ok(permit) = self.leftovers.clone().try_acquire_owned() {
            tokio::spawn(async move {
                let mut buffer = vec![0u8; 4096];
                while !matches!(source.read(&mut buffer).await, Read::End) {}
                drop(permit);
            });
        }
    }

    async fn drain_terminal(&self, source: &mut Source) {
        let mut buffer = vec![0u8; TURN];
        let mut left = 1024 * 1024usize;
        while source.open && left > 0 {
            match tokio::time::timeout(TERMINAL_QUIET, source.read(&mut buffer)).await {
                Ok(Read::Bytes(n)) => {
                    self.job.with_log(|log| log.write(source.output, &buffer[..n]));
                    left = left.saturating_sub(n);
                }
                Ok(_) => source.open = false,
                Err(_) => return,
            }
        }
    }

    fn exit_event(&self, status: Option<WaitStatus>) -> pb::JobExit {
        let code = status.and_then(WaitStatus::code);
        let signal = status.and_then(WaitStatus::signal);
        let cause = match (self.job.ending(), code) {
            (Ending::Cancelled, _) => pb::job_exit::Cause::CAUSE_CANCELLED,
            // It ended in the very moment its time did: that is its own end.
            (Ending::TimedOut, None) => pb::job_exit::Cause::CAUSE_TIMED_OUT,
            (_, Some(_)) => pb::job_exit::Cause::CAUSE_EXITED,
            (_, None) if signal.is_some() => pb::job_exit::Cause::CAUSE_SIGNALLED,
            (_, None) => pb::job_exit::Cause::CAUSE_UNSPECIFIED,
        };
        pb::JobExit {
            cause: cause.into(),
            code: code.unwrap_or(0),
            signal: signal.unwrap_or(0),
            duration_us: u64::try_from(self.born.elapsed().as_micros()).unwrap_or(u64::MAX),
            ..Default::default()
        }
    }
}

/// Waits until one of the open sources has something.
async fn any_readable(sources: &[Source], first: usize) {
    use futures::future::{Either, select};
    let wait = |source: &Source| {
        let fd = source.fd.clone();
        let open = source.open;
        async move {
            if !open {
                return std::future::pending().await;
            }
            loop {
                let Ok(mut ready) = fd.readable().await else { return };
                // Readiness is remembered; ask the descriptor itself, so that an old memory does not spin.
                if has_something(fd.get_ref()) {
                    return;
                }
                ready.clear_ready();
                if has_something(fd.get_ref()) {
                    return;
                }
            }
        }
    };
    match sources {
        [one] => wait(one).await,
        [a, b] => {
            let (a, b) = if first == 0 { (a, b) } else { (b, a) };
            match select(std::pin::pin!(wait(a)), std::pin::pin!(wait(b))).await {
                Either::Left(_) | Either::Right(_) => {}
            }
        }
        _ => std::future::pending().await,
    }
}

/// Whether a read would give bytes, an end or an error now.
fn has_something(fd: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, poll};
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    matches!(poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(n) if n > 0)
}

/// Reads what the child said before it became the program: nothing, when all went well.
async fn read_verdict(fd: OwnedFd) -> Option<Failure> {
    let failed = |error: io::Error| Some(Failure { stage: "fork", errno: error.raw_os_error().unwrap_or(0) });
    if let Err(errno) = rustix::io::ioctl_fionbio(fd.as_fd(), true) {
        return failed(errno.into());
    }
    let source = match Source::new(Output::Stdout, fd) {
        Ok(source) => source,
        Err(error) => return failed(error),
    };
    let mut message = [0u8; 8];
    match source.read(&mut message).await {
        Read::Bytes(n) => Failure::decode(&message[..n]),
        _ => None,
    }
}

/// Writes what arrives for the process.
async fn feed(job: Arc<Job>, fd: Arc<AsyncFd<OwnedFd>>, terminal: bool) {
    use super::stdin::Next;
    loop {
        let (bytes, end) = match job.stdin.next().await {
            Next::Write(bytes) => (bytes, false),
            Next::End => (if terminal { vec![CONTROL_D] } else { Vec::new() }, true),
        };
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let Ok(mut ready) = fd.writable().await else { return job.stdin.close() };
            match rustix::io::write(fd.get_ref(), rest) {
                Ok(n) => {
                    if !end {
                        job.stdin.wrote(n);
                    }
                    rest = &rest[n..];
                }
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(Errno::INTR) => {}
                // The process closed its input.
                Err(_) => return job.stdin.close(),
            }
        }
        if end {
            // Of a pipe this was the last descriptor: the process sees the end.
            return;
        }
    }
}
