use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use http::StatusCode;
use mainbrella_api::{Process, ProcessList, SendSignal};

use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::{JsonBody, Query, SlotPath, TwoPath, json};
use crate::fence;
use crate::state::AppState;

/// List the processes of a machine
///
/// Whoever started them, without the kernel's own.
#[utoipa::path(get, path = "/v1/machines/{id}/processes", tag = "jobs", operation_id = "listProcesses",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    responses((status = 200, description = "The processes.", body = ProcessList)))]
pub(crate) async fn list(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let list = permit.while_valid(async { Ok(handle.processes().await?) }).await?;
    let processes = list.processes.into_iter().map(|p| Process {
        pid: p.pid,
        ppid: p.ppid,
        uid: p.uid,
        state: p.state.to_string(),
        command: p.command,
        argv: p.argv,
        started_at_ms: p.started_at_ms,
        cpu_time_ms: p.cpu_time_ms,
        rss_bytes: p.rss_bytes,
        job_id: p.job_id,
    });
    json(StatusCode::OK, &ProcessList { processes: processes.collect(), truncated: list.truncated })
}

/// Send a signal to a process of a machine
#[utoipa::path(post, path = "/v1/machines/{id}/processes/{pid}/signal", tag = "jobs", operation_id = "signalProcess",
    params(("id" = String, Path, description = "The slot."),
           ("pid" = u32, Path, description = "The process."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    request_body = SendSignal,
    responses((status = 204, description = "It was sent.")))]
pub(crate) async fn signal(
    State(state): State<AppState>,
    permit: Permit,
    TwoPath(id, pid): TwoPath,
    mut query: Query,
    JsonBody(body): JsonBody<SendSignal>,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let signal = body.signal.signal()?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let pid = pid.parse::<u32>().map_err(|_| ApiError::invalid("pid must be the number of a process."))?;
    handle.signal_process(pid, signal.number()).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}
