//! Machines that snapshots are read through.
//!
//! A snapshot's disk was written by a guest, so the host never looks into it: a machine does, started from the snapshot as any
//! other, without a network. It is nobody's. No store knows of it, so whatever is left of one after a crash is removed by the
//! next start as what no living machine owns. All who read one snapshot share one, and it ends when nobody did for a while.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use mainbrella_types::limits::{SNAPSHOT_READER_IDLE_MS, SNAPSHOT_READERS_MAX, TTL_MAX_SECONDS};
use mainbrella_types::{
    CreatedAt, EgressPolicy, ErrorCode, Failure, FailureKind, Generation, GenerationKey, Lease, MachineId,
    MachineRecord, MachineSpec, MachineState, OnIdle, ProjectId, SizeClass, SnapshotKey, TemplateName,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::driver::{EgressOrder, LaunchOrder};
use crate::engine::Engine;
use crate::error::{DriverError, EngineError};
use crate::journal::{Change, Journal, JournalError};
use crate::machine::{LEASE_LOOK_MAX, MachineHandle, Origin, Pass, World, spawn};

/// How often one that ends just then is replaced for one call.
const TRIES: u32 = 3;
/// How long a call waits for a place that an unused one makes free.
const PLACE_WAIT: Duration = Duration::from_secs(30);
/// Where the name of the machine comes from, for logs and its guest.
const NAME: &str = "reader";

/// Which snapshot is to be read, and what it was saved of.
#[derive(Clone, Debug)]
pub struct ReadOrder {
    /// The snapshot. Of one with memory only the disk is used.
    pub snapshot: SnapshotKey,
    /// The template of the machine that was saved.
    pub template: TemplateName,
    /// The size of that machine.
    pub size: SizeClass,
}

/// A machine that has the files of a snapshot. It does not end for being unused before this is dropped.
pub struct SnapshotReader {
    handle: MachineHandle,
    _pass: Pass,
}

impl SnapshotReader {
    /// The machine. What is written in it is lost with it; it is there to be read.
    #[must_use]
    pub fn machine(&self) -> &MachineHandle {
        &self.handle
    }
}

type Outcome = Option<Result<MachineHandle, EngineError>>;

/// One of them, from when it is asked for until it is to end.
struct Reader {
    key: GenerationKey,
    made: watch::Receiver<Outcome>,
    /// Tells it to end.
    end: CancellationToken,
    /// Nothing is left of it.
    over: CancellationToken,
}

/// All of this host.
pub(crate) struct Readers {
    known: Mutex<HashMap<SnapshotKey, Reader>>,
    /// Held by each until nothing is left of it.
    places: Arc<Semaphore>,
    /// All of them end, and no more are made.
    closing: CancellationToken,
}

impl Default for Readers {
    fn default() -> Self {
        let places = Arc::new(Semaphore::new(SNAPSHOT_READERS_MAX));
        Self { known: Mutex::default(), places, closing: CancellationToken::new() }
    }
}

impl Readers {
    fn known(&self) -> MutexGuard<'_, HashMap<SnapshotKey, Reader>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the reader `key`, which another one may have followed already.
    fn forget(&self, snapshot: &SnapshotKey, key: GenerationKey) {
        if let Entry::Occupied(known) = self.known().entry(*snapshot)
            && known.get().key == key
        {
            known.remove();
        }
    }

    /// Has the one end that was unused for longest, if any is unused.
    fn evict(&self) -> bool {
        let mut known = self.known();
        let made = known.iter().filter_map(|(snapshot, reader)| match &*reader.made.borrow() {
            Some(Ok(handle)) => Some((*snapshot, handle.clone(), handle.shared.gate.last_use())),
            _ => None,
        });
        let mut made: Vec<_> = made.collect();
        made.sort_by_key(|(.., last)| *last);
        let unused = made.into_iter().find(|(_, handle, last)| handle.shared.gate.close_if_unused_since(*last));
        let evicted = unused.and_then(|(snapshot, ..)| known.remove(&snapshot));
        evicted.is_some_and(|reader| {
            reader.end.cancel();
            true
        })
    }

    /// A place for one more, now or as soon as an unused one is gone.
    async fn place(&self) -> Result<OwnedSemaphorePermit, EngineError> {
        let full = || {
            let message = format!("{SNAPSHOT_READERS_MAX} snapshots are being read on this host");
            EngineError::new(ErrorCode::Overloaded, message)
        };
        if let Ok(place) = Arc::clone(&self.places).try_acquire_owned() {
            return Ok(place);
        }
        // Where there are not too many, one that is ending already has the place; else each that is asked to end makes room for one.
        if self.known().len() > SNAPSHOT_READERS_MAX && !self.evict() {
            return Err(full());
        }
        match timeout(PLACE_WAIT, Arc::clone(&self.places).acquire_owned()).await {
            Ok(Ok(place)) => Ok(place),
            _ => Err(full()),
        }
    }
}

impl Engine {
    /// A machine with the files of a snapshot: the one that is there, or a new one. It is made to its end when the caller stops
    /// waiting.
    ///
    /// # Errors
    /// `overloaded` when as many snapshots are being read as may be; `snapshot_damaged` when it is not on this host as it was
    /// saved; why no machine could be started from it.
    pub async fn read_snapshot(&self, order: &ReadOrder) -> Result<SnapshotReader, EngineError> {
        for _ in 0..TRIES {
            let (key, mut made) = self.reader_of(order)?;
            let outcome = made.wait_for(Option::is_some).await.map(|outcome| outcome.clone()).ok().flatten();
            let Some(outcome) = outcome else {
                // Its task ended abnormally, or with the service.
                self.readers().forget(&order.snapshot, key);
                return Err(self.abandoned());
            };
            let handle = outcome?;
            if let Some(pass) = handle.shared.gate.enter() {
                return Ok(SnapshotReader { handle, _pass: pass });
            }
            // It ends just now.
            self.readers().forget(&order.snapshot, key);
        }
        Err(EngineError::new(ErrorCode::Overloaded, "the machine that reads the snapshot ended again and again"))
    }

    fn abandoned(&self) -> EngineError {
        match self.readers().closing.is_cancelled() {
            true => going_down(),
            false => EngineError::new(ErrorCode::Internal, "the snapshot cannot be read"),
        }
    }

    /// The reader of a snapshot, which is begun where there is none.
    fn reader_of(&self, order: &ReadOrder) -> Result<(GenerationKey, watch::Receiver<Outcome>), EngineError> {
        let readers = self.readers();
        let mut known = readers.known();
        if readers.closing.is_cancelled() {
            return Err(going_down());
        }
        let vacant = match known.entry(order.snapshot) {
            Entry::Occupied(reader) => return Ok((reader.get().key, reader.get().made.clone())),
            Entry::Vacant(vacant) => vacant,
        };
        let key = GenerationKey::new(uuid::Uuid::now_v7());
        let (tell, made) = watch::channel(None);
        let (end, over) = (readers.closing.child_token(), CancellationToken::new());
        vacant.insert(Reader { key, made: made.clone(), end: end.clone(), over: over.clone() });
        let (engine, order) = (self.clone(), order.clone());
        tokio::spawn(async move {
            // Also when this ends abnormally.
            let _over = over.drop_guard();
            engine.keep_reader(key, &order, &tell, &end).await;
        });
        Ok((key, made))
    }

    /// The whole life of a reader.
    async fn keep_reader(
        &self,
        key: GenerationKey,
        order: &ReadOrder,
        tell: &watch::Sender<Outcome>,
        end: &CancellationToken,
    ) {
        let readers = self.readers();
        let place = readers.place().await;
        let started = match &place {
            Ok(_) => self.start_reader(key, order).await,
            Err(e) => Err(e.clone()),
        };
        let (handle, actor) = match started {
            Ok(started) => started,
            Err(e) => {
                // First, so that the next call tries anew.
                readers.forget(&order.snapshot, key);
                drop(tell.send_replace(Some(Err(e))));
                return;
            }
        };
        match handle.ready().await {
            Ok(_) => {
                info!(machine = %key, snapshot = %order.snapshot, "a snapshot can be read");
                tell.send_replace(Some(Ok(handle.clone())));
                self.until_unused(&handle, end).await;
                readers.forget(&order.snapshot, key);
            }
            Err(e) => {
                readers.forget(&order.snapshot, key);
                tell.send_replace(Some(Err(e)));
            }
        }
        let _ = handle.stop().await;
        // Only when nothing is left of it another one may have its place.
        if let Err(e) = actor.await {
            warn!(machine = %key, error = %e, "the actor of a reader ended abnormally");
        }
        info!(machine = %key, snapshot = %order.snapshot, "a snapshot is not read any more");
    }

    /// Starts the machine and its actor. On failure nothing is left of it.
    async fn start_reader(
        &self,
        key: GenerationKey,
        order: &ReadOrder,
    ) -> Result<(MachineHandle, tokio::task::JoinHandle<()>), EngineError> {
        let world = self.world();
        let record = record(key, order, world.clock.now())?;
        let launch = LaunchOrder {
            key,
            template: order.template.clone(),
            size: order.size,
            egress: EgressOrder::from(EgressPolicy::Off),
            snapshot: Some(order.snapshot),
            disk_only: true,
        };
        let launched = match timeout(world.config.launch_deadline, world.driver.launch(&launch)).await {
            Ok(Ok(instance)) => Ok(instance),
            Ok(Err(e @ DriverError::Damaged(_))) => {
                let what = "the snapshot is not on this host as it was saved";
                Err(EngineError::new(ErrorCode::SnapshotDamaged, what).because(e.to_string()))
            }
            Ok(Err(e)) => Err(e.into()),
            Err(_) => Err(EngineError::new(
                ErrorCode::CreateFailed,
                "the machine that reads the snapshot did not start in time",
            )),
        };
        match launched {
            Ok(instance) => Ok(self.reader_actor(record, Origin::Forked(instance))),
            Err(e) => {
                warn!(machine = %key, snapshot = %order.snapshot, internal = e.internal().unwrap_or(""), "a snapshot cannot be read: {}", e.message());
                let failure = Failure { kind: FailureKind::CreateFailed, message: e.message().to_owned() };
                // Its actor removes what a launch that took too long leaves.
                let (_, actor) = self.reader_actor(record, Origin::Ending(failure));
                let _ = actor.await;
                Err(e)
            }
        }
    }

    fn reader_actor(&self, record: MachineRecord, origin: Origin) -> (MachineHandle, tokio::task::JoinHandle<()>) {
        let shelf = self.shelves().apart(record.key);
        let journal = Arc::new(OffRecord(Mutex::new(record.clone())));
        spawn(World { journal, ..self.world().clone() }, record, origin, shelf)
    }

    /// Waits until a reader is to end: it is told so, nobody used it for long enough, or it ended by itself. What runs in it is no
    /// use of it: nobody started that.
    async fn until_unused(&self, handle: &MachineHandle, end: &CancellationToken) {
        let gate = &handle.shared.gate;
        loop {
            let seen = gate.last_use();
            let left = self.now().until(seen.plus(SNAPSHOT_READER_IDLE_MS));
            if left == 0 && gate.close_if_unused_since(seen) {
                return;
            }
            let pause = Duration::from_millis(left.max(1)).min(LEASE_LOOK_MAX);
            tokio::select! {
                () = end.cancelled() => return,
                () = handle.shared.gone.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Ends the reader of a snapshot and waits until nothing is left of it; one that is still being made ends by itself.
    pub(crate) async fn end_reader(&self, snapshot: &SnapshotKey) {
        let Some(reader) = self.readers().known().remove(snapshot) else { return };
        reader.end.cancel();
        if reader.made.borrow().is_some() {
            reader.over.cancelled().await;
        }
    }

    /// Ends all of them, and makes no more.
    pub(crate) async fn end_readers(&self) {
        self.readers().closing.cancel();
        let over: Vec<_> = self.readers().known().values().map(|reader| reader.over.clone()).collect();
        futures::future::join_all(over.iter().map(CancellationToken::cancelled)).await;
    }
}

fn going_down() -> EngineError {
    EngineError::new(ErrorCode::ShuttingDown, "the service is going down")
}

/// What the actor of a reader takes it for.
fn record(key: GenerationKey, order: &ReadOrder, now: mainbrella_types::Millis) -> Result<MachineRecord, EngineError> {
    let id: MachineId = NAME.parse().map_err(|_| EngineError::new(ErrorCode::Internal, "a reader has no name"))?;
    let ttl_ms = TTL_MAX_SECONDS * 1000;
    let spec = MachineSpec {
        template: order.template.clone(),
        size: order.size,
        egress: EgressPolicy::Off,
        ttl_ms,
        // Its idle time is watched here.
        idle_timeout_ms: None,
        on_idle: OnIdle::Stop,
        auto_resume: false,
        metadata: Default::default(),
        env: Default::default(),
    };
    Ok(MachineRecord {
        key,
        generation: Generation { id, created_at: CreatedAt(now) },
        project: ProjectId::default_project(),
        host: String::new(),
        spec,
        state: MachineState::Creating,
        ending: None,
        lease: Lease { hard_deadline: now.plus(ttl_ms), idle_timeout_ms: None, last_activity: now },
        forked_from: None,
        restored_from: Some(order.snapshot),
        running_at: None,
        ended_at: None,
        revision: 1,
    })
}

/// The record of a machine that nobody keeps: as long as its actor lives, and in its memory alone.
struct OffRecord(Mutex<MachineRecord>);

#[async_trait]
impl Journal for OffRecord {
    async fn apply(&self, key: &GenerationKey, revision: i64, change: Change) -> Result<MachineRecord, JournalError> {
        let mut record = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if record.key != *key || record.revision != revision {
            return Err(JournalError::Stale);
        }
        *record = change.applied_to(record.clone());
        Ok(record.clone())
    }

    async fn living(&self) -> Result<Vec<MachineRecord>, JournalError> {
        Ok(Vec::new())
    }
}
