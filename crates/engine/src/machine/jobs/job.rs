//! One job: what is kept of it, its log, and those who follow it.

use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mainbrella_job_log::{Cause, Entry, Event, Exit, JobLog, Limits, Position, Reader};
use mainbrella_types::{ErrorCode, Millis, limits};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::{JobCommand, JobView, StartKey, TerminalSize};
use crate::error::EngineError;

/// How much of each output is kept.
pub(crate) const LOG_LIMITS: Limits = Limits::keeping(limits::JOB_LOG_MAX_BYTES);

/// What a log remembers of its job. The environment and the input are not in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Note {
    pub(crate) command: JobCommand,
    pub(crate) cwd: Option<String>,
    pub(crate) timeout_ms: u64,
    pub(crate) stdin: bool,
    pub(crate) pty: Option<TerminalSize>,
    pub(crate) started_ms: i64,
    /// Digests of the key and of the body it came with, hexadecimal.
    pub(crate) key: Option<(String, String)>,
    /// Let go of, and kept only so that its key is not used twice.
    #[serde(default)]
    pub(crate) forgotten: bool,
}

impl Note {
    pub(crate) fn start_key(&self) -> Option<StartKey> {
        let (key, body) = self.key.as_ref()?;
        let mut digests = StartKey { key: [0; 32], body: [0; 32] };
        hex::decode_to_slice(key, &mut digests.key).ok()?;
        hex::decode_to_slice(body, &mut digests.body).ok()?;
        Some(digests)
    }

    /// Whether its key still names it.
    pub(crate) fn key_counts(&self, now: Millis) -> bool {
        self.key.is_some() && Millis(self.started_ms).plus(limits::JOB_IDEMPOTENCY_RETENTION_MS) > now
    }

    fn encode(&self) -> Vec<u8> {
        // Plain data: it has always a form.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// How far a job has come, for those who wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The guest has not said that it runs.
    Starting,
    /// It runs.
    Running,
    /// It was never begun; why.
    Refused(ErrorCode, String, Option<String>),
    /// It has ended.
    Ended,
    /// Ended, because what the guest said of it cannot be true; why, for the log.
    Disbelieved(String),
}

impl Phase {
    pub(crate) fn is_over(&self) -> bool {
        matches!(self, Self::Refused(..) | Self::Ended | Self::Disbelieved(_))
    }

    /// The refusal, as an error.
    pub(crate) fn refusal(&self) -> Option<EngineError> {
        match self {
            Self::Refused(code, message, internal) => {
                let error = EngineError::new(*code, message.clone());
                Some(match internal {
                    Some(internal) => error.because(internal.clone()),
                    None => error,
                })
            }
            _ => None,
        }
    }
}

/// Whether there was no room on the disk.
pub(crate) fn is_full(e: &std::io::Error) -> bool {
    matches!(e.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded)
}

/// Logs in memory at once, in this process: each has 2 MiB, at worst 5.
const MEMORY_PLACES: usize = 32;
static MEMORY_TAKEN: AtomicUsize = AtomicUsize::new(0);

/// A place for a log in memory; given back when dropped.
#[derive(Debug)]
struct MemoryPlace(());

impl MemoryPlace {
    fn take() -> Option<Self> {
        let more = |n: usize| (n < MEMORY_PLACES).then_some(n + 1);
        MEMORY_TAKEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_| Self(()))
    }
}

impl Drop for MemoryPlace {
    fn drop(&mut self) {
        MEMORY_TAKEN.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How a wait for a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    /// It came to what was waited for.
    Came,
    /// Its guest is out of reach.
    OutOfReach,
    /// The time was over.
    TooLong,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) id: String,
    note: Mutex<Note>,
    pub(crate) log: JobLog,
    /// It promises no durability: its log may be in memory where the disk is full.
    volatile: bool,
    /// Held while its log is in memory.
    memory: Mutex<Option<MemoryPlace>>,
    /// Cursor of the last event, and how far it has come.
    progress: watch::Sender<(u64, Phase)>,
    /// How often its guest was found out of reach.
    misses: watch::Sender<u32>,
    /// Input accepted, once known.
    pub(crate) accepted: AtomicU64,
    /// Held by the one write to its input that is under way; says whether `accepted` is known.
    pub(crate) writing: tokio::sync::Mutex<bool>,
}

