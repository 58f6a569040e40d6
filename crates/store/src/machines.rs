//! Machines: intent, reading, guarded change.

use mainbrella_types::limits::IDEMPOTENCY_RETENTION_MS;
use mainbrella_types::{
    CreatedAt, EgressPolicy, Failure, Generation, GenerationKey, Lease, MachineId, MachineRecord, MachineSpec,
    MachineState, Millis, OnIdle, ProjectId, SnapshotKey,
};

use crate::backend::{Arg, Row, Tx};
use crate::error::{Result, StoreError};
use crate::record::{self, key_arg};
use crate::secrets::{self, NewSecrets};
use crate::{Store, sql};

/// The operation under which idempotency keys of create are kept.
const CREATE: &str = "machine.create";
/// The operation under which those of restore are kept.
const RESTORE: &str = "snapshot.restore";
/// The operation under which those of fork are kept, each child under a number of its own.
const FORK: &str = "machine.fork";
/// The name in `meta` of the mark below which no new slot starts.
pub(crate) const SLOT_FLOOR: &str = "slot_floor";
/// Records of one page when all living machines are read.
const LIVING_PAGE: i64 = 500;

/// The intent to have a machine.
#[derive(Clone, Debug)]
pub struct NewMachine {
    /// A fresh key; it names the generation for ever.
    pub key: GenerationKey,
    /// Owner; must exist.
    pub project: ProjectId,
    /// The slot; `None`: one is made from the key.
    pub slot: Option<MachineId>,
    /// The host that will hold it.
    pub host: String,
    /// What was asked, already validated.
    pub spec: MachineSpec,
    /// The machine it is to be a copy of.
    pub forked_from: Option<Generation>,
    /// The snapshot it is to start from instead of its template.
    pub restored_from: Option<SnapshotKey>,
    /// That snapshot belongs to a template or a build: it is on no record, and nobody deletes it.
    pub unlisted: bool,
    /// The clock of the caller.
    pub now: Millis,
}

/// The caller's name for one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Idempotency {
    /// The Idempotency-Key, unique within the project and operation while it is kept.
    pub key: String,
    /// SHA-256 of the canonical body.
    pub body_hash: [u8; 32],
}

/// What became of an intent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BeginCreate {
    /// It is durable now; the caller must bring the machine to life.
    Fresh(MachineRecord),
    /// The same request was made before; this is its machine as it is now.
    Replay(MachineRecord),
    /// The key was used with another body.
    KeyConflict,
    /// This living generation holds the slot.
    SlotInUse(Generation),
    /// The snapshot it was to start from is there no more.
    SnapshotGone,
}

/// What became of the intent to fork.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BeginFork {
    /// All children are durable now; the caller must bring them to life.
    Fresh(Vec<MachineRecord>),
    /// The same request was made before; these are its machines as they are now.
    Replay(Vec<MachineRecord>),
    /// The key was used with another body.
    KeyConflict,
}

/// A change to a machine's record. Fields that are `None` stay as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineChange {
    /// The next state; the move must be allowed by the transition table.
    pub state: Option<MachineState>,
    /// Why it ended. A final state needs one, here or set before.
    pub ending: Option<Failure>,
    /// A later hard deadline; an earlier one changes nothing.
    pub hard_deadline: Option<Millis>,
    /// Another idle timeout, milliseconds.
    pub idle_timeout_ms: Option<u64>,
    /// A later use; an earlier one changes nothing.
    pub last_activity: Option<Millis>,
    /// When it first answered; kept once set.
    pub running_at: Option<Millis>,
    /// When it ended. A final state needs it.
    pub ended_at: Option<Millis>,
    /// Another egress policy. From `off` there is none.
    pub egress: Option<EgressPolicy>,
    /// What becomes of it from now on when nobody uses it.
    pub on_idle: Option<OnIdle>,
    /// Whether it comes back by itself from now on.
    pub auto_resume: Option<bool>,
}

