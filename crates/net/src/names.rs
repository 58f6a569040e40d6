//! Addresses that stand for names. Under an allow-list a machine's name server answers each allowed name with an address
//! of its own from a block that no network routes; the gateway turns it back into the name. So every port and protocol is
//! checked by name, also those that never say one.

use std::collections::{HashMap, VecDeque};
use std::net::Ipv4Addr;
use std::sync::{Mutex, PoisonError};

use ipnet::Ipv4Net;
use mainbrella_types::HostName;

/// The block the addresses are from: set aside for benchmarking, so nothing real is there.
pub const BLOCK: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(198, 18, 0, 0), 15);
/// Seconds a machine may keep an answer. Far shorter than it takes to go round the block.
pub const TTL_SECONDS: u32 = 60;
/// Names kept; the oldest are forgotten.
const KEPT: usize = 8192;

#[derive(Debug, Default)]
struct Table {
    by_name: HashMap<HostName, Ipv4Addr>,
    by_address: HashMap<Ipv4Addr, HostName>,
    order: VecDeque<Ipv4Addr>,
    next: u32,
}

/// The names one machine has asked for.
#[derive(Debug, Default)]
pub struct Names(Mutex<Table>);

impl Names {
    /// The address of `name`: the one it has, or the next of the block.
    #[must_use]
    pub fn address(&self, name: &HostName) -> Ipv4Addr {
        let mut t = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(address) = t.by_name.get(name) {
            return *address;
        }
        if t.order.len() == KEPT
            && let Some(oldest) = t.order.pop_front()
            && let Some(name) = t.by_address.remove(&oldest)
        {
            t.by_name.remove(&name);
        }
        // The first and last of the block are left out.
        let room = (1u32 << (32 - BLOCK.prefix_len())) - 2;
        let address = Ipv4Addr::from(u32::from(BLOCK.network()) + 1 + t.next % room);
        t.next = (t.next + 1) % room;
        t.by_name.insert(name.clone(), address);
        t.by_address.insert(address, name.clone());
        t.order.push_back(address);
        address
    }

    /// The name an address stands for.
    #[must_use]
    pub fn name(&self, address: Ipv4Addr) -> Option<HostName> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).by_address.get(&address).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_keep_their_address_and_no_two_share_one() {
        let names = Names::default();
        let name = |n: usize| format!("h{n}.example.org").parse::<HostName>().expect("a name");
        let first = names.address(&name(0));
        assert_eq!(names.address(&name(0)), first);
        let mut seen = std::collections::HashSet::new();
        for n in 0..KEPT {
            assert!(seen.insert(names.address(&name(n))) && BLOCK.contains(&names.address(&name(n))));
        }
        for n in KEPT..KEPT + 10 {
            let address = names.address(&name(n));
            assert!(!seen.contains(&address), "a forgotten address is not given out again at once");
            assert_eq!(names.name(address), Some(name(n)));
        }
        assert_eq!(names.name(first), None, "the oldest is forgotten");
        assert_eq!(names.0.lock().expect("no panic").by_name.len(), KEPT);
    }
}
