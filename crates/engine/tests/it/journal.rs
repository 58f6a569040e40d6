//! A journal in memory, with faults.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use async_trait::async_trait;
use mainbrella_engine::{Change, Journal, JournalError};
use mainbrella_types::{GenerationKey, MachineRecord, MachineState};

#[derive(Default)]
pub struct MemoryJournal {
    records: Mutex<HashMap<GenerationKey, MachineRecord>>,
    /// Every state a record was given, in order.
    pub history: Mutex<Vec<(GenerationKey, MachineState)>>,
    /// How many of the next writes fail.
    pub failures: AtomicU32,
}

impl MemoryJournal {
    pub fn put(&self, record: MachineRecord) {
        self.records.lock().expect("whole").insert(record.key, record);
    }

    pub fn get(&self, key: &GenerationKey) -> MachineRecord {
        self.records.lock().expect("whole")[key].clone()
    }
}

#[async_trait]
impl Journal for MemoryJournal {
    async fn apply(&self, key: &GenerationKey, revision: i64, change: Change) -> Result<MachineRecord, JournalError> {
        if self.failures.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok() {
            return Err(JournalError::Unavailable("a fault was asked for".into()));
        }
        let mut records = self.records.lock().expect("whole");
        let record = records.get_mut(key).ok_or(JournalError::Stale)?;
        if record.revision != revision {
            return Err(JournalError::Stale);
        }
        if let Some(state) = change.state {
            assert!(record.state.may_become(state), "{} -> {state} is not a move", record.state);
            self.history.lock().expect("whole").push((*key, state));
        }
        if let Some(policy) = &change.egress {
            assert!(record.spec.egress.may_become(policy), "off stays off");
        }
        *record = change.applied_to(record.clone());
        Ok(record.clone())
    }

    async fn living(&self) -> Result<Vec<MachineRecord>, JournalError> {
        Ok(self.records.lock().expect("whole").values().filter(|r| !r.state.is_final()).cloned().collect())
    }
}
