//! Secrets: credentials that the gateway of a machine adds to its requests, and the machine never sees.

pub(crate) mod list;
pub(crate) mod put;
pub(crate) mod remove;

use axum::extract::{FromRequestParts, Path};
use http::request::Parts;
use mainbrella_api::Secret;
use mainbrella_engine::SecretsTurn;
use mainbrella_store::SecretRecord;
use mainbrella_types::secret::SecretError;
use mainbrella_types::{CreatedAt, ErrorCode, GenerationKey, MachineId, Placement, SecretName};

use crate::error::{ApiError, ApiResult, sentence};
use crate::state::AppState;

/// The `{id}` and the `{name}` of a path.
pub(crate) struct SecretPath(pub(crate) MachineId, pub(crate) SecretName);

impl FromRequestParts<AppState> for SecretPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> ApiResult<Self> {
        let unknown = || ApiError::new(ErrorCode::NotFound, "There is no machine of this id.");
        let Path((id, name)) =
            Path::<(String, String)>::from_request_parts(parts, state).await.map_err(|_| unknown())?;
        let id = id.parse().map_err(|_| unknown())?;
        Ok(Self(id, name.parse().map_err(|e: SecretError| ApiError::invalid(sentence(e.to_string())))?))
    }
}

/// Puts what is on record now in force; `believed`: the machine is told to believe its authority.
async fn put_in_force(state: &AppState, turn: SecretsTurn, key: &GenerationKey, believed: bool) -> ApiResult<()> {
    match state.vault.kept(&state.store, key).await? {
        Some(kept) => Ok(turn.put_in_force(kept, believed).await?),
        None => {
            turn.clear();
            Ok(())
        }
    }
}

/// A secret as callers see it.
fn secret(record: &SecretRecord) -> Secret {
    let (header, username) = match &record.spec.placement {
        Placement::Header(name) => (Some(name.clone()), None),
        Placement::Basic(username) => (None, Some(username.clone())),
    };
    Secret {
        name: record.spec.name.to_string(),
        host: record.spec.host.to_string(),
        port: record.spec.port,
        header,
        username,
        on_fork: record.on_fork.into(),
        created_at: CreatedAt(record.created_at).to_string(),
    }
}
