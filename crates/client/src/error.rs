//! What can go wrong between a caller and the service.

use std::time::Duration;

use mainbrella_api::ErrorBody;
use mainbrella_types::{ErrorCode, error::Retry};

/// An error answer of the API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiFailure {
    /// HTTP status.
    pub status: u16,
    /// Code, message, hint, request id.
    pub body: ErrorBody,
    /// How long the service asked to wait.
    pub retry_after: Option<Duration>,
}

/// A failed call. Its text is one plain sentence; [`ClientError::hint`] says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// An argument cannot be used; nothing was sent.
    #[error("{message}")]
    Configuration {
        /// What is wrong.
        message: String,
        /// What to do.
        hint: String,
    },
    /// The service said no.
    #[error("{}", .0.body.message)]
    Api(Box<ApiFailure>),
    /// An error answer that is not of this API: a proxy, or another service at this address.
    #[error("the answer, HTTP status {status}, does not come from a Mainbrella service")]
    Foreign {
        /// Its status.
        status: u16,
    },
    /// The service answered with a redirect, which was not followed.
    #[error("the service answered with a redirect, which was not followed")]
    Redirect {
        /// Its status.
        status: u16,
    },
    /// No connection; nothing was sent.
    #[error("no connection to {url} could be made")]
    Connect {
        /// The service.
        url: String,
        /// The cause.
        source: reqwest::Error,
    },
    /// The connection was lost; the request may have been carried out.
    #[error("the connection was lost before the answer was complete")]
    Lost {
        /// The cause.
        source: reqwest::Error,
    },
    /// No answer in time; what was asked may go on.
    #[error("no answer came in the time this client waits")]
    StoppedWaiting,
    /// The answer is not of this API.
    #[error("the answer is not one of this API: {0}")]
    Malformed(&'static str),
    /// Reading what was to be uploaded failed; the machine has nothing of it.
    #[error("what was to be sent could not be read")]
    Source(#[source] std::io::Error),
}

impl ClientError {
    /// What to do next; empty when there is nothing to say.
    #[must_use]
    pub fn hint(&self) -> &str {
        match self {
            Self::Configuration { hint, .. } => hint,
            Self::Api(f) => &f.body.hint,
            Self::Foreign { .. } | Self::Malformed(_) => {
                "Check that the URL is that of a Mainbrella service of a matching version."
            }
            Self::Redirect { .. } => "Use the final address; the API key is sent nowhere else.",
            Self::Connect { .. } => {
                "Check that the service is running (`mainbrella doctor`) and that the URL is right."
            }
            Self::Lost { .. } | Self::StoppedWaiting => {
                "What was asked may have been done; inspect before repeating it."
            }
            Self::Source(_) => "",
        }
    }

    /// The code of an API answer, when this build knows it.
    #[must_use]
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Api(f) => f.body.known_code(),
            _ => None,
        }
    }

    /// Whether the request may or may not have been carried out.
    #[must_use]
    pub fn is_ambiguous(&self) -> bool {
        match self {
            Self::Api(f) => f.body.known_code().map_or(f.status >= 500, |c| c.retry() == Retry::SameKeyOnly),
            Self::Foreign { status } => *status >= 500,
            Self::Lost { .. } | Self::StoppedWaiting | Self::Malformed(_) => true,
            Self::Configuration { .. } | Self::Redirect { .. } | Self::Connect { .. } | Self::Source(_) => false,
        }
    }

    /// Whether nothing was done and the same request can be sent again after a pause.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Api(f) => f.body.known_code().is_some_and(|c| c.retry() == Retry::Safe),
            Self::Connect { .. } => true,
            _ => false,
        }
    }

    /// From a failure of the HTTP library. The URL is dropped from it: paths and labels may be private.
    pub(crate) fn from_http(e: reqwest::Error, url: &url::Url) -> Self {
        let e = e.without_url();
        if e.is_connect() {
            Self::Connect { url: url.as_str().trim_end_matches('/').to_owned(), source: e }
        } else if e.is_timeout() {
            Self::StoppedWaiting
        } else {
            Self::Lost { source: e }
        }
    }
}
