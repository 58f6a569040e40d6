//! The task that owns a machine from intent to the last trace of it.

use std::sync::Arc;
use std::time::Duration;

use mainbrella_guest_protocol::pb;
use mainbrella_types::{
    EgressPolicy, ErrorCode, Failure, FailureKind, LeaseEnd, MachineRecord, MachineState, Millis, OnIdle,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;
use tracing::{info, warn};

use crate::clock::Clock;
use crate::driver::{Driver, EgressOrder, ExitReport, Instance, LaunchOrder};
use crate::engine::EngineConfig;
use crate::error::{DriverError, EngineError};
use crate::journal::{Change, Journal, JournalError};
use crate::machine::START_JOB;
use crate::machine::admission::{Admission, Request, admit};
use crate::machine::contexts;
use crate::machine::gate::Gate;
use crate::machine::handle::{LeaseChange, MachineHandle, Message, Shared, StopOutcome, not_running};
use crate::machine::jobs::{self, Shelf};
use crate::machine::link::{Identity, Link};
use crate::machine::secrets;

/// Messages that may wait for an actor.
const QUEUE: usize = 64;
/// How long a guest may take to say whether a command still runs, before an idle machine is ended.
const BUSY_QUESTION: Duration = Duration::from_secs(2);
/// Tries of a removal before a stop is reported as uncertain.
const REMOVAL_TRIES: u32 = 3;
/// Pause between tries of a removal or of a write; doubles up to [`RETRY_MAX`].
const RETRY_FIRST: Duration = Duration::from_millis(200);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// Longest time one removal may take.
const REMOVAL_DEADLINE: Duration = Duration::from_secs(30);
/// A use is made durable at the latest after so long, so that a restart knows it to within this bound.
const ACTIVITY_GRAIN_MS: u64 = 10_000;
/// Longest change of an egress policy.
const EGRESS_DEADLINE: Duration = Duration::from_secs(30);
/// Longest sleep between two looks at a lease; the wall clock may be set meanwhile.
pub(crate) const LEASE_LOOK_MAX: Duration = Duration::from_secs(60);

/// Where an actor begins.
pub(crate) enum Origin {
    /// Its intent is durable; nothing of it exists.
    Intent,
    /// It was found running after a restart.
    Adopted(Box<dyn Instance>),
    /// It was just copied from another one: its processes are frozen, and it takes itself for that one.
    Forked(Box<dyn Instance>),
    /// It was found running after a restart, on the way into a pause or out of it: its processes may be frozen.
    Between(Box<dyn Instance>),
    /// It was found paused after a restart.
    Paused,
    /// Its end was decided, but not all of it may be gone.
    Ending(Failure),
}

/// Everything an actor works with.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) journal: Arc<dyn Journal>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) config: EngineConfig,
}

/// What an actor does next.
pub(super) enum Begin {
    Make,
    /// It runs for the first time and does not know who it is.
    Introduce(Arc<dyn Instance>),
    Run(Arc<dyn Instance>),
    /// It runs; its guest has to be put right.
    Recall(Arc<dyn Instance>),
    Rest,
    End(Failure),
    Leave(Finish),
}

pub(super) struct Actor {
    pub(super) world: World,
    pub(super) shared: Arc<Shared>,
    pub(super) record: MachineRecord,
    published: watch::Sender<MachineRecord>,
    pub(super) inbox: mpsc::Receiver<Message>,
    /// Whether tasks follow its jobs and contexts; of a machine that was found paused none do before it is resumed.
    pub(super) followed: bool,
    stop_replies: Vec<oneshot::Sender<Result<StopOutcome, EngineError>>>,
}

/// What a look at a lease comes to.
enum Due {
    Nothing,
    End(Failure),
    Pause,
}

/// How an actor's task ended.
pub(super) enum Finish {
    /// The machine is over and nothing is left of it.
    Over,
    /// The service ends; the machine goes on.
    Detached,
}

