//! A job of the scripted guest: its events, its input, its end.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use connectrpc::{ConnectError, ServiceStream};
use futures::StreamExt as _;
use mainbrella_guest_protocol::{fault, pb};
use pb::__buffa::oneof::job_event::Event;
use tokio::sync::Notify;

/// Bytes of one event of output.
const PIECE: usize = 64 * 1024;
static PIDS: AtomicU32 = AtomicU32::new(42);

#[derive(Default)]
struct State {
    /// Events that were not acked, numbered from `first`.
    events: Vec<Event>,
    acked: u64,
    finished: bool,
    stdout: u64,
    input: Vec<u8>,
    accepted: u64,
    input_ended: bool,
    killed: Option<(i32, bool)>,
    size: (u32, u32),
    resized: bool,
}

/// See the module.
pub(super) struct FakeJob {
    state: Mutex<State>,
    changed: Notify,
    pid: u32,
    argv: Vec<Vec<u8>>,
    repeat: bool,
    takes_input: bool,
}

impl FakeJob {
    pub(super) fn new(request: &pb::StartJobRequest, repeat: bool) -> Self {
        let state = State {
            input: request.stdin.clone(),
            accepted: request.stdin.len() as u64,
            input_ended: !request.stdin_open && !request.pty.is_set(),
            size: (request.pty.cols, request.pty.rows),
            ..State::default()
        };
        let pid = PIDS.fetch_add(1, Ordering::Relaxed);
        let takes_input = request.stdin_open || request.pty.is_set();
        Self { state: Mutex::new(state), changed: Notify::new(), pid, argv: request.argv.clone(), repeat, takes_input }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    pub(super) fn argv(&self) -> &[Vec<u8>] {
        &self.argv
    }

    pub(super) fn is_finished(&self) -> bool {
        self.lock().finished
    }

    pub(super) fn status(&self, id: &str) -> pb::JobStatus {
        let state = self.lock();
        pb::JobStatus {
            job_id: id.to_owned(),
            pid: self.pid,
            finished: state.finished,
            last_sequence: state.acked + state.events.len() as u64,
            acked_sequence: state.acked,
            stdin_accepted: state.accepted,
            stdin_pending: state.input.len() as u64,
            stdin_open: !state.input_ended,
            ..Default::default()
        }
    }

    /// Every event after `after`, and those to come.
    pub(super) fn follow(self: &Arc<Self>, after: u64) -> ServiceStream<pb::JobEvent> {
        let job = Arc::clone(self);
        futures::stream::unfold((job, after), |(job, after)| async move {
            let look = |state: &mut State| {
                let next = after.max(state.acked);
                let event = state.events.get(usize::try_from(next - state.acked).unwrap_or(usize::MAX));
                match event {
                    Some(event) => Some(Some((next + 1, event.clone()))),
                    None => state.finished.then_some(None),
                }
            };
            let (sequence, event) = job.until(look).await?;
            Some((Ok(pb::JobEvent { sequence, event: Some(event), ..Default::default() }), (job, sequence)))
        })
        .boxed()
    }

    pub(super) fn ack(&self, sequence: u64) {
        let mut state = self.lock();
        let n = sequence.saturating_sub(state.acked).min(state.events.len() as u64);
        state.events.drain(..usize::try_from(n).unwrap_or(0));
        state.acked += n;
    }

    pub(super) fn signal(&self, signal: i32, cancel: bool) -> bool {
        let delivered = !self.lock().finished;
        self.lock().killed.get_or_insert((signal, cancel));
        self.changed.notify_waiters();
        delivered
    }

    pub(super) fn write(&self, data: &[u8], end: bool) -> Result<(u64, u64), ConnectError> {
        let mut state = self.lock();
        if state.input_ended || state.finished || !self.takes_input {
            return Err(fault("stdin", libc::EPIPE, "closed"));
        }
        if state.input.len() + data.len() > 256 * 1024 {
            return Err(fault("stdin", libc::EAGAIN, "full"));
        }
        state.input.extend_from_slice(data);
        state.accepted += data.len() as u64;
        state.input_ended = end;
        let answer = (state.accepted, state.input.len() as u64);
        drop(state);
        self.changed.notify_waiters();
        Ok(answer)
    }

    pub(super) fn resize(&self, cols: u32, rows: u32) -> Result<(), ConnectError> {
        let mut state = self.lock();
        if state.size == (0, 0) {
            return Err(ConnectError::failed_precondition("no terminal"));
        }
        (state.size, state.resized) = ((cols, rows), true);
        drop(state);
        self.changed.notify_waiters();
        Ok(())
    }

    fn push(&self, event: impl Into<Event>, last: bool) {
        let mut state = self.lock();
        state.events.push(event.into());
        state.finished |= last;
        drop(state);
        self.changed.notify_waiters();
    }

    fn say(&self, data: &[u8]) {
        for part in data.chunks(PIECE) {
            let offset = self.lock().stdout;
            let event = pb::JobOutput {
                stream: pb::Stream::STREAM_STDOUT.into(),
                offset,
                data: part.to_vec(),
                ..Default::default()
            };
            if self.repeat {
                self.push(event.clone(), false);
            }
            self.push(event, false);
            self.lock().stdout += part.len() as u64;
        }
    }

    /// Waits until `look` finds something in the state.
    async fn until<T>(&self, mut look: impl FnMut(&mut State) -> Option<T>) -> T {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if let Some(found) = look(&mut self.lock()) {
                return found;
            }
            changed.await;
        }
    }
}

