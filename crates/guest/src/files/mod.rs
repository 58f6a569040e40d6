//! Files of the machine. Paths are bytes and absolute; what a request names is checked here.

mod change;
mod list;
mod read;
mod tree;
mod watch;
mod write;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use connectrpc::ConnectError;
use mainbrella_guest_protocol::limits::PATH_MAX;
use mainbrella_guest_protocol::{fault, pb};
use mainbrella_tree::TreeError;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

pub(crate) use change::{chmod, make_dir, remove, rename};
pub(crate) use list::list;
pub(crate) use read::read;
pub(crate) use tree::{pack, unpack};
pub(crate) use watch::watch;
pub(crate) use write::write;

/// Whom what is made belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl Owner {
    fn ids(self) -> (Option<Uid>, Option<Gid>) {
        (Some(Uid::from_raw(self.uid)), Some(Gid::from_raw(self.gid)))
    }

    /// Gives a file or directory away that was just made.
    pub(crate) fn give(owner: Option<Self>, made: impl AsFd) -> Result<(), Errno> {
        let Some((uid, gid)) = owner.map(Self::ids) else { return Ok(()) };
        rustix::fs::fchown(made, uid, gid)
    }
}

/// Makes `path` and what is missing above it. What is there keeps its owner.
pub(crate) fn make_dirs(path: &Path, owner: Option<Owner>) -> std::io::Result<()> {
    let Some((uid, gid)) = owner.map(Owner::ids) else { return std::fs::create_dir_all(path) };
    let missing: Vec<_> = path.ancestors().take_while(|dir| !dir.is_dir()).collect();
    for dir in missing.into_iter().rev() {
        match std::fs::create_dir(dir) {
            Err(_) if dir.is_dir() => continue,
            other => other?,
        }
        rustix::fs::chownat(rustix::fs::CWD, dir, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
    }
    Ok(())
}

/// Checks a path from a request.
pub(crate) fn path_of(bytes: &[u8]) -> Result<PathBuf, ConnectError> {
    if bytes.first() != Some(&b'/') || bytes.len() > PATH_MAX || bytes.contains(&0) {
        return Err(fault("path", 0, "path: absolute, at most 4095 bytes, no NUL"));
    }
    Ok(Path::new(std::ffi::OsStr::from_bytes(bytes)).to_owned())
}

/// An error for a failed system call.
pub(crate) fn failed(stage: &'static str) -> impl Fn(Errno) -> ConnectError {
    move |errno| fault(stage, errno.raw_os_error(), std::io::Error::from(errno).to_string())
}

pub(crate) fn failed_io(stage: &'static str) -> impl Fn(std::io::Error) -> ConnectError {
    move |error| fault(stage, error.raw_os_error().unwrap_or(libc::EIO), error.to_string())
}

fn wire(stat: &rustix::fs::Stat, symlink_target: Vec<u8>) -> pb::FileStat {
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => pb::file_stat::Type::TYPE_FILE,
        FileType::Directory => pb::file_stat::Type::TYPE_DIRECTORY,
        FileType::Symlink => pb::file_stat::Type::TYPE_SYMLINK,
        _ => pb::file_stat::Type::TYPE_OTHER,
    };
    pb::FileStat {
        r#type: kind.into(),
        size: u64::try_from(stat.st_size).unwrap_or(0),
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime_s: stat.st_mtime,
        symlink_target,
        ..Default::default()
    }
}

/// What is at `path`.
pub(crate) fn stat(path: &[u8], follow: bool) -> Result<pb::FileStat, ConnectError> {
    let flags = if follow { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
    stat_in(rustix::fs::CWD, path_of(path)?.as_os_str().as_bytes(), flags).map_err(failed("stat"))
}

fn stat_in(at: BorrowedFd<'_>, path: &[u8], flags: AtFlags) -> Result<pb::FileStat, Errno> {
    let stat = rustix::fs::statat(at, path, flags)?;
    let target = match FileType::from_raw_mode(stat.st_mode) {
        FileType::Symlink => rustix::fs::readlinkat(at, path, Vec::new())?.into_bytes(),
        _ => Vec::new(),
    };
    Ok(wire(&stat, target))
}

/// The directory an entry is in, and its name there: the entry itself, also when it is a link.
fn parent_of(path: &[u8]) -> Result<(OwnedFd, Vec<u8>), ConnectError> {
    let path = path_of(path)?;
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(fault("root", 0, "path: the root, or ends with `..`"));
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let parent = rustix::fs::open(parent, flags, Mode::empty()).map_err(failed("open"))?;
    Ok((parent, name.as_bytes().to_vec()))
}

/// An error of a tree.
fn tree_failed(error: TreeError) -> ConnectError {
    fault(error.stage, error.errno.map_or(0, Errno::raw_os_error), error.text)
}
