use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::egress::wanted;
use mainbrella_api::{Build, CreateBuild};
use mainbrella_builder::BuildRequest;
use mainbrella_recipe::Recipe;
use mainbrella_types::limits::{
    BUILD_TIMEOUT_DEFAULT_SECONDS, BUILD_TIMEOUT_MAX_SECONDS, BUILD_TIMEOUT_MIN_SECONDS, PATH_MAX,
};
use mainbrella_types::{EgressPolicy, ErrorCode};

use super::build;
use crate::auth::AdminPermit;
use crate::builds::keeper;
use crate::error::{ApiError, ApiResult, sentence};
use crate::extract::{JsonBody, Query, json};
use crate::state::AppState;
use crate::verbs::templates::{family, labels};

/// Build a template
///
/// Needs the role admin, in the project `default`. The build waits for its context, at most 15 minutes; then it is carried out in
/// its turn. A recipe that is given as text is read at once, and refused where it is not well formed.
#[utoipa::path(post, path = "/v1/builds", tag = "builds", operation_id = "createBuild", request_body = CreateBuild,
    responses((status = 201, description = "The build; it waits for its context.", body = Build)))]
pub(crate) async fn create(
    State(state): State<AppState>,
    admin: AdminPermit,
    query: Query,
    JsonBody(body): JsonBody<CreateBuild>,
) -> ApiResult<Response> {
    query.finish()?;
    keeper(admin)?;
    let request = checked(&state, body).await?;
    json(StatusCode::CREATED, &build(state.builds()?.create(request).await?))
}

async fn checked(state: &AppState, body: CreateBuild) -> ApiResult<BuildRequest> {
    let name = family(&body.name)?;
    let tags = labels(&name, &body.tags)?;
    let report = state.engine.report();
    if !report.memory_snapshot {
        return Err(ApiError::new(
            ErrorCode::Unsupported,
            "This host cannot save machines, and so builds no templates.",
        ));
    }
    let taken = state.engine.templates().await?;
    if taken.iter().any(|t| t.name == name && t.name.version().is_none()) {
        return Err(ApiError::invalid(format!(
            "name: {name} is a template that comes with the service or was imported."
        ))
        .hint("Give the template another name; a recipe may begin with that one."));
    }
    if let Some(text) = &body.recipe {
        // With its arguments: they may decide what it begins with.
        Recipe::parse(text, &body.arguments).map_err(|e| ApiError::invalid(sentence(format!("recipe: {e}"))))?;
    }
    let path_ok = (1..=PATH_MAX).contains(&body.recipe_path.len()) && !body.recipe_path.contains('\0');
    if !path_ok {
        return Err(ApiError::invalid("recipePath must name a file of the context."));
    }
    let default = if report.internet { EgressPolicy::Open } else { EgressPolicy::Off };
    let egress = wanted(body.internet, body.egress.as_ref()).map_err(|e| ApiError::invalid(sentence(e)))?;
    let egress = egress.unwrap_or(default);
    report.enforces(&egress).map_err(|why| {
        ApiError::new(ErrorCode::Unsupported, sentence(why.to_owned()))
            .hint("`networking` of `/v1/capabilities` says what this host can enforce.")
    })?;
    let timeout_seconds = body.timeout_seconds.unwrap_or(BUILD_TIMEOUT_DEFAULT_SECONDS);
    if !(BUILD_TIMEOUT_MIN_SECONDS..=BUILD_TIMEOUT_MAX_SECONDS).contains(&timeout_seconds) {
        return Err(ApiError::invalid("timeoutSeconds must be 10 to 21600."));
    }
    Ok(BuildRequest {
        name,
        tags,
        recipe: body.recipe,
        recipe_path: body.recipe_path,
        arguments: body.arguments,
        size: body.size.map(|s| s.parse()).transpose()?,
        no_cache: body.no_cache,
        pull: body.pull,
        egress,
        timeout_seconds,
    })
}
