use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::Build;

use super::{BuildPath, build};
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{Query, json};
use crate::state::AppState;

/// Inspect a build
#[utoipa::path(get, path = "/v1/builds/{id}", tag = "builds", operation_id = "getBuild",
    params(("id" = String, Path, description = "The build.")),
    responses((status = 200, description = "The build as it is now.", body = Build)))]
pub(crate) async fn get(
    State(state): State<AppState>,
    _permit: Permit,
    BuildPath(id): BuildPath,
    query: Query,
) -> ApiResult<Response> {
    query.finish()?;
    json(StatusCode::OK, &build(state.builds()?.get(&id)?))
}
