use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::{TagTemplate, TemplateDetails};
use mainbrella_types::TemplateName;

use super::TemplatePath;
use crate::auth::AdminPermit;
use crate::builds::keeper;
use crate::error::{ApiError, ApiResult};
use crate::extract::{JsonBody, Query, json};
use crate::state::AppState;

/// Let a name mean a version
///
/// Needs the role admin, in the project `default`. The name may be of another template than the version. Machines that were made of
/// what it meant before go on.
#[utoipa::path(put, path = "/v1/templates/{name}", tag = "templates", operation_id = "tagTemplate",
    params(("name" = String, Path, description = "The tag: `app` or `app:stable`, never the name of a version.")),
    request_body = TagTemplate,
    responses((status = 200, description = "What it means now.", body = TemplateDetails)))]
pub(crate) async fn tag(
    State(state): State<AppState>,
    admin: AdminPermit,
    TemplatePath(name): TemplatePath,
    query: Query,
    JsonBody(body): JsonBody<TagTemplate>,
) -> ApiResult<Response> {
    query.finish()?;
    keeper(admin)?;
    let named: TemplateName = body
        .source
        .parse()
        .map_err(|e: mainbrella_types::IdError| ApiError::invalid(format!("source must be {}.", e.expected)))?;
    let source = super::resolve(&state, &named).await?;
    if source.version().is_none() {
        return Err(ApiError::invalid(format!("source: {source} has no versions, so no tag can point to it.")));
    }
    let tag = name.clone();
    state.with_images(move |images| images.tag(&source, &tag).map(drop)).await?;
    state.templates.forget();
    json(StatusCode::OK, &super::details(&state, &name).await?)
}
