//! What changes names and modes: making directories, moving, permission bits, removing.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use connectrpc::ConnectError;
use mainbrella_guest_protocol::limits::REMAINING_NAMED_MAX;
use mainbrella_guest_protocol::{fault, pb};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::{Owner, failed, failed_io, make_dirs, parent_of, path_of, stat, stat_in, tree_failed};

/// Longest time a change may take, whatever the host says.
const DEADLINE_MAX: Duration = Duration::from_secs(600);

fn until(deadline_ms: u64) -> Instant {
    Instant::now() + Duration::from_millis(deadline_ms).min(DEADLINE_MAX)
}

fn mode_of(bits: u32) -> Result<Mode, ConnectError> {
    if bits > 0o7777 {
        return Err(fault("mode", 0, "mode: permission bits, at most 07777"));
    }
    Ok(Mode::from_raw_mode(bits))
}

/// Makes a directory with exactly this mode, which belongs to `owner`.
pub(crate) fn make_dir(request: &pb::MakeDirRequest, owner: Option<Owner>) -> Result<pb::FileStat, ConnectError> {
    let mode = mode_of(request.mode)?;
    if request.recursive
        && let Some(parent) = path_of(&request.path)?.parent()
    {
        make_dirs(parent, owner).map_err(failed_io("parents"))?;
    }
    let (parent, name) = parent_of(&request.path)?;
    match rustix::fs::mkdirat(&parent, name.as_slice(), mode) {
        Ok(()) => {}
        Err(Errno::EXIST) if request.recursive => {
            let there = stat_in(parent.as_fd(), &name, AtFlags::empty()).map_err(failed("stat"))?;
            if there.r#type != pb::file_stat::Type::TYPE_DIRECTORY {
                return Err(failed("mkdir")(Errno::EXIST));
            }
            return Ok(there);
        }
        Err(errno) => return Err(failed("mkdir")(errno)),
    }
    // Again, past what the umask took away.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = rustix::fs::openat(&parent, name.as_slice(), flags, Mode::empty()).map_err(failed("mkdir"))?;
    Owner::give(owner, &made).map_err(failed("chown"))?;
    rustix::fs::fchmod(&made, mode).map_err(failed("chmod"))?;
    stat_in(parent.as_fd(), &name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed("stat"))
}

/// Changes permission bits. A link is followed: it has none of its own.
pub(crate) fn chmod(request: &pb::ChmodRequest) -> Result<pb::FileStat, ConnectError> {
    let mode = mode_of(request.mode)?;
    parent_of(&request.path)?;
    rustix::fs::chmodat(CWD, path_of(&request.path)?, mode, AtFlags::empty()).map_err(failed("chmod"))?;
    stat(&request.path, true)
}

/// Moves an entry to a name that is free.
pub(crate) fn rename(request: &pb::RenameRequest) -> Result<pb::FileStat, ConnectError> {
    let (from, source) = parent_of(&request.source)?;
    let (to, destination) = parent_of(&request.destination)?;
    let until = until(request.deadline_ms);
    let moved =
        rustix::fs::renameat_with(&from, source.as_slice(), &to, destination.as_slice(), RenameFlags::NOREPLACE);
    match moved {
        Ok(()) => {}
        // Another file system; or a directory of the template, which an overlay does not rename.
        Err(Errno::XDEV) => by_copy((&from, &source), (&to, &destination), until)?,
        // A file system that does not know the flag.
        Err(Errno::INVAL) if !within(&from, &source, &to) => {
            by_copy((&from, &source), (&to, &destination), until)?;
        }
        Err(errno) => return Err(failed("rename")(errno)),
    }
    stat_in(to.as_fd(), &destination, AtFlags::SYMLINK_NOFOLLOW).map_err(failed("stat"))
}

/// Whether `to` is the directory `source` or below it: then there is no such move.
fn within(from: &OwnedFd, source: &[u8], to: &OwnedFd) -> bool {
    let id = |s: rustix::fs::Stat| (s.st_dev, s.st_ino);
    let Ok(wanted) = rustix::fs::statat(from, source, AtFlags::SYMLINK_NOFOLLOW) else { return true };
    if FileType::from_raw_mode(wanted.st_mode) != FileType::Directory {
        return false;
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(mut at) = rustix::fs::openat(to, c".", flags, Mode::empty()) else { return true };
    loop {
        let Ok(here) = rustix::fs::fstat(&at) else { return true };
        if id(here) == id(wanted) {
            return true;
        }
        let Ok(above) = rustix::fs::openat(&at, c"..", flags, Mode::empty()) else { return true };
        match rustix::fs::fstat(&above) {
            Ok(up) if id(up) == id(here) => return false,
            Ok(_) => at = above,
            Err(_) => return true,
        }
    }
}

fn by_copy(from: (&OwnedFd, &[u8]), to: (&OwnedFd, &[u8]), until: Instant) -> Result<(), ConnectError> {
    if within(from.0, from.1, to.0) {
        return Err(failed("rename")(Errno::INVAL));
    }
    let source = (from.0.as_fd(), from.1);
    mainbrella_tree::copy(source, (to.0.as_fd(), to.1), until).map_err(tree_failed)?;
    // There is no way back: the copy is complete and stands under its name.
    let swept = mainbrella_tree::remove(source.0, source.1, true, Instant::now() + DEADLINE_MAX);
    match swept.map_err(tree_failed)? {
        left if left.remaining_count > 0 => {
            Err(fault("source-left", 0, "the destination is complete, but not all of the source could be removed"))
        }
        _ => Ok(()),
    }
}

/// Removes an entry, or a tree, and says what is left.
pub(crate) fn remove(request: &pb::RemoveRequest) -> Result<pb::RemoveResponse, ConnectError> {
    let (parent, name) = parent_of(&request.path)?;
    let until = until(request.deadline_ms);
    let done = mainbrella_tree::remove(parent.as_fd(), &name, request.recursive, until).map_err(tree_failed)?;
    let top = request.path.strip_suffix(b"/").unwrap_or(&request.path);
    let whole = |below: Vec<u8>| if below.is_empty() { top.to_vec() } else { [top, b"/", &below].concat() };
    // A path too deep to be named in a request cannot be named in the answer either.
    let named =
        done.remaining.into_iter().map(whole).filter(|p| p.len() <= mainbrella_guest_protocol::limits::PATH_MAX);
    Ok(pb::RemoveResponse {
        removed: done.removed,
        remaining: named.take(REMAINING_NAMED_MAX).collect(),
        remaining_count: done.remaining_count,
        errno: done.errno.map_or(0, Errno::raw_os_error),
        timed_out: done.timed_out,
        ..Default::default()
    })
}
