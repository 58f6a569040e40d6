//! What callers hold of a machine.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use mainbrella_net::Explanation;
use mainbrella_types::{
    EgressPolicy, ErrorCode, Failure, FailureKind, MachineRecord, MachineState, OnIdle, Target, limits,
};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::driver::{ForkOrder, Forked, SaveOrder, SaveReceipt};
use crate::error::EngineError;
use crate::machine::admission::{Admission, Request, admit};
use crate::machine::contexts::Contexts;
use crate::machine::files::{self, Hold};
use crate::machine::gate::{Gate, Pass};
use crate::machine::jobs::Shelf;
use crate::machine::link::{Identity, Link, Reseeded};

/// How long a call that lost its guest waits to learn whether the machine has ended.
pub(crate) const VERDICT_WAIT: Duration = Duration::from_secs(2);
/// How often a call has a machine brought back that is paused again before the call's turn comes.
const WAKE_TRIES: u32 = 3;
/// File operations that may wait for one of the four places.
const FILE_QUEUE_MAX: usize = 64;

/// Whether a stop is complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopOutcome {
    /// That generation has ended and nothing is left of it on the host.
    Stopped(MachineRecord),
    /// It is being removed; not all of it is confirmed gone yet. It is tried again until it is.
    Uncertain(MachineRecord),
}

/// A change of a lease. What is `None` stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseChange {
    /// The hard deadline becomes so many milliseconds from now, where that is later than it was.
    pub ttl_ms: Option<u64>,
    /// Another idle timeout, milliseconds.
    pub idle_timeout_ms: Option<u64>,
    /// What becomes of it when its idle timeout is over.
    pub on_idle: Option<OnIdle>,
    /// Whether it comes back by itself when it is paused. `None`: it does from when `on_idle` is to pause it.
    pub auto_resume: Option<bool>,
}

/// What the actor is asked.
pub(crate) enum Message {
    Extend {
        wish: LeaseChange,
        reply: oneshot::Sender<Result<MachineRecord, EngineError>>,
    },
    SetEgress {
        policy: EgressPolicy,
        reply: oneshot::Sender<Result<MachineRecord, EngineError>>,
    },
    Pause {
        reply: oneshot::Sender<Result<MachineRecord, EngineError>>,
    },
    Resume {
        reply: oneshot::Sender<Result<MachineRecord, EngineError>>,
    },
    /// As `Resume`, from a call that needs the machine to run and waits since `asked`.
    Wake {
        asked: Instant,
        reply: oneshot::Sender<Result<MachineRecord, EngineError>>,
    },
    Fork {
        children: Vec<ForkOrder>,
        reply: oneshot::Sender<Result<Forked, EngineError>>,
    },
    Save {
        order: SaveOrder,
        reply: oneshot::Sender<Result<SaveReceipt, EngineError>>,
    },
    Stop {
        reply: oneshot::Sender<Result<StopOutcome, EngineError>>,
    },
    /// The service ends; the machine stays.
    Detach,
}

/// A machine, as the rest of the service holds it. Cheap to clone; holding one keeps nothing alive.
#[derive(Clone)]
pub struct MachineHandle {
    pub(crate) shared: Arc<Shared>,
}

/// What actor and callers share.
pub(crate) struct Shared {
    pub(crate) messages: mpsc::Sender<Message>,
    pub(crate) record: watch::Receiver<MachineRecord>,
    pub(crate) gate: Gate,
    /// Set once the machine first runs.
    pub(crate) link: OnceLock<Arc<Link>>,
    /// Cancelled when the machine can be used no more.
    pub(crate) gone: CancellationToken,
    /// Cancelled when the service lets go of a machine that goes on.
    pub(crate) detached: CancellationToken,
    pub(crate) shelf: Arc<Shelf>,
    pub(crate) clock: Arc<dyn Clock>,
    /// What was done for its random numbers when it became this generation; unset for one that was found after a restart.
    pub(crate) reseeded: OnceLock<Reseeded>,
    /// Why creation failed, with the code it failed with.
    pub(crate) create_failure: OnceLock<(ErrorCode, String)>,
    pub(crate) commands: Arc<Semaphore>,
    pub(crate) files: Arc<Semaphore>,
    pub(crate) file_queue: Semaphore,
    pub(crate) watches: Arc<Semaphore>,
    pub(crate) contexts: Arc<Contexts>,
    pub(crate) ports: Arc<Semaphore>,
    /// Held while the machine's secrets change.
    pub(crate) secrets: Arc<tokio::sync::Mutex<()>>,
}

