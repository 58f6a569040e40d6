//! Code contexts: interpreters in a machine whose state survives between runs.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::OmittedRange;

/// Makes a context.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CreateContext {
    /// `python`.
    pub language: String,
    /// Where it begins, absolute. Default: where commands begin (`/workspace`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Environment, over that of the machine: at most 128 entries and 64 KiB. A restart keeps it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
}

impl CreateContext {
    /// A context of `language`, with nothing else set.
    #[must_use]
    pub fn new(language: &str) -> Self {
        Self { language: language.to_owned(), cwd: None, env: BTreeMap::new() }
    }
}

/// The environment may hold secrets: only its names are shown.
impl std::fmt::Debug for CreateContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CreateContext")
            .field("language", &self.language)
            .field("cwd", &self.cwd)
            .field("env", &self.env.keys().collect::<Vec<_>>())
            .finish()
    }
}

/// What a context is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ContextState {
    /// Its kernel is starting.
    Starting,
    /// It waits for code.
    Idle,
    /// It runs code.
    Busy,
    /// Its kernel has ended. A restart gives it a new one.
    Dead,
}

/// A context.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Context {
    /// Its id, unique in the machine.
    pub id: String,
    /// `python`.
    pub language: String,
    /// What it is doing.
    pub state: ContextState,
    /// When it was made, RFC 3339. A restart does not change it.
    pub created_at: String,
}

/// The contexts of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContextList {
    /// All of them, oldest first.
    pub contexts: Vec<Context>,
}

/// Runs code.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RunCode {
    /// The code; at most 1 MiB.
    pub code: String,
    /// Its time limit, milliseconds, from the moment it is its turn. Default 60000, at most 86400000. It is interrupted
    /// then, as by Ctrl-C; where it does not end within five seconds, its kernel is ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 86_400_000)]
    pub timeout_ms: Option<u64>,
}

impl RunCode {
    /// Code with the default time limit.
    #[must_use]
    pub fn new(code: &str) -> Self {
        Self { code: code.to_owned(), timeout_ms: None }
    }
}

/// Code may hold secrets: only its size is shown.
impl std::fmt::Debug for RunCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunCode").field("bytes", &self.code.len()).field("timeout_ms", &self.timeout_ms).finish()
    }
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CodeStatus {
    /// To its end.
    Ok,
    /// With an exception.
    Error,
    /// At its time limit. Output and results are what there was by then.
    TimedOut,
    /// By an interrupt, a restart or a close.
    Interrupted,
}

/// Content by MIME type. Text types and pictures (base64) are JSON strings; `application/json` and its kin are JSON values.
pub type Bundle = BTreeMap<String, Box<RawValue>>;

/// The text of a MIME type, where it is a string.
#[must_use]
pub fn bundle_text(data: &Bundle, mime: &str) -> Option<String> {
    serde_json::from_str(data.get(mime)?.get()).ok()
}

/// Whether something is the value of the last expression or was displayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OutputKind {
    /// The value of the last expression.
    Result,
    /// Something displayed, e.g. a plot.
    Display,
}

/// A rich output.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct CodeOutput {
    /// What it is.
    pub r#type: OutputKind,
    /// By MIME type, each at most 4 MiB. A type that is larger is left out, and `truncated` says so.
    #[schema(schema_with = crate::schema::bundle)]
    pub data: Bundle,
}

/// The exception a run ended with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct CodeError {
    /// Its class.
    pub name: String,
    /// Its text.
    pub value: String,
    /// The traceback, without colours.
    pub traceback: Vec<String>,
}

/// What a run did. An exception is a normal result.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct CodeResult {
    /// The kernel's count of runs; `null` when the kernel could not tell.
    pub execution_count: Option<u64>,
    /// How it ended.
    pub status: CodeStatus,
    /// Standard output; head and tail when `stdoutOmitted` is set.
    pub stdout: String,
    /// Standard error; head and tail when `stderrOmitted` is set.
    pub stderr: String,
    /// Rich outputs in their order.
    pub results: Vec<CodeOutput>,
    /// The exception.
    pub error: Option<CodeError>,
    /// Whether text or rich outputs were left out because of the limits.
    pub truncated: bool,
    /// What is missing from standard output, in bytes of UTF-8.
    #[serde(default)]
    pub stdout_omitted: Option<OmittedRange>,
    /// What is missing from standard error, in bytes of UTF-8.
    #[serde(default)]
    pub stderr_omitted: Option<OmittedRange>,
    /// How long it ran, milliseconds.
    pub duration_ms: u64,
}

/// One event of a run, as server-sent events carry it. The name of the event is `type`.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum CodeEvent {
    /// Standard output.
    Stdout {
        /// Some text.
        text: String,
    },
    /// Standard error.
    Stderr {
        /// Some text.
        text: String,
    },
    /// Text of one stream that was left out. What follows of the stream is its tail.
    Gap {
        /// `stdout` or `stderr`.
        stream: String,
        /// Bytes of the stream before it.
        offset: u64,
        /// Bytes missing.
        length: u64,
    },
    /// The value of the last expression.
    Result {
        /// By MIME type.
        #[schema(schema_with = crate::schema::bundle)]
        data: Bundle,
    },
    /// Something displayed.
    Display {
        /// By MIME type.
        #[schema(schema_with = crate::schema::bundle)]
        data: Bundle,
    },
    /// The exception it ended with.
    Error(CodeError),
    /// The last event of a run.
    #[serde(rename_all = "camelCase")]
    Done {
        /// The kernel's count of runs.
        execution_count: Option<u64>,
        /// How it ended.
        status: CodeStatus,
        /// Whether something was left out.
        truncated: bool,
        /// How long it ran, milliseconds.
        duration_ms: u64,
    },
    /// Instead of `done`: the run could not be followed to its end, e.g. because its kernel ended.
    Failed(crate::ErrorBody),
}

impl CodeEvent {
    /// The name of the event.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Stdout { .. } => "stdout",
            Self::Stderr { .. } => "stderr",
            Self::Gap { .. } => "gap",
            Self::Result { .. } => "result",
            Self::Display { .. } => "display",
            Self::Error(_) => "error",
            Self::Done { .. } => "done",
            Self::Failed(_) => "failed",
        }
    }
}
