//! Reading: events from any cursor, bytes from any offset.

use std::io;

use bytes::Bytes;

use crate::frame::{Body, FRAME_HEAD, Frame, LaneId, SEGMENT_HEAD};
use crate::lane::{Lane, Segment, follows};
use crate::log::{JobLog, State};
use crate::store::SegmentFile;
use crate::{DATA_MAX, Entry, Event, Stream};

/// Bytes read from a file at once.
const BLOCK: usize = 64 * 1024;

/// Reads the events of a log, from a cursor on. Holds no file open between reads.
#[derive(Clone, Debug)]
pub struct Reader {
    after: u64,
    places: [Option<Place>; 3],
    /// Time of the last event given; that of a gap.
    time_ms: i64,
}

/// Where a reader is in a lane.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// -1: before the first.
    segment: i64,
    at: u64,
    cursor: u64,
    offset: u64,
}

/// What a lane has next.
#[derive(Debug)]
enum Next {
    Frame(Frame),
    /// Bytes from `offset` on are missing up to the next segment, before event `cursor + 1`.
    Hole {
        cursor: u64,
        offset: u64,
        length: u64,
    },
    Nothing,
}

impl Reader {
    pub(crate) fn new(after: u64) -> Self {
        Self { after, places: [None; 3], time_ms: 0 }
    }

    /// Cursor of the last event given, or from which this reader began.
    #[must_use]
    pub fn cursor(&self) -> u64 {
        self.after
    }

    /// The next events, as many as have about `bytes` of output and `count` in number at most; none when all that was
    /// appended has been given.
    ///
    /// # Errors
    /// What the disk said; the same read may be tried again.
    pub fn read(&mut self, log: &JobLog, bytes: usize, count: usize) -> io::Result<Vec<Event>> {
        let state = log.snapshot();
        let mut lanes = [0, 1, 2].map(|i| LaneReader::new(log, &state.lanes[i], self.places[i], self.after));
        let mut nexts = [Next::Nothing, Next::Nothing, Next::Nothing];
        let mut events = Vec::new();
        let mut size = 0;
        for (lane, next) in lanes.iter_mut().zip(&mut nexts) {
            *next = lane.next()?;
        }
        while size < bytes && events.len() < count {
            let Some(first) = (0..3).filter_map(|i| Some((nexts[i].cursor()?, i))).min() else { break };
            let (cursor, i) = first;
            let next = std::mem::replace(&mut nexts[i], Next::Nothing);
            // The place is behind what is given, never behind what waits.
            let place = lanes[i].place;
            if let Some(event) = event(next, LaneId::ALL[i], self.time_ms) {
                self.time_ms = event.time_ms;
                if let Entry::Output { data, .. } = &event.entry {
                    size += data.len();
                }
                self.after = self.after.max(cursor);
                events.push(event);
            }
            self.places[i] = place;
            nexts[i] = lanes[i].next()?;
        }
        for (i, next) in nexts.iter().enumerate() {
            // What was skipped need not be skipped again.
            if matches!(next, Next::Nothing) {
                self.places[i] = lanes[i].place;
            }
        }
        Ok(events)
    }
}

fn event(next: Next, lane: LaneId, before_ms: i64) -> Option<Event> {
    let stream = if lane == LaneId::Stderr { Stream::Stderr } else { Stream::Stdout };
    match next {
        Next::Nothing => None,
        Next::Hole { cursor, offset, length } => {
            Some(Event { cursor, time_ms: before_ms, entry: Entry::Gap { stream, offset, length } })
        }
        Next::Frame(Frame { cursor, time_ms, body, .. }) => {
            let entry = match body {
                Body::Note(_) => return None,
                Body::Started { pid } => Entry::Started { pid },
                Body::Output { offset, data } => Entry::Output { stream, offset, data },
                Body::Exit(exit) => Entry::Exit(exit),
            };
            Some(Event { cursor, time_ms, entry })
        }
    }
}

