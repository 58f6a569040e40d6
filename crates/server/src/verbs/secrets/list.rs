use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::SecretList;

use super::secret;
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{Query, SlotPath, json};
use crate::fence;
use crate::state::AppState;

/// List secrets
///
/// By name, without their values. A machine that has ended has none.
#[utoipa::path(get, path = "/v1/machines/{id}/secrets", tag = "network", operation_id = "listSecrets",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    responses((status = 200, description = "All of them.", body = SecretList)))]
pub(crate) async fn list(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let key = fence::generation(&state, &permit, &id, created_at).await?.with(|r| r.key);
    let secrets = state.store.secrets(&key).await?;
    json(StatusCode::OK, &SecretList { secrets: secrets.iter().map(secret).collect() })
}
