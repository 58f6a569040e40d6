use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use http::HeaderMap;
use mainbrella_api::egress::wanted;
use mainbrella_api::{CreateMachine, Machine};
use mainbrella_engine::EngineError;
use mainbrella_store::{BeginCreate, Idempotency, NewMachine, Store};
use mainbrella_types::{
    EgressPolicy, ErrorCode, FailureKind, GenerationKey, MachineId, MachineRecord, MachineSpec, MachineState, OnIdle,
    ProjectId, SnapshotKey, limits,
};
use tokio::time::Instant;
use tracing::Instrument as _;

use crate::auth::Permit;
use crate::convert;
use crate::error::{ApiError, ApiResult, sentence};
use crate::extract::{JsonBody, Query};
use crate::idempotency;
use crate::state::AppState;
use crate::verbs::templates;

/// How long a repeated create waits for the first one.
const REPLAY_WAIT: Duration = Duration::from_secs(300);
/// How often the store is asked about a creation that this process does not carry out.
const REPLAY_STEP: Duration = Duration::from_millis(200);

/// Create a machine
///
/// With an Idempotency-Key, repeating the call with the same body within 24 hours returns the same machine; with another body it
/// answers `idempotency_conflict`. The creation goes on when the caller goes away, and a failed one stays inspectable.
#[utoipa::path(post, path = "/v1/machines", tag = "machines", operation_id = "createMachine",
    params(("Idempotency-Key" = Option<String>, Header, description = "1 to 255 printable ASCII characters.")),
    request_body = CreateMachine,
    responses(
        (status = 201, description = "Made by this call, and running.", body = Machine),
        (status = 200, description = "Made by an earlier call with this Idempotency-Key; the machine as it is now.", body = Machine,
            headers(("Idempotency-Replayed" = String, description = "`true`")))))]
pub(crate) async fn create(
    State(state): State<AppState>,
    permit: Permit,
    query: Query,
    headers: HeaderMap,
    JsonBody(body): JsonBody<CreateMachine>,
) -> ApiResult<Response> {
    query.finish()?;
    let idempotency = idempotency::given(&headers, "create machine v1\n", &body)?;
    let (slot, spec) = spec(&state, body)?;
    // On a task of its own: a caller who goes away after the intent is durable must not leave it without an actor.
    let (at, new) = (state.clone(), NewOne { slot, spec, restored_from: None, unlisted: false });
    let work = async move {
        // A repeated create finds its machine even when a new one would be turned down.
        if let Some(id) = &idempotency
            && let Some(before) = at.store.find_create(&permit.project, id, at.now()).await?
        {
            return settle(&at, before).await;
        }
        bring_to_life(&at, &permit.project, new, idempotency).await
    };
    let made = tokio::spawn(work.in_current_span())
        .await
        .map_err(|e| ApiError::internal(format!("a creation ended abnormally: {e}")))??;
    let (Made::New(record) | Made::Before(record)) = &made;
    idempotency::made(matches!(made, Made::Before(_)), &convert::machine(record, &state.traits()))
}

/// A machine that was asked for, and when it was made.
pub(crate) enum Made {
    New(MachineRecord),
    Before(MachineRecord),
}

/// What is asked for.
pub(crate) struct NewOne {
    pub(crate) slot: Option<MachineId>,
    pub(crate) spec: MachineSpec,
    /// The snapshot it starts from instead of its template.
    pub(crate) restored_from: Option<SnapshotKey>,
    /// That snapshot belongs to a template or a build.
    pub(crate) unlisted: bool,
}

/// Makes a machine, unless an earlier call did.
pub(crate) async fn bring_to_life(
    state: &AppState,
    project: &ProjectId,
    mut new: NewOne,
    idempotency: Option<Idempotency>,
) -> ApiResult<Made> {
    let _place = state
        .creations
        .try_acquire()
        .map_err(|_| ApiError::new(ErrorCode::Overloaded, "This host makes as many machines at once as it may."))?;
    has_room(state, project, 1)?;
    // What a snapshot needs of its template is for the driver to know.
    if new.restored_from.is_none() {
        new.spec.template = templates::resolve(state, &new.spec.template).await?;
    }
    let new = NewMachine {
        key: GenerationKey::new(uuid::Uuid::now_v7()),
        project: project.clone(),
        slot: new.slot,
        host: state.config.host_name.clone(),
        spec: new.spec,
        forked_from: None,
        restored_from: new.restored_from,
        unlisted: new.unlisted,
        now: state.now(),
    };
    let begun = state.store.begin_create(new, idempotency).await?;
    settle(state, begun).await
}

/// Carries out what the store said.
pub(super) async fn settle(state: &AppState, begun: BeginCreate) -> ApiResult<Made> {
    match begun {
        BeginCreate::Fresh(record) => {
            let identity = record.generation.clone();
            let creation = state.engine.create(record.clone());
            let watched = async {
                let made = creation.await;
                made.map_err(|e| named(e, &identity.to_string()))
            };
            let handle = watched.await?;
            state.directory.handle_of(&record);
            Ok(Made::New(handle.record()))
        }
        BeginCreate::Replay(record) => {
            let record = finished(state, record).await?;
            let never_ran = record.running_at.is_none() && record.state == MachineState::Failed;
            match &record.ending {
                Some(ending) if never_ran => {
                    let code = match ending.kind {
                        FailureKind::HostFull => ErrorCode::HostFull,
                        FailureKind::SnapshotDamaged => ErrorCode::SnapshotDamaged,
                        _ => ErrorCode::CreateFailed,
                    };
                    Err(named(EngineError::new(code, ending.message.clone()), &record.generation.to_string()))
                }
                _ => Ok(Made::Before(record)),
            }
        }
        BeginCreate::KeyConflict => Err(idempotency::conflict()),
        BeginCreate::SnapshotGone => {
            Err(ApiError::new(ErrorCode::NotFound, "The snapshot was deleted or has expired."))
        }
        BeginCreate::SlotInUse(holder) => Err(ApiError::new(
            ErrorCode::SlotInUse,
            format!("Slot {} is held by the living machine created at {}.", holder.id, holder.created_at),
        )),
    }
}