/// What became of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Applied {
    /// It is durable; the record as it is now.
    Updated(MachineRecord),
    /// Somebody else wrote in between; the record as it is now.
    Stale(MachineRecord),
    /// The change is not allowed from the record as it is now, which stays so.
    Refused(MachineRecord, Refusal),
    /// There is no such machine.
    Missing,
}

/// Why a change is not allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The record is in a final state.
    #[error("the machine has ended")]
    Ended,
    /// The transition table has no such move.
    #[error("a machine that is {from} cannot become {to}")]
    NoSuchMove {
        /// Its state.
        from: MachineState,
        /// The state asked for.
        to: MachineState,
    },
    /// A machine without a network never gets one.
    #[error("a machine without internet never gets it")]
    Locked,
    /// A final state came without `ending` or `ended_at`.
    #[error("a final state needs an ending and the time of it")]
    EndingMissing,
}

impl MachineChange {
    /// The record after this change.
    ///
    /// # Errors
    /// When the change is not allowed.
    pub fn applied_to(&self, record: &MachineRecord) -> std::result::Result<MachineRecord, Refusal> {
        if record.state.is_final() {
            return Err(Refusal::Ended);
        }
        let mut next = record.clone();
        if let Some(to) = self.state {
            if !record.state.may_become(to) {
                return Err(Refusal::NoSuchMove { from: record.state, to });
            }
            next.state = to;
        }
        if let Some(ending) = &self.ending {
            next.ending = Some(ending.clone());
        }
        if let Some(at) = self.hard_deadline {
            next.lease.hard_deadline = next.lease.hard_deadline.max(at);
        }
        if let Some(ms) = self.idle_timeout_ms {
            next.lease.idle_timeout_ms = Some(ms.min(i64::MAX.unsigned_abs()));
        }
        next.spec.on_idle = self.on_idle.unwrap_or(next.spec.on_idle);
        next.spec.auto_resume = self.auto_resume.unwrap_or(next.spec.auto_resume);
        if let Some(at) = self.last_activity {
            next.lease.touch(at);
        }
        if let Some(policy) = &self.egress {
            if !record.spec.egress.may_become(policy) {
                return Err(Refusal::Locked);
            }
            next.spec.egress = policy.clone();
        }
        next.running_at = next.running_at.or(self.running_at);
        next.ended_at = self.ended_at.or(next.ended_at);
        if next.state.is_final() && (next.ending.is_none() || next.ended_at.is_none()) {
            return Err(Refusal::EndingMissing);
        }
        next.revision += 1;
        Ok(next)
    }
}

impl Store {
    /// Makes the intent to have a machine durable, in one transaction: slot, generation, idempotency key.
    ///
    /// The new generation's creation instant is later than every earlier one of its slot, whatever the clock says.
    /// Its lease counts from `new.now`.
    ///
    /// # Errors
    /// [`StoreError::UnknownProject`]; [`StoreError::Duplicate`] when `new.key` was used before; else what befell
    /// the database.
    pub async fn begin_create(&self, new: NewMachine, idempotency: Option<Idempotency>) -> Result<BeginCreate> {
        // A repeated request is answered without the write lock.
        let operation = if new.restored_from.is_some() { RESTORE } else { CREATE };
        if let Some(id) = &idempotency
            && let Some(answer) = self.find(operation, &new.project, id, new.now).await?
        {
            return Ok(answer);
        }
        let mut tx = self.db.begin().await?;
        let answer = create_in(&mut tx, &new, operation, idempotency.as_ref()).await?;
        match answer {
            BeginCreate::Fresh(_) => tx.commit().await?,
            _ => tx.rollback().await?,
        }
        Ok(answer)
    }

