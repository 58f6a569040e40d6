//! Secrets outside the guest.

use std::time::Duration;

use reqwest::Method;

use mainbrella_api::{Secret, SecretBody, SecretList, SecretRemoved};

use crate::error::ClientError;
use crate::machines::MachineRef;
use crate::transport::{Client, with_json};

impl Client {
    /// Puts a secret of a machine; one of the same name is replaced. Repeating it does no harm.
    ///
    /// # Errors
    /// [`ClientError`]. The value is in none of them.
    pub async fn set_secret(&self, machine: &MachineRef, name: &str, body: &SecretBody) -> Result<Secret, ClientError> {
        let request = self.request(Method::PUT, self.bound(machine, &["secrets", name]));
        self.json(with_json(request, body), Duration::ZERO).await
    }

    /// The secrets of a machine by name, without their values.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn secrets(&self, machine: &MachineRef) -> Result<SecretList, ClientError> {
        self.json(self.request(Method::GET, self.bound(machine, &["secrets"])), Duration::ZERO).await
    }

    /// Removes a secret. Repeating it does no harm; the answer says whether there was one.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn remove_secret(&self, machine: &MachineRef, name: &str) -> Result<SecretRemoved, ClientError> {
        let request = self.request(Method::DELETE, self.bound(machine, &["secrets", name]));
        self.json(request, Duration::ZERO).await
    }
}
