use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::{FileEntry, MakeDirectory};

use super::{entry_at, mode_bits};
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{JsonBody, Query, SlotPath, json};
use crate::fence;
use crate::state::AppState;

/// Make a directory
///
/// With `recursive` those above it are made too, and one that is there is left as it is.
#[utoipa::path(post, path = "/v1/machines/{id}/files/mkdir", tag = "files", operation_id = "makeDirectory",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    request_body = MakeDirectory,
    responses((status = 200, description = "It is there.", body = FileEntry)))]
pub(crate) async fn mkdir(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
    JsonBody(body): JsonBody<MakeDirectory>,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let mode = body.mode.as_deref().map_or(Ok(0o755), mode_bits)?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let stat =
        permit.while_valid(async { Ok(handle.make_dir(body.path.as_bytes(), body.recursive, mode).await?) }).await?;
    json(StatusCode::OK, &entry_at(body.path, stat))
}
