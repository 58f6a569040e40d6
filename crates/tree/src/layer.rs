//! A tree made of layers, one archive over the other, as images of containers are.
//!
//! Differs from [`Unpacker`](crate::Unpacker) in what such an archive means: it may say that things below are gone
//! (whiteouts), go through links as they lead from the root of the tree, replace directories by files and the other way
//! round, and hold devices, owners and extended attributes that are to be kept. Every name is resolved with the tree as its
//! root: nothing outside is reached, whatever links the layers have made.

use std::collections::HashSet;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags, chmodat, chownat,
    fchmod, fchown, fsetxattr, fstat, futimens, linkat, makedev, mkdirat, mknodat, openat, openat2, statat, symlinkat,
    unlinkat, utimensat,
};
use rustix::io::Errno;

use crate::error::TreeError;
use crate::header::{self, BLOCK, Header, Kind, META_MAX, padding};
use crate::name::safe_parts;
use crate::remove::remove;
use crate::walk::{Step, Walk};

/// Names of entries that say that something is gone begin with it.
const WHITEOUT: &[u8] = b".wh.";
/// Names of entries that are about the directory they are in begin with it.
const MARK: &[u8] = b".wh..wh.";
/// Everything below is gone from this directory.
const OPAQUE: &[u8] = b".wh..wh..opq";
const PIECE: usize = 256 * 1024;
/// Longest target of a symbolic link, bytes.
const TARGET_MAX: usize = 4095;

/// How much all layers of a tree may hold together.
#[derive(Debug, Clone, Copy)]
pub struct LayerLimits {
    /// Entries of archives.
    pub entries: u64,
    /// Content of files, bytes.
    pub bytes: u64,
}

/// What was laid out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Laid {
    /// Entries of archives that were seen.
    pub entries: u64,
    /// Content of files, bytes.
    pub bytes: u64,
    /// Entries that said that something is gone.
    pub whiteouts: u64,
    /// Entries of kinds that are not known, and devices that may not be made here.
    pub skipped: u64,
    /// Extended attributes that are not kept: of kinds that mean something to this host or to a file system.
    pub attributes_dropped: u64,
    /// The latest time that an entry has, seconds since 1970.
    pub newest: i64,
}

/// A tree that layers are laid into.
#[derive(Debug)]
pub struct Layers {
    root: Arc<OwnedFd>,
    limits: LayerLimits,
    done: Laid,
}

/// One layer on its way.
struct Layer<'a> {
    tree: &'a mut Layers,
    /// What this layer has itself, each by the inode of its directory and a digest of its name: whiteouts in it are about what
    /// is below.
    own: HashSet<(u64, u64)>,
    /// Its key is nobody's to guess.
    names: RandomState,
    /// The directory the last entry went to.
    last: Option<(Vec<u8>, Arc<OwnedFd>)>,
    /// Directories and their times, set when all is there.
    times: Vec<(Vec<u8>, i64)>,
}

/// As seen from within the tree.
const WITHIN: ResolveFlags = ResolveFlags::IN_ROOT.union(ResolveFlags::NO_MAGICLINKS).union(ResolveFlags::NO_XDEV);
const PLACE: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn failed(errno: Errno) -> TreeError {
    TreeError::system("layer")(errno)
}

fn rule(text: impl Into<String>) -> TreeError {
    TreeError::rule("layer", text)
}

fn unreadable(e: &io::Error) -> TreeError {
    match e.kind() {
        io::ErrorKind::UnexpectedEof => rule("the layer ends within an entry"),
        _ => TreeError { stage: "read", errno: e.raw_os_error().map(Errno::from_raw_os_error), text: e.to_string() },
    }
}

fn times(mtime: i64) -> Timestamps {
    let time = Timespec { tv_sec: mtime, tv_nsec: 0 };
    Timestamps { last_access: time, last_modification: time }
}

/// A block, or `None` when nothing is left.
fn block(from: &mut impl Read) -> Result<Option<[u8; BLOCK]>, TreeError> {
    let mut block = [0; BLOCK];
    let mut have = 0;
    while have < BLOCK {
        match from.read(&mut block[have..]) {
            Ok(0) if have == 0 => return Ok(None),
            Ok(0) => return Err(rule("the layer ends within an entry")),
            Ok(n) => have += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(unreadable(&e)),
        }
    }
    Ok(Some(block))
}

