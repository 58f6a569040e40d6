use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::Context;

use super::ContextPath;
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{Query, json};
use crate::fence;
use crate::state::AppState;

/// Look at a code context
#[utoipa::path(get, path = "/v1/machines/{id}/contexts/{contextId}", tag = "contexts", operation_id = "getContext",
    params(("id" = String, Path, description = "The slot."),
           ("contextId" = String, Path, description = "The context."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    responses((status = 200, description = "The context.", body = Context)))]
pub(crate) async fn get(
    State(state): State<AppState>,
    permit: Permit,
    ContextPath(id, context): ContextPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let info = permit.while_valid(async { Ok(handle.context(&context).await?) }).await?;
    json(StatusCode::OK, &super::context(info))
}
