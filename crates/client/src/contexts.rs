//! Code contexts.

use std::time::Duration;

use reqwest::Method;

use mainbrella_api::context::{CodeResult, Context, ContextList, CreateContext, RunCode};
use mainbrella_types::limits;

use crate::error::ClientError;
use crate::machines::MachineRef;
use crate::transport::{Client, with_json};

/// How long the start of a kernel may take beyond the usual wait: long under software emulation.
const START: Duration = Duration::from_secs(240);
/// How long a run may take beyond its time limit and the usual wait: it may have to wait for its turn.
const TURN: Duration = Duration::from_secs(60);

impl Client {
    /// Makes a context and waits until it takes code. Never repeated.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn create_context(&self, machine: &MachineRef, body: &CreateContext) -> Result<Context, ClientError> {
        let url = self.bound(machine, &["contexts"]);
        self.json(with_json(self.request(Method::POST, url), body), START).await
    }

    /// The contexts of a machine, oldest first.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn contexts(&self, machine: &MachineRef) -> Result<Vec<Context>, ClientError> {
        let url = self.bound(machine, &["contexts"]);
        Ok(self.json::<ContextList>(self.request(Method::GET, url), Duration::ZERO).await?.contexts)
    }

    /// A context.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn context(&self, machine: &MachineRef, id: &str) -> Result<Context, ClientError> {
        self.json(self.request(Method::GET, self.bound(machine, &["contexts", id])), Duration::ZERO).await
    }

    /// Ends a context.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn close_context(&self, machine: &MachineRef, id: &str) -> Result<(), ClientError> {
        let request = self.request(Method::DELETE, self.bound(machine, &["contexts", id]));
        self.send(request.timeout(self.answer_timeout())).await.map(drop)
    }

    /// Runs code and waits for its end. Never repeated. Dropping the future interrupts the code.
    ///
    /// # Errors
    /// [`ClientError`]; an exception of the code is a result.
    pub async fn run_code(&self, machine: &MachineRef, id: &str, body: &RunCode) -> Result<CodeResult, ClientError> {
        let own = Duration::from_millis(body.timeout_ms.unwrap_or(limits::CODE_TIMEOUT_DEFAULT_MS));
        let url = self.bound(machine, &["contexts", id, "run"]);
        self.json(with_json(self.request(Method::POST, url), body), own.saturating_add(TURN)).await
    }

    /// Interrupts the code that runs in a context.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn interrupt_context(&self, machine: &MachineRef, id: &str) -> Result<Context, ClientError> {
        let url = self.bound(machine, &["contexts", id, "interrupt"]);
        self.json(self.request(Method::POST, url), Duration::ZERO).await
    }

    /// Gives a context a new kernel.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn restart_context(&self, machine: &MachineRef, id: &str) -> Result<Context, ClientError> {
        let url = self.bound(machine, &["contexts", id, "restart"]);
        self.json(self.request(Method::POST, url), START).await
    }
}
