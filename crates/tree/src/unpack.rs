//! A tar stream made into a tree, pushed in whatever pieces it comes in.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{
    AtFlags, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, chownat, fchmod, fchown, futimens, linkat,
    mkdirat, openat, openat2, statat, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;

use crate::error::TreeError;
use crate::header::{self, BLOCK, Header, Kind, META_MAX, padding};
use crate::name::safe_parts;

/// Whom the entries of a tree belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owners {
    /// Whoever unpacks.
    Unpacker,
    /// The user and group numbers the archive names.
    Archive,
    /// This user and group, by number. Directories that were there keep theirs.
    All(u32, u32),
}

/// How a tree is made.
#[derive(Debug, Clone, Copy)]
pub struct UnpackOptions {
    /// Whom entries belong to.
    pub owners: Owners,
    /// Permission bits that are kept of those the archive names.
    pub mode_mask: u32,
    /// Give the root the mode and time the archive has for it: for a root that was made for it.
    pub own_root: bool,
}

/// What was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Unpacked {
    /// Files, directories and links.
    pub entries: u64,
    /// Content of files.
    pub bytes: u64,
    /// Entries left out: devices, FIFOs, and kinds that are not known.
    pub skipped: u64,
}

#[derive(Debug)]
enum State {
    /// Collects a header block.
    Header,
    /// Collects an extended header.
    Meta(Kind, u64),
    /// Writes a file.
    Content(Draft, u64),
    /// Passes over this many bytes.
    Skip(u64),
    /// The archive has ended; what follows is padding.
    Ended,
}

/// A file on its way; gone when it is dropped before it is whole.
#[derive(Debug)]
struct Draft {
    file: File,
    parent: Arc<OwnedFd>,
    name: Vec<u8>,
    header: Header,
    whole: bool,
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.whole {
            let _ = unlinkat(&*self.parent, self.name.as_slice(), AtFlags::empty());
        }
    }
}

/// A directory whose mode and time are set when everything in it is there.
#[derive(Debug)]
struct Later {
    path: Vec<u8>,
    header: Header,
    /// Whether it was not there before.
    made: bool,
}

/// A tree on its way out of an archive.
#[derive(Debug)]
pub struct Unpacker {
    root: Arc<OwnedFd>,
    options: UnpackOptions,
    state: State,
    block: Vec<u8>,
    meta: Vec<u8>,
    global: Vec<u8>,
    local: Vec<u8>,
    long_name: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
    /// The directory the last entry went to.
    last: Option<(Vec<u8>, Arc<OwnedFd>)>,
    /// Directories entered and not yet left, outermost first.
    later: Vec<Later>,
    done: Unpacked,
}

const BENEATH: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_MAGICLINKS);
const PLACE: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

fn failed(errno: Errno) -> TreeError {
    TreeError::system("unpack")(errno)
}

fn named(e: crate::name::Unsafe) -> TreeError {
    TreeError::rule("name", e.to_string())
}

/// A refusal to resolve a name means that a link leads out of the tree.
fn resolved(errno: Errno) -> TreeError {
    match errno {
        Errno::XDEV => TreeError::rule("link", "an entry of the archive would go through a link out of the tree"),
        other => failed(other),
    }
}

fn times(mtime: i64) -> Timestamps {
    let time = Timespec { tv_sec: mtime, tv_nsec: 0 };
    Timestamps { last_access: time, last_modification: time }
}

impl Unpacker {
    /// Unpacks below `root`.
    #[must_use]
    pub fn new(root: OwnedFd, options: UnpackOptions) -> Self {
        Self {
            root: Arc::new(root),
            options,
            state: State::Header,
            block: Vec::with_capacity(BLOCK),
            meta: Vec::new(),
            global: Vec::new(),
            local: Vec::new(),
            long_name: None,
            long_link: None,
            last: None,
            later: Vec::new(),
            done: Unpacked::default(),
        }
    }

    /// What was made so far.
    #[must_use]
    pub fn so_far(&self) -> Unpacked {
        self.done
    }

