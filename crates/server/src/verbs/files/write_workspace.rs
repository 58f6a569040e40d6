use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use http::HeaderMap;
use mainbrella_api::TreeWritten;

use super::WORKSPACE;
use super::content::{TREE, Upload};
use super::write_tree::unpacked;
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{Query, SlotPath};
use crate::fence;
use crate::state::AppState;

/// Import into the workspace
///
/// The body is a tar archive, packed with gzip or not, at most 32 GiB either way; it is unpacked into `/workspace` as the upload of a tree is.
/// What is there and not in the archive stays.
#[utoipa::path(put, path = "/v1/machines/{id}/workspace", tag = "files", operation_id = "importWorkspace",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    request_body(content = [u8], description = "The archive.", content_type = "application/gzip"),
    responses((status = 200, description = "Unpacked whole.", body = TreeWritten)))]
pub(crate) async fn write_workspace(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
    headers: HeaderMap,
    body: Body,
) -> ApiResult<Response> {
    let upload = Upload::new(body, TREE);
    let created_at = query.created_at()?;
    query.finish()?;
    upload.check_announced(&headers)?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    unpacked(&handle, &permit, &upload, WORKSPACE, upload.plain()).await
}
