//! How a failed system call in the guest travels to the host: an error code for dispatch, and the number
//! and stage for a caller who must tell "disk full" from "no such file".

use connectrpc::{ConnectError, ErrorCode};

const ERRNO_KEY: &str = "mainbrella-errno";
const STAGE_KEY: &str = "mainbrella-stage";

/// What the guest says went wrong. Nothing in it is trusted: a guest may say anything.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("guest: {stage}: {message} (errno {errno})")]
pub struct GuestError {
    /// Linux error number; 0 when no system call failed.
    pub errno: i32,
    /// What the agent was about: `open`, `write`, `rename`, `exec`, … Lower-case letters and `-` only;
    /// empty when the guest did not say.
    pub stage: String,
    /// The error code the call ended with.
    pub code: ErrorCode,
    /// Internal text, at most 512 bytes. For logs, never for API callers.
    pub message: String,
}

impl GuestError {
    /// Reads what a call ended with.
    pub fn from_connect(error: &ConnectError) -> Self {
        let text = |key: &str| {
            let value = error.trailers().get(key).or_else(|| error.response_headers().get(key));
            value.and_then(|value| value.to_str().ok()).map(str::to_owned)
        };
        let stage = text(STAGE_KEY)
            .filter(|stage| stage.len() <= 32 && stage.bytes().all(|b| b.is_ascii_lowercase() || b == b'-'))
            .unwrap_or_default();
        let errno = text(ERRNO_KEY).and_then(|errno| errno.parse().ok()).filter(|n| (0..4096).contains(n)).unwrap_or(0);
        let message = error.message.as_deref().unwrap_or_default();
        Self { errno, stage, code: error.code, message: message.chars().take(512).collect() }
    }

    /// Whether the connection rather than the request failed: the call may be tried on a new one.
    pub fn is_link_failure(&self) -> bool {
        self.errno == 0 && self.stage.is_empty() && matches!(self.code, ErrorCode::Unavailable | ErrorCode::Canceled)
    }
}

/// The guest's side: an error for a system call that failed with `errno` at `stage`.
pub fn fault(stage: &'static str, errno: i32, message: impl Into<String>) -> ConnectError {
    let mut error = ConnectError::new(code_of(errno), message);
    let trailers = error.trailers_mut();
    trailers.insert(STAGE_KEY, http::HeaderValue::from_static(stage));
    if errno != 0 {
        trailers.insert(ERRNO_KEY, http::HeaderValue::from(errno));
    }
    error
}

/// Linux error numbers that have a meaning of their own to a caller.
fn code_of(errno: i32) -> ErrorCode {
    match errno {
        // ENOENT
        2 => ErrorCode::NotFound,
        // EPERM, EACCES, EROFS
        1 | 13 | 30 => ErrorCode::PermissionDenied,
        // EEXIST
        17 => ErrorCode::AlreadyExists,
        // ENOSPC, EDQUOT, ENOMEM, EMFILE, ENFILE, EAGAIN, EFBIG
        28 | 122 | 12 | 24 | 23 | 11 | 27 => ErrorCode::ResourceExhausted,
        // ENOTDIR, EISDIR, ETXTBSY, ELOOP, EBUSY, ENXIO, ENOTEMPTY
        20 | 21 | 26 | 40 | 16 | 6 | 39 => ErrorCode::FailedPrecondition,
        // EINVAL, ENAMETOOLONG, E2BIG
        22 | 36 | 7 => ErrorCode::InvalidArgument,
        // Checked by the agent itself, without a system call.
        0 => ErrorCode::InvalidArgument,
        _ => ErrorCode::Internal,
    }
}
