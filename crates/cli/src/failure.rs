//! How a verb ends when it does not end well: a sentence, what to do, and an exit code.

use std::io;

use mainbrella_client::ClientError;
use mainbrella_types::ErrorCode;
use serde::Serialize;

/// Exit codes of every verb but `exec`, whose code is that of the command. Told by `mainbrella --help`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Anything without a code of its own.
    Failed = 1,
    /// The command line or a value in it is wrong.
    Usage = 2,
    /// No such machine, template, key or file.
    NotFound = 3,
    /// No key, an unknown one, or one that may not do this.
    Auth = 4,
    /// The service cannot be reached, does not answer, or cannot take the request now.
    Unavailable = 5,
    /// The state of something forbids it.
    Conflict = 6,
    /// This host cannot do it.
    Unsupported = 7,
    /// `exec` itself failed; the command may not have run.
    Exec = 125,
    /// `exec`: the command could not be started.
    NotStarted = 127,
    /// Ended by Ctrl-C.
    Interrupted = 130,
    /// Whoever read the output stopped reading.
    BrokenPipe = 141,
}

/// A failed verb.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Failure {
    /// A stable name.
    pub code: String,
    /// One sentence, without a final stop.
    pub message: String,
    /// What to do; may be empty.
    pub hint: String,
    /// Names the request in the log of the service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// Exit code of the process.
    #[serde(serialize_with = "as_number")]
    pub exit_code: Exit,
}

#[allow(clippy::trivially_copy_pass_by_ref)]
fn as_number<S: serde::Serializer>(exit: &Exit, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_u8(*exit as u8)
}

impl Failure {
    /// A failure without a hint.
    pub fn new(exit: Exit, code: &str, message: impl Into<String>) -> Self {
        Self { code: code.to_owned(), message: message.into(), hint: String::new(), request_id: None, exit_code: exit }
    }

    /// A value on the command line that cannot be used.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, "usage", message)
    }

    /// A failed call of the operating system while doing `what`.
    pub fn io(what: &str, e: &io::Error) -> Self {
        if e.kind() == io::ErrorKind::BrokenPipe {
            return Self::new(Exit::BrokenPipe, "broken_pipe", "");
        }
        let exit = if e.kind() == io::ErrorKind::NotFound { Exit::NotFound } else { Exit::Failed };
        // The operating system's text ends with its number, which says nothing to a person.
        let text = e.to_string();
        let text = text.split(" (os error").next().unwrap_or(&text);
        Self::new(exit, "io", format!("{what}: {text}"))
    }

    /// Adds what to do.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
        self
    }

    /// Prints it to standard error.
    pub fn print(&self, json: bool) {
        use std::io::Write as _;
        if self.exit_code == Exit::BrokenPipe {
            return;
        }
        let mut err = io::stderr().lock();
        // Nobody can be told that standard error is closed.
        let _ = if json {
            let text = serde_json::json!({ "error": self }).to_string();
            writeln!(err, "{text}")
        } else {
            let id = self.request_id.as_ref().map(|id| format!(" (request {id})")).unwrap_or_default();
            let hint = if self.hint.is_empty() { String::new() } else { format!("hint: {}\n", self.hint) };
            write!(err, "error: {}{id}\n{hint}", self.message.trim_end_matches('.'))
        };
    }
}

fn exit_of(code: ErrorCode) -> Exit {
    match code {
        ErrorCode::InvalidRequest | ErrorCode::PayloadTooLarge | ErrorCode::StdinLimit => Exit::Usage,
        ErrorCode::Unauthenticated | ErrorCode::Forbidden => Exit::Auth,
        ErrorCode::NotFound | ErrorCode::FileNotFound | ErrorCode::TemplateNotFound => Exit::NotFound,
        ErrorCode::GenerationMismatch
        | ErrorCode::MachineNotRunning
        | ErrorCode::SlotInUse
        | ErrorCode::EgressLocked
        | ErrorCode::FileExists
        | ErrorCode::ContextDead
        | ErrorCode::PreviewLimit
        | ErrorCode::PreviewEnded
        | ErrorCode::PreviewReconciliationRequired
        | ErrorCode::SecretLimit
        | ErrorCode::SnapshotLimit
        | ErrorCode::SnapshotMismatch
        | ErrorCode::SnapshotDamaged
        | ErrorCode::TemplateInUse
        | ErrorCode::TemplateLimit
        | ErrorCode::BuildState
        | ErrorCode::IdempotencyConflict
        | ErrorCode::InProgress
        | ErrorCode::StdinClosed
        | ErrorCode::StdinFull
        | ErrorCode::JobRunning
        | ErrorCode::JobEnded => Exit::Conflict,
        ErrorCode::Unsupported => Exit::Unsupported,
        ErrorCode::RateLimited
        | ErrorCode::Overloaded
        | ErrorCode::HostFull
        | ErrorCode::GuestUnavailable
        | ErrorCode::DeadlineExceeded
        | ErrorCode::ShuttingDown => Exit::Unavailable,
        ErrorCode::FileError
        | ErrorCode::GuestDiskFull
        | ErrorCode::CommandNotStarted
        | ErrorCode::CreateFailed
        | ErrorCode::Internal => Exit::Failed,
    }
}

impl From<ClientError> for Failure {
    fn from(e: ClientError) -> Self {
        let (exit, code) = match &e {
            ClientError::Configuration { .. } => (Exit::Usage, "usage".to_owned()),
            ClientError::Api(f) => (e.code().map_or(Exit::Failed, exit_of), f.body.code.clone()),
            ClientError::Foreign { status } => (Exit::Unavailable, format!("http_{status}")),
            ClientError::Redirect { .. } => (Exit::Unavailable, "redirect_refused".to_owned()),
            ClientError::Connect { .. } => (Exit::Unavailable, "connection_failed".to_owned()),
            ClientError::Lost { .. } => (Exit::Unavailable, "transport".to_owned()),
            ClientError::StoppedWaiting => (Exit::Unavailable, "caller_stopped_waiting".to_owned()),
            ClientError::Source(source) => return Self::io("reading what was to be sent", source),
            _ => (Exit::Failed, "invalid_response".to_owned()),
        };
        let request_id = match &e {
            ClientError::Api(f) if e.code() == Some(ErrorCode::Internal) => Some(f.body.request_id.clone()),
            _ => None,
        };
        Self { code, message: e.to_string(), hint: e.hint().to_owned(), request_id, exit_code: exit }
    }
}
