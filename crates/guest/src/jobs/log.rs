//! What a job has to tell, in order, and how much of it is kept.
//!
//! Events are numbered from 1. An event is *taken* when a follower was given it. Events that nobody took make the
//! job's process wait once they hold [`UNSENT_MAX`] bytes; events that were taken are kept to [`RETAINED_MAX`], more
//! than a broken link can lose, so that a host which follows again from the last number it saw misses nothing.
//!
//! A log that is *acked* keeps every event until the host has said that it holds it durably; there an event that was
//! not acked counts as one that nobody took.

use std::collections::VecDeque;

use bytes::Bytes;
use mainbrella_guest_protocol::limits::{CHUNK_BYTES_MAX, RETAINED_MAX, UNSENT_MAX};
use mainbrella_guest_protocol::pb;

/// The two outputs of a process; a terminal has only the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Output {
    Stdout = 0,
    Stderr = 1,
}

impl Output {
    pub(crate) fn wire(self) -> pb::Stream {
        match self {
            Self::Stdout => pb::Stream::STREAM_STDOUT,
            Self::Stderr => pb::Stream::STREAM_STDERR,
        }
    }
}

/// One thing that happened.
#[derive(Debug, Clone)]
pub(crate) enum Happened {
    Started { pid: u32 },
    Output { output: Output, offset: u64, data: Bytes },
    Gap { output: Output, offset: u64, length: u64 },
    Exit(pb::JobExit),
    NotStarted { errno: i32, stage: &'static str },
}

impl Happened {
    fn cost(&self) -> usize {
        const EACH: usize = 128;
        EACH + if let Self::Output { data, .. } = self { data.len() } else { 0 }
    }

    pub(crate) fn is_last(&self) -> bool {
        matches!(self, Self::Exit(_) | Self::NotStarted { .. })
    }

    pub(crate) fn wire(&self, sequence: u64) -> pb::JobEvent {
        use pb::__buffa::oneof::job_event::Event;
        let event: Event = match self {
            Self::Started { pid } => pb::JobStarted { pid: *pid, ..Default::default() }.into(),
            Self::Output { output, offset, data } => {
                let (stream, data) = (output.wire().into(), data.to_vec());
                pb::JobOutput { stream, offset: *offset, data, ..Default::default() }.into()
            }
            Self::Gap { output, offset, length } => {
                let stream = output.wire().into();
                pb::JobGap { stream, offset: *offset, length: *length, ..Default::default() }.into()
            }
            Self::Exit(exit) => exit.clone().into(),
            Self::NotStarted { errno, stage } => {
                pb::JobNotStarted { errno: *errno, stage: (*stage).to_owned(), ..Default::default() }.into()
            }
        };
        pb::JobEvent { sequence, event: Some(event), ..Default::default() }
    }
}

/// What one output has produced, and its end when that is held back.
#[derive(Debug, Default)]
struct Produced {
    total: u64,
    /// The last bytes, with a limit: sent after a gap when the process has ended.
    tail: VecDeque<u8>,
    /// End of what was in events that are no longer kept.
    dropped_to: u64,
}

/// The events of one job.
#[derive(Debug)]
pub(crate) struct Log {
    events: VecDeque<Happened>,
    /// Number of the first event kept.
    first: u64,
    /// Number of the last event any follower was given.
    taken: u64,
    unsent: usize,
    kept_taken: usize,
    /// Number of the last event the host holds; `None` where nobody is asked.
    acked: Option<u64>,
    /// The output limit as bytes from the start and bytes from the end; `None` without one.
    limit: Option<(u64, u64)>,
    produced: [Produced; 2],
    finished: bool,
    exit: Option<pb::JobExit>,
}

impl Log {
    /// `output_limit` and `acked` as in the request: a limit of 0 is none.
    pub(crate) fn new(output_limit: u64, acked: bool) -> Self {
        Self {
            events: VecDeque::new(),
            first: 1,
            taken: 0,
            unsent: 0,
            kept_taken: 0,
            acked: acked.then_some(0),
            limit: (output_limit > 0).then_some((output_limit.div_ceil(2), output_limit / 2)),
            produced: Default::default(),
            finished: false,
            exit: None,
        }
    }

    /// Whether the process must wait before more of its output is read.
    pub(crate) fn is_full(&self) -> bool {
        self.unsent > UNSENT_MAX
    }

    /// Bytes no follower took yet.
    pub(crate) fn unsent(&self) -> usize {
        self.unsent
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.finished
    }

    /// Number of the last event.
    pub(crate) fn last_sequence(&self) -> u64 {
        self.first + self.events.len() as u64 - 1
    }

    /// Memory held, bytes.
    pub(crate) fn held(&self) -> usize {
        self.unsent + self.kept_taken + self.produced.iter().map(|p| p.tail.capacity()).sum::<usize>()
    }

    pub(crate) fn exit(&self) -> Option<&pb::JobExit> {
        self.exit.as_ref()
    }

    /// Number of the last event the host holds; `None` where nobody is asked.
    pub(crate) fn acked(&self) -> Option<u64> {
        self.acked
    }

