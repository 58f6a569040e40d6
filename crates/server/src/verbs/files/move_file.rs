use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::{FileEntry, MoveFile};

use super::entry_at;
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{JsonBody, Query, SlotPath, json};
use crate::fence;
use crate::state::AppState;

/// Move a file, link or directory
///
/// Never overwrites: something at the destination answers `file_exists`. Between file systems it is copied, and removed
/// once the copy is complete.
#[utoipa::path(post, path = "/v1/machines/{id}/files/move", tag = "files", operation_id = "moveFile",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    request_body = MoveFile,
    responses((status = 200, description = "It is moved.", body = FileEntry)))]
pub(crate) async fn move_file(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
    JsonBody(body): JsonBody<MoveFile>,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let stat = permit
        .while_valid(async { Ok(handle.rename(body.source.as_bytes(), body.destination.as_bytes()).await?) })
        .await?;
    json(StatusCode::OK, &entry_at(body.destination, stat))
}
