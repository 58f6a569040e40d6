use axum::extract::State;
use axum::response::Response;
use http::{HeaderValue, header};
use mainbrella_engine::MachineHandle;

use super::{content, path_of};
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{Query, SlotPath};
use crate::fence;
use crate::state::AppState;

/// Download a tree
///
/// A tar stream (POSIX, with PAX records where needed) of what is in a directory, without the directory's own name; or of one
/// file. A link at the path is followed, links below are packed as links, files with several names as hard links. Devices,
/// FIFOs and sockets are left out, as is what other file systems mounted below hold. A transfer that breaks off ends the
/// connection, and the archive has no end mark.
#[utoipa::path(get, path = "/v1/machines/{id}/files/tree", tag = "files", operation_id = "downloadTree",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant."),
           ("path" = String, Query, description = "Absolute path in the machine, UTF-8, percent-encoded.")),
    responses((status = 200, description = "The archive.", body = [u8], content_type = "application/x-tar")))]
pub(crate) async fn read_tree(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    let path = asked(query)?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    answer(path, &handle, permit).await
}

/// The tree that is asked for.
pub(crate) fn asked(mut query: Query) -> ApiResult<String> {
    let path = path_of(&mut query)?;
    query.finish()?;
    Ok(path)
}

/// A tree of a machine as a reply.
pub(crate) async fn answer(path: String, machine: &MachineHandle, permit: Permit) -> ApiResult<Response> {
    let chunks = permit.while_valid(async { Ok(machine.pack_tree(path.as_bytes()).await?) }).await?;
    let mut response = Response::new(content::stream(chunks, permit));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-tar"));
    Ok(response)
}
