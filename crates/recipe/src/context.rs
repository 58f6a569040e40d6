//! The files a recipe may copy.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use mainbrella_tree::{Step, Walk};
use mainbrella_types::limits::{CONTEXT_ENTRIES_MAX, RECIPE_BYTES_MAX};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, Stat, openat2, readlinkat};
use sha2::{Digest, Sha256};

use crate::error::{Fault, RecipeError};
use crate::pattern::Ignore;

const IGNORE_FILE: &str = ".dockerignore";

/// What an entry of a context is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EntryKind {
    /// A file.
    File {
        /// Its size, bytes.
        bytes: u64,
    },
    /// A directory.
    Directory,
    /// A symbolic link.
    Link {
        /// What it says.
        target: String,
    },
    /// A socket, FIFO or device: cannot be copied.
    Other,
}

/// An entry of a context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// What it is.
    pub kind: EntryKind,
    /// Its permissions, with the bits for set-user-id and the like.
    pub mode: u32,
}

/// The files a recipe may copy: a directory, without what its `.dockerignore` leaves out.
#[derive(Debug)]
pub struct Context {
    root: OwnedFd,
    entries: BTreeMap<String, Entry>,
}

fn failed(what: &str, e: impl std::fmt::Display) -> RecipeError {
    Fault::Context(format!("{what}: {e}")).at(0)
}

const BENEATH: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);

impl Context {
    /// Looks through the directory `dir`. Nothing outside it is looked at, whatever links in it say.
    ///
    /// # Errors
    /// When it cannot be read, has too many entries, or its `.dockerignore` is malformed.
    pub fn open(dir: &Path) -> Result<Self, RecipeError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(dir, flags, Mode::empty()).map_err(|e| failed("opening it", e))?;
        let mut context = Self { root, entries: BTreeMap::new() };
        let ignore = context.ignore()?;
        let own = rustix::io::dup(&context.root).map_err(|e| failed("opening it", e))?;
        let mut walk = Walk::new(own).map_err(|e| failed("listing it", e))?;
        // Folders that are left out, and hold something that is not.
        let mut above: BTreeMap<String, Entry> = BTreeMap::new();
        while let Some(step) = walk.next().map_err(|e| failed("listing it", e))? {
            let Step::Entry(stat) = step else { continue };
            let path = String::from_utf8(walk.path()).map_err(|e| {
                Fault::Context(format!("a name in it is not UTF-8: {}", String::from_utf8_lossy(e.as_bytes()))).at(0)
            })?;
            let entry = entry(&walk, &stat)?;
            let out = ignore.leaves_out(&path);
            let directory = entry.kind == EntryKind::Directory;
            if directory && (!out || ignore.takes_back()) {
                walk.enter().map_err(|e| failed(&format!("opening {path}"), e))?;
            }
            match (out, directory) {
                (false, _) => {
                    for (at, _) in path.match_indices('/') {
                        if let Some(folder) = above.remove(&path[..at]) {
                            context.entries.insert(path[..at].to_owned(), folder);
                        }
                    }
                    context.entries.insert(path, entry);
                }
                (true, true) => drop(above.insert(path, entry)),
                (true, false) => {}
            }
            if context.entries.len() + above.len() > CONTEXT_ENTRIES_MAX {
                return Err(Fault::Limit { what: "entries of a context", max: CONTEXT_ENTRIES_MAX as u64 }.at(0));
            }
        }
        Ok(context)
    }

    fn ignore(&self) -> Result<Ignore, RecipeError> {
        let mut text = Vec::new();
        match self.file(IGNORE_FILE) {
            Ok(file) => {
                file.take(RECIPE_BYTES_MAX as u64 + 1).read_to_end(&mut text).map_err(|e| failed(IGNORE_FILE, e))?
            }
            Err(rustix::io::Errno::NOENT) => 0,
            Err(e) => return Err(failed(IGNORE_FILE, e)),
        };
        if text.len() > RECIPE_BYTES_MAX {
            return Err(Fault::Limit { what: "bytes of .dockerignore", max: RECIPE_BYTES_MAX as u64 }.at(0));
        }
        Ignore::new(&String::from_utf8_lossy(&text))
    }

    /// Opens a regular file of the context.
    fn file(&self, path: &str) -> Result<std::fs::File, rustix::io::Errno> {
        // One that has become a FIFO meanwhile is not waited for.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = openat2(&self.root, path, flags, Mode::empty(), BENEATH)?;
        let stat = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(rustix::io::Errno::INVAL);
        }
        Ok(file.into())
    }

    /// Opens a file of the context for reading.
    ///
    /// # Errors
    /// When it is not a regular file any more, or cannot be opened.
    pub fn read(&self, path: &str) -> std::io::Result<std::fs::File> {
        Ok(self.file(path)?)
    }

    /// Everything in it, by path; a directory comes before what is in it.
    #[must_use]
    pub fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.entries
    }

    /// What is called `path`, and all below it.
    pub(crate) fn below<'a>(&'a self, path: &'a str) -> impl Iterator<Item = (&'a str, &'a Entry)> {
        let all = path.is_empty();
        let prefix = format!("{path}/");
        let from = if all { String::new() } else { prefix.clone() };
        let rest = self.entries.range(from..).take_while(move |(p, _)| all || p.starts_with(&prefix));
        rest.map(|(p, e)| (p.as_str(), e))
    }

    /// SHA-256 of a file, in hexadecimal.
    pub(crate) fn digest(&self, path: &str) -> Result<String, Fault> {
        let failed = |e: std::io::Error| Fault::Context(format!("{path}: {e}"));
        let mut file = self.read(path).map_err(failed)?;
        let mut hash = Sha256::new();
        let mut buffer = vec![0; 256 * 1024];
        loop {
            match file.read(&mut buffer) {
                Ok(0) => return Ok(hex::encode(hash.finalize())),
                Ok(n) => hash.update(&buffer[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(failed(e)),
            }
        }
    }
}

fn entry(walk: &Walk, stat: &Stat) -> Result<Entry, RecipeError> {
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => EntryKind::File { bytes: u64::try_from(stat.st_size).unwrap_or(0) },
        FileType::Directory => EntryKind::Directory,
        FileType::Symlink => {
            let target =
                readlinkat(walk.dir().as_fd(), walk.name(), Vec::new()).map_err(|e| failed("reading a link", e))?;
            let target = target.into_string().map_err(|_| failed("reading a link", "what it says is not UTF-8"))?;
            EntryKind::Link { target }
        }
        _ => EntryKind::Other,
    };
    Ok(Entry { kind, mode: stat.st_mode & 0o7777 })
}