impl Next {
    fn cursor(&self) -> Option<u64> {
        match self {
            Self::Frame(frame) => Some(frame.cursor),
            Self::Hole { cursor, .. } => Some(*cursor),
            Self::Nothing => None,
        }
    }
}

/// Walks one lane of a snapshot.
struct LaneReader<'a> {
    log: &'a JobLog,
    lane: &'a Lane,
    after: u64,
    /// Behind the last thing given.
    place: Option<Place>,
    open: Option<Open>,
}

struct Open {
    number: u32,
    file: SegmentFile,
    /// Bytes of the file from `start` on.
    block: Bytes,
    start: u64,
}

impl<'a> LaneReader<'a> {
    fn new(log: &'a JobLog, lane: &'a Lane, place: Option<Place>, after: u64) -> Self {
        Self { log, lane, after, place, open: None }
    }

    /// The next frame after the place, or a hole. Moves the place behind it.
    fn next(&mut self) -> io::Result<Next> {
        loop {
            let Some(place) = self.place.or_else(|| self.begin()) else { return Ok(Next::Nothing) };
            let own = self.lane.segments.iter().find(|s| i64::from(s.number) == place.segment).copied();
            if let Some(segment) = own
                && place.at < segment.len
                && let Some((frame, end)) = self.frame(&segment, &place)?
            {
                let mut next = Place { at: end, ..place };
                if !matches!(frame.body, Body::Note(_)) {
                    next.cursor = frame.cursor;
                }
                if let Body::Output { offset, data } = &frame.body {
                    next.offset = offset + data.len() as u64;
                }
                self.place = Some(next);
                if frame.cursor <= self.after {
                    continue;
                }
                return Ok(Next::Frame(frame));
            }
            // This segment is read, gone or damaged: on to the next there is.
            let (cursor, offset) = (place.cursor.max(self.after), place.offset);
            let Some(next) = self.lane.segments.iter().find(|s| i64::from(s.number) > place.segment).copied() else {
                return Ok(self.end(place, own));
            };
            self.place = Some(start_of(&next));
            if next.first_offset > offset && next.prev_cursor > cursor {
                return Ok(Next::Hole { cursor: next.prev_cursor, offset, length: next.first_offset - offset });
            }
        }
    }

    /// What comes after the last whole frame: nothing, or what should be there and is not.
    fn end(&mut self, place: Place, own: Option<Segment>) -> Next {
        let (cursor, end) = (self.lane.last_cursor(), self.lane.end_offset());
        if cursor <= place.cursor.max(self.after) || end <= place.offset {
            return Next::Nothing;
        }
        let at = own.map_or(place.at, |s| s.len);
        self.place = Some(Place { at, cursor, offset: end, ..place });
        Next::Hole { cursor, offset: place.offset, length: end - place.offset }
    }

    /// The last segment that begins at or before the cursor.
    fn begin(&self) -> Option<Place> {
        let segments = &self.lane.segments;
        if segments.is_empty() && self.lane.promised.is_some() {
            return Some(Place { segment: -1, at: u64::MAX, cursor: 0, offset: 0 });
        }
        let segment = segments.iter().rev().find(|s| s.prev_cursor <= self.after).or(segments.first())?;
        if segment.prev_cursor > self.after {
            // Even the beginning is gone.
            return Some(Place { segment: -1, at: u64::MAX, cursor: 0, offset: 0 });
        }
        Some(start_of(segment))
    }

    /// The frame at a place, if it is whole and in order.
    fn frame(&mut self, segment: &Segment, place: &Place) -> io::Result<Option<(Frame, u64)>> {
        let Some(head) = self.bytes(segment, place.at, FRAME_HEAD)? else { return Ok(None) };
        let Some(length) = Frame::length(&head) else { return Ok(None) };
        let Some(bytes) = self.bytes(segment, place.at, length)? else { return Ok(None) };
        let frame = Frame::decode(&bytes).filter(|frame| follows(frame, self.lane.id, place.cursor, place.offset));
        Ok(frame.map(|frame| (frame, place.at + length as u64)))
    }

