use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::TemplateRemoved;
use mainbrella_types::TemplateName;

use super::TemplatePath;
use crate::auth::AdminPermit;
use crate::builds::{keeper, remove_version};
use crate::error::{ApiError, ApiResult};
use crate::extract::{Query, json};
use crate::state::AppState;

/// Remove a version or a tag
///
/// Needs the role admin, in the project `default`. A tag: it means nothing any more, the version stays. A version: it is removed, and
/// refused as `template_in_use` while a tag means it. With `all`, of a name without a label: every version and every tag of it.
/// Machines that were made of it go on. Templates without versions are removed on their host.
#[utoipa::path(delete, path = "/v1/templates/{name}", tag = "templates", operation_id = "removeTemplate",
    params(("name" = String, Path, description = "A version or a tag."),
           ("all" = Option<bool>, Query, description = "Everything of this name.")),
    responses((status = 200, description = "What was removed.", body = TemplateRemoved)))]
pub(crate) async fn remove(
    State(state): State<AppState>,
    admin: AdminPermit,
    TemplatePath(name): TemplatePath,
    mut query: Query,
) -> ApiResult<Response> {
    let everything = query.parsed::<bool>("all", "true or false")?.unwrap_or(false);
    query.finish()?;
    keeper(admin)?;
    if everything {
        if name.label().is_some() {
            return Err(ApiError::invalid("all goes with a name that has no label."));
        }
        return json(StatusCode::OK, &all(&state, &name).await?);
    }
    if name.version().is_some() && remove_version(&state, &name).await? {
        return json(StatusCode::OK, &TemplateRemoved { versions: vec![name.to_string()], tags: Vec::new() });
    }
    if untag(&state, &name).await? {
        return json(StatusCode::OK, &TemplateRemoved { versions: Vec::new(), tags: vec![name.to_string()] });
    }
    // It may be one that has no versions, or nothing.
    let meant = super::resolve(&state, &name).await?;
    Err(ApiError::invalid(format!("{meant} is a template without versions."))
        .hint(format!("Remove it on its host: `mainbrella template rm {meant}`.")))
}

async fn untag(state: &AppState, tag: &TemplateName) -> ApiResult<bool> {
    let wanted = tag.clone();
    let was_there = state.with_images(move |images| images.untag(&wanted)).await?;
    state.templates.forget();
    Ok(was_there)
}

/// Removes every version of a family with the tags that mean it.
async fn all(state: &AppState, family: &TemplateName) -> ApiResult<TemplateRemoved> {
    let built = state.with_images(|images| Ok(images.built_all())).await?;
    let mine: Vec<_> = built.into_iter().filter(|b| b.name.family() == family.family()).collect();
    if mine.is_empty() {
        let meant = super::resolve(state, family).await?;
        return Err(ApiError::invalid(format!("{meant} is a template without versions."))
            .hint(format!("Remove it on its host: `mainbrella template rm {meant}`.")));
    }
    let mut removed = TemplateRemoved { versions: Vec::new(), tags: Vec::new() };
    for version in mine {
        for tag in &version.tags {
            if untag(state, tag).await? {
                removed.tags.push(tag.to_string());
            }
        }
        if remove_version(state, &version.name).await? {
            removed.versions.push(version.name.to_string());
        }
    }
    Ok(removed)
}
