//! Attaching a seat: rules first, then links, then listeners.

use std::fs;
use std::sync::Arc;

use mainbrella_types::egress::{GATEWAY_ADDRESS, GUEST_PREFIX};
use mainbrella_types::{EgressPolicy, Target};
use tokio_util::task::AbortOnDropHandle;

use crate::addresses::Address;
use crate::error::{NetError, io_error};
use crate::events::EgressLog;
use crate::explain::{Explanation, explain};
use crate::gateway::Gateway;
use crate::namespace::Namespace;
use crate::resolve::Outside;
use crate::secrets::SeatSecrets;
use crate::told::{self, Told};
use crate::uplink::Uplink;
use crate::{link, nft, rules, tap};

/// What a seat needs.
#[derive(Clone)]
pub struct SeatOrder {
    /// Where its tap is.
    pub namespace: Namespace,
    /// The host's side; `None`: `open` is refused.
    pub uplink: Option<Arc<Uplink>>,
    /// How the gateway reaches the world.
    pub outside: Arc<dyn Outside>,
    /// Where denials go.
    pub log: Arc<EgressLog>,
    /// What the gateway adds to requests.
    pub secrets: Arc<SeatSecrets>,
}

/// An attached seat. Dropping it ends its listeners; links and rules end with the namespace.
pub struct Seat {
    order: SeatOrder,
    policy: EgressPolicy,
    gateway: Option<Gateway>,
    told: Option<Told>,
    /// Those of its link out, while it has one.
    address: Option<Address>,
    /// Whether the policy is in force; otherwise nothing is let through.
    enforced: bool,
}

/// The policy of a seat at one moment.
pub struct SeatView {
    policy: Option<EgressPolicy>,
    outside: Arc<dyn Outside>,
}

impl SeatView {
    /// Says what would become of a connection.
    pub async fn explain(&self, target: &Target<'_>, port: u16) -> Explanation {
        match &self.policy {
            Some(policy) => explain(policy, target, port, &*self.outside).await,
            None => Explanation::closed(),
        }
    }
}

impl std::fmt::Debug for Seat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seat").field("address", &self.address).field("policy", &self.policy).finish_non_exhaustive()
    }
}

