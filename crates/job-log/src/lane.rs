//! One row of segment files: finding, scanning, and what is known of them.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use bytes::Bytes;

use crate::frame::{Body, FRAME_HEAD, Frame, LaneId, SEGMENT_HEAD, SegmentHead};

/// Longest segment that is read as a whole, bytes; none of ours is longer.
const SEGMENT_READ_MAX: u64 = 256 * 1024 * 1024;

/// A segment as far as it is whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) number: u32,
    /// Bytes of whole frames and the head.
    pub(crate) len: u64,
    pub(crate) prev_cursor: u64,
    pub(crate) first_offset: u64,
    pub(crate) last_cursor: u64,
    pub(crate) end_offset: u64,
}

/// What is known of a lane. A small copy of it is all a reader needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lane {
    pub(crate) id: LaneId,
    /// By number; numbers that are missing were dropped.
    pub(crate) segments: Vec<Segment>,
    /// Cursor and offset it ended with, where the log has ended and more was lost of it than is found.
    pub(crate) promised: Option<(u64, u64)>,
}

impl Lane {
    pub(crate) fn empty(id: LaneId) -> Self {
        Self { id, segments: Vec::new(), promised: None }
    }

    pub(crate) fn last_cursor(&self) -> u64 {
        if let Some((cursor, _)) = self.promised {
            return cursor;
        }
        self.segments.last().map_or(0, |s| s.last_cursor)
    }

    pub(crate) fn end_offset(&self) -> u64 {
        if let Some((_, offset)) = self.promised {
            return offset;
        }
        self.segments.last().map_or(0, |s| s.end_offset)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.segments.iter().map(|s| s.len).sum()
    }

    /// Parts of the stream that are not kept: where each begins and how long it is.
    pub(crate) fn gaps(&self) -> Vec<(u64, u64)> {
        let mut at = 0;
        let ends = self.segments.iter().map(|s| (s.first_offset, s.end_offset));
        ends.chain([(self.end_offset(), self.end_offset())])
            .filter_map(|(first, end)| {
                let gap = (at, first.saturating_sub(at));
                at = end.max(at);
                (gap.1 > 0).then_some(gap)
            })
            .collect()
    }

    /// Bytes of the stream that are not kept.
    pub(crate) fn omitted(&self) -> u64 {
        self.gaps().iter().map(|(_, length)| length).sum()
    }
}

pub(crate) fn path_of(dir: &Path, lane: LaneId, number: u32) -> PathBuf {
    let name = match lane {
        LaneId::Control => "control",
        LaneId::Stdout => "stdout",
        LaneId::Stderr => "stderr",
    };
    dir.join(format!("{name}-{number:08}"))
}

pub(crate) fn make_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Makes a segment and writes its head.
pub(crate) fn make_segment(dir: &Path, number: u32, head: &SegmentHead) -> io::Result<File> {
    let path = path_of(dir, head.lane, number);
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all_at(&head.encode(), 0)?;
    Ok(file)
}

/// A frame that was found whole, without its bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) cursor: u64,
    pub(crate) seen: [u64; 3],
    /// Where it ends in the file.
    pub(crate) end: u64,
    /// Where its bytes end in the stream.
    pub(crate) end_offset: u64,
}

/// A segment read whole.
pub(crate) struct Scan {
    pub(crate) found: Vec<Found>,
    pub(crate) frames: Vec<Frame>,
}

/// Reads a segment up to the first thing in it that is not whole or not in order. `None`: not even its head is.
pub(crate) fn scan(path: &Path, lane: LaneId, keep_frames: bool) -> io::Result<Option<Scan>> {
    let file = File::open(path)?;
    let size = file.metadata()?.len().min(SEGMENT_READ_MAX);
    let mut bytes = vec![0; usize::try_from(size).unwrap_or(0)];
    let read = read_at_most(&file, &mut bytes, 0)?;
    bytes.truncate(read);
    let bytes = Bytes::from(bytes);
    let Some(head) = SegmentHead::decode(&bytes).filter(|head| head.lane == lane) else { return Ok(None) };
    let mut scan = Scan { found: Vec::new(), frames: Vec::new() };
    let (mut at, mut cursor, mut offset) = (SEGMENT_HEAD, head.prev_cursor, head.first_offset);
    while let Some((frame, next)) = frame_at(&bytes, at) {
        if !follows(&frame, lane, cursor, offset) {
            break;
        }
        if !matches!(frame.body, Body::Note(_)) {
            cursor = frame.cursor;
        }
        if let Body::Output { data, .. } = &frame.body {
            offset += data.len() as u64;
        }
        at = next;
        scan.found.push(Found { cursor, seen: frame.seen, end: at as u64, end_offset: offset });
        if keep_frames {
            scan.frames.push(frame);
        }
    }
    Ok(Some(scan))
}

/// The frame that begins at `at`, and where the next one does.
pub(crate) fn frame_at(bytes: &Bytes, at: usize) -> Option<(Frame, usize)> {
    let rest = bytes.get(at..)?;
    if rest.len() < FRAME_HEAD {
        return None;
    }
    let end = at + Frame::length(rest)?;
    if end > bytes.len() {
        return None;
    }
    Some((Frame::decode(&bytes.slice(at..end))?, end))
}

/// Whether a frame may stand in `lane` after one with `cursor` that ended at `offset` of the stream.
pub(crate) fn follows(frame: &Frame, lane: LaneId, cursor: u64, offset: u64) -> bool {
    match &frame.body {
        Body::Note(_) => lane == LaneId::Control,
        Body::Started { .. } | Body::Exit(_) => lane == LaneId::Control && frame.cursor > cursor,
        Body::Output { offset: first, data } => {
            lane != LaneId::Control
                && frame.cursor > cursor
                && *first == offset
                && first.checked_add(data.len() as u64).is_some()
        }
    }
}

