//! File transfer. The bytes themselves travel as raw bodies, never inside JSON.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A file was written whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FileWritten {
    /// Bytes written.
    pub size: u64,
}
