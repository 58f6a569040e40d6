//! The network of scripted machines: a policy that is kept, and a world in which every name has the same address.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use futures::future::BoxFuture;
use mainbrella_net::resolve::Outside;
use mainbrella_net::{Explanation, SeatSecrets, explain};
use mainbrella_types::{EgressPolicy, HostName, Target};
use tokio::net::TcpStream;

use super::strikes;
use crate::driver::{EgressOrder, MachineNetwork};
use crate::error::DriverError;

/// The address of every name.
const EVERYWHERE: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 34);

/// The network of one machine.
#[derive(Debug, Default)]
pub(super) struct FakeNetwork {
    /// What is in force; `None`: it could not be put in force.
    policy: Mutex<Option<EgressPolicy>>,
    secrets: Mutex<Arc<SeatSecrets>>,
    faults: Arc<AtomicU32>,
}

impl FakeNetwork {
    pub(super) fn new(faults: Arc<AtomicU32>) -> Self {
        Self { policy: Mutex::default(), secrets: Mutex::default(), faults }
    }

    /// Puts it under a policy.
    pub(super) fn enforce(&self, order: &EgressOrder) -> Result<(), DriverError> {
        *self.secrets.lock().unwrap_or_else(PoisonError::into_inner) = order.secrets.clone();
        let fault = strikes(&self.faults);
        let policy = (!fault).then(|| order.policy.clone());
        *self.policy.lock().unwrap_or_else(PoisonError::into_inner) = policy;
        if fault {
            return Err(DriverError::Stage { stage: "network", detail: "a fault was asked for".into() });
        }
        Ok(())
    }

    /// What would be added to requests.
    pub(super) fn secrets(&self) -> Arc<SeatSecrets> {
        self.secrets.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What is in force.
    pub(super) fn policy(&self) -> Option<EgressPolicy> {
        self.policy.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[async_trait]
impl MachineNetwork for FakeNetwork {
    async fn set_egress(&self, order: &EgressOrder) -> Result<(), DriverError> {
        self.enforce(order)
    }

    async fn explain(&self, target: &Target<'_>, port: u16) -> Explanation {
        match self.policy() {
            Some(policy) => explain(&policy, target, port, &World).await,
            None => Explanation::closed(),
        }
    }
}

struct World;

impl Outside for World {
    fn resolve<'a>(&'a self, _: &'a HostName) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async { Ok(vec![EVERYWHERE.into()]) })
    }
    fn connect(&self, _: SocketAddr) -> BoxFuture<'_, io::Result<TcpStream>> {
        Box::pin(async { Err(io::ErrorKind::Unsupported.into()) })
    }
    fn ask<'a>(&'a self, _: &'a [u8]) -> BoxFuture<'a, io::Result<Vec<u8>>> {
        Box::pin(async { Err(io::ErrorKind::Unsupported.into()) })
    }
}
