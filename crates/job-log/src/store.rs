//! Where the segments of a log are: files in a folder, or memory where the disk has no room and the owner agreed to that.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use crate::Limits;
use crate::frame::{LaneId, SegmentHead};
use crate::lane::{make_segment, path_of, read_at_most};

/// How much of each output is kept in memory, from where that begins: about a mebibyte, never more than 2.5.
pub(crate) const MEMORY_LIMITS: Limits = Limits { segment_bytes: 256 * 1024, head_segments: 2, tail_segments: 2 };

/// An open segment.
#[derive(Debug)]
pub(crate) enum SegmentFile {
    Disk(File),
    Memory(Arc<RwLock<Vec<u8>>>),
}

impl SegmentFile {
    pub(crate) fn write_all_at(&self, data: &[u8], at: u64) -> io::Result<()> {
        match self {
            Self::Disk(file) => file.write_all_at(data, at),
            Self::Memory(bytes) => {
                let mut bytes = bytes.write().unwrap_or_else(PoisonError::into_inner);
                // What an append that failed has left behind is written over.
                bytes.truncate(usize::try_from(at).unwrap_or(usize::MAX));
                bytes.extend_from_slice(data);
                Ok(())
            }
        }
    }

    pub(crate) fn read_at_most(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        match self {
            Self::Disk(file) => read_at_most(file, buffer, at),
            Self::Memory(bytes) => {
                let bytes = bytes.read().unwrap_or_else(PoisonError::into_inner);
                let rest = usize::try_from(at).ok().and_then(|at| bytes.get(at..)).unwrap_or_default();
                let n = rest.len().min(buffer.len());
                buffer[..n].copy_from_slice(&rest[..n]);
                Ok(n)
            }
        }
    }
}

#[derive(Debug, Default)]
struct Memory {
    spilled: bool,
    /// Number of the first segment of each lane that is here.
    first: [Option<u32>; 3],
    segments: HashMap<(u8, u32), Arc<RwLock<Vec<u8>>>>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Store {
    dir: PathBuf,
    memory: Mutex<Memory>,
}

impl Store {
    /// In the folder `dir`.
    pub(crate) fn on_disk(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), memory: Mutex::default() }
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on segments are made in memory.
    pub(crate) fn spill(&self) {
        self.memory().spilled = true;
    }

    /// Whether segments are made in memory.
    pub(crate) fn is_spilled(&self) -> bool {
        self.memory().spilled
    }

    /// Whether a lane must go on in a new segment, because that with this number is on the disk and the disk is full.
    pub(crate) fn is_left(&self, lane: LaneId, number: u32) -> bool {
        let memory = self.memory();
        memory.spilled && !memory.segments.contains_key(&(lane as u8, number))
    }

    /// Segments that are kept from the beginning of a lane: in memory those that were on the disk by then, and some more.
    pub(crate) fn head_segments(&self, lane: LaneId, limits: Limits) -> u32 {
        self.memory().first[lane as usize].map_or(0, |first| first).saturating_add(limits.head_segments)
    }

    /// Makes a segment and writes its head.
    pub(crate) fn make(&self, number: u32, head: &SegmentHead) -> io::Result<SegmentFile> {
        let mut memory = self.memory();
        if !memory.spilled {
            return make_segment(&self.dir, number, head).map(SegmentFile::Disk);
        }
        let bytes = Arc::new(RwLock::new(head.encode().to_vec()));
        memory.first[head.lane as usize].get_or_insert(number);
        memory.segments.insert((head.lane as u8, number), Arc::clone(&bytes));
        Ok(SegmentFile::Memory(bytes))
    }

    /// Opens a segment.
    pub(crate) fn open(&self, lane: LaneId, number: u32, write: bool) -> io::Result<SegmentFile> {
        if let Some(bytes) = self.memory().segments.get(&(lane as u8, number)) {
            return Ok(SegmentFile::Memory(Arc::clone(bytes)));
        }
        let path = path_of(&self.dir, lane, number);
        OpenOptions::new().read(true).write(write).open(path).map(SegmentFile::Disk)
    }

    /// Cuts a segment back to `len` bytes, as far as that can be done.
    pub(crate) fn cut(&self, lane: LaneId, number: u32, len: u64) {
        if let Ok(SegmentFile::Disk(file)) = self.open(lane, number, true) {
            let _ = file.set_len(len);
        }
    }

    /// Removes a segment.
    pub(crate) fn remove(&self, lane: LaneId, number: u32) -> io::Result<()> {
        if self.memory().segments.remove(&(lane as u8, number)).is_some() {
            return Ok(());
        }
        std::fs::remove_file(path_of(&self.dir, lane, number))
    }

    /// Removes everything. That it is gone already is no error.
    pub(crate) fn clear(&self) -> io::Result<()> {
        self.memory().segments.clear();
        match std::fs::remove_dir_all(&self.dir) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}
