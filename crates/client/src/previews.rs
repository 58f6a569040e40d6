//! Previews.

use std::time::Duration;

use reqwest::Method;

use mainbrella_api::{CreatePreview, Preview, PreviewList, RenewPreview, headers};

use crate::error::ClientError;
use crate::machines::MachineRef;
use crate::transport::{Client, with_json};

impl Client {
    /// Makes a port of a machine reachable: one request, no repetition. Its URLs are in this answer.
    ///
    /// # Errors
    /// [`ClientError`]. When it is ambiguous, send the same body with the same key again.
    pub async fn create_preview(
        &self,
        machine: &MachineRef,
        body: &CreatePreview,
        idempotency_key: &str,
    ) -> Result<Preview, ClientError> {
        let request = self.request(Method::POST, self.bound(machine, &["previews"]));
        let request = request.header(headers::IDEMPOTENCY_KEY, idempotency_key);
        self.json(with_json(request, body), Duration::ZERO).await
    }

    /// The active previews of a machine, without their URLs.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn previews(&self, machine: &MachineRef) -> Result<PreviewList, ClientError> {
        self.json(self.request(Method::GET, self.bound(machine, &["previews"])), Duration::ZERO).await
    }

    /// Moves the end of a preview.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn renew_preview(
        &self,
        machine: &MachineRef,
        id: &str,
        body: &RenewPreview,
    ) -> Result<Preview, ClientError> {
        let request = self.request(Method::POST, self.bound(machine, &["previews", id, "renew"]));
        self.json(with_json(request, body), Duration::ZERO).await
    }

    /// Ends a preview.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn revoke_preview(&self, machine: &MachineRef, id: &str) -> Result<(), ClientError> {
        let request = self.request(Method::DELETE, self.bound(machine, &["previews", id]));
        self.send(request.timeout(self.answer_timeout())).await.map(drop)
    }
}
