//! All machines of this host.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use mainbrella_types::{
    DriverReport, ErrorCode, Failure, FailureKind, GenerationKey, MachineRecord, MachineState, SizeClass, SnapshotKey,
    TemplateName,
};
use tokio::task::JoinHandle;
use tracing::{error, info, warn};

use crate::clock::Clock;
use crate::driver::{Adoption, DiskUse, Driver, ForkOrder, TemplateInfo};
use crate::error::EngineError;
use crate::jobs::Shelves;
use crate::journal::Journal;
use crate::machine::{MachineHandle, Origin, Shelf, World, assume_used, died, spawn};
use crate::readers::Readers;

/// Machines looked at together after a restart.
const RECOVER_AT_ONCE: usize = 8;
/// How long actors may take to let go when the service ends.
const DETACH_DEADLINE: Duration = Duration::from_secs(5);

/// What a fork did.
pub struct ForkReceipt {
    /// The children, in the order of their records: each runs, or its record says why not.
    pub children: Vec<MachineHandle>,
    /// How long the source's processor stood still, milliseconds.
    pub still_ms: u64,
    /// Bytes of memory each child does not share with its template.
    pub memory_bytes: u64,
}

/// What an engine may be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Machines on this host at once.
    pub machines_max: usize,
    /// Longest launch, the first freeze of a template size included.
    pub launch_deadline: Duration,
    /// Longest time from a started VMM to an answering, configured guest.
    pub ready_deadline: Duration,
    /// Where the logs of jobs are kept; `None`: in a temporary folder, for as long as the engine lives.
    pub jobs_dir: Option<PathBuf>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            machines_max: 1000,
            launch_deadline: Duration::from_secs(300),
            ready_deadline: Duration::from_secs(30),
            jobs_dir: None,
        }
    }
}

/// What was found and done after a restart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecoveryReport {
    /// Running machines taken over.
    pub adopted: usize,
    /// Half-made machines whose creation goes on.
    pub completed: usize,
    /// Machines that did not survive; they are `failed` with the reason.
    pub failed: usize,
    /// Machines whose end had been decided, or whose lease is over.
    pub ended: usize,
    /// Things found on the host that belong to no living machine, removed.
    pub removed: usize,
}

struct Entry {
    handle: MachineHandle,
    task: JoinHandle<()>,
}

struct Inner {
    world: World,
    machines: Mutex<HashMap<GenerationKey, Entry>>,
    shelves: Shelves,
    readers: Readers,
}

/// The machines of this host. Cheap to clone.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

impl Engine {
    /// An engine over `driver`, writing through `journal`.
    pub fn new(
        driver: Arc<dyn Driver>,
        journal: Arc<dyn Journal>,
        clock: Arc<dyn Clock>,
        config: EngineConfig,
    ) -> Self {
        let shelves = Shelves::new(config.jobs_dir.clone());
        let world = World { driver, journal, clock, config };
        Self {
            inner: Arc::new(Inner {
                world,
                machines: Mutex::new(HashMap::new()),
                shelves,
                readers: Readers::default(),
            }),
        }
    }

    pub(crate) fn shelves(&self) -> &Shelves {
        &self.inner.shelves
    }

    pub(crate) fn readers(&self) -> &Readers {
        &self.inner.readers
    }

    pub(crate) fn world(&self) -> &World {
        &self.inner.world
    }

    pub(crate) fn now(&self) -> mainbrella_types::Millis {
        self.inner.world.clock.now()
    }

    fn machines(&self) -> MutexGuard<'_, HashMap<GenerationKey, Entry>> {
        self.inner.machines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the driver can do here.
    #[must_use]
    pub fn report(&self) -> DriverReport {
        self.inner.world.driver.report()
    }

    /// The templates machines can be made from.
    ///
    /// # Errors
    /// When the driver cannot read them.
    pub async fn templates(&self) -> Result<Vec<TemplateInfo>, EngineError> {
        Ok(self.inner.world.driver.templates().await?)
    }

    /// A machine that is not over, by its generation key.
    #[must_use]
    pub fn machine(&self, key: &GenerationKey) -> Option<MachineHandle> {
        self.machines().get(key).map(|e| e.handle.clone())
    }

