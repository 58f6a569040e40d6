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

/// Give a context a new kernel
///
/// Its variables are gone, code that runs in it is ended; its id, working directory and environment stay. Also revives a dead one.
#[utoipa::path(post, path = "/v1/machines/{id}/contexts/{contextId}/restart", tag = "contexts", operation_id = "restartContext",
    params(("id" = String, Path, description = "The slot."),
           ("contextId" = String, Path, description = "The context."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    responses((status = 200, description = "The new kernel waits for code.", body = Context)))]
pub(crate) async fn restart(
    State(state): State<AppState>,
    permit: Permit,
    ContextPath(id, context): ContextPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let info = permit.while_valid(async { Ok(handle.restart_context(&context).await?) }).await?;
    json(StatusCode::OK, &super::context(info))
}
