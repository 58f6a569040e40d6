//! The network block of one service: addresses no other service on the host uses, and no route of the host leads to.

use std::fs::{self, File};
use std::io;
use std::net::Ipv4Addr;
use std::path::Path;

use ipnet::Ipv4Net;

use super::uids::lock;

/// Where the locks are.
const LOCKS: &str = "/run/mainbrella/blocks";
/// Name of the file in the data directory that holds the number of the block.
const REMEMBERED: &str = "network-block";
/// Blocks to choose from: 10.201.0.0/16 and the 49 after it.
const FIRST: u8 = 201;
const COUNT: u8 = 50;

/// Services with a block of the operator's choice have numbers from here on, as many as there are blocks to choose from.
const GIVEN: u8 = 100;

/// A block that is held, until this is dropped.
#[derive(Debug)]
pub struct NetBlock {
    number: u8,
    given: Option<Ipv4Net>,
    _lock: File,
}

/// The first of the blocks to choose from.
pub(super) fn first() -> Ipv4Net {
    block(0)
}

impl NetBlock {
    /// Takes the block of `data_dir` on this host: the one it had, or the first that is free.
    ///
    /// # Errors
    /// When the data directory or the locks cannot be written, or every block is taken or routed elsewhere.
    pub fn take(data_dir: &Path) -> io::Result<Self> {
        let routes = routes_of(&fs::read_to_string("/proc/net/route").unwrap_or_default());
        Self::take_in(data_dir, Path::new(LOCKS), &routes)
    }

    fn take_in(data_dir: &Path, locks: &Path, routes: &[Ipv4Net]) -> io::Result<Self> {
        let known = remembered(data_dir).filter(|n| *n < COUNT);
        for number in known.into_iter().chain(0..COUNT) {
            // Machines of a former service keep their links: their routes are in the block that was ours.
            let elsewhere = routes.iter().any(|r| r.contains(&block(number)) || block(number).contains(r));
            if elsewhere && known != Some(number) {
                continue;
            }
            let Some(lock) = lock(locks, u32::from(number))? else { continue };
            remember(data_dir, number, known)?;
            return Ok(Self { number, given: None, _lock: lock });
        }
        Err(io::Error::other("every network block for machines on this host is in use"))
    }

    /// Holds the block the operator chose.
    ///
    /// # Errors
    /// When a route of the host leads into it, or the data directory or the locks cannot be written.
    pub fn take_given(data_dir: &Path, given: Ipv4Net) -> io::Result<Self> {
        let text = fs::read_to_string("/proc/net/route").unwrap_or_default();
        Self::take_given_in(data_dir, Path::new(LOCKS), given, &routes_of(&without_ours(&text, remembered(data_dir))))
    }

    fn take_given_in(data_dir: &Path, locks: &Path, given: Ipv4Net, routes: &[Ipv4Net]) -> io::Result<Self> {
        if let Some(route) = routes.iter().find(|r| r.contains(&given) || given.contains(*r)) {
            return Err(io::Error::other(format!("the host has a route to {route}, which meets the block {given}")));
        }
        let known = remembered(data_dir).filter(|n| (GIVEN..GIVEN + COUNT).contains(n));
        for number in known.into_iter().chain(GIVEN..GIVEN + COUNT) {
            let Some(lock) = lock(locks, u32::from(number))? else { continue };
            remember(data_dir, number, known)?;
            return Ok(Self { number, given: Some(given), _lock: lock });
        }
        Err(io::Error::other("too many services on this host have network blocks of their own"))
    }

    /// The addresses.
    #[must_use]
    pub fn block(&self) -> Ipv4Net {
        self.given.unwrap_or_else(|| block(self.number))
    }

    /// A name that tells this service's links and rules from another's.
    #[must_use]
    pub fn instance(&self) -> String {
        format!("{}", self.number)
    }
}

/// The number this data directory had before.
fn remembered(data_dir: &Path) -> Option<u8> {
    fs::read_to_string(data_dir.join(REMEMBERED)).ok()?.trim().parse().ok()
}

