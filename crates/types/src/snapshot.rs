//! Snapshots: what is saved of a machine and stays when the machine is gone.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use crate::egress::EgressPolicy;
use crate::id::{Generation, IdError, ProjectId, TemplateName};
use crate::limits;
use crate::size::SizeClass;
use crate::time::Millis;

/// Names a snapshot for ever (UUID v7): on the wire, and on a host for all that is kept of it. Written `s-` and 32 hexadecimal
/// digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SnapshotKey(pub uuid::Uuid);

impl SnapshotKey {
    /// A key from a random UUID v7 supplied by the caller's clock and generator.
    #[must_use]
    pub fn new(uuid: uuid::Uuid) -> Self {
        Self(uuid)
    }
}

impl fmt::Display for SnapshotKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s-{}", self.0.simple())
    }
}

impl FromStr for SnapshotKey {
    type Err = IdError;
    fn from_str(s: &str) -> Result<Self, IdError> {
        let bad = IdError::new("id", "`s-` and 32 hexadecimal digits");
        let digits = s.strip_prefix("s-").filter(|d| d.len() == 32 && d.bytes().all(|b| b.is_ascii_hexdigit()));
        let uuid = digits.and_then(|d| uuid::Uuid::parse_str(d).ok());
        uuid.map(Self).ok_or(bad)
    }
}

/// How much is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SnapshotKind {
    /// The disk: files come back in a machine that was just started.
    Workspace,
    /// Disk and memory: processes come back, too, as in a fork.
    Full,
}

impl SnapshotKind {
    /// Its wire name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Workspace => "workspace",
            Self::Full => "full",
        }
    }
}

impl fmt::Display for SnapshotKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for SnapshotKind {
    type Err = IdError;
    fn from_str(s: &str) -> Result<Self, IdError> {
        match s {
            "workspace" => Ok(Self::Workspace),
            "full" => Ok(Self::Full),
            _ => Err(IdError::new("kind", "`workspace` or `full`")),
        }
    }
}

/// A snapshot as the store holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotRecord {
    /// Its name on the wire and on its host.
    pub key: SnapshotKey,
    /// Owner.
    pub project: ProjectId,
    /// The host that holds it.
    pub host: String,
    /// The caller's name for it; need not be unique.
    pub name: String,
    /// How much of the machine it is.
    pub kind: SnapshotKind,
    /// Whether all of it is on disk. Until then nobody was told that it exists.
    pub saved: bool,
    /// The machine it was saved from.
    pub source: Generation,
    /// The source's template. What was saved fits no other.
    pub template: TemplateName,
    /// Digest of that template's image when it was saved.
    pub template_digest: String,
    /// The source's size.
    pub size: SizeClass,
    /// The source's egress policy when it was saved.
    pub egress: EgressPolicy,
    /// The source's environment of commands.
    pub env: BTreeMap<String, String>,
    /// Bytes that it alone has on its host.
    pub bytes: u64,
    /// When it was asked for.
    pub created_at: Millis,
    /// When it is removed; `None`: only when somebody asks for that.
    pub expires_at: Option<Millis>,
    /// Put aside by its owner; still restorable, still counted.
    pub archived: bool,
}

/// Checks a snapshot's name: text to be shown, not empty, without control characters.
///
/// # Errors
/// When it is out of bounds.
pub fn check_snapshot_name(name: &str) -> Result<(), IdError> {
    if (1..=limits::SNAPSHOT_NAME_MAX).contains(&name.len()) && !name.chars().any(char::is_control) {
        Ok(())
    } else {
        Err(IdError::new("name", "1 to 128 bytes of text without control characters"))
    }
}

/// Checks for how long a snapshot is to be kept, seconds.
///
/// # Errors
/// When it is out of bounds.
pub fn check_snapshot_ttl(seconds: u64) -> Result<(), IdError> {
    if (limits::SNAPSHOT_TTL_MIN_SECONDS..=limits::SNAPSHOT_TTL_MAX_SECONDS).contains(&seconds) {
        Ok(())
    } else {
        Err(IdError::new("ttlSeconds", "60 to 31536000"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_round_trip_and_nothing_else_is_one() {
        let key = SnapshotKey::new(uuid::Uuid::from_u128(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef));
        assert_eq!(key.to_string(), "s-0123456789abcdef0123456789abcdef");
        assert_eq!(key.to_string().parse(), Ok(key));
        for bad in ["", "s-", "0123456789abcdef0123456789abcdef", "s-0123", "s-../../../../../../../../etc/pass"] {
            assert!(bad.parse::<SnapshotKey>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_time_to_live_is_a_minute_to_a_year() {
        assert!(check_snapshot_ttl(60).is_ok() && check_snapshot_ttl(31_536_000).is_ok());
        assert!(check_snapshot_ttl(59).is_err() && check_snapshot_ttl(31_536_001).is_err());
    }

    #[test]
    fn names_are_bounded_text() {
        assert_eq!(check_snapshot_name("Project files é"), Ok(()));
        for bad in ["", "a\nb", "\u{7}", &"x".repeat(129)] {
            assert!(check_snapshot_name(bad).is_err(), "{bad:?}");
        }
    }
}
