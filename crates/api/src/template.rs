//! Templates.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A template that machines can start from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Template {
    /// Its name: the `catalogId` of a create.
    pub name: String,
    /// Digest of its root image, `sha256:…`.
    pub digest: String,
    /// Bytes of its root image.
    pub image_bytes: u64,
    /// Sizes that are already frozen; others are frozen at their first create, which then takes longer.
    pub frozen_sizes: Vec<String>,
    /// Languages of code contexts it brings.
    #[serde(default)]
    pub code_contexts: Vec<String>,
}

/// The templates of this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateList {
    /// The templates, by name.
    pub templates: Vec<Template>,
}
