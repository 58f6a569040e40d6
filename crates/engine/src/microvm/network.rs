//! The network of machines: what this host can give and enforce, found out once by trying, and each machine's seat.

use std::path::Path;
use std::sync::Arc;

use mainbrella_net::namespace::Namespace;
use mainbrella_net::resolve::{Host, Outside};
use mainbrella_net::{Seat, SeatOrder, Uplink, UplinkConfig, rules, tap};
use mainbrella_types::EgressPolicy;

use super::block::NetBlock;
use super::boot::blocking;
use super::vmm::chain;
use crate::error::DriverError;

/// How machines get a network.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum NetworkChoice {
    /// What the host can do.
    #[default]
    Auto,
    /// None.
    Off,
}

/// What was found.
pub struct Network {
    cards: bool,
    uplink: Option<Arc<Uplink>>,
    outside: Arc<dyn Outside>,
    missing: Vec<(&'static str, String)>,
    _block: Option<NetBlock>,
}

impl Network {
    /// Tries what machines will need: a tap in a namespace with its rules, and the host's side. `walls`: VMMs get a network
    /// namespace of their own.
    pub(super) fn open(choice: &NetworkChoice, data_dir: &Path, walls: bool) -> Self {
        let mut found =
            Self { cards: false, uplink: None, outside: Arc::new(Host::default()), missing: Vec::new(), _block: None };
        if *choice == NetworkChoice::Off {
            found.missing.push(("network", "it is switched off in the configuration".to_owned()));
            return found;
        }
        if !walls || !rustix::process::geteuid().is_root() {
            found.missing.push(("network", "the service does not run as root".to_owned()));
            return found;
        }
        let tried = Namespace::new().and_then(|ns| {
            let tap = ns.run(|| tap::open().map_err(|e| mainbrella_net::NetError::Io("making a tap", e)))?;
            Seat::prepare(&ns)?;
            drop(tap);
            Ok(())
        });
        if let Err(e) = tried {
            found.missing.push(("network", chain(&e)));
            return found;
        }
        found.cards = true;
        let block = match NetBlock::take(data_dir) {
            Ok(block) => block,
            Err(e) => {
                found.missing.push(("a way out", format!("no free network block: {e}")));
                return found;
            }
        };
        match Uplink::open(UplinkConfig { instance: block.instance(), block: block.block() }) {
            Ok(uplink) => {
                tracing::info!(block = %block.block(), "machines can be given a way to the internet");
                found.uplink = Some(Arc::new(uplink));
                found._block = Some(block);
            }
            Err(e) => found.missing.push(("a way out", chain(&e))),
        }
        found
    }

    /// Whether machines have a network card.
    pub(super) fn has_cards(&self) -> bool {
        self.cards
    }

    /// Whether they can be given a way out.
    pub(super) fn leads_out(&self) -> bool {
        self.uplink.is_some()
    }

    /// What this host cannot do, each with the reason.
    pub(super) fn missing(&self) -> &[(&'static str, String)] {
        &self.missing
    }

    /// Loads the rules of a new VMM's seat. Its guest must not run yet.
    pub(super) async fn prepare(&self, pid: i32) -> Result<(), DriverError> {
        if !self.cards {
            return Ok(());
        }
        let stage = |detail| DriverError::Stage { stage: "preparing the machine's network", detail };
        blocking(move || {
            let namespace = Namespace::of_process(pid).map_err(|e| stage(e.to_string()))?;
            Seat::prepare(&namespace).map_err(|e| stage(chain(&e)))
        })
        .await
    }

    /// Puts the seat of a VMM under `policy`.
    pub(super) async fn attach(
        &self,
        pid: i32,
        index: Option<u32>,
        policy: EgressPolicy,
    ) -> Result<Option<Seat>, DriverError> {
        let Some(index) = index.filter(|_| self.cards) else {
            if policy.leads_out() {
                return Err(DriverError::Unsupported("this host gives machines no network".to_owned()));
            }
            return Ok(None);
        };
        let stage = |detail| DriverError::Stage { stage: "attaching the machine's network", detail };
        let namespace = Namespace::of_process(pid).map_err(|e| stage(e.to_string()))?;
        let order = SeatOrder { index, namespace, uplink: self.uplink.clone(), outside: self.outside.clone() };
        Seat::attach(order, policy).await.map(Some).map_err(|e| stage(chain(&e)))
    }

    /// Takes the host's side away. For the end of the service when no machine is left.
    pub(super) fn close(&self) {
        if let Some(uplink) = &self.uplink
            && let Err(e) = uplink.close()
        {
            tracing::warn!(error = %chain(&e), "the rules of this service stay loaded");
        }
    }

    /// Addresses a block has room for; for `doctor`.
    #[must_use]
    pub fn seats(&self) -> u32 {
        self.uplink.as_ref().map_or(0, |u| rules::capacity(u.block()))
    }
}
