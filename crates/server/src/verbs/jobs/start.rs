use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use http::HeaderMap;
use mainbrella_api::{CommandLine, Job, StartJob};
use mainbrella_engine::machine::jobs::{JobCommand, JobOrder, StartKey, TerminalSize};
use mainbrella_types::limits;
use mainbrella_types::machine::{check_env, check_user};
use sha2::{Digest as _, Sha256};

use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::{JsonBody, Query, SlotPath};
use crate::fence;
use crate::idempotency;
use crate::state::AppState;
use crate::verbs::run::{check_command, check_cwd};

/// Start a job
///
/// It goes on when the caller goes away and when the service is started again. Text runs as `/bin/sh -lc TEXT`; a list of
/// arguments runs directly. With an `Idempotency-Key` a repeated start within an hour gives the job of the first.
#[utoipa::path(post, path = "/v1/machines/{id}/jobs", tag = "jobs", operation_id = "startJob",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant."),
           ("Idempotency-Key" = Option<String>, Header, description = "1 to 255 printable ASCII characters; kept for an hour.")),
    request_body = StartJob,
    responses((status = 201, description = "Its process runs.", body = Job),
              (status = 200, description = "An earlier start with this key had started it; `Idempotency-Replayed` is `true`.", body = Job)))]
pub(crate) async fn start(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
    headers: HeaderMap,
    JsonBody(body): JsonBody<StartJob>,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let key = start_key(&headers, &body)?;
    let order = order(body)?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let started = permit.while_valid(async { Ok(handle.start_job(order, key).await?) }).await?;
    idempotency::made(started.replayed, &super::job(started.job))
}

fn start_key(headers: &HeaderMap, body: &StartJob) -> ApiResult<Option<StartKey>> {
    let Some(key) = idempotency::key(headers)? else { return Ok(None) };
    // What was understood, not how it was spelled.
    let canonical = serde_json::to_vec(body).map_err(|e| ApiError::internal(e.to_string()))?;
    let digest = |what: &[u8], data: &[u8]| Sha256::new().chain_update(what).chain_update(data).finalize().into();
    Ok(Some(StartKey { key: digest(b"job key v1\n", key.as_bytes()), body: digest(b"start job v1\n", &canonical) }))
}

/// Checks a request and turns it into what the engine takes.
fn order(body: StartJob) -> ApiResult<JobOrder> {
    check_command(&body.command)?;
    check_env(&body.env)?;
    check_cwd(body.cwd.as_deref())?;
    body.user.as_deref().map_or(Ok(()), check_user)?;
    let timeout_ms = body.timeout_ms.unwrap_or(limits::JOB_TIMEOUT_DEFAULT_MS);
    if !(1..=limits::COMMAND_TIMEOUT_MAX_MS).contains(&timeout_ms) {
        return Err(ApiError::invalid("timeoutMs must be 1 to 86400000."));
    }
    Ok(JobOrder {
        command: match body.command {
            CommandLine::Text(text) => JobCommand::Text(text),
            CommandLine::Argv(argv) => JobCommand::Argv(argv),
        },
        cwd: body.cwd,
        user: body.user,
        env: body.env,
        timeout_ms,
        stdin: Bytes::new(),
        stdin_open: body.stdin,
        pty: body.pty.map(terminal).transpose()?,
    })
}

/// Checks the size of a terminal.
pub(super) fn terminal(size: mainbrella_api::TerminalSize) -> ApiResult<TerminalSize> {
    let sides = 1..=limits::TERMINAL_SIDE_MAX;
    if !sides.contains(&size.cols) || !sides.contains(&size.rows) {
        return Err(ApiError::invalid("cols and rows must be 1 to 4096."));
    }
    Ok(TerminalSize { cols: size.cols, rows: size.rows })
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;
    use mainbrella_api::headers::IDEMPOTENCY_KEY;
    use serde_json::json;

    fn parse(v: serde_json::Value) -> ApiResult<JobOrder> {
        order(serde_json::from_value(v).expect("a request"))
    }

    #[test]
    fn defaults_are_the_documented_ones_and_bounds_are_kept() {
        let o = parse(json!({"command": "sleep 1"})).expect("valid");
        assert_eq!((o.timeout_ms, o.stdin_open, o.pty, o.cwd), (300_000, false, None, None));
        assert_eq!(o.command, JobCommand::Text("sleep 1".into()));
        let o = parse(json!({"command": ["cat"], "stdin": true, "pty": {"cols": 4096, "rows": 1}})).expect("valid");
        assert!(o.stdin_open && o.pty.is_some());
        for bad in [
            json!({"command": []}),
            json!({"command": "a", "timeoutMs": 0}),
            json!({"command": "a", "timeoutMs": 86_400_001}),
            json!({"command": "a", "cwd": "tmp"}),
            json!({"command": "a", "user": ""}),
            json!({"command": "a", "user": "a:b:c"}),
            json!({"command": "a", "user": "a b"}),
            json!({"command": "a", "user": "u".repeat(33)}),
            json!({"command": "a", "env": {"": "x"}}),
            json!({"command": "a", "pty": {"cols": 0, "rows": 24}}),
            json!({"command": "a", "pty": {"cols": 80, "rows": 4097}}),
        ] {
            assert!(parse(bad.clone()).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_key_covers_what_was_understood_and_not_how_it_was_spelled() {
        let key = |name: &'static str, body: serde_json::Value| {
            let mut headers = HeaderMap::new();
            headers.insert(IDEMPOTENCY_KEY, HeaderValue::from_static(name));
            start_key(&headers, &serde_json::from_value(body).expect("a request")).expect("valid").expect("one")
        };
        let a = key("k", json!({"command": "a", "stdin": false}));
        assert_eq!(a, key("k", json!({"command": "a"})));
        assert_ne!(a.body, key("k", json!({"command": ["a"]})).body);
        assert_ne!(a.key, key("l", json!({"command": "a"})).key);
    }
}
