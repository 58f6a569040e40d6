//! Depth first through a tree, with one open directory at a time however deep it is.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, Mode, OFlags, ResolveFlags, Stat, fstat, openat, openat2, statat};
use rustix::io::Errno;

use crate::error::TreeError;

/// Most bytes of names of one directory that are held.
pub const NAMES_BYTES_MAX: usize = 64 * 1024 * 1024;

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// The names in a directory, sorted by their bytes.
#[derive(Debug, Default)]
struct Names {
    bytes: Vec<u8>,
    /// Start and length of each name that is still to come, the next one last.
    left: Vec<(u32, u16)>,
}

impl Names {
    fn read(dir: BorrowedFd<'_>) -> Result<Self, TreeError> {
        let failed = TreeError::system("list");
        let mut names = Self::default();
        for entry in Dir::read_from(dir).map_err(&failed)? {
            let entry = entry.map_err(&failed)?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            if names.bytes.len() + name.len() > NAMES_BYTES_MAX {
                return Err(TreeError::rule("many", "a directory has too many entries"));
            }
            let length = u16::try_from(name.len()).map_err(|_| failed(Errno::NAMETOOLONG))?;
            names.left.push((names.bytes.len() as u32, length));
            names.bytes.extend_from_slice(name);
        }
        let bytes = &names.bytes;
        let of = |at: &(u32, u16)| &bytes[at.0 as usize..at.0 as usize + usize::from(at.1)];
        names.left.sort_unstable_by(|a, b| of(b).cmp(of(a)));
        Ok(names)
    }

    fn next(&mut self) -> Option<Vec<u8>> {
        let (start, length) = self.left.pop()?;
        Some(self.bytes[start as usize..start as usize + usize::from(length)].to_vec())
    }
}

#[derive(Debug)]
struct Level {
    names: Names,
    /// Device and inode, to know it again when it is come back to through `..`.
    id: (u64, u64),
    /// Its name in the level above; empty at the top.
    name: Vec<u8>,
}

/// Where a walk is.
#[derive(Debug, Clone)]
pub enum Step {
    /// At an entry of [`Walk::dir`]: [`Walk::name`], which is this.
    Entry(Stat),
    /// A directory that was entered has been left again; it is [`Walk::name`] in [`Walk::dir`].
    Left,
}

/// A walk through the tree below a directory. The directory itself is no entry.
#[derive(Debug)]
pub struct Walk {
    dir: OwnedFd,
    levels: Vec<Level>,
    name: Vec<u8>,
}

fn id_of(dir: BorrowedFd<'_>) -> Result<(u64, u64), TreeError> {
    let stat = fstat(dir).map_err(TreeError::system("stat"))?;
    Ok((stat.st_dev, stat.st_ino))
}

impl Walk {
    /// Begins in `dir`, which must be open for reading.
    ///
    /// # Errors
    /// When it cannot be listed.
    pub fn new(dir: OwnedFd) -> Result<Self, TreeError> {
        let level = Level { names: Names::read(dir.as_fd())?, id: id_of(dir.as_fd())?, name: Vec::new() };
        Ok(Self { dir, levels: vec![level], name: Vec::new() })
    }

    /// The directory the walk is in.
    #[must_use]
    pub fn dir(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }

    /// The name of the entry the walk is at.
    #[must_use]
    pub fn name(&self) -> &[u8] {
        &self.name
    }

    /// How many directories stand between the walk and its root.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.levels.len().saturating_sub(1)
    }

    /// The path of that entry from the root of the walk.
    #[must_use]
    pub fn path(&self) -> Vec<u8> {
        let above = self.levels.iter().map(|l| l.name.as_slice()).filter(|n| !n.is_empty());
        above.chain([self.name.as_slice()]).collect::<Vec<_>>().join(&b'/')
    }

    /// The next step; `None` when everything was seen. Entries that vanish meanwhile are passed over.
    ///
    /// # Errors
    /// When a directory was moved away under the walk, or cannot be read. The walk is then over.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<Option<Step>, TreeError> {
        loop {
            let Some(level) = self.levels.last_mut() else { return Ok(None) };
            if let Some(name) = level.names.next() {
                self.name = name;
                match statat(&self.dir, self.name.as_slice(), AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) => return Ok(Some(Step::Entry(stat))),
                    Err(Errno::NOENT) => continue,
                    Err(errno) => return Err(TreeError::system("stat")(errno)),
                }
            }
            let Some(done) = self.levels.pop() else { return Ok(None) };
            let Some(above) = self.levels.last() else { return Ok(None) };
            let parent = openat(&self.dir, c"..", DIRECTORY, Mode::empty()).map_err(TreeError::system("open"))?;
            if id_of(parent.as_fd())? != above.id {
                self.levels.clear();
                return Err(TreeError::rule("moved", "a directory was moved away meanwhile"));
            }
            self.dir = parent;
            self.name = done.name;
            return Ok(Some(Step::Left));
        }
    }

    /// Goes into the directory the walk is at.
    ///
    /// # Errors
    /// `EXDEV` for a mount point; whatever else the system answers. The walk then stays where it is.
    pub fn enter(&mut self) -> Result<(), TreeError> {
        let failed = TreeError::system("open");
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
        let dir = openat2(&self.dir, self.name.as_slice(), DIRECTORY, Mode::empty(), resolve).map_err(failed)?;
        let names = Names::read(dir.as_fd())?;
        self.levels.push(Level { names, id: id_of(dir.as_fd())?, name: std::mem::take(&mut self.name) });
        self.dir = dir;
        Ok(())
    }

    /// Entries not yet seen of the directories the walk is in, their paths from the root of the walk.
    pub(crate) fn unseen(mut self) -> impl Iterator<Item = Vec<u8>> {
        let mut above: Vec<u8> = Vec::new();
        let mut prefixes = Vec::new();
        for level in &self.levels {
            if !level.name.is_empty() {
                above.extend_from_slice(&level.name);
                above.push(b'/');
            }
            prefixes.push(above.clone());
        }
        std::iter::from_fn(move || {
            loop {
                let level = self.levels.last_mut()?;
                let prefix = prefixes.last()?;
                if let Some(name) = level.names.next() {
                    return Some([prefix.as_slice(), &name].concat());
                }
                let done = self.levels.pop()?;
                prefixes.pop();
                if !done.name.is_empty() {
                    return Some([prefixes.last()?.as_slice(), &done.name].concat());
                }
            }
        })
    }
}
