use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest as _, Request, State};
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use mainbrella_api::{CancelJob, Job, SendSignal, StdinAccepted, TerminalSize};
use mainbrella_types::{ErrorCode, limits};

use super::start::terminal;
use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::{JsonBody, Query, TwoPath, json};
use crate::fence;
use crate::state::AppState;

/// How long a caller may take to send input.
const BODY_WAIT: Duration = Duration::from_secs(30);

/// Cancel a job
///
/// TERM to its process group, KILL to what is left after the grace. A job that has ended stays as it is. Answers when the
/// machine was asked; wait for the job to see its end.
#[utoipa::path(post, path = "/v1/machines/{id}/jobs/{jobId}/cancel", tag = "jobs", operation_id = "cancelJob",
    params(("id" = String, Path, description = "The slot."),
           ("jobId" = String, Path, description = "The job."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    request_body(content = Option<CancelJob>, description = "May be left out."),
    responses((status = 200, description = "It was asked to end.", body = Job)))]
pub(crate) async fn cancel(
    State(state): State<AppState>,
    permit: Permit,
    TwoPath(id, job): TwoPath,
    mut query: Query,
    request: Request,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let bare = request.headers().get(header::CONTENT_TYPE).is_none();
    let body = if bare { CancelJob::default() } else { JsonBody::<CancelJob>::from_request(request, &state).await?.0 };
    let grace = body.grace_ms.unwrap_or(limits::JOB_GRACE_DEFAULT_MS);
    if grace > limits::JOB_GRACE_MAX_MS {
        return Err(ApiError::invalid("graceMs must be at most 60000."));
    }
    let view = match fence::to_act(&state, &permit, &id, created_at).await? {
        fence::Found::Living(handle) => handle.cancel_job(&job, Duration::from_millis(grace)).await?,
        // With its machine it has ended already.
        fence::Found::Resting(record) => state.engine.jobs_of(&record).await?.get(&job)?,
    };
    json(StatusCode::OK, &super::job(view))
}

/// Send a signal to a job
///
/// To its process group.
#[utoipa::path(post, path = "/v1/machines/{id}/jobs/{jobId}/signal", tag = "jobs", operation_id = "signalJob",
    params(("id" = String, Path, description = "The slot."),
           ("jobId" = String, Path, description = "The job."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    request_body = SendSignal,
    responses((status = 200, description = "It was sent.", body = Job)))]
pub(crate) async fn signal(
    State(state): State<AppState>,
    permit: Permit,
    TwoPath(id, job): TwoPath,
    mut query: Query,
    JsonBody(body): JsonBody<SendSignal>,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let signal = body.signal.signal()?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    json(StatusCode::OK, &super::job(handle.signal_job(&job, signal.number()).await?))
}

/// Change the size of a job's terminal
#[utoipa::path(post, path = "/v1/machines/{id}/jobs/{jobId}/resize", tag = "jobs", operation_id = "resizeJob",
    params(("id" = String, Path, description = "The slot."),
           ("jobId" = String, Path, description = "The job."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    request_body = TerminalSize,
    responses((status = 200, description = "The job was told, by SIGWINCH.", body = Job)))]
pub(crate) async fn resize(
    State(state): State<AppState>,
    permit: Permit,
    TwoPath(id, job): TwoPath,
    mut query: Query,
    JsonBody(body): JsonBody<TerminalSize>,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let size = terminal(body)?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    json(StatusCode::OK, &super::job(handle.resize_job(&job, size).await?))
}

/// Write to the input of a job
///
/// All of the body is taken, or nothing of it. At most 64 KiB at once, 1 MiB in all, 256 KiB that the job has not read. After
/// a failure that is not one of `payload_too_large`, `stdin_full`, `stdin_limit`, `stdin_closed` and `job_ended` it is not
/// known whether the input arrived: it counts as accepted, and must not be sent again.
#[utoipa::path(post, path = "/v1/machines/{id}/jobs/{jobId}/stdin", tag = "jobs", operation_id = "writeJobStdin",
    params(("id" = String, Path, description = "The slot."),
           ("jobId" = String, Path, description = "The job."),
           ("createdAt" = String, Query, description = "The generation that is meant."),
           ("eof" = Option<bool>, Query, description = "Whether this is the end of the input. Default false.")),
    request_body(content = [u8], description = "The bytes; may be none with `eof`.", content_type = "application/octet-stream"),
    responses((status = 200, description = "Taken.", body = StdinAccepted)))]
pub(crate) async fn stdin(
    State(state): State<AppState>,
    permit: Permit,
    TwoPath(id, job): TwoPath,
    mut query: Query,
    headers: HeaderMap,
    body: Body,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    let eof = query.parsed::<bool>("eof", "true or false")?.unwrap_or(false);
    query.finish()?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let data = input(&headers, body).await?;
    let done = handle.write_job_stdin(&job, data, eof).await?;
    let reply = StdinAccepted { accepted_bytes: done.accepted, pending_bytes: done.pending, closed: done.closed };
    json(StatusCode::OK, &reply)
}

async fn input(headers: &HeaderMap, body: Body) -> ApiResult<Bytes> {
    let large = || ApiError::new(ErrorCode::PayloadTooLarge, "One write is at most 64 KiB; nothing was taken.");
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|n| n > limits::JOB_STDIN_WRITE_MAX as u64) {
        return Err(large());
    }
    let read = Limited::new(body, limits::JOB_STDIN_WRITE_MAX).collect();
    match tokio::time::timeout(BODY_WAIT, read).await {
        Ok(Ok(whole)) => Ok(whole.to_bytes()),
        Ok(Err(e)) if e.downcast_ref::<LengthLimitError>().is_some() => Err(large()),
        Ok(Err(_)) => Err(ApiError::invalid("The body ended before it was whole; nothing was taken.")),
        Err(_) => Err(ApiError::invalid("The body did not arrive within 30 seconds; nothing was taken.")
            .status(StatusCode::REQUEST_TIMEOUT)),
    }
}
