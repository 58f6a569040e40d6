use std::io;
use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use futures::Stream;
use http::{HeaderMap, StatusCode};
use mainbrella_api::{
    CodeError, CodeEvent, CodeOutput, CodeResult, CodeStatus, ErrorBody, OmittedRange, OutputKind, RunCode,
};
use mainbrella_engine::{
    CodeEnd, CodeEvent as Event, CodeOrder, CodeRun, CodeStatus as Status, EngineError, Omitted, TextStream,
};
use mainbrella_types::limits;

use super::ContextPath;
use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::{JsonBody, Query, json};
use crate::layers::RequestInfo;
use crate::state::AppState;
use crate::{fence, sse};

/// Run code in a context
///
/// Waits for the end of the code and returns what it did; an exception is a normal result. With `Accept: text/event-stream` the
/// same arrives as events while it happens: `stdout`, `stderr`, `gap`, `result`, `display`, `error`, and last `done` (or `failed`,
/// with the body of an error). Runs of one context follow each other in the order they came. A caller that closes the connection
/// interrupts its code. Input cannot be asked for: `input()` raises.
#[utoipa::path(post, path = "/v1/machines/{id}/contexts/{contextId}/run", tag = "contexts", operation_id = "runCode",
    params(("id" = String, Path, description = "The slot."),
           ("contextId" = String, Path, description = "The context."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    request_body = RunCode,
    responses((status = 200, description = "It ended, or its time did.", content(
        (CodeResult = "application/json"),
        (CodeEvent = "text/event-stream")))))]
pub(crate) async fn run(
    State(state): State<AppState>,
    permit: Permit,
    ContextPath(id, context): ContextPath,
    mut query: Query,
    info: Option<Extension<Arc<RequestInfo>>>,
    headers: HeaderMap,
    JsonBody(body): JsonBody<RunCode>,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let order = order(body)?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let run = permit.while_valid(async { Ok(handle.run_code(&context, order).await?) }).await?;
    if sse::is_wanted(&headers) {
        let request_id = info.map(|i| i.id.clone()).unwrap_or_default();
        let last = request_id.clone();
        return Ok(sse::reply(permit, state.closing.clone(), frames(run, request_id), move |e| {
            Some(framed(&failed(e, &last)))
        }));
    }
    let result = permit.while_valid(async { Ok(collect(run).await?) }).await?;
    json(StatusCode::OK, &result)
}

fn order(body: RunCode) -> ApiResult<CodeOrder> {
    if body.code.len() > limits::CODE_BYTES_MAX {
        return Err(ApiError::new(mainbrella_types::ErrorCode::PayloadTooLarge, "code must be at most 1 MiB."));
    }
    let timeout_ms = body.timeout_ms.unwrap_or(limits::CODE_TIMEOUT_DEFAULT_MS);
    if !(1..=limits::CODE_TIMEOUT_MAX_MS).contains(&timeout_ms) {
        return Err(ApiError::invalid("timeoutMs must be 1 to 86400000."));
    }
    Ok(CodeOrder { code: body.code, timeout_ms })
}

fn status(status: Status) -> CodeStatus {
    match status {
        Status::Ok => CodeStatus::Ok,
        Status::Error => CodeStatus::Error,
        Status::TimedOut => CodeStatus::TimedOut,
        Status::Interrupted => CodeStatus::Interrupted,
    }
}

fn ms(end: &CodeEnd) -> u64 {
    u64::try_from(end.duration.as_millis()).unwrap_or(u64::MAX)
}

