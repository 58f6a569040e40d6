use axum::extract::State;
use axum::response::Response;
use mainbrella_api::FileList;

use super::super::SnapshotPath;
use super::{read, reader};
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::Query;
use crate::state::AppState;
use crate::verbs::files::list::Asked;

/// List a directory of a snapshot
///
/// As the listing of a machine's directory. Nothing has to be started for it: the service reads through a machine of its own, which it
/// makes with the first read of a snapshot and keeps for a minute after the last.
#[utoipa::path(get, path = "/v1/snapshots/{id}/files/list", tag = "snapshots", operation_id = "listSnapshotFiles",
    params(("id" = String, Path, description = "The snapshot."),
           ("path" = String, Query, description = "Absolute path in the snapshot, UTF-8, percent-encoded."),
           ("offset" = Option<u64>, Query, description = "First entry: 0, or the `nextOffset` of the page before."),
           ("limit" = Option<u32>, Query, description = "Most entries, 1 to 1000. Default 100.")),
    responses((status = 200, description = "A page.", body = FileList)))]
pub(crate) async fn list(
    State(state): State<AppState>,
    permit: Permit,
    SnapshotPath(key): SnapshotPath,
    query: Query,
) -> ApiResult<Response> {
    let asked = Asked::of(query)?;
    let reader = reader(&state, &permit, &key).await?;
    read(asked.answer(reader.machine(), &permit).await)
}
