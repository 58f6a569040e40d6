use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::{Preview, RenewPreview};

use super::{PreviewPath, ended, expiry, preview, unknown};
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{JsonBody, Query, json};
use crate::fence;
use crate::state::AppState;

/// Extend a preview
///
/// Moves its end to `ttlSeconds` from now where that is later, not beyond the hard deadline of the machine. The URL stays the
/// same and is not told again.
#[utoipa::path(post, path = "/v1/machines/{id}/previews/{previewId}/renew", tag = "previews", operation_id = "renewPreview",
    params(("id" = String, Path, description = "The slot."),
           ("previewId" = String, Path, description = "The preview."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    request_body = RenewPreview,
    responses((status = 200, description = "The preview with its new end.", body = Preview)))]
pub(crate) async fn renew(
    State(state): State<AppState>,
    permit: Permit,
    PreviewPath(id, name): PreviewPath,
    mut query: Query,
    JsonBody(body): JsonBody<RenewPreview>,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let (now, machine) = (state.now(), handle.record());
    let expires_at = expiry(body.ttl_seconds, now, machine.lease.hard_deadline)?;
    let Some(record) = state.store.renew_preview(&machine.key, &name, expires_at, now).await? else {
        let known = state.store.preview(&machine.key, &name).await?;
        return Err(if known.is_some() { ended() } else { unknown() });
    };
    state.previews.admit_unless_ended(&state.store, &record, &handle).await?;
    json(StatusCode::OK, &preview(&record, None))
}
