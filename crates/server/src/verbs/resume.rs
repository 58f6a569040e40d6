use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::Machine;

use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{Query, SlotPath, json};
use crate::state::AppState;
use crate::{convert, fence};

/// Resume a paused machine
///
/// On the same generation, with clock and random numbers put right, under the egress policy it had. No lease changes. Resuming a running
/// machine is no error.
#[utoipa::path(post, path = "/v1/machines/{id}/resume", tag = "machines", operation_id = "resumeMachine",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    responses((status = 200, description = "The machine, running.", body = Machine)))]
pub(crate) async fn resume(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let record = handle.resume().await?;
    json(StatusCode::OK, &convert::machine(&record, &state.traits()))
}
