use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::{ChangeMode, FileEntry};

use super::{entry_at, mode_bits};
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{JsonBody, Query, SlotPath, json};
use crate::fence;
use crate::state::AppState;

/// Change permission bits
///
/// Of what a link leads to, if the path is one.
#[utoipa::path(post, path = "/v1/machines/{id}/files/chmod", tag = "files", operation_id = "changeMode",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    request_body = ChangeMode,
    responses((status = 200, description = "They are changed.", body = FileEntry)))]
pub(crate) async fn chmod(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
    JsonBody(body): JsonBody<ChangeMode>,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let mode = mode_bits(&body.mode)?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let stat = permit.while_valid(async { Ok(handle.chmod(body.path.as_bytes(), mode).await?) }).await?;
    json(StatusCode::OK, &entry_at(body.path, stat))
}