    /// `length` bytes of a segment from `at`; `None` when it has not so many, or is gone.
    fn bytes(&mut self, segment: &Segment, at: u64, length: usize) -> io::Result<Option<Bytes>> {
        if at + length as u64 > segment.len {
            return Ok(None);
        }
        if self.open.as_ref().is_none_or(|open| open.number != segment.number) {
            let file = match self.log.store().open(self.lane.id, segment.number, false) {
                Ok(file) => file,
                // Dropped since the snapshot was taken.
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(e) => return Err(e),
            };
            self.open = Some(Open { number: segment.number, file, block: Bytes::new(), start: 0 });
        }
        let Some(open) = self.open.as_mut() else { return Ok(None) };
        let within = |open: &Open| at >= open.start && at + length as u64 <= open.start + open.block.len() as u64;
        if !within(open) {
            let most = usize::try_from(segment.len - at).unwrap_or(usize::MAX).min(length.max(BLOCK));
            let mut block = vec![0; most];
            let read = open.file.read_at_most(&mut block, at)?;
            block.truncate(read);
            (open.block, open.start) = (Bytes::from(block), at);
            if !within(open) {
                return Ok(None);
            }
        }
        let from = usize::try_from(at - open.start).unwrap_or(0);
        Ok(Some(open.block.slice(from..from + length)))
    }
}

fn start_of(segment: &Segment) -> Place {
    Place {
        segment: i64::from(segment.number),
        at: SEGMENT_HEAD as u64,
        cursor: segment.prev_cursor,
        offset: segment.first_offset,
    }
}

/// Reads the bytes of one stream. Holds no file open between reads.
#[derive(Clone, Debug)]
pub struct OutputReader {
    lane: LaneId,
    offset: u64,
    place: Option<Place>,
}

/// Bytes of a stream that were kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputPiece {
    /// Position of the first byte in the stream; further than was asked for where bytes are missing.
    pub offset: u64,
    /// The bytes.
    pub data: Bytes,
}

impl OutputReader {
    pub(crate) fn new(stream: Stream, offset: u64) -> Self {
        let lane = if stream == Stream::Stderr { LaneId::Stderr } else { LaneId::Stdout };
        Self { lane, offset, place: None }
    }

    /// The next bytes that were kept, at most `most` of them (and never more than one event has); `None` when there are
    /// no more so far.
    ///
    /// # Errors
    /// What the disk said; the same read may be tried again.
    pub fn read(&mut self, log: &JobLog, most: usize) -> io::Result<Option<OutputPiece>> {
        let state: State = log.snapshot();
        let lane = &state.lanes[self.lane as usize];
        if self.place.is_none() {
            let Some(segment) =
                lane.segments.iter().rev().find(|s| s.first_offset <= self.offset).or(lane.segments.first())
            else {
                return Ok(None);
            };
            self.place = Some(start_of(segment));
        }
        let mut reader = LaneReader::new(log, lane, self.place, 0);
        loop {
            let before = reader.place;
            match reader.next()? {
                Next::Nothing => return Ok(None),
                Next::Hole { .. } => {}
                Next::Frame(Frame { body: Body::Output { offset, data }, .. }) => {
                    let end = offset + data.len() as u64;
                    if end <= self.offset {
                        continue;
                    }
                    let skip = usize::try_from(self.offset.saturating_sub(offset)).unwrap_or(DATA_MAX);
                    let data = data.slice(skip..);
                    let (data, whole) = if data.len() > most { (data.slice(..most), false) } else { (data, true) };
                    // What is left of the frame is read from its beginning again.
                    self.place = if whole { reader.place } else { before };
                    let first = offset + skip as u64;
                    self.offset = first + data.len() as u64;
                    return Ok(Some(OutputPiece { offset: first, data }));
                }
                Next::Frame(_) => {}
            }
        }
    }
}
