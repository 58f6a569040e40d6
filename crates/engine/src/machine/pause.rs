//! Pausing and resuming: the parts of the actor's work in which the machine exists and nothing of it runs.

use std::sync::Arc;
use std::time::Duration;

use mainbrella_guest_protocol::{GuestError, pb};
use mainbrella_types::{ErrorCode, Failure, FailureKind, LeaseEnd, MachineRecord, MachineState};
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use super::actor::{Actor, Begin, Finish, LEASE_LOOK_MAX, died, identity_of};
use crate::driver::Instance;
use crate::error::EngineError;
use crate::journal::Change;
use crate::machine::admission::{Admission, Request, admit};
use crate::machine::handle::{Message, not_running};
use crate::machine::link::{Link, silent};

/// Longest time a guest may take to bring its processes to rest.
const REST_DEADLINE: Duration = Duration::from_secs(60);
/// Longest time a driver may take to save a machine, or to bring it back.
pub(super) const DRIVER_DEADLINE: Duration = Duration::from_secs(300);

impl Actor {
    /// Pauses the machine. It runs on when this fails, unless it ended meanwhile.
    pub(super) async fn pause(&mut self, instance: &Arc<dyn Instance>) -> Result<MachineRecord, EngineError> {
        match admit(self.record.state, Request::Pause) {
            Admission::Accept => {}
            Admission::AlreadyDone => return Ok(self.record.clone()),
            Admission::Deny => return Err(not_running(self.record.state, self.record.ending.as_ref())),
        }
        if !self.world.driver.report().memory_snapshot {
            let message = "this host cannot save the memory of machines";
            return Err(EngineError::new(ErrorCode::Unsupported, message));
        }
        let link = self.shared.link.get().cloned();
        let link = link.ok_or_else(|| not_running(self.record.state, None))?;
        let pausing = Change {
            state: Some(MachineState::Pausing),
            last_activity: Some(self.shared.gate.last_use()),
            ..Change::default()
        };
        self.write(pausing).await.map_err(|e| super::actor::store_failed(&e))?;
        self.shared.gate.close();
        let saved = async {
            quiet(&link, false).await?;
            match timeout(DRIVER_DEADLINE, self.world.driver.pause(&self.record.key)).await {
                Ok(done) => done.map_err(|e| told(e.into(), "the machine could not be saved")),
                Err(_) => Err(EngineError::new(ErrorCode::Internal, "the machine was not saved in time")),
            }
        };
        match saved.await {
            Ok(receipt) => {
                info!(machine = %self.record.generation, ?receipt, "paused");
                self.write_until_taken(Change { state: Some(MachineState::Paused), ..Change::default() }).await;
                Ok(self.record.clone())
            }
            Err(e) => {
                warn!(machine = %self.record.generation, internal = e.internal().unwrap_or(""), "a pause failed: {}", e.message());
                // Its processes are frozen, its clock may be behind: as after a restore.
                self.recover(&link, instance, "could not be paused").await;
                self.shared.gate.open();
                self.write_until_taken(Change { state: Some(MachineState::Running), ..Change::default() }).await;
                Err(e)
            }
        }
    }

    /// Pauses a machine that nobody used, whose gate is shut already. When it cannot be paused, that is tried again once nobody
    /// used it for as long again.
    pub(super) async fn pause_idle(&mut self, instance: &Arc<dyn Instance>) {
        info!(machine = %self.record.generation, "nobody used it for its idle timeout; it is paused");
        if let Err(e) = self.pause(instance).await {
            warn!(machine = %self.record.generation, internal = e.internal().unwrap_or(""), "an unused machine runs on: {}", e.message());
            self.shared.gate.touch();
            self.shared.gate.open();
        }
    }

    /// Waits, paused, for whatever comes: until it is resumed, or ends.
    pub(super) async fn stay_paused(&mut self) -> Begin {
        // After a restart the record may be a step behind.
        if self.record.state == MachineState::Running {
            self.write_until_taken(Change { state: Some(MachineState::Pausing), ..Change::default() }).await;
        }
        if self.record.state != MachineState::Paused {
            self.write_until_taken(Change { state: Some(MachineState::Paused), ..Change::default() }).await;
        }
        // When a return last failed, and how.
        let mut failed: Option<(Instant, EngineError)> = None;
        loop {
            let pause = self.until_deadline();
            tokio::select! {
                biased;
                message = self.inbox.recv() => match message {
                    None | Some(Message::Detach) => return Begin::Leave(Finish::Detached),
                    Some(Message::Extend { wish, reply }) => {
                        let _ = reply.send(self.extend(wish).await);
                    }
                    Some(Message::SetEgress { reply, .. }) => {
                        let _ = reply.send(Err(not_running(self.record.state, None)));
                    }
                    Some(Message::Fork { reply, .. }) => {
                        let _ = reply.send(Err(not_running(self.record.state, None)));
                    }
                    Some(Message::Save { reply, .. }) => {
                        let _ = reply.send(Err(not_running(self.record.state, None)));
                    }
                    Some(Message::Pause { reply }) => {
                        let _ = reply.send(Ok(self.record.clone()));
                    }
                    Some(message @ (Message::Resume { .. } | Message::Wake { .. })) => {
                        let (reply, asked) = match message {
                            Message::Wake { asked, reply } => (reply, Some(asked)),
                            Message::Resume { reply } => (reply, None),
                            _ => continue,
                        };
                        // Who waited for the very return that failed is told so; it is not tried once for each of them.
                        if let (Some(asked), Some((at, e))) = (asked, &failed)
                            && asked <= *at
                        {
                            let _ = reply.send(Err(EngineError::new(e.code(), e.message())));
                            continue;
                        }
                        match self.resume().await {
                            Ok(instance) => {
                                let _ = reply.send(Ok(self.record.clone()));
                                return Begin::Run(instance);
                            }
                            Err(Unresumed::Still(e)) => {
                                failed = Some((Instant::now(), EngineError::new(e.code(), e.message())));
                                let _ = reply.send(Err(e));
                            }
                            Err(Unresumed::Over(failure, e)) => {
                                let _ = reply.send(Err(e));
                                return Begin::End(failure);
                            }
                        }
                    }
                    Some(Message::Stop { reply }) => {
                        if let Some(finish) = self.stop(reply).await {
                            return Begin::Leave(finish);
                        }
                    }
                },
                () = tokio::time::sleep(pause) => {
                    if self.record.lease.ended(self.world.clock.now(), true) == Some(LeaseEnd::Hard) {
                        return Begin::End(Failure {
                            kind: FailureKind::StopDeadline,
                            message: "its hard lease ended while it was paused".into(),
                        });
                    }
                }
            }
        }
    }

