//! What can go wrong with an image. Each says in one plain sentence what to do.

use std::io;

use mainbrella_tree::TreeError;

/// An image could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OciError {
    /// The name of an image is not one.
    #[error("`{name}` is no name of an image: {problem}")]
    Name {
        /// What was given.
        name: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The registry does not answer.
    #[error(
        "the registry {registry} could not be reached; check its name, this host's network and its proxy, then try again"
    )]
    Unreachable {
        /// The registry.
        registry: String,
        /// What went wrong.
        detail: String,
    },
    /// The registry answers over plain HTTP and may not.
    #[error(
        "the registry {0} is not on this host and would be asked without TLS; allow that for it by name if you trust the way there"
    )]
    Plain(String),
    /// The registry wants to know who asks, or does not let him.
    #[error("the registry {0} does not give this image to these credentials; log in with a name that may read it")]
    Denied(String),
    /// There is no such image.
    #[error("there is no image {0}; check its name and tag")]
    NotFound(String),
    /// The registry says something that is not understood.
    #[error("the registry {registry} answered {answer}; try again later, or ask who runs it")]
    Answer {
        /// The registry.
        registry: String,
        /// What it answered.
        answer: String,
    },
    /// Content is not what its digest says.
    #[error("{0} is not what its digest says and nothing of it was used; fetch or save the image again")]
    Digest(String),
    /// Not the form of an image.
    #[error("{0}; save the image again with `docker save` or `skopeo copy`")]
    Malformed(String),
    /// No machine can run it.
    #[error("the image is not made for linux/amd64, only for {0}; use one that is")]
    Platform(String),
    /// It is known, and not done here.
    #[error("{0} is not supported; use another image")]
    Unsupported(String),
    /// Something is over its limit.
    #[error("{what}: at most {max}; use a smaller image")]
    Limit {
        /// What there is too much of.
        what: &'static str,
        /// The limit.
        max: u64,
    },
    /// A layer could not be laid out.
    #[error("layer {layer} of the image cannot be unpacked: {source}")]
    Layer {
        /// Which, from 1.
        layer: usize,
        /// Why.
        source: TreeError,
    },
    /// The caller asked to stop.
    #[error("fetching the image was cancelled")]
    Cancelled,
    /// An operating-system call failed.
    #[error("{what}: {source}")]
    Io {
        /// What was being done.
        what: String,
        /// The cause.
        source: io::Error,
    },
}

impl OciError {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| match source.kind() {
            // How a stream that is read within says that it was told to stop.
            io::ErrorKind::ConnectionAborted => Self::Cancelled,
            _ => Self::Io { what, source },
        }
    }

    pub(crate) fn malformed(what: impl Into<String>) -> Self {
        Self::Malformed(what.into())
    }
}

/// Text of a stranger, short enough and without what would disturb a terminal.
pub(crate) fn shown(text: &str) -> String {
    text.chars().take(120).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
