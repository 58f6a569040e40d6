//! Writing files: whole or not at all. Content goes to a temporary name beside the target and takes the target's
//! name when its last byte is there.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use connectrpc::{ConnectError, InboundStream};
use futures::StreamExt;
use mainbrella_guest_protocol::limits::CHUNK_BYTES_MAX;
use mainbrella_guest_protocol::{fault, pb};
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, RenameFlags, Uid};
use rustix::io::Errno;

use super::{Owner, failed, failed_io, make_dirs, path_of};
use crate::service::blocking;

/// Links followed to a target before it counts as a circle.
const LINKS_MAX: usize = 40;

/// Takes a file from `requests`, which belongs to `owner` unless it replaces one; gives its size.
pub(crate) async fn write(
    mut requests: InboundStream<pb::WriteFileRequest>,
    owner: Option<Owner>,
) -> Result<u64, ConnectError> {
    let first = match requests.next().await {
        Some(first) => first?.to_owned_message(),
        None => return Err(fault("start", 0, "the first message says what to write")),
    };
    let Some(start) = first.start.into_option() else {
        return Err(fault("start", 0, "the first message says what to write"));
    };
    let mut draft = blocking(move || Draft::begin(&start, owner)).await?;
    let (mut data, mut finish) = (Bytes::from(first.data), first.finish);
    loop {
        if data.len() > CHUNK_BYTES_MAX {
            return Err(fault("data", 0, "data: at most 128 KiB in one message"));
        }
        // The draft travels: should the stream break while it is out, its drop removes the temporary file.
        draft = blocking(move || draft.append(&data)).await?;
        if finish {
            return blocking(move || draft.finish()).await;
        }
        match requests.next().await {
            Some(message) => {
                let message = message?.to_owned_message();
                (data, finish) = (Bytes::from(message.data), message.finish);
            }
            None => return Err(ConnectError::aborted("the content ended without its last message")),
        }
    }
}

/// A file on its way.
struct Draft {
    directory: OwnedFd,
    /// Its temporary name; `None` once it has the real one.
    temporary: Option<PathBuf>,
    name: PathBuf,
    file: File,
    exclusive: bool,
    size: u64,
}

impl Drop for Draft {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            let _ = rustix::fs::unlinkat(&self.directory, temporary, AtFlags::empty());
        }
    }
}

impl Draft {
    fn begin(start: &pb::WriteFileStart, owner: Option<Owner>) -> Result<Self, ConnectError> {
        let mut path = path_of(&start.path)?;
        if start.mode > 0o7777 {
            return Err(fault("mode", 0, "mode: permission bits, at most 07777"));
        }
        if start.path.ends_with(b"/") || path.file_name().is_none() {
            return Err(fault("path", Errno::ISDIR.raw_os_error(), "path: names a directory"));
        }
        if start.create_parents
            && let Some(parent) = path.parent()
        {
            make_dirs(parent, owner).map_err(failed_io("parents"))?;
        }
        let mut replaced = None;
        for links in 0.. {
            match rustix::fs::lstat(&path) {
                Err(Errno::NOENT) => break,
                Err(errno) => return Err(failed("stat")(errno)),
                Ok(_) if start.exclusive => return Err(failed("open")(Errno::EXIST)),
                Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
                    FileType::RegularFile => {
                        replaced = Some(stat);
                        break;
                    }
                    FileType::Directory => return Err(failed("open")(Errno::ISDIR)),
                    FileType::Symlink if links < LINKS_MAX => path = link_target(&path)?,
                    FileType::Symlink => return Err(failed("open")(Errno::LOOP)),
                    _ => return Err(fault("not-a-file", Errno::NXIO.raw_os_error(), "a device, socket or FIFO")),
                },
            }
        }
        let name = path.file_name().map(PathBuf::from).ok_or_else(|| failed("open")(Errno::ISDIR))?;
        let parent = path.parent().unwrap_or(Path::new("/"));
        let flags = OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC;
        let directory = rustix::fs::open(parent, flags, Mode::empty()).map_err(failed("open"))?;
        // A name the rename would refuse is refused before the content is sent.
        if name.as_os_str().len() > 255 {
            return Err(failed("open")(Errno::NAMETOOLONG));
        }
        let (file, temporary) = make_temporary(&directory)?;
        let draft = Self { directory, temporary: Some(temporary), name, file, exclusive: start.exclusive, size: 0 };
        let mode = match (&replaced, start.mode) {
            (_, mode @ 1..) => mode,
            (Some(stat), 0) => stat.st_mode & 0o7777,
            (None, 0) => 0o644,
        };
        if let Some(stat) = replaced {
            let (uid, gid) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
            rustix::fs::fchown(&draft.file, Some(uid), Some(gid)).map_err(failed("chown"))?;
        } else {
            Owner::give(owner, &draft.file).map_err(failed("chown"))?;
        }
        rustix::fs::fchmod(&draft.file, Mode::from_raw_mode(mode)).map_err(failed("chmod"))?;
        Ok(draft)
    }

    fn append(mut self, data: &[u8]) -> Result<Self, ConnectError> {
        self.file.write_all(data).map_err(failed_io("write"))?;
        self.size += data.len() as u64;
        Ok(self)
    }

    fn finish(mut self) -> Result<u64, ConnectError> {
        let Some(temporary) = self.temporary.clone() else { return Ok(self.size) };
        let flags = if self.exclusive { RenameFlags::NOREPLACE } else { RenameFlags::empty() };
        let renamed = match rustix::fs::renameat_with(&self.directory, &temporary, &self.directory, &self.name, flags) {
            // Not every file system knows the flag; a hard link is as exclusive.
            Err(Errno::INVAL) if self.exclusive => {
                rustix::fs::linkat(&self.directory, &temporary, &self.directory, &self.name, AtFlags::empty())
                    .and_then(|()| rustix::fs::unlinkat(&self.directory, &temporary, AtFlags::empty()))
            }
            other => other,
        };
        renamed.map_err(failed("rename"))?;
        self.temporary = None;
        Ok(self.size)
    }
}

/// Where a symbolic link leads, seen from where it stands.
fn link_target(path: &Path) -> Result<PathBuf, ConnectError> {
    let target = rustix::fs::readlink(path, Vec::new()).map_err(failed("stat"))?.into_bytes();
    let target = PathBuf::from(std::ffi::OsString::from_vec(target));
    let target = path.parent().unwrap_or(Path::new("/")).join(target);
    if target.as_os_str().as_bytes().ends_with(b"/") || target.file_name().is_none() {
        return Err(failed("open")(Errno::ISDIR));
    }
    Ok(target)
}

fn make_temporary(directory: &OwnedFd) -> Result<(File, PathBuf), ConnectError> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    loop {
        let mut random = [0u8; 8];
        getrandom::fill(&mut random).map_err(|_| fault("random", libc::EIO, "no random bytes"))?;
        let name = PathBuf::from(format!(".mainbrella-{:016x}.tmp", u64::from_ne_bytes(random)));
        match rustix::fs::openat(directory, &name, flags, Mode::from_raw_mode(0o600)) {
            Ok(fd) => return Ok((File::from(fd), name)),
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(failed("open")(errno)),
        }
    }
}