    /// Takes the next bytes of the archive.
    ///
    /// # Errors
    /// When the archive is malformed or names something outside the tree, or the system refuses. What was made before
    /// stays; a file that was not whole does not.
    pub fn push(&mut self, mut data: &[u8]) -> Result<(), TreeError> {
        while !data.is_empty() {
            match std::mem::replace(&mut self.state, State::Header) {
                State::Header => {
                    let n = data.len().min(BLOCK - self.block.len());
                    self.block.extend_from_slice(&data[..n]);
                    data = &data[n..];
                    if self.block.len() == BLOCK {
                        let mut block = [0u8; BLOCK];
                        block.copy_from_slice(&self.block);
                        self.block.clear();
                        self.state = match header::read(&block)? {
                            None => State::Ended,
                            Some(header) => self.begin(header)?,
                        };
                    }
                }
                State::Meta(kind, left) => {
                    let n = data.len().min(left as usize);
                    self.meta.extend_from_slice(&data[..n]);
                    data = &data[n..];
                    let left = left - n as u64;
                    self.state = if left > 0 { State::Meta(kind, left) } else { self.meta(kind) };
                }
                State::Content(mut draft, left) => {
                    let n = data.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                    draft
                        .file
                        .write_all(&data[..n])
                        .map_err(|e| failed(e.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)))?;
                    data = &data[n..];
                    self.done.bytes += n as u64;
                    let left = left - n as u64;
                    self.state = if left > 0 { State::Content(draft, left) } else { self.seal(draft)? };
                }
                State::Skip(left) => {
                    let n = data.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                    data = &data[n..];
                    if left > n as u64 {
                        self.state = State::Skip(left - n as u64);
                    }
                }
                State::Ended => {
                    self.state = State::Ended;
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// The archive is over: gives directories their modes and times.
    ///
    /// # Errors
    /// When it has no end mark: it was cut short.
    pub fn finish(mut self) -> Result<Unpacked, TreeError> {
        if !matches!(self.state, State::Ended) {
            return Err(TreeError::rule("archive", "the archive ended before its end mark"));
        }
        while let Some(dir) = self.later.pop() {
            self.settle(&dir)?;
        }
        Ok(self.done)
    }

    /// An extended header is complete.
    fn meta(&mut self, kind: Kind) -> State {
        let size = self.meta.len() as u64;
        let body = std::mem::take(&mut self.meta);
        let text = |body: Vec<u8>| body.into_iter().take_while(|b| *b != 0).collect::<Vec<u8>>();
        match kind {
            Kind::Pax => self.local = body,
            Kind::PaxGlobal => self.global = body,
            Kind::LongLink => self.long_link = Some(text(body)),
            _ => self.long_name = Some(text(body)),
        }
        Self::skip(padding(size) as u64)
    }

    fn skip(n: u64) -> State {
        if n == 0 { State::Header } else { State::Skip(n) }
    }

    fn begin(&mut self, mut header: Header) -> Result<State, TreeError> {
        if matches!(header.kind, Kind::Pax | Kind::PaxGlobal | Kind::LongName | Kind::LongLink) {
            if header.size > META_MAX {
                return Err(TreeError::rule("archive", "an extended header of the archive is too large"));
            }
            self.meta.clear();
            if header.size == 0 {
                return Ok(self.meta(header.kind));
            }
            return Ok(State::Meta(header.kind, header.size));
        }
        header::apply(&self.global, &mut header)?;
        header::apply(&std::mem::take(&mut self.local), &mut header)?;
        if let Some(name) = self.long_name.take() {
            header.path = name;
        }
        if let Some(link) = self.long_link.take() {
            header.link = link;
        }
        header.mode &= self.options.mode_mask;
        match header.kind {
            Kind::Sparse => {
                return Err(TreeError::rule(
                    "archive",
                    "the archive holds files with holes in a form that is not taken",
                ));
            }
            Kind::Device => {
                self.done.skipped += 1;
                return Ok(State::Header);
            }
            Kind::Other => {
                self.done.skipped += 1;
                return Ok(Self::skip(header.size.saturating_add(padding(header.size) as u64)));
            }
            _ => {}
        }
        let path = std::mem::take(&mut header.path);
        let parts = safe_parts(&path).map_err(named)?;
        let Some((name, above)) = parts.split_last() else {
            if header.kind != Kind::Directory {
                return Err(TreeError::rule("name", "an entry of the archive has no name"));
            }
            self.done.entries += 1;
            if self.options.own_root && self.later.is_empty() {
                self.later.push(Later { path: Vec::new(), header, made: true });
            }
            return Ok(State::Header);
        };
        let place = above.join(&b'/');
        self.leave(&place)?;
        let parent = self.place(above, &place)?;
        self.done.entries += 1;
        match header.kind {
            Kind::Directory => {
                self.directory(&parent, parts.join(&b'/'), name, header)?;
                Ok(State::Header)
            }
            Kind::Symlink => {
                replacing(&parent, name, || symlinkat(header.link.as_slice(), &*parent, *name))?;
                if let Some((uid, gid)) = self.owner_of(&header) {
                    chownat(&*parent, *name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
                }
                utimensat(&*parent, *name, &times(header.mtime), AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
                Ok(State::Header)
            }
            Kind::HardLink => {
                self.hard_link(&parent, name, &header)?;
                Ok(State::Header)
            }
            _ => {
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let mode = Mode::from_raw_mode(0o600);
                let file = File::from(replacing(&parent, name, || openat(&*parent, *name, flags, mode))?);
                let size = header.size;
                let draft = Draft { file, parent, name: name.to_vec(), header, whole: false };
                if size == 0 { self.seal(draft) } else { Ok(State::Content(draft, size)) }
            }
        }
    }

    /// Whom an entry is given to.
    fn owner_of(&self, header: &Header) -> Option<(Uid, Gid)> {
        let (uid, gid) = match self.options.owners {
            Owners::Unpacker => return None,
            Owners::Archive => (header.uid, header.gid),
            Owners::All(uid, gid) => (uid, gid),
        };
        // The largest number means "as it is" to the system.
        let own = |id: u32| id.min(u32::MAX - 1);
        Some((Uid::from_raw(own(uid)), Gid::from_raw(own(gid))))
    }

    /// A file is whole.
    fn seal(&self, mut draft: Draft) -> Result<State, TreeError> {
        let header = &draft.header;
        if let Some((uid, gid)) = self.owner_of(header) {
            fchown(&draft.file, Some(uid), Some(gid)).map_err(failed)?;
        }
        fchmod(&draft.file, Mode::from_raw_mode(header.mode)).map_err(failed)?;
        futimens(&draft.file, &times(header.mtime)).map_err(failed)?;
        let pad = padding(header.size) as u64;
        draft.whole = true;
        Ok(Self::skip(pad))
    }

    fn directory(&mut self, parent: &OwnedFd, path: Vec<u8>, name: &[u8], header: Header) -> Result<(), TreeError> {
        let made = match mkdirat(parent, name, Mode::from_raw_mode(0o700)) {
            Ok(()) => true,
            Err(Errno::EXIST) => {
                // A directory, or a link to one that stays in the tree.
                openat2(&*self.root, path.as_slice(), PLACE, Mode::empty(), BENEATH).map_err(resolved)?;
                false
            }
            Err(errno) => return Err(failed(errno)),
        };
        self.later.push(Later { path, header, made });
        Ok(())
    }

    fn hard_link(&mut self, parent: &Arc<OwnedFd>, name: &[u8], header: &Header) -> Result<(), TreeError> {
        let parts = safe_parts(&header.link).map_err(named)?;
        let Some((target, above)) = parts.split_last() else {
            return Err(TreeError::rule("name", "a hard link of the archive has no target"));
        };
        let from = if above.is_empty() {
            Arc::clone(&self.root)
        } else {
            let place = above.join(&b'/');
            Arc::new(openat2(&*self.root, place.as_slice(), PLACE, Mode::empty(), BENEATH).map_err(resolved)?)
        };
        let id =
            |dir: &OwnedFd, name: &[u8]| statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).map(|s| (s.st_dev, s.st_ino));
        let wanted = id(&from, target).map_err(failed)?;
        if id(parent, name) == Ok(wanted) {
            return Ok(());
        }
        replacing(parent, name, || linkat(&*from, *target, &**parent, name, AtFlags::empty()))
    }

    /// The directory an entry goes to, made where it is missing.
    fn place(&mut self, parts: &[&[u8]], path: &[u8]) -> Result<Arc<OwnedFd>, TreeError> {
        if parts.is_empty() {
            return Ok(Arc::clone(&self.root));
        }
        if let Some((_, dir)) = self.last.as_ref().filter(|(known, _)| known == path) {
            return Ok(Arc::clone(dir));
        }
        let open = |path: &[u8]| openat2(&*self.root, path, PLACE, Mode::empty(), BENEATH);
        let dir = match open(path) {
            Ok(dir) => dir,
            Err(Errno::NOENT) => {
                let mut dir = openat(&*self.root, c".", PLACE, Mode::empty()).map_err(failed)?;
                for n in 1..=parts.len() {
                    let step = parts[..n].join(&b'/');
                    dir = match open(&step) {
                        Err(Errno::NOENT) => {
                            mkdirat(&dir, parts[n - 1], Mode::from_raw_mode(0o755)).map_err(failed)?;
                            if let Owners::All(uid, gid) = self.options.owners {
                                let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
                                let flags = AtFlags::SYMLINK_NOFOLLOW;
                                chownat(&dir, parts[n - 1], Some(uid), Some(gid), flags).map_err(failed)?;
                            }
                            open(&step).map_err(resolved)?
                        }
                        other => other.map_err(resolved)?,
                    };
                }
                dir
            }
            Err(errno) => return Err(resolved(errno)),
        };
        let dir = Arc::new(dir);
        self.last = Some((path.to_vec(), Arc::clone(&dir)));
        Ok(dir)
    }

    /// Settles the directories that an entry in `place` is not in.
    fn leave(&mut self, place: &[u8]) -> Result<(), TreeError> {
        while let Some(last) = self.later.last() {
            let inside = last.path.is_empty()
                || place == last.path
                || place.strip_prefix(last.path.as_slice()).is_some_and(|rest| rest.first() == Some(&b'/'));
            if inside {
                break;
            }
            if let Some(dir) = self.later.pop() {
                self.settle(&dir)?;
            }
        }
        Ok(())
    }

    fn settle(&self, dir: &Later) -> Result<(), TreeError> {
        let path = if dir.path.is_empty() { b".".as_slice() } else { &dir.path };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = openat2(&*self.root, path, flags, Mode::empty(), BENEATH | ResolveFlags::NO_SYMLINKS);
        let open = match open {
            Ok(open) => open,
            // It is a link to another directory, which has its own; or somebody took it away.
            Err(Errno::LOOP | Errno::NOENT | Errno::NOTDIR) => return Ok(()),
            Err(errno) => return Err(failed(errno)),
        };
        let keeps = !dir.made && matches!(self.options.owners, Owners::All(..));
        if let Some((uid, gid)) = self.owner_of(&dir.header).filter(|_| !keeps) {
            fchown(&open, Some(uid), Some(gid)).map_err(failed)?;
        }
        fchmod(open.as_fd(), Mode::from_raw_mode(dir.header.mode)).map_err(failed)?;
        futimens(open.as_fd(), &times(dir.header.mtime)).map_err(failed)
    }
}

/// Makes `name` in `parent` with `make`, in place of what is there and is no directory.
fn replacing<T>(parent: &OwnedFd, name: &[u8], make: impl Fn() -> Result<T, Errno>) -> Result<T, TreeError> {
    match make() {
        Err(Errno::EXIST) => {
            match unlinkat(parent, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(failed(errno)),
            }
            make().map_err(failed)
        }
        other => other.map_err(failed),
    }
}
