use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::SecretRemoved;

use super::{SecretPath, put_in_force};
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{Query, json};
use crate::fence;
use crate::state::AppState;

/// Remove a secret
///
/// Requests that begin from now on go out without it, also over connections that exist. Removing it again is no error.
#[utoipa::path(delete, path = "/v1/machines/{id}/secrets/{name}", tag = "network", operation_id = "removeSecret",
    params(("id" = String, Path, description = "The slot."),
           ("name" = String, Path, description = "Its name."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    responses((status = 200, description = "There is none of that name.", body = SecretRemoved)))]
pub(crate) async fn remove(
    State(state): State<AppState>,
    permit: Permit,
    SecretPath(id, name): SecretPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let key = handle.record().key;
    let turn = handle.secrets_turn().await;
    let removed = state.store.remove_secret(&key, name.as_str()).await?;
    put_in_force(&state, turn, &key, false).await?;
    json(StatusCode::OK, &SecretRemoved { removed })
}