/// Puts the events of a run together.
async fn collect(mut run: CodeRun) -> Result<CodeResult, EngineError> {
    let mut result = CodeResult {
        execution_count: None,
        status: CodeStatus::Interrupted,
        stdout: String::new(),
        stderr: String::new(),
        results: Vec::new(),
        error: None,
        truncated: false,
        stdout_omitted: None,
        stderr_omitted: None,
        duration_ms: 0,
    };
    while let Some(event) = run.next().await {
        match event? {
            Event::Text(TextStream::Stdout, text) => result.stdout.push_str(&text),
            Event::Text(TextStream::Stderr, text) => result.stderr.push_str(&text),
            Event::Gap(stream, Omitted { offset, length }) => {
                let missing = Some(OmittedRange { offset, length });
                match stream {
                    TextStream::Stdout => result.stdout_omitted = missing,
                    TextStream::Stderr => result.stderr_omitted = missing,
                }
            }
            Event::Result(data) => result.results.push(CodeOutput { r#type: OutputKind::Result, data }),
            Event::Display(data) => result.results.push(CodeOutput { r#type: OutputKind::Display, data }),
            Event::Error { name, value, traceback } => result.error = Some(CodeError { name, value, traceback }),
            Event::Done(end) => {
                result.execution_count = end.execution_count;
                result.status = status(end.status);
                result.truncated = end.truncated;
                result.duration_ms = ms(&end);
            }
        }
    }
    Ok(result)
}

/// The events of a run as they come.
fn frames(run: CodeRun, request_id: String) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    futures::stream::unfold((run, request_id), |(mut run, request_id)| async move {
        let event = match run.next().await? {
            Ok(event) => wire(event),
            Err(e) => failed(e.into(), &request_id),
        };
        Some((Ok(framed(&event)), (run, request_id)))
    })
}

fn framed(event: &CodeEvent) -> Bytes {
    sse::frame(event.name(), event)
}

fn failed(error: ApiError, request_id: &str) -> CodeEvent {
    if let Some(internal) = &error.internal {
        tracing::warn!(code = error.code.as_str(), internal, "a run of code could not be followed to its end");
    }
    CodeEvent::Failed(ErrorBody {
        code: error.code.as_str().to_owned(),
        message: error.message.clone().into_owned(),
        hint: error.hint.as_deref().unwrap_or(error.code.hint()).to_owned(),
        request_id: request_id.to_owned(),
        preview_id: None,
    })
}

fn wire(event: Event) -> CodeEvent {
    match event {
        Event::Text(TextStream::Stdout, text) => CodeEvent::Stdout { text },
        Event::Text(TextStream::Stderr, text) => CodeEvent::Stderr { text },
        Event::Gap(stream, Omitted { offset, length }) => {
            let stream = match stream {
                TextStream::Stdout => "stdout",
                TextStream::Stderr => "stderr",
            };
            CodeEvent::Gap { stream: stream.to_owned(), offset, length }
        }
        Event::Result(data) => CodeEvent::Result { data },
        Event::Display(data) => CodeEvent::Display { data },
        Event::Error { name, value, traceback } => CodeEvent::Error(CodeError { name, value, traceback }),
        Event::Done(end) => CodeEvent::Done {
            execution_count: end.execution_count,
            status: status(end.status),
            truncated: end.truncated,
            duration_ms: ms(&end),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_out_of_bounds_is_refused() {
        let parse = |v: serde_json::Value| order(serde_json::from_value(v).expect("a request"));
        assert_eq!(parse(json!({"code": ""})).expect("valid").timeout_ms, 60_000);
        for bad in [
            json!({"code": "1", "timeoutMs": 0}),
            json!({"code": "1", "timeoutMs": 86_400_001}),
            json!({"code": "x".repeat(limits::CODE_BYTES_MAX + 1)}),
        ] {
            assert!(parse(bad.clone()).is_err(), "{:.60}", bad.to_string());
        }
    }

    #[test]
    fn events_look_as_documented() {
        let data = [("text/plain".to_owned(), serde_json::value::to_raw_value("2").expect("text"))].into();
        let line = |event: &CodeEvent| serde_json::to_value(event).expect("JSON");
        assert_eq!(line(&wire(Event::Result(data))), json!({"type": "result", "data": {"text/plain": "2"}}));
        let gap = Event::Gap(TextStream::Stderr, Omitted { offset: 5, length: 7 });
        assert_eq!(line(&wire(gap)), json!({"type": "gap", "stream": "stderr", "offset": 5, "length": 7}));
        let end = CodeEnd {
            status: Status::TimedOut,
            execution_count: Some(3),
            truncated: true,
            duration: std::time::Duration::from_micros(1999),
        };
        let done =
            json!({"type": "done", "executionCount": 3, "status": "timed_out", "truncated": true, "durationMs": 1});
        assert_eq!(line(&wire(Event::Done(end))), done);
        let e = failed(ApiError::new(mainbrella_types::ErrorCode::ContextDead, "It ended."), "r");
        assert_eq!((line(&e)["type"].as_str(), line(&e)["code"].as_str()), (Some("failed"), Some("context_dead")));
    }
}
