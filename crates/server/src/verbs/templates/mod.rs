//! Templates: shipped and imported ones, and the versions of those that were built.

pub(super) mod create;
pub(super) mod get;
pub(super) mod list;
pub(super) mod remove;
pub(super) mod tag;

use std::collections::{BTreeMap, HashMap};

use axum::extract::{FromRequestParts, Path};
use http::request::Parts;
use mainbrella_api::{Template, TemplateDetails, TemplateKind, TemplateProbe, TemplateVersion};
use mainbrella_engine::driver::TemplateInfo;
use mainbrella_engine::image::BuiltTemplate;
use mainbrella_types::limits::BUILD_TAGS_MAX;
use mainbrella_types::{ErrorCode, SizeClass, SnapshotKind, TemplateName};

use crate::error::{ApiError, ApiResult};
use crate::state::AppState;

/// Names that a hint about an unknown label shows.
const SHOWN_MAX: usize = 12;

/// The `{name}` of a path.
pub(crate) struct TemplatePath(pub(crate) TemplateName);

impl FromRequestParts<AppState> for TemplatePath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let missing = || ApiError::new(ErrorCode::TemplateNotFound, "There is no template of this name.");
        let Path(name) = Path::<String>::from_request_parts(parts, state).await.map_err(|_| missing())?;
        name.parse().map(Self).map_err(|_| missing())
    }
}

/// The name of a template that has or will have versions.
pub(super) fn family(text: &str) -> ApiResult<TemplateName> {
    let name: TemplateName = text
        .parse()
        .map_err(|e: mainbrella_types::IdError| ApiError::invalid(format!("name must be {}.", e.expected)))?;
    if text.contains(':') {
        return Err(ApiError::invalid("name must be without a label; labels go into tags."));
    }
    Ok(name)
}

/// Names of `family` with these labels.
pub(super) fn labels(family: &TemplateName, labels: &[String]) -> ApiResult<Vec<TemplateName>> {
    if labels.len() > BUILD_TAGS_MAX {
        return Err(ApiError::invalid("tags must be at most 16 labels."));
    }
    let one = |label: &String| {
        let tag = family.with_label(label).map_err(|_| {
            ApiError::invalid(
                "tags must be labels: 1 to 63 of a-z, 0-9, '.', '_' and '-', starting with a letter or digit.",
            )
        })?;
        if tag.version().is_some() {
            return Err(ApiError::invalid(format!(
                "tags: {tag} is the name of a version, which is given by the service."
            )));
        }
        Ok(tag)
    };
    // The name itself means what is built in any case.
    let tags: ApiResult<Vec<_>> = labels.iter().map(one).collect();
    let mut tags: Vec<_> = tags?.into_iter().filter(|tag| tag.label().is_some()).collect();
    tags.sort();
    tags.dedup();
    Ok(tags)
}

/// The template that a name means: itself, or the version that a tag points to. One that was seen a moment ago is believed to be
/// there still; if it is not, the driver says so.
pub(super) async fn resolve(state: &AppState, name: &TemplateName) -> ApiResult<TemplateName> {
    if let Some(known) = state.templates.meaning(name) {
        return Ok(known);
    }
    let changes = state.templates.changes();
    let mut names = HashMap::new();
    for version in state.with_images(|images| Ok(images.built_all())).await? {
        names.extend(version.tags.into_iter().map(|tag| (tag, version.name.clone())));
        names.insert(version.name.clone(), version.name);
    }
    names.extend(state.engine.templates().await?.into_iter().map(|info| (info.name.clone(), info.name)));
    let found = names.get(name).cloned();
    let known: Vec<String> = if found.is_none() { like(&names, name) } else { Vec::new() };
    state.templates.remember(changes, names);
    found.ok_or_else(|| unknown(name, &known))
}

/// Names of the same family.
fn like(names: &HashMap<TemplateName, TemplateName>, name: &TemplateName) -> Vec<String> {
    let mut like: Vec<&TemplateName> = names.keys().filter(|n| n.family() == name.family()).collect();
    like.sort_by_key(|n| (n.version(), n.as_str().to_owned()));
    like.iter().take(SHOWN_MAX).map(ToString::to_string).collect()
}

