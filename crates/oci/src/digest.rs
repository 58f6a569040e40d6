//! Digests: SHA-256, the one that images have.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer};
use sha2::{Digest as _, Sha256};

/// `sha256:` and 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self::from_hash(Sha256::new_with_prefix(bytes))
    }

    pub(crate) fn from_hash(hash: Sha256) -> Self {
        Self(hash.finalize().into())
    }

    /// Its digits alone.
    #[must_use]
    pub fn hex(&self) -> String {
        hex::encode(self.0)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Not a digest that is known here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a digest must be `sha256:` and 64 digits of 0-9 and a-f")]
pub struct NotADigest;

impl FromStr for Digest {
    type Err = NotADigest;

    fn from_str(text: &str) -> Result<Self, NotADigest> {
        let digits = text.strip_prefix("sha256:").ok_or(NotADigest)?;
        // Written in one way only: a name on disk follows from it.
        if digits.bytes().any(|b| b.is_ascii_uppercase()) {
            return Err(NotADigest);
        }
        let mut bytes = [0; 32];
        hex::decode_to_slice(digits, &mut bytes).map_err(|_| NotADigest)?;
        Ok(Self(bytes))
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}
