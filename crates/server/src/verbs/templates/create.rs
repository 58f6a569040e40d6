use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::{CreateTemplate, TemplateDetails};
use mainbrella_engine::image::{BuiltSettings, NewBuilt};
use mainbrella_types::{ErrorCode, SnapshotKey, SnapshotKind, SnapshotRecord, TemplateName};
use tracing::Instrument as _;

use super::{details, family, labels};
use crate::auth::AdminPermit;
use crate::builds::{keeper, remove_version};
use crate::error::{ApiError, ApiResult};
use crate::extract::{JsonBody, Query, json};
use crate::reconcile;
use crate::state::AppState;

/// Make a template of a full snapshot
///
/// Needs the role admin, in the project `default`. Machines of it begin where the saved machine was, in the size it had, each with an
/// identity and random numbers of its own. The snapshot may be deleted afterwards.
#[utoipa::path(post, path = "/v1/templates", tag = "templates", operation_id = "createTemplate", request_body = CreateTemplate,
    responses((status = 201, description = "The new version.", body = TemplateDetails)))]
pub(crate) async fn create(
    State(state): State<AppState>,
    admin: AdminPermit,
    query: Query,
    JsonBody(body): JsonBody<CreateTemplate>,
) -> ApiResult<Response> {
    query.finish()?;
    let permit = keeper(admin)?;
    let name = family(&body.name)?;
    let tags = labels(&name, &body.tags)?;
    let missing = || ApiError::new(ErrorCode::NotFound, "There is no snapshot of this id.");
    let key: SnapshotKey = body.snapshot_id.parse().map_err(|_| missing())?;
    let saved = state.store.snapshot(&permit.project, &key, state.now()).await?.ok_or_else(missing)?;
    if saved.kind != SnapshotKind::Full {
        return Err(ApiError::invalid("snapshotId names a snapshot without memory.")
            .hint("Save the machine with kind `full`, or build a template from a recipe."));
    }
    if saved.host != state.config.host_name {
        let message = format!("The snapshot is kept on host {}, and can be used there only.", saved.host);
        return Err(ApiError::new(ErrorCode::Unsupported, message));
    }
    // On a task of its own: a caller who goes away must leave no half of a template.
    let work = async move {
        let version = publish(&state, &name, &saved).await?;
        let moved = move_tags(&state, &version, &name, tags).await;
        if let Err(e) = moved {
            take_back(&state, &version).await;
            return Err(e);
        }
        details(&state, &version).await
    };
    let made = tokio::spawn(work.in_current_span()).await;
    let made = made.map_err(|e| ApiError::internal(format!("the making of a template ended abnormally: {e}")))??;
    json(StatusCode::CREATED, &made)
}

async fn publish(state: &AppState, name: &TemplateName, saved: &SnapshotRecord) -> ApiResult<TemplateName> {
    let own = SnapshotKey::new(uuid::Uuid::now_v7());
    let _held = state.saves.begin(own);
    let template = saved.template.clone();
    let base = state.with_images(move |images| Ok(images.built(&template))).await?;
    state.engine.duplicate_snapshot(saved.key, own).await?;
    let settings = match &base {
        Some(base) => base.made.settings.clone(),
        None => BuiltSettings { workdir: "/workspace".to_owned(), ..BuiltSettings::default() },
    };
    let made = NewBuilt {
        snapshot: own,
        kind: SnapshotKind::Full,
        size: saved.size,
        bytes: saved.bytes,
        origin: base.as_ref().map_or_else(|| saved.template.clone(), |b| b.made.origin.clone()),
        base: saved.template.as_str().to_owned(),
        base_digest: saved.template_digest.clone(),
        recipe: None,
        // It is what it is: nothing else leads to it.
        key: own.to_string(),
        settings,
        packages: base.map(|b| b.made.packages).unwrap_or_default(),
    };
    let family = name.clone();
    match state.with_images(move |images| images.publish_built(&family, &made)).await {
        Ok(built) => {
            state.templates.forget();
            Ok(built.name)
        }
        Err(e) => {
            reconcile::forget_snapshot(state, own).await;
            Err(e.into())
        }
    }
}

async fn move_tags(
    state: &AppState,
    version: &TemplateName,
    name: &TemplateName,
    tags: Vec<TemplateName>,
) -> ApiResult<()> {
    let (version, name) = (version.clone(), name.clone());
    let moved = state
        .with_images(move |images| tags.iter().chain([&name]).try_for_each(|tag| images.tag(&version, tag).map(drop)));
    moved.await?;
    state.templates.forget();
    Ok(())
}

/// Removes a version that no tag was moved to.
async fn take_back(state: &AppState, version: &TemplateName) {
    if let Err(e) = remove_version(state, version).await {
        tracing::warn!(%version, "a template that was not tagged remains: {}", e.message());
    }
}
