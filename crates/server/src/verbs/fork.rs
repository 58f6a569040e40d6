use std::collections::BTreeMap;

use axum::extract::State;
use axum::response::Response;
use http::HeaderMap;
use mainbrella_api::{ChildReceipt, ForkMachine, ForkResult, SecretForChildren};
use mainbrella_engine::MachineHandle;
use mainbrella_store::{BeginFork, Idempotency, NewMachine};
use mainbrella_types::{ErrorCode, FailureKind, GenerationKey, MachineRecord, MachineSpec, MachineState, limits};
use tracing::Instrument as _;

use super::create::{finished, has_room};
use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::{JsonBody, Query, SlotPath};
use crate::state::AppState;
use crate::{convert, fence, heirs, idempotency};

/// Fork a running machine
///
/// Makes copies of it as it is now: memory, processes, disk, jobs with their logs. Each is a machine of its own, with its own id, clock, random
/// numbers, hostname, machine-id and network, under the source's egress policy; the source goes on. Previews stay the source's, and
/// secrets unless `onFork` of each, or `secrets` of this call, hands them on.
/// With an Idempotency-Key, repeating the call with the same body within 24 hours returns the same children.
#[utoipa::path(post, path = "/v1/machines/{id}/fork", tag = "machines", operation_id = "forkMachine",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant."),
           ("Idempotency-Key" = Option<String>, Header, description = "1 to 255 printable ASCII characters.")),
    request_body = ForkMachine,
    responses(
        (status = 201, description = "Made by this call.", body = ForkResult),
        (status = 200, description = "Made by an earlier call with this Idempotency-Key; the children as they are now.", body = ForkResult,
            headers(("Idempotency-Replayed" = String, description = "`true`")))))]
pub(crate) async fn fork(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
    headers: HeaderMap,
    JsonBody(mut body): JsonBody<ForkMachine>,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let count = body.count.unwrap_or(1);
    if !(1..=limits::FORK_CHILDREN_MAX).contains(&count) {
        return Err(ApiError::invalid("count must be 1 to 8."));
    }
    let found = fence::to_act(&state, &permit, &id, created_at).await?;
    let source = found.with(Clone::clone);
    // The same key for another machine is another request.
    let known = ForkMachine { secrets: heirs::without_values(&state, &body.secrets)?, ..body.clone() };
    let given = idempotency::given(&headers, &format!("fork machine v1\n{}", source.key), &known)?;
    let secrets = std::mem::take(&mut body.secrets);
    if secrets.len() > limits::SECRETS_MAX {
        return Err(ApiError::invalid("secrets must name at most 16."));
    }
    let spec = spec(&state, &source, body)?;
    let handle = found.living()?;
    // On a task of its own: a caller who goes away after the intents are durable must not leave them without actors.
    let order = Order { from: source, spec, count, secrets };
    let work = carry_out(state.clone(), permit, handle, order, given).in_current_span();
    let made = tokio::spawn(work).await.map_err(|e| ApiError::internal(format!("a fork ended abnormally: {e}")))??;
    idempotency::made(made.still_ms.is_none(), &made)
}

/// What is to be made.
struct Order {
    from: MachineRecord,
    spec: MachineSpec,
    count: u32,
    secrets: BTreeMap<String, SecretForChildren>,
}

