//! The jobs of machines that are over, and the sweeping of what is left of them.
//!
//! A machine that lives has its jobs in hand; those of one that is over are read from disk when somebody asks, for as
//! long as its record is kept.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mainbrella_types::{ErrorCode, GenerationKey, MachineRecord, Millis, SnapshotKey};
use tracing::warn;

use crate::driver::{DiskPart, DiskUse};
use crate::engine::Engine;
use crate::error::EngineError;
use crate::machine::jobs::{Cause, MachineJobs, Shelf, cause_of};
use crate::machine::keep_logs;
use crate::microvm::tree_bytes;

/// How long the jobs of a machine that is over are remembered after somebody asked for them.
const REMEMBERED: Duration = Duration::from_secs(120);

/// Shelves by machine.
pub(crate) struct Shelves {
    dir: PathBuf,
    /// Removes the folder when there is no other place to keep logs.
    _own: Option<tempfile::TempDir>,
    known: Mutex<HashMap<GenerationKey, (Arc<Shelf>, Instant)>>,
}

impl Shelves {
    pub(crate) fn new(dir: Option<PathBuf>) -> Self {
        let own = dir.is_none().then(|| tempfile::Builder::new().prefix("mainbrella-jobs-").tempdir().ok()).flatten();
        let dir = dir.or_else(|| own.as_ref().map(|own| own.path().to_owned()));
        // Without any folder a start of a job says so.
        let dir = dir.unwrap_or_else(|| PathBuf::from("/nonexistent"));
        Self { dir, _own: own, known: Mutex::default() }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<GenerationKey, (Arc<Shelf>, Instant)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The shelf of a machine that is being made.
    pub(crate) fn fresh(&self, key: GenerationKey) -> Arc<Shelf> {
        let mut known = self.known();
        let make = || (Arc::new(Shelf::new(self.dir.join(key.to_string()))), Instant::now());
        Arc::clone(&known.entry(key).or_insert_with(make).0)
    }

    /// The shelf of a machine that nobody keeps; it is forgotten with the machine.
    pub(crate) fn apart(&self, key: GenerationKey) -> Arc<Shelf> {
        Arc::new(Shelf::new(self.dir.join(key.to_string())))
    }

    /// The shelf of a machine; `over`: how jobs end that nobody ended when it did, and the time.
    pub(crate) async fn of(
        &self,
        key: GenerationKey,
        over: Option<(Cause, Millis)>,
    ) -> Result<Arc<Shelf>, EngineError> {
        if let Some((shelf, asked)) = self.known().get_mut(&key) {
            *asked = Instant::now();
            return Ok(Arc::clone(shelf));
        }
        let dir = self.dir.join(key.to_string());
        let opened = tokio::task::spawn_blocking(move || {
            let shelf = Shelf::open(dir);
            if let Some((cause, now)) = over {
                shelf.close(cause, now);
            }
            Arc::new(shelf)
        });
        let shelf = opened.await.map_err(|e| {
            EngineError::new(ErrorCode::Internal, "the jobs of the machine could not be read").because(e.to_string())
        })?;
        // Two may have read it at once: all use the one that is known.
        let mut known = self.known();
        let (shelf, _) = known.entry(key).or_insert_with(|| (shelf, Instant::now()));
        Ok(Arc::clone(shelf))
    }

    /// Forgets what nobody asked for lately; `lives`: machines that have their shelf in hand.
    fn tidy(&self, lives: impl Fn(&GenerationKey) -> bool, now: Millis) {
        let mut living = Vec::new();
        self.known().retain(|key, (shelf, asked)| {
            let alive = lives(key);
            if alive {
                living.push(Arc::clone(shelf));
            }
            alive || asked.elapsed() < REMEMBERED
        });
        for shelf in living {
            shelf.make_room(now);
        }
    }
}

impl Engine {
    /// The jobs of a machine, living or not, to look at.
    ///
    /// # Errors
    /// When they cannot be read.
    pub async fn jobs_of(&self, record: &MachineRecord) -> Result<MachineJobs, EngineError> {
        let over =
            record.state.is_final().then(|| (cause_of(record.state), record.ended_at.unwrap_or_else(|| self.now())));
        Ok(MachineJobs { shelf: self.shelves().of(record.key, over).await? })
    }

    /// What a machine, living or not, was not let through to.
    ///
    /// # Errors
    /// When it cannot be read.
    pub async fn egress_log_of(&self, record: &MachineRecord) -> Result<Arc<mainbrella_net::EgressLog>, EngineError> {
        if let Some(machine) = self.machine(&record.key) {
            return Ok(machine.egress_log());
        }
        Ok(self.jobs_of(record).await?.shelf.egress())
    }

