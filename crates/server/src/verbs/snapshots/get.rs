use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::Snapshot;

use super::{SnapshotPath, known, snapshot};
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{Query, json};
use crate::state::AppState;

/// Inspect a snapshot
#[utoipa::path(get, path = "/v1/snapshots/{id}", tag = "snapshots", operation_id = "getSnapshot",
    params(("id" = String, Path, description = "The snapshot.")),
    responses((status = 200, description = "What was saved.", body = Snapshot)))]
pub(crate) async fn get(
    State(state): State<AppState>,
    permit: Permit,
    SnapshotPath(key): SnapshotPath,
    query: Query,
) -> ApiResult<Response> {
    query.finish()?;
    json(StatusCode::OK, &snapshot(&known(&state, &permit, &key).await?))
}
