//! Templates.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a template is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TemplateKind {
    /// A root image: it comes with the service, or was imported from an image of a container.
    #[default]
    Image,
    /// A disk, built from a recipe; its machines begin with its start command running.
    Built,
    /// A machine as it was saved, with its memory.
    Full,
}

impl TemplateKind {
    /// The wire name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Image => "image",
            Self::Built => "built",
            Self::Full => "full",
        }
    }
}

/// A template that machines can start from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Template {
    /// Its name: the `catalogId` of a create. Of one with versions that of the version, as in `app:v3`.
    pub name: String,
    /// Digest of its root image, or of all that a version is, `sha256:…`.
    pub digest: String,
    /// Bytes of its root image, or those that a version has for itself.
    pub image_bytes: u64,
    /// Sizes that are already frozen; others are frozen at their first create, which then takes longer.
    pub frozen_sizes: Vec<String>,
    /// Languages of code contexts it brings.
    #[serde(default)]
    pub code_contexts: Vec<String>,
    /// What it is made of.
    #[serde(default)]
    pub kind: TemplateKind,
    /// The number of the version; `null` where there are none.
    #[serde(default)]
    pub version: Option<u32>,
    /// Names that mean this version now; each can be a `catalogId`.
    #[serde(default)]
    pub tags: Vec<String>,
    /// When it was made; `null` where that is not known.
    #[serde(default)]
    pub created_at_ms: Option<i64>,
    /// What it was built on, as its recipe says.
    #[serde(default)]
    pub base: Option<String>,
}

/// The templates of this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateList {
    /// The templates, by name.
    pub templates: Vec<Template>,
}

/// A command that succeeds when the start command of a template is ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateProbe {
    /// The command.
    pub argv: Vec<String>,
    /// Between the end of one try and the next, once the start period is over.
    pub interval_ms: u64,
    /// Longest time of one try.
    pub timeout_ms: u64,
    /// After the start, how long failures do not count.
    pub start_period_ms: u64,
    /// Between tries in the start period.
    pub start_interval_ms: u64,
    /// Failures in a row that mean it will not be ready.
    pub retries: u32,
}

/// All about a version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateVersion {
    /// The size it was made in. One of kind `full` starts in no other.
    pub size: String,
    /// The template with a root image that all began with.
    pub origin: String,
    /// Digest of what it was built on.
    pub base_digest: String,
    /// What it depends on: versions with equal keys are equal as far as can be told.
    pub key: String,
    /// The recipe; `null`: it was made of a snapshot.
    pub recipe: Option<String>,
    /// Environment of every command in its machines.
    pub env: BTreeMap<String, String>,
    /// Directory commands begin in.
    pub workdir: String,
    /// Who commands run as; `null`: root.
    pub user: Option<String>,
    /// The command its machines start with; empty: none.
    pub start: Vec<String>,
    /// What tells that the start command is ready; `null`: it is when it runs.
    pub probe: Option<TemplateProbe>,
    /// Ports that are listened on, as in `8080/tcp`.
    pub ports: Vec<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
}

/// A template, with all that is known of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateDetails {
    /// What a list says of it.
    #[serde(flatten)]
    pub template: Template,
    /// All about the version; `null` where there are none.
    pub details: Option<TemplateVersion>,
}

/// Makes a template of a full snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CreateTemplate {
    /// The template's name, without a label: what is made becomes its next version, which the name then means.
    #[schema(max_length = 63)]
    pub name: String,
    /// The snapshot. It may be deleted afterwards.
    pub snapshot_id: String,
    /// Labels that are to mean it, too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 16)]
    pub tags: Vec<String>,
}

/// Lets a name mean a version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TagTemplate {
    /// A version, or a name that means one.
    pub source: String,
}

/// What was removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateRemoved {
    /// Versions that are gone.
    pub versions: Vec<String>,
    /// Names that mean nothing any more.
    pub tags: Vec<String>,
}
