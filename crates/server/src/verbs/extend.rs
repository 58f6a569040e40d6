use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::{ExtendMachine, Machine};
use mainbrella_engine::LeaseChange;
use mainbrella_types::machine::{check_idle, check_ttl};

use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::{JsonBody, Query, SlotPath, json};
use crate::state::AppState;
use crate::{convert, fence};

/// Extend a lease
///
/// Moves the hard deadline to `ttlSeconds` from now where that is later, sets the idle timeout, and what becomes of the machine when
/// that is over. Never shortens the hard lease.
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
    let wish = LeaseChange {
        ttl_ms: body.ttl_seconds.map(|s| s.saturating_mul(1000)),
        idle_timeout_ms: body.idle_timeout_seconds.map(|s| s.saturating_mul(1000)),
        on_idle: body.on_idle.map(Into::into),
        auto_resume: body.auto_resume,
    };
    if wish == LeaseChange::default() {
        return Err(ApiError::invalid("One of ttlSeconds, idleTimeoutSeconds, onIdle and autoResume must be given."));
    }
    wish.ttl_ms.map_or(Ok(()), check_ttl)?;
    wish.idle_timeout_ms.map_or(Ok(()), check_idle)?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let record = handle.extend(wish).await?;
    json(StatusCode::OK, &convert::machine(&record, &state.traits()))
}
