//! Where the engine writes what must survive it. The server implements this over the store.

use async_trait::async_trait;
use mainbrella_net::{Authority, Secret};
use mainbrella_types::{EgressPolicy, Failure, GenerationKey, MachineRecord, MachineState, Millis, OnIdle};

/// A change to a machine's record. Fields that are `None` stay as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// The next state; the move must be allowed by the transition table.
    pub state: Option<MachineState>,
    /// Why it ended.
    pub ending: Option<Failure>,
    /// A later hard deadline.
    pub hard_deadline: Option<Millis>,
    /// Another idle timeout, milliseconds.
    pub idle_timeout_ms: Option<u64>,
    /// A later use.
    pub last_activity: Option<Millis>,
    /// When it first answered.
    pub running_at: Option<Millis>,
    /// When it ended.
    pub ended_at: Option<Millis>,
    /// Another egress policy.
    pub egress: Option<EgressPolicy>,
    /// What becomes of it from now on when nobody uses it.
    pub on_idle: Option<OnIdle>,
    /// Whether it comes back by itself from now on.
    pub auto_resume: Option<bool>,
}

impl Change {
    /// The record as it is after the change.
    #[must_use]
    pub fn applied_to(self, mut record: MachineRecord) -> MachineRecord {
        record.state = self.state.unwrap_or(record.state);
        record.ending = self.ending.or(record.ending);
        record.lease.hard_deadline = self.hard_deadline.unwrap_or(record.lease.hard_deadline);
        record.lease.idle_timeout_ms = self.idle_timeout_ms.or(record.lease.idle_timeout_ms);
        if let Some(at) = self.last_activity {
            record.lease.touch(at);
        }
        if let Some(policy) = self.egress {
            record.spec.egress = policy;
        }
        record.spec.on_idle = self.on_idle.unwrap_or(record.spec.on_idle);
        record.spec.auto_resume = self.auto_resume.unwrap_or(record.spec.auto_resume);
        record.running_at = record.running_at.or(self.running_at);
        record.ended_at = record.ended_at.or(self.ended_at);
        record.revision += 1;
        record
    }
}

/// Why a write did not take effect.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The record is not at this revision any more: somebody else wrote it. Read it again.
    #[error("the record was changed by someone else")]
    Stale,
    /// The store did not take it.
    #[error("the store did not accept the write: {0}")]
    Unavailable(String),
}

/// What the gateway of a machine adds to requests, and as whom it shows itself.
#[derive(Debug)]
pub struct KeptSecrets {
    /// The authority the machine believes.
    pub authority: Authority,
    /// The secrets.
    pub secrets: Vec<Secret>,
}

/// Durable records of machines.
#[async_trait]
pub trait Journal: Send + Sync {
    /// Applies `change` to the record `key` if it is at `revision`, and returns it as it is afterwards.
    async fn apply(&self, key: &GenerationKey, revision: i64, change: Change) -> Result<MachineRecord, JournalError>;
    /// Every record of this host that is not in a final state.
    async fn living(&self) -> Result<Vec<MachineRecord>, JournalError>;
    /// The secrets of a machine. `None`: it never had any.
    async fn secrets(&self, key: &GenerationKey) -> Result<Option<KeptSecrets>, JournalError> {
        let _ = key;
        Ok(None)
    }
}