    /// Makes the intent to have all of `children` durable, in one transaction, with the secrets that some of them have; none has a slot of
    /// its own choice.
    ///
    /// # Errors
    /// As [`Store::begin_create`].
    pub async fn begin_fork(
        &self,
        children: &[NewMachine],
        kept: &[NewSecrets],
        idempotency: Option<&Idempotency>,
    ) -> Result<BeginFork> {
        let mut tx = self.db.begin().await?;
        let (mut fresh, mut before) = (Vec::new(), Vec::new());
        for (n, child) in children.iter().enumerate() {
            let own = idempotency.map(|id| of_child(id, n));
            match create_in(&mut tx, child, FORK, own.as_ref()).await? {
                BeginCreate::Fresh(record) => fresh.push(record),
                BeginCreate::Replay(record) => before.push(record),
                BeginCreate::KeyConflict => {
                    tx.rollback().await?;
                    return Ok(BeginFork::KeyConflict);
                }
                BeginCreate::SlotInUse(_) | BeginCreate::SnapshotGone => {
                    tx.rollback().await?;
                    return Err(StoreError::corrupt("the slot of a fresh key is taken"));
                }
            }
        }
        if before.is_empty() {
            for new in kept {
                secrets::begin(&mut tx, new).await?;
            }
            tx.commit().await?;
            return Ok(BeginFork::Fresh(fresh));
        }
        tx.rollback().await?;
        Ok(BeginFork::Replay(before))
    }

    /// What an earlier fork into `count` children with this key became: [`BeginFork::Replay`] or [`BeginFork::KeyConflict`]; `None` when
    /// the key is not in use.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn find_fork(
        &self,
        project: &ProjectId,
        id: &Idempotency,
        count: usize,
        now: Millis,
    ) -> Result<Option<BeginFork>> {
        let mut before = Vec::new();
        for n in 0..count {
            let own = of_child(id, n);
            match self.db.fetch_optional(sql::IDEMPOTENCY_GET, &replay_args(project, FORK, &own, now)).await? {
                Some(row) => match replay(&row, &own)? {
                    BeginCreate::Replay(record) => before.push(record),
                    _ => return Ok(Some(BeginFork::KeyConflict)),
                },
                None if n == 0 => return Ok(None),
                // The children of one fork are written together.
                None => return Ok(Some(BeginFork::KeyConflict)),
            }
        }
        Ok(Some(BeginFork::Replay(before)))
    }

    /// What an earlier create with this key became: [`BeginCreate::Replay`] or [`BeginCreate::KeyConflict`]; `None`
    /// when the key is not in use. A caller asks before it turns a new create down, so that a repeated one still
    /// finds its machine.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn find_create(&self, project: &ProjectId, id: &Idempotency, now: Millis) -> Result<Option<BeginCreate>> {
        self.find(CREATE, project, id, now).await
    }

    /// As [`Store::find_create`], for what is made from a snapshot.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn find_restore(
        &self,
        project: &ProjectId,
        id: &Idempotency,
        now: Millis,
    ) -> Result<Option<BeginCreate>> {
        self.find(RESTORE, project, id, now).await
    }

    async fn find(
        &self,
        operation: &str,
        project: &ProjectId,
        id: &Idempotency,
        now: Millis,
    ) -> Result<Option<BeginCreate>> {
        let row = self.db.fetch_optional(sql::IDEMPOTENCY_GET, &replay_args(project, operation, id, now)).await?;
        row.map(|r| replay(&r, id)).transpose()
    }

    /// One generation of a project.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn machine(&self, project: &ProjectId, generation: &Generation) -> Result<Option<MachineRecord>> {
        let args =
            [Arg::text(project.as_str()), Arg::text(generation.id.as_str()), Arg::Int(generation.created_at.0.0)];
        self.one(sql::MACHINE_BY_GENERATION, &args).await
    }

    /// The newest generation of a slot, living or not.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn newest_in_slot(&self, project: &ProjectId, id: &MachineId) -> Result<Option<MachineRecord>> {
        self.one(sql::MACHINE_NEWEST, &[Arg::text(project.as_str()), Arg::text(id.as_str())]).await
    }

    /// The generation with this key.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn machine_by_key(&self, key: &GenerationKey) -> Result<Option<MachineRecord>> {
        self.one(sql::MACHINE_BY_KEY, &[key_arg(key)]).await
    }

    async fn one(&self, sql: &'static str, args: &[Arg]) -> Result<Option<MachineRecord>> {
        self.db.fetch_optional(sql, args).await?.map(|row| record::machine(&row)).transpose()
    }

    /// Every machine of a host that is not in a final state, by key.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn living(&self, host: &str) -> Result<Vec<MachineRecord>> {
        let mut found: Vec<MachineRecord> = Vec::new();
        loop {
            let after = found.last().map(|r| r.key.to_string()).unwrap_or_default();
            let args = [Arg::text(host), Arg::Text(after), Arg::Int(LIVING_PAGE)];
            let rows = self.db.fetch_all(sql::MACHINE_LIVING, &args).await?;
            let full = rows.len() >= usize::try_from(LIVING_PAGE).unwrap_or(usize::MAX);
            for row in &rows {
                found.push(record::machine(row)?);
            }
            if !full {
                return Ok(found);
            }
        }
    }

    /// Applies `change` to the machine `key` if its record is at `revision` and the change is allowed.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn apply(&self, key: &GenerationKey, revision: i64, change: &MachineChange) -> Result<Applied> {
        let mut tx = self.db.begin().await?;
        let Some(current) = fetch(&mut tx, key).await? else {
            tx.rollback().await?;
            return Ok(Applied::Missing);
        };
        if current.revision != revision {
            tx.rollback().await?;
            return Ok(Applied::Stale(current));
        }
        let next = match change.applied_to(&current) {
            Ok(next) => next,
            Err(refusal) => {
                tx.rollback().await?;
                return Ok(Applied::Refused(current, refusal));
            }
        };
        if tx.execute(sql::MACHINE_UPDATE, &record::update_args(&next, revision)).await? == 1 {
            if next.state.is_final() {
                secrets::forget(&mut tx, key).await?;
            }
            tx.commit().await?;
            return Ok(Applied::Updated(next));
        }
        // Another connection wrote between the read and the guarded write.
        let answer = fetch(&mut tx, key).await?.map_or(Applied::Missing, Applied::Stale);
        tx.rollback().await?;
        Ok(answer)
    }
}

