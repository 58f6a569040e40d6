//! Versions and tags of templates, through the service.

use mainbrella_client::api::{BuildState, CreateTemplate, Template, TemplateDetails, TemplateKind, TemplateRemoved};

use crate::context::Context;
use crate::failure::Failure;
use crate::output::{Tone, printable, size, span};

/// Lets a name mean a version.
pub(super) async fn tag(context: &Context, source: &str, target: &str) -> Result<u8, Failure> {
    let made = context.client()?.tag_template(source, target).await?;
    if context.output.json {
        context.output.json(&made)?;
    } else {
        context.output.line(&format!("{} is {}", printable(target), printable(&made.template.name)))?;
    }
    Ok(0)
}

/// Makes a template of a snapshot.
pub(super) async fn create(context: &Context, name: &str, snapshot: &str, tags: Vec<String>) -> Result<u8, Failure> {
    let body = CreateTemplate { name: name.to_owned(), snapshot_id: snapshot.to_owned(), tags };
    let made = context.client()?.create_template(&body).await?;
    if context.output.json {
        context.output.json(&made)?;
    } else {
        context.output.line(&printable(&made.template.name))?;
    }
    Ok(0)
}

/// Shows all that is known of a template.
pub(super) async fn inspect(context: &Context, name: &str) -> Result<u8, Failure> {
    let TemplateDetails { template: t, details } = context.client()?.template(name).await?;
    if context.output.json {
        context.output.json(&TemplateDetails { template: t, details })?;
        return Ok(0);
    }
    let mut rows: Vec<(&str, String)> = vec![("name", t.name.clone()), ("kind", t.kind.as_str().to_owned())];
    let list = |items: &[String]| if items.is_empty() { "-".to_owned() } else { items.join(" ") };
    rows.push(("tags", list(&t.tags)));
    rows.push(("base", t.base.clone().unwrap_or_else(|| "-".to_owned())));
    rows.push(("bytes", size(t.image_bytes)));
    rows.push(("ready sizes", list(&t.frozen_sizes)));
    rows.push(("digest", t.digest.clone()));
    if let Some(d) = &details {
        rows.push(("made in size", d.size.clone()));
        rows.push(("user", d.user.clone().unwrap_or_else(|| "root".to_owned())));
        rows.push(("directory", d.workdir.clone()));
        rows.push(("start", list(&d.start)));
        rows.push(("probe", d.probe.as_ref().map_or_else(|| "-".to_owned(), |p| p.argv.join(" "))));
        rows.push(("ports", list(&d.ports)));
        rows.extend(d.env.iter().map(|(name, value)| ("variable", format!("{name}={value}"))));
        rows.extend(d.labels.iter().map(|(name, value)| ("label", format!("{name}={value}"))));
    }
    for (what, value) in rows {
        context.output.line(&format!("{what:13} {}", printable(&value)))?;
    }
    if let Some(recipe) = details.and_then(|d| d.recipe) {
        context.output.line("recipe")?;
        for line in recipe.lines() {
            context.output.line(&format!("  {}", printable(line)))?;
        }
    }
    Ok(0)
}

/// Builds that are remembered.
pub(super) async fn builds(context: &Context) -> Result<u8, Failure> {
    let list = context.client()?.builds().await?;
    if context.output.json {
        context.output.json(&list)?;
        return Ok(0);
    }
    let now = jiff::Timestamp::now().as_millisecond();
    let rows = list.builds.iter().map(|b| {
        let tone = match b.state {
            BuildState::Succeeded => Tone::Good,
            BuildState::Failed => Tone::Bad,
            BuildState::Cancelled => Tone::Faint,
            _ => Tone::Busy,
        };
        let what = b.template.clone().unwrap_or_else(|| b.name.clone());
        let said = b.failure.as_ref().map(|f| f.message.clone()).unwrap_or_default();
        let steps = format!("{}/{}", b.steps_done, b.steps);
        let asked = format!("{} ago", span(now - b.created_at_ms));
        let plain = |text: String| (text, Tone::Plain);
        vec![
            plain(b.id.clone()),
            (b.state.as_str().to_owned(), tone),
            plain(steps),
            plain(asked),
            plain(what),
            plain(said),
        ]
    });
    context.output.table(&["ID", "STATE", "STEPS", "ASKED FOR", "TEMPLATE", ""], rows.collect())?;
    Ok(0)
}

/// Whether the service has versions of it, or it means one.
pub(super) fn is_versioned(list: &[Template], name: &str) -> bool {
    let family = |n: &str| n.split(':').next().unwrap_or_default().to_owned();
    let known =
        |t: &Template| t.name == name || t.tags.iter().any(|tag| tag == name) || family(&t.name) == family(name);
    list.iter().any(|t| t.kind != TemplateKind::Image && known(t))
}

/// Removes a version, a tag, or everything of a name.
pub(super) async fn remove(context: &Context, name: &str, all: bool) -> Result<u8, Failure> {
    let removed = context.client()?.remove_template(name, all).await?;
    tell_removed(context, &removed)
}

/// Removes every version that no tag means.
pub(super) async fn prune(context: &Context) -> Result<u8, Failure> {
    let client = context.client()?;
    let list = client.templates().await?.templates;
    let mut removed = TemplateRemoved { versions: Vec::new(), tags: Vec::new() };
    for t in list.iter().filter(|t| t.kind != TemplateKind::Image && t.tags.is_empty()) {
        match client.remove_template(&t.name, false).await {
            Ok(one) => removed.versions.extend(one.versions),
            // Somebody has given it a tag, or removed it, meanwhile.
            Err(e) => context.output.note(&format!("{} stays: {e}", printable(&t.name))),
        }
    }
    tell_removed(context, &removed)
}

fn tell_removed(context: &Context, removed: &TemplateRemoved) -> Result<u8, Failure> {
    if context.output.json {
        context.output.json(removed)?;
        return Ok(0);
    }
    for name in removed.tags.iter().chain(&removed.versions) {
        context.output.line(&format!("{} removed", printable(name)))?;
    }
    Ok(0)
}
