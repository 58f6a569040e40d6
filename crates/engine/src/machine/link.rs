//! The way to a machine's guest agent: dialled when needed, dialled again when it broke.

use std::sync::Arc;
use std::time::Duration;

use mainbrella_guest_protocol::{GuestClient, GuestError, LinkOptions, PROTOCOL_VERSION, connect, pb};
use mainbrella_types::{ErrorCode, GenerationKey};
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::driver::Instance;
use crate::error::EngineError;

/// Longest time to reach a guest that ran a moment ago.
const DIAL_DEADLINE: Duration = Duration::from_secs(20);
/// Longest time of a connection's first answer. What takes longer is given up and dialled anew: a connection that
/// stands still from its beginning does not come to life by waiting.
const HELLO_PATIENCE: Duration = Duration::from_secs(7);

/// What a guest is told after a restore.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) key: GenerationKey,
    pub(crate) hostname: String,
    pub(crate) env: std::collections::BTreeMap<String, String>,
}

/// The link of one machine. Shared by the actor and every operation.
pub(crate) struct Link {
    instance: Arc<dyn Instance>,
    key: GenerationKey,
    current: Mutex<Option<GuestClient>>,
}

impl Link {
    pub(crate) fn new(instance: Arc<dyn Instance>, key: GenerationKey) -> Self {
        Self { instance, key, current: Mutex::new(None) }
    }

    /// The machine.
    pub(crate) fn instance(&self) -> &dyn Instance {
        &*self.instance
    }

    /// The live connection; a new one if the last has ended. Callers wait for one dial together.
    pub(crate) async fn client(&self) -> Result<GuestClient, EngineError> {
        let mut current = self.current.lock().await;
        if let Some(client) = current.as_ref().filter(|c| !c.is_closed()) {
            return Ok(client.clone());
        }
        *current = None;
        let client = timeout(DIAL_DEADLINE, self.reach()).await.map_err(|_| silent("it did not answer in time"))??;
        *current = Some(client.clone());
        Ok(client)
    }

    /// A connection on which this machine's agent has answered.
    async fn reach(&self) -> Result<GuestClient, EngineError> {
        loop {
            let client = self.attach().await?;
            let hello = pb::HelloRequest { protocol_version: PROTOCOL_VERSION, ..Default::default() };
            let Ok(answer) = timeout(HELLO_PATIENCE, client.rpc().hello(hello)).await else {
                tracing::warn!(machine = %self.key, "a new connection to the guest agent stands still; dialling again");
                client.close();
                continue;
            };
            let answer = answer.map_err(|e| silent(&GuestError::from_connect(&e).to_string()))?;
            if answer.view().generation != self.key.to_string() {
                return Err(silent("another generation answered"));
            }
            return Ok(client);
        }
    }

    /// Attaches for the first time and puts the guest right: clock, entropy, names, environment, thaw.
    pub(crate) async fn introduce(&self, identity: &Identity, limit: Duration) -> Result<(), EngineError> {
        let mut current = self.current.lock().await;
        let client = timeout(limit, async {
            let client = self.attach().await?;
            let mut entropy = [0u8; 64];
            getrandom::fill(&mut entropy).map_err(|e| {
                EngineError::new(ErrorCode::Internal, "the host gave no randomness").because(e.to_string())
            })?;
            let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            let request = pb::ConfigureRequest {
                generation: identity.key.to_string(),
                clock_realtime_ns: i64::try_from(since_epoch.as_nanos()).unwrap_or(i64::MAX),
                entropy: entropy.to_vec(),
                hostname: identity.hostname.clone(),
                machine_id: identity.key.to_string(),
                env: identity.env.iter().map(|(k, v)| (k.clone(), v.clone())).collect(),
                ..Default::default()
            };
            let reply = client.rpc().configure(request).await;
            let reply = reply.map_err(|e| silent(&GuestError::from_connect(&e).to_string()))?.into_owned();
            // A machine with a stale clock, the template's random numbers or frozen processes is not handed out.
            if let Some(problem) = reply.problems.first() {
                return Err(EngineError::new(
                    ErrorCode::CreateFailed,
                    "the machine could not be put right after its restore",
                )
                .because(format!("{}: {}", problem.what, problem.why)));
            }
            Ok::<_, EngineError>(client)
        })
        .await
        .map_err(|_| silent("it did not answer after its restore"))??;
        *current = Some(client);
        Ok(())
    }

    async fn attach(&self) -> Result<GuestClient, EngineError> {
        // Whatever is in the way, it is this guest that is out of reach; the caller may be any operation.
        let stream = self.instance.dial().await.map_err(|e| {
            let e = EngineError::from(e);
            silent(e.internal().unwrap_or(e.message()))
        })?;
        let options = LinkOptions { deadline: DIAL_DEADLINE, ..LinkOptions::default() };
        connect(stream, options).await.map_err(|e| silent(&e.to_string()))
    }

    /// Ends the connection; running calls fail.
    pub(crate) async fn close(&self) {
        if let Some(client) = self.current.lock().await.take() {
            client.close();
        }
    }
}

/// The guest did not do its part; `why` is internal.
pub(crate) fn silent(why: &str) -> EngineError {
    EngineError::new(ErrorCode::GuestUnavailable, "the machine's guest agent did not answer").because(why)
}
