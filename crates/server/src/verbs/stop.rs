use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::{StopOutcome, StopResult};
use mainbrella_engine::StopOutcome as Stop;
use mainbrella_types::{ErrorCode, MachineRecord};

use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::{Query, SlotPath, json};
use crate::fence::Found;
use crate::state::AppState;
use crate::{convert, fence};

/// Stop exactly this generation
///
/// Idempotent: a generation that has ended answers `stopped`. `uncertain` means that it is being removed and not all of it is
/// confirmed gone; ask again. Unsaved guest files are lost. The stop goes on when the caller goes away.
#[utoipa::path(post, path = "/v1/machines/{id}/stop", tag = "machines", operation_id = "stopMachine",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    responses((status = 200, description = "What became of it.", body = StopResult)))]
pub(crate) async fn stop(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let found = fence::to_act(&state, &permit, &id, created_at).await?;
    let (outcome, record) = stop_found(found).await?;
    json(StatusCode::OK, &StopResult { outcome, machine: convert::machine(&record, &state.traits()) })
}

/// Ends the machine, if it has not ended.
pub(super) async fn stop_found(found: Found) -> ApiResult<(StopOutcome, MachineRecord)> {
    match found {
        Found::Living(handle) => Ok(match handle.stop().await? {
            Stop::Stopped(record) => (StopOutcome::Stopped, record),
            Stop::Uncertain(record) => (StopOutcome::Uncertain, record),
        }),
        Found::Resting(record) if record.state.is_final() => Ok((StopOutcome::Stopped, *record)),
        // The intent is durable and nothing acts for it here, so nothing here can end it.
        Found::Resting(record) => Err(ApiError::new(
            ErrorCode::Overloaded,
            format!("Machine {} is not held by this service just now.", record.generation.id),
        )),
    }
}