impl Shared {
    pub(crate) fn new(
        messages: mpsc::Sender<Message>,
        record: watch::Receiver<MachineRecord>,
        gate: Gate,
        shelf: Arc<Shelf>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let gone = CancellationToken::new();
        Self {
            messages,
            record,
            gate,
            link: OnceLock::new(),
            contexts: Arc::new(Contexts::new(&gone)),
            gone,
            detached: CancellationToken::new(),
            shelf,
            clock,
            reseeded: OnceLock::new(),
            create_failure: OnceLock::new(),
            commands: Arc::new(Semaphore::new(limits::COMMANDS_MAX)),
            files: Arc::new(Semaphore::new(limits::FILE_OPERATIONS_MAX)),
            file_queue: Semaphore::new(FILE_QUEUE_MAX),
            watches: Arc::new(Semaphore::new(limits::FILE_WATCHES_MAX)),
            ports: Arc::new(Semaphore::new(limits::PORT_CONNECTIONS_MAX)),
            secrets: Arc::default(),
        }
    }

    /// Lets callers in.
    pub(crate) fn open(&self, link: Arc<Link>) {
        let _ = self.link.set(link);
        self.gate.open();
    }

    /// The link; a new one to a machine of which nothing runs, where there was none.
    pub(crate) fn link_or_new(&self, identity: impl FnOnce() -> Identity) -> Arc<Link> {
        Arc::clone(self.link.get_or_init(|| Arc::new(Link::new(identity()))))
    }
}

/// Says that a machine is not running, and why.
#[must_use]
pub fn not_running(state: MachineState, ending: Option<&Failure>) -> EngineError {
    let message = match ending {
        Some(ending) => format!("the machine is {state}: {}", ending.message),
        None => format!("the machine is {state}"),
    };
    EngineError::new(ErrorCode::MachineNotRunning, message)
}

impl MachineHandle {
    /// The machine as last made durable.
    #[must_use]
    pub fn record(&self) -> MachineRecord {
        self.shared.record.borrow().clone()
    }

    /// What was done for its random numbers when it became this generation; `None` after a restart of the service.
    #[must_use]
    pub fn reseeded(&self) -> Option<&Reseeded> {
        self.shared.reseeded.get()
    }

