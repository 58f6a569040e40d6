//! Code contexts.

pub(crate) mod close;
pub(crate) mod create;
pub(crate) mod get;
pub(crate) mod interrupt;
pub(crate) mod list;
pub(crate) mod restart;
pub(crate) mod run;

use axum::extract::{FromRequestParts, Path};
use http::request::Parts;
use mainbrella_api::{Context, ContextState};
use mainbrella_engine::{ContextInfo, ContextState as State};
use mainbrella_types::{ErrorCode, MachineId};

use crate::error::{ApiError, ApiResult};
use crate::state::AppState;

/// The `{id}` and `{contextId}` of a path.
pub(crate) struct ContextPath(pub(crate) MachineId, pub(crate) String);

impl FromRequestParts<AppState> for ContextPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> ApiResult<Self> {
        let missing = |what| ApiError::new(ErrorCode::NotFound, format!("There is no {what} of this id."));
        let both = Path::<(String, String)>::from_request_parts(parts, state).await;
        let Path((id, context)) = both.map_err(|_| missing("machine"))?;
        Ok(Self(id.parse().map_err(|_| missing("machine"))?, context))
    }
}

/// A context as callers see it.
fn context(info: ContextInfo) -> Context {
    Context {
        id: info.id,
        language: info.language.as_str().to_owned(),
        state: match info.state {
            State::Starting => ContextState::Starting,
            State::Idle => ContextState::Idle,
            State::Busy => ContextState::Busy,
            State::Dead => ContextState::Dead,
        },
        created_at: info.created_at.to_string(),
    }
}
