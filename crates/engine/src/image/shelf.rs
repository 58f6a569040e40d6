//! Putting finished things into the data directory: one builder at a time, all or nothing.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with, syncfs};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use super::error::ImageError;
use super::progress::{Event, Progress, Silent};

/// How often a lock that another build holds is tried again.
const LOCK_TICK: Duration = Duration::from_millis(200);

/// Held while something is built on one shelf (`guest` or `templates`) of the data directory.
pub(super) struct Bench {
    data: PathBuf,
    shelf: &'static str,
    // Let go when the bench and every program started with [`Self::lock`] are gone.
    lock: File,
}

impl Bench {
    /// Waits until nobody else builds on `shelf`, then removes what a crashed build left.
    pub(super) fn take(data: &Path, shelf: &'static str, progress: &dyn Progress) -> Result<Self, ImageError> {
        let lock = open_lock(data, shelf)?;
        let mut told = false;
        loop {
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {}
                Err(e) => return Err(ImageError::io("locking the data directory", e.into())),
            }
            if !told {
                progress.event(Event::Step("Waiting for another build to finish"));
                told = true;
            }
            if progress.cancelled() {
                return Err(ImageError::Cancelled);
            }
            std::thread::sleep(LOCK_TICK);
        }
        let bench = Self { data: data.to_owned(), shelf, lock };
        bench.clear()?;
        Ok(bench)
    }

    /// As [`Self::take`], but `None` at once when somebody builds.
    pub(super) fn try_take(data: &Path, shelf: &'static str) -> Result<Option<Self>, ImageError> {
        let lock = open_lock(data, shelf)?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self { data: data.to_owned(), shelf, lock })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(ImageError::io("locking the data directory", e.into())),
        }
    }

    /// The lock, for programs that must hold it as well.
    pub(super) fn lock(&self) -> Result<OwnedFd, ImageError> {
        self.lock.try_clone().map(OwnedFd::from).map_err(|e| ImageError::io("passing the lock on", e))
    }

    fn prefix(&self) -> String {
        format!("image-{}-", self.shelf)
    }

    /// Removes half-made things of this shelf. Nobody is making any: the lock is held.
    pub(super) fn clear(&self) -> Result<(), ImageError> {
        let prefix = self.prefix();
        let Ok(entries) = fs::read_dir(self.data.join("tmp")) else { return Ok(()) };
        for entry in entries.flatten().filter(|e| e.file_name().to_string_lossy().starts_with(&prefix)) {
            refuse_mounts(&entry.path())?;
            super::rootfs::remove_tree(self, &entry.path(), &Silent)?;
            super::import::clear(&entry.path().join(super::rootfs::STAGE))?;
            remove(&entry.path()).map_err(|e| ImageError::io("removing what an unfinished build left", e))?;
        }
        Ok(())
    }

    /// A fresh directory under `tmp`, on the same file system as the shelf.
    pub(super) fn workspace(&self) -> Result<TempDir, ImageError> {
        let tmp = self.data.join("tmp");
        fs::create_dir_all(&tmp).map_err(|e| ImageError::io("making the directory for half-made things", e))?;
        tempfile::Builder::new()
            .prefix(&self.prefix())
            .tempdir_in(tmp)
            .map_err(|e| ImageError::io("making a directory for half-made things", e))
    }

    /// Makes `made` (a file or directory under [`Self::workspace`]) appear as `place`, replacing what is there.
    /// All of it is on the disk before it appears; a reader sees the old or the new, whole.
    pub(super) fn publish(&self, made: &Path, place: &Path) -> Result<(), ImageError> {
        let io = |what: &'static str| move |e: io::Error| ImageError::io(what, e);
        readable(made).map_err(io("setting the permissions of what was made"))?;
        let file = File::open(made).map_err(io("opening what was made"))?;
        syncfs(&file).map_err(|e| ImageError::io("writing what was made to the disk", e.into()))?;
        let parent = place.parent().unwrap_or(&self.data);
        fs::create_dir_all(parent).map_err(io("making a directory in the data directory"))?;
        if made.is_dir() && place.exists() {
            match renameat_with(CWD, made, CWD, place, RenameFlags::EXCHANGE) {
                // The old one is now in the workspace and goes with it.
                Ok(()) => {}
                Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
                    fs::rename(place, made.with_extension("old")).map_err(io("moving the old image away"))?;
                    fs::rename(made, place).map_err(io("moving the new image to its place"))?;
                }
                Err(e) => return Err(ImageError::io("moving the new image to its place", e.into())),
            }
        } else {
            fs::rename(made, place).map_err(io("moving what was made to its place"))?;
        }
        File::open(parent).and_then(|d| d.sync_all()).map_err(io("writing the data directory to the disk"))
    }

    /// Takes `place` away at once and removes it afterwards; `false` when it was not there.
    pub(super) fn discard(&self, place: &Path) -> Result<bool, ImageError> {
        let work = self.workspace()?;
        match fs::rename(place, work.path().join("gone")) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(ImageError::io("removing from the data directory", e)),
        }
    }
}

