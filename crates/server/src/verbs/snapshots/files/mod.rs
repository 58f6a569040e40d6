//! Files of a snapshot, to be read: by the verbs of a machine's own, through a machine of the service's.

pub(crate) mod list;
pub(crate) mod read;
pub(crate) mod read_tree;
pub(crate) mod read_workspace;
pub(crate) mod stat;

use mainbrella_engine::{ReadOrder, SnapshotReader};
use mainbrella_types::{ErrorCode, SnapshotKey};

use super::{is_here, known};
use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::state::AppState;

/// What a snapshot is read through.
async fn reader(state: &AppState, permit: &Permit, key: &SnapshotKey) -> ApiResult<SnapshotReader> {
    let saved = known(state, permit, key).await?;
    is_here(state, &saved).await?;
    let order = ReadOrder { snapshot: saved.key, template: saved.template, size: saved.size };
    permit.while_valid(async { state.engine.read_snapshot(&order).await.map_err(told) }).await
}

/// The answer of a read; that its machine is over says nothing to a caller who never made one.
fn read<T>(answer: ApiResult<T>) -> ApiResult<T> {
    answer.map_err(|e| match e.code() {
        ErrorCode::MachineNotRunning => {
            let lost = ApiError::new(ErrorCode::Overloaded, "What reads the snapshot ended in the middle of it.");
            ApiError { internal: e.internal, ..lost.hint("Ask again, and look whether the snapshot is still there.") }
        }
        _ => e,
    })
}

fn told(e: mainbrella_engine::EngineError) -> ApiError {
    let (code, error) = (e.code(), ApiError::from(e));
    match code {
        ErrorCode::Overloaded => {
            error.hint("Try again in a minute: what reads a snapshot is let go a minute after its last use.")
        }
        ErrorCode::CreateFailed | ErrorCode::GuestUnavailable => {
            error.hint("Try again; `mainbrella doctor` checks the host, whose log says more.")
        }
        _ => error,
    }
}
