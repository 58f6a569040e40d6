//! The way to a machine's guest agent: dialled when needed, dialled again when it broke.

use std::sync::Arc;
use std::time::Duration;

use mainbrella_guest_protocol::limits::{HOOK_NAME_MAX, HOOKS_MAX};
use mainbrella_guest_protocol::{GuestClient, GuestError, LinkOptions, PROTOCOL_VERSION, connect, pb};
use mainbrella_types::{ErrorCode, GenerationKey};
use tokio::sync::{Mutex, watch};
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
    /// What runs; none while nothing does: before the guest is put right for the first time, and while it is paused.
    instance: watch::Sender<Option<Arc<dyn Instance>>>,
    key: GenerationKey,
    /// Who the guest is, for one that is found frozen.
    identity: Identity,
    current: Mutex<Option<GuestClient>>,
}

impl Link {
    /// A link to a machine of which nothing runs yet.
    pub(crate) fn new(identity: Identity) -> Self {
        Self { instance: watch::Sender::new(None), key: identity.key, identity, current: Mutex::new(None) }
    }

    /// What runs, if anything does.
    pub(crate) fn instance(&self) -> Option<Arc<dyn Instance>> {
        self.instance.borrow().clone()
    }

    /// The live connection; a new one if the last has ended. Callers wait for one dial together, and while the machine is
    /// paused for its return: who must not wait that long does not get past the gate.
    pub(crate) async fn client(&self) -> Result<GuestClient, EngineError> {
        let mut runs = self.instance.subscribe();
        loop {
            // The sender is this link's own.
            let _ = runs.wait_for(Option::is_some).await;
            let mut current = self.current.lock().await;
            if let Some(client) = current.as_ref().filter(|c| !c.is_closed()) {
                return Ok(client.clone());
            }
            *current = None;
            // It may have been paused while the lock was waited for.
            let Some(instance) = self.instance() else { continue };
            let reached = timeout(DIAL_DEADLINE, self.reach(&*instance)).await;
            let client = reached.map_err(|_| silent("it did not answer in time"))??;
            *current = Some(client.clone());
            return Ok(client);
        }
    }

    /// Ends the connection; there is none until the link is woken or the guest introduced again.
    pub(crate) async fn rest(&self) {
        self.instance.send_replace(None);
        self.close().await;
    }

    /// There may be connections to `instance`.
    pub(crate) fn wake(&self, instance: Arc<dyn Instance>) {
        self.instance.send_replace(Some(instance));
    }

    /// A connection on which this machine's agent has answered.
    async fn reach(&self, instance: &dyn Instance) -> Result<GuestClient, EngineError> {
        loop {
            let client = attach(instance).await?;
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
            if answer.view().frozen {
                // A service that died while it copied this machine left it so.
                tracing::warn!(machine = %self.key, "a guest was found frozen; it is put right");
                put_right(&client, &self.identity, false).await?;
            }
            return Ok(client);
        }
    }

    /// Attaches to what was just restored and puts the guest right: clock, entropy, names, environment, thaw. Only then others
    /// can reach it.
    pub(crate) async fn introduce(&self, instance: Arc<dyn Instance>, limit: Duration) -> Result<(), EngineError> {
        self.attach_and_put_right(instance, limit, None, false).await.map(drop)
    }

    /// As [`Self::introduce`], for what was another generation's until now: before any of its programs goes on, the guest believes the
    /// authority of `trust`, and programs with random numbers of their own are told to draw others.
    pub(crate) async fn introduce_anew(
        &self,
        instance: Arc<dyn Instance>,
        limit: Duration,
        trust: Option<pb::TrustRequest>,
    ) -> Result<Reseeded, EngineError> {
        self.attach_and_put_right(instance, limit, trust, true).await
    }

    async fn attach_and_put_right(
        &self,
        instance: Arc<dyn Instance>,
        limit: Duration,
        trust: Option<pb::TrustRequest>,
        reseed: bool,
    ) -> Result<Reseeded, EngineError> {
        let mut current = self.current.lock().await;
        let client = timeout(limit, async {
            let client = answering(&*instance, &self.key).await?;
            if let Some(trust) = trust {
                let told = client.rpc().trust(trust).await;
                told.map_err(|e| silent(&GuestError::from_connect(&e).to_string()))?;
            }
            let reseeded = put_right(&client, &self.identity, reseed).await?;
            Ok::<_, EngineError>((client, reseeded))
        })
        .await
        .map_err(|_| silent("it did not answer after its restore"))??;
        let (client, reseeded) = client;
        *current = Some(client);
        self.wake(instance);
        Ok(reseeded)
    }

