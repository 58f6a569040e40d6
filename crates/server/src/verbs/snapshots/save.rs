use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use http::HeaderMap;
use mainbrella_api::{SaveSnapshot, Snapshot, StopOutcome};
use mainbrella_engine::{MachineHandle, SaveOrder};
use mainbrella_store::{BeginSave, Idempotency, StoreError};
use mainbrella_types::{
    ErrorCode, MachineRecord, MachineState, SnapshotKey, SnapshotRecord, check_snapshot_name, check_snapshot_ttl,
};
use tokio::time::Instant;
use tracing::Instrument as _;

use super::snapshot;
use crate::auth::Permit;
use crate::error::{ApiError, ApiResult, chain};
use crate::extract::{JsonBody, Query, SlotPath};
use crate::fence::Found;
use crate::state::AppState;
use crate::verbs::stop::stop_found;
use crate::{fence, idempotency, reconcile};

/// How long a repeated save waits for the first one.
const REPLAY_WAIT: Duration = Duration::from_secs(300);
/// How often it looks.
const REPLAY_STEP: Duration = Duration::from_millis(100);
/// Tries to acknowledge what is saved, and the pause between them.
const FINISH_TRIES: u32 = 5;
const FINISH_STEP: Duration = Duration::from_millis(200);

/// Save a running machine
///
/// The answer comes when what was saved is on the host's disk for good. The machine stands still for a moment and goes on, unless it is to
/// be stopped; then it is, after that. Secrets and previews are not saved. The save goes on when the caller goes away. With an
/// Idempotency-Key, repeating the call with the same body within 24 hours gives the same snapshot; a save that failed has left nothing, and a
/// repeat is a new one.
#[utoipa::path(post, path = "/v1/machines/{id}/snapshots", tag = "snapshots", operation_id = "saveSnapshot",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant."),
           ("Idempotency-Key" = Option<String>, Header, description = "1 to 255 printable ASCII characters.")),
    request_body = SaveSnapshot,
    responses(
        (status = 201, description = "Saved by this call.", body = Snapshot),
        (status = 200, description = "Saved by an earlier call with this Idempotency-Key; the snapshot as it is now.", body = Snapshot,
            headers(("Idempotency-Replayed" = String, description = "`true`")))))]
pub(crate) async fn save(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
    headers: HeaderMap,
    JsonBody(body): JsonBody<SaveSnapshot>,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    check_snapshot_name(&body.name)?;
    body.ttl_seconds.map_or(Ok(()), check_snapshot_ttl)?;
    let found = fence::to_act(&state, &permit, &id, created_at).await?;
    let source = found.with(Clone::clone);
    // The same key for another machine is another request.
    let given = idempotency::given(&headers, &format!("save snapshot v1\n{}", source.key), &body)?;
    // On a task of its own: a caller who goes away must leave neither half a save nor one that nobody acknowledged.
    let work = async move {
        let (record, replayed) = saved(&state, &permit, found, &source, &body, given.as_ref()).await?;
        let mut answer = snapshot(&record);
        if body.stop {
            let found = fence::generation(&state, &permit, &id, created_at).await;
            answer.stop_outcome = Some(stopped(found, &record.key).await?);
        }
        idempotency::made(replayed, &answer)
    };
    tokio::spawn(work.in_current_span())
        .await
        .map_err(|e| ApiError::internal(format!("a save ended abnormally: {e}")))?
}

/// The snapshot, whole and acknowledged, and whether an earlier call made it.
async fn saved(
    state: &AppState,
    permit: &Permit,
    found: Found,
    source: &MachineRecord,
    body: &SaveSnapshot,
    given: Option<&Idempotency>,
) -> ApiResult<(SnapshotRecord, bool)> {
    let deadline = Instant::now() + REPLAY_WAIT;
    let mut handle = Some(found);
    let mut living: Option<MachineHandle> = None;
    loop {
        // A repeated save finds its snapshot even when the machine is gone.
        let before = match given {
            Some(id) => state.store.find_save(&permit.project, id, state.now()).await?,
            None => None,
        };
        let begun = match before {
            Some(begun) => begun,
            None => {
                let machine = match (living.take(), handle.take()) {
                    (Some(machine), _) => machine,
                    (None, Some(found)) => found.living()?,
                    (None, None) => return Err(fence::not_running(source)),
                };
                let wish = wish(state, source, &machine.record(), body).await?;
                // Under way from before its intent is on record: the reconciler leaves it alone.
                let under_way = state.saves.begin(wish.key);
                let most = state.config.max_snapshots_per_project;
                match state.store.begin_save(&wish, given, most).await? {
                    BeginSave::Fresh(record) => {
                        let record = carry_out(state, &machine, &record).await?;
                        drop(under_way);
                        return Ok((record, false));
                    }
                    begun => {
                        living = Some(machine);
                        begun
                    }
                }
            }
        };
        match begun {
            BeginSave::Fresh(_) => return Err(ApiError::internal("a look made a snapshot")),
            BeginSave::Replay(record) if record.expires_at.is_some_and(|at| at <= state.now()) => {
                return Err(gone(&record.key));
            }
            BeginSave::Replay(record) if record.saved => return Ok((record, true)),
            // The first one is still at it, or fails and leaves the key to this one.
            BeginSave::Replay(record) => {
                if Instant::now() >= deadline {
                    let message = format!("Snapshot {} is still being saved.", record.key);
                    return Err(ApiError::new(ErrorCode::InProgress, message));
                }
                tokio::time::sleep(REPLAY_STEP).await;
            }
            BeginSave::Deleted(key) => return Err(gone(&key)),
            BeginSave::Conflict => return Err(idempotency::conflict()),
            BeginSave::TooMany => {
                let most = state.config.max_snapshots_per_project;
                let message = format!("This project already has {most} snapshots.");
                return Err(ApiError::new(ErrorCode::SnapshotLimit, message));
            }
        }
    }
}