/// Starts the actor of `record`. The future resolves when the actor has ended.
pub(crate) fn spawn(
    world: World,
    record: MachineRecord,
    origin: Origin,
    shelf: Arc<Shelf>,
) -> (MachineHandle, tokio::task::JoinHandle<()>) {
    let (messages, inbox) = mpsc::channel(QUEUE);
    let (published, watched) = watch::channel(record.clone());
    let gate = Gate::new(Arc::clone(&world.clock), record.lease.last_activity);
    let shared = Arc::new(Shared::new(messages, watched, gate, shelf, Arc::clone(&world.clock)));
    let origin = match origin {
        Origin::Intent => Begin::Make,
        Origin::Ending(failure) => Begin::End(failure),
        // Open at once: an adopted machine is as usable as it was before the restart.
        Origin::Adopted(instance) => {
            let instance: Arc<dyn Instance> = Arc::from(instance);
            let link = Arc::new(Link::new(identity_of(&record)));
            link.wake(Arc::clone(&instance));
            shared.open(link);
            contexts::resume(&shared);
            jobs::resume(&shared);
            Begin::Run(instance)
        }
        Origin::Forked(instance) => Begin::Introduce(Arc::from(instance)),
        Origin::Between(instance) => {
            shared.link_or_new(|| identity_of(&record));
            Begin::Recall(Arc::from(instance))
        }
        Origin::Paused => {
            shared.link_or_new(|| identity_of(&record));
            Begin::Rest
        }
    };
    let fresh = matches!(origin, Begin::Make) && record.restored_from.is_none();
    let followed = fresh || matches!(origin, Begin::Run(_));
    let stop_replies = Vec::new();
    let actor = Actor { world, shared: Arc::clone(&shared), record, published, inbox, followed, stop_replies };
    let task = tokio::spawn(actor.live(origin));
    (MachineHandle { shared }, task)
}

/// Whether a job of the guest was started by a user: it is neither the engine's own nor what the template started.
fn is_users(job: &str) -> bool {
    !contexts::is_bridge(job) && job != START_JOB
}

impl Actor {
    async fn live(mut self, mut begin: Begin) {
        let finish = loop {
            begin = match begin {
                Begin::Make => match self.make().await {
                    Ok(instance) => {
                        self.follow();
                        Begin::Run(instance)
                    }
                    Err(failure) => Begin::End(failure),
                },
                Begin::Introduce(instance) => match self.introduce(instance).await {
                    Ok(instance) => {
                        self.follow();
                        Begin::Run(instance)
                    }
                    Err(failure) => Begin::End(failure),
                },
                Begin::Run(instance) => self.run(instance).await,
                Begin::Recall(instance) => match self.recall(Arc::clone(&instance)).await {
                    Ok(()) => Begin::Run(instance),
                    Err((failure, _)) => Begin::End(failure),
                },
                Begin::Rest => self.stay_paused().await,
                Begin::End(failure) => break self.end(failure).await,
                Begin::Leave(finish) => break finish,
            }
        };
        self.shared.gate.close();
        self.shared.contexts.over.cancel();
        self.shared.detached.cancel();
        if matches!(finish, Finish::Over) {
            let reason = self.record.ending.as_ref().map_or("", |e| e.message.as_str());
            info!(machine = %self.record.generation, state = %self.record.state, reason, "machine is over");
        }
        for reply in std::mem::take(&mut self.stop_replies) {
            let _ = reply.send(Ok(StopOutcome::Stopped(self.record.clone())));
        }
    }

    /// Brings the machine to life. On failure the caller ends it with the returned reason.
    async fn make(&mut self) -> Result<Arc<dyn Instance>, Failure> {
        let order = LaunchOrder {
            key: self.record.key,
            template: self.record.spec.template.clone(),
            size: self.record.spec.size,
            egress: self.egress(self.record.spec.egress.clone()),
            snapshot: self.record.restored_from,
            disk_only: false,
        };
        let inherited = match order.snapshot {
            Some(snapshot) => Some(snapshot),
            // What there is to say of a template that is not there, its launch says.
            None => self.world.driver.inherited(&order.template).await.ok().flatten(),
        };
        if let Some(snapshot) = &inherited {
            self.take_logs(snapshot).await;
            self.followed = false;
        }
        let launched = match timeout(self.world.config.launch_deadline, self.world.driver.launch(&order)).await {
            Ok(Ok(instance)) => instance,
            Ok(Err(e @ DriverError::Damaged(_))) if order.snapshot.is_some() => {
                let what = "the snapshot is not on this host as it was saved";
                return Err(
                    self.create_failed(EngineError::new(ErrorCode::SnapshotDamaged, what).because(e.to_string()))
                );
            }
            Ok(Err(e)) => return Err(self.create_failed(e.into())),
            Err(_) => {
                return Err(
                    self.create_failed(EngineError::new(ErrorCode::CreateFailed, "the machine did not start in time"))
                );
            }
        };
        self.introduce(Arc::from(launched)).await
    }

