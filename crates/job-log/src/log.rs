//! The log: one writer, any number of readers.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use crate::frame::{Body, Frame, LaneId, SEGMENT_HEAD, SegmentHead};
use crate::lane::{Lane, Opening, Segment, make_dir, path_of, scan};
use crate::reader::{OutputReader, Reader};
use crate::store::{MEMORY_LIMITS, SegmentFile, Store};
use crate::{DATA_MAX, Entry, Event, Exit, Limits, NOTE_MAX, Stream};

/// Why a log cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The disk.
    #[error("the files of the log cannot be read: {0}")]
    Io(#[from] io::Error),
    /// Not even its first frame is whole.
    #[error("the beginning of the log is damaged")]
    Damaged,
}

/// Where a log stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Cursor of the last event; 0: none.
    pub cursor: u64,
    /// The process, once it has started.
    pub pid: Option<u32>,
    /// Bytes of standard output so far.
    pub stdout_bytes: u64,
    /// Bytes of standard error so far.
    pub stderr_bytes: u64,
    /// Bytes of standard output that are not kept.
    pub stdout_omitted: u64,
    /// Bytes of standard error that are not kept.
    pub stderr_omitted: u64,
    /// The end and its time, milliseconds since the epoch.
    pub exit: Option<(Exit, i64)>,
    /// Bytes on disk.
    pub disk_bytes: u64,
}

/// What writer and readers share.
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) lanes: [Lane; 3],
    pub(crate) cursor: u64,
    pub(crate) pid: Option<u32>,
    pub(crate) exit: Option<(Exit, i64)>,
}

impl State {
    fn last(&self) -> [u64; 3] {
        [0, 1, 2].map(|i| self.lanes[i].last_cursor())
    }
}

