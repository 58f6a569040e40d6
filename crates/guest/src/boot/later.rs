//! A root whose disk is mounted after the agent began to serve.

use std::path::{Path, PathBuf};

use super::{BootError, root, system};
use crate::Defaults;

/// The word on the kernel's command line that asks for it.
const LATER: &str = "mainbrella.disk=later";

/// Whether the disk is to be mounted only when the machine is told who it is.
pub(super) fn is_asked_for() -> bool {
    std::fs::read_to_string("/proc/cmdline").is_ok_and(|line| line.split_ascii_whitespace().any(|word| word == LATER))
}

/// A root that is not entered yet: the template's image is mounted, the machine's disk is not.
#[derive(Debug)]
pub struct PendingRoot {
    disk: Option<PathBuf>,
}

impl PendingRoot {
    pub(super) fn new(disk: Option<PathBuf>) -> Self {
        Self { disk }
    }

    /// Mounts the disk and makes the root ours, for every thread of this process; gives what it says of commands. Blocks.
    ///
    /// # Errors
    /// When the disk holds no file system that can be mounted. The machine is of no use then.
    pub fn enter(self) -> Result<Defaults, BootError> {
        root::switch(self.disk.as_deref())?;
        root::mount_late()?;
        let defaults = Defaults::of(Path::new("/"));
        system::prepare(&defaults);
        Ok(defaults)
    }
}
