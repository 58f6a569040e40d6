//! The durable log of one job.
//!
//! A job's events are numbered where they arise, without gaps, from 1; the number is the *cursor* from which a reader
//! goes on. The log keeps them on the host's disk in three lanes, each a row of append-only segment files: `control`
//! (start, exit and a note of the owner's), `stdout` and `stderr`. Each output lane keeps its first and its last bytes up
//! to a limit of its own, so a flood on one output costs the other nothing; what was dropped between is reported to
//! readers as a gap.
//!
//! Every frame carries a check sum, the offset of its bytes in their stream, and the lane its predecessor is in. What a
//! crash of the host tore, in one lane or in all, is found when the log is opened and cut back to the longest run of
//! events that is whole; damage found later by a reader becomes a gap. Nothing is ever delivered twice, in another order,
//! or with other bytes than were appended.
//!
//! A log whose owner agrees to it goes on in memory when the disk is full ([`JobLog::spill`]): what it keeps then is gone
//! with the process.
//!
//! The crate does no more than files: no clock, no tasks, no network. One writer and any number of readers share a log.

mod frame;
mod lane;
mod log;
mod reader;
mod store;

use bytes::Bytes;

pub use log::{JobLog, OpenError, Position};
pub use reader::{OutputPiece, OutputReader, Reader};

/// Most bytes of output in one event.
pub const DATA_MAX: usize = 256 * 1024;
/// Most bytes of a note.
pub const NOTE_MAX: usize = 1024 * 1024;

/// The two outputs of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    /// Standard output; of a job on a terminal all output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Why a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// It exited by itself.
    Exited,
    /// A signal ended it.
    Signalled,
    /// It was ended at its time limit.
    TimedOut,
    /// It was ended on request.
    Cancelled,
    /// Its machine was stopped.
    MachineStopped,
    /// Its machine died, or what became of it cannot be known.
    Lost,
}

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Why.
    pub cause: Cause,
    /// Its exit code, where it has one.
    pub code: Option<i32>,
    /// The signal that ended it, where one did.
    pub signal: Option<i32>,
    /// Bytes standard output produced in all, as far as is known.
    pub stdout_bytes: u64,
    /// Bytes standard error produced in all, as far as is known.
    pub stderr_bytes: u64,
    /// How long it ran, milliseconds.
    pub duration_ms: u64,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// The process runs.
    Started {
        /// Its number in the machine.
        pid: u32,
    },
    /// It wrote something.
    Output {
        /// Where.
        stream: Stream,
        /// Position of the first byte in that stream.
        offset: u64,
        /// The bytes, at most [`DATA_MAX`].
        data: Bytes,
    },
    /// Bytes that are not kept. Given by readers, never appended. To a reader that begins inside a gap it tells the whole
    /// of it, so it may name bytes that reader has had.
    Gap {
        /// Of which stream.
        stream: Stream,
        /// Position of the first missing byte.
        offset: u64,
        /// How many are missing.
        length: u64,
    },
    /// It ended. Always the last.
    Exit(Exit),
}

/// One numbered event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Its number: strictly increasing.
    pub cursor: u64,
    /// When the host learned of it, milliseconds since the epoch.
    pub time_ms: i64,
    /// What happened.
    pub entry: Entry,
}

/// How much of each output is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Size of a segment, bytes: the grain of what is dropped.
    pub segment_bytes: u64,
    /// Segments kept from the beginning of an output.
    pub head_segments: u32,
    /// Segments kept from its end, beside the one that is being written.
    pub tail_segments: u32,
}

impl Limits {
    /// Limits that keep about `bytes` of each output, half from the beginning and half from the end.
    #[must_use]
    pub const fn keeping(bytes: u64) -> Self {
        let segment_bytes = if bytes / 16 == 0 { 1 } else { bytes / 16 };
        Self { segment_bytes, head_segments: 8, tail_segments: 8 }
    }

    /// For when the disk is short: a beginning and an end, and little of both.
    #[must_use]
    pub const fn tight(self) -> Self {
        let segment_bytes = if self.segment_bytes / 8 == 0 { 1 } else { self.segment_bytes / 8 };
        Self { segment_bytes, head_segments: 1, tail_segments: 1 }
    }
}