    /// How many machines are not over.
    #[must_use]
    pub fn living(&self) -> usize {
        self.machines().len()
    }

    /// Makes the machine of `record`, whose intent is durable, and waits until it runs. The creation goes
    /// on when the caller stops waiting. A second call for the same key waits for the first.
    ///
    /// # Errors
    /// Why it could not be made; the record then says so too.
    pub async fn create(&self, record: MachineRecord) -> Result<MachineHandle, EngineError> {
        let handle = match self.machine(&record.key) {
            Some(handle) => handle,
            None => self.begin(record)?,
        };
        handle.ready().await?;
        Ok(handle)
    }

    /// Makes `children`, whose intents are durable, copies of `source` as it is now; waits until each runs or has failed.
    /// Once begun it goes on when the caller stops waiting.
    ///
    /// # Errors
    /// Why there are no children at all; their records say so, too.
    pub async fn fork(&self, source: &MachineHandle, children: Vec<MachineRecord>) -> Result<ForkReceipt, EngineError> {
        let (engine, source) = (self.clone(), source.clone());
        let work = tokio::spawn(async move { engine.carry_out(&source, children).await });
        work.await
            .unwrap_or_else(|e| Err(EngineError::new(ErrorCode::Internal, "a fork failed").because(e.to_string())))
    }

    async fn carry_out(
        &self,
        source: &MachineHandle,
        children: Vec<MachineRecord>,
    ) -> Result<ForkReceipt, EngineError> {
        let failed =
            |message: &str| Origin::Ending(Failure { kind: FailureKind::CreateFailed, message: message.to_owned() });
        let policy = source.record().spec.egress;
        let mut orders = Vec::new();
        let mut begun = Vec::new();
        let mut unread = None;
        for child in children {
            // Its log and its secrets are the ones its seat has from the first moment.
            let shelf = self.inner.shelves.fresh(child.key);
            if policy.leads_out() {
                match self.inner.world.journal.secrets(&child.key).await {
                    Ok(Some(kept)) => shelf.secrets().replace(Arc::new(kept.authority), &kept.secrets),
                    Ok(None) => {}
                    Err(e) => unread = Some(e),
                }
            }
            orders.push(ForkOrder { key: child.key, egress: shelf.egress_order(policy.clone()) });
            begun.push((child, shelf));
        }
        let forked = match unread {
            Some(e) => {
                let message = "the secrets of the copies could not be read";
                Err(EngineError::new(ErrorCode::Internal, message).because(e.to_string()))
            }
            None => source.fork(orders).await,
        };
        let forked = match forked {
            Ok(forked) => forked,
            Err(e) => {
                // Their actors remove what may be there of them.
                for (child, shelf) in begun {
                    self.start(child, failed(e.message()), shelf);
                }
                return Err(e);
            }
        };
        let (still_ms, memory_bytes) = (forked.still_ms, forked.memory_bytes);
        let mut handles = Vec::new();
        for ((child, shelf), made) in begun.into_iter().zip(forked.children) {
            let origin = match made {
                Ok(instance) => {
                    let copied = Arc::clone(&shelf);
                    if let Err(e) = tokio::task::spawn_blocking(move || copied.load()).await {
                        warn!(machine = %child.generation, error = %e, "the jobs of a copy could not be read");
                    }
                    Origin::Forked(instance)
                }
                Err(e) => {
                    warn!(machine = %child.generation, error = ?e, "a child of a fork was not made");
                    failed("it could not be copied")
                }
            };
            handles.push(self.start(child, origin, shelf));
        }
        // What became of each is in its record.
        drop(futures::future::join_all(handles.iter().map(MachineHandle::ready)).await);
        Ok(ForkReceipt { children: handles, still_ms, memory_bytes })
    }

    /// What takes room on this host's disk.
    ///
    /// # Errors
    /// When it cannot be looked at.
    pub async fn disk_use(&self) -> Result<Vec<DiskUse>, EngineError> {
        let mut parts = self.inner.world.driver.disk_use().await?;
        parts.push(self.logs_use().await?);
        Ok(parts)
    }

    /// The snapshots on this host, whole or not.
    ///
    /// # Errors
    /// When they cannot be listed.
    pub async fn snapshots(&self) -> Result<Vec<SnapshotKey>, EngineError> {
        Ok(self.inner.world.driver.snapshots().await?)
    }

