//! The context of a build: an archive of a stranger, unpacked into a folder of the build's own.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mainbrella_tree::{Owners, TreeError, UnpackOptions, Unpacked, Unpacker};
use mainbrella_types::limits::{CONTEXT_BYTES_MAX, CONTEXT_ENTRIES_MAX};

const FOLDER: &str = "context";
const REMOVAL: Duration = Duration::from_secs(600);

/// Why a context was not taken.
#[derive(Debug, thiserror::Error)]
pub enum ContextError {
    /// It is more than may be.
    #[error("the context has more than {max} {what}; leave out what is not needed, with .dockerignore")]
    TooLarge {
        /// Of what.
        what: &'static str,
        /// How many there may be.
        max: u64,
    },
    /// It is no archive that can be taken.
    #[error("the context is not taken: {0}")]
    Archive(String),
    /// The disk is full.
    #[error("the host has no space left for the context")]
    Full,
    /// The system refused.
    #[error("{0}")]
    System(String),
}

impl From<TreeError> for ContextError {
    fn from(e: TreeError) -> Self {
        match e.errno {
            Some(rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT) => Self::Full,
            // A name that is a file and a folder at once, or too long: what the archive says cannot be.
            Some(
                rustix::io::Errno::NOTDIR
                | rustix::io::Errno::ISDIR
                | rustix::io::Errno::EXIST
                | rustix::io::Errno::NOTEMPTY
                | rustix::io::Errno::NAMETOOLONG
                | rustix::io::Errno::NOENT
                | rustix::io::Errno::LOOP
                | rustix::io::Errno::PERM,
            )
            | None => Self::Archive(e.text),
            Some(_) => Self::System(e.to_string()),
        }
    }
}

pub(crate) fn folder(build: &Path) -> PathBuf {
    build.join(FOLDER)
}

/// Removes a context, if there is one. Blocks.
pub(crate) fn remove(build: &Path) -> io::Result<()> {
    let dir = File::open(build)?;
    match mainbrella_tree::remove(dir.as_fd(), FOLDER.as_bytes(), true, Instant::now() + REMOVAL) {
        Ok(removal) if removal.remaining_count == 0 => Ok(()),
        Ok(removal) => Err(removal.errno.map_or_else(|| io::Error::other("it takes too long"), Into::into)),
        Err(e) if e.errno == Some(rustix::io::Errno::NOENT) => Ok(()),
        Err(e) => Err(e.errno.map_or_else(|| io::Error::other(e.text), Into::into)),
    }
}

/// A context on its way in.
#[derive(Debug)]
pub(crate) struct Unpacking {
    unpacker: Unpacker,
    entries_max: u64,
    bytes_max: u64,
}

impl Unpacking {
    /// Begins with an empty folder. Blocks.
    pub(crate) fn begin(build: &Path) -> Result<Self, ContextError> {
        let system = |e: io::Error| ContextError::System(e.to_string());
        remove(build).map_err(system)?;
        fs::create_dir(folder(build)).map_err(system)?;
        let root = File::open(folder(build)).map_err(system)?;
        let options = UnpackOptions { owners: Owners::Unpacker, mode_mask: 0o7777, own_root: false };
        let unpacker = Unpacker::new(root.into(), options);
        Ok(Self { unpacker, entries_max: CONTEXT_ENTRIES_MAX as u64, bytes_max: CONTEXT_BYTES_MAX })
    }

    /// Takes the next bytes of the archive. Blocks.
    pub(crate) fn push(&mut self, data: &[u8]) -> Result<(), ContextError> {
        self.unpacker.push(data)?;
        let Unpacked { entries, bytes, skipped } = self.unpacker.so_far();
        if entries + skipped > self.entries_max {
            return Err(ContextError::TooLarge { what: "entries", max: self.entries_max });
        }
        if bytes > self.bytes_max {
            return Err(ContextError::TooLarge { what: "bytes", max: self.bytes_max });
        }
        Ok(())
    }

    /// The archive is over. Blocks.
    pub(crate) fn finish(self) -> Result<(), ContextError> {
        self.unpacker.finish()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainbrella_tree::{Archive, Meta};

    const META: Meta = Meta { mode: 0o644, uid: 0, gid: 0, mtime: 0 };

    fn unpack(fill: impl FnOnce(&mut Archive)) -> (tempfile::TempDir, Result<(), ContextError>) {
        let dir = tempfile::tempdir().expect("a folder");
        let mut archive = Archive::default();
        fill(&mut archive);
        let bytes = archive.take();
        let mut unpacking = Unpacking::begin(dir.path()).expect("begun");
        (unpacking.entries_max, unpacking.bytes_max) = (10, 1000);
        let pushed = bytes.chunks(100).try_for_each(|piece| unpacking.push(piece));
        let done = pushed.and_then(|()| unpacking.finish());
        (dir, done)
    }

    fn file(archive: &mut Archive, path: &str, size: u64) {
        archive.file(path, size, META);
        archive.content(&vec![b'x'; size as usize]);
        archive.pad(size);
    }

    #[test]
    fn what_is_sent_is_there_and_nothing_else() {
        let (dir, done) = unpack(|a| {
            a.directory("src", Meta { mode: 0o755, ..META });
            file(a, "src/app.py", 10);
            a.end();
        });
        done.expect("taken");
        assert_eq!(fs::read(dir.path().join("context/src/app.py")).expect("read").len(), 10);
        remove(dir.path()).expect("removed");
        assert!(!dir.path().join("context").exists());
        remove(dir.path()).expect("nothing to remove");
    }

    #[test]
    fn what_leads_out_or_is_too_much_is_refused() {
        let (dir, out) = unpack(|a| {
            file(a, "../evil", 1);
            a.end();
        });
        assert!(matches!(out, Err(ContextError::Archive(_))), "{out:?}");
        assert!(!dir.path().join("evil").exists());
        let (_dir, link) = unpack(|a| {
            a.link("way", "/tmp", META);
            file(a, "way/evil", 1);
            a.end();
        });
        assert!(matches!(link, Err(ContextError::Archive(_))), "{link:?}");
        let (_dir, many) = unpack(|a| {
            (0..11).for_each(|n| file(a, &n.to_string(), 0));
            a.end();
        });
        assert!(matches!(many, Err(ContextError::TooLarge { what: "entries", .. })), "{many:?}");
        let (_dir, large) = unpack(|a| {
            file(a, "large", 1001);
            a.end();
        });
        assert!(matches!(large, Err(ContextError::TooLarge { what: "bytes", .. })), "{large:?}");
        let (_dir, cut) = unpack(|a| file(a, "half", 5));
        assert!(matches!(cut, Err(ContextError::Archive(_))), "{cut:?}");
    }
}
