use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::Machine;
use mainbrella_types::CreatedAt;

use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{Query, SlotPath, json};
use crate::state::AppState;
use crate::{convert, fence};

/// Inspect a machine
///
/// Never shortens or resets a lease. Without `createdAt`: the newest generation in the slot.
#[utoipa::path(get, path = "/v1/machines/{id}", tag = "machines", operation_id = "getMachine",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = Option<String>, Query, description = "The generation that is meant; another one in the slot answers `generation_mismatch`.")),
    responses((status = 200, description = "The machine.", body = Machine)))]
pub(crate) async fn get(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = match query.take("createdAt") {
        Some(text) => Some(text.parse::<CreatedAt>()?),
        None => None,
    };
    query.finish()?;
    let found = match created_at {
        Some(created_at) => fence::generation(&state, &permit, &id, created_at).await?,
        None => fence::newest(&state, &permit, &id).await?,
    };
    let machine = found.with(|record| convert::machine(record, &state.traits()));
    json(StatusCode::OK, &machine)
}
