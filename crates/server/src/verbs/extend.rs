use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::{ExtendMachine, Machine};
use mainbrella_types::machine::{check_idle, check_ttl};

use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::{JsonBody, Query, SlotPath, json};
use crate::state::AppState;
use crate::{convert, fence};

/// Extend a lease
///
/// Moves the hard deadline to `ttlSeconds` from now where that is later, and sets the idle timeout. Never shortens the hard lease.
#[utoipa::path(post, path = "/v1/machines/{id}/extend", tag = "machines", operation_id = "extendMachine",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    request_body = ExtendMachine,
    responses((status = 200, description = "The machine with its new lease.", body = Machine)))]
pub(crate) async fn extend(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
    JsonBody(body): JsonBody<ExtendMachine>,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let ttl_ms = body.ttl_seconds.map(|s| s.saturating_mul(1000));
    let idle_ms = body.idle_timeout_seconds.map(|s| s.saturating_mul(1000));
    if ttl_ms.is_none() && idle_ms.is_none() {
        return Err(ApiError::invalid("ttlSeconds or idleTimeoutSeconds must be given."));
    }
    ttl_ms.map_or(Ok(()), check_ttl)?;
    idle_ms.map_or(Ok(()), check_idle)?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let record = handle.extend(ttl_ms, idle_ms).await?;
    json(StatusCode::OK, &convert::machine(&record, &state.traits()))
}
