//! Managed jobs: commands that outlive the call that started them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::CommandLine;

/// Size of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TerminalSize {
    /// Columns, 1 to 4096.
    #[schema(minimum = 1, maximum = 4096)]
    pub cols: u32,
    /// Rows, 1 to 4096.
    #[schema(minimum = 1, maximum = 4096)]
    pub rows: u32,
}

/// Starts a job.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct StartJob {
    /// What to run; at most 128 KiB in all, without NUL.
    pub command: CommandLine,
    /// Working directory, absolute. Default: the template's (`/workspace`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Who it runs as: `USER` or `USER:GROUP`, each a name of the machine's `/etc/passwd` and `/etc/group` or a number.
    /// Default: the template's user, else root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 65)]
    pub user: Option<String>,
    /// Environment, over that of the machine: at most 128 entries and 64 KiB.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Time-out of the job, milliseconds. Default 300000, at most 86400000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 86_400_000)]
    pub timeout_ms: Option<u64>,
    /// Whether it takes input. Without it the job reads end of file.
    #[serde(default)]
    pub stdin: bool,
    /// Runs it on a terminal of this size: one output, line editing, signals by key. It always takes input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<TerminalSize>,
}

impl StartJob {
    /// A job with nothing set but its command.
    #[must_use]
    pub fn new(command: CommandLine) -> Self {
        Self { command, cwd: None, user: None, env: BTreeMap::new(), timeout_ms: None, stdin: false, pty: None }
    }
}

/// Commands and environment may hold secrets: only their shape is shown.
impl std::fmt::Debug for StartJob {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StartJob")
            .field("cwd", &self.cwd)
            .field("user", &self.user)
            .field("env", &self.env.keys().collect::<Vec<_>>())
            .field("timeout_ms", &self.timeout_ms)
            .field("stdin", &self.stdin)
            .field("pty", &self.pty)
            .finish_non_exhaustive()
    }
}

/// Whether a job runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// It runs, or is being started.
    Running,
    /// It has ended.
    Ended,
}

/// Why a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExitCause {
    /// By itself, with `code`.
    Exited,
    /// By a signal, `signal`.
    Signalled,
    /// At its time-out.
    TimedOut,
    /// On request.
    Cancelled,
    /// With its machine, which was stopped.
    MachineStopped,
    /// With its machine, which died; or what became of it cannot be known.
    Lost,
}

impl ExitCause {
    /// The wire name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Exited => "exited",
            Self::Signalled => "signalled",
            Self::TimedOut => "timed_out",
            Self::Cancelled => "cancelled",
            Self::MachineStopped => "machine_stopped",
            Self::Lost => "lost",
        }
    }
}

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobExit {
    /// Why.
    pub cause: ExitCause,
    /// Its exit code, where it exited.
    pub code: Option<i32>,
    /// The signal, where one ended it.
    pub signal: Option<i32>,
}

/// A job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Job {
    /// Its id.
    pub id: String,
    /// What runs, as it was given.
    pub command: CommandLine,
    /// Whether it runs.
    pub state: JobState,
    /// How it ended; `null` while it runs.
    pub exit: Option<JobExit>,
    /// When it was started, RFC 3339.
    pub started_at: String,
    /// When it ended, RFC 3339.
    pub ended_at: Option<String>,
    /// Number of its first process in the machine, once it runs.
    pub pid: Option<u32>,
    /// Its time-out, milliseconds.
    pub timeout_ms: u64,
    /// Its working directory, if one was given.
    pub cwd: Option<String>,
    /// Whether it takes input.
    pub stdin: bool,
    /// The terminal it runs on, as last set.
    pub pty: Option<TerminalSize>,
    /// Cursor of its last event so far.
    pub cursor: u64,
    /// Bytes of standard output so far.
    pub stdout_bytes: u64,
    /// Bytes of standard error so far.
    pub stderr_bytes: u64,
    /// Of them, bytes that are not kept any more.
    pub stdout_omitted_bytes: u64,
    /// Of them, bytes that are not kept any more.
    pub stderr_omitted_bytes: u64,
    /// Input accepted so far, bytes.
    pub stdin_accepted_bytes: u64,
}