    /// Whether forgetting it loses something the host has not.
    pub(crate) fn is_owed(&self) -> bool {
        self.acked.is_some_and(|acked| acked < self.last_sequence())
    }

    /// The host holds everything up to event `sequence`.
    pub(crate) fn ack(&mut self, sequence: u64) {
        let Some(before) = self.acked else { return };
        let until = sequence.min(self.last_sequence());
        if until <= before {
            return;
        }
        self.acked = Some(until);
        self.taken = self.taken.max(until);
        while self.first <= until
            && let Some(event) = self.events.pop_front()
        {
            self.first += 1;
            self.unsent -= event.cost();
            self.note_dropped(&event);
        }
    }

    pub(crate) fn total(&self, output: Output) -> u64 {
        self.produced[output as usize].total
    }

    pub(crate) fn push(&mut self, event: Happened) {
        debug_assert!(!self.finished);
        self.finished = event.is_last();
        if let Happened::Exit(exit) = &event {
            self.exit = Some(exit.clone());
        }
        self.unsent += event.cost();
        self.events.push_back(event);
    }

    /// Takes bytes the process wrote.
    pub(crate) fn write(&mut self, output: Output, data: &[u8]) {
        let produced = &mut self.produced[output as usize];
        let offset = produced.total;
        produced.total += data.len() as u64;
        let head = match self.limit {
            None => data.len(),
            Some((first, _)) => first.saturating_sub(offset).min(data.len() as u64) as usize,
        };
        if let Some((_, last)) = self.limit
            && head < data.len()
        {
            let rest = &data[head..];
            let tail = &mut produced.tail;
            let rest = &rest[rest.len().saturating_sub(last as usize)..];
            let over = (tail.len() + rest.len()).saturating_sub(last as usize);
            tail.drain(..over);
            tail.extend(rest);
        }
        if head > 0 {
            self.push(Happened::Output { output, offset, data: Bytes::copy_from_slice(&data[..head]) });
        }
    }

    /// Ends the log: what was held back, then `exit` with the totals.
    pub(crate) fn finish(&mut self, mut exit: pb::JobExit) {
        for output in [Output::Stdout, Output::Stderr] {
            let Some((head, _)) = self.limit else { continue };
            let tail = std::mem::take(&mut self.produced[output as usize].tail);
            let from = self.total(output) - tail.len() as u64;
            if from > head {
                self.push(Happened::Gap { output, offset: head, length: from - head });
            }
            let mut rest = Bytes::from(Vec::from(tail));
            let mut offset = from;
            while !rest.is_empty() {
                let data = rest.split_to(rest.len().min(CHUNK_BYTES_MAX));
                let length = data.len() as u64;
                self.push(Happened::Output { output, offset, data });
                offset += length;
            }
        }
        exit.stdout_bytes = self.total(Output::Stdout);
        exit.stderr_bytes = self.total(Output::Stderr);
        self.push(Happened::Exit(exit));
    }

    /// The first event after number `after`, with its number; it counts as taken.
    pub(crate) fn take_after(&mut self, after: u64) -> Option<(u64, Happened)> {
        if after + 1 < self.first
            && let Some(gap) = self.lost_after(after)
        {
            return Some(gap);
        }
        let sequence = (after + 1).max(self.first);
        let event = self.events.get((sequence - self.first) as usize)?.clone();
        while self.acked.is_none() && self.taken < sequence {
            self.taken += 1;
            if let Some(event) = self.events.get((self.taken.max(self.first) - self.first) as usize) {
                self.unsent -= event.cost();
                self.kept_taken += event.cost();
            }
        }
        self.drop_old();
        Some((sequence, event))
    }

    /// A follower that comes from before what is kept is told so, once for each output: everything before that
    /// place is gone. The follower may have some of it already.
    fn lost_after(&self, after: u64) -> Option<(u64, Happened)> {
        let mut place = self.first;
        for output in [Output::Stderr, Output::Stdout] {
            let length = self.produced[output as usize].dropped_to;
            if length > 0 {
                place -= 1;
            }
        }
        for output in [Output::Stdout, Output::Stderr] {
            let length = self.produced[output as usize].dropped_to;
            if length > 0 {
                if after < place {
                    return Some((place, Happened::Gap { output, offset: 0, length }));
                }
                place += 1;
            }
        }
        None
    }

    fn drop_old(&mut self) {
        while self.kept_taken > RETAINED_MAX && self.first < self.taken {
            let Some(event) = self.events.pop_front() else { return };
            self.first += 1;
            self.kept_taken -= event.cost();
            self.note_dropped(&event);
        }
    }

    fn note_dropped(&mut self, event: &Happened) {
        match event {
            Happened::Output { output, offset, data } => {
                self.produced[*output as usize].dropped_to = offset + data.len() as u64;
            }
            Happened::Gap { output, offset, length } => {
                self.produced[*output as usize].dropped_to = offset + length;
            }
            _ => {}
        }
    }
}
