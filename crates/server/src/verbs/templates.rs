use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::TemplateList;

use crate::auth::Permit;
use crate::convert;
use crate::error::ApiResult;
use crate::extract::{Query, json};
use crate::state::AppState;

/// Templates that machines can start from
#[utoipa::path(get, path = "/v1/templates", tag = "templates", operation_id = "listTemplates",
    responses((status = 200, description = "The templates of this host, by name.", body = TemplateList)))]
pub(crate) async fn templates(State(state): State<AppState>, _permit: Permit, query: Query) -> ApiResult<Response> {
    query.finish()?;
    let mut templates: Vec<_> = state.engine.templates().await?.into_iter().map(convert::template).collect();
    templates.sort_by(|a, b| a.name.cmp(&b.name));
    json(StatusCode::OK, &TemplateList { templates })
}
