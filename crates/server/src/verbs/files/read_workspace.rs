use axum::extract::State;
use axum::response::Response;
use http::{HeaderValue, header};
use mainbrella_engine::MachineHandle;

use super::{WORKSPACE, content, gzip};
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{Query, SlotPath};
use crate::fence;
use crate::state::AppState;

/// Export the workspace
///
/// A gzip tar stream of what is in `/workspace`, of any size; as the download of a tree otherwise. A transfer that breaks off ends the
/// connection, and the archive has no end mark.
#[utoipa::path(get, path = "/v1/machines/{id}/workspace", tag = "files", operation_id = "exportWorkspace",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    responses((status = 200, description = "The archive.", body = [u8], content_type = "application/gzip")))]
pub(crate) async fn read_workspace(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    answer(&handle, permit).await
}

/// The workspace of a machine as a reply.
pub(crate) async fn answer(machine: &MachineHandle, permit: Permit) -> ApiResult<Response> {
    let chunks = permit.while_valid(async { Ok(machine.pack_tree(WORKSPACE).await?) }).await?;
    let mut response = Response::new(content::stream(gzip::packed(chunks), permit));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/gzip"));
    Ok(response)
}
