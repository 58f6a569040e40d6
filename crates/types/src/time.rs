//! Instants. Everything stored or sent is in milliseconds since the Unix epoch, UTC.

use std::fmt;
use std::str::FromStr;

/// Milliseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Millis(pub i64);

impl Millis {
    /// This instant moved by `ms` milliseconds; saturates instead of wrapping.
    #[must_use]
    pub fn plus(self, ms: u64) -> Self {
        Self(self.0.saturating_add(i64::try_from(ms).unwrap_or(i64::MAX)))
    }

    /// Milliseconds from `self` until `later`; zero when `later` is in the past.
    #[must_use]
    pub fn until(self, later: Self) -> u64 {
        u64::try_from(later.0.saturating_sub(self.0)).unwrap_or(0)
    }
}

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match jiff::Timestamp::from_millisecond(self.0) {
            Ok(t) => write!(f, "{t:.3}"),
            Err(_) => write!(f, "{}ms", self.0),
        }
    }
}

/// The creation instant that names one generation of a slot, e.g. `2026-10-08T12:00:00.000Z`.
///
/// Within one slot it is strictly increasing: the store moves it forward by a millisecond where the
/// clock has not advanced, so that the pair `(id, created_at)` is never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CreatedAt(pub Millis);

impl fmt::Display for CreatedAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for CreatedAt {
    type Err = crate::IdError;

    /// Accepts RFC 3339 with an offset, at millisecond precision (further digits are refused, since
    /// they could not name a generation of ours).
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let bad = || crate::IdError::new("createdAt", "an RFC 3339 instant such as 2026-10-08T12:00:00.000Z");
        let t: jiff::Timestamp = s.parse().map_err(|_| bad())?;
        if t.subsec_nanosecond() % 1_000_000 != 0 {
            return Err(bad());
        }
        Ok(Self(Millis(t.as_millisecond())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn created_at_round_trips_at_millisecond_precision() {
        for s in ["2026-10-08T12:00:00.000Z", "2026-10-08T12:00:00.007Z", "1970-01-01T00:00:00.999Z"] {
            let c: CreatedAt = s.parse().expect("valid");
            assert_eq!(c.to_string(), s);
        }
        assert_eq!(
            "2026-10-08T14:00:00+02:00".parse::<CreatedAt>().expect("offset").to_string(),
            "2026-10-08T12:00:00.000Z"
        );
    }

    #[test]
    fn created_at_refuses_what_cannot_name_a_generation() {
        for s in ["", "yesterday", "2026-10-08", "2026-10-08T12:00:00.0001Z", "2026-13-01T00:00:00Z"] {
            assert!(s.parse::<CreatedAt>().is_err(), "{s}");
        }
    }
}