fn remember(data_dir: &Path, number: u8, known: Option<u8>) -> io::Result<()> {
    if known == Some(number) {
        return Ok(());
    }
    let file = data_dir.join(REMEMBERED);
    let half = file.with_extension("new");
    fs::write(&half, format!("{number}\n"))?;
    fs::rename(half, file)
}

/// The text of `/proc/net/route` without the links of this service's machines.
fn without_ours(text: &str, number: Option<u8>) -> String {
    let ours = number.map(|n| format!("mb{n}-"));
    let other = |line: &&str| ours.as_ref().is_none_or(|ours| !line.starts_with(ours));
    text.lines().filter(other).flat_map(|l| [l, "\n"]).collect()
}

fn block(number: u8) -> Ipv4Net {
    // A prefix of 16 is always valid.
    Ipv4Net::new(Ipv4Addr::new(10, FIRST.saturating_add(number), 0, 0), 16).unwrap_or_default()
}

/// The host's routes but the default one, from the text of `/proc/net/route`.
fn routes_of(text: &str) -> Vec<Ipv4Net> {
    let route = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let hex = |w: Option<&str>| u32::from_str_radix(w?, 16).ok().map(|n| Ipv4Addr::from(u32::from_be(n)));
        let (to, mask) = (hex(words.nth(1))?, hex(words.nth(5))?);
        Ipv4Net::with_netmask(to, mask).ok().filter(|n| n.prefix_len() > 0)
    };
    text.lines().skip(1).filter_map(route).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_services_get_different_blocks_and_keep_them() {
        let t = tempfile::tempdir().expect("a folder");
        let (a, b, locks) = (t.path().join("a"), t.path().join("b"), t.path().join("locks"));
        fs::create_dir(&a).and_then(|()| fs::create_dir(&b)).expect("folders");
        let routed: Ipv4Net = "10.201.4.0/22".parse().expect("a block");
        let one = NetBlock::take_in(&a, &locks, &[routed]).expect("a block");
        let two = NetBlock::take_in(&b, &locks, &[routed]).expect("a block");
        assert_eq!(
            (one.block().to_string(), two.block().to_string()),
            ("10.202.0.0/16".into(), "10.203.0.0/16".into())
        );
        drop((one, two));
        let own: Ipv4Net = "10.203.0.0/30".parse().expect("a block");
        let again = NetBlock::take_in(&b, &locks, &[own]).expect("a block");
        assert_eq!(again.block().to_string(), "10.203.0.0/16", "its own machines do not drive it away");
    }

    #[test]
    fn a_block_of_the_operators_choice_is_taken_unless_the_host_routes_it() {
        let t = tempfile::tempdir().expect("a folder");
        let (a, b, locks) = (t.path().join("a"), t.path().join("b"), t.path().join("locks"));
        fs::create_dir(&a).and_then(|()| fs::create_dir(&b)).expect("folders");
        let given: Ipv4Net = "10.99.0.0/24".parse().expect("a block");
        let text = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\n\
                    mb100-0\t0000630A\t00000000\t0001\t0\t0\t0\tFCFFFFFF\t0\n";
        let routes = routes_of(&without_ours(text, Some(100)));
        let one = NetBlock::take_given_in(&a, &locks, given, &routes).expect("its own links do not drive it away");
        let two =
            NetBlock::take_given_in(&b, &locks, "10.98.0.0/24".parse().expect("a block"), &routes).expect("taken");
        assert_eq!((one.block(), one.instance()), (given, "100".into()));
        assert_eq!(two.instance(), "101");
        assert!(NetBlock::take_given_in(&b, &locks, given, &routes_of(text)).is_err(), "another service's machines do");
        drop(two);
        let refused = NetBlock::take_given_in(&b, &locks, given, &["10.0.0.0/8".parse().expect("a block")]);
        assert!(refused.expect_err("refused").to_string().contains("10.0.0.0/8"));
    }

    #[test]
    fn the_hosts_routes_are_read() {
        let text = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\n\
                    eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\neth0\t0004C90A\t00000000\t0001\t0\t0\t0\t00FCFFFF\t0\n";
        assert_eq!(routes_of(text), ["10.201.4.0/22".parse::<Ipv4Net>().expect("a block")]);
    }
}
