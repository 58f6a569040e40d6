//! Previews: rights to reach a port of a machine from outside.

pub(crate) mod create;
pub(crate) mod list;
pub(crate) mod renew;
pub(crate) mod revoke;

use axum::extract::{FromRequestParts, Path};
use http::request::Parts;
use mainbrella_api::Preview;
use mainbrella_preview::{Public, Token};
use mainbrella_store::PreviewRecord;
use mainbrella_types::{ErrorCode, MachineId, Millis, limits};

use crate::error::{ApiError, ApiResult};
use crate::state::AppState;

/// The `{id}` and the `{previewId}` of a path.
pub(crate) struct PreviewPath(pub(crate) MachineId, pub(crate) String);

impl FromRequestParts<AppState> for PreviewPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> ApiResult<Self> {
        let Path((id, preview)) =
            Path::<(String, String)>::from_request_parts(parts, state).await.map_err(|_| unknown())?;
        let id = id.parse().map_err(|_| ApiError::new(ErrorCode::NotFound, "There is no machine of this id."))?;
        Ok(Self(id, preview))
    }
}

fn unknown() -> ApiError {
    ApiError::new(ErrorCode::NotFound, "This machine has no preview of this id.")
        .hint("List the previews of the machine; ended ones are forgotten after a day.")
}

fn ended() -> ApiError {
    ApiError::new(ErrorCode::PreviewEnded, "This preview has ended.")
}

/// When a preview ends that is asked for now: not after its machine.
fn expiry(ttl_seconds: Option<u64>, now: Millis, hard_deadline: Millis) -> ApiResult<Millis> {
    let seconds = ttl_seconds.unwrap_or(limits::PREVIEW_TTL_DEFAULT_SECONDS);
    if !(limits::PREVIEW_TTL_MIN_SECONDS..=limits::PREVIEW_TTL_MAX_SECONDS).contains(&seconds) {
        return Err(ApiError::invalid("ttlSeconds must be 60 to 3600."));
    }
    Ok(now.plus(seconds * 1000).min(hard_deadline))
}

/// A preview as callers see it; with its URLs for whoever made it.
fn preview(record: &PreviewRecord, urls: Option<(&Public, &Token)>) -> Preview {
    Preview {
        id: record.id.clone(),
        port: record.port,
        created_at_ms: record.created_at.0,
        expires_at: record.expires_at.0,
        url: urls.map(|(public, token)| public.url(token)),
        path_url: urls.map(|(public, token)| public.path_url(token)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preview_never_outlives_its_machine() {
        let at = |ttl, deadline| expiry(ttl, Millis(1000), Millis(deadline)).map(|m| m.0).ok();
        assert_eq!(at(None, i64::MAX), Some(901_000));
        assert_eq!(at(Some(60), 100_000), Some(61_000));
        assert_eq!(at(Some(3600), 100_000), Some(100_000));
        assert_eq!((at(Some(59), i64::MAX), at(Some(3601), i64::MAX), at(Some(u64::MAX), 0)), (None, None, None));
    }
}
