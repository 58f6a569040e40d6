//! The network of machines: what this host can give and enforce, found out once by trying, and each machine's seat.

use std::path::Path;
use std::sync::Arc;

use ipnet::Ipv4Net;
use mainbrella_net::namespace::Namespace;
use mainbrella_net::resolve::{Host, Outside};
use mainbrella_net::{NetError, Seat, SeatOrder, Uplink, UplinkConfig, tap};

use super::block::{self, NetBlock};
use super::boot::blocking;
use super::vmm::chain;
use crate::driver::EgressOrder;
use crate::error::DriverError;

/// How machines get a network.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum NetworkChoice {
    /// What the host can do.
    #[default]
    Auto,
    /// None.
    Off,
    /// What the host can do, with addresses from this block, which nothing else on the host may use.
    Block(Ipv4Net),
}

/// Whether this host can give machines a network: each thing they need, and what stands in its way. Tried in a namespace
/// that is gone afterwards; for `doctor`. Blocks for some milliseconds.
#[must_use]
pub fn trial() -> Vec<(&'static str, Result<(), String>)> {
    let seat = seat_trial().map_err(|e| chain(&e));
    let uplink = Namespace::new().and_then(|host| {
        let config = UplinkConfig { instance: "trial".to_owned(), block: block::first() };
        host.run(|| Uplink::open(config).map(drop))
    });
    vec![("network card and rules", seat), ("way to the internet", uplink.map_err(|e| chain(&e)))]
}

/// Makes what every machine needs, and lets go of it.
fn seat_trial() -> Result<(), NetError> {
    let namespace = Namespace::new()?;
    let tap = namespace.run(|| tap::open().map_err(|e| NetError::Io("making a tap", e)))?;
    Seat::prepare(&namespace)?;
    drop(tap);
    Ok(())
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
        if let Err(e) = seat_trial() {
            found.missing.push(("network", chain(&e)));
            return found;
        }
        found.cards = true;
        let taken = match choice {
            NetworkChoice::Block(given) => NetBlock::take_given(data_dir, *given),
            _ => NetBlock::take(data_dir),
        };
        let block = match taken {
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
    pub(super) async fn attach(&self, pid: i32, egress: &EgressOrder) -> Result<Option<Seat>, DriverError> {
        if !self.cards {
            if egress.policy.leads_out() {
                return Err(DriverError::Unsupported("this host gives machines no network".to_owned()));
            }
            return Ok(None);
        }
        let stage = |detail| DriverError::Stage { stage: "attaching the machine's network", detail };
        let namespace = Namespace::of_process(pid).map_err(|e| stage(e.to_string()))?;
        let (uplink, outside) = (self.uplink.clone(), self.outside.clone());
        let (log, secrets) = (egress.log.clone(), egress.secrets.clone());
        let order = SeatOrder { namespace, uplink, outside, log, secrets };
        Seat::attach(order, egress.policy.clone())
            .await
            .map(Some)
            .map_err(|e| refused("attaching the machine's network", &e))
    }

    /// Takes the host's side away. For the end of the service when no machine is left.
    pub(super) fn close(&self) {
        if let Some(uplink) = &self.uplink
            && let Err(e) = uplink.close()
        {
            tracing::warn!(error = %chain(&e), "the rules of this service stay loaded");
        }
    }
}

/// Why a policy is not in force.
pub(super) fn refused(stage: &'static str, e: &NetError) -> DriverError {
    match e {
        NetError::Exhausted(count) => DriverError::Exhausted(format!(
            "this service has addresses for {count} machines with open internet access at once, and all are taken; stop or \
             pause one, use an allow-list, which needs none, or give the service a larger machine-network"
        )),
        e => DriverError::Stage { stage, detail: chain(e) },
    }
}
