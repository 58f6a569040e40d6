//! Snapshots: what is saved of machines, and machines from it.

pub(crate) mod delete;
pub(crate) mod files;
pub(crate) mod get;
pub(crate) mod list;
pub(crate) mod restore;
pub(crate) mod save;
pub(crate) mod update;

use axum::extract::{FromRequestParts, Path};
use http::request::Parts;
use mainbrella_api::{EgressPolicy, Snapshot};
use mainbrella_types::{ErrorCode, SnapshotKey, SnapshotRecord};

use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::state::AppState;

/// The `{id}` of a path. What cannot be a snapshot names none.
pub(crate) struct SnapshotPath(pub(crate) SnapshotKey);

impl FromRequestParts<AppState> for SnapshotPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> ApiResult<Self> {
        let Path(id) = Path::<String>::from_request_parts(parts, state).await.map_err(|_| unknown())?;
        id.parse().map(Self).map_err(|_| unknown())
    }
}

fn unknown() -> ApiError {
    ApiError::new(ErrorCode::NotFound, "There is no snapshot of this id.")
        .hint("List the snapshots; deleted and expired ones are gone.")
}

/// The snapshot that is named.
async fn known(state: &AppState, permit: &Permit, key: &SnapshotKey) -> ApiResult<SnapshotRecord> {
    state.store.snapshot(&permit.project, key, state.now()).await?.ok_or_else(unknown)
}

/// Refuses a snapshot that this host does not hold, before anything is written.
async fn is_here(state: &AppState, saved: &SnapshotRecord) -> ApiResult<()> {
    if saved.host != state.config.host_name {
        let message = format!("The snapshot is kept on host {}, and can be used there only.", saved.host);
        return Err(ApiError::new(ErrorCode::Unsupported, message));
    }
    if !state.engine.snapshots().await?.contains(&saved.key) {
        return Err(ApiError::new(ErrorCode::SnapshotDamaged, "The snapshot is not on its host any more."));
    }
    Ok(())
}

/// A snapshot as callers see it.
fn snapshot(record: &SnapshotRecord) -> Snapshot {
    Snapshot {
        id: record.key.to_string(),
        name: record.name.clone(),
        kind: record.kind.into(),
        source: record.source.to_string(),
        catalog_id: record.template.as_str().to_owned(),
        template_digest: Some(record.template_digest.clone()).filter(|d| !d.is_empty()),
        size: record.size.as_str().to_owned(),
        internet: record.egress.leads_out(),
        egress: EgressPolicy::from(&record.egress),
        bytes: record.bytes,
        created_at_ms: record.created_at.0,
        expires_at_ms: record.expires_at.map(|m| m.0),
        archived: record.archived,
        stop_outcome: None,
    }
}