pub(super) fn unknown(name: &TemplateName, known: &[String]) -> ApiError {
    let error = ApiError::new(ErrorCode::TemplateNotFound, format!("There is no template {name}."));
    if known.is_empty() {
        return error;
    }
    error.hint(format!("There are {}.", known.join(", ")))
}

/// Every template, as a list shows it, and the versions among them.
pub(super) async fn all(state: &AppState) -> ApiResult<Vec<(Template, Option<BuiltTemplate>)>> {
    let looked = state.with_images(|images| Ok((images.built_all(), images.templates()))).await?;
    let (built, images) = looked;
    let mut versions: BTreeMap<TemplateName, BuiltTemplate> = built.into_iter().map(|b| (b.name.clone(), b)).collect();
    let made: HashMap<_, _> = images.iter().map(|i| (&i.name, i)).collect();
    let mut list = Vec::new();
    for info in state.engine.templates().await? {
        let version = versions.remove(&info.name);
        let mut template = shown(info.clone(), version.as_ref());
        if let Some(image) = made.get(&info.name).filter(|_| version.is_none()) {
            template.created_at_ms = Some(image.created_ms);
            template.base = image.image.as_ref().map(|note| note.name.clone());
        }
        list.push((info.name, template, version));
    }
    // What the driver does not list it has not looked at yet.
    for (name, version) in versions {
        let info = TemplateInfo {
            name: name.clone(),
            digest: version.digest.clone(),
            image_bytes: version.made.bytes,
            frozen: Vec::new(),
            languages: version.languages(),
            tags: version.tags.clone(),
        };
        list.push((name, shown(info, Some(&version)), Some(version)));
    }
    list.sort_by(|(a, ..), (b, ..)| (a.family(), a.version()).cmp(&(b.family(), b.version())));
    Ok(list.into_iter().map(|(_, template, version)| (template, version)).collect())
}

fn shown(info: TemplateInfo, version: Option<&BuiltTemplate>) -> Template {
    let kind = match version.map(|v| v.made.kind) {
        None => TemplateKind::Image,
        Some(SnapshotKind::Workspace) => TemplateKind::Built,
        Some(SnapshotKind::Full) => TemplateKind::Full,
    };
    Template {
        version: info.name.version().filter(|_| version.is_some()),
        name: info.name.as_str().to_owned(),
        digest: info.digest,
        image_bytes: info.image_bytes,
        frozen_sizes: info.frozen.into_iter().map(|s: SizeClass| s.as_str().to_owned()).collect(),
        code_contexts: info.languages.into_iter().map(|l| l.as_str().to_owned()).collect(),
        kind,
        tags: version.map(|v| v.tags.iter().map(ToString::to_string).collect()).unwrap_or_default(),
        created_at_ms: version.map(|v| v.created_ms),
        base: version.map(|v| v.made.base.clone()).filter(|base| !base.is_empty()),
    }
}

/// A template with all that is known of it.
pub(super) async fn details(state: &AppState, name: &TemplateName) -> ApiResult<TemplateDetails> {
    let meant = resolve(state, name).await?;
    let all = all(state).await?;
    let found = all.into_iter().find(|(template, _)| template.name == meant.as_str());
    let (template, version) = found.ok_or_else(|| unknown(name, &[]))?;
    let details = version.map(|v| {
        let (made, settings) = (v.made.clone(), v.made.settings);
        TemplateVersion {
            size: made.size.as_str().to_owned(),
            origin: made.origin.as_str().to_owned(),
            base_digest: made.base_digest,
            key: made.key,
            recipe: made.recipe,
            start: settings.start(),
            env: settings.env,
            workdir: settings.workdir,
            user: settings.user,
            probe: settings.probe.map(|p| TemplateProbe {
                argv: p.argv,
                interval_ms: p.interval_ms,
                timeout_ms: p.timeout_ms,
                start_period_ms: p.start_period_ms,
                start_interval_ms: p.start_interval_ms,
                retries: p.retries,
            }),
            ports: settings.ports,
            labels: settings.labels,
        }
    });
    Ok(TemplateDetails { template, details })
}
