//! All jobs of one machine: those that run, those that ended, and what is kept of them.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mainbrella_job_log::Cause;
use mainbrella_net::{EgressLog, SeatSecrets};
use mainbrella_types::{EgressPolicy, ErrorCode, Millis, limits};

use super::job::{Follower, Job};
use super::{JobView, OutputReader, Stream};
use crate::driver::EgressOrder;
use crate::error::EngineError;

/// Jobs on a shelf, running ones included.
const KEPT_MAX: usize = limits::JOBS_RETAINED_MAX + limits::COMMANDS_MAX;

#[derive(Debug, Default)]
struct Table {
    /// Ids are in the order of their start.
    jobs: BTreeMap<String, Arc<Job>>,
    /// Which job a start key named.
    keys: HashMap<[u8; 32], String>,
    /// Set when the machine is over: nothing is started any more.
    closed: bool,
}

/// The file of the egress log. No job has such a name.
pub(crate) const EGRESS_LOG: &str = "egress.log";

/// See the module.
#[derive(Debug)]
pub(crate) struct Shelf {
    dir: PathBuf,
    /// Not of jobs, but kept as they are: what the machine was not let through to.
    egress: Arc<EgressLog>,
    /// Not of jobs either: what the machine's gateway adds to requests. Never on disk here.
    secrets: Arc<SeatSecrets>,
    table: Mutex<Table>,
    /// Bytes all logs have on disk.
    bytes: AtomicU64,
    /// Held while a start with a key is decided.
    pub(crate) keyed: tokio::sync::Mutex<()>,
}

impl Shelf {
    /// The shelf of a machine that never had a job.
    pub(crate) fn new(dir: PathBuf) -> Self {
        let egress = Arc::new(EgressLog::open(dir.join(EGRESS_LOG)));
        Self {
            dir,
            egress,
            secrets: Arc::default(),
            table: Mutex::default(),
            bytes: AtomicU64::new(0),
            keyed: tokio::sync::Mutex::new(()),
        }
    }

    /// What is on disk of a machine's jobs. Blocks.
    pub(crate) fn open(dir: PathBuf) -> Self {
        let shelf = Self::new(dir);
        shelf.load();
        shelf
    }

    /// Takes up what is on disk of jobs; none were put before. Blocks.
    pub(crate) fn load(&self) {
        let names = std::fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let ids: Vec<String> = names.filter_map(|e| e.file_name().into_string().ok()).filter(|n| is_id(n)).collect();
        let mut bytes = 0;
        {
            let mut table = self.table();
            for id in ids {
                match Job::open(&self.dir, &id) {
                    Some(job) => {
                        bytes += job.log.position().disk_bytes;
                        if let Some(key) = job.note().start_key() {
                            table.keys.insert(key.key, id.clone());
                        }
                        table.jobs.insert(id, Arc::new(job));
                    }
                    None => drop(std::fs::remove_dir_all(self.dir.join(&id))),
                }
            }
        }
        self.bytes.store(bytes, Ordering::Relaxed);
    }

    /// The machine's egress log.
    pub(crate) fn egress(&self) -> Arc<EgressLog> {
        Arc::clone(&self.egress)
    }

    /// The machine's secrets.
    pub(crate) fn secrets(&self) -> Arc<SeatSecrets> {
        Arc::clone(&self.secrets)
    }

