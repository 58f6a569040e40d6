//! What was denied, or would have been: kept in a ring of fixed size, with exact counters.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Events kept of a machine; older ones are counted only.
const KEPT: usize = 512;
/// Most events of one machine taken in a second; more are counted only.
const PER_SECOND: u32 = 100;

/// What became of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Not made.
    Denied,
    /// Made, because the policy is a dry run.
    WouldDeny,
}

/// One denied connection or lookup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressEvent {
    /// Strictly increasing in a machine, from 1.
    pub sequence: u64,
    /// Milliseconds since the Unix epoch.
    pub time_ms: u64,
    /// What became of it.
    pub verdict: Verdict,
    /// The name that was asked for, if there was one.
    pub name: Option<String>,
    /// The address, if there was one.
    pub address: Option<IpAddr>,
    /// The port; 53 for a lookup.
    pub port: u16,
    /// Why, in one sentence.
    pub reason: String,
}

#[derive(Debug, Default)]
struct Kept {
    ring: VecDeque<EgressEvent>,
    denied: u64,
    would_deny: u64,
    second: u64,
    in_second: u32,
}

/// The log of one machine.
#[derive(Debug, Default)]
pub struct EgressLog(Mutex<Kept>);

impl EgressLog {
    /// Takes a denial.
    pub fn record(&self, verdict: Verdict, name: Option<&str>, address: Option<IpAddr>, port: u16, reason: &str) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match verdict {
            Verdict::Denied => kept.denied += 1,
            Verdict::WouldDeny => kept.would_deny += 1,
        }
        if kept.second != since.as_secs() {
            (kept.second, kept.in_second) = (since.as_secs(), 0);
        }
        kept.in_second += 1;
        if kept.in_second > PER_SECOND {
            return;
        }
        if kept.ring.len() == KEPT {
            kept.ring.pop_front();
        }
        let event = EgressEvent {
            sequence: kept.denied + kept.would_deny,
            time_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
            verdict,
            name: name.map(str::to_owned),
            address,
            port,
            reason: reason.to_owned(),
        };
        kept.ring.push_back(event);
    }

    /// Events after `cursor`, oldest first, at most `limit`; and how many connections were denied and would have been, in all.
    #[must_use]
    pub fn after(&self, cursor: u64, limit: usize) -> (Vec<EgressEvent>, u64, u64) {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let events = kept.ring.iter().filter(|e| e.sequence > cursor).take(limit).cloned().collect();
        (events, kept.denied, kept.would_deny)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_counted_whole_and_kept_in_part() {
        let log = EgressLog::default();
        for n in 0..5000u32 {
            let verdict = if n % 5 == 0 { Verdict::WouldDeny } else { Verdict::Denied };
            log.record(verdict, Some("example.org"), None, 443, "no rule");
        }
        let (events, denied, would) = log.after(0, usize::MAX);
        assert_eq!((denied, would), (4000, 1000));
        assert!(events.len() <= KEPT && events.windows(2).all(|w| w[0].sequence < w[1].sequence));
        let last = events.last().expect("some").sequence;
        assert!(log.after(last, 10).0.is_empty());
    }
}