/// A page of jobs, newest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobList {
    /// The jobs, those that have ended too.
    pub executions: Vec<Job>,
    /// Names the next page; `null`: there is none.
    pub next_cursor: Option<String>,
}

/// Asks a job to end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CancelJob {
    /// Milliseconds between TERM and KILL. Default 2000, at most 60000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 60_000)]
    pub grace_ms: Option<u64>,
}

/// A signal: its number, or its name with or without `SIG`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum SignalName {
    /// 1 to 64.
    Number(i64),
    /// Such as `TERM` or `SIGUSR1`.
    Name(String),
}

impl SignalName {
    /// The signal that is meant.
    ///
    /// # Errors
    /// When there is none of this name or number.
    pub fn signal(&self) -> Result<mainbrella_types::Signal, mainbrella_types::IdError> {
        match self {
            Self::Number(number) => mainbrella_types::Signal::new(*number),
            Self::Name(name) => name.parse(),
        }
    }
}

/// Sends a signal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SendSignal {
    /// Which.
    pub signal: SignalName,
}

/// What became of input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct StdinAccepted {
    /// Bytes accepted in all, by all writes.
    pub accepted_bytes: u64,
    /// Of them, bytes the job has not read.
    pub pending_bytes: u64,
    /// Whether the end of the input was sent.
    pub closed: bool,
}

/// One of a job's outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum StreamName {
    /// Standard output; of a job on a terminal all output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum JobEventKind {
    /// The process runs.
    Started {
        /// Its number in the machine.
        pid: u32,
    },
    /// It wrote something.
    #[serde(rename_all = "camelCase")]
    Output {
        /// Where.
        stream: StreamName,
        /// Position of the first byte in that stream.
        offset: u64,
        /// The bytes, base64.
        data_base64: String,
    },
    /// Bytes that are not kept any more. To a reader that begins inside a gap the whole of it is told.
    Gap {
        /// Of which stream.
        stream: StreamName,
        /// Position of the first missing byte.
        offset: u64,
        /// How many are missing.
        length: u64,
    },
    /// It ended. Always the last.
    #[serde(rename_all = "camelCase")]
    Exit {
        /// Why.
        cause: ExitCause,
        /// Its exit code, where it exited.
        code: Option<i32>,
        /// The signal, where one ended it.
        signal: Option<i32>,
        /// Bytes of standard output in all.
        stdout_bytes: u64,
        /// Bytes of standard error in all.
        stderr_bytes: u64,
        /// How long it ran, milliseconds.
        duration_ms: u64,
    },
}

/// One event of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobEvent {
    /// Its number, strictly increasing; the cursor to go on from.
    pub cursor: u64,
    /// When the service learned of it, milliseconds since the Unix epoch.
    pub time: i64,
    /// What happened.
    #[serde(flatten)]
    pub kind: JobEventKind,
}

/// A page of events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobEvents {
    /// The events, in order.
    pub events: Vec<JobEvent>,
    /// Cursor from which the next page begins.
    pub next_cursor: u64,
    /// Whether there are more events already.
    pub has_more: bool,
}

/// What a caller may send on the WebSocket of a job. Anything that fails is answered by a frame of type `error` with
/// `code`, `message` and `hint`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum JobFrame {
    /// Input, at most 64 KiB; waits for room.
    #[serde(rename_all = "camelCase")]
    Stdin {
        /// The bytes, base64.
        data_base64: String,
    },
    /// The end of the input.
    Eof,
    /// Another size of the terminal.
    Resize {
        /// Columns.
        cols: u32,
        /// Rows.
        rows: u32,
    },
    /// A signal to the process group.
    Signal {
        /// Which.
        signal: SignalName,
    },
}
