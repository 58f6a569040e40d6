//! One service a data directory, by `flock` on `service.lock`. The kernel lets go of it when the process ends, however it ends.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Holds the data directory until dropped.
#[derive(Debug)]
pub struct DataDirLock {
    _file: File,
}

/// Why the data directory was not taken.
#[derive(Debug)]
pub enum LockError {
    /// Another service has it.
    Held,
    /// The file could not be opened or locked.
    Io(io::Error),
}

impl DataDirLock {
    /// Takes the directory, without waiting.
    ///
    /// # Errors
    /// [`LockError::Held`] when another service has it.
    pub fn take(data_dir: &Path) -> Result<Self, LockError> {
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(data_dir.join("service.lock"))
            .map_err(LockError::Io)?;
        match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { _file: file }),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(LockError::Held),
            Err(e) => Err(LockError::Io(e.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_taken_once_and_free_again_after() {
        let dir = tempfile::tempdir().expect("temp dir");
        let first = DataDirLock::take(dir.path()).expect("free");
        assert!(matches!(DataDirLock::take(dir.path()), Err(LockError::Held)));
        drop(first);
        DataDirLock::take(dir.path()).expect("free again");
        assert!(matches!(DataDirLock::take(&dir.path().join("missing")), Err(LockError::Io(_))));
    }
}
