use std::io;

use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use futures::Stream;
use http::{HeaderMap, StatusCode};
use mainbrella_api::{BuildEvent, BuildEventKind, BuildEvents, StreamName};
use mainbrella_builder::{Event, EventKind, LogReader, OutputStream};
use mainbrella_types::limits;

use super::BuildPath;
use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::{Query, json};
use crate::sse;
use crate::state::AppState;
use crate::verbs::jobs::events::last_event_id;

/// Events in one reading of the log.
const READ_EVENTS: usize = 256;

/// Read the log of a build
///
/// After `cursor` (or `Last-Event-ID`, whichever is further), from any number, also when the build is over. With
/// `Accept: text/event-stream`: what there is and what comes, until `done`, with the number as `id` and a comment every 10 seconds.
/// Else: one page of what there is.
#[utoipa::path(get, path = "/v1/builds/{id}/events", tag = "builds", operation_id = "buildEvents",
    params(("id" = String, Path, description = "The build."),
           ("cursor" = Option<u64>, Query, description = "Events after this one. Default 0: all."),
           ("limit" = Option<u32>, Query, description = "Most events of a page, 1 to 1000. Default 100."),
           ("Last-Event-ID" = Option<u64>, Header, description = "As `cursor`; sent by readers of event streams when they connect again.")),
    responses((status = 200, description = "One page, or the stream.",
               content((BuildEvents = "application/json"), (String = "text/event-stream")))))]
pub(crate) async fn events(
    State(state): State<AppState>,
    permit: Permit,
    BuildPath(id): BuildPath,
    mut query: Query,
    headers: HeaderMap,
) -> ApiResult<Response> {
    let cursor = query.parsed::<u64>("cursor", "the number of an event")?.unwrap_or(0);
    let limit = query.parsed::<u32>("limit", "a whole number from 1 to 1000")?.unwrap_or(limits::LIST_LIMIT_DEFAULT);
    query.finish()?;
    if !(1..=limits::EVENTS_LIMIT_MAX).contains(&limit) {
        return Err(ApiError::invalid("limit must be a whole number from 1 to 1000."));
    }
    let after = cursor.max(last_event_id(&headers)?);
    let mut reader = state.builds()?.events(&id, after)?;
    if sse::is_wanted(&headers) {
        // Who reads on, reads on from a number: nothing need be said.
        return Ok(sse::reply(permit, state.closing.clone(), frames(reader), |_| None));
    }
    let page = reader.page(limit as usize).await.map_err(|e| ApiError::internal(e.to_string()))?;
    let next_cursor = reader.cursor();
    json(StatusCode::OK, &BuildEvents { events: page.into_iter().map(event).collect(), next_cursor })
}

/// The events as frames. Holds one reading of the log, and that only while somebody takes it.
fn frames(reader: LogReader) -> impl Stream<Item = io::Result<Bytes>> + Send {
    futures::stream::unfold(Some(reader), |reader| async move {
        let mut reader = reader?;
        match reader.next(READ_EVENTS).await {
            Ok(events) if events.is_empty() => None,
            Ok(events) => Some((Ok(rendered(events)), Some(reader))),
            Err(e) => {
                tracing::warn!(error = %e, "the log of a build could not be read");
                // The connection ends before its last chunk: a reader knows that this was not the end.
                Some((Err(io::Error::other("the log could not be read")), None))
            }
        }
    })
}

fn rendered(events: Vec<Event>) -> Bytes {
    let mut text = String::new();
    for event in events.into_iter().map(event) {
        // Plain data: it has always a form, and JSON has no line breaks of its own.
        let data = serde_json::to_string(&event).unwrap_or_default();
        text.push_str(&format!("id: {}\nevent: {}\ndata: {data}\n\n", event.sequence, event.kind.as_str()));
    }
    text.into()
}

fn event(event: Event) -> BuildEvent {
    let kind = match event.kind {
        EventKind::Step { step, steps, line, text, cached } => BuildEventKind::Step { step, steps, line, text, cached },
        EventKind::Output { stream, text } => {
            let stream = match stream {
                OutputStream::Stdout => StreamName::Stdout,
                OutputStream::Stderr => StreamName::Stderr,
            };
            BuildEventKind::Output { stream, text }
        }
        EventKind::Notice { text } => BuildEventKind::Notice { text },
        EventKind::Done { state, template, failure } => {
            BuildEventKind::Done { state: super::state(state), template, failure: failure.map(super::failure) }
        }
    };
    BuildEvent { sequence: event.sequence, at_ms: event.at_ms, kind }
}