    /// Follows the jobs and contexts that are there already, once.
    pub(super) fn follow(&mut self) {
        if !std::mem::replace(&mut self.followed, true) {
            contexts::resume(&self.shared);
            jobs::resume(&self.shared);
        }
    }

    /// Tells a machine that was just restored who it is, and lets callers in. On failure the caller ends it.
    async fn introduce(&mut self, instance: Arc<dyn Instance>) -> Result<Arc<dyn Instance>, Failure> {
        let link = Arc::new(Link::new(identity_of(&self.record)));
        // A copy that has secrets has an authority of its own; it runs with that of its source until it is told.
        let trust = self.shared.shelf.secrets().certificate().map(|pem| secrets::trust(&pem));
        let introduced = tokio::select! {
            done = link.introduce_anew(Arc::clone(&instance), self.world.config.ready_deadline, trust) => done,
            report = instance.exited() => Err(EngineError::new(ErrorCode::CreateFailed, "the machine ended while it was being made")
                .because(report.to_string())),
        };
        match introduced {
            Ok(reseeded) => drop(self.shared.reseeded.set(reseeded)),
            Err(e) => return Err(self.create_failed(e)),
        }
        let change = Change {
            state: Some(MachineState::Running),
            running_at: Some(self.world.clock.now()),
            ..Change::default()
        };
        // Open before `running` is published: whoever waits for that may use the machine at once.
        self.shared.open(link);
        match self.write(change).await {
            Ok(()) => Ok(instance),
            Err(e) => Err(self.create_failed(
                EngineError::new(ErrorCode::Internal, "the machine's record could not be written")
                    .because(e.to_string()),
            )),
        }
    }

    fn create_failed(&self, e: EngineError) -> Failure {
        warn!(machine = %self.record.generation, code = %e.code(), internal = e.internal().unwrap_or(""), "creation failed: {}", e.message());
        let kind = match e.code() {
            ErrorCode::HostFull => FailureKind::HostFull,
            ErrorCode::SnapshotDamaged => FailureKind::SnapshotDamaged,
            _ => FailureKind::CreateFailed,
        };
        let code = if e.code() == ErrorCode::GuestUnavailable { ErrorCode::CreateFailed } else { e.code() };
        let _ = self.shared.create_failure.set((code, e.message().to_owned()));
        Failure { kind, message: e.message().to_owned() }
    }

    /// Waits for whatever ends the machine or has it paused.
    async fn run(&mut self, instance: Arc<dyn Instance>) -> Begin {
        loop {
            let pause = self.until_next_look();
            tokio::select! {
                biased;
                report = instance.exited() => return Begin::End(died(&report)),
                message = self.inbox.recv() => match message {
                    None | Some(Message::Detach) => {
                        self.save_activity(0).await;
                        return Begin::Leave(Finish::Detached);
                    }
                    Some(Message::Extend { wish, reply }) => {
                        let _ = reply.send(self.extend(wish).await);
                    }
                    Some(Message::SetEgress { policy, reply }) => {
                        let _ = reply.send(self.set_egress(&*instance, policy).await);
                    }
                    Some(Message::Pause { reply }) => {
                        let _ = reply.send(self.pause(&instance).await);
                        if self.record.state == MachineState::Paused {
                            return Begin::Rest;
                        }
                    }
                    Some(Message::Resume { reply } | Message::Wake { reply, .. }) => {
                        let _ = reply.send(Ok(self.record.clone()));
                    }
                    Some(Message::Fork { children, reply }) => {
                        let _ = reply.send(self.fork(&instance, &children).await);
                    }
                    Some(Message::Save { order, reply }) => {
                        self.save(&instance, order, reply).await;
                    }
                    Some(Message::Stop { reply }) => {
                        if let Some(finish) = self.stop(reply).await {
                            return Begin::Leave(finish);
                        }
                    }
                },
                () = tokio::time::sleep(pause) => {
                    match self.lease_over().await {
                        Due::Nothing => {}
                        Due::End(end) => return Begin::End(end),
                        Due::Pause => {
                            self.pause_idle(&instance).await;
                            if self.record.state == MachineState::Paused {
                                return Begin::Rest;
                            }
                        }
                    }
                }
            }
        }
    }

