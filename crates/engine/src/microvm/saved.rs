//! What is kept of a snapshot: `snapshots/KEY/`. It is made under another name and renamed when all of it is on disk, so it is
//! whole or not there.
//!
//! ```text
//! manifest.json   what it is, with the digest of every part
//! layers.json     the disks of [`super::disks`] it needs, the machine's last overlay uppermost
//! base.raw        what is below them
//! root.erofs      the root image of its template as it was
//! device, memory  what was copied of the running machine; full snapshots only
//! ```
//!
//! The first, the base and the root image are second names of files that others use, too; nobody writes to any of them again.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use mainbrella_types::{SizeClass, SnapshotKind, TemplateName};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::capture::kept;
use super::delta::Delta;
use super::disks::{self, Disks};
use super::folder::BASE;
use super::fork::{DEVICE, MEMORY};
use super::pagemap::PAGE;
use super::sealed_memory::{CHUNK, extents, runs, save_sparse};
use crate::error::DriverError;

const MANIFEST: &str = "manifest.json";
/// The root image.
pub(super) const ROOT: &str = "root.erofs";
const VERSION: u32 = 1;
const MANIFEST_BYTES_MAX: u64 = 64 * 1024;

/// A part of it, to be told from a damaged one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Part {
    bytes: u64,
    digest: String,
}

/// What it is, in words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Manifest {
    version: u32,
    kind: String,
    template: String,
    size: String,
    /// Digest of the root image.
    pub(super) root: String,
    /// Key of the frozen template that the memory is beside, and which making of it.
    pub(super) frozen: String,
    pub(super) making: String,
    base: Part,
    layers: Vec<Part>,
    device: Option<Part>,
    /// Its digest is the one in its head.
    memory: Option<Part>,
}

/// What a manifest is of.
pub(super) struct Subject<'a> {
    pub(super) kind: SnapshotKind,
    pub(super) template: &'a str,
    pub(super) size: &'a str,
    pub(super) root: &'a str,
    pub(super) frozen: &'a str,
    pub(super) making: &'a str,
}

fn damaged(why: &str) -> DriverError {
    DriverError::Damaged(why.to_owned())
}

impl Manifest {
    /// How much was saved.
    pub(super) fn kind(&self) -> Result<SnapshotKind, DriverError> {
        self.kind.parse().map_err(|_| damaged("its manifest says no kind"))
    }

    /// Template and size.
    pub(super) fn names(&self) -> Result<(TemplateName, SizeClass), DriverError> {
        match (self.template.parse(), self.size.parse()) {
            (Ok(template), Ok(size)) => Ok((template, size)),
            _ => Err(damaged("its manifest names no template or size")),
        }
    }
}

/// Files whose digest is known: they were read whole in this life of the service and are the same since.
#[derive(Debug, Default)]
pub(super) struct Known(Mutex<HashSet<(Stamp, [u8; 32])>>);

/// What tells one state of a file from another without reading it: device, inode, length, times of change.
type Stamp = (u64, u64, u64, [(i64, i64); 2]);

/// Who could have changed a file.
#[derive(Clone, Copy)]
enum Writer {
    /// A VMM that still holds the descriptor with which it wrote it, and that a guest may have taken over. It can set back the
    /// time of the last write, but not that of the last change.
    Vmm,
    /// The service alone. That it got another name is a change, too, and tells nothing.
    Service,
}

fn stamp(file: &File, writer: Writer) -> io::Result<Stamp> {
    let m = file.metadata()?;
    let changed = match writer {
        Writer::Vmm => (m.ctime(), m.ctime_nsec()),
        Writer::Service => (0, 0),
    };
    Ok((m.dev(), m.ino(), m.len(), [(m.mtime(), m.mtime_nsec()), changed]))
}

impl Known {
    /// The digest of a file: of every page of it that is not all zero, with its place. Where the file has holes makes no
    /// difference. Reads it all, unless it is known to be `expected`. Blocks.
    fn digest(&self, (file, writer): (&File, Writer), expected: Option<[u8; 32]>) -> io::Result<[u8; 32]> {
        let known = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = stamp(file, writer)?;
        if let Some(expected) = expected
            && known().contains(&(before, expected))
        {
            return Ok(expected);
        }
        let digest = read_whole(file, before.2)?;
        if stamp(file, writer)? == before {
            known().insert((before, digest));
        }
        Ok(digest)
    }

    fn part(&self, path: &Path, writer: Writer) -> io::Result<Part> {
        let file = File::open(path)?;
        file.sync_all()?;
        Ok(Part { bytes: file.metadata()?.len(), digest: hex::encode(self.digest((&file, writer), None)?) })
    }

