//! What takes room on the host's disk.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What one part of the data directory takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DiskUse {
    /// `templates`, `frozen` (templates captured in a size), `disks` (shared by machines and snapshots), `snapshots`, `machines`, `waiting`,
    /// `jobs` (their logs), `temporary`. Others may come.
    pub part: String,
    /// Things in it.
    pub items: u64,
    /// Bytes it takes. What several parts share counts for the first of them.
    pub bytes: u64,
}

/// What takes room on the host's disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DiskReport {
    /// The parts of the data directory.
    pub parts: Vec<DiskUse>,
    /// Bytes of the file system that are free. Null: the host does not say.
    pub free_bytes: Option<u64>,
    /// Bytes it has in all.
    pub total_bytes: Option<u64>,
}