fn open_lock(data: &Path, shelf: &str) -> Result<File, ImageError> {
    let dir = data.join(shelf);
    fs::create_dir_all(&dir).map_err(|e| ImageError::io(format!("making {}", dir.display()), e))?;
    let path = dir.join(".lock");
    File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(|e| ImageError::io(format!("opening {}", path.display()), e))
}

/// Nothing is removed through a mount, which might show what is not ours.
fn refuse_mounts(dir: &Path) -> Result<(), ImageError> {
    let table = fs::read("/proc/self/mountinfo").map_err(|e| ImageError::io("reading the mounts of this host", e))?;
    match mounted_below(&table, dir) {
        None => Ok(()),
        Some(place) => Err(ImageError::LeftMount { place: place.display().to_string() }),
    }
}

/// A mount point in `table` (the form of `/proc/self/mountinfo`) that is `dir` or below it.
fn mounted_below(table: &[u8], dir: &Path) -> Option<PathBuf> {
    let points = table.split(|b| *b == b'\n').filter_map(|line| line.split(|b| *b == b' ').nth(4));
    points.map(|p| PathBuf::from(OsString::from_vec(unescape(p)))).find(|point| point.starts_with(dir))
}

/// Blank, tab, line break and backslash are written as `\ooo`.
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, tail)) = rest.split_first() {
        let code = tail.get(..3).filter(|_| *first == b'\\').and_then(|d| std::str::from_utf8(d).ok());
        match code.and_then(|d| u8::from_str_radix(d, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                rest = &tail[3..];
            }
            None => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    out
}

/// Jailed VMMs run as other users: what they are handed is readable whatever the umask here is.
fn readable(path: &Path) -> io::Result<()> {
    let is_dir = fs::symlink_metadata(path)?.is_dir();
    fs::set_permissions(path, fs::Permissions::from_mode(if is_dir { 0o755 } else { 0o644 }))?;
    if is_dir {
        for entry in fs::read_dir(path)? {
            readable(&entry?.path())?;
        }
    }
    Ok(())
}

fn remove(path: &Path) -> io::Result<()> {
    if path.is_dir() && !path.is_symlink() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

/// SHA-256 of `parts`, each preceded by its length, in hexadecimal.
pub(super) fn digest_of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hex::encode(hash.finalize())
}

/// Plain SHA-256 of a file, in hexadecimal.
pub(super) fn digest_file(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 256 * 1024];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(hex::encode(hash.finalize())),
            Ok(n) => hash.update(&buffer[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// Writes `value` as indented JSON.
pub(super) fn write_json(path: &Path, value: &impl serde::Serialize) -> Result<(), ImageError> {
    let write = || -> io::Result<()> {
        let mut file = File::create(path)?;
        serde_json::to_writer_pretty(&mut file, value)?;
        file.write_all(b"\n")
    };
    write().map_err(|e| ImageError::io("writing a manifest", e))
}

/// Writes `value` as JSON in place of the file at `path`: a reader sees the old or the new, whole, and it is on the disk.
pub(super) fn replace_json(path: &Path, value: &impl serde::Serialize) -> Result<(), ImageError> {
    let write = || -> io::Result<()> {
        let parent = path.parent().unwrap_or(Path::new("."));
        let mut half = tempfile::Builder::new().prefix(".half-").tempfile_in(parent)?;
        serde_json::to_writer_pretty(&mut half, value)?;
        half.as_file().sync_all()?;
        half.persist(path)?;
        File::open(parent)?.sync_all()
    };
    write().map_err(|e| ImageError::io("writing to the data directory", e))
}

/// Reads a manifest; `None` when it is not there or not of the present form.
pub(super) fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Milliseconds since 1970.
pub(super) fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(bench: &Bench, text: &str) -> (TempDir, PathBuf) {
        let work = bench.workspace().expect("workspace");
        let dir = work.path().join("thing");
        fs::create_dir(&dir).expect("mkdir");
        fs::write(dir.join("file"), text).expect("write");
        (work, dir)
    }

    #[test]
    fn publishing_replaces_whole_and_leaves_nothing_behind() {
        let data = tempfile::tempdir().expect("dir");
        let bench = Bench::take(data.path(), "templates", &Silent).expect("bench");
        let place = data.path().join("templates/x");
        for text in ["one", "two"] {
            let (work, dir) = made(&bench, text);
            bench.publish(&dir, &place).expect("published");
            drop(work);
            assert_eq!(fs::read_to_string(place.join("file")).expect("read"), text);
        }
        assert_eq!(fs::read_dir(data.path().join("tmp")).expect("tmp").count(), 0);
        assert!(bench.discard(&place).expect("removed") && !place.exists());
        assert!(!bench.discard(&place).expect("nothing there"));
    }

    #[test]
    fn a_second_builder_waits_and_can_give_up_and_a_crashed_one_is_cleaned_up_after() {
        struct GiveUp;
        impl Progress for GiveUp {
            fn event(&self, _: Event<'_>) {}
            fn cancelled(&self) -> bool {
                true
            }
        }
        let data = tempfile::tempdir().expect("dir");
        let bench = Bench::take(data.path(), "guest", &Silent).expect("bench");
        assert!(matches!(Bench::take(data.path(), "guest", &GiveUp), Err(ImageError::Cancelled)));
        assert!(Bench::try_take(data.path(), "guest").expect("asks").is_none());
        assert!(Bench::take(data.path(), "templates", &GiveUp).is_ok(), "other shelves are free");
        let left = made(&bench, "half").0.keep();
        let other = data.path().join("tmp/image-templates-other");
        fs::create_dir(&other).expect("mkdir");
        drop(bench);
        let _bench = Bench::take(data.path(), "guest", &Silent).expect("free again");
        assert!(!left.exists() && other.exists());
    }

    #[test]
    fn mounts_below_a_directory_are_found_whatever_they_are_called() {
        let table = b"22 1 0:20 / /sys rw - sysfs sys rw\n30 1 0:9 / /data/tmp/image\\040a/dev/shm rw - tmpfs t rw\n\
                      31 1 0:9 / /data/tmp/image-b rw - tmpfs t rw\n";
        let below = |dir: &str| mounted_below(table, Path::new(dir));
        assert_eq!(below("/data/tmp/image a").expect("found"), Path::new("/data/tmp/image a/dev/shm"));
        assert_eq!(below("/data/tmp/image-b").expect("itself"), Path::new("/data/tmp/image-b"));
        assert_eq!(below("/data/tmp/image"), None);
        assert!(refuse_mounts(Path::new("/proc")).is_err() && refuse_mounts(Path::new("/no/such")).is_ok());
    }

    #[test]
    fn digests_depend_on_where_parts_end() {
        assert_ne!(digest_of([&b"ab"[..], b"c"]), digest_of([&b"a"[..], b"bc"]));
        let file = tempfile::NamedTempFile::new().expect("file");
        fs::write(file.path(), "abc").expect("write");
        let want = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(digest_file(file.path()).expect("read"), want);
    }
}
