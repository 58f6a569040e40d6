//! Saving a machine that goes on: the part of the actor's work in which it stands still. What it saved is brought to disk
//! while the actor goes on, too.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mainbrella_types::{ErrorCode, SnapshotKey, SnapshotKind};
use tokio::sync::oneshot;
use tokio::time::timeout;
use tracing::{info, warn};

use super::actor::Actor;
use super::fork::copy_jobs;
use super::pause::{DRIVER_DEADLINE, quiet, told};
use crate::driver::{Instance, SaveOrder, SaveReceipt, Saving};
use crate::error::EngineError;
use crate::machine::admission::{Admission, Request, admit};
use crate::machine::handle::not_running;

/// What a caller is told.
const FAILED: &str = "the machine could not be saved";

impl Actor {
    /// Has the driver save the machine, and keeps the logs of the jobs that are saved with it. It goes on, whatever comes of it.
    /// Answers when all is on disk.
    pub(super) async fn save(
        &mut self,
        instance: &Arc<dyn Instance>,
        order: SaveOrder,
        reply: oneshot::Sender<Result<SaveReceipt, EngineError>>,
    ) {
        match self.capture(instance, order).await {
            Err(e) => drop(reply.send(Err(e))),
            Ok(saving) => {
                let generation = self.record.generation.clone();
                tokio::spawn(async move {
                    let kept = match timeout(DRIVER_DEADLINE, saving.durable).await {
                        Ok(kept) => kept.map_err(|e| told(e.into(), FAILED)),
                        Err(_) => Err(EngineError::new(ErrorCode::Internal, "the machine was not saved in time")),
                    };
                    match &kept {
                        Ok(receipt) => {
                            info!(machine = %generation, snapshot = %order.snapshot, kind = %order.kind, ?receipt, "saved");
                        }
                        Err(e) => {
                            warn!(machine = %generation, snapshot = %order.snapshot, internal = e.internal().unwrap_or(""), "a save failed: {}", e.message());
                        }
                    }
                    let _ = reply.send(kept);
                });
            }
        }
    }

    async fn capture(&mut self, instance: &Arc<dyn Instance>, order: SaveOrder) -> Result<Saving, EngineError> {
        if admit(self.record.state, Request::Save) != Admission::Accept {
            return Err(not_running(self.record.state, self.record.ending.as_ref()));
        }
        if !self.world.driver.report().memory_snapshot {
            return Err(EngineError::new(ErrorCode::Unsupported, "this host cannot save machines"));
        }
        let link = self.shared.link.get().cloned().ok_or_else(|| not_running(self.record.state, None))?;
        self.shared.gate.touch();
        // Before its processes stand still: this may take a while.
        self.world.driver.ready_to_fork(&self.record.key).await.map_err(|e| told(e.into(), FAILED))?;
        let saved = async {
            quiet(&link, true).await?;
            if order.kind == SnapshotKind::Full {
                let kept = self.keep_logs(&order.snapshot).await;
                kept.map_err(|e| EngineError::new(ErrorCode::Internal, FAILED).because(e.to_string()))?;
            }
            let late = |_| EngineError::new(ErrorCode::Internal, "the machine was not saved in time");
            let saved = timeout(DRIVER_DEADLINE, self.world.driver.save(&self.record.key, &order));
            saved.await.map_err(late)?.map_err(|e| told(e.into(), FAILED))
        };
        let saved = saved.await;
        self.recover(&link, instance, "was saved").await;
        saved
    }

    fn logs_of(&self, snapshot: &SnapshotKey) -> Option<PathBuf> {
        self.shared.shelf.dir().parent().map(|logs| logs.join(snapshot.to_string()))
    }

    /// Keeps the logs as they are now with a snapshot.
    async fn keep_logs(&self, snapshot: &SnapshotKey) -> std::io::Result<()> {
        let Some(into) = self.logs_of(snapshot) else { return Ok(()) };
        let from = self.shared.shelf.dir().to_owned();
        tokio::task::spawn_blocking(move || keep_logs(&from, &into)).await.map_err(std::io::Error::other)?
    }

    /// Gives a machine that starts from a snapshot the logs that were kept with it.
    pub(super) async fn take_logs(&self, snapshot: &SnapshotKey) {
        let Some(from) = self.logs_of(snapshot) else { return };
        let shelf = Arc::clone(&self.shared.shelf);
        let taken = tokio::task::spawn_blocking(move || {
            copy_jobs(&from, shelf.dir())?;
            shelf.load();
            std::io::Result::Ok(())
        });
        if let Err(e) = taken.await.map_err(std::io::Error::other).and_then(|taken| taken) {
            warn!(machine = %self.record.generation, error = %e, "the jobs of a snapshot could not be taken over");
        }
    }
}

/// Keeps the logs below `from` below `into`, too, for good. Blocks.
pub(crate) fn keep_logs(from: &Path, into: &Path) -> std::io::Result<()> {
    copy_jobs(from, into)?;
    to_disk(into)
}

/// Waits until what is in a folder is on the disk for good. Blocks.
fn to_disk(folder: &Path) -> std::io::Result<()> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        // There was nothing to keep.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            to_disk(&entry.path())?;
        } else {
            File::open(entry.path())?.sync_all()?;
        }
    }
    File::open(folder)?.sync_all()?;
    match folder.parent() {
        Some(above) => File::open(above)?.sync_all(),
        None => Ok(()),
    }
}
