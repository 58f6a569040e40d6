use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::TemplateList;

use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{Query, json};
use crate::state::AppState;

/// Templates that machines can start from
#[utoipa::path(get, path = "/v1/templates", tag = "templates", operation_id = "listTemplates",
    responses((status = 200, description = "The templates of this host, by name and version.", body = TemplateList)))]
pub(crate) async fn list(State(state): State<AppState>, _permit: Permit, query: Query) -> ApiResult<Response> {
    query.finish()?;
    let templates = super::all(&state).await?.into_iter().map(|(template, _)| template).collect();
    json(StatusCode::OK, &TemplateList { templates })
}
