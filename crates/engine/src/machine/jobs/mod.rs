//! Managed jobs: commands that outlive the call that started them.
//!
//! The guest numbers what a job does and keeps it until it is told that the host holds it. Here one task a running job
//! pulls events from the guest into the job's log on disk, then acknowledges them; everybody who wants to see a job reads
//! the log, never the guest. A broken link, a slow reader or a restart of the service therefore loses and repeats
//! nothing: whoever goes on, goes on from a number.

mod capture;
mod job;
pub(crate) mod pull;
mod shelf;
mod verbs;

use std::collections::BTreeMap;

use bytes::Bytes;
use mainbrella_types::{MachineState, Millis};
use serde::{Deserialize, Serialize};

pub use job::Follower;
pub use mainbrella_job_log::{Cause, Entry, Event, Exit, OutputReader, Position, Stream};
pub(crate) use shelf::{EGRESS_LOG, Shelf};
pub use shelf::{JobOutput, JobPage, MachineJobs};
pub(crate) use verbs::resume;

/// How jobs end that still ran when their machine came to its final state.
pub(crate) fn cause_of(last: MachineState) -> Cause {
    if last == MachineState::Stopped { Cause::MachineStopped } else { Cause::Lost }
}

/// What runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum JobCommand {
    /// Text for `/bin/sh -lc`.
    Text(String),
    /// The program and its arguments.
    Argv(Vec<String>),
}

impl JobCommand {
    /// What the guest is to execute.
    #[must_use]
    pub fn argv(&self) -> Vec<Vec<u8>> {
        match self {
            Self::Text(text) => vec![b"/bin/sh".to_vec(), b"-lc".to_vec(), text.as_bytes().to_vec()],
            Self::Argv(argv) => argv.iter().map(|arg| arg.as_bytes().to_vec()).collect(),
        }
    }
}

/// Size of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Columns.
    pub cols: u32,
    /// Rows.
    pub rows: u32,
}

/// A job to start. Checked by whoever takes it from a caller; the guest checks it again.
#[derive(Clone)]
pub struct JobOrder {
    /// What runs.
    pub command: JobCommand,
    /// Working directory; `None`: the template's.
    pub cwd: Option<String>,
    /// Who it runs as, `USER[:GROUP]` by name or number; `None`: the template's user.
    pub user: Option<String>,
    /// Environment on top of the machine's own.
    pub env: BTreeMap<String, String>,
    /// Time limit in the guest, milliseconds.
    pub timeout_ms: u64,
    /// Input it gets at once.
    pub stdin: Bytes,
    /// Whether more input may follow. Of a job on a terminal it always may.
    pub stdin_open: bool,
    /// The terminal it runs on, if it does.
    pub pty: Option<TerminalSize>,
}

/// Commands, environment and input may hold secrets: only their shape is shown.
impl std::fmt::Debug for JobOrder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JobOrder").field("timeout_ms", &self.timeout_ms).field("pty", &self.pty).finish_non_exhaustive()
    }
}

/// The key of a start that may be repeated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartKey {
    /// Digest of the key.
    pub key: [u8; 32],
    /// Digest of what was asked.
    pub body: [u8; 32],
}

/// A started job.
#[derive(Clone, Debug)]
pub struct StartedJob {
    /// The job.
    pub job: JobView,
    /// An earlier start with the same key had started it.
    pub replayed: bool,
}

/// A job as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobView {
    /// Its id: 32 hexadecimal digits, in the order of their start.
    pub id: String,
    /// What runs.
    pub command: JobCommand,
    /// Working directory, if one was named.
    pub cwd: Option<String>,
    /// Time limit, milliseconds.
    pub timeout_ms: u64,
    /// Whether it takes input.
    pub stdin: bool,
    /// The terminal it runs on, as last set.
    pub pty: Option<TerminalSize>,
    /// When it was started.
    pub started_at: Millis,
    /// Where its log stands; its end, if it has ended.
    pub position: Position,
    /// Input accepted so far, bytes.
    pub stdin_accepted: u64,
}

/// What became of a write to a job's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StdinWritten {
    /// Bytes accepted in all, by all writes.
    pub accepted: u64,
    /// Of them, bytes the job has not read.
    pub pending: u64,
    /// Whether this was the end.
    pub closed: bool,
}
