use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::{RemoveFile, RemoveResult};

use super::lossy;
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{JsonBody, Query, SlotPath, json};
use crate::fence;
use crate::state::AppState;

/// Remove a file, a link, a directory
///
/// A link is removed itself; a directory that is not empty only with `recursive`. Mounted file systems are not entered, and
/// after 25 seconds it stops. A tree that could be removed only in part answers with what is left: `remainingCount` is then
/// not 0. When nothing could be tried, that is an error.
#[utoipa::path(post, path = "/v1/machines/{id}/files/remove", tag = "files", operation_id = "removeFile",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    request_body = RemoveFile,
    responses((status = 200, description = "What is gone, and what is left.", body = RemoveResult)))]
pub(crate) async fn remove(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
    JsonBody(body): JsonBody<RemoveFile>,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let done = permit.while_valid(async { Ok(handle.remove(body.path.as_bytes(), body.recursive).await?) }).await?;
    json(
        StatusCode::OK,
        &RemoveResult {
            removed: done.removed,
            remaining: done.remaining.iter().map(|p| lossy(p)).collect(),
            remaining_count: done.remaining_count,
            reason: done.reason,
        },
    )
}
