//! How a failed system call in the guest travels to the host: an error code for dispatch, and the number
//! and stage for a caller who must tell "disk full" from "no such file".
//!
//! They travel at the head of the message, `[STAGE ERRNO] text`: a call that is refused before its stream
//! begins keeps its message but loses its trailers.

use connectrpc::{ConnectError, ErrorCode};

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
        let message = error.message.as_deref().unwrap_or_default();
        let head = message.strip_prefix('[').and_then(|rest| rest.split_once("] "));
        let parsed = head.and_then(|(head, text)| {
            let (stage, errno) = head.split_once(' ')?;
            let errno: i32 = errno.parse().ok()?;
            let well_formed =
                !stage.is_empty() && stage.len() <= 32 && stage.bytes().all(|b| b.is_ascii_lowercase() || b == b'-');
            (well_formed && (0..4096).contains(&errno)).then(|| (stage.to_owned(), errno, text))
        });
        let (stage, errno, text) = parsed.unwrap_or((String::new(), 0, message));
        Self { errno, stage, code: error.code, message: text.chars().take(512).collect() }
    }

    /// Whether the connection rather than the request failed: the call may be tried on a new one.
    pub fn is_link_failure(&self) -> bool {
        self.errno == 0 && self.stage.is_empty() && matches!(self.code, ErrorCode::Unavailable | ErrorCode::Canceled)
    }
}

/// The guest's side: an error for a system call that failed with `errno` at `stage`.
pub fn fault(stage: &'static str, errno: i32, message: impl Into<String>) -> ConnectError {
    ConnectError::new(code_of(errno), format!("[{stage} {errno}] {}", message.into()))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_arrives_as_it_was_sent() {
        let got = GuestError::from_connect(&fault("open", 2, "no [such] file"));
        let want =
            GuestError { errno: 2, stage: "open".into(), code: ErrorCode::NotFound, message: "no [such] file".into() };
        assert_eq!(got, want);
        assert_eq!(GuestError::from_connect(&fault("kind", 0, "")).stage, "kind");
    }

    #[test]
    fn what_is_not_of_our_form_is_only_text() {
        for text in ["", "[", "[open]", "[open 2]", "[OPEN 2] x", "[open -1] x", "[open 99999] x", "[a/b 2] x", "plain"]
        {
            let got = GuestError::from_connect(&ConnectError::new(ErrorCode::Internal, text));
            assert_eq!((got.errno, got.stage.as_str(), got.message.as_str()), (0, "", text));
        }
    }
}