    /// How long nothing has to be looked at.
    fn until_next_look(&self) -> Duration {
        let now = self.world.clock.now();
        let mut lease = self.record.lease;
        lease.touch(self.shared.gate.last_use());
        let due = now.until(lease.next_check());
        let due = if lease.idle_timeout_ms.is_some() { due.min(ACTIVITY_GRAIN_MS) } else { due };
        Duration::from_millis(due.max(1)).min(LEASE_LOOK_MAX)
    }

    /// Looks at the lease; says what is due if it is over. Nobody gets in any more then.
    async fn lease_over(&mut self) -> Due {
        let now = self.world.clock.now();
        let seen = self.shared.gate.last_use();
        let mut lease = self.record.lease;
        lease.touch(seen);
        match lease.ended(now, false) {
            Some(LeaseEnd::Hard) => {
                Due::End(Failure { kind: FailureKind::StopDeadline, message: "its hard lease ended".into() })
            }
            Some(LeaseEnd::Idle) => {
                if self.guest_is_busy().await {
                    self.shared.gate.touch();
                    self.save_activity(ACTIVITY_GRAIN_MS).await;
                    return Due::Nothing;
                }
                if !self.shared.gate.close_if_unused_since(seen) {
                    return Due::Nothing;
                }
                match self.record.spec.on_idle {
                    OnIdle::Pause => Due::Pause,
                    OnIdle::Stop => Due::End(Failure {
                        kind: FailureKind::StopIdle,
                        message: "nobody used it for its idle timeout".into(),
                    }),
                }
            }
            None => {
                self.save_activity(ACTIVITY_GRAIN_MS).await;
                Due::Nothing
            }
        }
    }

    /// Whether a command still runs in the guest that nobody here waits for any more.
    async fn guest_is_busy(&self) -> bool {
        let Some(link) = self.shared.link.get() else { return false };
        let jobs = timeout(BUSY_QUESTION, async {
            let client = link.client().await.ok()?;
            client.rpc().list_jobs(pb::ListJobsRequest::default()).await.ok()
        });
        match jobs.await {
            Ok(Some(reply)) => reply.view().jobs.iter().any(|job| !job.finished && is_users(job.job_id)),
            _ => false,
        }
    }

    /// Makes the last use durable where it is `grain_ms` newer than what is.
    async fn save_activity(&mut self, grain_ms: u64) {
        let last = self.shared.gate.last_use();
        if self.record.lease.idle_timeout_ms.is_none() || self.record.lease.last_activity.until(last) <= grain_ms {
            return;
        }
        // A failure costs precision after a crash, nothing else; the next look tries again.
        let _ = self.write(Change { last_activity: Some(last), ..Change::default() }).await;
    }

    pub(super) async fn extend(&mut self, wish: LeaseChange) -> Result<MachineRecord, EngineError> {
        if admit(self.record.state, Request::Extend) != Admission::Accept {
            return Err(not_running(self.record.state, self.record.ending.as_ref()));
        }
        let pauses = wish.on_idle == Some(OnIdle::Pause);
        if (pauses || wish.auto_resume == Some(true)) && !self.world.driver.report().memory_snapshot {
            return Err(EngineError::new(ErrorCode::Unsupported, "this host cannot pause machines"));
        }
        if pauses && wish.idle_timeout_ms.or(self.record.lease.idle_timeout_ms).is_none() {
            let message = "onIdle pause needs an idle timeout, and the machine has none: give idleTimeoutSeconds, too";
            return Err(EngineError::new(ErrorCode::InvalidRequest, message));
        }
        self.shared.gate.touch();
        let mut lease = self.record.lease;
        let now = self.world.clock.now();
        if let Some(ttl_ms) = wish.ttl_ms {
            lease.extend_hard(now, ttl_ms);
        }
        let change = Change {
            hard_deadline: Some(lease.hard_deadline),
            idle_timeout_ms: wish.idle_timeout_ms,
            on_idle: wish.on_idle,
            auto_resume: wish.auto_resume.or(pauses.then_some(true)),
            last_activity: Some(self.shared.gate.last_use()),
            ..Change::default()
        };
        self.write(change).await.map_err(|e| store_failed(&e))?;
        Ok(self.record.clone())
    }

