//! Processes of a machine.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// Its parent.
    pub ppid: u32,
    /// Whose it is.
    pub uid: u32,
    /// One letter: R runs, S sleeps, D waits for a device, T is stopped, Z has ended.
    pub state: String,
    /// The name the kernel knows, at most 15 bytes.
    pub command: String,
    /// Its arguments, shortened where they are long.
    pub argv: Vec<String>,
    /// When it began, milliseconds since the Unix epoch.
    pub started_at_ms: i64,
    /// Processor time, milliseconds.
    pub cpu_time_ms: u64,
    /// Memory in use, bytes.
    pub rss_bytes: u64,
    /// The job in whose session it is.
    pub job_id: Option<String>,
}

/// The processes of a machine, by number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProcessList {
    /// Every process of the machine but the kernel's own.
    pub processes: Vec<Process>,
    /// Whether there are more than can be listed.
    pub truncated: bool,
}