    /// How long nothing has to be looked at: a paused machine is never idle.
    fn until_deadline(&self) -> Duration {
        let due = self.world.clock.now().until(self.record.lease.hard_deadline);
        Duration::from_millis(due.max(1)).min(LEASE_LOOK_MAX)
    }

    async fn resume(&mut self) -> Result<Arc<dyn Instance>, Unresumed> {
        if admit(self.record.state, Request::Resume) != Admission::Accept {
            return Err(Unresumed::Still(not_running(self.record.state, self.record.ending.as_ref())));
        }
        let resuming = Change { state: Some(MachineState::Resuming), ..Change::default() };
        self.write(resuming).await.map_err(|e| Unresumed::Still(super::actor::store_failed(&e)))?;
        let order = self.shared.shelf.egress_order(self.record.spec.egress.clone());
        let brought = match timeout(DRIVER_DEADLINE, self.world.driver.resume(&self.record.key, &order)).await {
            Ok(done) => done.map_err(|e| told(e.into(), "the machine could not be brought back")),
            Err(_) => Err(EngineError::new(ErrorCode::Internal, "the machine was not brought back in time")),
        };
        let instance: Arc<dyn Instance> = match brought {
            Ok(instance) => Arc::from(instance),
            Err(e) => {
                warn!(machine = %self.record.generation, internal = e.internal().unwrap_or(""), "a machine stays paused: {}", e.message());
                self.write_until_taken(Change { state: Some(MachineState::Paused), ..Change::default() }).await;
                return Err(Unresumed::Still(e));
            }
        };
        self.recall(Arc::clone(&instance)).await.map_err(|(failure, e)| Unresumed::Over(failure, e))?;
        Ok(instance)
    }

    /// Puts the guest of a machine right that was quiesced and goes on; one that does not answer is looked for further on.
    pub(super) async fn recover(&self, link: &Arc<Link>, instance: &Arc<dyn Instance>, what: &str) {
        if let Err(e) = link.introduce(Arc::clone(instance), self.world.config.ready_deadline).await {
            warn!(machine = %self.record.generation, internal = e.internal().unwrap_or(""), "a machine that {what} does not answer");
            link.wake(Arc::clone(instance));
        }
    }

    /// Puts a guest right that was brought back, and lets callers in. On failure: how the machine ends, and what a caller is
    /// told.
    pub(super) async fn recall(&mut self, instance: Arc<dyn Instance>) -> Result<(), (Failure, EngineError)> {
        let link = self.shared.link_or_new(|| identity_of(&self.record));
        let limit = self.world.config.ready_deadline;
        tokio::select! {
            done = link.introduce(Arc::clone(&instance), limit) => done.map_err(|e| {
                let message = "its guest could not be put right after a pause";
                (Failure { kind: FailureKind::GuestEnded, message: message.into() }, told(e, message))
            })?,
            report = instance.exited() => return Err((died(&report), silent("it ended while it was brought back"))),
        }
        self.shared.gate.touch();
        self.shared.gate.open();
        self.follow();
        if self.record.state == MachineState::Paused {
            self.write_until_taken(Change { state: Some(MachineState::Resuming), ..Change::default() }).await;
        }
        let change = Change {
            state: Some(MachineState::Running),
            last_activity: Some(self.shared.gate.last_use()),
            ..Change::default()
        };
        self.write_until_taken(change).await;
        info!(machine = %self.record.generation, "resumed");
        Ok(())
    }
}

/// Freezes the guest's processes and closes the link. `write_out`: its file systems are written out, too; where its memory is
/// kept that is not needed.
pub(super) async fn quiet(link: &Link, write_out: bool) -> Result<(), EngineError> {
    let frozen = async {
        let client = link.client().await?;
        let request = pb::QuiesceRequest { freeze: true, sync: write_out, ..Default::default() };
        client.rpc().quiesce(request).await.map(drop).map_err(|e| silent(&GuestError::from_connect(&e).to_string()))
    };
    timeout(REST_DEADLINE, frozen).await.map_err(|_| silent("it did not come to rest in time"))??;
    link.rest().await;
    Ok(())
}

/// A driver's or a guest's failure; what it says of creating is said of this.
pub(super) fn told(e: EngineError, what: &'static str) -> EngineError {
    if e.code() == ErrorCode::CreateFailed {
        return EngineError::new(ErrorCode::Internal, what).because(e.internal().unwrap_or_default());
    }
    e
}

/// Why a machine was not resumed.
enum Unresumed {
    /// It is paused as before.
    Still(EngineError),
    /// It is lost; why, and what the caller is told.
    Over(Failure, EngineError),
}
