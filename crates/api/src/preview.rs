//! Previews: rights to reach a port of a machine from outside.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Makes a port reachable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CreatePreview {
    /// 1024 to 65535. A server on it may be bound to the machine's loopback addresses, and may be started later.
    #[schema(minimum = 1024, maximum = 65535)]
    pub port: u32,
    /// How long it lasts: 60 to 3600, default 900; never beyond the hard deadline of the machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 60, maximum = 3600)]
    pub ttl_seconds: Option<u64>,
}

/// Extends a preview.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RenewPreview {
    /// How long it lasts from now: 60 to 3600, default 900; never beyond the hard deadline of the machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 60, maximum = 3600)]
    pub ttl_seconds: Option<u64>,
}

/// A preview.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Preview {
    /// Its id, to renew or revoke it. No secret.
    pub id: String,
    /// The port it leads to.
    pub port: u16,
    /// When it was made, Unix milliseconds.
    pub created_at_ms: i64,
    /// When it ends, Unix milliseconds.
    pub expires_at: i64,
    /// Where it is. A secret; told only when the preview is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// The same for clients that cannot resolve host names below the domain. Told and to be kept as `url`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_url: Option<String>,
}

/// URLs are secrets: they are not shown.
impl std::fmt::Debug for Preview {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Preview")
            .field("id", &self.id)
            .field("port", &self.port)
            .field("expires_at", &self.expires_at)
            .finish_non_exhaustive()
    }
}

/// Active previews of one generation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PreviewList {
    /// Without URLs; the one that ends first comes first.
    pub previews: Vec<Preview>,
}
