use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use http::StatusCode;
use mainbrella_api::{Job, JobList};
use mainbrella_types::limits;

use super::jobs_of;
use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::{Query, SlotPath, TwoPath, json};
use crate::state::AppState;

/// List the jobs of a machine, newest first
///
/// Those that have ended too, and after the end of the machine for as long as its record is kept.
#[utoipa::path(get, path = "/v1/machines/{id}/jobs", tag = "jobs", operation_id = "listJobs",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant."),
           ("limit" = Option<u32>, Query, description = "Most jobs of the page, 1 to 1000. Default 100."),
           ("cursor" = Option<String>, Query, description = "`nextCursor` of the page before.")),
    responses((status = 200, description = "One page.", body = JobList)))]
pub(crate) async fn list(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    let limit = query.parsed::<u32>("limit", "a whole number from 1 to 1000")?.unwrap_or(limits::LIST_LIMIT_DEFAULT);
    let before = query.take("cursor");
    query.finish()?;
    if !(1..=limits::LIST_LIMIT_MAX).contains(&limit) {
        return Err(ApiError::invalid("limit must be a whole number from 1 to 1000."));
    }
    if before.as_ref().is_some_and(|id| id.len() != 32 || !id.bytes().all(|b| b.is_ascii_hexdigit())) {
        return Err(ApiError::invalid("cursor must be the nextCursor of a page before."));
    }
    let page = jobs_of(&state, &permit, &id, created_at).await?.list(limit as usize, before.as_deref());
    let executions = page.jobs.into_iter().map(super::job).collect();
    json(StatusCode::OK, &JobList { executions, next_cursor: page.next })
}

/// Inspect a job
#[utoipa::path(get, path = "/v1/machines/{id}/jobs/{jobId}", tag = "jobs", operation_id = "getJob",
    params(("id" = String, Path, description = "The slot."),
           ("jobId" = String, Path, description = "The job."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    responses((status = 200, description = "The job as it is now.", body = Job)))]
pub(crate) async fn get(
    State(state): State<AppState>,
    permit: Permit,
    TwoPath(id, job): TwoPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    json(StatusCode::OK, &super::job(jobs_of(&state, &permit, &id, created_at).await?.get(&job)?))
}

/// Wait for a job
///
/// Answers when the job has ended or the wait is over, whichever is first; `state` says which.
#[utoipa::path(get, path = "/v1/machines/{id}/jobs/{jobId}/wait", tag = "jobs", operation_id = "waitForJob",
    params(("id" = String, Path, description = "The slot."),
           ("jobId" = String, Path, description = "The job."),
           ("createdAt" = String, Query, description = "The generation that is meant."),
           ("timeoutMs" = Option<u64>, Query, description = "Longest wait, milliseconds. Default and most: 60000.")),
    responses((status = 200, description = "The job as it is then.", body = Job)))]
pub(crate) async fn wait(
    State(state): State<AppState>,
    permit: Permit,
    TwoPath(id, job): TwoPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    let wait = query.parsed::<u64>("timeoutMs", "a whole number of milliseconds")?.unwrap_or(limits::JOB_WAIT_MAX_MS);
    query.finish()?;
    if wait > limits::JOB_WAIT_MAX_MS {
        return Err(ApiError::invalid("timeoutMs must be at most 60000."));
    }
    let jobs = jobs_of(&state, &permit, &id, created_at).await?;
    let waited = permit.while_valid(async { Ok(jobs.wait(&job, Duration::from_millis(wait)).await?) });
    let view = tokio::select! {
        biased;
        view = waited => view?,
        () = state.closing.cancelled() => jobs.get(&job)?,
    };
    json(StatusCode::OK, &super::job(view))
}

/// Forget a job that has ended
///
/// Its output is removed. Its idempotency key goes on to name it until its hour is over.
#[utoipa::path(delete, path = "/v1/machines/{id}/jobs/{jobId}", tag = "jobs", operation_id = "forgetJob",
    params(("id" = String, Path, description = "The slot."),
           ("jobId" = String, Path, description = "The job."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    responses((status = 204, description = "Forgotten.")))]
pub(crate) async fn forget(
    State(state): State<AppState>,
    permit: Permit,
    TwoPath(id, job): TwoPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    jobs_of(&state, &permit, &id, created_at).await?.forget(&job, state.now())?;
    Ok(StatusCode::NO_CONTENT.into_response())
}
