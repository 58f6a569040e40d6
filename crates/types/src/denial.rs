//! What denies a connection, as a name that stays.

use std::fmt;
use std::str::FromStr;

use crate::egress::Denial;
use crate::id::IdError;

/// Which rule denied a connection or a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DenyRule {
    /// The machine has no network.
    Off,
    /// An address no machine may reach.
    Reserved,
    /// The allow-list does not name it.
    NoRule,
    /// The allow-list names the host and not the port.
    Port,
    /// The address stands for one name and the connection says another.
    NameMismatch,
    /// The connection names nobody who could be checked.
    NoName,
    /// A protocol that only leads out under `open`.
    Protocol,
}

impl DenyRule {
    /// Every rule.
    pub const ALL: [Self; 7] =
        [Self::Off, Self::Reserved, Self::NoRule, Self::Port, Self::NameMismatch, Self::NoName, Self::Protocol];

    /// The wire name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Reserved => "reserved",
            Self::NoRule => "no-rule",
            Self::Port => "port",
            Self::NameMismatch => "name-mismatch",
            Self::NoName => "no-name",
            Self::Protocol => "protocol",
        }
    }
}

impl fmt::Display for DenyRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for DenyRule {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        Self::ALL.into_iter().find(|r| r.as_str() == text).ok_or(IdError::new("rule", "a name of a rule"))
    }
}

impl From<&Denial> for DenyRule {
    fn from(denial: &Denial) -> Self {
        match denial {
            Denial::Off => Self::Off,
            Denial::Reserved { .. } => Self::Reserved,
            Denial::NoRule => Self::NoRule,
            Denial::Port(_) => Self::Port,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written_the_same() {
        for rule in DenyRule::ALL {
            assert_eq!(rule.to_string().parse::<DenyRule>(), Ok(rule));
        }
        assert!("".parse::<DenyRule>().is_err());
    }
}
