use std::io;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::response::Response;
use futures::stream::BoxStream;
use http::{HeaderMap, StatusCode};
use mainbrella_api::TreeWritten;
use mainbrella_engine::MachineHandle;

use super::content::{TREE, Upload};
use super::path_of;
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{Query, SlotPath, json};
use crate::fence;
use crate::state::AppState;

/// Upload a tree
///
/// The body is a tar archive, not compressed, at most 32 GiB; it is unpacked below the path, which is made when it is missing.
/// Files and links that are there are replaced, never written through; nothing outside of the path is touched, and an archive
/// that tries (`..`, links that lead out) is refused. Entries belong to the template's user, else to root. When it fails in the middle,
/// what was unpacked before stays.
#[utoipa::path(put, path = "/v1/machines/{id}/files/tree", tag = "files", operation_id = "uploadTree",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant."),
           ("path" = String, Query, description = "Absolute path of a directory in the machine, UTF-8, percent-encoded.")),
    request_body(content = [u8], description = "The archive.", content_type = "application/x-tar"),
    responses((status = 200, description = "Unpacked whole.", body = TreeWritten)))]
pub(crate) async fn write_tree(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
    headers: HeaderMap,
    body: Body,
) -> ApiResult<Response> {
    let upload = Upload::new(body, TREE);
    let created_at = query.created_at()?;
    let path = path_of(&mut query)?;
    query.finish()?;
    upload.check_announced(&headers)?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    unpacked(&handle, &permit, &upload, path.as_bytes(), upload.stream()).await
}

/// Unpacks `archive`, which is what comes in `upload`, below `path` of a machine, and answers.
pub(crate) async fn unpacked(
    machine: &MachineHandle,
    permit: &Permit,
    upload: &Upload,
    path: &[u8],
    archive: BoxStream<'static, io::Result<Bytes>>,
) -> ApiResult<Response> {
    let done = permit.while_valid(upload.blaming(machine.unpack_tree(path, archive, false))).await?;
    json(StatusCode::OK, &TreeWritten { entries: done.entries, bytes: done.bytes, skipped: done.skipped })
}
