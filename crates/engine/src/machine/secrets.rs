//! Secrets that stay outside a machine: put in force in its gateway, and their authority believed inside.

use std::sync::Arc;

use mainbrella_guest_protocol::{GuestError, pb};
use mainbrella_net::secrets::SUBJECT_HASH;
use mainbrella_types::ErrorCode;
use tokio::sync::OwnedMutexGuard;

use crate::error::EngineError;
use crate::journal::KeptSecrets;
use crate::machine::gate::Pass;
use crate::machine::handle::MachineHandle;
use crate::machine::link::silent;

/// The right to change the secrets of a machine: what is on record and what is in force change together, one change after
/// the other.
pub struct SecretsTurn {
    machine: MachineHandle,
    /// Held from the check on, so that the machine goes on running.
    pass: Option<Pass>,
    _turn: OwnedMutexGuard<()>,
}

impl MachineHandle {
    /// Waits until nobody else changes the machine's secrets.
    pub async fn secrets_turn(&self) -> SecretsTurn {
        let turn = Arc::clone(&self.shared.secrets).lock_owned().await;
        SecretsTurn { machine: self.clone(), pass: None, _turn: turn }
    }
}

/// What has a guest believe an authority.
pub(super) fn trust(pem: &str) -> pb::TrustRequest {
    pb::TrustRequest {
        certificate: pem.as_bytes().to_vec(),
        subject_hash: SUBJECT_HASH.to_owned(),
        ..Default::default()
    }
}

impl SecretsTurn {
    /// Whether the machine's gateway can add anything.
    ///
    /// # Errors
    /// `egress_locked` when it has no network, `unsupported` when this host has no gateway; when it does not run.
    pub async fn check(&mut self) -> Result<(), EngineError> {
        self.pass = Some(self.machine.enter().await?);
        let instance = self.machine.link()?.instance().ok_or_else(|| self.machine.over())?;
        if !self.machine.record().spec.egress.leads_out() {
            let message = "the machine has no internet, so there is nothing to add a secret to";
            return Err(EngineError::new(ErrorCode::EgressLocked, message));
        }
        if instance.network().is_none() {
            return Err(EngineError::new(ErrorCode::Unsupported, "this host has no gateway that could add secrets"));
        }
        Ok(())
    }

    /// Takes all of them out of force: none is on record.
    pub fn clear(self) {
        self.machine.shared.shelf.secrets().clear();
    }

    /// Puts what is on record in force, whatever the guest does: requests that begin from now on get it, and nothing else.
    /// `believed`: has the guest believe the authority, too, as is needed once before its programs can use what is added.
    ///
    /// # Errors
    /// When the machine does not run, or its guest did not take the authority; it is in force all the same, and programs inside
    /// do not believe the host until this is repeated.
    pub async fn put_in_force(self, kept: KeptSecrets, believed: bool) -> Result<(), EngineError> {
        let machine = &self.machine;
        let request = trust(kept.authority.pem());
        machine.shared.shelf.secrets().replace(Arc::new(kept.authority), &kept.secrets);
        if !believed {
            return Ok(());
        }
        let _pass = machine.enter().await?;
        let link = machine.link()?;
        let told = async {
            let client = link.client().await?;
            client.rpc().trust(request).await.map(drop).map_err(|e| silent(&GuestError::from_connect(&e).to_string()))
        };
        machine.unless_gone(told).await
    }
}