    /// Whether the file at `path` is as it was.
    fn holds(&self, part: &Part, path: &Path, writer: Writer) -> io::Result<bool> {
        let file = match File::open(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
            opened => opened?,
        };
        let mut expected = [0; 32];
        if hex::decode_to_slice(&part.digest, &mut expected).is_err() || file.metadata()?.len() != part.bytes {
            return Ok(false);
        }
        Ok(self.digest((&file, writer), Some(expected))? == expected)
    }
}

fn read_whole(file: &File, bytes: u64) -> io::Result<[u8; 32]> {
    let mut hash = Sha256::new();
    hash.update(bytes.to_le_bytes());
    let mut buffer = vec![0u8; CHUNK];
    extents(file, bytes, |mut at, end| {
        // Blocks of a file system may be larger or smaller than a page.
        at -= at % PAGE;
        while at < end {
            let n = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
            file.read_exact_at(&mut buffer[..n], at)?;
            for (offset, run) in runs(&buffer[..n]) {
                for (page, place) in run.chunks(PAGE as usize).zip((at + offset as u64..).step_by(PAGE as usize)) {
                    hash.update(place.to_le_bytes());
                    hash.update(page);
                }
            }
            at += n as u64;
        }
        Ok(())
    })?;
    Ok(hash.finalize().into())
}

/// Brings everything in `half` to disk and gives it its name. Blocks.
pub(super) fn publish(
    half: &Path,
    to: &Path,
    (layers, memory): (&[String], Option<&Delta>),
    subject: &Subject<'_>,
    (disks, known): (&Disks, &Known),
) -> Result<(), DriverError> {
    let io = |e| DriverError::io("keeping a snapshot", e);
    let sync = |path: &Path| File::open(path).and_then(|f| f.sync_all()).map_err(io);
    let memory = match memory {
        None => None,
        Some(delta) => {
            let digest = hex::encode(delta.seal().map_err(kept)?);
            let path = half.join(MEMORY);
            if path.exists() {
                sync(&path)?;
            } else {
                // It was copied within memory, which is quicker.
                save_sparse(delta.file(), &path).map_err(io)?;
            }
            Some(Part { bytes: delta.bytes(), digest })
        }
    };
    let device = memory.as_ref().map(|_| known.part(&half.join(DEVICE), Writer::Vmm)).transpose().map_err(io)?;
    let parts = layers.iter().map(|id| known.part(&disks.path(id), Writer::Vmm));
    let manifest = Manifest {
        version: VERSION,
        kind: subject.kind.to_string(),
        template: subject.template.to_owned(),
        size: subject.size.to_owned(),
        root: subject.root.to_owned(),
        frozen: subject.frozen.to_owned(),
        making: subject.making.to_owned(),
        base: known.part(&half.join(BASE), Writer::Service).map_err(io)?,
        layers: parts.collect::<io::Result<_>>().map_err(io)?,
        device,
        memory,
    };
    disks::write(half, layers).map_err(io)?;
    let text = serde_json::to_vec_pretty(&manifest).map_err(|e| io(e.into()))?;
    let path = half.join(MANIFEST);
    fs::write(&path, text).map_err(io)?;
    sync(&path)?;
    sync(half)?;
    fs::rename(half, to).map_err(io)?;
    match to.parent() {
        Some(parent) => sync(parent),
        None => Ok(()),
    }
}

/// Reads the manifest of the snapshot in `place`. Blocks.
pub(super) fn read_manifest(place: &Path) -> Result<Manifest, DriverError> {
    let path = place.join(MANIFEST);
    match fs::metadata(&path) {
        Ok(m) if m.len() <= MANIFEST_BYTES_MAX => {}
        Ok(_) => return Err(damaged("its manifest is too long")),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(damaged("it is not on this host")),
        Err(e) => return Err(DriverError::io("reading a snapshot", e)),
    }
    let text = fs::read(&path).map_err(|e| DriverError::io("reading a snapshot", e))?;
    let manifest: Manifest = serde_json::from_slice(&text).map_err(|_| damaged("its manifest cannot be read"))?;
    if manifest.version == VERSION { Ok(manifest) } else { Err(damaged("its manifest is of another version")) }
}

/// What of a snapshot is its own.
pub(super) struct Content {
    /// Its disks, the uppermost last.
    pub(super) layers: Vec<String>,
    /// What is below them.
    pub(super) base: PathBuf,
    /// Devices' state and memory.
    pub(super) running: Option<(PathBuf, Arc<Delta>)>,
}