    fn egress(&self, policy: EgressPolicy) -> EgressOrder {
        self.shared.shelf.egress_order(policy)
    }

    /// On record first: whatever happens then, the next service enforces what the caller asked for.
    async fn set_egress(
        &mut self,
        instance: &dyn Instance,
        policy: EgressPolicy,
    ) -> Result<MachineRecord, EngineError> {
        if admit(self.record.state, Request::SetEgress) != Admission::Accept {
            return Err(not_running(self.record.state, self.record.ending.as_ref()));
        }
        if !self.record.spec.egress.may_become(&policy) {
            return Err(EngineError::new(
                ErrorCode::EgressLocked,
                "the machine has no internet, which holds as long as it lives",
            ));
        }
        self.world.driver.report().enforces(&policy).map_err(|why| EngineError::new(ErrorCode::Unsupported, why))?;
        let Some(network) = instance.network() else {
            return Err(EngineError::new(ErrorCode::Unsupported, "this host cannot change what a machine may reach"));
        };
        self.shared.gate.touch();
        self.write(Change { egress: Some(policy.clone()), ..Change::default() }).await.map_err(|e| store_failed(&e))?;
        let order = self.egress(policy);
        let failure = match timeout(EGRESS_DEADLINE, network.set_egress(&order)).await {
            Ok(Ok(())) => return Ok(self.record.clone()),
            Ok(Err(e)) => EngineError::from(e),
            Err(_) => EngineError::new(ErrorCode::Internal, "").because("it took too long"),
        };
        let why = failure.internal().unwrap_or_default();
        warn!(machine = %self.record.generation, why, "an egress policy could not be put in force");
        Err(if failure.code() == ErrorCode::Overloaded {
            let message = format!("{}; until its policy is set again the machine reaches nothing", failure.message());
            EngineError::new(ErrorCode::Overloaded, message)
        } else {
            let message = "the policy is on record but could not be put in force; until it is set again the machine reaches nothing";
            EngineError::new(ErrorCode::Internal, message).because(why)
        })
    }

    /// Carries out a stop. `None`: it could not be made durable and the machine goes on.
    pub(super) async fn stop(&mut self, reply: oneshot::Sender<Result<StopOutcome, EngineError>>) -> Option<Finish> {
        let failure = Failure { kind: FailureKind::StopRequested, message: "it was stopped on request".into() };
        let change = Change { state: Some(MachineState::Stopping), ending: Some(failure.clone()), ..Change::default() };
        if let Err(e) = self.write(change).await {
            let _ = reply.send(Err(store_failed(&e)));
            return None;
        }
        self.stop_replies.push(reply);
        Some(self.end(failure).await)
    }

    /// Ends the machine for `failure`: shuts everyone out, removes all of it, and says so durably.
    async fn end(&mut self, failure: Failure) -> Finish {
        self.shared.gate.close();
        let last = failure.kind.final_state();
        // What failed is told at once; what was asked to stop is `stopping` until nothing is left of it.
        let first = if last == MachineState::Failed { MachineState::Failed } else { MachineState::Stopping };
        if self.record.state != first && !self.record.state.is_final() {
            let ended_at = first.is_final().then(|| self.world.clock.now());
            let change = Change { state: Some(first), ending: Some(failure.clone()), ended_at, ..Change::default() };
            self.write_until_taken(change).await;
        }
        self.shared.gone.cancel();
        self.end_jobs(last).await;
        if let Some(link) = self.shared.link.get() {
            link.close().await;
        }
        if !self.remove().await {
            return Finish::Detached;
        }
        if !self.record.state.is_final() {
            let change = Change { state: Some(last), ended_at: Some(self.world.clock.now()), ..Change::default() };
            self.write_until_taken(change).await;
        }
        Finish::Over
    }

    /// Ends the logs of jobs that still ran, so that whoever follows them learns of it.
    async fn end_jobs(&self, last: MachineState) {
        let cause = jobs::cause_of(last);
        let (shelf, now) = (Arc::clone(&self.shared.shelf), self.world.clock.now());
        let ended = tokio::task::spawn_blocking(move || shelf.close(cause, now));
        if ended.await.is_err() {
            warn!(machine = %self.record.generation, "the logs of its jobs were not all ended");
        }
    }

