//! Blocking commands.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What to run: text for `/bin/sh -lc`, or the arguments themselves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum CommandLine {
    /// Runs as `/bin/sh -lc TEXT`.
    Text(String),
    /// Runs directly; the first entry is the program. 1 to 1024 entries.
    Argv(Vec<String>),
}

/// Runs a command and waits for it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RunCommand {
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
    /// Time-out of the command, milliseconds. Default 60000, at most 86400000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 86_400_000)]
    pub timeout_ms: Option<u64>,
    /// Bytes kept of each of stdout and stderr, half head and half tail. Default 1048576, at most 16777216.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 16_777_216)]
    pub output_limit_bytes: Option<u64>,
    /// Standard input, base64 (standard alphabet, padded), at most 1 MiB decoded. Without it the command reads end of file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin_base64: Option<String>,
    /// How long its end is waited for, milliseconds. Default: until it comes. When the wait ends first the reply has the
    /// output so far and `stillRunning`, and the command goes on as the job `jobId`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 86_400_000)]
    pub wait_ms: Option<u64>,
}

/// Commands, environment and input may hold secrets: only their shape is shown.
impl std::fmt::Debug for RunCommand {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunCommand")
            .field("cwd", &self.cwd)
            .field("user", &self.user)
            .field("env", &self.env.keys().collect::<Vec<_>>())
            .field("timeout_ms", &self.timeout_ms)
            .field("output_limit_bytes", &self.output_limit_bytes)
            .field("stdin", &self.stdin_base64.is_some())
            .finish_non_exhaustive()
    }
}

/// The part of a stream that was produced but not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct OmittedRange {
    /// Where the gap begins: bytes of the stream before it (all of them are in the reply).
    pub offset: u64,
    /// Bytes missing.
    pub length: u64,
}

/// How a command ended. A non-zero exit code is a normal result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct CommandResult {
    /// Exit code; 128 + signal when a signal ended it; -1 when it timed out or has not ended.
    pub exit_code: i32,
    /// Number of the signal that ended it.
    pub signal: Option<i32>,
    /// Whether its time-out ended it. The output is what it had produced by then.
    pub timed_out: bool,
    /// Standard output, base64; head and tail when `stdoutOmitted` is set.
    pub stdout_base64: String,
    /// Standard error, base64; head and tail when `stderrOmitted` is set.
    pub stderr_base64: String,
    /// Bytes of standard output produced in all.
    pub stdout_bytes: u64,
    /// Bytes of standard error produced in all.
    pub stderr_bytes: u64,
    /// What is missing from standard output.
    pub stdout_omitted: Option<OmittedRange>,
    /// What is missing from standard error.
    pub stderr_omitted: Option<OmittedRange>,
    /// How long it ran in the machine, milliseconds.
    pub duration_ms: u64,
    /// Id of the job it was, or still is.
    #[serde(default)]
    #[schema(required = true)]
    pub job_id: String,
    /// Whether it had not ended when `waitMs` had passed; or, with `timedOut`, whether the machine is so far behind that it
    /// has not said that it ended the command. The output is what it had produced by then, `exitCode` is -1, and it is kept
    /// under `jobId`.
    #[serde(default)]
    #[schema(required = true)]
    pub still_running: bool,
}