/// Checks all of the snapshot in `place`. Blocks for as long as it takes to read it, the first time.
pub(super) fn check(place: &Path, manifest: &Manifest, disks: &Disks, known: &Known) -> Result<Content, DriverError> {
    let io = |e: io::Error| DriverError::io("reading a snapshot", e);
    let whole = |part: &Part, path: &Path, writer, what: &str| match known.holds(part, path, writer) {
        Ok(true) => Ok(()),
        Ok(false) => Err(DriverError::Damaged(format!("{what} is damaged"))),
        Err(e) => Err(io(e)),
    };
    let layers = disks::read(place).map_err(|e| DriverError::Damaged(e.to_string()))?;
    if layers.len() != manifest.layers.len() {
        return Err(damaged("its list of disks is another one's"));
    }
    let base = place.join(BASE);
    whole(&manifest.base, &base, Writer::Service, "its base disk")?;
    for (id, part) in layers.iter().zip(&manifest.layers) {
        whole(part, &disks.path(id), Writer::Vmm, "its disk")?;
    }
    let running = match (&manifest.device, &manifest.memory) {
        (Some(device), Some(memory)) => {
            let path = place.join(DEVICE);
            whole(device, &path, Writer::Vmm, "its devices' state")?;
            let (_, size) = manifest.names()?;
            let file = File::open(place.join(MEMORY)).map_err(|_| damaged("its memory is missing"))?;
            let pages = (u64::from(size.spec().memory_mib) << 20) / PAGE;
            let (delta, digest) = Delta::open(file, pages).map_err(kept)?;
            if hex::encode(digest) != memory.digest || delta.bytes() != memory.bytes {
                return Err(damaged("its memory is another machine's"));
            }
            Some((path, Arc::new(delta)))
        }
        (None, None) => None,
        _ => return Err(damaged("half of its memory is missing")),
    };
    if running.is_some() != (manifest.kind()? == SnapshotKind::Full) {
        return Err(damaged("it is not what it says it is"));
    }
    Ok(Content { layers, base, running })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_tells_every_page_and_place_and_no_holes() {
        let t = tempfile::tempdir().expect("temp dir");
        let write = |name: &str, bytes: &[(u64, u8)]| {
            let file = File::options().read(true).write(true).create_new(true).open(t.path().join(name)).expect("new");
            file.set_len(10 * PAGE + 7).expect("length");
            for (at, byte) in bytes {
                file.write_all_at(&[*byte], *at).expect("write");
            }
            file.sync_all().expect("sync");
            file
        };
        let known = Known::default();
        let digest = |file: &File| known.digest((file, Writer::Vmm), None).expect("read");
        let base = digest(&write("a", &[(5, 1), (3 * PAGE, 2)]));
        assert_eq!(base, digest(&write("b", &[(5, 1), (3 * PAGE, 2), (8 * PAGE, 0)])), "zeros written are zeros");
        for (name, bytes) in [
            ("c", &[(5, 1), (3 * PAGE, 3)][..]),
            ("d", &[(5, 1), (4 * PAGE, 2)]),
            ("e", &[(5, 1)]),
            ("f", &[(5, 1), (3 * PAGE, 2), (10 * PAGE + 6, 1)]),
        ] {
            assert_ne!(base, digest(&write(name, bytes)), "{name}");
        }
    }

    #[test]
    fn what_was_read_once_is_believed_until_it_changes() {
        let t = tempfile::tempdir().expect("temp dir");
        let path = t.path().join("disk");
        fs::write(&path, vec![1; 100_000]).expect("write");
        let written = fs::metadata(&path).and_then(|m| m.modified()).expect("time");
        let known = Known::default();
        let part = known.part(&path, Writer::Vmm).expect("read");
        assert!(
            known.holds(&part, &path, Writer::Vmm).expect("read")
                && Known::default().holds(&part, &path, Writer::Vmm).expect("read")
        );
        let file = File::options().write(true).open(&path).expect("open");
        file.write_all_at(&[2], 50_000).expect("write");
        // As somebody would who does not want it to be seen.
        file.set_modified(written).expect("set back");
        assert!(!known.holds(&part, &path, Writer::Vmm).expect("read"));
        fs::write(&path, vec![1; 99_999]).expect("write");
        assert!(!known.holds(&part, &path, Writer::Vmm).expect("read"));
        fs::remove_file(&path).expect("remove");
        assert!(!known.holds(&part, &path, Writer::Vmm).expect("read"));
    }
}