impl Job {
    /// A new job with its log in `dir`; one that may be `volatile` has it in memory where the disk is full.
    pub(crate) fn create(dir: &Path, id: &str, note: Note, input: u64, volatile: bool) -> std::io::Result<Self> {
        let (dir, text) = (dir.join(id), note.encode());
        let mut place = None;
        let log = JobLog::create(&dir, &text, LOG_LIMITS).or_else(|e| {
            // Half a log is none.
            let _ = std::fs::remove_dir_all(&dir);
            place = if volatile && is_full(&e) { MemoryPlace::take() } else { None };
            if place.is_some() { JobLog::create_in_memory(&dir, &text, LOG_LIMITS) } else { Err(e) }
        })?;
        Ok(Self {
            volatile,
            memory: Mutex::new(place),
            id: id.to_owned(),
            note: Mutex::new(note),
            log,
            progress: watch::channel((0, Phase::Starting)).0,
            misses: watch::channel(0).0,
            accepted: AtomicU64::new(input),
            writing: tokio::sync::Mutex::new(true),
        })
    }

    /// A job that was made before. `None`: its log is damaged beyond use.
    pub(crate) fn open(dir: &Path, id: &str) -> Option<Self> {
        let opened = JobLog::open(&dir.join(id), LOG_LIMITS);
        let log = opened.inspect_err(|e| tracing::warn!(job = id, error = %e, "a job's log cannot be used")).ok()?;
        let note: Note = serde_json::from_slice(&log.note()).ok()?;
        let position = log.position();
        let phase = match (position.exit, position.cursor) {
            (Some(_), _) => Phase::Ended,
            (None, 0) => Phase::Starting,
            (None, _) => Phase::Running,
        };
        Some(Self {
            volatile: false,
            memory: Mutex::default(),
            id: id.to_owned(),
            note: Mutex::new(note),
            log,
            progress: watch::channel((position.cursor, phase)).0,
            misses: watch::channel(0).0,
            accepted: AtomicU64::new(0),
            writing: tokio::sync::Mutex::new(false),
        })
    }

    /// Goes on in memory, if it may and there is a place.
    pub(crate) fn spill(&self) -> bool {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.volatile || memory.is_some() {
            return false;
        }
        *memory = MemoryPlace::take();
        if memory.is_some() {
            self.log.spill();
        }
        memory.is_some()
    }

    pub(crate) fn note(&self) -> MutexGuard<'_, Note> {
        self.note.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it was started with what `key` came with.
    pub(crate) fn has_body(&self, key: &StartKey) -> bool {
        self.note().start_key().is_some_and(|known| known.body == key.body)
    }

    /// Changes what is remembered, on disk too where that can be written.
    pub(crate) fn change_note(&self, change: impl FnOnce(&mut Note)) {
        let mut note = self.note();
        change(&mut note);
        if let Err(e) = self.log.set_note(&note.encode()) {
            tracing::warn!(job = self.id, error = %e, "what is remembered of a job could not be written");
        }
    }

    pub(crate) fn watch(&self) -> watch::Receiver<(u64, Phase)> {
        self.progress.subscribe()
    }

    /// Its guest is out of reach; it is tried again.
    pub(crate) fn missed(&self) {
        self.misses.send_modify(|n| *n = n.saturating_add(1));
    }

    /// Waits until the job has come to what `far` looks for, for as long as its guest is in reach.
    pub(crate) async fn comes_to(&self, far: impl Fn(&Phase) -> bool, wait: Duration) -> Waited {
        let (mut progress, mut misses) = (self.watch(), self.misses.subscribe());
        misses.mark_unchanged();
        tokio::select! {
            biased;
            _ = progress.wait_for(|(_, phase)| far(phase)) => Waited::Came,
            _ = misses.changed() => Waited::OutOfReach,
            () = tokio::time::sleep(wait) => Waited::TooLong,
        }
    }

    pub(crate) fn phase(&self) -> Phase {
        self.progress.borrow().1.clone()
    }

    pub(crate) fn is_over(&self) -> bool {
        self.progress.borrow().1.is_over()
    }

    /// Tells those who wait where the log stands.
    pub(crate) fn publish(&self) {
        let position = self.log.position();
        self.progress.send_modify(|(cursor, phase)| {
            *cursor = position.cursor;
            if position.exit.is_some() {
                if !phase.is_over() {
                    *phase = Phase::Ended;
                }
            } else if position.cursor > 0 && *phase == Phase::Starting {
                *phase = Phase::Running;
            }
        });
    }

