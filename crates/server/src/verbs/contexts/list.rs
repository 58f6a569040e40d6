use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::ContextList;

use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{Query, SlotPath, json};
use crate::fence;
use crate::state::AppState;

/// List the code contexts of a machine
#[utoipa::path(get, path = "/v1/machines/{id}/contexts", tag = "contexts", operation_id = "listContexts",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    responses((status = 200, description = "All of them, oldest first.", body = ContextList)))]
pub(crate) async fn list(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let list = permit.while_valid(async { Ok(handle.contexts().await?) }).await?;
    json(StatusCode::OK, &ContextList { contexts: list.into_iter().map(super::context).collect() })
}
