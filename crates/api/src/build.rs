//! Builds of templates.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::egress::EgressPolicy;
use crate::job::StreamName;

fn default_path() -> String {
    "Dockerfile".to_owned()
}

/// Asks for a template to be built from a recipe.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CreateBuild {
    /// The template's name, without a label: what is built becomes its next version, which the name then means.
    #[schema(max_length = 63)]
    pub name: String,
    /// Labels that are to mean it, too, such as `stable`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 16)]
    pub tags: Vec<String>,
    /// Text of the recipe. Without it the recipe is a file of the context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recipe: Option<String>,
    /// Where in the context the recipe is.
    #[serde(default = "default_path")]
    #[schema(default = "Dockerfile")]
    pub recipe_path: String,
    /// Build arguments. They may be seen in the machine while it is built, and what they lead to stays in the template: not a
    /// place for protected secrets.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub arguments: BTreeMap<String, String>,
    /// The size it is built and made ready in; `null`: that of its base, or `small`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<String>,
    /// Do every step anew.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_cache: bool,
    /// Fetch an image that `FROM` names anew, though it was fetched before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pull: bool,
    /// Whether the machine it is built in may reach the internet; `null`: yes, where this host can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub internet: Option<bool>,
    /// What that machine may reach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<EgressPolicy>,
    /// Longest time it may take, seconds. Default 1800.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 10, maximum = 21_600)]
    pub timeout_seconds: Option<u64>,
}

impl CreateBuild {
    /// A build of `name` with every default.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            tags: Vec::new(),
            recipe: None,
            recipe_path: default_path(),
            arguments: BTreeMap::new(),
            size: None,
            no_cache: false,
            pull: false,
            internet: None,
            egress: None,
            timeout_seconds: None,
        }
    }
}

/// Arguments may hold secrets: only their names are shown.
impl std::fmt::Debug for CreateBuild {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CreateBuild")
            .field("name", &self.name)
            .field("tags", &self.tags)
            .field("recipe_path", &self.recipe_path)
            .field("arguments", &self.arguments.keys().collect::<Vec<_>>())
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}

/// Where a build stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BuildState {
    /// It waits for its context.
    AwaitingContext,
    /// It waits for its turn.
    Queued,
    /// It is carried out.
    Running,
    /// It became a template.
    Succeeded,
    /// It did not; `failure` says why.
    Failed,
    /// Somebody cancelled it.
    Cancelled,
}

impl BuildState {
    /// The wire name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AwaitingContext => "awaiting-context",
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// Whether it is over.
    #[must_use]
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Cancelled)
    }
}

/// Why a build failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct BuildFailure {
    /// A stable name for programs: `recipe`, `base`, `context`, `step`, `start`, `timed_out`, `interrupted`, `machine`, `full` or
    /// `internal`.
    pub reason: String,
    /// What happened and what to do.
    pub message: String,
    /// The line of the recipe it is about, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<u64>,
    /// The instruction on that line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instruction: Option<String>,
}

/// A build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Build {
    /// Its id.
    pub id: String,
    /// The name of the template.
    pub name: String,
    /// Labels that were asked for.
    pub tags: Vec<String>,
    /// Where it stands.
    pub state: BuildState,
    /// Why it failed.
    #[serde(default)]
    pub failure: Option<BuildFailure>,
    /// The size that was asked for.
    #[serde(default)]
    pub size: Option<String>,
    /// What its machine may reach.
    pub egress: EgressPolicy,
    /// Longest time it may take.
    pub timeout_seconds: u64,
    /// Steps in all, once they are known.
    pub steps: u32,
    /// Steps that are done, cached ones included.
    pub steps_done: u32,
    /// Steps whose result was cached.
    pub steps_cached: u32,
    /// The version it became.
    #[serde(default)]
    pub template: Option<String>,
    /// When it was asked for.
    pub created_at_ms: i64,
    /// When it was begun.
    #[serde(default)]
    pub started_at_ms: Option<i64>,
    /// When it was over.
    #[serde(default)]
    pub ended_at_ms: Option<i64>,
}

/// Builds that are remembered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct BuildList {
    /// The builds, the newest first.
    pub builds: Vec<Build>,
}

/// What an event of a build tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum BuildEventKind {
    /// A step begins, or is passed over because its result is cached.
    Step {
        /// Which, from 1.
        step: u32,
        /// Of how many.
        steps: u32,
        /// The line of the recipe, from 1.
        line: u64,
        /// The instruction.
        text: String,
        /// Nothing is done: its result is cached.
        cached: bool,
    },
    /// A line that the command of a step wrote.
    Output {
        /// Where.
        stream: StreamName,
        /// The line, without its end and without control characters.
        text: String,
    },
    /// Something that is worth knowing.
    Notice {
        /// What.
        text: String,
    },
    /// The build is over. Always the last.
    Done {
        /// How it ended.
        state: BuildState,
        /// The version it became.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        template: Option<String>,
        /// Why it failed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        failure: Option<BuildFailure>,
    },
}

impl BuildEventKind {
    /// The wire name.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Step { .. } => "step",
            Self::Output { .. } => "output",
            Self::Notice { .. } => "notice",
            Self::Done { .. } => "done",
        }
    }
}

/// An event of a build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct BuildEvent {
    /// Its number, from 1, without gaps: the `cursor` to go on from.
    pub sequence: u64,
    /// When.
    pub at_ms: i64,
    /// What.
    #[serde(flatten)]
    pub kind: BuildEventKind,
}

/// A page of events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct BuildEvents {
    /// The events.
    pub events: Vec<BuildEvent>,
    /// The `cursor` of the next page.
    pub next_cursor: u64,
}