/// Adds which machine failed, so that it can be inspected.
fn named(e: EngineError, identity: &str) -> ApiError {
    let mut error = ApiError::from(e);
    error.message = format!("{} (machine {identity})", error.message.trim_end_matches('.')).into();
    error
}

/// Waits until a creation that was begun before is over.
pub(super) async fn finished(state: &AppState, mut record: MachineRecord) -> ApiResult<MachineRecord> {
    let deadline = Instant::now() + REPLAY_WAIT;
    while record.state == MachineState::Creating {
        if let Some(handle) = state.directory.handle_of(&record) {
            let mut watch = handle.watch();
            let settled = watch.wait_for(|r| r.state != MachineState::Creating);
            if let Ok(Ok(settled)) = tokio::time::timeout_at(deadline, settled).await {
                return Ok(settled.clone());
            }
        } else {
            tokio::time::sleep(REPLAY_STEP).await;
        }
        if Instant::now() >= deadline {
            return Err(ApiError::new(
                ErrorCode::InProgress,
                format!("Machine {} is still being made.", record.generation),
            ));
        }
        record = reread(&state.store, &record).await?;
    }
    // As its actor knows it now; the record of the store may lag in what is noted lazily.
    Ok(state.directory.handle_of(&record).map_or(record, |handle| handle.record()))
}

async fn reread(store: &Store, record: &MachineRecord) -> ApiResult<MachineRecord> {
    let now = store.machine_by_key(&record.key).await?;
    now.ok_or_else(|| {
        ApiError::new(ErrorCode::NotFound, format!("Machine {} is not remembered any more.", record.generation))
    })
}

/// Refuses `more` machines where this host or project has no room for them.
pub(super) fn has_room(state: &AppState, project: &ProjectId, more: usize) -> ApiResult<()> {
    state.engine.has_room(more)?;
    let max = state.config.max_machines_per_project as usize;
    if state.directory.count(project) + more > max {
        return Err(ApiError::new(ErrorCode::Overloaded, format!("This project already has {max} machines."))
            .hint("Stop machines that are not needed, or raise `max-machines-per-project` of the service."));
    }
    Ok(())
}

fn spec(state: &AppState, body: CreateMachine) -> ApiResult<(Option<MachineId>, MachineSpec)> {
    let slot = body
        .slot
        .map(|s| s.parse::<MachineId>())
        .transpose()
        .map_err(|e| ApiError::invalid(format!("slot must be {}.", e.expected)))?;
    let report = state.engine.report();
    let default = if report.internet { EgressPolicy::Open } else { EgressPolicy::Off };
    let egress = wanted(body.internet, body.egress.as_ref()).map_err(|e| ApiError::invalid(sentence(e)))?;
    let egress = egress.unwrap_or(default);
    let default_idle = if body.persistent { None } else { state.config.idle_timeout };
    let idle_ms = match body.idle_timeout_seconds {
        Some(seconds) => Some(seconds.saturating_mul(1000)),
        None => default_idle.map(|d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX)),
    };
    let (on_idle, auto_resume) = when_idle(state, body.on_idle.into(), body.auto_resume, idle_ms)?;
    let spec = MachineSpec {
        template: body.catalog_id.parse()?,
        size: body.size.parse()?,
        egress,
        ttl_ms: body.ttl_seconds.unwrap_or(limits::TTL_DEFAULT_SECONDS).saturating_mul(1000),
        idle_timeout_ms: idle_ms,
        on_idle,
        auto_resume,
        metadata: body.metadata,
        env: body.env,
    };
    checked(state, &spec)?;
    Ok((slot, spec))
}

/// What becomes of a machine that nobody uses, and whether it comes back by itself.
pub(super) fn when_idle(
    state: &AppState,
    on_idle: OnIdle,
    auto_resume: Option<bool>,
    idle_ms: Option<u64>,
) -> ApiResult<(OnIdle, bool)> {
    let auto_resume = auto_resume.unwrap_or(on_idle == OnIdle::Pause);
    if (on_idle == OnIdle::Pause || auto_resume) && !state.engine.report().memory_snapshot {
        return Err(ApiError::new(ErrorCode::Unsupported, "This host cannot pause machines.")
            .hint("`persistence.autoPause` of `/v1/capabilities` says whether a host can."));
    }
    if on_idle == OnIdle::Pause && idle_ms.is_none() {
        return Err(ApiError::invalid("onIdle pause needs an idle timeout: give idleTimeoutSeconds, too."));
    }
    Ok((on_idle, auto_resume))
}

/// Refuses what is out of bounds, and a policy that this host cannot enforce.
pub(super) fn checked(state: &AppState, spec: &MachineSpec) -> ApiResult<()> {
    state.engine.report().enforces(&spec.egress).map_err(|why| {
        ApiError::new(ErrorCode::Unsupported, sentence(why.to_owned())).hint(
            "`networking` of `/v1/capabilities` says what this host can enforce; `mainbrella doctor` says what it lacks.",
        )
    })?;
    spec.validate()?;
    if spec.metadata.iter().any(|(k, v)| k.contains('\0') || v.contains('\0')) {
        return Err(ApiError::invalid("metadata must be without NUL."));
    }
    Ok(())
}
