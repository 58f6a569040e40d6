//! Copies of running machines.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::machine::Machine;
use crate::secret::OnFork;

/// Asks for copies of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ForkMachine {
    /// How many, default 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 8)]
    pub count: Option<u32>,
    /// How long each may live from now, default an hour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
    /// After how long without use each ends; default as the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_timeout_seconds: Option<u64>,
    /// Labels, over those of the source.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// What each child gets of secrets of the machine, by their names, in place of the `onFork` they were put with.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub secrets: BTreeMap<String, SecretForChildren>,
}

/// What the children of one fork get of a secret: `"drop"`, `"inherit"`, or `{"reissue": VALUE}`, another value for the same place.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum SecretForChildren {
    /// Nothing, or the same value.
    Plain(OnFork),
    /// Another value.
    Reissue(Reissue),
}

/// Another value for the same place.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Reissue {
    /// The value: 1 to 8192 visible ASCII characters, with spaces only inside. Never told again.
    #[schema(min_length = 1, max_length = 8192, write_only)]
    pub reissue: String,
}

/// The value is not shown.
impl std::fmt::Debug for SecretForChildren {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Plain(policy) => policy.fmt(f),
            Self::Reissue(_) => f.write_str("Reissue"),
        }
    }
}

/// The value is not shown.
impl std::fmt::Debug for Reissue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reissue").finish_non_exhaustive()
    }
}

/// What a child got of a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum SecretOutcome {
    /// Nothing.
    Dropped,
    /// The same value.
    Inherited,
    /// Another value.
    Reissued,
}

/// A secret of the source and what became of it in a child.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ForkedSecret {
    /// Its name.
    pub name: String,
    /// What the child got.
    pub outcome: SecretOutcome,
}

/// What was done for one child that runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ChildReceipt {
    /// The slot of the child.
    pub id: String,
    /// The generation of the child.
    pub created_at: String,
    /// The secrets of the source, by name. Never a value.
    pub secrets: Vec<ForkedSecret>,
    /// What was done so that it draws other random numbers than its source and the other children.
    pub random: Reseeded,
}

/// What was done for the random numbers of a child.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Reseeded {
    /// The kernel's generator was seeded anew before any process went on.
    pub kernel: bool,
    /// What of `/etc/mainbrella/reseed.d` in the machine was run before any process went on, by name.
    pub hooks: Vec<ReseedHook>,
    /// Processes that had registered to seed generators of their own.
    pub registered: u32,
    /// Those of them that did it within five seconds.
    pub acknowledged: u32,
}

/// How a reseed hook ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReseedHook {
    /// Its name.
    pub name: String,
    /// Its exit code, 128 and the signal for one that a signal ended; `null`: it could not be started.
    pub exit_code: Option<i32>,
    /// It was ended because it took too long.
    pub timed_out: bool,
}

/// What a fork made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ForkResult {
    /// The children. One that could not be made is `failed`, with its reason.
    pub children: Vec<Machine>,
    /// What was done for each child that runs; empty where an earlier call made them.
    #[serde(default)]
    pub receipts: Vec<ChildReceipt>,
    /// How long the source's processor stood still, milliseconds; `null` where an earlier call made them.
    pub still_ms: Option<u64>,
    /// Bytes of memory of each child that are not shared with its template; `null` where an earlier call made them.
    pub memory_bytes: Option<u64>,
}
