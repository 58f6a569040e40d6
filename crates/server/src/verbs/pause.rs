use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::Machine;

use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{Query, SlotPath, json};
use crate::state::AppState;
use crate::{convert, fence};

/// Pause a machine
///
/// Saves memory and disk and ends every process: nothing runs until it is resumed. Jobs, code contexts and open files go on then; its connections
/// and transfers end now, its previews lead on afterwards. The hard lease goes on counting, the idle timeout does not. Pausing a paused machine is no error.
#[utoipa::path(post, path = "/v1/machines/{id}/pause", tag = "machines", operation_id = "pauseMachine",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    responses((status = 200, description = "The machine, paused.", body = Machine)))]
pub(crate) async fn pause(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let record = handle.pause().await?;
    json(StatusCode::OK, &convert::machine(&record, &state.traits()))
}
