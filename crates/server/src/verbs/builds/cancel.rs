use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::Build;

use super::{BuildPath, build};
use crate::auth::AdminPermit;
use crate::builds::keeper;
use crate::error::ApiResult;
use crate::extract::{Query, json};
use crate::state::AppState;

/// Cancel a build
///
/// Needs the role admin, in the project `default`. Idempotent; one that is over stays as it is. One that is carried out ends in a
/// moment: what it is doing with its machine is brought to an end first. Steps that were done stay cached.
#[utoipa::path(post, path = "/v1/builds/{id}/cancel", tag = "builds", operation_id = "cancelBuild",
    params(("id" = String, Path, description = "The build.")),
    responses((status = 200, description = "The build as it is now.", body = Build)))]
pub(crate) async fn cancel(
    State(state): State<AppState>,
    admin: AdminPermit,
    BuildPath(id): BuildPath,
    query: Query,
) -> ApiResult<Response> {
    query.finish()?;
    keeper(admin)?;
    json(StatusCode::OK, &build(state.builds()?.cancel(&id).await?))
}
