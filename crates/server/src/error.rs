//! The one error of the HTTP layer. What a caller sees and what the log sees are separate fields.

use std::borrow::Cow;
use std::sync::Arc;

use axum::response::{IntoResponse, Response};
use http::StatusCode;
use mainbrella_engine::EngineError;
use mainbrella_store::StoreError;
use mainbrella_types::{ErrorCode, IdError};

/// A failed request. It has no `Display`, so internal text cannot reach a caller by accident.
#[derive(Clone, Debug)]
pub struct ApiError {
    pub(crate) code: ErrorCode,
    pub(crate) message: Cow<'static, str>,
    pub(crate) hint: Option<Cow<'static, str>>,
    pub(crate) status: Option<StatusCode>,
    pub(crate) retry_after: Option<u64>,
    pub(crate) preview: Option<String>,
    pub(crate) internal: Option<String>,
}

/// The result of a verb.
pub type ApiResult<T> = Result<T, ApiError>;

impl ApiError {
    /// A failure that may be told to the caller as it stands.
    pub fn new(code: ErrorCode, message: impl Into<Cow<'static, str>>) -> Self {
        let retry_after =
            matches!(code, ErrorCode::RateLimited | ErrorCode::Overloaded | ErrorCode::InProgress).then_some(1);
        Self { code, message: message.into(), hint: None, status: None, retry_after, preview: None, internal: None }
    }

    /// A malformed request.
    pub fn invalid(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorCode::InvalidRequest, message)
    }

    /// A fault of ours; `internal` goes to the log only.
    pub fn internal(internal: impl Into<String>) -> Self {
        Self::new(ErrorCode::Internal, "The service failed to carry this request out.").because(internal)
    }

    /// Adds what only the log may hold.
    #[must_use]
    pub fn because(mut self, internal: impl Into<String>) -> Self {
        self.internal = Some(internal.into());
        self
    }

    /// A better hint than the code's own.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<Cow<'static, str>>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// A status of HTTP's own (405, 415) instead of the code's.
    #[must_use]
    pub fn status(mut self, status: StatusCode) -> Self {
        self.status = Some(status);
        self
    }

    /// Names the preview that is to be looked after.
    #[must_use]
    pub fn preview(mut self, id: String) -> Self {
        self.preview = Some(id);
        self
    }

    /// When to try again, seconds.
    #[must_use]
    pub fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds.max(1));
        self
    }

    /// The public code.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        self.code
    }

    /// The HTTP status it is sent with.
    #[must_use]
    pub fn http_status(&self) -> StatusCode {
        self.status
            .or_else(|| StatusCode::from_u16(self.code.status()).ok())
            .unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }
}

/// The outermost layer, which knows the request id, writes the body from this extension.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.http_status().into_response();
        response.extensions_mut().insert(Arc::new(self));
        response
    }
}

impl From<IdError> for ApiError {
    fn from(e: IdError) -> Self {
        Self::invalid(sentence(e.to_string()))
    }
}

impl From<EngineError> for ApiError {
    fn from(e: EngineError) -> Self {
        let mut error = Self::new(e.code(), sentence(e.message().to_owned()));
        error.internal = e.internal().map(str::to_owned);
        error
    }
}

impl From<StoreError> for ApiError {
    fn from(e: StoreError) -> Self {
        let internal = chain(&e);
        let error = match e {
            StoreError::Unavailable(_) => {
                Self::new(ErrorCode::Overloaded, "The database of the service did not answer in time.")
                    .hint("Try again shortly.")
            }
            StoreError::Closed => Self::new(ErrorCode::ShuttingDown, "The service is going down."),
            StoreError::Full(_) => Self::new(ErrorCode::HostFull, "The disk of the service's database is full."),
            StoreError::Invalid(e) => return e.into(),
            StoreError::Uncertain(_)
            | StoreError::Corrupt(_)
            | StoreError::SchemaTooNew { .. }
            | StoreError::Unusable(_)
            | StoreError::UnknownProject
            | StoreError::Duplicate
            | StoreError::Internal(_) => return Self::internal(internal),
        };
        error.because(internal)
    }
}

/// An error and its causes, outermost first, each said once.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}

/// Begins with a capital and ends with a stop.
pub(crate) fn sentence(mut text: String) -> String {
    // Field names keep their spelling: `ttlSeconds must be …`.
    let first_word_is_plain = text.split(' ').next().is_some_and(|w| w.bytes().all(|b| b.is_ascii_lowercase()));
    if first_word_is_plain && let Some(first) = text.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    if !text.ends_with(['.', '!', '?']) {
        text.push('.');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn internal_context_is_kept_apart() {
        let e: ApiError =
            EngineError::new(ErrorCode::CreateFailed, "boot failed").because("/secret/path: EPERM").into();
        assert_eq!(e.message, "Boot failed.");
        assert_eq!(e.internal.as_deref(), Some("/secret/path: EPERM"));
        assert_eq!(e.http_status(), StatusCode::BAD_GATEWAY);
        let e: ApiError = StoreError::Corrupt("row 7 of /var/x".into()).into();
        assert_eq!(e.code(), ErrorCode::Internal);
        assert!(!e.message.contains("row 7") && e.internal.as_deref().is_some_and(|i| i.contains("row 7")));
    }

    #[test]
    fn field_names_keep_their_spelling() {
        assert_eq!(sentence("ttlSeconds must be 10 to 604800".into()), "ttlSeconds must be 10 to 604800.");
        assert_eq!(sentence("the host is full".into()), "The host is full.");
        assert_eq!(sentence("été".into()), "été.");
        assert_eq!(sentence(String::new()), ".");
    }

    #[test]
    fn what_can_be_retried_says_when() {
        for c in ErrorCode::ALL {
            let waits = matches!(c, ErrorCode::RateLimited | ErrorCode::Overloaded | ErrorCode::InProgress);
            assert_eq!(ApiError::new(*c, "x").retry_after.is_some(), waits, "{c}");
        }
    }
}
