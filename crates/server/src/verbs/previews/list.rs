use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::PreviewList;
use mainbrella_types::MachineState;

use super::preview;
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{Query, SlotPath, json};
use crate::fence;
use crate::state::AppState;

/// List active previews
///
/// Without their URLs; the one that ends first comes first. It works where issuing is switched off, too.
#[utoipa::path(get, path = "/v1/machines/{id}/previews", tag = "previews", operation_id = "listPreviews",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    responses((status = 200, description = "The active ones.", body = PreviewList)))]
pub(crate) async fn list(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let found = fence::generation(&state, &permit, &id, created_at).await?;
    let (key, runs) = found.with(|r| (r.key, !r.state.is_final() && r.state != MachineState::Stopping));
    // With their machine all of them have ended, whatever their time was.
    let active = if runs { state.store.active_previews(&key, state.now()).await? } else { Vec::new() };
    json(StatusCode::OK, &PreviewList { previews: active.iter().map(|p| preview(p, None)).collect() })
}