/// The log of one job. Appending and reading may be done from several threads; appends are one after the other.
#[derive(Debug)]
pub struct JobLog {
    store: Store,
    limits: Limits,
    writer: Mutex<Writer>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct Writer {
    /// The last segment of each lane, while it is open.
    files: [Option<Arc<SegmentFile>>; 3],
    note: Bytes,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is left half-changed by a panic: new state is made aside and put in place at once.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl JobLog {
    /// Makes the log of a new job in `dir`, which is made too. `note` is the owner's, given back by [`Self::note`].
    ///
    /// # Errors
    /// When the files cannot be made, or the note is longer than [`NOTE_MAX`].
    pub fn create(dir: &Path, note: &[u8], limits: Limits) -> io::Result<Self> {
        make_dir(dir)?;
        let log = Self::empty(dir, limits);
        log.set_note(note)?;
        Ok(log)
    }

    /// As [`Self::create`], in memory: it is gone with this value, and keeps about a mebibyte of each output, half from
    /// the beginning and half from the end. Nothing is made in `dir`.
    ///
    /// # Errors
    /// When the note is longer than [`NOTE_MAX`].
    pub fn create_in_memory(dir: &Path, note: &[u8], limits: Limits) -> io::Result<Self> {
        let log = Self::empty(dir, limits);
        log.spill();
        log.set_note(note)?;
        Ok(log)
    }

    fn empty(dir: &Path, limits: Limits) -> Self {
        let state = State { lanes: LaneId::ALL.map(Lane::empty), cursor: 0, pid: None, exit: None };
        Self { store: Store::on_disk(dir), limits, writer: Mutex::default(), state: Mutex::new(state) }
    }

    /// Keeps in memory what is appended from now on: for a log whose owner would rather lose it with this process than
    /// wait for room on the disk. What is on the disk stays there. Of what comes about a mebibyte of each output is kept.
    pub fn spill(&self) {
        let mut writer = lock(&self.writer);
        self.store.spill();
        writer.files = [None, None, None];
    }

    /// Opens a log that was made before. What was torn is cut off, on disk too.
    ///
    /// # Errors
    /// When the files cannot be read, or the beginning is damaged.
    pub fn open(dir: &Path, limits: Limits) -> Result<Self, OpenError> {
        let control = scan(&path_of(dir, LaneId::Control, 0), LaneId::Control, true)?.ok_or(OpenError::Damaged)?;
        let Some(Frame { body: Body::Note(_), .. }) = control.frames.first() else { return Err(OpenError::Damaged) };
        let mut lanes = [
            Opening::find(dir, LaneId::Control)?,
            Opening::find(dir, LaneId::Stdout)?,
            Opening::find(dir, LaneId::Stderr)?,
        ];
        let ended = control.frames.iter().find_map(|frame| match &frame.body {
            Body::Exit(exit) => Some((frame.seen, *exit)),
            _ => None,
        });
        // Of a log that has ended nothing is taken back: what is missing at its end is a gap.
        while ended.is_none() {
            let last = [0, 1, 2].map(|i| lanes[i].lane.last_cursor());
            let mut cut = false;
            for lane in &mut lanes {
                cut |= lane.cut_to(last)?;
            }
            if !cut {
                break;
            }
        }
        if ended.is_none() {
            for lane in &lanes {
                lane.repair()?;
            }
        }
        let mut lanes = lanes.map(|opening| opening.lane);
        if let Some((seen, exit)) = ended {
            for (id, end) in [(LaneId::Stdout, exit.stdout_bytes), (LaneId::Stderr, exit.stderr_bytes)] {
                let lane = &mut lanes[id as usize];
                let cursor = seen[id as usize];
                // Bytes behind the exit are nobody's.
                while lane.segments.last().is_some_and(|s| s.last_cursor > cursor) {
                    lane.segments.pop();
                }
                if lane.end_offset() < end {
                    lane.promised = Some((cursor, end));
                }
            }
        }
        let last_control = lanes[0].last_cursor();
        let mut state =
            State { cursor: lanes.iter().map(Lane::last_cursor).max().unwrap_or(0), lanes, pid: None, exit: None };
        let mut note = Bytes::new();
        for frame in control.frames {
            match frame.body {
                Body::Note(text) => note = text,
                _ if frame.cursor > last_control => {}
                Body::Started { pid } => state.pid = Some(pid),
                Body::Exit(exit) => state.exit = Some((exit, frame.time_ms)),
                Body::Output { .. } => {}
            }
        }
        let writer = Writer { files: [None, None, None], note };
        Ok(Self { store: Store::on_disk(dir), limits, writer: Mutex::new(writer), state: Mutex::new(state) })
    }

    /// The owner's note, as last set.
    #[must_use]
    pub fn note(&self) -> Bytes {
        lock(&self.writer).note.clone()
    }

    /// Replaces the owner's note.
    ///
    /// # Errors
    /// When it cannot be written, or is longer than [`NOTE_MAX`]; the old one stands.
    pub fn set_note(&self, note: &[u8]) -> io::Result<()> {
        if note.len() > NOTE_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a note is at most 1 MiB"));
        }
        let mut writer = lock(&self.writer);
        let body = Body::Note(Bytes::copy_from_slice(note));
        let mut next = lock(&self.state).clone();
        let frame = Frame { cursor: 0, time_ms: 0, seen: next.last(), body };
        self.write(&mut writer, &mut next, vec![(LaneId::Control, frame)], self.limits)?;
        *lock(&self.state) = next;
        writer.note = Bytes::copy_from_slice(note);
        Ok(())
    }

    /// Appends events, all of them or none. `tight`: the disk is short; keep less.
    ///
    /// # Errors
    /// `InvalidInput` when an event does not follow the last one (its number, its offset, anything after the exit), or
    /// is none that can be appended; else what the disk said. Nothing was appended then; the same events may be tried
    /// again.
    pub fn append(&self, events: &[Event], tight: bool) -> io::Result<()> {
        let mut writer = lock(&self.writer);
        let mut next = lock(&self.state).clone();
        let mut frames = Vec::with_capacity(events.len());
        let (mut last, mut ends) = (next.last(), [0, 1, 2].map(|i| next.lanes[i].end_offset()));
        for event in events {
            let (lane, body) = admit(&next, event, &ends)?;
            if let Body::Output { data, .. } = &body {
                ends[lane as usize] += data.len() as u64;
            }
            match &body {
                Body::Started { pid } => next.pid = Some(*pid),
                Body::Exit(exit) => next.exit = Some((*exit, event.time_ms)),
                _ => {}
            }
            next.cursor = event.cursor;
            frames.push((lane, Frame { cursor: event.cursor, time_ms: event.time_ms, seen: last, body }));
            last[lane as usize] = event.cursor;
        }
        let limits = match (self.store.is_spilled(), tight) {
            (true, _) => MEMORY_LIMITS,
            (false, true) => self.limits.tight(),
            (false, false) => self.limits,
        };
        self.write(&mut writer, &mut next, frames, limits)?;
        let dropped = [LaneId::Stdout, LaneId::Stderr].map(|id| {
            let head = self.store.head_segments(id, limits);
            drop_middle(&mut next.lanes[id as usize], head, limits.tail_segments)
        });
        // Readers learn that a segment is gone before it is.
        *lock(&self.state) = next;
        for (id, numbers) in [LaneId::Stdout, LaneId::Stderr].into_iter().zip(dropped) {
            for number in numbers {
                // What cannot be removed now is removed with the job.
                let _ = self.store.remove(id, number);
            }
        }
        Ok(())
    }

    fn write(
        &self,
        writer: &mut Writer,
        next: &mut State,
        frames: Vec<(LaneId, Frame)>,
        limits: Limits,
    ) -> io::Result<()> {
        let before = [0, 1, 2].map(|i| next.lanes[i].segments.last().copied());
        let mut made = Vec::new();
        let mut result = Ok(());
        for id in LaneId::ALL {
            let mine = frames.iter().filter(|(lane, _)| *lane == id).map(|(_, frame)| frame);
            result = self.write_lane(writer, &mut next.lanes[id as usize], mine, limits, &mut made);
            if result.is_err() {
                break;
            }
        }
        if result.is_err() {
            // Leave nothing behind the end that somebody could take for events.
            for (id, number) in made {
                writer.files[id as usize] = None;
                let _ = self.store.remove(id, number);
            }
            for (id, segment) in LaneId::ALL.into_iter().zip(before) {
                if let Some(segment) = segment {
                    self.store.cut(id, segment.number, segment.len);
                }
            }
        }
        result
    }

    fn write_lane<'a>(
        &self,
        writer: &mut Writer,
        lane: &mut Lane,
        frames: impl Iterator<Item = &'a Frame>,
        limits: Limits,
        made: &mut Vec<(LaneId, u32)>,
    ) -> io::Result<()> {
        let id = lane.id;
        let mut buffer = Vec::new();
        for frame in frames {
            let full = lane.segments.last().is_none_or(|s| {
                let long = s.len + buffer.len() as u64 > limits.segment_bytes.max(SEGMENT_HEAD as u64);
                (id != LaneId::Control && long) || self.store.is_left(id, s.number)
            });
            if full {
                self.flush(writer, lane, &mut buffer)?;
                let number = lane.segments.last().map_or(0, |s| s.number + 1);
                let head = SegmentHead { lane: id, prev_cursor: lane.last_cursor(), first_offset: lane.end_offset() };
                made.push((id, number));
                writer.files[id as usize] = Some(Arc::new(self.store.make(number, &head)?));
                lane.segments.push(Segment {
                    number,
                    len: SEGMENT_HEAD as u64,
                    prev_cursor: head.prev_cursor,
                    first_offset: head.first_offset,
                    last_cursor: head.prev_cursor,
                    end_offset: head.first_offset,
                });
            }
            frame.encode(&mut buffer);
            if let Some(segment) = lane.segments.last_mut() {
                if frame.cursor > 0 {
                    segment.last_cursor = frame.cursor;
                }
                if let Body::Output { offset, data } = &frame.body {
                    segment.end_offset = offset + data.len() as u64;
                }
            }
        }
        self.flush(writer, lane, &mut buffer)
    }

