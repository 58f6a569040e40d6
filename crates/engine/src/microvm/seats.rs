//! Seats: small numbers unique among living machines. A seat gives a VMM its user id.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// The seats of one service.
#[derive(Debug)]
pub struct Seats {
    base: u32,
    count: u32,
    taken: Mutex<BTreeSet<u32>>,
}

/// A seat that is taken; given back when dropped.
#[derive(Debug)]
pub struct Seat {
    seats: Arc<Seats>,
    index: u32,
}

impl Seats {
    /// `count` seats whose user ids begin at `base`.
    #[must_use]
    pub fn new(base: u32, count: u32) -> Arc<Self> {
        Arc::new(Self { base, count, taken: Mutex::new(BTreeSet::new()) })
    }

    /// Takes the lowest free seat. `None`: all are taken.
    #[must_use]
    pub fn take(self: &Arc<Self>) -> Option<Seat> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let index = (0..self.count).find(|i| !taken.contains(i))?;
        taken.insert(index);
        Some(Seat { seats: self.clone(), index })
    }

    /// Takes the seat of `uid` again after a restart. `None`: not one of ours, or taken.
    #[must_use]
    pub fn retake(self: &Arc<Self>, uid: u32) -> Option<Seat> {
        let index = uid.checked_sub(self.base).filter(|i| *i < self.count)?;
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.insert(index).then(|| Seat { seats: self.clone(), index })
    }
}

impl Seat {
    /// Its number, from 0.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Its user (and group) id.
    #[must_use]
    pub fn uid(&self) -> u32 {
        self.seats.base + self.index
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.seats.taken.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seats_are_unique_bounded_and_come_back() {
        let s = Seats::new(1000, 3);
        let kept = s.retake(1001).expect("free");
        assert!(s.retake(1001).is_none() && s.retake(999).is_none() && s.retake(1003).is_none());
        let (a, b) = (s.take().expect("a"), s.take().expect("b"));
        assert_eq!((a.uid(), b.uid()), (1000, 1002));
        assert!(s.take().is_none());
        drop(kept);
        assert_eq!(s.take().expect("again").uid(), 1001);
    }
}