/// A job being played.
pub(super) struct Play {
    pub(super) job: Arc<FakeJob>,
    pub(super) words: Vec<String>,
    pub(super) env: HashMap<String, String>,
    /// Who it runs as; empty: root. There are `root` and `app`, in `USER` then, and numbers.
    pub(super) user: String,
    pub(super) limit: Option<Duration>,
}

impl Play {
    pub(super) async fn run(mut self) {
        use pb::job_exit::Cause;
        let began = Instant::now();
        let (user, group) = self.user.split_once(':').unwrap_or((&self.user, "root"));
        let there = |name: &str| matches!(name, "root" | "app") || name.bytes().all(|b| b.is_ascii_digit());
        for (stage, name) in [("user", user), ("group", group)] {
            if !there(name) {
                let missing = pb::JobNotStarted { errno: libc::ENOENT, stage: stage.into(), ..Default::default() };
                return self.job.push(missing, true);
            }
        }
        if !user.is_empty() {
            self.env.insert("USER".to_owned(), user.to_owned());
        }
        let known = ["true", "exit", "echo", "sleep", "hang", "flood", "count", "cat", "printenv", "size"];
        if !self.words.first().is_some_and(|w| known.contains(&w.as_str())) {
            let missing = pb::JobNotStarted { errno: libc::ENOENT, stage: "exec".into(), ..Default::default() };
            return self.job.push(missing, true);
        }
        self.job.push(pb::JobStarted { pid: self.job.pid, ..Default::default() }, false);
        let alarm = async {
            match self.limit {
                Some(limit) => tokio::time::sleep(limit).await,
                None => std::future::pending().await,
            }
        };
        let (cause, code, signal) = tokio::select! {
            biased;
            (signal, cancel) = self.job.until(|s| s.killed) => {
                (if cancel { Cause::CAUSE_CANCELLED } else { Cause::CAUSE_SIGNALLED }, 0, signal)
            }
            code = self.act() => (Cause::CAUSE_EXITED, code, 0),
            () = alarm => (Cause::CAUSE_TIMED_OUT, 0, libc::SIGKILL),
        };
        let stdout_bytes = self.job.lock().stdout;
        let duration_us = u64::try_from(began.elapsed().as_micros()).unwrap_or(0);
        let exit = pb::JobExit { cause: cause.into(), code, signal, stdout_bytes, duration_us, ..Default::default() };
        self.job.push(exit, true);
    }

    async fn act(&self) -> i32 {
        let argument = self.words.get(1..).unwrap_or_default().join(" ");
        let number = |i: usize| self.words.get(i).and_then(|w| w.parse::<u64>().ok()).unwrap_or(0);
        match self.words.first().map_or("", String::as_str) {
            "exit" => return i32::try_from(number(1)).unwrap_or(1),
            "echo" => self.job.say(format!("{argument}\n").as_bytes()),
            "sleep" => tokio::time::sleep(Duration::from_millis(number(1))).await,
            "hang" => std::future::pending::<()>().await,
            "flood" => self.job.say(&vec![b'x'; usize::try_from(number(1)).unwrap_or(0)]),
            "count" => {
                for i in 1..=number(1) {
                    self.job.say(format!("{i}\n").as_bytes());
                    tokio::time::sleep(Duration::from_millis(number(2))).await;
                }
            }
            "cat" => loop {
                let (data, end) = self
                    .job
                    .until(|s| {
                        (!s.input.is_empty() || s.input_ended).then(|| (std::mem::take(&mut s.input), s.input_ended))
                    })
                    .await;
                self.job.say(&data);
                if end {
                    break;
                }
            },
            "printenv" => match self.env.get(&argument) {
                Some(value) => self.job.say(format!("{value}\n").as_bytes()),
                None => return 1,
            },
            "size" => {
                let (cols, rows) = self.job.lock().size;
                self.job.say(format!("{rows} {cols}\n").as_bytes());
                loop {
                    let (cols, rows) = self.job.until(|s| std::mem::take(&mut s.resized).then_some(s.size)).await;
                    self.job.say(format!("{rows} {cols}\n").as_bytes());
                }
            }
            _ => {}
        }
        0
    }
}
