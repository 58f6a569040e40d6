//! Machines and commands.

use std::fmt;
use std::time::{Duration, Instant};

use reqwest::Method;

use mainbrella_api::machine::{CreateMachine, ExtendMachine, Machine, MachineList, StopResult};
use mainbrella_api::{CommandResult, ForkMachine, ForkResult, RunCommand, State, headers};
use mainbrella_types::limits;

use crate::error::ClientError;
use crate::transport::{Client, with_json};

/// How long a create may take beyond the usual wait: the first one of a size freezes it.
const CREATE: Duration = Duration::from_secs(240);
/// How long a stop may take beyond the usual wait.
const STOP: Duration = Duration::from_secs(120);
/// How long a pause or a return from it may take beyond the usual wait: memory is written and read.
const PAUSE: Duration = Duration::from_secs(360);
/// All attempts of a reconciled create together.
const RECONCILE: Duration = Duration::from_secs(600);
const ATTEMPTS: u32 = 5;
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

/// One generation of a machine, as the wire names it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MachineRef {
    /// The slot.
    pub id: String,
    /// When that generation was created, RFC 3339.
    pub created_at: String,
}

impl From<&Machine> for MachineRef {
    fn from(m: &Machine) -> Self {
        Self { id: m.id.clone(), created_at: m.created_at.clone() }
    }
}

impl fmt::Display for MachineRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.id, self.created_at)
    }
}

/// A created machine.
#[derive(Clone, Debug)]
pub struct Created {
    /// The machine.
    pub machine: Machine,
    /// An earlier request with this key had made it.
    pub replayed: bool,
}

/// Which machines to list.
#[derive(Clone, Debug, Default)]
pub struct ListFilter {
    /// Only those in this state.
    pub state: Option<State>,
    /// Only those with all of these labels.
    pub metadata: Vec<(String, String)>,
    /// Machines a page; the service's default when `None`.
    pub limit: Option<u32>,
}

impl Client {
    /// Creates a machine: one request, no repetition.
    ///
    /// # Errors
    /// [`ClientError`]. When it is ambiguous, send the same body with the same key again.
    pub async fn create(&self, body: &CreateMachine, idempotency_key: Option<&str>) -> Result<Created, ClientError> {
        let mut request =
            self.request(Method::POST, self.endpoint(&["v1", "machines"], [])).timeout(self.answer_timeout() + CREATE);
        if let Some(key) = idempotency_key {
            request = request.header(headers::IDEMPOTENCY_KEY, key);
        }
        let response = self.send(with_json(request, body)).await?;
        let replayed = response.headers().get(headers::IDEMPOTENCY_REPLAYED).is_some_and(|v| v == "true");
        Ok(Created { machine: self.parse(response).await?, replayed })
    }

    /// Creates a machine, repeating under one key while the outcome is open or the service is busy; bounded.
    ///
    /// # Errors
    /// The last failure. When an attempt was ambiguous the machine may exist: the same body and key find it.
    pub async fn create_or_reconcile(&self, body: &CreateMachine, key: &str) -> Result<Created, ClientError> {
        let end = Instant::now() + RECONCILE;
        let mut attempt = 0;
        loop {
            attempt += 1;
            let error = match self.create(body, Some(key)).await {
                Ok(created) => return Ok(created),
                Err(e) => e,
            };
            let asked = match &error {
                ClientError::Api(f) => f.retry_after,
                _ => None,
            };
            // A failed create is an outcome, not a doubt.
            let settled = error.code() == Some(mainbrella_types::ErrorCode::CreateFailed);
            let pause = asked.unwrap_or(Duration::from_millis(250) * 2u32.pow(attempt - 1));
            let again = !settled && (error.is_ambiguous() || error.is_retryable());
            if !again || attempt >= ATTEMPTS || pause > LONGEST_PAUSE || Instant::now() + pause > end {
                return Err(error);
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// One page of machines, newest first. `cursor`: the `next_cursor` of the page before.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn list(&self, filter: &ListFilter, cursor: Option<&str>) -> Result<MachineList, ClientError> {
        let limit = filter.limit.map(|n| n.to_string());
        let labels: Vec<(String, &str)> =
            filter.metadata.iter().map(|(k, v)| (format!("metadata.{k}"), v.as_str())).collect();
        let query = labels
            .iter()
            .map(|(k, v)| (k.as_str(), *v))
            .chain(filter.state.map(|s| ("state", s.as_str())))
            .chain(limit.as_deref().map(|n| ("limit", n)))
            .chain(cursor.map(|c| ("cursor", c)));
        let url = self.endpoint(&["v1", "machines"], query);
        self.json(self.request(Method::GET, url), Duration::ZERO).await
    }

    /// A machine in whatever state; without `created_at` the newest generation in the slot.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn machine(&self, id: &str, created_at: Option<&str>) -> Result<Machine, ClientError> {
        let url = self.endpoint(&["v1", "machines", id], created_at.map(|c| ("createdAt", c)));
        self.json(self.request(Method::GET, url), Duration::ZERO).await
    }

    /// Changes the lease.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn extend(&self, machine: &MachineRef, body: &ExtendMachine) -> Result<Machine, ClientError> {
        let url = self.bound(machine, &["extend"]);
        self.json(with_json(self.request(Method::POST, url), body), Duration::ZERO).await
    }

    /// Makes copies of a running machine. With a key it may be repeated.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn fork(
        &self,
        machine: &MachineRef,
        body: &ForkMachine,
        idempotency_key: Option<&str>,
    ) -> Result<ForkResult, ClientError> {
        let mut request = self.request(Method::POST, self.bound(machine, &["fork"]));
        if let Some(key) = idempotency_key {
            request = request.header(headers::IDEMPOTENCY_KEY, key);
        }
        self.json(with_json(request, body), PAUSE).await
    }

    /// Saves memory and disk of a machine and ends its processes. Idempotent.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn pause(&self, machine: &MachineRef) -> Result<Machine, ClientError> {
        self.json(self.request(Method::POST, self.bound(machine, &["pause"])), PAUSE).await
    }

    /// Brings a paused machine back. Idempotent.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn resume(&self, machine: &MachineRef) -> Result<Machine, ClientError> {
        self.json(self.request(Method::POST, self.bound(machine, &["resume"])), PAUSE).await
    }

    /// Stops exactly that generation. Idempotent.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn stop(&self, machine: &MachineRef) -> Result<StopResult, ClientError> {
        self.json(self.request(Method::POST, self.bound(machine, &["stop"])), STOP).await
    }

    /// Runs a command and waits for it. Never repeated.
    ///
    /// # Errors
    /// [`ClientError`]; after [`ClientError::StoppedWaiting`] the command may still be running.
    pub async fn run(&self, machine: &MachineRef, body: &RunCommand) -> Result<CommandResult, ClientError> {
        let own = Duration::from_millis(body.timeout_ms.unwrap_or(limits::COMMAND_TIMEOUT_DEFAULT_MS));
        let url = self.bound(machine, &["commands", "run"]);
        self.json(with_json(self.request(Method::POST, url), body), own).await
    }

    /// The URL of a verb on one generation.
    pub(crate) fn bound(&self, machine: &MachineRef, verb: &[&str]) -> url::Url {
        let segments: Vec<&str> = ["v1", "machines", &machine.id].into_iter().chain(verb.iter().copied()).collect();
        self.endpoint(&segments, [("createdAt", machine.created_at.as_str())])
    }
}