    fn flush(&self, writer: &mut Writer, lane: &mut Lane, buffer: &mut Vec<u8>) -> io::Result<()> {
        let Some(segment) = lane.segments.last_mut().filter(|_| !buffer.is_empty()) else { return Ok(()) };
        let slot = &mut writer.files[lane.id as usize];
        let file = match slot {
            Some(file) => file,
            None => slot.insert(Arc::new(self.store.open(lane.id, segment.number, true)?)),
        };
        file.write_all_at(buffer, segment.len)?;
        segment.len += buffer.len() as u64;
        buffer.clear();
        Ok(())
    }

    /// Closes the files of the writer; they are opened again when something is appended.
    pub fn rest(&self) {
        lock(&self.writer).files = [None, None, None];
    }

    /// Where the log stands.
    #[must_use]
    pub fn position(&self) -> Position {
        let state = lock(&self.state);
        let [control, stdout, stderr] = &state.lanes;
        Position {
            cursor: state.cursor,
            pid: state.pid,
            stdout_bytes: stdout.end_offset(),
            stderr_bytes: stderr.end_offset(),
            stdout_omitted: stdout.omitted(),
            stderr_omitted: stderr.omitted(),
            exit: state.exit,
            disk_bytes: control.bytes() + stdout.bytes() + stderr.bytes(),
        }
    }

