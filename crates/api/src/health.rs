//! Liveness.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The service answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Health {
    /// Always `ok`.
    pub status: String,
    /// Version of the service.
    pub version: String,
}
