//! `HEALTHCHECK`: how to tell that the start command is ready.

use std::time::Duration;

use crate::error::{Fault, shown};
use crate::parse::{Flag, unknown_flag};

/// Longest duration a probe may name.
const DURATION_MAX: Duration = Duration::from_secs(3600);
/// Most failures in a row a probe may allow.
const RETRIES_MAX: u32 = 1000;

/// A command that succeeds when the start command is ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// The command.
    pub argv: Vec<String>,
    /// Between the end of one try and the next, once the start period is over.
    pub interval: Duration,
    /// Longest time of one try.
    pub timeout: Duration,
    /// After the start, how long failures do not count.
    pub start_period: Duration,
    /// Between tries in the start period.
    pub start_interval: Duration,
    /// Failures in a row that mean it will not be ready; at least one.
    pub retries: u32,
}

impl Probe {
    /// A probe with every number at its default.
    #[must_use]
    pub fn new(argv: Vec<String>) -> Self {
        Self {
            argv,
            interval: Duration::from_secs(30),
            timeout: Duration::from_secs(30),
            start_period: Duration::ZERO,
            start_interval: Duration::from_secs(5),
            retries: 3,
        }
    }

    pub(crate) fn with(argv: Vec<String>, flags: &[Flag]) -> Result<Self, Fault> {
        let mut probe = Self::new(argv);
        for flag in flags {
            let value = flag.value.as_deref().unwrap_or_default();
            match flag.name.as_str() {
                "interval" => probe.interval = duration(value, true)?,
                "timeout" => probe.timeout = duration(value, true)?,
                "start-period" => probe.start_period = duration(value, false)?,
                "start-interval" => probe.start_interval = duration(value, true)?,
                "retries" => {
                    let fine = |n: &u32| (1..=RETRIES_MAX).contains(n);
                    probe.retries = value.parse().ok().filter(fine).ok_or_else(|| {
                        Fault::Value(format!("--retries={}: give a number from 1 to {RETRIES_MAX}", shown(value)))
                    })?;
                }
                other => return Err(unknown_flag(other)),
            }
        }
        Ok(probe)
    }
}

/// `90s`, `1m30s`, `1.5h`, `500ms`. Zero is only a duration where it may be.
fn duration(text: &str, positive: bool) -> Result<Duration, Fault> {
    let bad = || Fault::Value(format!("`{}` is no duration up to 1h, as in 30s, 1m30s or 500ms", shown(text)));
    let mut rest = text;
    let mut seconds = 0f64;
    if rest != "0" {
        if rest.is_empty() {
            return Err(bad());
        }
        while !rest.is_empty() {
            let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(bad)?;
            let number: f64 = rest[..end].parse().map_err(|_| bad())?;
            rest = &rest[end..];
            let end = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
            seconds += number
                * match &rest[..end] {
                    "h" => 3600.0,
                    "m" => 60.0,
                    "s" => 1.0,
                    "ms" => 1e-3,
                    "us" | "µs" => 1e-6,
                    "ns" => 1e-9,
                    _ => return Err(bad()),
                };
            rest = &rest[end..];
        }
    }
    let duration = Duration::try_from_secs_f64(seconds).map_err(|_| bad())?;
    if duration > DURATION_MAX || (positive && duration < Duration::from_millis(1)) {
        return Err(bad());
    }
    Ok(duration)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read() {
        for (text, ms) in [("30s", 30_000), ("1m30s", 90_000), ("500ms", 500), ("0.5h", 1_800_000), ("1h", 3_600_000)] {
            assert_eq!(duration(text, true).expect("valid").as_millis(), ms, "{text}");
        }
        assert_eq!(duration("0s", false), Ok(Duration::ZERO));
        assert_eq!(duration("0", false), Ok(Duration::ZERO));
        for bad in ["", "30", "s", "1x", "-1s", "2h", "0s", "1s1", "1..2s", "é"] {
            assert!(duration(bad, true).is_err(), "{bad}");
        }
    }
}
