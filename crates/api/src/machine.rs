//! Machines.

use std::collections::BTreeMap;

use mainbrella_types::MachineState;
use mainbrella_types::machine::OnIdle as Idle;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::egress::EgressPolicy;

/// What a machine is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Its resources are being made.
    Creating,
    /// It answers.
    Running,
    /// Memory and disk are being saved.
    Pausing,
    /// Saved; no process runs.
    Paused,
    /// Being brought back from a pause.
    Resuming,
    /// Its resources are being removed.
    Stopping,
    /// Gone on request or at the end of a lease.
    Stopped,
    /// Gone, or never came to life, for the reason given.
    Failed,
}

impl State {
    /// The wire name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        MachineState::from(self).as_str()
    }

    /// Whether the machine is over.
    #[must_use]
    pub fn is_final(self) -> bool {
        MachineState::from(self).is_final()
    }
}

impl From<MachineState> for State {
    fn from(s: MachineState) -> Self {
        match s {
            MachineState::Creating => Self::Creating,
            MachineState::Running => Self::Running,
            MachineState::Pausing => Self::Pausing,
            MachineState::Paused => Self::Paused,
            MachineState::Resuming => Self::Resuming,
            MachineState::Stopping => Self::Stopping,
            MachineState::Stopped => Self::Stopped,
            MachineState::Failed => Self::Failed,
        }
    }
}

impl From<State> for MachineState {
    fn from(s: State) -> Self {
        match s {
            State::Creating => Self::Creating,
            State::Running => Self::Running,
            State::Pausing => Self::Pausing,
            State::Paused => Self::Paused,
            State::Resuming => Self::Resuming,
            State::Stopping => Self::Stopping,
            State::Stopped => Self::Stopped,
            State::Failed => Self::Failed,
        }
    }
}

/// What becomes of a machine that nobody used for its idle timeout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnIdle {
    /// It ends.
    #[default]
    Stop,
    /// It is paused.
    Pause,
}

impl OnIdle {
    pub(crate) fn is_stop(&self) -> bool {
        *self == Self::Stop
    }
}

impl From<Idle> for OnIdle {
    fn from(idle: Idle) -> Self {
        match idle {
            Idle::Stop => Self::Stop,
            Idle::Pause => Self::Pause,
        }
    }
}

impl From<OnIdle> for Idle {
    fn from(idle: OnIdle) -> Self {
        match idle {
            OnIdle::Stop => Self::Stop,
            OnIdle::Pause => Self::Pause,
        }
    }
}

/// What a machine may use at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MachineLimits {
    /// Memory, MiB.
    pub memory_mib: u32,
    /// Virtual processors.
    pub vcpus: u32,
    /// Writable disk, MiB.
    pub disk_mib: u32,
}

/// Why a machine ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Reason {
    /// A stable name for programs.
    #[schema(schema_with = crate::schema::ending)]
    pub code: String,
    /// One sentence for people.
    pub message: String,
}

/// What can be done with this generation on this host, whatever its state is just now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MachineCapabilities {
    /// Commands can be run in it.
    pub commands: bool,
    /// Files can be read and written.
    pub files: bool,
    /// It has a way to the internet.
    pub internet: bool,
    /// Ports can be made reachable from outside.
    pub previews: bool,
    /// Its memory and disk can be saved and brought back.
    pub memory_snapshot: bool,
    /// It can be paused and resumed.
    pub pause_resume: bool,
    /// Live copies of it can be made.
    pub fork: bool,
}

/// One generation of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Machine {
    /// The slot.
    pub id: String,
    /// When this generation was created, RFC 3339 with milliseconds. `(id, createdAt)` is its identity.
    pub created_at: String,
    /// What it is doing.
    pub state: State,
    /// The machine it is a copy of, as `ID@CREATED_AT`; `null`: it was made from its template.
    #[serde(default)]
    #[schema(required = true)]
    pub forked_from: Option<String>,
    /// The snapshot it was started from; `null`: it was made otherwise.
    #[serde(default)]
    #[schema(required = true)]
    pub restored_from: Option<String>,
    /// The template it was made from.
    pub catalog_id: String,
    /// Its size.
    pub size: String,
    /// Whether it may reach the internet. `false` never changes for this generation.
    pub internet: bool,
    /// What it may reach.
    #[serde(default = "EgressPolicy::off")]
    pub egress: EgressPolicy,
    /// The labels given at creation.
    pub metadata: BTreeMap<String, String>,
    /// How it is separated from the host.
    #[schema(schema_with = crate::schema::isolation)]
    pub isolation: String,
    /// What it may use at most.
    pub limits: MachineLimits,
    /// When it ends whatever it does, Unix milliseconds.
    pub hard_deadline_ms: i64,
    /// How long it may be unused, seconds; `null`: as long as it likes.
    pub idle_timeout_seconds: Option<u64>,
    /// When `onIdle` happens if nobody uses it, Unix milliseconds; `null` without an idle timeout, and while it is paused. A running
    /// command holds this off.
    pub idle_deadline_ms: Option<i64>,
    /// What becomes of it then.
    #[serde(default)]
    pub on_idle: OnIdle,
    /// Whether the next call or preview request that needs it to run resumes it, when it is paused.
    #[serde(default)]
    pub auto_resume: bool,
    /// When it first answered, Unix milliseconds.
    pub started_at_ms: Option<i64>,
    /// When it ended, Unix milliseconds.
    pub ended_at_ms: Option<i64>,
    /// Why it ended.
    pub reason: Option<Reason>,
    /// What can be done with it.
    pub capabilities: MachineCapabilities,
}

