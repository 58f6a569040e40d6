//! The cgroup all processes of the user live in, frozen while the machine's state is saved.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A cgroup (version 2) that the agent is not in.
#[derive(Debug, Clone)]
pub struct UserCgroup {
    path: PathBuf,
}

impl UserCgroup {
    /// Makes (or takes over) the cgroup `name` under the mounted hierarchy `root`.
    ///
    /// # Errors
    /// When it can be neither made nor found.
    pub fn create(root: &Path, name: &str) -> io::Result<Self> {
        let path = root.join(name);
        match std::fs::create_dir(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(Self { path }),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the file a process writes "0" to in order to move itself in.
    pub(crate) fn open_procs(&self) -> io::Result<File> {
        OpenOptions::new().write(true).open(self.path.join("cgroup.procs"))
    }

    /// Asks for the freeze; it is complete when [`UserCgroup::is_frozen`] says so.
    pub(crate) fn set_frozen(&self, frozen: bool) -> io::Result<()> {
        std::fs::write(self.path.join("cgroup.freeze"), if frozen { "1" } else { "0" })
    }

    /// Whether every process in it has stopped.
    pub(crate) fn is_frozen(&self) -> io::Result<bool> {
        let events = std::fs::read_to_string(self.path.join("cgroup.events"))?;
        Ok(events.lines().any(|line| line == "frozen 1"))
    }

    /// Waits until every process in it has stopped. Blocks.
    pub(crate) fn wait_frozen(&self, most: Duration) -> io::Result<()> {
        let until = Instant::now() + most;
        let mut pause = Duration::from_micros(200);
        while !self.is_frozen()? {
            if Instant::now() > until {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "processes of the user did not stop in time"));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Processor time used by everything in it, microseconds.
    pub(crate) fn cpu_usage_us(&self) -> io::Result<u64> {
        let stat = std::fs::read_to_string(self.path.join("cpu.stat"))?;
        let usage = stat.lines().find_map(|line| line.strip_prefix("usage_usec "));
        Ok(usage.and_then(|usage| usage.trim().parse().ok()).unwrap_or(0))
    }

    /// Number of processes in it.
    pub(crate) fn process_count(&self) -> io::Result<u32> {
        Ok(std::fs::read_to_string(self.path.join("cgroup.procs"))?.lines().count() as u32)
    }
}
