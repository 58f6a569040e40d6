//! Living machines by slot, so that a look at one costs no query.
//!
//! It holds nothing that is not true elsewhere: an entry counts only while its actor follows the record, and
//! what is not here is asked of the store.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use mainbrella_engine::{Engine, MachineHandle};
use mainbrella_types::{MachineId, MachineRecord, ProjectId};

/// See the module.
pub struct Directory {
    engine: Engine,
    slots: RwLock<HashMap<(ProjectId, MachineId), MachineHandle>>,
}

/// Whether an actor still writes this machine's record.
fn is_followed(handle: &MachineHandle) -> bool {
    let watch = handle.watch();
    watch.has_changed().is_ok() && !watch.borrow().state.is_final()
}

impl Directory {
    pub(crate) fn new(engine: Engine) -> Self {
        Self { engine, slots: RwLock::default() }
    }

    /// The living machine in a slot, if it is known here.
    pub(crate) fn living(&self, project: &ProjectId, id: &MachineId) -> Option<MachineHandle> {
        let key = (project.clone(), id.clone());
        let found = self.slots.read().unwrap_or_else(PoisonError::into_inner).get(&key).cloned()?;
        if is_followed(&found) {
            return Some(found);
        }
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        if slots.get(&key).is_some_and(|h| !is_followed(h)) {
            slots.remove(&key);
        }
        None
    }

    /// The living machine of this record, if its actor is on this host. It is known from then on.
    pub(crate) fn handle_of(&self, record: &MachineRecord) -> Option<MachineHandle> {
        let handle = self.engine.machine(&record.key)?;
        if !is_followed(&handle) {
            return None;
        }
        let key = (record.project.clone(), record.generation.id.clone());
        self.slots.write().unwrap_or_else(PoisonError::into_inner).insert(key, handle.clone());
        Some(handle)
    }

    /// How many machines of a project live here.
    pub(crate) fn count(&self, project: &ProjectId) -> usize {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots.iter().filter(|((owner, _), handle)| owner == project && is_followed(handle)).count()
    }

    /// Forgets machines that have ended.
    pub(crate) fn tidy(&self) {
        self.slots.write().unwrap_or_else(PoisonError::into_inner).retain(|_, handle| is_followed(handle));
    }
}
