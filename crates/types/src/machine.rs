//! A machine as it is asked for and as it is remembered.

use std::collections::BTreeMap;

use crate::egress::EgressPolicy;
use crate::id::{Generation, GenerationKey, IdError, ProjectId, TemplateName};
use crate::lease::Lease;
use crate::limits;
use crate::size::SizeClass;
use crate::snapshot::SnapshotKey;
use crate::state::{Failure, MachineState};
use crate::time::Millis;

/// What becomes of a machine that nobody used for its idle timeout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnIdle {
    /// It ends.
    #[default]
    Stop,
    /// It is paused.
    Pause,
}

impl OnIdle {
    /// The wire name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Pause => "pause",
        }
    }
}

impl std::str::FromStr for OnIdle {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        match text {
            "stop" => Ok(Self::Stop),
            "pause" => Ok(Self::Pause),
            _ => Err(IdError::new("onIdle", "stop or pause")),
        }
    }
}

/// What a caller asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineSpec {
    /// The template it starts from.
    pub template: TemplateName,
    /// How big it is.
    pub size: SizeClass,
    /// What it may reach. `off` is immutable for the generation.
    pub egress: EgressPolicy,
    /// Hard lease, milliseconds from creation.
    pub ttl_ms: u64,
    /// Idle timeout, milliseconds; `None`: never ends for idleness.
    pub idle_timeout_ms: Option<u64>,
    /// What becomes of it when its idle timeout is over.
    pub on_idle: OnIdle,
    /// Whether it comes back by itself, when it is paused and a call or a preview request needs it to run.
    pub auto_resume: bool,
    /// The caller's labels; returned and filterable, never interpreted.
    pub metadata: BTreeMap<String, String>,
    /// Environment of every command in the machine. Not a protected secret: the guest can read it.
    pub env: BTreeMap<String, String>,
}

impl MachineSpec {
    /// Checks every bound of [`limits`].
    ///
    /// # Errors
    /// The first field that is out of bounds, and what would be accepted.
    pub fn validate(&self) -> Result<(), IdError> {
        check_ttl(self.ttl_ms)?;
        if let Some(ms) = self.idle_timeout_ms {
            check_idle(ms)?;
        }
        if self.metadata.len() > limits::METADATA_ENTRIES_MAX
            || self.metadata.iter().any(|(k, v)| {
                k.is_empty()
                    || k.len() > limits::METADATA_KEY_MAX
                    || v.len() > limits::METADATA_VALUE_MAX
                    || k.contains('\0')
                    || v.contains('\0')
            })
        {
            return Err(IdError::new(
                "metadata",
                "at most 32 entries, keys of 1 to 64 bytes, values of at most 512 bytes, nothing with a NUL",
            ));
        }
        check_env(&self.env)
    }
}

/// Checks a hard lease.
///
/// # Errors
/// When it is outside the limits.
pub fn check_ttl(ms: u64) -> Result<(), IdError> {
    if (limits::TTL_MIN_SECONDS * 1000..=limits::TTL_MAX_SECONDS * 1000).contains(&ms) {
        Ok(())
    } else {
        Err(IdError::new("ttlSeconds", "10 to 604800"))
    }
}

/// Checks an idle timeout.
///
/// # Errors
/// When it is outside the limits.
pub fn check_idle(ms: u64) -> Result<(), IdError> {
    if (limits::IDLE_MIN_SECONDS * 1000..=limits::TTL_MAX_SECONDS * 1000).contains(&ms) {
        Ok(())
    } else {
        Err(IdError::new("idleTimeoutSeconds", "5 to 604800"))
    }
}

