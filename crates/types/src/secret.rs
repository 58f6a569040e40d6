//! Secrets outside the guest: which credential the gateway adds to requests for which host. The value itself is an opaque,
//! redacted text here.

use std::fmt;
use std::str::FromStr;

use zeroize::Zeroizing;

use crate::egress::HostName;
use crate::limits::{SECRET_NAME_MAX, SECRET_USERNAME_MAX, SECRET_VALUE_MAX};

/// Headers that say how a message travels, not who sends it.
const NOT_CREDENTIALS: [&str; 12] = [
    "host",
    "content-length",
    "transfer-encoding",
    "connection",
    "upgrade",
    "te",
    "trailer",
    "expect",
    "keep-alive",
    "proxy-authorization",
    "proxy-authenticate",
    "proxy-connection",
];
/// Longest name of a header, bytes.
const HEADER_NAME_MAX: usize = 128;

/// Why something is no secret. Safe to show: the value is never in it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// The name is not of the form.
    #[error("the name of a secret is 1 to 64 of a-z, 0-9, '-' and '_', and begins with a letter or digit")]
    Name,
    /// The header cannot carry a credential.
    #[error("header must be the name of an HTTP header, and none that says how a message travels")]
    Header,
    /// The user name is not of the form.
    #[error("username must be 1 to 256 visible ASCII characters without ':'")]
    Username,
    /// The value is not of the form.
    #[error("value must be 1 to 8192 visible ASCII characters, with spaces only inside")]
    Value,
    /// What a copy gets of it is not known.
    #[error("onFork must be drop or inherit")]
    OnFork,
}

/// Name of a secret, unique in its machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SecretName(String);

impl SecretName {
    /// Its text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SecretName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for SecretName {
    type Err = SecretError;

    fn from_str(text: &str) -> Result<Self, SecretError> {
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let fine = text.len() <= SECRET_NAME_MAX
            && text.bytes().next().is_some_and(plain)
            && text.bytes().all(|b| plain(b) || b == b'-' || b == b'_');
        if fine { Ok(Self(text.to_owned())) } else { Err(SecretError::Name) }
    }
}

/// What a copy of the machine gets of a secret.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnFork {
    /// Nothing: it stays with the machine it was put for.
    #[default]
    Drop,
    /// The same value, as a secret of its own.
    Inherit,
}

impl OnFork {
    /// The wire name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Drop => "drop",
            Self::Inherit => "inherit",
        }
    }
}

impl FromStr for OnFork {
    type Err = SecretError;

    fn from_str(text: &str) -> Result<Self, SecretError> {
        match text {
            "drop" => Ok(Self::Drop),
            "inherit" => Ok(Self::Inherit),
            _ => Err(SecretError::OnFork),
        }
    }
}

/// Where in a request the value goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// It is the whole value of this header, in lower case.
    Header(String),
    /// It is the password of this user, sent as HTTP basic credentials.
    Basic(String),
}

impl Placement {
    /// A header.
    ///
    /// # Errors
    /// When it cannot carry a credential.
    pub fn header(name: &str) -> Result<Self, SecretError> {
        let token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
        let name = name.to_ascii_lowercase();
        if name.is_empty()
            || name.len() > HEADER_NAME_MAX
            || !name.bytes().all(token)
            || NOT_CREDENTIALS.contains(&name.as_str())
        {
            return Err(SecretError::Header);
        }
        Ok(Self::Header(name))
    }

    /// The header it fills, in lower case.
    #[must_use]
    pub fn header_name(&self) -> &str {
        match self {
            Self::Header(name) => name,
            Self::Basic(_) => "authorization",
        }
    }

    /// HTTP basic credentials.
    ///
    /// # Errors
    /// When the user name cannot be sent.
    pub fn basic(username: &str) -> Result<Self, SecretError> {
        let fine = (1..=SECRET_USERNAME_MAX).contains(&username.len())
            && username.bytes().all(|b| b.is_ascii_graphic() && b != b':');
        if fine { Ok(Self::Basic(username.to_owned())) } else { Err(SecretError::Username) }
    }
}

/// What is known of a secret without its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretSpec {
    /// Its name.
    pub name: SecretName,
    /// The host it is for.
    pub host: HostName,
    /// The port it is for; TLS is spoken there.
    pub port: u16,
    /// Where it goes.
    pub placement: Placement,
}

/// The value. Neither its `Debug` form nor any other of its forms but [`SecretValue::reveal`] shows it, and its memory is
/// cleared when it goes.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretValue(Zeroizing<String>);

impl SecretValue {
    /// Takes a value.
    ///
    /// # Errors
    /// When it cannot be sent in a header.
    pub fn new(text: String) -> Result<Self, SecretError> {
        let text = Zeroizing::new(text);
        let fine = (1..=SECRET_VALUE_MAX).contains(&text.len())
            && text.bytes().all(|b| b == b' ' || b.is_ascii_graphic())
            && !text.starts_with(' ')
            && !text.ends_with(' ');
        if fine { Ok(Self(text)) } else { Err(SecretError::Value) }
    }

    /// The text itself.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for SecretValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretValue(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_headers_and_users_are_checked() {
        for good in ["a", "0", "github-token", "x_1", &"a".repeat(64)] {
            assert!(good.parse::<SecretName>().is_ok(), "{good}");
        }
        for bad in ["", "-a", "_a", "A", "a b", "é", "a/b", "..", &"a".repeat(65)] {
            assert!(bad.parse::<SecretName>().is_err(), "{bad}");
        }
        assert_eq!(Placement::header("X-Api-Key"), Ok(Placement::Header("x-api-key".into())));
        for bad in ["", "Host", "content-LENGTH", "a b", "a:b", "a\r\nb", "é", "Proxy-Authorization"] {
            assert!(Placement::header(bad).is_err(), "{bad}");
        }
        assert!(Placement::basic("x-access-token").is_ok());
        for bad in ["", "a:b", "a b", "é", "a\n"] {
            assert!(Placement::basic(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_value_fits_a_header_and_is_never_shown() {
        let value = SecretValue::new("Bearer s3cr3t~".into()).expect("a value");
        assert_eq!(value.reveal(), "Bearer s3cr3t~");
        assert!(!format!("{value:?}").contains("s3cr3t"));
        for bad in ["", " a", "a ", "a\nb", "a\r\nX: y", "é", "\u{7f}"] {
            let e = SecretValue::new(bad.into()).expect_err(bad);
            assert!(bad.is_empty() || !e.to_string().contains(bad));
        }
        assert!(SecretValue::new("x".repeat(SECRET_VALUE_MAX)).is_ok());
        assert!(SecretValue::new("x".repeat(SECRET_VALUE_MAX + 1)).is_err());
    }
}
