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

/// Interrupt the code that runs in a context
///
/// As Ctrl-C does: Python code meets a `KeyboardInterrupt`. Nothing happens where none runs. State is kept.
#[utoipa::path(post, path = "/v1/machines/{id}/contexts/{contextId}/interrupt", tag = "contexts", operation_id = "interruptContext",
    params(("id" = String, Path, description = "The slot."),
           ("contextId" = String, Path, description = "The context."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    responses((status = 200, description = "The interrupt was delivered; the run ends by itself.", body = Context)))]
pub(crate) async fn interrupt(
    State(state): State<AppState>,
    permit: Permit,
    ContextPath(id, context): ContextPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let info = permit.while_valid(async { Ok(handle.interrupt_context(&context).await?) }).await?;
    json(StatusCode::OK, &super::context(info))
}
