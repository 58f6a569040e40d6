//! Secrets outside the guest: credentials that the gateway adds to requests for one host.

use mainbrella_types::secret::OnFork as Policy;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a fork gives each child of a secret.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnFork {
    /// Nothing: it stays with the machine it was put for.
    #[default]
    Drop,
    /// The same value, as a secret of the child's own.
    Inherit,
}

impl OnFork {
    fn is_drop(&self) -> bool {
        *self == Self::Drop
    }
}

impl From<Policy> for OnFork {
    fn from(policy: Policy) -> Self {
        match policy {
            Policy::Drop => Self::Drop,
            Policy::Inherit => Self::Inherit,
        }
    }
}

impl From<OnFork> for Policy {
    fn from(policy: OnFork) -> Self {
        match policy {
            OnFork::Drop => Self::Drop,
            OnFork::Inherit => Self::Inherit,
        }
    }
}

/// Puts a secret. Exactly one of `header` and `username` is given.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SecretBody {
    /// The host it is for, by its exact name. No other host is sent the value.
    pub host: String,
    /// The port it is for, default 443. TLS is spoken there: the value is added to nothing else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 65535)]
    pub port: Option<u16>,
    /// The header whose whole value it is, e.g. `Authorization`. None that says how a message travels: `Host`,
    /// `Content-Length`, `Transfer-Encoding`, `Connection`, `Upgrade`, `TE`, `Trailer`, `Expect`, `Keep-Alive`, `Proxy-*`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub header: Option<String>,
    /// The user whose password it is, sent as HTTP basic credentials: 1 to 256 visible ASCII characters without `:`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 256)]
    pub username: Option<String>,
    /// The value: 1 to 8192 visible ASCII characters, with spaces only inside. Never told again.
    #[schema(min_length = 1, max_length = 8192, write_only)]
    pub value: String,
    /// What a fork of the machine gives each child of it, unless the fork says otherwise.
    #[serde(default, skip_serializing_if = "OnFork::is_drop")]
    pub on_fork: OnFork,
}

/// The value is not shown.
impl std::fmt::Debug for SecretBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SecretBody")
            .field("host", &self.host)
            .field("port", &self.port)
            .field("header", &self.header)
            .field("username", &self.username)
            .field("on_fork", &self.on_fork)
            .finish_non_exhaustive()
    }
}

/// A secret, without its value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Secret {
    /// Its name: 1 to 64 of `a-z`, `0-9`, `-` and `_`, a letter or digit first; unique in its machine.
    pub name: String,
    /// The host it is for.
    pub host: String,
    /// The port it is for.
    pub port: u16,
    /// The header whose whole value it is.
    pub header: Option<String>,
    /// The user whose password it is, in HTTP basic credentials.
    pub username: Option<String>,
    /// What a fork of the machine gives each child of it.
    #[serde(default)]
    pub on_fork: OnFork,
    /// When it was put, RFC 3339.
    pub created_at: String,
}

/// The secrets of one generation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SecretList {
    /// Without their values, by name.
    pub secrets: Vec<Secret>,
}

/// What became of a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SecretRemoved {
    /// Whether there was a secret of that name.
    pub removed: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_is_sent_and_never_shown() {
        let body = SecretBody {
            host: "api.example.com".into(),
            port: None,
            header: Some("Authorization".into()),
            username: None,
            value: "Bearer s3cr3t".into(),
            on_fork: OnFork::Drop,
        };
        let shown = format!("{body:?} {body:#?}");
        assert!(shown.contains("api.example.com") && !shown.contains("s3cr3t"), "{shown}");
        let json = serde_json::to_string(&body).expect("JSON");
        assert_eq!(json, r#"{"host":"api.example.com","header":"Authorization","value":"Bearer s3cr3t"}"#);
        assert_eq!(serde_json::from_str::<SecretBody>(&json).expect("a body"), body);
    }

    #[test]
    fn a_body_needs_host_and_value_and_knows_its_fields() {
        for text in [
            r#"{"host":"a.example","header":"A"}"#,
            r#"{"header":"A","value":"v"}"#,
            r#"{"host":"a.example","header":"A","value":"v","path":"/"}"#,
            r#"{"host":"a.example","port":65536,"header":"A","value":"v"}"#,
        ] {
            assert!(serde_json::from_str::<SecretBody>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_not_given_stays_visible_in_a_reply() {
        let text = r#"{"name":"git","host":"git.example","port":8443,"header":null,"username":"me","onFork":"drop","createdAt":"2026-10-08T12:00:00.000Z"}"#;
        let secret: Secret = serde_json::from_str(text).expect("a secret");
        assert_eq!((secret.header.as_deref(), secret.username.as_deref()), (None, Some("me")));
        assert_eq!(serde_json::to_string(&secret).expect("JSON"), text);
        // From a service that hands nothing on.
        let older: Secret = serde_json::from_str(&text.replace(r#""onFork":"drop","#, "")).expect("a secret");
        assert_eq!(older, secret);
    }
}
