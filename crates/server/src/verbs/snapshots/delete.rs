use axum::extract::State;
use http::StatusCode;
use tracing::Instrument as _;

use super::{SnapshotPath, unknown};
use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::Query;
use crate::reconcile;
use crate::state::AppState;

/// Delete a snapshot
///
/// Nothing is started from it any more; machines that were started from it go on. What is left of it on the host is removed by and
/// by, should that not succeed at once.
#[utoipa::path(delete, path = "/v1/snapshots/{id}", tag = "snapshots", operation_id = "deleteSnapshot",
    params(("id" = String, Path, description = "The snapshot.")),
    responses((status = 204, description = "It is gone.")))]
pub(crate) async fn delete(
    State(state): State<AppState>,
    permit: Permit,
    SnapshotPath(key): SnapshotPath,
    query: Query,
) -> ApiResult<StatusCode> {
    query.finish()?;
    // On a task of its own: what is not named any more is to go, also when the caller does.
    let work = async move {
        if !state.store.delete_snapshot(&permit.project, &key, state.now()).await? {
            return Err(unknown());
        }
        tracing::info!(snapshot = %key, by = permit.key_id, "a snapshot was deleted");
        reconcile::forget_snapshot(&state, key).await;
        Ok(())
    };
    let done = tokio::spawn(work.in_current_span()).await;
    done.map_err(|e| ApiError::internal(format!("a deletion ended abnormally: {e}")))??;
    Ok(StatusCode::NO_CONTENT)
}