    /// Follows the machine's record.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<MachineRecord> {
        self.shared.record.clone()
    }

    /// Waits until the machine runs, or has ended.
    ///
    /// # Errors
    /// Why it could not be made, or that it ended meanwhile.
    pub async fn ready(&self) -> Result<MachineRecord, EngineError> {
        let mut watch = self.watch();
        let record = watch.wait_for(|r| r.state != MachineState::Creating).await.map(|r| r.clone());
        let record = record.unwrap_or_else(|_| self.record());
        if record.state == MachineState::Running {
            return Ok(record);
        }
        if record.state == MachineState::Creating {
            return Err(EngineError::new(
                ErrorCode::ShuttingDown,
                "the service is going down; the machine will be finished later",
            ));
        }
        if let Some((code, message)) = self.shared.create_failure.get() {
            return Err(EngineError::new(*code, message.clone()));
        }
        match &record.ending {
            Some(e) if e.kind == FailureKind::CreateFailed => {
                Err(EngineError::new(ErrorCode::CreateFailed, e.message.clone()))
            }
            Some(e) if e.kind == FailureKind::HostFull => Err(EngineError::new(ErrorCode::HostFull, e.message.clone())),
            Some(e) if e.kind == FailureKind::SnapshotDamaged => {
                Err(EngineError::new(ErrorCode::SnapshotDamaged, e.message.clone()))
            }
            ending => Err(not_running(record.state, ending.as_ref())),
        }
    }

    /// Changes how long the machine lives, and what becomes of it when nobody uses it.
    ///
    /// # Errors
    /// `unsupported` and `invalid_request` where it is to be paused and cannot be, or has no idle timeout; when the machine has
    /// ended or the change could not be made durable.
    pub async fn extend(&self, wish: LeaseChange) -> Result<MachineRecord, EngineError> {
        let (reply, answer) = oneshot::channel();
        self.ask(Message::Extend { wish, reply }, answer).await
    }

    /// Puts the machine under another egress policy; connections made under the former one end. `off` is for ever.
    ///
    /// # Errors
    /// `egress_locked` when the machine has no network, `unsupported` when the host cannot enforce the policy; when it
    /// does not run, or the change could not be made durable. When it is durable and could not be put in force, the
    /// machine reaches nothing until it is set again.
    pub async fn set_egress(&self, policy: EgressPolicy) -> Result<MachineRecord, EngineError> {
        let _pass = self.enter().await?;
        let (reply, answer) = oneshot::channel();
        self.ask(Message::SetEgress { policy, reply }, answer).await
    }

    /// Says what would become of a connection from inside the machine, and why. Nothing is connected; a name that the
    /// policy allows is resolved by the host.
    ///
    /// # Errors
    /// When the machine does not run.
    pub async fn explain_egress(&self, target: &Target<'_>, port: u16) -> Result<Explanation, EngineError> {
        let _pass = self.enter().await?;
        let link = self.link()?;
        let policy = self.record().spec.egress;
        let instance = link.instance().ok_or_else(|| self.over())?;
        match instance.network() {
            Some(network) if policy.leads_out() => {
                self.unless_gone(async { Ok(network.explain(target, port).await) }).await
            }
            None if policy.leads_out() => Ok(Explanation::closed()),
            _ => Ok(Explanation::off()),
        }
    }

    /// What the machine was not let through to.
    #[must_use]
    pub fn egress_log(&self) -> Arc<mainbrella_net::EgressLog> {
        self.shared.shelf.egress()
    }

    /// Saves memory and disk and ends every process of the machine; [`Self::resume`] brings them back. Idempotent. Running jobs
    /// go on afterwards; connections and transfers end.
    ///
    /// # Errors
    /// `unsupported` where the host cannot; `machine_not_running`; or why it could not be saved: it runs on then.
    pub async fn pause(&self) -> Result<MachineRecord, EngineError> {
        let (reply, answer) = oneshot::channel();
        self.ask(Message::Pause { reply }, answer).await
    }

    /// Brings a paused machine back, with its clock and random numbers put right. Idempotent.
    ///
    /// # Errors
    /// `machine_not_running`; or why it could not be brought back: it stays paused then, unless it is lost.
    pub async fn resume(&self) -> Result<MachineRecord, EngineError> {
        let (reply, answer) = oneshot::channel();
        self.ask(Message::Resume { reply }, answer).await
    }

    /// Brings the machine back if it is paused and comes back by itself.
    ///
    /// # Errors
    /// `machine_not_running`; or why it could not be brought back: it stays paused then, unless it is lost.
    pub async fn awake(&self) -> Result<(), EngineError> {
        self.enter().await.map(drop)
    }

    /// Has copies of the machine made; they are in the driver's hand alone.
    pub(crate) async fn fork(&self, children: Vec<ForkOrder>) -> Result<Forked, EngineError> {
        let _pass = self.enter().await?;
        let (reply, answer) = oneshot::channel();
        self.ask(Message::Fork { children, reply }, answer).await
    }

    /// Saves the machine under the key of a snapshot; it goes on.
    ///
    /// # Errors
    /// When it does not run, or could not be saved; nothing of the snapshot is on the host then but for what
    /// [`crate::Engine::forget_snapshot`] removes.
    pub async fn save(&self, order: SaveOrder) -> Result<SaveReceipt, EngineError> {
        let (reply, answer) = oneshot::channel();
        self.ask(Message::Save { order, reply }, answer).await
    }

    /// Ends the machine. Idempotent.
    ///
    /// # Errors
    /// When the wish could not be made durable; the machine then goes on.
    pub async fn stop(&self) -> Result<StopOutcome, EngineError> {
        let record = self.record();
        if admit(record.state, Request::Stop) == Admission::AlreadyDone {
            return Ok(StopOutcome::Stopped(record));
        }
        let (reply, answer) = oneshot::channel();
        match self.ask(Message::Stop { reply }, answer).await {
            // The actor ended between the look and the question.
            Err(e) if e.code() == ErrorCode::MachineNotRunning => Ok(StopOutcome::Stopped(self.record())),
            other => other,
        }
    }

    async fn ask<T>(
        &self,
        message: Message,
        answer: oneshot::Receiver<Result<T, EngineError>>,
    ) -> Result<T, EngineError> {
        let ended = || {
            let record = self.record();
            if record.state.is_final() {
                not_running(record.state, record.ending.as_ref())
            } else {
                EngineError::new(ErrorCode::ShuttingDown, "the service is going down")
            }
        };
        self.shared.messages.send(message).await.map_err(|_| ended())?;
        answer.await.unwrap_or_else(|_| Err(ended()))
    }

    /// Begins a use of the machine. One that is paused and comes back by itself is brought back first.
    pub(crate) async fn enter(&self) -> Result<Pass, EngineError> {
        for _ in 0..WAKE_TRIES {
            if let Some(pass) = self.shared.gate.enter() {
                return Ok(pass);
            }
            self.wake().await?;
        }
        self.shared.gate.enter().ok_or_else(|| self.over())
    }

    /// Waits until a machine runs that is paused, or about to be, and comes back by itself. All who wait for the same return
    /// learn what came of it; it is tried once.
    async fn wake(&self) -> Result<(), EngineError> {
        let wakes = {
            let record = self.shared.record.borrow();
            record.spec.auto_resume && admit(record.state, Request::Wake) == Admission::Accept
        };
        if !wakes {
            return Err(self.over());
        }
        let (reply, answer) = oneshot::channel();
        self.ask(Message::Wake { asked: Instant::now(), reply }, answer).await.map(drop)
    }

    /// That the machine does not run, and why.
    pub(crate) fn over(&self) -> EngineError {
        let record = self.record();
        not_running(record.state, record.ending.as_ref())
    }

    pub(crate) fn link(&self) -> Result<Arc<Link>, EngineError> {
        self.shared.link.get().cloned().ok_or_else(|| not_running(self.record().state, None))
    }

    pub(crate) async fn file_place(&self) -> Result<Hold, EngineError> {
        let pass = self.enter().await?;
        let overloaded = || EngineError::new(ErrorCode::Overloaded, "too many file operations wait for this machine");
        let _queued = self.shared.file_queue.try_acquire().map_err(|_| overloaded())?;
        let place = tokio::time::timeout(files::FILE_DEADLINE, Arc::clone(&self.shared.files).acquire_owned()).await;
        match place {
            Ok(Ok(place)) => Ok(Hold { _place: place, _pass: pass }),
            _ => Err(overloaded()),
        }
    }

    /// Runs an operation until the machine is gone. A guest that fell silent because the machine ended is
    /// reported as what it is.
    pub(crate) async fn unless_gone<T>(
        &self,
        operation: impl Future<Output = Result<T, EngineError>>,
    ) -> Result<T, EngineError> {
        let result = tokio::select! {
            biased;
            result = operation => result,
            () = self.shared.gone.cancelled() => {
                let record = self.record();
                return Err(not_running(record.state, record.ending.as_ref()));
            }
        };
        match result {
            // Its connections ended because it was paused.
            Err(e) if e.code() == ErrorCode::GuestUnavailable && self.record().state != MachineState::Running => {
                let record = self.record();
                Err(not_running(record.state, record.ending.as_ref()).because(e.internal().unwrap_or_default()))
            }
            Err(e) if e.code() == ErrorCode::GuestUnavailable => {
                match tokio::time::timeout(VERDICT_WAIT, self.shared.gone.cancelled()).await {
                    Ok(()) => {
                        let record = self.record();
                        Err(not_running(record.state, record.ending.as_ref()).because(e.internal().unwrap_or_default()))
                    }
                    Err(_) => Err(e),
                }
            }
            other => other,
        }
    }
}
