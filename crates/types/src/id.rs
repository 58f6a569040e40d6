//! Names of things. Each is validated once, where it enters, and is then known to be well formed.

use std::fmt;
use std::str::FromStr;

use crate::limits;
use crate::time::CreatedAt;

/// A name that does not have the required form.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} must be {expected}")]
pub struct IdError {
    /// The wire name of the field.
    pub field: &'static str,
    /// What would have been accepted.
    pub expected: &'static str,
}

impl IdError {
    /// An error for `field`, which must be `expected`.
    #[must_use]
    pub const fn new(field: &'static str, expected: &'static str) -> Self {
        Self { field, expected }
    }
}

fn is_label(s: &str, max: usize) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=max).contains(&s.len()) && s.bytes().all(inner) && !s.starts_with('-') && !s.ends_with('-')
}

macro_rules! label {
    ($(#[$doc:meta])* $name:ident, $field:literal, $max:expr, $expected:literal) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(String);

        impl $name {
            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = IdError;
            fn from_str(s: &str) -> Result<Self, IdError> {
                if is_label(s, $max) { Ok(Self(s.to_owned())) } else { Err(IdError::new($field, $expected)) }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

label!(
    /// The slot: the part of a machine's identity that may be used again by a later generation.
    MachineId, "id", limits::NAME_MAX, "1 to 63 of a-z, 0-9 and '-', not starting or ending with '-'"
);
label!(
    /// The owner of machines and keys.
    ProjectId, "project", limits::NAME_MAX, "1 to 63 of a-z, 0-9 and '-', not starting or ending with '-'"
);

/// A template, e.g. `python`, or one of those of a name: `app:v3`, `app:stable`. On the wire: `catalogId`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TemplateName(String);

/// The label of a template name that has none.
const LATEST: &str = "latest";

impl TemplateName {
    /// The name as text. `app:latest` is `app`.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// What is before the label.
    #[must_use]
    pub fn family(&self) -> &str {
        self.0.split_once(':').map_or(&self.0, |(family, _)| family)
    }

    /// The version or tag behind the colon; `None`: the latest.
    #[must_use]
    pub fn label(&self) -> Option<&str> {
        self.0.split_once(':').map(|(_, label)| label)
    }

    /// The template `label` of the same family.
    ///
    /// # Errors
    /// When `label` is no label.
    pub fn with_label(&self, label: &str) -> Result<Self, IdError> {
        format!("{}:{label}", self.family()).parse()
    }

    /// The number in a label that names a version: `v3`.
    #[must_use]
    pub fn version(&self) -> Option<u32> {
        let digits = self.label()?.strip_prefix('v')?;
        let plain = !digits.is_empty() && !digits.starts_with('0') && digits.bytes().all(|b| b.is_ascii_digit());
        digits.parse().ok().filter(|_| plain)
    }
}

impl FromStr for TemplateName {
    type Err = IdError;
    fn from_str(s: &str) -> Result<Self, IdError> {
        let bad = IdError::new(
            "catalogId",
            "1 to 63 of a-z, 0-9 and '-', not starting or ending with '-'; then perhaps ':' and a version or tag of 1 to 63 of \
             a-z, 0-9, '.', '_' and '-', starting with a letter or digit",
        );
        let (family, label) = s.split_once(':').map_or((s, None), |(family, label)| (family, Some(label)));
        let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-".contains(&b);
        let fine = |l: &str| {
            (1..=limits::NAME_MAX).contains(&l.len())
                && l.bytes().all(inner)
                && l.as_bytes().first().is_some_and(u8::is_ascii_alphanumeric)
        };
        if !is_label(family, limits::NAME_MAX) || !label.is_none_or(fine) {
            return Err(bad);
        }
        Ok(Self(if label == Some(LATEST) { family.to_owned() } else { s.to_owned() }))
    }
}

impl fmt::Display for TemplateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl MachineId {
    /// The slot made for a machine whose caller named none: `m-` and the low 80 bits of the
    /// generation key, in hexadecimal.
    #[must_use]
    pub fn generated(key: GenerationKey) -> Self {
        let simple = key.0.simple().to_string();
        Self(format!("m-{}", &simple[12..]))
    }
}

impl ProjectId {
    /// The project that exists from the start.
    #[must_use]
    pub fn default_project() -> Self {
        Self("default".to_owned())
    }
}

/// One life of a slot: the pair that every generation-bound call carries.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation {
    /// The slot.
    pub id: MachineId,
    /// When this generation of it was created.
    pub created_at: CreatedAt,
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.id, self.created_at)
    }
}

/// Reads what [`fmt::Display`] writes.
impl FromStr for Generation {
    type Err = IdError;
    fn from_str(s: &str) -> Result<Self, IdError> {
        let bad = || IdError::new("generation", "an id and an instant with `@` between them");
        let (id, created_at) = s.rsplit_once('@').ok_or_else(bad)?;
        Ok(Self { id: id.parse()?, created_at: created_at.parse().map_err(|_| bad())? })
    }
}

/// The internal name of a generation (UUID v7). Every resource on a host carries it: folders,
/// cgroups, processes, so that a restart can tell whose each one is. Never on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GenerationKey(pub uuid::Uuid);

impl GenerationKey {
    /// A key from a random UUID v7 supplied by the caller's clock and generator.
    #[must_use]
    pub fn new(uuid: uuid::Uuid) -> Self {
        Self(uuid)
    }
}

impl fmt::Display for GenerationKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.simple().fmt(f)
    }
}

