//! Code contexts: Python kernels in a machine whose state survives between runs.
//!
//! A small program of ours, the *bridge*, runs in the machine as a job of the engine's own and speaks JSON lines with the
//! engine and the Jupyter protocol with unchanged ipykernels. Its text is compiled in and handed over as the job's first
//! input: it is always of the service's version, whatever the template holds.
//!
//! [`channel`] keeps one bridge a machine reachable over lost links and restarts of the service, [`wire`] reads what it
//! says and believes nothing of it, [`registry`] holds what is known of contexts and running cells, and [`verbs`] is what
//! callers use.

mod channel;
mod registry;
mod run;
mod verbs;
pub(crate) mod wire;

use std::collections::BTreeMap;
use std::time::Duration;

use mainbrella_types::Millis;

pub(crate) use registry::Contexts;
pub use run::CodeRun;
pub(crate) use verbs::resume;
pub use wire::Bundle;

/// The bridge, as handed to a Python of the machine.
const BRIDGE: &str = include_str!("../../../../../guest-image/contexts/bridge.py");
/// Runs the bridge from its input. What is in the working directory must not stand in for modules of Python.
const LOADER: &str = include_str!("../../../../../guest-image/contexts/loader.py");
/// Where Debian's Python is, for which its ipykernel is installed.
const PYTHON: &str = "/usr/bin/python3";
/// Beginning of the ids of jobs that are the engine's own: no list of a user's jobs shows them.
pub(crate) const OWN_JOB: &str = "mainbrella-contexts-";

/// Languages a context can have, where the template brings a kernel for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    /// Python, by ipykernel.
    Python,
}

impl Language {
    /// Every language.
    pub const ALL: [Self; 1] = [Self::Python];

    /// The wire name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Python => "python",
        }
    }

    /// Debian packages that bring its kernel, with what the bridge needs.
    #[must_use]
    pub const fn packages(self) -> &'static [&'static str] {
        match self {
            Self::Python => &["python3-ipykernel", "python3-jupyter-client"],
        }
    }
}

impl std::str::FromStr for Language {
    type Err = mainbrella_types::IdError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|l| l.as_str() == s).ok_or(mainbrella_types::IdError::new("language", "python"))
    }
}

/// A context to make.
#[derive(Clone, Debug)]
pub struct ContextOrder {
    /// What it runs.
    pub language: Language,
    /// Where it begins; `None`: where commands begin (`/workspace`).
    pub cwd: Option<String>,
    /// Environment over the machine's own.
    pub env: BTreeMap<String, String>,
}

/// What a context is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContextState {
    /// Its kernel is starting.
    Starting,
    /// It waits for code.
    Idle,
    /// It runs code.
    Busy,
    /// Its kernel has ended; it can be restarted.
    Dead,
}

/// A context, as callers see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextInfo {
    /// Its id, unique in the machine.
    pub id: String,
    /// What it runs.
    pub language: Language,
    /// What it is doing.
    pub state: ContextState,
    /// When it was made. A restart does not change it.
    pub created_at: Millis,
}

/// Code to run.
#[derive(Clone, Debug)]
pub struct CodeOrder {
    /// The code.
    pub code: String,
    /// Its time limit, milliseconds, from the moment it is its turn.
    pub timeout_ms: u64,
}

/// One of the two text streams of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TextStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeStatus {
    /// To its end.
    Ok,
    /// With an exception.
    Error,
    /// At its time limit.
    TimedOut,
    /// By an interrupt, a restart or a close.
    Interrupted,
}

/// Something a run said, in the order in which it said it.
#[derive(Clone, Debug)]
pub enum CodeEvent {
    /// Text.
    Text(TextStream, String),
    /// Text that was not kept: from byte `offset` of the stream (UTF-8), `length` bytes.
    Gap(TextStream, crate::Omitted),
    /// The value of the last expression, by MIME type.
    Result(Bundle),
    /// Something that was displayed, by MIME type.
    Display(Bundle),
    /// The exception that ended it.
    Error {
        /// Its class.
        name: String,
        /// Its text.
        value: String,
        /// The traceback, a frame or more an entry, without colours.
        traceback: Vec<String>,
    },
    /// The last event.
    Done(CodeEnd),
}

/// How a run ended, and what is to be known of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeEnd {
    /// How.
    pub status: CodeStatus,
    /// The kernel's count of runs; `None` when its answer did not arrive.
    pub execution_count: Option<u64>,
    /// Whether text or results were left out because of the limits.
    pub truncated: bool,
    /// Time it took in the machine.
    pub duration: Duration,
}

/// Whether a job of the guest is a bridge: the engine's own, for code contexts.
#[must_use]
pub(crate) fn is_bridge(id: &str) -> bool {
    id.starts_with(OWN_JOB)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainbrella_types::limits;

    /// The number a line `NAME = A * B * …` of the bridge gives.
    fn constant(name: &str) -> usize {
        let line = BRIDGE.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(" = ")).expect(name);
        line.split(" * ").map(|n| n.parse::<f64>().expect("a number") as usize).product()
    }

    #[test]
    fn the_bridge_keeps_the_limits_that_are_promised() {
        assert_eq!(constant("HEAD_BYTES") + constant("TAIL_BYTES"), limits::CODE_STREAM_MAX);
        assert_eq!(constant("VERSION") as u64, wire::VERSION);
        assert_eq!(constant("VALUE_BYTES"), limits::CODE_VALUE_MAX);
        assert_eq!(constant("RICH_BYTES"), limits::CODE_RESULTS_BYTES_MAX);
        assert_eq!(constant("RICH_COUNT"), limits::CODE_RESULTS_MAX);
        assert_eq!(constant("FRAMES"), wire::FRAMES_MAX - 1);
        assert_eq!(constant("FRAME_BYTES"), wire::FRAME_MAX);
        assert_eq!(constant("MIMES"), wire::MIMES_MAX);
        assert_eq!(constant("GRACE_S"), run::KILL_GRACE.as_secs() as usize);
        assert!(BRIDGE.len() < mainbrella_guest_protocol::limits::STDIN_INLINE_MAX);
    }
}
