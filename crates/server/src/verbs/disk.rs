use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::{DiskReport, DiskUse};

use crate::auth::AdminPermit;
use crate::error::{ApiError, ApiResult};
use crate::extract::{Query, json};
use crate::state::AppState;

/// What takes room on the host's disk
///
/// Needs the role admin: it is about all projects. Looks at every file of the data directory.
#[utoipa::path(get, path = "/v1/disk", tag = "service", operation_id = "getDisk",
    responses((status = 200, description = "The parts of the data directory.", body = DiskReport)))]
pub(crate) async fn disk(State(state): State<AppState>, _: AdminPermit, query: Query) -> ApiResult<Response> {
    query.finish()?;
    let parts = state.engine.disk_use().await?;
    let parts = parts.into_iter().map(|p| DiskUse { part: p.part.as_str().to_owned(), items: p.items, bytes: p.bytes });
    let at = state.config.data_dir.clone();
    let space = tokio::task::spawn_blocking(move || rustix::fs::statvfs(&at).ok());
    let space = space.await.map_err(|e| ApiError::internal(format!("asking for free space: {e}")))?;
    let report = DiskReport {
        parts: parts.collect(),
        free_bytes: space.as_ref().map(|s| s.f_bavail * s.f_frsize),
        total_bytes: space.as_ref().map(|s| s.f_blocks * s.f_frsize),
    };
    json(StatusCode::OK, &report)
}