impl FromStr for GenerationKey {
    type Err = IdError;
    fn from_str(s: &str) -> Result<Self, IdError> {
        let bad = IdError::new("generation key", "32 hexadecimal digits");
        if s.len() != 32 {
            return Err(bad);
        }
        uuid::Uuid::try_parse(s).map(Self).map_err(|_| bad)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_accept_slots_and_refuse_paths_and_injections() {
        for ok in ["small", "a", "m-0f", "a1-b2", &"x".repeat(63)] {
            assert!(ok.parse::<MachineId>().is_ok(), "{ok}");
        }
        for bad in ["", "-a", "a-", "A", "a/b", "..", "a b", "é", "a\n", "a_b", &"x".repeat(64)] {
            assert!(bad.parse::<MachineId>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_template_may_be_named_with_a_version_or_a_tag() {
        let name = |s: &str| s.parse::<TemplateName>().expect("valid");
        for (text, family, label, version) in [
            ("app", "app", None, None),
            ("app:latest", "app", None, None),
            ("app:v3", "app", Some("v3"), Some(3)),
            ("app:v03", "app", Some("v03"), None),
            ("app:v", "app", Some("v"), None),
            ("a-b:1.4_x-", "a-b", Some("1.4_x-"), None),
        ] {
            let n = name(text);
            assert_eq!((n.family(), n.label(), n.version()), (family, label, version), "{text}");
            assert_eq!(name(&n.to_string()), n);
        }
        assert_eq!(name("app:latest"), name("app"));
        assert_eq!(name("app:v1").with_label("v2").expect("valid"), name("app:v2"));
        let long = format!("a:{}", "x".repeat(64));
        for bad in ["", ":", "app:", ":v1", "app:A", "app:a:b", "app:.", "app:..", "app:a/b", "A", "app:-", &long] {
            assert!(bad.parse::<TemplateName>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_generated_slot_is_a_valid_slot_and_differs_with_the_key() {
        let a = MachineId::generated(GenerationKey(uuid::Uuid::from_u128(7)));
        let b = MachineId::generated(GenerationKey(uuid::Uuid::from_u128(8)));
        assert_ne!(a, b);
        assert_eq!(a.as_str().parse::<MachineId>().expect("valid"), a);
    }

    #[test]
    fn a_generation_key_round_trips_and_refuses_other_spellings() {
        let k = GenerationKey(uuid::Uuid::from_u128(0x1234));
        assert_eq!(k.to_string().parse::<GenerationKey>().expect("valid"), k);
        assert!(k.0.hyphenated().to_string().parse::<GenerationKey>().is_err());
    }
}
