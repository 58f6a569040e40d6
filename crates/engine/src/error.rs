//! What can go wrong below the API. `code()` is what a caller is told; the rest is for the log.

use mainbrella_types::ErrorCode;

/// A failure in a driver.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The template is not built on this host.
    #[error("template {0} is not built on this host")]
    TemplateMissing(String),
    /// This host or driver cannot do it.
    #[error("{0}")]
    Unsupported(String),
    /// No disk space on the host.
    #[error("no space left in the data directory")]
    HostFull,
    /// A limit of this host is reached.
    #[error("{0}")]
    Exhausted(String),
    /// The machine is not in a state that allows it.
    #[error("{0}")]
    WrongState(&'static str),
    /// What was kept of a machine is not as it was written, or does not fit what is on this host now.
    #[error("what was kept of the machine cannot be used: {0}")]
    Damaged(String),
    /// The start command of a template does not get ready.
    #[error("the start command of the template does not get ready: {why}")]
    StartFailed {
        /// What was seen.
        why: String,
        /// The end of what it said.
        output: String,
    },
    /// A step of a launch failed: which, and what was seen.
    #[error("{stage} failed: {detail}")]
    Stage {
        /// The step, in a few words.
        stage: &'static str,
        /// What was observed. For the log and the operator, not for API callers.
        detail: String,
    },
    /// An operating-system call failed.
    #[error("{what}")]
    Io {
        /// What was being done.
        what: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

impl DriverError {
    /// An I/O failure while doing `what`; a full disk becomes [`Self::HostFull`].
    pub fn io(what: impl Into<String>, source: std::io::Error) -> Self {
        if source.kind() == std::io::ErrorKind::StorageFull || source.kind() == std::io::ErrorKind::QuotaExceeded {
            Self::HostFull
        } else {
            Self::Io { what: what.into(), source }
        }
    }

    /// The public code.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::TemplateMissing(_) => ErrorCode::TemplateNotFound,
            Self::Unsupported(_) => ErrorCode::Unsupported,
            Self::HostFull => ErrorCode::HostFull,
            Self::Exhausted(_) => ErrorCode::Overloaded,
            Self::WrongState(_) => ErrorCode::MachineNotRunning,
            Self::Stage { .. } | Self::Io { .. } | Self::Damaged(_) | Self::StartFailed { .. } => {
                ErrorCode::CreateFailed
            }
        }
    }
}

/// A failure of a machine operation: a public code and sentence, and an internal context that never leaves.
#[derive(Clone, Debug)]
pub struct EngineError {
    code: ErrorCode,
    message: String,
    internal: Option<String>,
    said: Option<String>,
}

impl EngineError {
    /// A failure that may be told to the caller as it stands.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), internal: None, said: None }
    }

    /// Adds what only the log may hold.
    #[must_use]
    pub fn because(mut self, internal: impl Into<String>) -> Self {
        self.internal = Some(internal.into());
        self
    }

    /// The public code.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        self.code
    }

    /// The public sentence.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The end of what a command of the user's own said before it failed, if that is why.
    #[must_use]
    pub fn said(&self) -> Option<&str> {
        self.said.as_deref()
    }

    /// The internal context, for the log.
    #[must_use]
    pub fn internal(&self) -> Option<&str> {
        self.internal.as_deref()
    }
}

impl From<DriverError> for EngineError {
    fn from(e: DriverError) -> Self {
        let code = e.code();
        let public = match &e {
            DriverError::TemplateMissing(_)
            | DriverError::Unsupported(_)
            | DriverError::HostFull
            | DriverError::WrongState(_)
            | DriverError::StartFailed { .. }
            | DriverError::Exhausted(_) => e.to_string(),
            DriverError::Damaged(_) => "what was kept of the machine cannot be used".to_owned(),
            DriverError::Stage { stage, .. } => format!("the machine could not be made: {stage} failed"),
            DriverError::Io { .. } => "the machine could not be made".to_owned(),
        };
        let mut internal = e.to_string();
        let mut source = std::error::Error::source(&e);
        while let Some(s) = source {
            internal.push_str(": ");
            internal.push_str(&s.to_string());
            source = s.source();
        }
        let said = match e {
            DriverError::StartFailed { output, .. } => Some(output),
            _ => None,
        };
        Self { said, ..Self::new(code, public).because(internal) }
    }
}
