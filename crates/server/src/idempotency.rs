//! What every call that may be repeated under a key has in common: how the key is read, and how a repeat is answered.

use axum::response::Response;
use http::{HeaderMap, HeaderValue, StatusCode};
use mainbrella_api::headers::{IDEMPOTENCY_KEY, IDEMPOTENCY_REPLAYED};
use mainbrella_store::Idempotency;
use mainbrella_types::{ErrorCode, limits};
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use crate::error::{ApiError, ApiResult};
use crate::extract::json;

/// The Idempotency-Key of a request, if it has one.
///
/// # Errors
/// When it is none, or there are several.
pub(crate) fn key(headers: &HeaderMap) -> ApiResult<Option<&str>> {
    let mut values = headers.get_all(IDEMPOTENCY_KEY).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let bad = || ApiError::invalid("Idempotency-Key must be 1 to 255 printable ASCII characters, once.");
    let key = value.to_str().map_err(|_| bad())?;
    let printable = key.bytes().all(|b| (b' '..=b'~').contains(&b));
    if values.next().is_some() || key.is_empty() || key.len() > limits::IDEMPOTENCY_KEY_MAX || !printable {
        return Err(bad());
    }
    Ok(Some(key))
}

/// The Idempotency-Key of a request, if it has one, with a digest of `what` is asked for and of its body as it was
/// understood, not as it was spelled: order and spaces do not matter.
///
/// # Errors
/// As for [`key`].
pub(crate) fn given(headers: &HeaderMap, what: &str, body: &impl Serialize) -> ApiResult<Option<Idempotency>> {
    let Some(key) = key(headers)? else { return Ok(None) };
    let body = serde_json::to_vec(body).map_err(|e| ApiError::internal(e.to_string()))?;
    let body_hash = Sha256::new().chain_update(what).chain_update(body).finalize().into();
    Ok(Some(Idempotency { key: key.to_owned(), body_hash }))
}

/// What is said when the key came with another request before.
pub(crate) fn conflict() -> ApiError {
    ApiError::new(ErrorCode::IdempotencyConflict, "This Idempotency-Key was used for a request with another body.")
}

/// The answer to a call that made something: 201, or 200 with a mark when an earlier call with its key did.
///
/// # Errors
/// When the body cannot be written.
pub(crate) fn made(replayed: bool, body: &impl Serialize) -> ApiResult<Response> {
    let status = if replayed { StatusCode::OK } else { StatusCode::CREATED };
    let mut response = json(status, body)?;
    if replayed {
        response.headers_mut().insert(IDEMPOTENCY_REPLAYED, HeaderValue::from_static("true"));
    }
    Ok(response)
}
