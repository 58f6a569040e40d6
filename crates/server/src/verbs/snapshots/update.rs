use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::{Snapshot, UpdateSnapshot};
use mainbrella_store::SnapshotChange;
use mainbrella_types::check_snapshot_name;

use super::{SnapshotPath, snapshot, unknown};
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{JsonBody, Query, json};
use crate::state::AppState;

/// Rename a snapshot, or put it aside
///
/// An archived one can be restored and counts as before.
#[utoipa::path(patch, path = "/v1/snapshots/{id}", tag = "snapshots", operation_id = "updateSnapshot",
    params(("id" = String, Path, description = "The snapshot.")),
    request_body = UpdateSnapshot,
    responses((status = 200, description = "As it is now.", body = Snapshot)))]
pub(crate) async fn update(
    State(state): State<AppState>,
    permit: Permit,
    SnapshotPath(key): SnapshotPath,
    query: Query,
    JsonBody(body): JsonBody<UpdateSnapshot>,
) -> ApiResult<Response> {
    query.finish()?;
    body.name.as_deref().map_or(Ok(()), check_snapshot_name)?;
    let change = SnapshotChange { name: body.name, archived: body.archived };
    let record = state.store.update_snapshot(&permit.project, &key, &change, state.now()).await?;
    json(StatusCode::OK, &snapshot(&record.ok_or_else(unknown)?))
}