    /// Removes a snapshot from this host, whole or not. Machines that were started from it go on, but for one that reads it.
    /// Idempotent.
    ///
    /// # Errors
    /// When something of it could not be removed; ask again.
    pub async fn forget_snapshot(&self, snapshot: SnapshotKey) -> Result<(), EngineError> {
        self.end_reader(&snapshot).await;
        self.inner.world.driver.forget(&snapshot).await?;
        self.forget_logs(&snapshot).await
    }

    /// Makes a template ready in a size: what it starts with is started, waited for and captured.
    ///
    /// # Errors
    /// When there is no such template, or it does not get ready; [`EngineError::said`] has the end of what its start command
    /// wrote.
    pub async fn prepare_template(&self, template: &TemplateName, size: SizeClass) -> Result<(), EngineError> {
        Ok(self.inner.world.driver.prepare(template, size).await?)
    }

    /// Makes the snapshot `to` of all that `from` is made of. Either may be removed afterwards without the other.
    ///
    /// # Errors
    /// When `from` is not whole on this host, or `to` cannot be kept; nothing is left of it then.
    pub async fn duplicate_snapshot(&self, from: SnapshotKey, to: SnapshotKey) -> Result<(), EngineError> {
        self.duplicate_logs(from, to).await?;
        if let Err(e) = self.inner.world.driver.duplicate(&from, &to).await {
            if let Err(left) = self.forget_logs(&to).await {
                warn!(snapshot = %to, internal = left.internal().unwrap_or(""), "logs of a snapshot that is none are left");
            }
            return Err(e.into());
        }
        Ok(())
    }

    /// Whether `more` machines may be made.
    ///
    /// # Errors
    /// When this host is full.
    pub fn has_room(&self, more: usize) -> Result<(), EngineError> {
        let max = self.inner.world.config.machines_max;
        if self.living() + more > max {
            return Err(EngineError::new(ErrorCode::Overloaded, format!("this host already holds {max} machines")));
        }
        Ok(())
    }

    fn begin(&self, record: MachineRecord) -> Result<MachineHandle, EngineError> {
        if record.state != MachineState::Creating {
            return Err(crate::machine::handle::not_running(record.state, record.ending.as_ref()));
        }
        let shelf = self.inner.shelves.fresh(record.key);
        Ok(self.start(record, Origin::Intent, shelf))
    }

    fn start(&self, record: MachineRecord, origin: Origin, shelf: Arc<Shelf>) -> MachineHandle {
        let key = record.key;
        let mut machines = self.machines();
        if let Some(entry) = machines.get(&key) {
            return entry.handle.clone();
        }
        let (handle, task) = spawn(self.inner.world.clone(), record, origin, shelf);
        let engine = self.clone();
        let task = tokio::spawn(async move {
            if let Err(e) = task.await {
                warn!(machine = %key, error = %e, "an actor ended abnormally");
            }
            engine.machines().remove(&key);
        });
        machines.insert(key, Entry { handle: handle.clone(), task });
        handle
    }

    /// After a start: takes over what runs, finishes what was begun, ends what is due, removes what nobody owns.
    ///
    /// # Errors
    /// When the store or the host cannot be read. Nothing has then been removed.
    pub async fn recover(&self) -> Result<RecoveryReport, EngineError> {
        let world = &self.inner.world;
        let living = world.journal.living().await.map_err(|e| {
            EngineError::new(ErrorCode::Internal, "the records of machines could not be read").because(e.to_string())
        })?;
        let present = world.driver.inventory().await?;
        let mut report = RecoveryReport::default();

        let owned: HashSet<_> = living.iter().map(|r| r.key).collect();
        for key in present.iter().filter(|key| !owned.contains(key)) {
            info!(machine = %key, "removing what no living machine owns");
            world.driver.destroy(key).await?;
            report.removed += 1;
        }

        let mut looked =
            futures::stream::iter(living.into_iter().map(|record| self.look(record))).buffer_unordered(RECOVER_AT_ONCE);
        while let Some(found) = looked.next().await {
            let (record, origin) = found?;
            let generation = record.generation.to_string();
            match &origin {
                Origin::Intent | Origin::Forked(_) => report.completed += 1,
                Origin::Adopted(_) | Origin::Between(_) | Origin::Paused => report.adopted += 1,
                Origin::Ending(f) if f.kind.final_state() == MachineState::Failed => report.failed += 1,
                Origin::Ending(_) => report.ended += 1,
            }
            let what = match &origin {
                Origin::Intent | Origin::Forked(_) => "completing",
                Origin::Adopted(_) => "adopted",
                Origin::Between(_) => "adopted between a pause and a return",
                Origin::Paused => "paused",
                Origin::Ending(f) => f.kind.as_str(),
            };
            info!(machine = %generation, what, "recovered");
            let shelf = self.inner.shelves.of(record.key, None).await?;
            self.start(record, origin, shelf);
        }
        Ok(report)
    }

