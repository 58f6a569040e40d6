//! Why a build did not become a template.

use mainbrella_engine::EngineError;
use mainbrella_recipe::RecipeError;
use mainbrella_types::ErrorCode;
use serde::{Deserialize, Serialize};

/// What kept a build from becoming a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The recipe is malformed, or holds what is not supported.
    Recipe,
    /// What it begins with is not there or cannot be built on.
    Base,
    /// The context was not sent in time, or could not be read.
    Context,
    /// A step did what it does and that failed.
    Step,
    /// The start command or its probe failed.
    Start,
    /// Its time was over.
    TimedOut,
    /// The service ended while it was under way.
    Interrupted,
    /// The machine it runs in could not be made, or was lost.
    Machine,
    /// The host or the machine has no space left.
    Full,
    /// A fault of ours.
    Internal,
}

impl Reason {
    /// The wire name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Recipe => "recipe",
            Self::Base => "base",
            Self::Context => "context",
            Self::Step => "step",
            Self::Start => "start",
            Self::TimedOut => "timed_out",
            Self::Interrupted => "interrupted",
            Self::Machine => "machine",
            Self::Full => "full",
            Self::Internal => "internal",
        }
    }
}

/// See [`Reason`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Failure {
    /// Of which kind.
    pub reason: Reason,
    /// What happened and what to do, in a sentence or two. For callers.
    pub message: String,
    /// The line of the recipe it is about, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<u64>,
    /// The instruction on that line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instruction: Option<String>,
}

impl Failure {
    pub(crate) fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), line: None, instruction: None }
    }

    pub(crate) fn on(mut self, line: usize, instruction: &str) -> Self {
        if self.line.is_none() && line > 0 {
            self.line = Some(line as u64);
            self.instruction = Some(instruction.to_owned());
        }
        self
    }

    /// What a machine or the host failed with, while doing what `reason` says.
    pub(crate) fn of(reason: Reason, e: &EngineError) -> Self {
        let reason = match e.code() {
            ErrorCode::HostFull | ErrorCode::GuestDiskFull => Reason::Full,
            ErrorCode::Internal => Reason::Internal,
            _ => reason,
        };
        if let Some(internal) = e.internal() {
            tracing::warn!(internal, "a build failed: {}", e.message());
        }
        Self::new(reason, e.message())
    }

    /// A fault of ours: what is inside goes to the log of the service only.
    pub(crate) fn internal(inside: impl std::fmt::Display) -> Self {
        tracing::error!(internal = %inside, "a build failed by a fault of the service");
        Self::new(Reason::Internal, "the service failed to carry the build out; its own log has the cause")
    }
}

impl From<RecipeError> for Failure {
    fn from(e: RecipeError) -> Self {
        let line = (e.line > 0).then_some(e.line as u64);
        Self { reason: Reason::Recipe, message: e.fault.to_string(), line, instruction: None }
    }
}

/// How a build ends early.
#[derive(Debug)]
pub(crate) enum Halt {
    Failed(Failure),
    Cancelled,
}

impl From<Failure> for Halt {
    fn from(f: Failure) -> Self {
        Self::Failed(f)
    }
}

impl From<RecipeError> for Halt {
    fn from(e: RecipeError) -> Self {
        Self::Failed(e.into())
    }
}
