use axum::extract::State;
use http::StatusCode;

use super::{PreviewPath, unknown};
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::Query;
use crate::fence;
use crate::state::AppState;

/// Revoke a preview
///
/// Connections over it are closed at once. Revoking an ended one again is no error.
#[utoipa::path(delete, path = "/v1/machines/{id}/previews/{previewId}", tag = "previews", operation_id = "revokePreview",
    params(("id" = String, Path, description = "The slot."),
           ("previewId" = String, Path, description = "The preview."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    responses((status = 204, description = "It has ended.")))]
pub(crate) async fn revoke(
    State(state): State<AppState>,
    permit: Permit,
    PreviewPath(id, preview): PreviewPath,
    mut query: Query,
) -> ApiResult<StatusCode> {
    let created_at = query.created_at()?;
    query.finish()?;
    let key = fence::generation(&state, &permit, &id, created_at).await?.with(|r| r.key);
    if !state.store.revoke_preview(&key, &preview, state.now()).await? {
        state.store.preview(&key, &preview).await?.ok_or_else(unknown)?;
    }
    state.previews.end(&preview);
    Ok(StatusCode::NO_CONTENT)
}
