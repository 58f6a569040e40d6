//! A tree as a tar stream, pulled piece by piece.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::fd::BorrowedFd;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, fstat, openat, readlinkat, statat};
use rustix::io::Errno;

use crate::error::TreeError;
use crate::header::{self, BLOCK, Header, Kind, padding};
use crate::walk::{Step, Walk};

/// Files with several names that are remembered; further ones are packed once for each name.
const LINKED_FILES_MAX: usize = 65_536;

/// How a tree is packed.
#[derive(Debug, Clone, Default)]
pub struct PackOptions {
    /// Follow the path when it is a link. Links inside the tree are packed as links.
    pub follow: bool,
    /// Name of the packed entry in the archive. Empty: what is in a directory is packed without the directory's own
    /// name, and a file under its own.
    pub prefix: Vec<u8>,
    /// Fail on what an archive cannot hold or the walk would leave out: devices, FIFOs, sockets, mounted file systems.
    /// Otherwise they are left out; of a mount point the directory remains.
    pub strict: bool,
}

#[derive(Debug)]
struct Content {
    file: File,
    size: u64,
    left: u64,
}

/// A tree on its way into an archive. Entries come in the order of their names' bytes, directories before what is in
/// them, files with several names as hard links after the first.
#[derive(Debug)]
pub struct Packer {
    options: PackOptions,
    walk: Option<Walk>,
    content: Option<Content>,
    links: HashMap<(u64, u64), Vec<u8>>,
    out: Vec<u8>,
    ended: bool,
}

fn describe(stat: &Stat, kind: Kind, path: Vec<u8>) -> Header {
    Header {
        kind,
        path,
        link: Vec::new(),
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        size: 0,
        mtime: stat.st_mtime,
    }
}

impl Packer {
    /// Opens what is at `path`, seen from `at`.
    ///
    /// # Errors
    /// When it is not there, cannot be read, or is neither file, directory nor link.
    pub fn open(at: BorrowedFd<'_>, path: &[u8], options: PackOptions) -> Result<Self, TreeError> {
        let failed = TreeError::system("open");
        let mut packer =
            Self { options, walk: None, content: None, links: HashMap::new(), out: Vec::new(), ended: false };
        let look = if packer.options.follow { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
        let stat = statat(at, path, look).map_err(&failed)?;
        let mut name = packer.options.prefix.clone();
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            let mut flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            flags.set(OFlags::NOFOLLOW, !packer.options.follow);
            let dir = openat(at, path, flags, Mode::empty()).map_err(&failed)?;
            let stat = fstat(&dir).map_err(&failed)?;
            name.extend_from_slice(if name.is_empty() { b"./" } else { b"/" });
            header::write(&mut packer.out, &describe(&stat, Kind::Directory, name));
            packer.walk = Some(Walk::new(dir)?);
            return Ok(packer);
        }
        if name.is_empty() {
            name = path.rsplit(|b| *b == b'/').find(|p| !p.is_empty()).unwrap_or(b"file").to_vec();
        }
        if !packer.add(at, path, &stat, name, packer.options.follow)? {
            return Err(TreeError::rule("not-a-file", "neither a file nor a directory"));
        }
        Ok(packer)
    }

    /// The next piece, about `most` bytes; `None` when the archive is complete.
    ///
    /// # Errors
    /// When something cannot be read, or a file became shorter than its entry says. The archive is then broken.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self, most: usize) -> Result<Option<Vec<u8>>, TreeError> {
        while self.out.len() < most {
            if self.content.is_some() {
                self.read(most)?;
            } else if self.ended {
                break;
            } else if !self.step()? {
                self.out.resize(self.out.len() + 2 * BLOCK, 0);
                self.ended = true;
            }
        }
        Ok((!self.out.is_empty()).then(|| std::mem::take(&mut self.out)))
    }

    fn read(&mut self, most: usize) -> Result<(), TreeError> {
        let Some(content) = &mut self.content else { return Ok(()) };
        let room = most.saturating_sub(self.out.len()) as u64;
        let want = content.left.min(room) as usize;
        let have = self.out.len();
        self.out.resize(have + want, 0);
        let mut filled = 0;
        while filled < want {
            match content.file.read(&mut self.out[have + filled..]) {
                Ok(0) => return Err(TreeError::rule("changed", "a file became shorter while it was read")),
                Ok(n) => filled += n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => {
                    let errno = e.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error);
                    return Err(TreeError::system("read")(errno));
                }
            }
        }
        content.left -= want as u64;
        if content.left == 0 {
            let pad = padding(content.size);
            self.out.resize(self.out.len() + pad, 0);
            self.content = None;
        }
        Ok(())
    }

    /// Goes on by an entry; false at the end.
    fn step(&mut self) -> Result<bool, TreeError> {
        let Some(mut walk) = self.walk.take() else { return Ok(false) };
        let going = match walk.next()? {
            None => return Ok(false),
            Some(Step::Left) => true,
            Some(Step::Entry(stat)) => {
                let mut path = self.options.prefix.clone();
                if !path.is_empty() {
                    path.push(b'/');
                }
                path.extend_from_slice(&walk.path());
                if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                    path.push(b'/');
                    header::write(&mut self.out, &describe(&stat, Kind::Directory, path));
                    match walk.enter() {
                        Ok(()) => {}
                        Err(e) if e.errno == Some(Errno::XDEV) && !self.options.strict => {}
                        Err(e) if e.errno == Some(Errno::NOENT) => {}
                        Err(e) => return Err(e),
                    }
                } else {
                    let name = walk.name().to_vec();
                    if !self.add(walk.dir(), &name, &stat, path, false)? && self.options.strict {
                        return Err(TreeError::rule("not-a-file", "a device, FIFO or socket"));
                    }
                }
                true
            }
        };
        self.walk = Some(walk);
        Ok(going)
    }

    /// Adds what is no directory. Says whether it can be in an archive; what has vanished counts as if it were.
    fn add(
        &mut self,
        at: BorrowedFd<'_>,
        name: &[u8],
        stat: &Stat,
        path: Vec<u8>,
        follow: bool,
    ) -> Result<bool, TreeError> {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Symlink => {
                let link = match readlinkat(at, name, Vec::new()) {
                    Ok(link) => link.into_bytes(),
                    Err(Errno::NOENT | Errno::INVAL) => return Ok(true),
                    Err(errno) => return Err(TreeError::system("read")(errno)),
                };
                header::write(&mut self.out, &Header { link, ..describe(stat, Kind::Symlink, path) });
            }
            FileType::RegularFile => {
                let mut flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
                flags.set(OFlags::NOFOLLOW, !follow);
                let file = match openat(at, name, flags, Mode::empty()) {
                    Ok(fd) => fd,
                    Err(Errno::NOENT | Errno::LOOP) => return Ok(true),
                    Err(errno) => return Err(TreeError::system("open")(errno)),
                };
                let stat = fstat(&file).map_err(TreeError::system("stat"))?;
                if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                    return Ok(true);
                }
                let id = (stat.st_dev, stat.st_ino);
                if let Some(first) = self.links.get(&id) {
                    let link = first.clone();
                    header::write(&mut self.out, &Header { link, ..describe(&stat, Kind::HardLink, path) });
                    return Ok(true);
                }
                if stat.st_nlink > 1 && self.links.len() < LINKED_FILES_MAX {
                    self.links.insert(id, path.clone());
                }
                let size = u64::try_from(stat.st_size).unwrap_or(0);
                header::write(&mut self.out, &Header { size, ..describe(&stat, Kind::File, path) });
                if size > 0 {
                    self.content = Some(Content { file: File::from(file), size, left: size });
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}