fn skip(from: &mut impl Read, bytes: u64) -> Result<(), TreeError> {
    let passed = io::copy(&mut from.take(bytes), &mut io::sink()).map_err(|e| unreadable(&e))?;
    if passed == bytes { Ok(()) } else { Err(rule("the layer ends within an entry")) }
}

impl Layers {
    /// Begins with the directory `root`, which should be empty.
    #[must_use]
    pub fn new(root: OwnedFd, limits: LayerLimits) -> Self {
        Self { root: Arc::new(root), limits, done: Laid::default() }
    }

    /// What was laid out so far.
    #[must_use]
    pub fn done(&self) -> Laid {
        self.done
    }

    /// Lays the archive `from` over what is there. It is read as far as its end mark.
    ///
    /// # Errors
    /// When the archive is malformed, over a limit, or holds what cannot be, or the system refuses. The tree is then of no use.
    pub fn apply(&mut self, from: &mut impl Read) -> Result<(), TreeError> {
        let mut layer =
            Layer { tree: self, own: HashSet::new(), names: RandomState::new(), last: None, times: Vec::new() };
        layer.read(from)?;
        layer.settle()
    }
}

impl Layer<'_> {
    fn read(&mut self, from: &mut impl Read) -> Result<(), TreeError> {
        let (mut global, mut local, mut long_name, mut long_link) = (Vec::new(), Vec::new(), None, None);
        let text = |body: Vec<u8>| body.into_iter().take_while(|b| *b != 0).collect::<Vec<u8>>();
        while let Some(bytes) = block(from)? {
            let Some(mut header) = header::read(&bytes)? else { return Ok(()) };
            // Every entry counts, also one that is only about the next.
            self.tree.done.entries += 1;
            if self.tree.done.entries > self.tree.limits.entries {
                return Err(rule("the image has too many entries"));
            }
            if matches!(header.kind, Kind::Pax | Kind::PaxGlobal | Kind::LongName | Kind::LongLink) {
                if header.size > META_MAX {
                    return Err(rule("an extended header of the layer is too large"));
                }
                let mut body = vec![0; usize::try_from(header.size).unwrap_or(0)];
                from.read_exact(&mut body).map_err(|e| unreadable(&e))?;
                skip(from, padding(header.size) as u64)?;
                match header.kind {
                    Kind::Pax => local = body,
                    Kind::PaxGlobal => global = body,
                    Kind::LongLink => long_link = Some(text(body)),
                    _ => long_name = Some(text(body)),
                }
                continue;
            }
            let records = std::mem::take(&mut local);
            header::apply(&global, &mut header)?;
            header::apply(&records, &mut header)?;
            header.path = long_name.take().unwrap_or(header.path);
            header.link = long_link.take().unwrap_or(header.link);
            self.tree.done.newest = self.tree.done.newest.max(header.mtime);
            let device = if header.kind == Kind::Device { header::device(&bytes) } else { None };
            self.entry(from, header, device, &records)?;
        }
        Ok(())
    }

    fn entry(
        &mut self,
        from: &mut impl Read,
        mut header: Header,
        device: Option<(FileType, u32, u32)>,
        records: &[u8],
    ) -> Result<(), TreeError> {
        match header.kind {
            Kind::Sparse => return Err(rule("the layer holds files with holes in a form that is not taken")),
            Kind::Other => {
                self.tree.done.skipped += 1;
                return skip(from, header.size.saturating_add(padding(header.size) as u64));
            }
            _ => {}
        }
        let path = std::mem::take(&mut header.path);
        let parts = safe_parts(&path).map_err(|e| rule(e.to_string()))?;
        let attributes = header::attributes(records)?;
        let Some((name, above)) = parts.split_last() else {
            if header.kind != Kind::Directory {
                return Err(rule("an entry of the layer has no name"));
            }
            let root = openat(&*self.tree.root, c".", DIRECTORY, Mode::empty()).map_err(failed)?;
            return self.set_directory(&root, Vec::new(), &header, &attributes);
        };
        let place = above.join(&b'/');
        if let Some(gone) = name.strip_prefix(WHITEOUT) {
            let content = if header.kind == Kind::File { header.size } else { 0 };
            self.whiteout(&place, name, gone)?;
            return skip(from, content.saturating_add(padding(content) as u64));
        }
        let parent = self.place(above, &place)?;
        self.mark(&*parent, name)?;
        match header.kind {
            Kind::Directory => self.directory(&parent, name, parts.join(&b'/'), &header, &attributes),
            Kind::Symlink => {
                if header.link.is_empty() || header.link.len() > TARGET_MAX {
                    return Err(rule("a symbolic link of the layer has no target, or too long a one"));
                }
                self.replacing(&parent, name, || symlinkat(header.link.as_slice(), &*parent, *name))?;
                self.tree.done.attributes_dropped += attributes.len() as u64;
                self.own_up(&parent, name, &header)
            }
            Kind::HardLink => self.hard_link(&parent, name, &header),
            Kind::Device => {
                let Some((kind, major, minor)) = device else {
                    return Err(rule("a device of the layer has no number"));
                };
                let mode = Mode::from_raw_mode(0o600);
                let made = self.replacing(&parent, name, || {
                    match mknodat(&*parent, *name, kind, mode, makedev(major, minor)) {
                        // Not everybody may. Machines have their own devices.
                        Err(Errno::PERM) => Ok(false),
                        other => other.map(|()| true),
                    }
                })?;
                self.tree.done.attributes_dropped += attributes.len() as u64;
                if !made {
                    self.tree.done.skipped += 1;
                    return Ok(());
                }
                self.own_up(&parent, name, &header)?;
                chmodat(&*parent, *name, Mode::from_raw_mode(header.mode), AtFlags::empty()).map_err(failed)
            }
            _ => self.file(from, &parent, name, &header, &attributes),
        }
    }

    /// This layer has `name` in `parent`.
    fn mark(&mut self, parent: impl AsFd, name: &[u8]) -> Result<(), TreeError> {
        let entry = self.entry_of(parent.as_fd(), name)?;
        self.own.insert(entry);
        Ok(())
    }

    fn has(&self, parent: BorrowedFd<'_>, name: &[u8]) -> Result<bool, TreeError> {
        Ok(self.own.contains(&self.entry_of(parent, name)?))
    }

    fn entry_of(&self, parent: BorrowedFd<'_>, name: &[u8]) -> Result<(u64, u64), TreeError> {
        Ok((fstat(parent).map_err(failed)?.st_ino, self.names.hash_one(name)))
    }

    /// Owner and times of what is no file and no directory.
    fn own_up(&mut self, parent: &OwnedFd, name: &[u8], header: &Header) -> Result<(), TreeError> {
        let (uid, gid) = (Uid::from_raw(header.uid), Gid::from_raw(header.gid));
        chownat(parent, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
        utimensat(parent, name, &times(header.mtime), AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
        Ok(())
    }

    fn file(
        &mut self,
        from: &mut impl Read,
        parent: &Arc<OwnedFd>,
        name: &[u8],
        header: &Header,
        attributes: &[(&[u8], &[u8])],
    ) -> Result<(), TreeError> {
        let done = &mut self.tree.done;
        done.bytes = done.bytes.saturating_add(header.size);
        if done.bytes > self.tree.limits.bytes {
            return Err(rule("the image is too large when unpacked"));
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o600);
        let mut file = File::from(self.replacing(parent, name, || openat(&**parent, name, flags, mode))?);
        let mut left = header.size;
        let mut piece = vec![0; PIECE.min(usize::try_from(left).unwrap_or(PIECE)).max(1)];
        while left > 0 {
            let n = piece.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            from.read_exact(&mut piece[..n]).map_err(|e| unreadable(&e))?;
            io::Write::write_all(&mut file, &piece[..n])
                .map_err(|e| failed(e.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)))?;
            left -= n as u64;
        }
        skip(from, padding(header.size) as u64)?;
        self.set(file.as_fd(), header, attributes)?;
        futimens(&file, &times(header.mtime)).map_err(failed)
    }

    /// Owner, then permissions, which a change of owner takes from; then attributes, of which the same is true.
    fn set(&mut self, at: BorrowedFd<'_>, header: &Header, attributes: &[(&[u8], &[u8])]) -> Result<(), TreeError> {
        fchown(at, Some(Uid::from_raw(header.uid)), Some(Gid::from_raw(header.gid))).map_err(failed)?;
        fchmod(at, Mode::from_raw_mode(header.mode)).map_err(failed)?;
        for (name, value) in attributes {
            let kept =
                matches!(*name, b"security.capability" | b"system.posix_acl_access" | b"system.posix_acl_default")
                    || name.starts_with(b"user.");
            if !kept || name.contains(&0) {
                self.tree.done.attributes_dropped += 1;
                continue;
            }
            fsetxattr(at, *name, value, XattrFlags::empty()).map_err(TreeError::system("attribute"))?;
        }
        Ok(())
    }

    fn set_directory(
        &mut self,
        dir: &OwnedFd,
        path: Vec<u8>,
        header: &Header,
        attributes: &[(&[u8], &[u8])],
    ) -> Result<(), TreeError> {
        self.set(dir.as_fd(), header, attributes)?;
        self.times.push((path, header.mtime));
        Ok(())
    }

    fn directory(
        &mut self,
        parent: &Arc<OwnedFd>,
        name: &[u8],
        path: Vec<u8>,
        header: &Header,
        attributes: &[(&[u8], &[u8])],
    ) -> Result<(), TreeError> {
        let made = || mkdirat(&**parent, name, Mode::from_raw_mode(0o700));
        match made() {
            Err(Errno::EXIST) => {
                let stat = statat(&**parent, name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
                // One that is there is kept with what is in it; anything else makes room, a link to one too.
                if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
                    self.replacing(parent, name, made)?;
                }
            }
            other => other.map_err(failed)?,
        }
        let dir = openat(&**parent, name, DIRECTORY, Mode::empty()).map_err(failed)?;
        self.set_directory(&dir, path, header, attributes)
    }

    fn hard_link(&mut self, parent: &Arc<OwnedFd>, name: &[u8], header: &Header) -> Result<(), TreeError> {
        let parts = safe_parts(&header.link).map_err(|e| rule(e.to_string()))?;
        let Some((target, above)) = parts.split_last() else {
            return Err(rule("a hard link of the layer has no target"));
        };
        let from = self.open(&above.join(&b'/')).map_err(|e| missing_target(e, &header.link))?;
        let id = |dir: &OwnedFd, name: &[u8]| statat(dir, name, AtFlags::SYMLINK_NOFOLLOW);
        let wanted = id(&from, target).map_err(|e| missing_target(e, &header.link))?;
        if FileType::from_raw_mode(wanted.st_mode) == FileType::Directory {
            return Err(rule("a hard link of the layer leads to a directory"));
        }
        if id(parent, name).is_ok_and(|s| (s.st_dev, s.st_ino) == (wanted.st_dev, wanted.st_ino)) {
            return Ok(());
        }
        self.replacing(parent, name, || linkat(&*from, *target, &**parent, name, AtFlags::empty()))
    }

    /// A directory by its path from the root of the tree.
    fn open(&self, path: &[u8]) -> Result<Arc<OwnedFd>, Errno> {
        if path.is_empty() {
            return Ok(Arc::clone(&self.tree.root));
        }
        openat2(&*self.tree.root, path, PLACE, Mode::empty(), WITHIN).map(Arc::new)
    }

    /// The directory an entry goes to, made where it is missing.
    fn place(&mut self, parts: &[&[u8]], path: &[u8]) -> Result<Arc<OwnedFd>, TreeError> {
        if let Some((_, dir)) = self.last.as_ref().filter(|(known, _)| known == path) {
            return Ok(Arc::clone(dir));
        }
        let dir = match self.open(path) {
            Ok(dir) => dir,
            Err(Errno::NOENT) => {
                let mut dir = Arc::clone(&self.tree.root);
                for n in 1..=parts.len() {
                    let step = parts[..n].join(&b'/');
                    dir = match self.open(&step) {
                        Err(Errno::NOENT) => {
                            match mkdirat(&*dir, parts[n - 1], Mode::from_raw_mode(0o755)) {
                                Err(Errno::EXIST) => {
                                    return Err(rule(
                                        "an entry of the layer would go through a link that leads nowhere",
                                    ));
                                }
                                other => other.map_err(failed)?,
                            }
                            // Whatever the umask here is, and the directory around it lends.
                            let root = (Some(Uid::ROOT), Some(Gid::ROOT));
                            chownat(&*dir, parts[n - 1], root.0, root.1, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
                            chmodat(&*dir, parts[n - 1], Mode::from_raw_mode(0o755), AtFlags::empty())
                                .map_err(failed)?;
                            self.mark(&*dir, parts[n - 1])?;
                            self.open(&step).map_err(failed)?
                        }
                        other => other.map_err(lost)?,
                    };
                }
                dir
            }
            Err(errno) => return Err(lost(errno)),
        };
        self.last = Some((path.to_vec(), Arc::clone(&dir)));
        Ok(dir)
    }

    /// Makes `name` in `parent` with `make`, in place of whatever is there.
    fn replacing<T>(
        &mut self,
        parent: &OwnedFd,
        name: &[u8],
        make: impl Fn() -> Result<T, Errno>,
    ) -> Result<T, TreeError> {
        match make() {
            Err(Errno::EXIST) => {
                self.take_away(parent, name)?;
                make().map_err(failed)
            }
            other => other.map_err(failed),
        }
    }

    /// Removes all of `name`.
    fn take_away(&mut self, parent: &OwnedFd, name: &[u8]) -> Result<(), TreeError> {
        // Entries may not go to a directory that is no longer in the tree.
        self.last = None;
        match unlinkat(parent, name, AtFlags::empty()) {
            Err(Errno::ISDIR | Errno::PERM) => {
                let until = Instant::now() + Duration::from_secs(3600);
                remove(parent.as_fd(), name, true, until).map(drop)
            }
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(failed(errno)),
        }
    }

    /// An entry that says that something below is gone.
    fn whiteout(&mut self, place: &[u8], name: &[u8], gone: &[u8]) -> Result<(), TreeError> {
        if name.starts_with(MARK) && name != OPAQUE {
            // Left there by a file system for itself.
            self.tree.done.skipped += 1;
            return Ok(());
        }
        if matches!(gone, b"" | b"." | b"..") {
            return Err(rule("a whiteout of the layer names no entry"));
        }
        self.tree.done.whiteouts += 1;
        let dir = match self.open(place) {
            Ok(dir) => dir,
            // What is not there is gone.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(()),
            Err(errno) => return Err(failed(errno)),
        };
        self.last = None;
        if name == OPAQUE {
            return self.hide_all(&dir);
        }
        let stat = match statat(&*dir, gone, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(()),
            Err(errno) => return Err(failed(errno)),
        };
        let own = self.has(dir.as_fd(), gone)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let inner = openat(&*dir, gone, DIRECTORY, Mode::empty()).map_err(failed)?;
                self.hide_all(&inner)?;
                if own { Ok(()) } else { rmdir(dir.as_fd(), gone) }
            }
            _ if own => Ok(()),
            _ => unlinkat(&*dir, gone, AtFlags::empty()).map_err(failed),
        }
    }

    /// Removes all in `dir` that this layer does not have itself.
    fn hide_all(&self, dir: &OwnedFd) -> Result<(), TreeError> {
        let own = openat(dir, c".", DIRECTORY, Mode::empty()).map_err(failed)?;
        let mut walk = Walk::new(own)?;
        while let Some(step) = walk.next()? {
            match step {
                Step::Entry(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => walk.enter()?,
                Step::Entry(_) => {
                    if !self.has(walk.dir(), walk.name())? {
                        unlinkat(walk.dir(), walk.name(), AtFlags::empty()).map_err(failed)?;
                    }
                }
                Step::Left => {
                    if !self.has(walk.dir(), walk.name())? {
                        rmdir(walk.dir(), walk.name())?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Directories get their times: making things in them has changed these.
    fn settle(&mut self) -> Result<(), TreeError> {
        for (path, mtime) in std::mem::take(&mut self.times).into_iter().rev() {
            let path = if path.is_empty() { b".".as_slice() } else { &path };
            match openat2(&*self.tree.root, path, DIRECTORY, Mode::empty(), WITHIN) {
                Ok(dir) => futimens(dir, &times(mtime)).map_err(failed)?,
                // The layer itself has put something else there.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
                Err(errno) => return Err(failed(errno)),
            }
        }
        Ok(())
    }
}

/// A directory goes unless something is in it that stays.
fn rmdir(parent: BorrowedFd<'_>, name: &[u8]) -> Result<(), TreeError> {
    match unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(()),
        Err(errno) => Err(failed(errno)),
    }
}

fn lost(errno: Errno) -> TreeError {
    match errno {
        Errno::NOTDIR => rule("an entry of the layer would go through a file"),
        Errno::LOOP => rule("an entry of the layer would go through a circle of links"),
        other => failed(other),
    }
}

fn missing_target(errno: Errno, link: &[u8]) -> TreeError {
    match errno {
        Errno::NOENT | Errno::NOTDIR | Errno::LOOP => {
            let shown: String = String::from_utf8_lossy(link).chars().filter(|c| !c.is_control()).take(200).collect();
            rule(format!("a hard link of the layer leads to `{shown}`, which is not there"))
        }
        other => failed(other),
    }
}
