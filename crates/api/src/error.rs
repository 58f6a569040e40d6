//! The one form of every error.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of every reply with a status of 400 or more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ErrorBody {
    /// A stable name for programs.
    #[schema(schema_with = crate::schema::error_code)]
    pub code: String,
    /// One sentence on what is wrong, free of internal text.
    pub message: String,
    /// What to do next.
    pub hint: String,
    /// The id under which the service logged this request.
    pub request_id: String,
    /// With `preview_reconciliation_required`: the preview to revoke.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preview_id: Option<String>,
}

impl ErrorBody {
    /// The code as the vocabulary knows it; `None` when it comes from a newer service.
    #[must_use]
    pub fn known_code(&self) -> Option<mainbrella_types::ErrorCode> {
        mainbrella_types::ErrorCode::ALL.iter().copied().find(|c| c.as_str() == self.code)
    }
}