async fn carry_out(
    state: AppState,
    permit: Permit,
    source: MachineHandle,
    order: Order,
    given: Option<Idempotency>,
) -> ApiResult<ForkResult> {
    let Order { from, spec, count, secrets } = order;
    // A repeated fork finds its children, whatever has become of the source.
    if let Some(id) = &given
        && let Some(before) = state.store.find_fork(&permit.project, id, count as usize, state.now()).await?
    {
        return replayed(&state, before).await;
    }
    let _place = state
        .creations
        .try_acquire()
        .map_err(|_| ApiError::new(ErrorCode::Overloaded, "This host makes as many machines at once as it may."))?;
    has_room(&state, &permit.project, count as usize)?;
    let children: Vec<NewMachine> = (0..count)
        .map(|_| NewMachine {
            key: GenerationKey::new(uuid::Uuid::now_v7()),
            project: permit.project.clone(),
            slot: None,
            host: state.config.host_name.clone(),
            spec: spec.clone(),
            forked_from: Some(from.generation.clone()),
            restored_from: None,
            unlisted: false,
            now: state.now(),
        })
        .collect();
    let traits = state.traits();
    source.awake().await?;
    // Nobody changes the secrets of the source between the look at them and the intent.
    let turn = source.secrets_turn().await;
    let heirloom = heirs::heirloom(&state, &from.key, secrets).await?;
    let mut sealed = Vec::new();
    for child in &children {
        sealed.extend(heirloom.sealed_for(&state, child.key)?);
    }
    let begun = state.store.begin_fork(&children, &sealed, given.as_ref()).await?;
    drop(turn);
    match begun {
        BeginFork::Fresh(records) => {
            let receipt = state.engine.fork(&source, records).await?;
            let children: Vec<MachineRecord> = receipt.children.iter().map(MachineHandle::record).collect();
            children.iter().for_each(|child| drop(state.directory.handle_of(child)));
            if let Some(none) = all_failed(&children) {
                return Err(none);
            }
            let alive = receipt.children.iter().zip(&children).filter(|(_, child)| child.running_at.is_some());
            let receipts = alive.map(|(handle, child)| ChildReceipt {
                id: child.generation.id.to_string(),
                created_at: child.generation.created_at.to_string(),
                secrets: heirloom.outcomes.clone(),
                random: handle.reseeded().map(convert::reseeded).unwrap_or_default(),
            });
            Ok(ForkResult {
                receipts: receipts.collect(),
                children: children.iter().map(|child| convert::machine(child, &traits)).collect(),
                still_ms: Some(receipt.still_ms),
                memory_bytes: Some(receipt.memory_bytes),
            })
        }
        before => replayed(&state, before).await,
    }
}

/// The children of an earlier call, as they are now.
async fn replayed(state: &AppState, before: BeginFork) -> ApiResult<ForkResult> {
    let records = match before {
        BeginFork::Fresh(records) | BeginFork::Replay(records) => records,
        BeginFork::KeyConflict => return Err(idempotency::conflict()),
    };
    let mut children = Vec::new();
    for record in records {
        children.push(finished(state, record).await?);
    }
    if let Some(none) = all_failed(&children) {
        return Err(none);
    }
    let traits = state.traits();
    let children = children.iter().map(|child| convert::machine(child, &traits)).collect();
    Ok(ForkResult { children, receipts: Vec::new(), still_ms: None, memory_bytes: None })
}

/// What is said where none of the children ever ran.
fn all_failed(children: &[MachineRecord]) -> Option<ApiError> {
    let never = |child: &MachineRecord| child.state == MachineState::Failed && child.running_at.is_none();
    if !children.iter().all(never) {
        return None;
    }
    let ending = children.first().and_then(|child| child.ending.as_ref());
    let code = match ending.map(|e| e.kind) {
        Some(FailureKind::HostFull) => ErrorCode::HostFull,
        _ => ErrorCode::CreateFailed,
    };
    Some(ApiError::new(
        code,
        format!("None of the copies could be made: {}.", ending.map_or("", |e| e.message.as_str())),
    ))
}

/// The source's own, with what was asked over it.
fn spec(state: &AppState, source: &MachineRecord, body: ForkMachine) -> ApiResult<MachineSpec> {
    let mut spec = source.spec.clone();
    spec.ttl_ms = body.ttl_seconds.unwrap_or(limits::TTL_DEFAULT_SECONDS).saturating_mul(1000);
    if let Some(seconds) = body.idle_timeout_seconds {
        spec.idle_timeout_ms = Some(seconds.saturating_mul(1000));
    }
    spec.metadata.extend(body.metadata);
    spec.validate()?;
    if spec.metadata.iter().any(|(k, v)| k.contains('\0') || v.contains('\0')) {
        return Err(ApiError::invalid("metadata must be without NUL."));
    }
    if !state.engine.report().fork {
        return Err(ApiError::new(ErrorCode::Unsupported, "This host cannot copy running machines."));
    }
    Ok(spec)
}
