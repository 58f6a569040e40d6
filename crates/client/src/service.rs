//! The service itself: health, capabilities, templates, keys.

use std::time::Duration;

use reqwest::Method;

use mainbrella_api::{Capabilities, CreateKey, DiskReport, Health, KeyList, NewKey, TemplateList};

use crate::error::ClientError;
use crate::transport::{Client, with_json};

impl Client {
    /// Whether the service answers. Needs no key.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn health(&self) -> Result<Health, ClientError> {
        self.json(self.request(Method::GET, self.endpoint(&["healthz"], [])), Duration::ZERO).await
    }

    /// What the service can do on its host.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn capabilities(&self) -> Result<Capabilities, ClientError> {
        self.json(self.request(Method::GET, self.endpoint(&["v1", "capabilities"], [])), Duration::ZERO).await
    }

    /// The templates that are ready.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn templates(&self) -> Result<TemplateList, ClientError> {
        self.json(self.request(Method::GET, self.endpoint(&["v1", "templates"], [])), Duration::ZERO).await
    }

    /// What takes room on the host's disk. Needs the role admin.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn disk(&self) -> Result<DiskReport, ClientError> {
        self.json(self.request(Method::GET, self.endpoint(&["v1", "disk"], [])), Duration::ZERO).await
    }

    /// Makes a key. Its secret is in this answer and never again.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn create_key(&self, body: &CreateKey) -> Result<NewKey, ClientError> {
        let request = self.request(Method::POST, self.endpoint(&["v1", "keys"], []));
        self.json(with_json(request, body), Duration::ZERO).await
    }

    /// The keys of the project.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn keys(&self) -> Result<KeyList, ClientError> {
        self.json(self.request(Method::GET, self.endpoint(&["v1", "keys"], [])), Duration::ZERO).await
    }

    /// Revokes a key.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn revoke_key(&self, id: &str) -> Result<(), ClientError> {
        let request = self.request(Method::DELETE, self.endpoint(&["v1", "keys", id], []));
        self.send(request.timeout(self.answer_timeout())).await.map(drop)
    }
}
