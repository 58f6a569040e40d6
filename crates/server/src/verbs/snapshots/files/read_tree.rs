use axum::extract::State;
use axum::response::Response;

use super::super::SnapshotPath;
use super::{read, reader};
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::Query;
use crate::state::AppState;
use crate::verbs::files::read_tree::{answer, asked};

/// Download a tree of a snapshot
///
/// A tar stream, as the download of a tree of a machine.
#[utoipa::path(get, path = "/v1/snapshots/{id}/files/tree", tag = "snapshots", operation_id = "downloadSnapshotTree",
    params(("id" = String, Path, description = "The snapshot."),
           ("path" = String, Query, description = "Absolute path in the snapshot, UTF-8, percent-encoded.")),
    responses((status = 200, description = "The archive.", body = [u8], content_type = "application/x-tar")))]
pub(crate) async fn read_tree(
    State(state): State<AppState>,
    permit: Permit,
    SnapshotPath(key): SnapshotPath,
    query: Query,
) -> ApiResult<Response> {
    let path = asked(query)?;
    let reader = reader(&state, &permit, &key).await?;
    read(answer(path, reader.machine(), permit).await)
}