    /// Removes everything of the machine, however long it takes. After a few tries whoever waits for a stop
    /// is told that it is uncertain. `false`: the service ends first; the next one goes on with it.
    async fn remove(&mut self) -> bool {
        let mut pause = RETRY_FIRST;
        let mut tries = 0;
        loop {
            match timeout(REMOVAL_DEADLINE, self.world.driver.destroy(&self.record.key)).await {
                Ok(Ok(())) => return true,
                Ok(Err(e)) => warn!(machine = %self.record.generation, error = ?e, "removal failed; trying again"),
                Err(_) => warn!(machine = %self.record.generation, "removal takes too long; trying again"),
            }
            tries += 1;
            if tries == REMOVAL_TRIES {
                for reply in std::mem::take(&mut self.stop_replies) {
                    let _ = reply.send(Ok(StopOutcome::Uncertain(self.record.clone())));
                }
            }
            if !self.wait(pause, tries >= REMOVAL_TRIES).await {
                return false;
            }
            pause = (pause * 2).min(RETRY_MAX);
        }
    }

    /// Waits for `pause`, answering what comes meanwhile. `false`: the service ends.
    async fn wait(&mut self, pause: Duration, uncertain: bool) -> bool {
        let end = tokio::time::Instant::now() + pause;
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(end) => return true,
                message = self.inbox.recv() => match message {
                    None | Some(Message::Detach) => return false,
                    Some(
                        Message::Extend { reply, .. }
                        | Message::SetEgress { reply, .. }
                        | Message::Pause { reply }
                        | Message::Resume { reply }
                        | Message::Wake { reply, .. },
                    ) => {
                        let _ = reply.send(Err(not_running(self.record.state, self.record.ending.as_ref())));
                    }
                    Some(Message::Fork { reply, .. }) => {
                        let _ = reply.send(Err(not_running(self.record.state, self.record.ending.as_ref())));
                    }
                    Some(Message::Save { reply, .. }) => {
                        let _ = reply.send(Err(not_running(self.record.state, self.record.ending.as_ref())));
                    }
                    Some(Message::Stop { reply }) if uncertain => {
                        let _ = reply.send(Ok(StopOutcome::Uncertain(self.record.clone())));
                    }
                    Some(Message::Stop { reply }) => self.stop_replies.push(reply),
                }
            }
        }
    }

    /// Writes a change and publishes the record as it then is.
    pub(super) async fn write(&mut self, change: Change) -> Result<(), JournalError> {
        let record = self.world.journal.apply(&self.record.key, self.record.revision, change).await?;
        self.record = record;
        self.published.send_replace(self.record.clone());
        Ok(())
    }

    /// Writes a change that describes what has already happened: it is tried until the store takes it.
    pub(super) async fn write_until_taken(&mut self, change: Change) {
        let mut pause = RETRY_FIRST;
        loop {
            match self.write(change.clone()).await {
                Ok(()) => return,
                Err(JournalError::Stale) => {
                    // One task owns a record; a stale revision means that it was removed or that we are not it.
                    warn!(machine = %self.record.generation, "the record was written by somebody else");
                    return;
                }
                Err(e) => {
                    warn!(machine = %self.record.generation, error = %e, "the store did not take a change; trying again")
                }
            }
            if !self.wait(pause, true).await {
                return;
            }
            pause = (pause * 2).min(RETRY_MAX);
        }
    }
}

/// What a machine's guest is told of itself.
pub(super) fn identity_of(record: &MachineRecord) -> Identity {
    Identity { key: record.key, hostname: record.generation.id.to_string(), env: record.spec.env.clone() }
}

pub(super) fn store_failed(e: &JournalError) -> EngineError {
    EngineError::new(ErrorCode::Internal, "the machine's record could not be written; nothing was changed")
        .because(e.to_string())
}

/// Why a machine that ended by itself has failed.
pub(crate) fn died(report: &ExitReport) -> Failure {
    let kind = match report {
        ExitReport::Guest(_) => FailureKind::GuestEnded,
        ExitReport::Vmm(_) => FailureKind::VmmDied,
        ExitReport::HostFull => FailureKind::HostFull,
    };
    Failure { kind, message: report.to_string() }
}

/// The latest use a restarted service has to reckon with: up to one grain after what was durable.
pub(crate) fn assume_used(record: &mut MachineRecord, now: Millis) {
    let possible = record.lease.last_activity.plus(ACTIVITY_GRAIN_MS).min(now);
    record.lease.touch(possible);
}