    /// It was never begun.
    pub(crate) fn refuse(&self, error: &EngineError) {
        let phase = Phase::Refused(error.code(), error.message().to_owned(), error.internal().map(str::to_owned));
        self.progress.send_modify(|progress| progress.1 = phase);
    }

    /// What the guest says of it cannot be true.
    pub(crate) fn disbelieve(&self, why: &str) {
        self.progress.send_modify(|progress| progress.1 = Phase::Disbelieved(why.to_owned()));
    }

    /// Ends the log of a job of which nothing more will be heard. Idempotent.
    pub(crate) fn end(&self, cause: Cause, now: Millis) {
        let started = self.note().started_ms;
        // A puller may append between the look and the end: look again.
        for _ in 0..1000 {
            let position = self.log.position();
            if position.exit.is_some() {
                break;
            }
            let exit = Exit {
                cause,
                code: None,
                signal: None,
                stdout_bytes: position.stdout_bytes,
                stderr_bytes: position.stderr_bytes,
                duration_ms: Millis(started).until(now),
            };
            let event = Event { cursor: position.cursor + 1, time_ms: now.0, entry: Entry::Exit(exit) };
            match self.log.append(&[event], false) {
                Ok(()) => break,
                Err(e) if e.kind() == std::io::ErrorKind::InvalidInput => {}
                Err(e) => {
                    // The next one who opens it ends it.
                    tracing::warn!(job = self.id, error = %e, "the end of a job could not be written");
                    break;
                }
            }
        }
        self.log.rest();
        self.publish();
    }

    pub(crate) fn view(&self) -> JobView {
        let position = self.log.position();
        let note = self.note();
        JobView {
            id: self.id.clone(),
            command: note.command.clone(),
            cwd: note.cwd.clone(),
            timeout_ms: note.timeout_ms,
            stdin: note.stdin || note.pty.is_some(),
            pty: note.pty,
            started_at: Millis(note.started_ms),
            position,
            stdin_accepted: self.accepted.load(Ordering::Relaxed),
        }
    }
}

/// Reads a job's events from a cursor, and waits for those that are still to come. What it holds is one page.
pub struct Follower {
    job: Arc<Job>,
    reader: Reader,
    progress: watch::Receiver<(u64, Phase)>,
}

impl Follower {
    pub(crate) fn new(job: Arc<Job>, after: u64) -> Result<Self, EngineError> {
        let last = job.log.position().cursor;
        if after > last {
            return Err(EngineError::new(
                ErrorCode::InvalidRequest,
                format!("cursor is past the last event of the job, which is {last}"),
            ));
        }
        Ok(Self { reader: job.log.reader(after), progress: job.watch(), job })
    }

    /// The next events there are already, at most about `bytes` of output and `count` in number.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn page(&mut self, bytes: usize, count: usize) -> Result<Vec<Event>, EngineError> {
        let (job, mut reader) = (Arc::clone(&self.job), self.reader.clone());
        let read = tokio::task::spawn_blocking(move || reader.read(&job.log, bytes, count).map(|list| (list, reader)));
        let failed =
            |why: String| EngineError::new(ErrorCode::Internal, "the log of the job could not be read").because(why);
        let (events, reader) = read.await.map_err(|e| failed(e.to_string()))?.map_err(|e| failed(e.to_string()))?;
        self.reader = reader;
        Ok(events)
    }

    /// The next events, waiting for the first of them; none when there are no more.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn next(&mut self, bytes: usize, count: usize) -> Result<Vec<Event>, EngineError> {
        loop {
            let (cursor, over) = {
                let progress = self.progress.borrow_and_update();
                (progress.0, progress.1.is_over())
            };
            if cursor > self.reader.cursor() {
                let events = self.page(bytes, count).await?;
                if !events.is_empty() {
                    return Ok(events);
                }
            }
            if over || self.progress.changed().await.is_err() {
                return Ok(Vec::new());
            }
        }
    }

    /// Cursor of the last event given.
    #[must_use]
    pub fn cursor(&self) -> u64 {
        self.reader.cursor()
    }

    /// Whether there is more than was given.
    #[must_use]
    pub fn has_more(&self) -> bool {
        self.job.log.position().cursor > self.reader.cursor()
    }

    /// Where the log stands.
    #[must_use]
    pub fn position(&self) -> Position {
        self.job.log.position()
    }
}
