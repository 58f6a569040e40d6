//! How long a machine lives: a hard deadline and an idle timeout. Pure arithmetic.

use crate::time::Millis;

/// The two clocks of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The machine ends here whatever it does.
    pub hard_deadline: Millis,
    /// The machine ends when nobody has used it for so long, milliseconds; `None`: never for idleness.
    pub idle_timeout_ms: Option<u64>,
    /// When it was last used. Moves forward only.
    pub last_activity: Millis,
}

/// Why a lease ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseEnd {
    /// The hard deadline was reached.
    Hard,
    /// The idle timeout was reached.
    Idle,
}

impl Lease {
    /// When the machine ends if it is never used again; `None` without an idle timeout.
    #[must_use]
    pub fn idle_deadline(&self) -> Option<Millis> {
        self.idle_timeout_ms.map(|ms| self.last_activity.plus(ms))
    }

    /// The earliest instant at which [`Self::ended`] can say something.
    #[must_use]
    pub fn next_check(&self) -> Millis {
        self.idle_deadline().map_or(self.hard_deadline, |idle| idle.min(self.hard_deadline))
    }

    /// Whether the lease is over at `now`. `busy`: a command or managed job is running, so the
    /// machine is not idle. The hard deadline does not care.
    #[must_use]
    pub fn ended(&self, now: Millis, busy: bool) -> Option<LeaseEnd> {
        if now >= self.hard_deadline {
            return Some(LeaseEnd::Hard);
        }
        match self.idle_deadline() {
            Some(idle) if now >= idle && !busy => Some(LeaseEnd::Idle),
            _ => None,
        }
    }

    /// Notes a use at `now`. A clock that went back changes nothing.
    pub fn touch(&mut self, now: Millis) {
        self.last_activity = self.last_activity.max(now);
    }

    /// Moves the hard deadline to `ttl_ms` from `now` where that is later. An extension never shortens.
    pub fn extend_hard(&mut self, now: Millis, ttl_ms: u64) {
        self.hard_deadline = self.hard_deadline.max(now.plus(ttl_ms));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lease(hard: i64, idle: Option<u64>, last: i64) -> Lease {
        Lease { hard_deadline: Millis(hard), idle_timeout_ms: idle, last_activity: Millis(last) }
    }

    #[test]
    fn the_hard_deadline_ends_even_a_busy_machine_and_idleness_only_an_idle_one() {
        let l = lease(1000, Some(100), 0);
        assert_eq!(l.ended(Millis(99), false), None);
        assert_eq!(l.ended(Millis(100), false), Some(LeaseEnd::Idle));
        assert_eq!(l.ended(Millis(100), true), None);
        assert_eq!(l.ended(Millis(1000), true), Some(LeaseEnd::Hard));
    }

    proptest! {
        /// Neither use nor extension ever brings an end nearer.
        #[test]
        fn nothing_shortens_a_lease(hard in 0..1_000_000i64, idle in proptest::option::of(0..100_000u64),
                                    last in 0..1_000_000i64, now in 0..1_000_000i64, ttl in 0..1_000_000u64) {
            let before = lease(hard, idle, last);
            let mut after = before;
            after.touch(Millis(now));
            prop_assert!(after.idle_deadline() >= before.idle_deadline());
            prop_assert_eq!(after.hard_deadline, before.hard_deadline);
            after.extend_hard(Millis(now), ttl);
            prop_assert!(after.hard_deadline >= before.hard_deadline);
            prop_assert!(after.next_check() >= before.next_check());
        }

        /// A machine used just before its idle deadline is not ended by a check that comes after it.
        #[test]
        fn a_touch_before_the_check_counts(idle in 1..100_000u64, early in 1..50u64) {
            let mut l = lease(i64::MAX, Some(idle), 0);
            let due = l.idle_deadline().expect("has one");
            l.touch(Millis(due.0 - i64::try_from(early.min(idle)).expect("small")));
            prop_assert_eq!(l.ended(due, false), if idle > idle - early.min(idle) && l.last_activity.0 > 0 { None } else { Some(LeaseEnd::Idle) });
        }
    }
}