    /// What a driver is told of the machine's network under `policy`.
    pub(crate) fn egress_order(&self, policy: EgressPolicy) -> EgressOrder {
        EgressOrder { policy, log: self.egress(), secrets: self.secrets() }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Puts a new job on the shelf; `false`: the machine is over.
    pub(crate) fn put(&self, job: &Arc<Job>, now: Millis) -> bool {
        {
            let mut table = self.table();
            if table.closed {
                return false;
            }
            if let Some(key) = job.note().start_key() {
                table.keys.insert(key.key, job.id.clone());
            }
            table.jobs.insert(job.id.clone(), Arc::clone(job));
            if table.jobs.len() <= KEPT_MAX && !self.is_short() {
                return true;
            }
        }
        self.make_room(now);
        true
    }

    /// A job nobody let go of.
    ///
    /// # Errors
    /// `not_found`.
    pub(crate) fn get(&self, id: &str) -> Result<Arc<Job>, EngineError> {
        let job = self.table().jobs.get(id).cloned().filter(|job| !job.note().forgotten);
        job.ok_or_else(|| EngineError::new(ErrorCode::NotFound, "there is no such job in this machine"))
    }

    /// The job a key named, if it still does, let go of or not.
    pub(crate) fn by_key(&self, key: &[u8; 32], now: Millis) -> Option<Arc<Job>> {
        let table = self.table();
        let job = table.jobs.get(table.keys.get(key)?)?;
        job.note().key_counts(now).then(|| Arc::clone(job))
    }

    pub(crate) fn running(&self) -> Vec<Arc<Job>> {
        self.table().jobs.values().filter(|job| !job.is_over()).cloned().collect()
    }

    /// Nothing is started any more, and what has not ended ends for `cause`. Blocks for small writes.
    pub(crate) fn close(&self, cause: Cause, now: Millis) {
        self.table().closed = true;
        for job in self.running() {
            job.end(cause, now);
        }
    }

    /// Counts what a log has grown by.
    pub(crate) fn grew(&self, before: u64, after: u64) {
        if after >= before {
            self.bytes.fetch_add(after - before, Ordering::Relaxed);
        } else {
            let less = before - after;
            let _ = self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| Some(n.saturating_sub(less)));
        }
    }

    /// Whether all logs together have more than they may.
    pub(crate) fn is_short(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) > limits::JOB_LOGS_TOTAL_MAX_BYTES
    }

    /// Lets go of finished jobs, oldest first, until what is kept is within its bounds.
    pub(crate) fn make_room(&self, now: Millis) {
        loop {
            let victim = {
                let table = self.table();
                let expired =
                    table.jobs.values().find(|j| j.is_over() && j.note().forgotten && !j.note().key_counts(now));
                let many = table.jobs.len() > KEPT_MAX || self.is_short();
                let oldest = || table.jobs.values().find(|job| job.is_over() && !job.note().forgotten).filter(|_| many);
                expired.or_else(oldest).cloned()
            };
            let Some(job) = victim else { return };
            self.let_go(&job, now);
        }
    }

    /// Lets go of a job that is over: its log goes, and it too unless its key still counts.
    pub(crate) fn let_go(&self, job: &Arc<Job>, now: Millis) {
        let before = job.log.position().disk_bytes;
        let keep = job.note().key_counts(now) && job.log.position().exit.is_some() && !job.note().forgotten;
        if keep {
            job.change_note(|note| note.forgotten = true);
            if let Err(e) = job.log.remove_output() {
                tracing::warn!(job = job.id, error = %e, "the output of a job could not be removed");
            }
            self.grew(before, job.log.position().disk_bytes);
            return;
        }
        {
            let mut table = self.table();
            if let Some(key) = job.note().start_key()
                && table.keys.get(&key.key) == Some(&job.id)
            {
                table.keys.remove(&key.key);
            }
            table.jobs.remove(&job.id);
        }
        if let Err(e) = job.log.remove() {
            tracing::warn!(job = job.id, error = %e, "the log of a job could not be removed");
        }
        self.grew(before, 0);
    }
}

