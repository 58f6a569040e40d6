//! A copy of a tree that appears whole or not at all, for a move from one file system to another.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags, mkdirat, openat, renameat_with, unlinkat};
use rustix::io::Errno;

use crate::error::TreeError;
use crate::pack::{PackOptions, Packer};
use crate::remove::remove;
use crate::unpack::{Owners, UnpackOptions, Unpacker};

const PIECE: usize = 64 * 1024;
const INNER: &[u8] = b"entry";

/// Copies the entry `from.1` of `from.0` to the name `to.1` in `to.0`, which must not exist: content, links, modes, times
/// and owners. It is made under another name in `to.0` and renamed when it is complete.
///
/// # Errors
/// When `until` passes first, the system refuses, or the tree holds what cannot be copied (devices, FIFOs, sockets,
/// mounted file systems). Nothing of the copy is left then.
pub fn copy(from: (BorrowedFd<'_>, &[u8]), to: (BorrowedFd<'_>, &[u8]), until: Instant) -> Result<(), TreeError> {
    let failed = TreeError::system("copy");
    let temporary = make_directory(to.0)?;
    let copied = fill(from, to.0, &temporary, until).and_then(|()| {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let dir = openat(to.0, temporary.as_slice(), flags, Mode::empty()).map_err(&failed)?;
        match renameat_with(&dir, INNER, to.0, to.1, RenameFlags::NOREPLACE) {
            Err(Errno::XDEV) => Err(failed(Errno::BUSY)),
            other => other.map_err(&failed),
        }
    });
    let swept = match &copied {
        Ok(()) => unlinkat(to.0, temporary.as_slice(), AtFlags::REMOVEDIR).map_err(&failed),
        // What is half made goes, however long that takes.
        Err(_) => remove(to.0, &temporary, true, Instant::now() + std::time::Duration::from_secs(3600)).map(drop),
    };
    copied.and(swept)
}

fn make_directory(at: BorrowedFd<'_>) -> Result<Vec<u8>, TreeError> {
    loop {
        let mut random = [0u8; 8];
        getrandom::fill(&mut random).map_err(|_| TreeError::rule("random", "no random bytes"))?;
        let name = format!(".mainbrella-{:016x}.tmp", u64::from_ne_bytes(random)).into_bytes();
        match mkdirat(at, name.as_slice(), Mode::from_raw_mode(0o700)) {
            Ok(()) => return Ok(name),
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(TreeError::system("copy")(errno)),
        }
    }
}

fn fill(from: (BorrowedFd<'_>, &[u8]), at: BorrowedFd<'_>, temporary: &[u8], until: Instant) -> Result<(), TreeError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let root = openat(at, temporary, flags, Mode::empty()).map_err(TreeError::system("copy"))?;
    let options = PackOptions { follow: false, prefix: INNER.to_vec(), strict: true };
    let mut packer = Packer::open(from.0, from.1, options)?;
    let mut unpacker =
        Unpacker::new(root, UnpackOptions { owners: Owners::Archive, mode_mask: 0o7777, own_root: false });
    while let Some(piece) = packer.next(PIECE)? {
        if Instant::now() >= until {
            return Err(TreeError::system("time")(Errno::TIMEDOUT));
        }
        unpacker.push(&piece)?;
    }
    unpacker.finish().map(drop)
}
