//! From the identity a caller names to the machine, or to the reason why not.
//!
//! A call acts on the generation it names or on none: a slot that holds another one answers
//! `generation_mismatch`. A machine of another project does not exist.

use std::time::Duration;

use mainbrella_engine::{EngineError, MachineHandle};
use mainbrella_types::{CreatedAt, ErrorCode, MachineId, MachineRecord, MachineState};

use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::state::AppState;

/// How long a call waits for the actor of a machine whose intent has only just been written.
const ACTOR_WAIT: Duration = Duration::from_secs(2);
const ACTOR_STEP: Duration = Duration::from_millis(10);

/// A machine that was found.
pub(crate) enum Found {
    /// Its actor is on this host.
    Living(MachineHandle),
    /// Nothing acts for it here; its record.
    Resting(Box<MachineRecord>),
}

impl Found {
    /// Looks at the record without copying it.
    pub(crate) fn with<T>(&self, look: impl FnOnce(&MachineRecord) -> T) -> T {
        match self {
            Self::Living(handle) => look(&handle.watch().borrow()),
            Self::Resting(record) => look(record),
        }
    }

    /// The machine, if something can be done with it.
    pub(crate) fn living(self) -> ApiResult<MachineHandle> {
        match self {
            Self::Living(handle) => Ok(handle),
            Self::Resting(record) => Err(not_running(&record)),
        }
    }
}

/// Says that a machine is not running, and why.
pub(crate) fn not_running(record: &MachineRecord) -> ApiError {
    let error: EngineError = mainbrella_engine::machine::handle::not_running(record.state, record.ending.as_ref());
    error.into()
}

/// The newest generation in a slot.
pub(crate) async fn newest(state: &AppState, permit: &Permit, id: &MachineId) -> ApiResult<Found> {
    if let Some(handle) = state.directory.living(&permit.project, id) {
        return Ok(Found::Living(handle));
    }
    let record = state.store.newest_in_slot(&permit.project, id).await?;
    let record = record.ok_or_else(|| ApiError::new(ErrorCode::NotFound, format!("There is no machine {id}.")))?;
    Ok(match state.directory.handle_of(&record) {
        Some(handle) => Found::Living(handle),
        None => Found::Resting(Box::new(record)),
    })
}

/// Exactly the generation that is named.
pub(crate) async fn generation(
    state: &AppState,
    permit: &Permit,
    id: &MachineId,
    created_at: CreatedAt,
) -> ApiResult<Found> {
    let found = newest(state, permit, id).await?;
    let holds = found.with(|r| r.generation.created_at);
    if holds == created_at {
        return Ok(found);
    }
    let message = if created_at < holds {
        format!("The generation of {created_at} has ended; slot {id} holds a newer one.")
    } else {
        format!("Slot {id} never held a generation of {created_at}.")
    };
    Err(ApiError::new(ErrorCode::GenerationMismatch, message))
}

/// As [`generation`], for calls that act: a machine whose intent was written a moment ago is given time to
/// get its actor.
pub(crate) async fn to_act(
    state: &AppState,
    permit: &Permit,
    id: &MachineId,
    created_at: CreatedAt,
) -> ApiResult<Found> {
    let deadline = tokio::time::Instant::now() + ACTOR_WAIT;
    loop {
        let found = generation(state, permit, id, created_at).await?;
        let young = matches!(&found, Found::Resting(r) if r.state == MachineState::Creating && r.host == state.config.host_name);
        if !young || tokio::time::Instant::now() >= deadline {
            return Ok(found);
        }
        tokio::time::sleep(ACTOR_STEP).await;
    }
}
