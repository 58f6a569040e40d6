//! Which addresses of the block are whose: numbers, four addresses each, given to seats that are `open`.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::NetError;

/// The numbers of one block.
#[derive(Debug)]
pub(crate) struct Addresses {
    count: u32,
    numbers: Mutex<Numbers>,
}

#[derive(Debug, Default)]
struct Numbers {
    taken: BTreeSet<u32>,
    /// Given back: what a link of such a one belonged to is over, though the link may outlast it for a moment.
    ended: BTreeSet<u32>,
}

/// A number that is taken; given back when dropped.
#[derive(Debug)]
pub(crate) struct Address {
    all: Arc<Addresses>,
    pub(crate) number: u32,
}

impl Addresses {
    pub(crate) fn new(count: u32) -> Arc<Self> {
        Arc::new(Self { count, numbers: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Numbers> {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of a seat that has its link already. `None`: not one of ours, or another seat's.
    pub(crate) fn retake(self: &Arc<Self>, number: u32) -> Option<Address> {
        let mut numbers = self.lock();
        if number >= self.count || !numbers.taken.insert(number) {
            return None;
        }
        numbers.ended.remove(&number);
        Some(Address { all: self.clone(), number })
    }

    /// The lowest free number, and what is left of the link of whoever had it before. `link`: the host's link of a number.
    /// One that is there and was not given back here is that of a machine nobody has adopted yet: its number is left alone.
    pub(crate) async fn take<F>(self: &Arc<Self>, link: impl Fn(u32) -> F) -> Result<(Address, Option<u32>), NetError>
    where
        F: Future<Output = Result<Option<u32>, NetError>>,
    {
        let mut from = 0;
        loop {
            let (address, ended) = {
                let mut numbers = self.lock();
                let free = (from..self.count).find(|n| !numbers.taken.contains(n));
                let number = free.ok_or(NetError::Exhausted(self.count))?;
                numbers.taken.insert(number);
                (Address { all: self.clone(), number }, numbers.ended.contains(&number))
            };
            let found = link(address.number).await;
            match found {
                Ok(left) if ended || left.is_none() => {
                    self.lock().ended.remove(&address.number);
                    return Ok((address, left));
                }
                found => {
                    from = address.number + 1;
                    address.let_be(ended);
                    found?;
                }
            }
        }
    }
}

impl Address {
    /// Gives it back as it was found.
    fn let_be(self, ended: bool) {
        let (all, number) = (self.all.clone(), self.number);
        drop(self);
        if !ended {
            all.lock().ended.remove(&number);
        }
    }
}

impl Drop for Address {
    fn drop(&mut self) {
        let mut numbers = self.all.lock();
        numbers.taken.remove(&self.number);
        numbers.ended.insert(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn take(all: &Arc<Addresses>, links: &[u32]) -> Result<(Address, Option<u32>), NetError> {
        all.take(|n| std::future::ready(Ok(links.contains(&n).then_some(n + 100)))).await
    }

    #[tokio::test]
    async fn numbers_are_unique_bounded_and_come_back() {
        let all = Addresses::new(2);
        let (a, b) = (take(&all, &[]).await.expect("free").0, take(&all, &[]).await.expect("free").0);
        assert_eq!((a.number, b.number), (0, 1));
        assert!(matches!(take(&all, &[]).await, Err(NetError::Exhausted(2))));
        assert!(all.retake(0).is_none() && all.retake(2).is_none());
        drop(a);
        // What is left of its link is handed over along with it.
        let (again, left) = take(&all, &[0, 1]).await.expect("free");
        assert_eq!((again.number, left), (0, Some(100)));
    }

    #[tokio::test]
    async fn the_number_of_a_machine_that_nobody_has_adopted_is_left_alone() {
        let all = Addresses::new(3);
        let first = take(&all, &[0, 1]).await.expect("free");
        assert_eq!((first.0.number, first.1), (2, None));
        assert!(matches!(take(&all, &[0, 1]).await, Err(NetError::Exhausted(3))), "they are others' still");
        drop(all.retake(1).expect("adopted"));
        assert_eq!(take(&all, &[0, 1]).await.expect("given back").0.number, 1);
        let failed = all.take(|_| std::future::ready(Err(NetError::Exhausted(0)))).await;
        assert!(failed.is_err());
        let next = take(&all, &[0]).await.expect("the one that was given back").0.number;
        assert_eq!(next, 1, "what could not be looked at is as it was");
        assert_eq!(take(&all, &[]).await.expect("gone by now").0.number, 0);
    }
}