fn gone(key: &SnapshotKey) -> ApiError {
    let message = format!("Snapshot {key}, which was saved under this Idempotency-Key, is deleted or has expired.");
    ApiError::new(ErrorCode::NotFound, message).hint("Save under another Idempotency-Key.")
}

/// What is to be saved, as it will be on record.
async fn wish(
    state: &AppState,
    source: &MachineRecord,
    now: &MachineRecord,
    body: &SaveSnapshot,
) -> ApiResult<SnapshotRecord> {
    if now.state != MachineState::Running {
        return Err(fence::not_running(now));
    }
    if !state.engine.report().memory_snapshot {
        return Err(ApiError::new(ErrorCode::Unsupported, "This host cannot save machines."));
    }
    let known = state.engine.templates().await?;
    let template = known.into_iter().find(|t| t.name == source.spec.template);
    let at = state.now();
    Ok(SnapshotRecord {
        key: SnapshotKey::new(uuid::Uuid::now_v7()),
        project: source.project.clone(),
        host: state.config.host_name.clone(),
        name: body.name.clone(),
        kind: body.kind.into(),
        saved: false,
        source: source.generation.clone(),
        template: source.spec.template.clone(),
        template_digest: template.map(|t| t.digest).unwrap_or_default(),
        size: source.spec.size,
        egress: now.spec.egress.clone(),
        env: source.spec.env.clone(),
        bytes: 0,
        created_at: at,
        expires_at: body.ttl_seconds.map(|s| at.plus(s.saturating_mul(1000))),
        archived: false,
    })
}

/// Saves what the intent says, and acknowledges it; of a save that fails nothing is left.
async fn carry_out(state: &AppState, machine: &MachineHandle, intent: &SnapshotRecord) -> ApiResult<SnapshotRecord> {
    let key = intent.key;
    let order = SaveOrder { snapshot: key, kind: intent.kind };
    match machine.save(order).await {
        Ok(receipt) => {
            let bytes = receipt.memory_bytes.saturating_add(receipt.disk_bytes);
            acknowledge(state, &key, bytes).await
        }
        Err(e) => {
            reconcile::take_back_save(state, key).await;
            Err(e.into())
        }
    }
}

/// Makes it durable that the snapshot is whole. What cannot be known stays as it is, for a repeat or the next start to find.
async fn acknowledge(state: &AppState, key: &SnapshotKey, bytes: u64) -> ApiResult<SnapshotRecord> {
    let mut tries = 0;
    loop {
        tries += 1;
        let error = match state.store.finish_save(key, bytes).await {
            Ok(Some(record)) if record.saved => return Ok(record),
            Ok(_) => {
                reconcile::take_back_save(state, *key).await;
                return Err(ApiError::internal("the intent of a save was gone when it was done"));
            }
            Err(e) => e,
        };
        let unclear = matches!(error, StoreError::Uncertain(_));
        if tries < FINISH_TRIES && (unclear || error.retryable()) {
            tracing::warn!(snapshot = %key, error = chain(&error), "a save could not be acknowledged; trying again");
            tokio::time::sleep(FINISH_STEP).await;
            continue;
        }
        if !unclear {
            reconcile::take_back_save(state, *key).await;
        }
        return Err(error.into());
    }
}

/// Stops the machine whose snapshot is acknowledged.
async fn stopped(found: ApiResult<Found>, key: &SnapshotKey) -> ApiResult<StopOutcome> {
    let outcome = match found {
        Ok(found) => stop_found(found).await.map(|(outcome, _)| outcome),
        // The generation has ended, and a newer one holds its slot or nobody remembers it.
        Err(e) if matches!(e.code(), ErrorCode::GenerationMismatch | ErrorCode::NotFound) => Ok(StopOutcome::Stopped),
        Err(e) => Err(e),
    };
    outcome.map_err(|mut e| {
        e.message = format!("Snapshot {key} is saved, but the machine was not stopped: {}", e.message).into();
        e.hint("Stop the machine, or repeat the save with its Idempotency-Key.")
    })
}