impl Seat {
    /// Loads the rules of a new seat and brings its link up, under `off`. Blocks for some milliseconds.
    ///
    /// # Errors
    /// When something is refused. The link is down then.
    pub fn prepare(namespace: &Namespace) -> Result<(), NetError> {
        namespace.run_async(|| async {
            // Whatever the host has set for new namespaces: nothing is forwarded, and there is no IPv6.
            fs::write("/proc/sys/net/ipv4/ip_forward", "0").map_err(io_error("turning forwarding off"))?;
            for which in ["all", "default"] {
                // A kernel without IPv6 has no such file, and no IPv6.
                let _ = fs::write(format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6"), "1");
            }
            nft::load(&rules::seat())?;
            let netlink = link::netlink()?;
            let tap = link::index(&netlink, tap::NAME).await?.ok_or_else(missing)?;
            link::set_mac(&netlink, tap, tap::GATEWAY_MAC).await?;
            link::address(&netlink, tap, GATEWAY_ADDRESS, GUEST_PREFIX).await?;
            link::up(&netlink, tap).await?;
            let lo = link::index(&netlink, "lo").await?.ok_or_else(missing)?;
            link::up(&netlink, lo).await
        })
    }

    /// Puts a prepared seat under `policy`. Also for a seat of a machine that was found after a restart of the service.
    ///
    /// # Errors
    /// When something is refused. The seat is `off` then.
    pub async fn attach(order: SeatOrder, policy: EgressPolicy) -> Result<Self, NetError> {
        let mut seat =
            Self { order, policy: EgressPolicy::Off, gateway: None, told: None, address: None, enforced: false };
        seat.enforce(&policy).await?;
        seat.policy = policy;
        Ok(seat)
    }

    /// Changes the policy. From `off` there is no change. Connections made under the former policy end.
    ///
    /// # Errors
    /// When it is not allowed, which changes nothing, or when something is refused; nothing is let through then until it
    /// is changed again.
    pub async fn change(&mut self, policy: EgressPolicy) -> Result<(), NetError> {
        if !self.policy.may_become(&policy) {
            return Err(NetError::Config("a machine without a network never gets one".to_owned()));
        }
        self.enforce(&policy).await?;
        self.policy = policy;
        Ok(())
    }

    /// What answers questions about the policy in force now.
    #[must_use]
    pub fn view(&self) -> SeatView {
        SeatView { policy: self.enforced.then(|| self.policy.clone()), outside: self.order.outside.clone() }
    }

    /// Ends every listener and connection of the seat. The link out stays until the namespace ends: a service that goes
    /// away leaves its machines' connections alone.
    pub async fn close(mut self) {
        if let Some(gateway) = self.gateway.take() {
            gateway.stop().await;
        }
        self.deafen().await;
    }

    /// The policy in force.
    #[must_use]
    pub const fn policy(&self) -> &EgressPolicy {
        &self.policy
    }

    /// What was denied.
    #[must_use]
    pub fn log(&self) -> Arc<EgressLog> {
        self.order.log.clone()
    }

    /// The namespace.
    #[must_use]
    pub fn namespace(&self) -> &Namespace {
        &self.order.namespace
    }

    async fn enforce(&mut self, policy: &EgressPolicy) -> Result<(), NetError> {
        if let Some(gateway) = self.gateway.take() {
            gateway.stop().await;
        }
        self.deafen().await;
        self.enforced = false;
        let done = self.set(policy).await;
        self.enforced = done.is_ok();
        if done.is_err()
            && let Err(e) = self.way_out(false).await
        {
            tracing::error!(error = %e, "a seat could not be closed");
        }
        done
    }

    /// Ends the listener for denied packets, and waits until its place is free.
    async fn deafen(&mut self) {
        if let Some(task) = self.told.take() {
            let task = AbortOnDropHandle::detach(task);
            task.abort();
            // It was aborted: there is no other outcome.
            let _ = task.await;
        }
    }

    async fn set(&mut self, policy: &EgressPolicy) -> Result<(), NetError> {
        match told::listen(&self.order.namespace, policy, self.order.log.clone()) {
            Ok(told) => self.told = Some(told),
            // Nothing is let through for it; only what the rules deny is not told.
            Err(e) => tracing::warn!(error = %e, "denied packets of a machine are not told"),
        }
        let open = *policy == EgressPolicy::Open;
        self.way_out(open).await?;
        if *policy != EgressPolicy::Off {
            let order = self.order.clone();
            let (outside, log, secrets) = (order.outside, order.log, order.secrets);
            self.gateway = Some(Gateway::start(&order.namespace, policy.clone(), outside, log, secrets)?);
        }
        Ok(())
    }

    /// Makes the link that leads out, or takes it away.
    async fn way_out(&mut self, open: bool) -> Result<(), NetError> {
        // It blocks: off the runtime's workers.
        let (order, address) = (self.order.clone(), self.address.take());
        let done =
            tokio::task::spawn_blocking(
                move || if open { open_way(&order, address) } else { close_way(&order, address) },
            );
        self.address = done.await.map_err(|e| NetError::Io("a thread", std::io::Error::other(e)))??;
        Ok(())
    }
}

fn missing() -> NetError {
    NetError::Io("looking for a link", std::io::ErrorKind::NotFound.into())
}

/// Takes the link out away, then gives its addresses back.
fn close_way(order: &SeatOrder, address: Option<Address>) -> Result<Option<Address>, NetError> {
    order.namespace.run_async(|| async {
        let netlink = link::netlink()?;
        fs::write("/proc/sys/net/ipv4/ip_forward", "0").map_err(io_error("turning forwarding off"))?;
        match link::index(&netlink, rules::OUT).await? {
            Some(index) => link::remove(&netlink, index).await,
            None => Ok(()),
        }
    })?;
    drop(address);
    Ok(None)
}

/// Makes the link out, unless it is there since before a restart of the service.
fn open_way(order: &SeatOrder, address: Option<Address>) -> Result<Option<Address>, NetError> {
    let host = Namespace::at(std::path::Path::new("/proc/thread-self/ns/net"))
        .map_err(io_error("opening the host's network namespace"))?;
    let no_way = || NetError::Config("this host cannot give machines a way out".to_owned());
    let up = order.uplink.as_ref().ok_or_else(no_way)?;
    order.namespace.run_async(|| async {
        let netlink = link::netlink()?;
        if let Some(index) = link::index(&netlink, rules::OUT).await? {
            let known = match (address, link::address_of(&netlink, index).await?) {
                (Some(address), _) => Some(address),
                (None, found) => found.and_then(|seat_side| up.retake(seat_side)),
            };
            if known.is_some() {
                return Ok(known);
            }
            // The block was another one when it was made.
            link::remove(&netlink, index).await?;
        }
        let address = host.run_async(|| async {
            let netlink = link::netlink()?;
            let named = |number| {
                let (netlink, name) = (netlink.clone(), up.link(number));
                async move { link::index(&netlink, &name).await }
            };
            let (address, left) = up.addresses().take(named).await?;
            // A former machine's end may outlast it for a moment: its namespace lives until its last connection is gone.
            if let Some(left) = left {
                link::remove(&netlink, left).await?;
            }
            Ok(address)
        })?;
        let name = up.link(address.number);
        let pair = rules::pair(up.block(), address.number);
        let (host_side, seat_side) = pair.ok_or_else(|| NetError::Config("not of the network block".to_owned()))?;
        link::pair(&netlink, rules::OUT, &name, &host).await?;
        host.run_async(|| async {
            let netlink = link::netlink()?;
            let index = link::index(&netlink, &name).await?.ok_or_else(missing)?;
            // Only this link: nothing on it is taken from the host's own settings.
            let _ = fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
            link::address(&netlink, index, host_side, 30).await?;
            link::up(&netlink, index).await
        })?;
        let index = link::index(&netlink, rules::OUT).await?.ok_or_else(missing)?;
        link::address(&netlink, index, seat_side, 30).await?;
        link::up(&netlink, index).await?;
        link::default_route(&netlink, host_side).await?;
        fs::write("/proc/sys/net/ipv4/ip_forward", "1").map_err(io_error("turning forwarding on"))?;
        Ok(Some(address))
    })
}
