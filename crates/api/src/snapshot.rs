//! Snapshots: what is saved of a machine and stays when the machine is gone.

use std::collections::BTreeMap;

use mainbrella_types::SnapshotKind as Kind;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::egress::EgressPolicy;
use crate::machine::{OnIdle, StopOutcome};

/// How much of a machine is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotKind {
    /// The disk: files come back in a machine that was just started.
    Workspace,
    /// Disk and memory: processes come back, too.
    Full,
}

impl SnapshotKind {
    /// The wire name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        Kind::from(self).as_str()
    }
}

impl From<Kind> for SnapshotKind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Workspace => Self::Workspace,
            Kind::Full => Self::Full,
        }
    }
}

impl From<SnapshotKind> for Kind {
    fn from(kind: SnapshotKind) -> Self {
        match kind {
            SnapshotKind::Workspace => Self::Workspace,
            SnapshotKind::Full => Self::Full,
        }
    }
}

/// Saves a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SaveSnapshot {
    /// A name for it, to be shown: 1 to 128 bytes without control characters. Several may have the same.
    #[schema(min_length = 1, max_length = 128)]
    pub name: String,
    /// How much is saved.
    pub kind: SnapshotKind,
    /// Stop the machine when it is saved.
    #[serde(default)]
    pub stop: bool,
    /// After how many seconds it is removed. Without it: when somebody deletes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 60, maximum = 31_536_000)]
    pub ttl_seconds: Option<u64>,
}

/// A snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Snapshot {
    /// Its id.
    pub id: String,
    /// The name it was given.
    pub name: String,
    /// How much was saved.
    pub kind: SnapshotKind,
    /// The machine it was saved from, as `ID@CREATED_AT`.
    pub source: String,
    /// The template of that machine.
    pub catalog_id: String,
    /// Digest of that template's image; `null` where it was not known any more.
    pub template_digest: Option<String>,
    /// The size of that machine.
    pub size: String,
    /// Whether that machine might reach the internet.
    pub internet: bool,
    /// What that machine might reach.
    pub egress: EgressPolicy,
    /// What it takes on its host beside the template, bytes.
    pub bytes: u64,
    /// When it was asked for, Unix milliseconds.
    pub created_at_ms: i64,
    /// When it is removed, Unix milliseconds; `null`: when somebody deletes it.
    pub expires_at_ms: Option<i64>,
    /// Put aside. It can be restored and counts as before.
    pub archived: bool,
    /// What became of the machine, in the answer to a save that was to stop it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_outcome: Option<StopOutcome>,
}

/// One page of snapshots, newest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotList {
    /// The snapshots.
    pub snapshots: Vec<Snapshot>,
    /// Send as `cursor` for the next page; `null` at the end.
    pub next_cursor: Option<String>,
}

/// Changes what is said of a snapshot. What is absent stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct UpdateSnapshot {
    /// Another name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 128)]
    pub name: Option<String>,
    /// Put aside, or take up again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub archived: Option<bool>,
}

/// Asks for a machine from a snapshot. Template, size and internet policy are the saved ones; whoever names them checks them.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RestoreSnapshot {
    /// The slot to use: 1 to 63 of `a-z 0-9 -`. Without it a new one is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 63)]
    pub slot: Option<String>,
    /// Hard lease, seconds. Default 3600.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 10, maximum = 604_800)]
    pub ttl_seconds: Option<u64>,
    /// Idle timeout, seconds. Without it the service's default; none at all when `persistent`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 5, maximum = 604_800)]
    pub idle_timeout_seconds: Option<u64>,
    /// What becomes of it after its idle timeout, which `pause` needs: it ends, or it is paused until it is used again.
    #[serde(default, skip_serializing_if = "OnIdle::is_stop")]
    pub on_idle: OnIdle,
    /// Whether the next call or preview request that needs it to run resumes it, however it came to be paused; `null`: yes with
    /// `onIdle` `pause`, else no.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_resume: Option<bool>,
    /// No idle timeout unless one is given.
    #[serde(default)]
    pub persistent: bool,
    /// Labels: at most 32, keys of 1 to 64 bytes, values of at most 512 bytes. Those of the source are not saved.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// Environment of every command in it, over that of the source.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// The template that is expected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub catalog_id: Option<String>,
    /// The digest of the template's image that is expected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template_digest: Option<String>,
    /// The size that is expected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<String>,
    /// Whether internet is expected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub internet: Option<bool>,
    /// The egress policy that is expected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<EgressPolicy>,
}

/// Environment values may be secrets: only their names are shown.
impl std::fmt::Debug for RestoreSnapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RestoreSnapshot")
            .field("slot", &self.slot)
            .field("ttl_seconds", &self.ttl_seconds)
            .field("idle_timeout_seconds", &self.idle_timeout_seconds)
            .field("on_idle", &self.on_idle)
            .field("auto_resume", &self.auto_resume)
            .field("persistent", &self.persistent)
            .field("metadata", &self.metadata)
            .field("env", &self.env.keys().collect::<Vec<_>>())
            .field("catalog_id", &self.catalog_id)
            .field("template_digest", &self.template_digest)
            .field("size", &self.size)
            .field("internet", &self.internet)
            .field("egress", &self.egress)
            .finish()
    }
}