fn is_id(name: &str) -> bool {
    name.len() == 32 && name.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// One page of jobs.
#[derive(Clone, Debug)]
pub struct JobPage {
    /// Newest first.
    pub jobs: Vec<JobView>,
    /// Where the next page begins; `None`: there is none.
    pub next: Option<String>,
}

/// The jobs of a machine, living or not, to look at and to let go of.
#[derive(Clone, Debug)]
pub struct MachineJobs {
    pub(crate) shelf: Arc<Shelf>,
}

impl MachineJobs {
    /// A page of jobs, newest first; `before`: the `next` of the page before.
    #[must_use]
    pub fn list(&self, limit: usize, before: Option<&str>) -> JobPage {
        let table = self.shelf.table();
        let mut older: Vec<&Arc<Job>> = match before {
            Some(before) => table.jobs.range(..before.to_owned()).map(|(_, job)| job).collect(),
            None => table.jobs.values().collect(),
        };
        older.retain(|job| !job.note().forgotten && job.phase().refusal().is_none());
        let jobs: Vec<JobView> = older.iter().rev().take(limit).map(|job| job.view()).collect();
        let next = (older.len() > limit).then(|| jobs.last().map(|job| job.id.clone())).flatten();
        JobPage { jobs, next }
    }

    /// A job as it is now.
    ///
    /// # Errors
    /// `not_found`.
    pub fn get(&self, id: &str) -> Result<JobView, EngineError> {
        Ok(self.shelf.get(id)?.view())
    }

    /// A job as it is when it has ended, or after `wait`.
    ///
    /// # Errors
    /// `not_found`.
    pub async fn wait(&self, id: &str, wait: Duration) -> Result<JobView, EngineError> {
        let job = self.shelf.get(id)?;
        let mut progress = job.watch();
        let _ = tokio::time::timeout(wait, progress.wait_for(|(_, phase)| phase.is_over())).await;
        Ok(job.view())
    }

    /// Follows the events of a job after the cursor `after`.
    ///
    /// # Errors
    /// `not_found`, or `invalid_request` for a cursor from the future.
    pub fn follow(&self, id: &str, after: u64) -> Result<Follower, EngineError> {
        Follower::new(self.shelf.get(id)?, after)
    }

    /// Reads the bytes of one stream of a job from `offset`.
    ///
    /// # Errors
    /// `not_found`.
    pub fn output(&self, id: &str, stream: Stream, offset: u64) -> Result<JobOutput, EngineError> {
        let job = self.shelf.get(id)?;
        let reader = job.log.output(stream, offset);
        Ok(JobOutput { job, reader, stream })
    }

    /// Lets go of a job that has ended. Its start key goes on to name it.
    ///
    /// # Errors
    /// `not_found`, or `job_running`.
    pub fn forget(&self, id: &str, now: Millis) -> Result<(), EngineError> {
        let job = self.shelf.get(id)?;
        if !job.is_over() {
            return Err(EngineError::new(ErrorCode::JobRunning, "the job is running"));
        }
        self.shelf.let_go(&job, now);
        Ok(())
    }
}

/// The bytes of one stream of a job.
pub struct JobOutput {
    job: Arc<Job>,
    reader: OutputReader,
    stream: Stream,
}

impl JobOutput {
    /// Where the log stands.
    #[must_use]
    pub fn position(&self) -> super::Position {
        self.job.log.position()
    }

    /// Parts of the stream that are not kept: where each begins and how long it is.
    #[must_use]
    pub fn gaps(&self) -> Vec<(u64, u64)> {
        self.job.log.gaps(self.stream)
    }

    /// The next bytes that are kept, and their position; `None`: there are no more so far.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn next(&mut self, most: usize) -> Result<Option<(u64, bytes::Bytes)>, EngineError> {
        let (job, mut reader) = (Arc::clone(&self.job), self.reader.clone());
        let read = tokio::task::spawn_blocking(move || reader.read(&job.log, most).map(|piece| (piece, reader)));
        let failed =
            |why: String| EngineError::new(ErrorCode::Internal, "the log of the job could not be read").because(why);
        let (piece, reader) = read.await.map_err(|e| failed(e.to_string()))?.map_err(|e| failed(e.to_string()))?;
        self.reader = reader;
        Ok(piece.map(|piece| (piece.offset, piece.data)))
    }
}