async fn fetch(tx: &mut Tx, key: &GenerationKey) -> Result<Option<MachineRecord>> {
    tx.fetch_optional(sql::MACHINE_BY_KEY, &[key_arg(key)]).await?.map(|row| record::machine(&row)).transpose()
}

/// The key of one child under the key of its fork.
fn of_child(id: &Idempotency, n: usize) -> Idempotency {
    Idempotency { key: format!("{n} {}", id.key), body_hash: id.body_hash }
}

fn replay_args(project: &ProjectId, operation: &str, id: &Idempotency, now: Millis) -> [Arg; 4] {
    [Arg::text(project.as_str()), Arg::text(operation), Arg::text(&id.key), Arg::Int(now.0)]
}

fn replay(row: &Row, id: &Idempotency) -> Result<BeginCreate> {
    if row.bytes(record::MACHINE_COLUMNS)? == id.body_hash {
        Ok(BeginCreate::Replay(record::machine(row)?))
    } else {
        Ok(BeginCreate::KeyConflict)
    }
}

async fn create_in(
    tx: &mut Tx,
    new: &NewMachine,
    operation: &str,
    idempotency: Option<&Idempotency>,
) -> Result<BeginCreate> {
    if tx.fetch_optional(sql::PROJECT_GET, &[Arg::text(new.project.as_str())]).await?.is_none() {
        return Err(StoreError::UnknownProject);
    }
    if let Some(id) = idempotency {
        let claim = [
            Arg::text(new.project.as_str()),
            Arg::text(operation),
            Arg::text(&id.key),
            Arg::Bytes(id.body_hash.to_vec()),
            key_arg(&new.key),
            Arg::Int(new.now.0),
            Arg::Int(new.now.plus(IDEMPOTENCY_RETENTION_MS).0),
        ];
        if tx.execute(sql::IDEMPOTENCY_CLAIM, &claim).await? == 0 {
            return match tx
                .fetch_optional(sql::IDEMPOTENCY_GET, &replay_args(&new.project, operation, id, new.now))
                .await?
            {
                Some(row) => replay(&row, id),
                None => Err(StoreError::corrupt("an idempotency key without its machine")),
            };
        }
    }
    // Held from here on: whoever deletes it afterwards finds this machine on record.
    if let Some(snapshot) = new.restored_from.as_ref().filter(|_| !new.unlisted)
        && tx.execute(sql::SNAPSHOT_HOLD, &[Arg::Text(snapshot.to_string()), Arg::Int(new.now.0)]).await? == 0
    {
        return Ok(BeginCreate::SnapshotGone);
    }
    let slot = new.slot.clone().unwrap_or_else(|| MachineId::generated(new.key));
    let created = match advance(tx, &new.project, &slot, new.now).await? {
        Ok(at) => at,
        Err(holder) => return Ok(BeginCreate::SlotInUse(Generation { id: slot, created_at: holder })),
    };
    let record = MachineRecord {
        key: new.key,
        generation: Generation { id: slot, created_at: CreatedAt(created) },
        project: new.project.clone(),
        host: new.host.clone(),
        state: MachineState::Creating,
        ending: None,
        lease: Lease {
            hard_deadline: new.now.plus(new.spec.ttl_ms),
            idle_timeout_ms: new.spec.idle_timeout_ms,
            last_activity: new.now,
        },
        spec: new.spec.clone(),
        forked_from: new.forked_from.clone(),
        restored_from: new.restored_from,
        running_at: None,
        ended_at: None,
        revision: 1,
    };
    tx.execute(sql::MACHINE_INSERT, &record::insert_args(&record)?).await?;
    for (name, value) in &record.spec.metadata {
        let row = [
            key_arg(&record.key),
            Arg::text(record.project.as_str()),
            Arg::text(name),
            Arg::text(value),
            Arg::Int(created.0),
        ];
        tx.execute(sql::METADATA_INSERT, &row).await?;
    }
    Ok(BeginCreate::Fresh(record))
}

