use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::TemplateDetails;

use super::TemplatePath;
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{Query, json};
use crate::state::AppState;

/// Inspect a template
///
/// A template, a version, or what a tag means now.
#[utoipa::path(get, path = "/v1/templates/{name}", tag = "templates", operation_id = "getTemplate",
    params(("name" = String, Path, description = "A template, a version or a tag, as in `app`, `app:v3` or `app:stable`.")),
    responses((status = 200, description = "All that is known of it.", body = TemplateDetails)))]
pub(crate) async fn get(
    State(state): State<AppState>,
    _permit: Permit,
    TemplatePath(name): TemplatePath,
    query: Query,
) -> ApiResult<Response> {
    query.finish()?;
    json(StatusCode::OK, &super::details(&state, &name).await?)
}