/// Checks environment variables: names without `=` or NUL, values without NUL, bounded in number and size.
///
/// # Errors
/// When a name, a value or the whole is out of bounds.
pub fn check_env(env: &BTreeMap<String, String>) -> Result<(), IdError> {
    let size: usize = env.iter().map(|(k, v)| k.len() + v.len() + 2).sum();
    let well_formed = env.iter().all(|(k, v)| !k.is_empty() && !k.contains(['=', '\0']) && !v.contains('\0'));
    if well_formed && env.len() <= limits::ENV_ENTRIES_MAX && size <= limits::ENV_BYTES_MAX {
        Ok(())
    } else {
        Err(IdError::new("env", "at most 128 entries and 64 KiB, names without '=', nothing with a NUL"))
    }
}

/// Who a command runs as, `USER` or `USER:GROUP`, by name or number. Whether there is one is the machine's to say.
///
/// # Errors
/// When it cannot be one.
pub fn check_user(user: &str) -> Result<(), IdError> {
    let fine = |part: &str| {
        (1..=limits::USER_NAME_MAX).contains(&part.len())
            && !part.starts_with('-')
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
    };
    let (name, group) = user.split_once(':').map_or((user, None), |(name, group)| (name, Some(group)));
    if fine(name) && group.is_none_or(fine) {
        Ok(())
    } else {
        Err(IdError::new(
            "user",
            "USER or USER:GROUP, by name or number: letters, digits, `_`, `.`, `-`, at most 32 each",
        ))
    }
}

/// A machine as the store holds it. `revision` guards every write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineRecord {
    /// Internal name; every host resource carries it.
    pub key: GenerationKey,
    /// Public identity.
    pub generation: Generation,
    /// Owner.
    pub project: ProjectId,
    /// The host that holds it.
    pub host: String,
    /// What was asked.
    pub spec: MachineSpec,
    /// What it is doing.
    pub state: MachineState,
    /// Why it ended; set in final states (and while stopping).
    pub ending: Option<Failure>,
    /// Its two clocks.
    pub lease: Lease,
    /// The machine it is a copy of; `None`: it was made from its template.
    pub forked_from: Option<Generation>,
    /// The snapshot it starts from instead of its template.
    pub restored_from: Option<SnapshotKey>,
    /// When it first answered.
    pub running_at: Option<Millis>,
    /// When it ended.
    pub ended_at: Option<Millis>,
    /// Increases by one with every write.
    pub revision: i64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> MachineSpec {
        MachineSpec {
            template: "python".parse().expect("valid"),
            size: SizeClass::Small,
            egress: EgressPolicy::Off,
            ttl_ms: 60_000,
            idle_timeout_ms: None,
            on_idle: OnIdle::Stop,
            auto_resume: false,
            metadata: BTreeMap::new(),
            env: BTreeMap::new(),
        }
    }

    #[test]
    fn bounds_are_enforced_at_their_edges() {
        assert_eq!(spec().validate(), Ok(()));
        let with = |f: fn(&mut MachineSpec)| {
            let mut s = spec();
            f(&mut s);
            s.validate().err().map(|e| e.field)
        };
        assert_eq!(with(|s| s.ttl_ms = 9_999), Some("ttlSeconds"));
        assert_eq!(with(|s| s.ttl_ms = 604_800_001), Some("ttlSeconds"));
        assert_eq!(with(|s| s.idle_timeout_ms = Some(0)), Some("idleTimeoutSeconds"));
        assert_eq!(with(|s| drop(s.metadata.insert(String::new(), String::new()))), Some("metadata"));
        assert_eq!(with(|s| s.metadata = (0..33).map(|i| (i.to_string(), String::new())).collect()), Some("metadata"));
        assert_eq!(with(|s| drop(s.metadata.insert("a".into(), "\0".into()))), Some("metadata"));
        assert_eq!(with(|s| drop(s.env.insert("A=B".into(), String::new()))), Some("env"));
        assert_eq!(with(|s| drop(s.env.insert("A".into(), "\0".into()))), Some("env"));
        assert_eq!(with(|s| drop(s.env.insert("A".into(), "x".repeat(64 * 1024)))), Some("env"));
    }
}
