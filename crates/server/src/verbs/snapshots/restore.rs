use axum::extract::State;
use axum::response::Response;
use http::HeaderMap;
use mainbrella_api::egress::wanted;
use mainbrella_api::{Machine, RestoreSnapshot};
use mainbrella_types::{ErrorCode, MachineId, MachineSpec, SnapshotRecord, limits};
use tracing::Instrument as _;

use super::{SnapshotPath, is_here, known};
use crate::auth::Permit;
use crate::error::{ApiError, ApiResult, sentence};
use crate::extract::{JsonBody, Query};
use crate::state::AppState;
use crate::verbs::create::{Made, NewOne, bring_to_life, checked, settle, when_idle};
use crate::{convert, idempotency};

/// Start a machine from a snapshot
///
/// A new machine with an identity of its own, of the saved template, size and internet policy; a request that names others is refused as
/// `snapshot_mismatch`. From a workspace files come back, from a full snapshot also memory, processes and jobs with their logs. Previews, secrets
/// and labels do not. With an Idempotency-Key, repeating the call with the same body within 24 hours returns the same machine.
#[utoipa::path(post, path = "/v1/snapshots/{id}/restore", tag = "snapshots", operation_id = "restoreSnapshot",
    params(("id" = String, Path, description = "The snapshot."),
           ("Idempotency-Key" = Option<String>, Header, description = "1 to 255 printable ASCII characters.")),
    request_body = RestoreSnapshot,
    responses(
        (status = 201, description = "Made by this call, and running.", body = Machine),
        (status = 200, description = "Made by an earlier call with this Idempotency-Key; the machine as it is now.", body = Machine,
            headers(("Idempotency-Replayed" = String, description = "`true`")))))]
pub(crate) async fn restore(
    State(state): State<AppState>,
    permit: Permit,
    SnapshotPath(key): SnapshotPath,
    query: Query,
    headers: HeaderMap,
    JsonBody(body): JsonBody<RestoreSnapshot>,
) -> ApiResult<Response> {
    query.finish()?;
    let given = idempotency::given(&headers, &format!("restore snapshot v1\n{key}"), &body)?;
    // On a task of its own: a caller who goes away after the intent is durable must not leave it without an actor.
    let work = async move {
        // A repeated restore finds its machine even when the snapshot is gone.
        if let Some(id) = &given
            && let Some(before) = state.store.find_restore(&permit.project, id, state.now()).await?
        {
            return Ok((settle(&state, before).await?, state));
        }
        let saved = known(&state, &permit, &key).await?;
        let (slot, spec) = spec(&state, &saved, body)?;
        is_here(&state, &saved).await?;
        let new = NewOne { slot, spec, restored_from: Some(key), unlisted: false };
        Ok::<_, ApiError>((bring_to_life(&state, &permit.project, new, given).await?, state))
    };
    let made = tokio::spawn(work.in_current_span()).await;
    let (made, state) = made.map_err(|e| ApiError::internal(format!("a restore ended abnormally: {e}")))??;
    let (Made::New(record) | Made::Before(record)) = &made;
    idempotency::made(matches!(made, Made::Before(_)), &convert::machine(record, &state.traits()))
}

/// What was saved, for as long as is asked for; or the refusal of what was not saved.
fn spec(
    state: &AppState,
    saved: &SnapshotRecord,
    body: RestoreSnapshot,
) -> ApiResult<(Option<MachineId>, MachineSpec)> {
    let slot = body
        .slot
        .map(|s| s.parse::<MachineId>())
        .transpose()
        .map_err(|e| ApiError::invalid(format!("slot must be {}.", e.expected)))?;
    wanted(body.internet, body.egress.as_ref()).map_err(|e| ApiError::invalid(sentence(e)))?;
    let policy = wanted(None, body.egress.as_ref()).map_err(|e| ApiError::invalid(sentence(e)))?;
    let fits = [
        ("size", body.size.is_none_or(|size| size == saved.size.as_str())),
        ("catalogId", body.catalog_id.is_none_or(|name| name == saved.template.as_str())),
        ("templateDigest", body.template_digest.is_none_or(|digest| digest == saved.template_digest)),
        ("internet", body.internet.is_none_or(|internet| internet == saved.egress.leads_out())),
        ("egress", policy.is_none_or(|policy| policy == saved.egress)),
    ];
    if let Some((field, _)) = fits.iter().find(|(_, fits)| !fits) {
        return Err(mismatch(field, saved));
    }
    let default_idle = if body.persistent { None } else { state.config.idle_timeout };
    let idle_timeout_ms = match body.idle_timeout_seconds {
        Some(seconds) => Some(seconds.saturating_mul(1000)),
        None => default_idle.map(|d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX)),
    };
    let (on_idle, auto_resume) = when_idle(state, body.on_idle.into(), body.auto_resume, idle_timeout_ms)?;
    let mut env = saved.env.clone();
    env.extend(body.env);
    let spec = MachineSpec {
        template: saved.template.clone(),
        size: saved.size,
        egress: saved.egress.clone(),
        ttl_ms: body.ttl_seconds.unwrap_or(limits::TTL_DEFAULT_SECONDS).saturating_mul(1000),
        idle_timeout_ms,
        on_idle,
        auto_resume,
        metadata: body.metadata,
        env,
    };
    checked(state, &spec)?;
    Ok((slot, spec))
}

fn mismatch(field: &str, saved: &SnapshotRecord) -> ApiError {
    let policy = match saved.egress.leads_out() {
        true => "with internet",
        false => "without internet",
    };
    ApiError::new(ErrorCode::SnapshotMismatch, format!("{field} is not what was saved.")).hint(format!(
        "Leave {field} out: the snapshot is of template {} (digest {}), size {}, {policy} (egress policy `{}`).",
        saved.template,
        if saved.template_digest.is_empty() { "unknown" } else { &saved.template_digest },
        saved.size.as_str(),
        saved.egress
    ))
}
