//! One form for every error, whoever made it: our verbs, the router, or an extractor.

use std::sync::Arc;

use axum::body::Body;
use axum::response::Response;
use http::{HeaderValue, StatusCode, header};
use mainbrella_api::ErrorBody;
use mainbrella_types::ErrorCode;

use crate::error::ApiError;

/// Writes the error body of `response`, if it is one, and returns the error.
pub(super) fn apply(response: &mut Response, request_id: &str) -> Option<Arc<ApiError>> {
    let status = response.status();
    let error = match response.extensions_mut().remove::<Arc<ApiError>>() {
        Some(error) => error,
        None if status.is_client_error() || status.is_server_error() => Arc::new(foreign(status)),
        None => return None,
    };
    let body = ErrorBody {
        code: error.code.as_str().to_owned(),
        message: error.message.clone().into_owned(),
        hint: error.hint.as_deref().unwrap_or(error.code.hint()).to_owned(),
        request_id: request_id.to_owned(),
        preview_id: error.preview.clone(),
    };
    let bytes = serde_json::to_vec(&body).unwrap_or_default();
    *response.status_mut() = error.http_status();
    let headers = response.headers_mut();
    headers.remove(header::CONTENT_LENGTH);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(seconds) = error.retry_after {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if error.code == ErrorCode::Unauthenticated {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    *response.body_mut() = Body::from(bytes);
    Some(error)
}

/// An error that a library answered with.
fn foreign(status: StatusCode) -> ApiError {
    let keep = |e: ApiError| e.status(status);
    match status {
        StatusCode::NOT_FOUND => ApiError::new(ErrorCode::NotFound, "There is no such path.")
            .hint("The paths are listed in `/v1/openapi.json`."),
        StatusCode::METHOD_NOT_ALLOWED => keep(
            ApiError::invalid("This path does not take this method.")
                .hint("The `Allow` header lists the methods it takes."),
        ),
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::new(ErrorCode::PayloadTooLarge, "The body is too large."),
        s if s.is_client_error() => keep(ApiError::invalid("The request is not well formed.")),
        s => ApiError::internal(format!("a library answered {s}")),
    }
}

/// Logs what the caller is not told.
pub(super) fn log(error: &ApiError) {
    let internal = error.internal.as_deref();
    if error.http_status().is_server_error() && error.code == ErrorCode::Internal {
        tracing::error!(code = error.code.as_str(), internal, "a request failed by a fault of the service");
    } else if internal.is_some() {
        tracing::warn!(code = error.code.as_str(), internal, "a request failed");
    }
}