    /// Parts of a stream that are known not to be kept: where each begins and how long it is, in order.
    #[must_use]
    pub fn gaps(&self, stream: Stream) -> Vec<(u64, u64)> {
        let id = if stream == Stream::Stderr { LaneId::Stderr } else { LaneId::Stdout };
        lock(&self.state).lanes[id as usize].gaps()
    }

    /// A reader that begins after the event `after`.
    #[must_use]
    pub fn reader(&self, after: u64) -> Reader {
        Reader::new(after)
    }

    /// A reader of the bytes of one stream from position `offset`.
    #[must_use]
    pub fn output(&self, stream: Stream, offset: u64) -> OutputReader {
        OutputReader::new(stream, offset)
    }

    pub(crate) fn snapshot(&self) -> State {
        lock(&self.state).clone()
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// Removes the files of the log.
    ///
    /// # Errors
    /// What the disk said. That they are gone already is none.
    pub fn remove(&self) -> io::Result<()> {
        self.rest();
        self.store.clear()
    }

    /// Removes all output of a log that has ended and keeps start, end and note.
    ///
    /// # Errors
    /// What the disk said, or that the log has not ended.
    pub fn remove_output(&self) -> io::Result<()> {
        let mut writer = lock(&self.writer);
        writer.files = [None, None, None];
        let mut state = lock(&self.state);
        if state.exit.is_none() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the log has not ended"));
        }
        for id in [LaneId::Stdout, LaneId::Stderr] {
            let lane = &mut state.lanes[id as usize];
            lane.promised = Some((lane.last_cursor(), lane.end_offset()));
            for segment in std::mem::take(&mut lane.segments) {
                self.store.remove(id, segment.number)?;
            }
        }
        Ok(())
    }
}

/// Which lane an event goes to, if it may be appended.
fn admit(state: &State, event: &Event, ends: &[u64; 3]) -> io::Result<(LaneId, Body)> {
    let refused = |why| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    if event.cursor != state.cursor + 1 {
        return refused("the event does not follow the last one");
    }
    if state.exit.is_some() {
        return refused("the log has ended");
    }
    match &event.entry {
        Entry::Started { pid } => Ok((LaneId::Control, Body::Started { pid: *pid })),
        Entry::Exit(exit) if exit.stdout_bytes != ends[1] || exit.stderr_bytes != ends[2] => {
            refused("the exit names another length of the output than there is")
        }
        Entry::Exit(exit) => Ok((LaneId::Control, Body::Exit(*exit))),
        Entry::Gap { .. } => refused("gaps are not appended"),
        Entry::Output { data, .. } if data.is_empty() || data.len() > DATA_MAX => {
            refused("an event has 1 to 262144 bytes of output")
        }
        Entry::Output { stream, offset, data } => {
            let lane = match stream {
                Stream::Stdout => LaneId::Stdout,
                Stream::Stderr => LaneId::Stderr,
            };
            if *offset != ends[lane as usize] {
                return refused("the output does not follow the last");
            }
            Ok((lane, Body::Output { offset: *offset, data: data.clone() }))
        }
    }
}

/// Drops segments between the first and the last ones, as many as are too many; gives their numbers.
fn drop_middle(lane: &mut Lane, head: u32, tail: u32) -> Vec<u32> {
    let (head, tail) = (head.max(1), tail as usize + 1);
    let mut dropped = Vec::new();
    while let Some(first) = lane.segments.iter().position(|s| s.number >= head)
        && lane.segments.len() - first > tail
    {
        dropped.push(lane.segments.remove(first).number);
    }
    dropped
}
