//! API keys.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a key may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum KeyRole {
    /// Everything in its project, and its keys.
    Admin,
    /// Machines of its project.
    User,
}

impl KeyRole {
    /// The wire name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::User => "user",
        }
    }
}

/// Asks for a new key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CreateKey {
    /// A label for people: 1 to 64 bytes without control characters.
    #[schema(min_length = 1, max_length = 64)]
    pub name: String,
    /// What it may do.
    pub role: KeyRole,
}

/// A key, without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Key {
    /// Its id: eight hexadecimal digits, the part of the key after `mb_`.
    pub id: String,
    /// Its label.
    pub name: String,
    /// What it may do.
    pub role: KeyRole,
    /// When it was made, Unix milliseconds.
    pub created_at_ms: i64,
    /// When it was revoked, Unix milliseconds; `null` while it is valid.
    pub revoked_at_ms: Option<i64>,
}

/// A key that was just made. The secret is shown this once.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NewKey {
    /// Its id.
    pub id: String,
    /// Its label.
    pub name: String,
    /// What it may do.
    pub role: KeyRole,
    /// When it was made, Unix milliseconds.
    pub created_at_ms: i64,
    /// The whole key, `mb_<id>_<secret>`. The service keeps only a hash of it.
    pub secret: String,
}

impl std::fmt::Debug for NewKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewKey")
            .field("id", &self.id)
            .field("name", &self.name)
            .field("role", &self.role)
            .field("created_at_ms", &self.created_at_ms)
            .finish_non_exhaustive()
    }
}

/// The keys of a project, oldest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct KeyList {
    /// The keys.
    pub keys: Vec<Key>,
}