pub(crate) fn read_at_most(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    let mut read = 0;
    while read < buffer.len() {
        match file.read_at(&mut buffer[read..], at + read as u64) {
            Ok(0) => break,
            Ok(n) => read += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(read)
}

/// Numbers of the segments of each lane that are in `dir`.
fn numbers(dir: &Path) -> io::Result<BTreeMap<(u8, u32), ()>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(dir)? {
        let name = entry?.file_name();
        let Some((lane, number)) = name.to_str().and_then(|name| name.split_once('-')) else { continue };
        let lane = match lane {
            "control" => LaneId::Control,
            "stdout" => LaneId::Stdout,
            "stderr" => LaneId::Stderr,
            _ => continue,
        };
        if let Ok(number) = number.parse() {
            found.insert((lane as u8, number), ());
        }
    }
    Ok(found)
}

/// A lane while a log is being opened: its segments, with the frames of those that were looked into.
pub(crate) struct Opening {
    dir: PathBuf,
    pub(crate) lane: Lane,
    /// Frames of the last segment.
    top: Vec<Found>,
    /// Segments in which nothing is whole.
    hopeless: Vec<u32>,
}

impl Opening {
    /// Finds the segments of `id` and looks into the last one.
    pub(crate) fn find(dir: &Path, id: LaneId) -> io::Result<Self> {
        let mut this = Self { dir: dir.to_owned(), lane: Lane::empty(id), top: Vec::new(), hopeless: Vec::new() };
        for (lane, number) in numbers(dir)?.into_keys() {
            if lane != id as u8 {
                continue;
            }
            match head_of(&path_of(dir, id, number), id)? {
                Some((head, len)) => this.lane.segments.push(Segment {
                    number,
                    len,
                    prev_cursor: head.prev_cursor,
                    first_offset: head.first_offset,
                    // Put right below, by the segment that follows or by a look.
                    last_cursor: head.prev_cursor,
                    end_offset: head.first_offset,
                }),
                None => this.hopeless.push(number),
            }
        }
        let segments = &mut this.lane.segments;
        // A head that does not go on from the one before belongs to nothing.
        segments
            .dedup_by(|next, before| next.prev_cursor < before.prev_cursor || next.first_offset < before.first_offset);
        let holes: Vec<usize> = (1..segments.len())
            .filter(|i| {
                let (before, next) = (segments[i - 1], segments[*i]);
                let whole = before.number + 1 == next.number;
                if whole {
                    segments[i - 1].last_cursor = next.prev_cursor;
                    segments[i - 1].end_offset = next.first_offset;
                }
                !whole
            })
            .map(|i| i - 1)
            .collect();
        for i in holes {
            this.look(i)?;
        }
        this.look_at_top()?;
        Ok(this)
    }

    fn look(&mut self, i: usize) -> io::Result<Vec<Found>> {
        let Some(segment) = self.lane.segments.get_mut(i) else { return Ok(Vec::new()) };
        let found = scan(&path_of(&self.dir, self.lane.id, segment.number), self.lane.id, false)?;
        let found = found.map(|scan| scan.found).unwrap_or_default();
        set_end(segment, found.last());
        Ok(found)
    }

    fn look_at_top(&mut self) -> io::Result<()> {
        self.top = match self.lane.segments.len() {
            0 => Vec::new(),
            n => self.look(n - 1)?,
        };
        Ok(())
    }

    /// Drops frames from the end whose predecessors in the other lanes are not there. Says whether it did.
    pub(crate) fn cut_to(&mut self, last: [u64; 3]) -> io::Result<bool> {
        let own = self.lane.id as usize;
        let mut cut = false;
        loop {
            let orphan = |f: &Found| (0..3).any(|lane| lane != own && f.seen[lane] > last[lane]);
            while self.top.last().is_some_and(orphan) {
                self.top.pop();
                cut = true;
            }
            let Some(segment) = self.lane.segments.last_mut() else { return Ok(cut) };
            set_end(segment, self.top.last());
            if !self.top.is_empty() {
                return Ok(cut);
            }
            // Nothing of it is left: the one before is the last.
            self.hopeless.push(segment.number);
            self.lane.segments.pop();
            cut = true;
            self.look_at_top()?;
        }
    }

    /// Makes the files be what was found whole.
    pub(crate) fn repair(&self) -> io::Result<()> {
        for number in &self.hopeless {
            std::fs::remove_file(path_of(&self.dir, self.lane.id, *number))?;
        }
        if let Some(last) = self.lane.segments.last() {
            let file = OpenOptions::new().write(true).open(path_of(&self.dir, self.lane.id, last.number))?;
            if file.metadata()?.len() != last.len {
                file.set_len(last.len)?;
            }
        }
        Ok(())
    }
}

fn set_end(segment: &mut Segment, last: Option<&Found>) {
    segment.len = last.map_or(SEGMENT_HEAD as u64, |f| f.end);
    segment.last_cursor = last.map_or(segment.prev_cursor, |f| f.cursor);
    segment.end_offset = last.map_or(segment.first_offset, |f| f.end_offset);
}

fn head_of(path: &Path, lane: LaneId) -> io::Result<Option<(SegmentHead, u64)>> {
    let file = File::open(path)?;
    let mut bytes = [0; SEGMENT_HEAD];
    let read = read_at_most(&file, &mut bytes, 0)?;
    let head = SegmentHead::decode(&bytes[..read]).filter(|head| head.lane == lane);
    Ok(head.map(|head| (head, 0)).map(|(head, _)| (head, file.metadata().map_or(0, |m| m.len()))))
}
