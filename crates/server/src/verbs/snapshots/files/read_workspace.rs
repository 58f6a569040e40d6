use axum::extract::State;
use axum::response::Response;

use super::super::SnapshotPath;
use super::{read, reader};
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::Query;
use crate::state::AppState;
use crate::verbs::files::read_workspace::answer;

/// Export the workspace of a snapshot
///
/// A gzip tar stream of what is in its `/workspace`, as the export of a machine's.
#[utoipa::path(get, path = "/v1/snapshots/{id}/workspace", tag = "snapshots", operation_id = "exportSnapshotWorkspace",
    params(("id" = String, Path, description = "The snapshot.")),
    responses((status = 200, description = "The archive.", body = [u8], content_type = "application/gzip")))]
pub(crate) async fn read_workspace(
    State(state): State<AppState>,
    permit: Permit,
    SnapshotPath(key): SnapshotPath,
    query: Query,
) -> ApiResult<Response> {
    query.finish()?;
    let reader = reader(&state, &permit, &key).await?;
    read(answer(reader.machine(), permit).await)
}