fn default_size() -> String {
    "small".to_owned()
}

/// Asks for a machine.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CreateMachine {
    /// The template: a name from `/v1/templates`.
    pub catalog_id: String,
    /// The size: a name from `sizes` of `/v1/capabilities`.
    #[serde(default = "default_size")]
    #[schema(default = "small")]
    pub size: String,
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
    /// What becomes of it after its idle timeout, which `pause` needs: it ends, or it is paused until it is used again. `pause` is
    /// refused where `persistence.autoPause` of `/v1/capabilities` is false.
    #[serde(default, skip_serializing_if = "OnIdle::is_stop")]
    pub on_idle: OnIdle,
    /// Whether the next call or preview request that needs it to run resumes it, however it came to be paused; `null`: yes with
    /// `onIdle` `pause`, else no.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_resume: Option<bool>,
    /// Whether it may reach the internet; `null`: `networking.internetDefault` of `/v1/capabilities`. `false` holds for
    /// the whole generation; it is refused when this host cannot enforce it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub internet: Option<bool>,
    /// What it may reach; `null`: `open` with `internet`, `off` without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<EgressPolicy>,
    /// No idle timeout unless one is given.
    #[serde(default)]
    pub persistent: bool,
    /// Labels: at most 32, keys of 1 to 64 bytes, values of at most 512 bytes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// Environment of every command in it. The machine can read it: not a place for protected secrets.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
}

impl CreateMachine {
    /// A machine from `catalog_id` with every default.
    #[must_use]
    pub fn new(catalog_id: impl Into<String>) -> Self {
        Self {
            catalog_id: catalog_id.into(),
            size: default_size(),
            slot: None,
            ttl_seconds: None,
            idle_timeout_seconds: None,
            on_idle: OnIdle::Stop,
            auto_resume: None,
            internet: None,
            egress: None,
            persistent: false,
            metadata: BTreeMap::new(),
            env: BTreeMap::new(),
        }
    }
}

/// Environment values may be secrets: only their names are shown.
impl std::fmt::Debug for CreateMachine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CreateMachine")
            .field("catalog_id", &self.catalog_id)
            .field("size", &self.size)
            .field("slot", &self.slot)
            .field("ttl_seconds", &self.ttl_seconds)
            .field("idle_timeout_seconds", &self.idle_timeout_seconds)
            .field("on_idle", &self.on_idle)
            .field("auto_resume", &self.auto_resume)
            .field("internet", &self.internet)
            .field("egress", &self.egress)
            .field("persistent", &self.persistent)
            .field("metadata", &self.metadata)
            .field("env", &self.env.keys().collect::<Vec<_>>())
            .finish()
    }
}

/// One page of machines, newest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MachineList {
    /// The machines.
    pub machines: Vec<Machine>,
    /// Send as `cursor` for the next page; `null` at the end.
    pub next_cursor: Option<String>,
}

/// Changes the lease. What is absent stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ExtendMachine {
    /// The hard deadline becomes this many seconds from now, where that is later than it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 10, maximum = 604_800)]
    pub ttl_seconds: Option<u64>,
    /// The idle timeout becomes this, counted from now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 5, maximum = 604_800)]
    pub idle_timeout_seconds: Option<u64>,
    /// What becomes of it when its idle timeout is over. `pause` needs one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_idle: Option<OnIdle>,
    /// Whether it comes back by itself when it is paused. Absent: it does from when `onIdle` becomes `pause`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_resume: Option<bool>,
}

/// Whether a stop has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum StopOutcome {
    /// That generation is gone and nothing is left of it.
    Stopped,
    /// It will not be used again, but its clean-up is not confirmed; it goes on. Ask again.
    Uncertain,
}

/// Reply to a stop.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct StopResult {
    /// Whether it has finished.
    pub outcome: StopOutcome,
    /// The machine as it is now.
    pub machine: Machine,
}