    /// Machines of which jobs are kept though they do not live any more.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub async fn kept_jobs(&self) -> Result<Vec<GenerationKey>, EngineError> {
        let names = self.kept_names().await?;
        let keys = names.iter().filter_map(|name| name.parse::<GenerationKey>().ok());
        Ok(keys.filter(|key| self.machine(key).is_none()).collect())
    }

    /// Removes what is kept of the jobs of a machine that is over and not remembered any more.
    pub async fn forget_jobs(&self, key: GenerationKey) {
        if self.machine(&key).is_some() {
            return;
        }
        self.shelves().known().remove(&key);
        let dir = self.shelves().dir.join(key.to_string());
        let removed = tokio::task::spawn_blocking(move || std::fs::remove_dir_all(dir)).await;
        if let Ok(Err(e)) = removed
            && e.kind() != std::io::ErrorKind::NotFound
        {
            warn!(machine = %key, error = %e, "the jobs of a machine could not be removed; trying again later");
        }
    }

    /// What all logs of jobs take.
    pub(crate) async fn logs_use(&self) -> Result<DiskUse, EngineError> {
        let dir = self.shelves().dir.clone();
        let measured = tokio::task::spawn_blocking(move || {
            let items = std::fs::read_dir(&dir).map_or(0, |entries| entries.count() as u64);
            let bytes = tree_bytes(&dir, &mut HashSet::new())?;
            std::io::Result::Ok(DiskUse { part: DiskPart::Jobs, items, bytes })
        });
        let failed = |e: std::io::Error| {
            EngineError::new(ErrorCode::Internal, "the logs of jobs could not be measured").because(e.to_string())
        };
        measured.await.map_err(|e| failed(std::io::Error::other(e)))?.map_err(failed)
    }

    /// Every name that jobs are kept under.
    async fn kept_names(&self) -> Result<Vec<String>, EngineError> {
        let dir = self.shelves().dir.clone();
        let names = tokio::task::spawn_blocking(move || match std::fs::read_dir(dir) {
            Ok(entries) => Ok(entries.flatten().filter_map(|e| e.file_name().into_string().ok()).collect()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(e.to_string()),
        });
        let failed =
            |why: String| EngineError::new(ErrorCode::Internal, "the kept jobs could not be listed").because(why);
        names.await.map_err(|e| failed(e.to_string()))?.map_err(failed)
    }

    /// The snapshots of which anything is on this host, be it only logs of jobs.
    ///
    /// # Errors
    /// When they cannot be listed.
    pub async fn snapshot_remains(&self) -> Result<BTreeSet<SnapshotKey>, EngineError> {
        let mut keys: BTreeSet<SnapshotKey> = self.snapshots().await?.into_iter().collect();
        keys.extend(self.kept_names().await?.iter().filter_map(|name| name.parse::<SnapshotKey>().ok()));
        Ok(keys)
    }

    /// Removes the logs that were kept with a snapshot.
    pub(crate) async fn forget_logs(&self, snapshot: &SnapshotKey) -> Result<(), EngineError> {
        let dir = self.shelves().dir.join(snapshot.to_string());
        match tokio::task::spawn_blocking(move || std::fs::remove_dir_all(dir)).await {
            Ok(Err(e)) if e.kind() != std::io::ErrorKind::NotFound => {
                let what = "the logs of a snapshot could not be removed";
                Err(EngineError::new(ErrorCode::Internal, what).because(e.to_string()))
            }
            _ => Ok(()),
        }
    }

    /// Keeps the logs that were kept with one snapshot with another one, too.
    pub(crate) async fn duplicate_logs(&self, from: SnapshotKey, to: SnapshotKey) -> Result<(), EngineError> {
        let logs = self.shelves().dir.clone();
        let (from, to) = (logs.join(from.to_string()), logs.join(to.to_string()));
        let copied = tokio::task::spawn_blocking(move || keep_logs(&from, &to));
        copied.await.map_err(std::io::Error::other).and_then(|copied| copied).map_err(|e| {
            EngineError::new(ErrorCode::Internal, "the logs of a snapshot could not be kept").because(e.to_string())
        })
    }

    /// Lets go of what is kept in memory of machines that are over, and of jobs whose time has come.
    pub fn tidy_jobs(&self) {
        let now = self.now();
        self.shelves().tidy(|key| self.machine(key).is_some(), now);
    }
}
