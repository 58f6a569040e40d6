//! Copies of a machine that goes on: the part of the actor's work in which it stands still.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mainbrella_types::ErrorCode;
use tokio::time::timeout;
use tracing::info;

use super::actor::Actor;
use super::pause::{DRIVER_DEADLINE, quiet, told};
use crate::driver::{ForkOrder, Forked, Instance};
use crate::error::EngineError;
use crate::machine::admission::{Admission, Request, admit};
use crate::machine::handle::not_running;
use crate::machine::jobs::EGRESS_LOG;

impl Actor {
    /// Has the driver make `children`, with the logs of the jobs that run in them. The machine goes on, whatever comes of it.
    pub(super) async fn fork(
        &mut self,
        instance: &Arc<dyn Instance>,
        children: &[ForkOrder],
    ) -> Result<Forked, EngineError> {
        if admit(self.record.state, Request::Fork) != Admission::Accept {
            return Err(not_running(self.record.state, self.record.ending.as_ref()));
        }
        if !self.world.driver.report().fork {
            return Err(EngineError::new(ErrorCode::Unsupported, "this host cannot copy running machines"));
        }
        let link = self.shared.link.get().cloned().ok_or_else(|| not_running(self.record.state, None))?;
        self.shared.gate.touch();
        // Before its processes stand still: this may take a while.
        let ready = self.world.driver.ready_to_fork(&self.record.key).await;
        ready.map_err(|e| told(e.into(), "the machine could not be copied"))?;
        let made = async {
            quiet(&link, false).await?;
            // What the guest says from here on, each of its copies says, too.
            let logs = self.copy_logs(children);
            let forked = timeout(DRIVER_DEADLINE, self.world.driver.fork(&self.record.key, children));
            let (copied, forked) = tokio::join!(logs, forked);
            let what = "the machine could not be copied";
            let late = |_| EngineError::new(ErrorCode::Internal, "the machine was not copied in time");
            let forked = forked.map_err(late)?.map_err(|e| told(e.into(), what))?;
            copied.map_err(|e| EngineError::new(ErrorCode::Internal, what).because(e.to_string()))?;
            Ok(forked)
        };
        let made = made.await;
        self.recover(&link, instance, "was copied").await;
        if let Ok(forked) = &made {
            info!(machine = %self.record.generation, children = children.len(), still_ms = forked.still_ms, memory_bytes = forked.memory_bytes, "forked");
        }
        made
    }

    /// Gives each child the logs as they are now.
    async fn copy_logs(&self, children: &[ForkOrder]) -> io::Result<()> {
        let from = self.shared.shelf.dir().to_owned();
        let Some(parent) = from.parent().map(Path::to_owned) else { return Ok(()) };
        let into: Vec<PathBuf> = children.iter().map(|child| parent.join(child.key.to_string())).collect();
        let copied = tokio::task::spawn_blocking(move || into.iter().try_for_each(|into| copy_jobs(&from, into)));
        copied.await.map_err(io::Error::other)?
    }
}

/// Copies the folders of jobs, each with the files in it. What was not let through stays the source's own.
pub(super) fn copy_jobs(from: &Path, into: &Path) -> io::Result<()> {
    let jobs = match fs::read_dir(from) {
        Ok(jobs) => jobs,
        // It never had any.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    for job in jobs {
        let job = job?;
        if job.file_name() == EGRESS_LOG || !job.file_type()?.is_dir() {
            continue;
        }
        let target = into.join(job.file_name());
        fs::create_dir_all(&target)?;
        let files = match fs::read_dir(job.path()) {
            Ok(files) => files,
            // It was let go of meanwhile.
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e),
        };
        for file in files {
            let file = file?;
            match fs::copy(file.path(), target.join(file.file_name())) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_copied_and_what_was_denied_is_not() {
        let dir = tempfile::tempdir().expect("temp dir");
        let (from, into) = (dir.path().join("a"), dir.path().join("b"));
        copy_jobs(&from, &into).expect("nothing to copy");
        fs::create_dir_all(from.join("job")).expect("made");
        fs::write(from.join("job/stdout-0"), b"said").expect("written");
        fs::write(from.join(EGRESS_LOG), b"denied").expect("written");
        copy_jobs(&from, &into).expect("copied");
        assert_eq!(fs::read(into.join("job/stdout-0")).expect("there"), b"said");
        assert_eq!(fs::read_dir(&into).expect("there").count(), 1);
    }
}