    /// Ends the connection; running calls fail.
    pub(crate) async fn close(&self) {
        if let Some(client) = self.current.lock().await.take() {
            client.close();
        }
    }
}

/// What was done for random numbers in a machine that became another generation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reseeded {
    /// The kernel's generator was seeded, before any process went on.
    pub kernel: bool,
    /// The hooks of the machine's owner that were run, by name.
    pub hooks: Vec<HookRun>,
    /// Processes that had registered.
    pub registered: u32,
    /// Those that answered that they seeded their generators anew.
    pub acknowledged: u32,
}

/// How a reseed hook ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HookRun {
    /// Its name: printable ASCII.
    pub name: String,
    /// Its exit code, 128 and the signal for one that a signal ended; `None`: it could not be started.
    pub exit_code: Option<i32>,
    /// It was ended because it took too long.
    pub timed_out: bool,
}

/// What a guest says of it, within bounds.
fn reseeded(reply: &pb::ConfigureResponse) -> Reseeded {
    let hook = |run: &pb::HookRun| HookRun {
        name: run.name.chars().filter(char::is_ascii_graphic).take(HOOK_NAME_MAX).collect(),
        exit_code: (!run.not_started).then_some(run.exit_code),
        timed_out: run.timed_out,
    };
    Reseeded {
        kernel: reply.done.iter().any(|done| done == "entropy"),
        hooks: reply.hooks.iter().take(HOOKS_MAX).map(hook).collect(),
        registered: reply.registered,
        acknowledged: reply.acknowledged.min(reply.registered),
    }
}

/// Puts a guest right: clock, entropy, names, environment, thaw.
async fn put_right(client: &GuestClient, identity: &Identity, reseed: bool) -> Result<Reseeded, EngineError> {
    let mut entropy = [0u8; 64];
    getrandom::fill(&mut entropy)
        .map_err(|e| EngineError::new(ErrorCode::Internal, "the host gave no randomness").because(e.to_string()))?;
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let request = pb::ConfigureRequest {
        generation: identity.key.to_string(),
        clock_realtime_ns: i64::try_from(since_epoch.as_nanos()).unwrap_or(i64::MAX),
        entropy: entropy.to_vec(),
        hostname: identity.hostname.clone(),
        machine_id: identity.key.to_string(),
        env: identity.env.iter().map(|(k, v)| (k.clone(), v.clone())).collect(),
        reseed,
        ..Default::default()
    };
    let reply = client.rpc().configure(request).await;
    let reply = reply.map_err(|e| silent(&GuestError::from_connect(&e).to_string()))?.into_owned();
    // A machine with a stale clock, the template's random numbers or frozen processes is not handed out.
    if let Some(problem) = reply.problems.first() {
        return Err(EngineError::new(ErrorCode::CreateFailed, "the machine could not be put right after its restore")
            .because(format!("{}: {}", problem.what, problem.why)));
    }
    Ok(reseeded(&reply))
}

/// A connection on which the agent has answered, whoever it takes itself for. One that stands still from its beginning is dialled
/// again.
async fn answering(instance: &dyn Instance, key: &GenerationKey) -> Result<GuestClient, EngineError> {
    loop {
        let client = attach(instance).await?;
        let hello = pb::HelloRequest { protocol_version: PROTOCOL_VERSION, ..Default::default() };
        match timeout(HELLO_PATIENCE, client.rpc().hello(hello)).await {
            Ok(Ok(_)) => return Ok(client),
            Ok(Err(e)) => return Err(silent(&GuestError::from_connect(&e).to_string())),
            Err(_) => {
                tracing::warn!(machine = %key, "a new connection to the guest agent stands still; dialling again");
                client.close();
            }
        }
    }
}

async fn attach(instance: &dyn Instance) -> Result<GuestClient, EngineError> {
    // Whatever is in the way, it is this guest that is out of reach; the caller may be any operation.
    let stream = instance.dial().await.map_err(|e| {
        let e = EngineError::from(e);
        silent(e.internal().unwrap_or(e.message()))
    })?;
    let options = LinkOptions { deadline: DIAL_DEADLINE, ..LinkOptions::default() };
    connect(stream, options).await.map_err(|e| silent(&e.to_string()))
}

/// The guest did not do its part; `why` is internal.
pub(crate) fn silent(why: &str) -> EngineError {
    EngineError::new(ErrorCode::GuestUnavailable, "the machine's guest agent did not answer").because(why)
}
