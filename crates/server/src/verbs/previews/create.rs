use axum::extract::State;
use axum::response::Response;
use http::HeaderMap;
use mainbrella_api::{CreatePreview, Preview};
use mainbrella_engine::MachineHandle;
use mainbrella_store::{BeginPreview, Idempotency, PreviewRecord, StoreError};
use mainbrella_types::{ErrorCode, limits};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use tracing::Instrument as _;

use super::{ended, expiry, preview};
use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::{JsonBody, Query, SlotPath};
use crate::fence;
use crate::idempotency;
use crate::previews::hash_of;
use crate::state::AppState;

/// Make a port of the machine reachable
///
/// The URL is a credential: whoever has it reaches the port until `expiresAt`, and nothing else. It is told by this call only.
/// With an Idempotency-Key, repeating the call within a day gives the same preview and its URL again. At most eight are active.
#[utoipa::path(post, path = "/v1/machines/{id}/previews", tag = "previews", operation_id = "createPreview",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant."),
           ("Idempotency-Key" = Option<String>, Header, description = "1 to 255 printable ASCII characters; kept for a day.")),
    request_body = CreatePreview,
    responses((status = 201, description = "Made by this call. The URLs are secrets.", body = Preview),
              (status = 200, description = "Made by an earlier call with this Idempotency-Key; `Idempotency-Replayed` is `true`.", body = Preview)))]
pub(crate) async fn create(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
    headers: HeaderMap,
    JsonBody(body): JsonBody<CreatePreview>,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let port = u16::try_from(body.port).ok().filter(|p| *p >= limits::PREVIEW_PORT_MIN);
    let port = port.ok_or_else(|| ApiError::invalid("port must be 1024 to 65535."))?;
    let idempotency = given_key(&headers, &body)?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    // On a task of its own: what was kept must lead somewhere even when the caller went away.
    let work = issue(state.clone(), handle, port, body.ttl_seconds, idempotency).in_current_span();
    let made = tokio::spawn(work).await.map_err(|e| ApiError::internal(format!("issuing ended abnormally: {e}")))??;
    idempotency::made(made.replayed, &made.preview)
}

struct Made {
    preview: Preview,
    replayed: bool,
}

async fn issue(
    state: AppState,
    handle: MachineHandle,
    port: u16,
    ttl_seconds: Option<u64>,
    idempotency: Option<Idempotency>,
) -> ApiResult<Made> {
    let public = state.previews.public().ok_or_else(|| {
        ApiError::new(ErrorCode::Unsupported, "This service does not issue previews.")
            .hint("Start it with an address in `preview-listen`; previews that exist can be listed and revoked.")
    })?;
    let (now, machine) = (state.now(), handle.record());
    let id = format!("pv-{}", uuid::Uuid::now_v7().simple());
    let token = state.previews.token(&id)?;
    let wish = PreviewRecord {
        id,
        machine: machine.key,
        port,
        token_hash: hash_of(&token),
        created_at: now,
        expires_at: expiry(ttl_seconds, now, machine.lease.hard_deadline)?,
        revoked_at: None,
    };
    let begun = match state.store.begin_preview(&wish, idempotency.as_ref()).await {
        Err(StoreError::Uncertain(cause)) => {
            let message = "It is not known whether the preview was made.";
            return Err(reconcile(&wish, message).because(cause.to_string()));
        }
        begun => begun?,
    };
    match begun {
        BeginPreview::Fresh(record) => {
            state.previews.admit_unless_ended(&state.store, &record, &handle).await?;
            Ok(Made { preview: preview(&record, Some((public, &token))), replayed: false })
        }
        BeginPreview::Replay(record) if !record.is_active(now) => Err(ended()),
        BeginPreview::Replay(record) => {
            let token = state.previews.token(&record.id)?;
            if !bool::from(hash_of(&token).ct_eq(&record.token_hash)) {
                return Err(reconcile(&record, "The preview was made, but its URL cannot be told again."));
            }
            state.previews.admit_unless_ended(&state.store, &record, &handle).await?;
            Ok(Made { preview: preview(&record, Some((public, &token))), replayed: true })
        }
        BeginPreview::Conflict => Err(ApiError::new(
            ErrorCode::IdempotencyConflict,
            "This Idempotency-Key was used for another preview of this machine.",
        )),
        BeginPreview::TooMany => {
            Err(ApiError::new(ErrorCode::PreviewLimit, "This generation has as many previews as it may: 8 active."))
        }
        BeginPreview::NotRunning => Err(fence::not_running(&handle.record())),
    }
}

fn reconcile(record: &PreviewRecord, message: &'static str) -> ApiError {
    ApiError::new(ErrorCode::PreviewReconciliationRequired, message).preview(record.id.clone())
}

fn given_key(headers: &HeaderMap, body: &CreatePreview) -> ApiResult<Option<Idempotency>> {
    let Some(key) = idempotency::key(headers)? else { return Ok(None) };
    // What was understood, not how it was spelled.
    let ttl = body.ttl_seconds.unwrap_or(limits::PREVIEW_TTL_DEFAULT_SECONDS);
    let canonical = format!("create preview v1\n{}\n{ttl}", body.port);
    Ok(Some(Idempotency { key: key.to_owned(), body_hash: Sha256::digest(canonical.as_bytes()).into() }))
}
