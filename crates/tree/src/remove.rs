//! Removing, and saying what is left.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, openat2, statat, unlinkat};
use rustix::io::Errno;

use crate::error::TreeError;
use crate::walk::{Step, Walk};

/// Most entries that are named of those that are left.
pub const REMAINING_NAMED_MAX: usize = 100;

/// What a removal did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Removal {
    /// Entries that are gone.
    pub removed: u64,
    /// The first [`REMAINING_NAMED_MAX`] that are left: paths from the removed entry, which itself is empty.
    pub remaining: Vec<Vec<u8>>,
    /// How many are left and known of. What is below a directory that was not entered is not counted.
    pub remaining_count: u64,
    /// The first answer of the system that something could not be removed with.
    pub errno: Option<Errno>,
    /// Time ran out.
    pub timed_out: bool,
}

impl Removal {
    fn keep(&mut self, path: Vec<u8>, errno: Option<Errno>) {
        self.errno = self.errno.or(errno);
        self.remaining_count += 1;
        if self.remaining.len() < REMAINING_NAMED_MAX {
            self.remaining.push(path);
        }
    }

    /// Counts the outcome of removing `path`. A directory that is only not empty is left because of what is in it.
    fn count(&mut self, path: impl FnOnce() -> Vec<u8>, outcome: Result<(), Errno>) {
        match outcome {
            Ok(()) | Err(Errno::NOENT) => self.removed += 1,
            Err(Errno::NOTEMPTY) => self.keep(path(), None),
            Err(errno) => self.keep(path(), Some(errno)),
        }
    }
}

/// Removes the entry `name` of `dir`: a file, a link itself, an empty directory, or with `recursive` a whole tree.
/// Mounted file systems are not entered. Stops at `until`.
///
/// # Errors
/// When nothing could be tried. Once a tree is being removed, failures are told in the [`Removal`].
pub fn remove(dir: BorrowedFd<'_>, name: &[u8], recursive: bool, until: Instant) -> Result<Removal, TreeError> {
    let failed = TreeError::system("remove");
    let mut done = Removal::default();
    let stat = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).map_err(&failed)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        unlinkat(dir, name, AtFlags::empty()).map_err(failed)?;
        done.removed = 1;
        return Ok(done);
    }
    match unlinkat(dir, name, AtFlags::REMOVEDIR) {
        Ok(()) => {
            done.removed = 1;
            return Ok(done);
        }
        // An old file system may say EEXIST.
        Err(Errno::NOTEMPTY | Errno::EXIST) if recursive => {}
        Err(Errno::EXIST) => return Err(failed(Errno::NOTEMPTY)),
        Err(errno) => return Err(failed(errno)),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
    let top: OwnedFd = openat2(dir, name, flags, Mode::empty(), resolve).map_err(failed)?;
    let mut walk = Walk::new(top)?;
    loop {
        if Instant::now() >= until {
            done.timed_out = true;
            break;
        }
        match walk.next() {
            Ok(Some(Step::Entry(stat))) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {
                // Most directories of a tree are not empty; those that are need not be listed.
                match unlinkat(walk.dir(), walk.name(), AtFlags::REMOVEDIR) {
                    Err(Errno::NOTEMPTY | Errno::EXIST) => match walk.enter() {
                        Ok(()) => {}
                        Err(e) => done.keep(walk.path(), Some(e.errno.unwrap_or(Errno::OVERFLOW))),
                    },
                    outcome => done.count(|| walk.path(), outcome),
                }
            }
            Ok(Some(Step::Entry(_))) => {
                let outcome = unlinkat(walk.dir(), walk.name(), AtFlags::empty());
                done.count(|| walk.path(), outcome);
            }
            Ok(Some(Step::Left)) => {
                let outcome = unlinkat(walk.dir(), walk.name(), AtFlags::REMOVEDIR);
                done.count(|| walk.path(), outcome);
            }
            Ok(None) => {
                let outcome = unlinkat(dir, name, AtFlags::REMOVEDIR);
                done.count(Vec::new, outcome);
                return Ok(done);
            }
            Err(e) => {
                done.errno = done.errno.or(Some(e.errno.unwrap_or(Errno::BUSY)));
                break;
            }
        }
    }
    for path in walk.unseen() {
        done.keep(path, None);
    }
    done.keep(Vec::new(), None);
    Ok(done)
}
