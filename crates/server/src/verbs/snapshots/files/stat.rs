use axum::extract::State;
use axum::response::Response;
use mainbrella_api::FileEntry;

use super::super::SnapshotPath;
use super::{read, reader};
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::Query;
use crate::state::AppState;
use crate::verbs::files::stat::Asked;

/// Ask what is at a path of a snapshot
#[utoipa::path(get, path = "/v1/snapshots/{id}/files/stat", tag = "snapshots", operation_id = "statSnapshotFile",
    params(("id" = String, Path, description = "The snapshot."),
           ("path" = String, Query, description = "Absolute path in the snapshot, UTF-8, percent-encoded."),
           ("followSymlinks" = Option<bool>, Query, description = "Tell where a link leads instead of the link itself. Default false.")),
    responses((status = 200, description = "What is there.", body = FileEntry)))]
pub(crate) async fn stat(
    State(state): State<AppState>,
    permit: Permit,
    SnapshotPath(key): SnapshotPath,
    query: Query,
) -> ApiResult<Response> {
    let asked = Asked::of(query)?;
    let reader = reader(&state, &permit, &key).await?;
    read(asked.answer(reader.machine(), &permit).await)
}
