use axum::extract::State;
use http::StatusCode;

use super::ContextPath;
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::Query;
use crate::fence;
use crate::state::AppState;

/// End a code context
///
/// Its kernel, and what that started in its own session, ends. Code that runs in it is ended.
#[utoipa::path(delete, path = "/v1/machines/{id}/contexts/{contextId}", tag = "contexts", operation_id = "closeContext",
    params(("id" = String, Path, description = "The slot."),
           ("contextId" = String, Path, description = "The context."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    responses((status = 204, description = "It is gone.")))]
pub(crate) async fn close(
    State(state): State<AppState>,
    permit: Permit,
    ContextPath(id, context): ContextPath,
    mut query: Query,
) -> ApiResult<StatusCode> {
    let created_at = query.created_at()?;
    query.finish()?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    permit.while_valid(async { Ok(handle.close_context(&context).await?) }).await?;
    Ok(StatusCode::NO_CONTENT)
}
