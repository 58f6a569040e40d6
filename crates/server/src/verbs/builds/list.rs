use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::BuildList;

use super::build;
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{Query, json};
use crate::state::AppState;

/// Builds that are remembered
///
/// The hundred newest, unfinished ones among them.
#[utoipa::path(get, path = "/v1/builds", tag = "builds", operation_id = "listBuilds",
    responses((status = 200, description = "The builds, the newest first.", body = BuildList)))]
pub(crate) async fn list(State(state): State<AppState>, _permit: Permit, query: Query) -> ApiResult<Response> {
    query.finish()?;
    let builds = state.builds()?.list().into_iter().map(build).collect();
    json(StatusCode::OK, &BuildList { builds })
}
