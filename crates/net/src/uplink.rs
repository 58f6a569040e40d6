//! The host's side of `open` seats: forwarding, translation, and the rules that keep them from anything but the public
//! internet. Loaded before any seat has a way out; if it does not load, `open` is not offered.

use std::fs::{self, DirBuilder, File};
use std::net::Ipv4Addr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::Arc;

use ipnet::Ipv4Net;

use crate::addresses::{Address, Addresses};
use crate::error::{NetError, io_error};
use crate::{nft, rules};

/// Settings of the host's side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UplinkConfig {
    /// Name of this service instance among others on the host, at most 6 letters and digits.
    pub instance: String,
    /// The block seats get their addresses from.
    pub block: Ipv4Net,
}

/// The host's side, in force.
#[derive(Debug)]
pub struct Uplink {
    config: UplinkConfig,
    addresses: Arc<Addresses>,
}

/// What names of our tables begin with.
const TABLE: &str = "mainbrella_";
const FORWARDING: &str = "/proc/sys/net/ipv4/ip_forward";
/// Held while forwarding and its guards are looked at and changed: services of one host share them.
const LOCK: &str = "/run/mainbrella/forwarding.lock";

/// Waits until no other service on this host changes forwarding.
fn alone() -> Result<File, NetError> {
    let made = || {
        let path = Path::new(LOCK);
        if let Some(folder) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        let file = File::options().create(true).truncate(false).write(true).open(path)?;
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)?;
        Ok(file)
    };
    made().map_err(io_error("waiting for other services on this host"))
}

impl Uplink {
    /// Loads the host's rules, in the namespace of the calling thread, then turns forwarding on.
    ///
    /// # Errors
    /// When a rule or setting is refused. Nothing is forwarded then.
    pub fn open(config: UplinkConfig) -> Result<Self, NetError> {
        let fine =
            (1..=6).contains(&config.instance.len()) && config.instance.bytes().all(|b| b.is_ascii_alphanumeric());
        if !fine || rules::capacity(config.block) == 0 {
            return Err(NetError::Config("the network block must be /30 or larger".to_owned()));
        }
        let addresses = Addresses::new(rules::capacity(config.block));
        let uplink = Self { config, addresses };
        let marker = uplink.table();
        let _alone = alone()?;
        let was_on = fs::read_to_string(FORWARDING).map_err(io_error("reading the forwarding setting"))?.trim() == "1";
        // An earlier start of ours, or another service of ours, may have turned it on: who came first does not matter, and
        // whoever goes last turns it off.
        let mut ours = nft::tables()?.into_iter().filter(|t| t.starts_with(TABLE));
        let guarded = !was_on || ours.any(|t| nft::has_guard(&t));
        nft::load(&rules::host(&marker, &uplink.prefix(), uplink.config.block, guarded))?;
        if !was_on {
            fs::write(FORWARDING, "1").map_err(io_error("turning forwarding on"))?;
        }
        Ok(uplink)
    }

    fn table(&self) -> String {
        format!("{TABLE}{}", self.config.instance)
    }

    /// What names of the host's ends begin with.
    #[must_use]
    pub fn prefix(&self) -> String {
        format!("mb{}-", self.config.instance)
    }

    /// Name of the host's end of the link of address number `number`.
    #[must_use]
    pub fn link(&self, number: u32) -> String {
        format!("{}{number:x}", self.prefix())
    }

    pub(crate) const fn addresses(&self) -> &Arc<Addresses> {
        &self.addresses
    }

    /// The number of a seat whose end of its link has this address. `None`: it is not of this block, or another seat's.
    pub(crate) fn retake(&self, seat_side: Ipv4Addr) -> Option<Address> {
        let number = u32::from(seat_side).checked_sub(u32::from(self.config.block.network()))? / 4;
        let (_, expected) = rules::pair(self.config.block, number)?;
        if expected == seat_side { self.addresses.retake(number) } else { None }
    }

    /// The block.
    #[must_use]
    pub const fn block(&self) -> Ipv4Net {
        self.config.block
    }

    /// Takes the rules away; for the end of the service when no machine is left. Forwarding is turned off again if it was
    /// turned on by a service of ours and no other one needs it.
    ///
    /// # Errors
    /// When the packet filter refuses.
    pub fn close(&self) -> Result<(), NetError> {
        let table = self.table();
        let _alone = alone()?;
        let others = nft::tables()?.into_iter().any(|t| t != table && t.starts_with(TABLE));
        if nft::has_guard(&table) && !others {
            fs::write(FORWARDING, "0").map_err(io_error("turning forwarding off"))?;
        }
        nft::load(&format!("table inet {table} {{}}\ndelete table inet {table}\n"))
    }
}