    async fn adopt(&self, record: &MachineRecord) -> Result<Adoption, EngineError> {
        let shelf = self.inner.shelves.of(record.key, None).await?;
        if record.spec.egress.leads_out() {
            match self.inner.world.journal.secrets(&record.key).await {
                Ok(Some(kept)) => shelf.secrets().replace(Arc::new(kept.authority), &kept.secrets),
                Ok(None) => {}
                // Its requests go out without what they lack; nothing is let through that was not.
                Err(e) => {
                    error!(machine = %record.generation, error = %e, "the secrets of a machine could not be read")
                }
            }
        }
        let egress = shelf.egress_order(record.spec.egress.clone());
        Ok(self.inner.world.driver.adopt(&record.key, &egress).await?)
    }

    /// What is to be done with one machine that should be alive.
    async fn look(&self, mut record: MachineRecord) -> Result<(MachineRecord, Origin), EngineError> {
        let world = &self.inner.world;
        let now = world.clock.now();
        let lost = |message: &str| Origin::Ending(Failure { kind: FailureKind::Lost, message: message.into() });
        let origin = match record.state {
            MachineState::Creating => {
                world.driver.destroy(&record.key).await?;
                if record.forked_from.is_some() {
                    // What it was to be a copy of has gone on.
                    Origin::Ending(Failure {
                        kind: FailureKind::CreateFailed,
                        message: "the service ended while it was being copied".into(),
                    })
                } else if now >= record.lease.hard_deadline {
                    Origin::Ending(Failure {
                        kind: FailureKind::CreateFailed,
                        message: "its lease ended before it could be made".into(),
                    })
                } else {
                    Origin::Intent
                }
            }
            MachineState::Running | MachineState::Pausing | MachineState::Paused | MachineState::Resuming => {
                match self.adopt(&record).await? {
                    Adoption::Running(instance) if record.state == MachineState::Running => {
                        assume_used(&mut record, now);
                        Origin::Adopted(instance)
                    }
                    Adoption::Running(instance) => Origin::Between(instance),
                    Adoption::Paused => Origin::Paused,
                    Adoption::Dead(report) => Origin::Ending(died(&report)),
                    Adoption::Absent => lost("nothing of it was left on the host after a restart"),
                }
            }
            MachineState::Stopping => Origin::Ending(
                record
                    .ending
                    .clone()
                    .unwrap_or(Failure { kind: FailureKind::StopRequested, message: "it was being stopped".into() }),
            ),
            MachineState::Stopped | MachineState::Failed => lost("it had ended"),
        };
        Ok((record, origin))
    }

    /// Lets go of every machine; they go on without the service. Those that read snapshots end.
    pub async fn shutdown(&self) {
        if tokio::time::timeout(DETACH_DEADLINE, self.end_readers()).await.is_err() {
            warn!("some readers of snapshots were still being made or removed; the next start removes them");
        }
        let entries: Vec<Entry> = self.machines().drain().map(|(_, entry)| entry).collect();
        for entry in &entries {
            let _ = entry.handle.shared.messages.send(crate::machine::handle::Message::Detach).await;
        }
        let all = futures::future::join_all(entries.into_iter().map(|e| e.task));
        if tokio::time::timeout(DETACH_DEADLINE, all).await.is_err() {
            warn!("some machines were still being made or removed; the next start goes on with them");
        }
        self.inner.world.driver.shutdown().await;
    }
}
