//! Who is inside a machine right now, and when it was last used.
//!
//! Entering and the decision that the machine is idle are made under one lock, so a use that began
//! a moment before the idle deadline always counts.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mainbrella_types::Millis;

use crate::clock::Clock;

#[derive(Debug)]
struct Inside {
    open: bool,
    busy: u32,
    last: Millis,
}

/// The gate of one machine.
#[derive(Clone)]
pub(crate) struct Gate {
    inside: Arc<Mutex<Inside>>,
    clock: Arc<dyn Clock>,
}

/// A use in progress; the machine is busy until it is dropped.
pub(crate) struct Pass {
    gate: Gate,
}

impl Gate {
    /// A closed gate: nobody gets in before [`Self::open`].
    pub(crate) fn new(clock: Arc<dyn Clock>, last: Millis) -> Self {
        Self { inside: Arc::new(Mutex::new(Inside { open: false, busy: 0, last })), clock }
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        // Nothing panics while holding it; a poisoned lock still holds whole values.
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn open(&self) {
        self.lock().open = true;
    }

    pub(crate) fn close(&self) {
        self.lock().open = false;
    }

    /// Begins a use; `None` when the machine is closed.
    pub(crate) fn enter(&self) -> Option<Pass> {
        let now = self.clock.now();
        let mut inside = self.lock();
        if !inside.open {
            return None;
        }
        inside.busy += 1;
        inside.last = inside.last.max(now);
        Some(Pass { gate: self.clone() })
    }

    /// Notes a use that has no duration.
    pub(crate) fn touch(&self) {
        let now = self.clock.now();
        let mut inside = self.lock();
        inside.last = inside.last.max(now);
    }

    /// When it was last used; now, while somebody is inside.
    pub(crate) fn last_use(&self) -> Millis {
        let inside = self.lock();
        if inside.busy > 0 { self.clock.now().max(inside.last) } else { inside.last }
    }

    /// Closes the gate if nobody is inside and nobody was since `since`. Says whether it did.
    pub(crate) fn close_if_unused_since(&self, since: Millis) -> bool {
        let mut inside = self.lock();
        let unused = inside.busy == 0 && inside.last <= since;
        if unused {
            inside.open = false;
        }
        unused
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let now = self.gate.clock.now();
        let mut inside = self.gate.lock();
        inside.busy -= 1;
        inside.last = inside.last.max(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicI64, Ordering};

    struct Hand(AtomicI64);
    impl Clock for Hand {
        fn now(&self) -> Millis {
            Millis(self.0.load(Ordering::SeqCst))
        }
    }

    #[test]
    fn a_use_just_before_the_idle_check_always_keeps_the_machine() {
        let hand = Arc::new(Hand(AtomicI64::new(0)));
        let gate = Gate::new(hand.clone(), Millis(0));
        gate.open();
        for i in 0..1000 {
            let seen = gate.last_use();
            hand.0.store(i + 1, Ordering::SeqCst);
            drop(gate.enter().expect("open"));
            assert!(!gate.close_if_unused_since(seen), "use {i} was overlooked");
        }
        assert!(gate.close_if_unused_since(gate.last_use()));
        assert!(gate.enter().is_none(), "closed for good");
    }

    #[test]
    fn a_machine_is_in_use_until_the_last_pass_is_dropped() {
        let hand = Arc::new(Hand(AtomicI64::new(5)));
        let gate = Gate::new(hand.clone(), Millis(0));
        assert!(gate.enter().is_none(), "closed until opened");
        gate.open();
        let (a, b) = (gate.enter(), gate.enter());
        drop(a);
        hand.0.store(50, Ordering::SeqCst);
        assert_eq!(gate.last_use(), Millis(50));
        assert!(!gate.close_if_unused_since(Millis(1000)));
        drop(b);
        hand.0.store(70, Ordering::SeqCst);
        assert_eq!(gate.last_use(), Millis(50));
    }
}
