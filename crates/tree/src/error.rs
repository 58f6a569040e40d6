//! What went wrong with a tree.

use rustix::io::Errno;

/// A failed operation on a tree.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{stage}: {text}")]
pub struct TreeError {
    /// What was being done: lower-case letters and `-`.
    pub stage: &'static str,
    /// The system's answer; `None` when a rule of ours was broken.
    pub errno: Option<Errno>,
    /// What is wrong, in a few words.
    pub text: String,
}

impl TreeError {
    /// A rule of ours was broken.
    pub(crate) fn rule(stage: &'static str, text: impl Into<String>) -> Self {
        Self { stage, errno: None, text: text.into() }
    }

    /// A system call failed.
    pub(crate) fn system(stage: &'static str) -> impl Fn(Errno) -> Self {
        move |errno| Self { stage, errno: Some(errno), text: std::io::Error::from(errno).to_string() }
    }
}