/// Holds the slot and finds the instant of its next generation; `Err`: the living generation that has it.
///
/// The slot's row is taken first: what a sweep or another create committed before is then seen by every later statement.
async fn advance(
    tx: &mut Tx,
    project: &ProjectId,
    slot: &MachineId,
    now: Millis,
) -> Result<std::result::Result<Millis, CreatedAt>> {
    let name = [Arg::text(project.as_str()), Arg::text(slot.as_str())];
    let with = |at: i64| [name[0].clone(), name[1].clone(), Arg::Int(at)];
    let Some(row) = tx.fetch_optional(sql::SLOT_ADVANCE, &with(now.0)).await? else {
        return Err(StoreError::corrupt("a slot that cannot be moved forward"));
    };
    let advanced = row.int(0)?;
    if let Some(row) = tx.fetch_optional(sql::SLOT_LIVING, &name).await? {
        return Ok(Err(CreatedAt(Millis(row.int(0)?))));
    }
    let floor = slot_floor(tx).await?;
    if advanced > floor {
        return Ok(Ok(Millis(advanced)));
    }
    let raised = floor.saturating_add(1);
    tx.execute(sql::SLOT_SET, &with(raised)).await?;
    Ok(Ok(Millis(raised)))
}

/// The highest mark of a slot that was forgotten.
pub(crate) async fn slot_floor(tx: &mut Tx) -> Result<i64> {
    match tx.fetch_optional(sql::META_GET, &[Arg::text(SLOT_FLOOR)]).await? {
        Some(row) => row.text(0)?.parse().map_err(|_| StoreError::corrupt("the floor of slots is not a number")),
        None => Ok(i64::MIN),
    }
}
