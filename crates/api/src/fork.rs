//! Copies of running machines.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::machine::Machine;

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
}

/// What a fork made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ForkResult {
    /// The children. One that could not be made is `failed`, with its reason.
    pub children: Vec<Machine>,
    /// How long the source's processor stood still, milliseconds; `null` where an earlier call made them.
    pub still_ms: Option<u64>,
    /// Bytes of memory of each child that are not shared with its template; `null` where an earlier call made them.
    pub memory_bytes: Option<u64>,
}
