use std::io;

use axum::extract::ws::WebSocketUpgrade;
use axum::extract::{FromRequestParts as _, Request, State};
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures::Stream;
use http::{HeaderMap, HeaderName, StatusCode, header};
use mainbrella_api::JobEvents;
use mainbrella_engine::machine::jobs::{Event, Follower};
use mainbrella_types::{ErrorCode, limits};

use super::{jobs_of, socket};
use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::{Query, TwoPath, json};
use crate::sse;
use crate::state::AppState;

/// Bytes of output in one reading of the log, and events.
pub(super) const READ_BYTES: usize = 256 * 1024;
pub(super) const READ_EVENTS: usize = 512;
/// Bytes of output in one page.
const PAGE_BYTES: usize = 1024 * 1024;
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// Read the events of a job
///
/// After `cursor` (or `Last-Event-ID`, whichever is further), from the log of the service: nothing is lost or repeated,
/// whatever broke in between. Three forms. With `Accept: text/event-stream`: what there is and what comes, until the exit, with
/// the cursor as `id` and a comment every 10 seconds. As a WebSocket: the same as text frames; the caller may send `JobFrame`s.
/// Else: one page of what there is.
#[utoipa::path(get, path = "/v1/machines/{id}/jobs/{jobId}/events", tag = "jobs", operation_id = "jobEvents",
    params(("id" = String, Path, description = "The slot."),
           ("jobId" = String, Path, description = "The job."),
           ("createdAt" = String, Query, description = "The generation that is meant."),
           ("cursor" = Option<u64>, Query, description = "Events after this one. Default 0: all."),
           ("limit" = Option<u32>, Query, description = "Most events of a page, 1 to 1000. Default 100."),
           ("Last-Event-ID" = Option<u64>, Header, description = "As `cursor`; sent by readers of event streams when they connect again.")),
    responses((status = 200, description = "One page, or the stream.",
               content((JobEvents = "application/json"), (String = "text/event-stream"))),
              (status = 101, description = "The WebSocket.", body = mainbrella_api::JobFrame)))]
pub(crate) async fn events(
    State(state): State<AppState>,
    permit: Permit,
    TwoPath(id, job): TwoPath,
    mut query: Query,
    request: Request,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    let cursor = query.parsed::<u64>("cursor", "the cursor of an event")?.unwrap_or(0);
    let limit = query.parsed::<u32>("limit", "a whole number from 1 to 1000")?.unwrap_or(limits::LIST_LIMIT_DEFAULT);
    query.finish()?;
    if !(1..=limits::EVENTS_LIMIT_MAX).contains(&limit) {
        return Err(ApiError::invalid("limit must be a whole number from 1 to 1000."));
    }
    let (mut parts, _) = request.into_parts();
    let after = cursor.max(last_event_id(&parts.headers)?);
    let jobs = jobs_of(&state, &permit, &id, created_at).await?;
    let mut follower = jobs.follow(&job, after)?;
    if wants_socket(&parts.headers) {
        let upgrade = WebSocketUpgrade::from_request_parts(&mut parts, &state)
            .await
            .map_err(|_| ApiError::invalid("The WebSocket handshake is not as required."))?;
        // The reply to an upgrade is over at once; the socket needs a place of its own.
        let place = state.places.clone().try_acquire_owned().map_err(|_| {
            ApiError::new(ErrorCode::Overloaded, "The service has as many requests in progress as it takes.")
        })?;
        let handle = crate::fence::to_act(&state, &permit, &id, created_at).await?.living().ok();
        let closing = state.closing.clone();
        let limited = upgrade.max_message_size(socket::MESSAGE_MAX).max_frame_size(socket::MESSAGE_MAX);
        return Ok(limited
            .on_upgrade(move |socket| async move {
                let _place = place;
                socket::serve(socket, socket::Ends { follower, handle, job, permit, closing }).await;
            })
            .into_response());
    }
    if sse::is_wanted(&parts.headers) {
        // Who reads on, reads on from a cursor: nothing need be said.
        return Ok(sse::reply(permit, state.closing.clone(), frames(follower), |_| None));
    }
    let list = follower.page(PAGE_BYTES, limit as usize).await?;
    let events = list.into_iter().map(super::event).collect();
    json(StatusCode::OK, &JobEvents { events, next_cursor: follower.cursor(), has_more: follower.has_more() })
}

pub(crate) fn last_event_id(headers: &HeaderMap) -> ApiResult<u64> {
    match headers.get(LAST_EVENT_ID) {
        None => Ok(0),
        Some(value) if value.is_empty() => Ok(0),
        Some(value) => value
            .to_str()
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .ok_or_else(|| ApiError::invalid("Last-Event-ID must be the cursor of an event.")),
    }
}

fn wants_socket(headers: &HeaderMap) -> bool {
    let upgrade = headers.get(header::UPGRADE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    upgrade.split(',').any(|part| part.trim().eq_ignore_ascii_case("websocket"))
}

/// The events as frames. Holds one reading of the log, and that only while somebody takes it.
fn frames(follower: Follower) -> impl Stream<Item = io::Result<Bytes>> + Send {
    futures::stream::unfold(Some(follower), |follower| async move {
        let mut follower = follower?;
        match follower.next(READ_BYTES, READ_EVENTS).await {
            Ok(events) if events.is_empty() => None,
            Ok(events) => Some((Ok(rendered(events)), Some(follower))),
            Err(e) => {
                tracing::warn!(internal = e.internal().unwrap_or_default(), "a job's events could not be read");
                // The connection ends before its last chunk: a reader knows that this was not the end.
                Some((Err(io::Error::other("the log could not be read")), None))
            }
        }
    })
}

fn rendered(events: Vec<Event>) -> Bytes {
    let mut text = String::new();
    for event in events {
        let event = super::event(event);
        let kind = match event.kind {
            mainbrella_api::JobEventKind::Started { .. } => "started",
            mainbrella_api::JobEventKind::Output { .. } => "output",
            mainbrella_api::JobEventKind::Gap { .. } => "gap",
            mainbrella_api::JobEventKind::Exit { .. } => "exit",
        };
        // Plain data: it has always a form, and JSON has no line breaks of its own.
        let json = serde_json::to_string(&event).unwrap_or_default();
        text.push_str(&format!("id: {}\nevent: {kind}\ndata: {json}\n\n", event.cursor));
    }
    text.into()
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn what_is_asked_for_is_read_from_the_headers() {
        let with = |name: &'static str, value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
            headers
        };
        assert!(sse::is_wanted(&with("accept", "application/json;q=0.5, Text/Event-Stream;q=1")));
        assert!(!sse::is_wanted(&with("accept", "*/*")) && !sse::is_wanted(&HeaderMap::new()));
        assert!(wants_socket(&with("upgrade", "WebSocket")) && !wants_socket(&with("upgrade", "h2c")));
        assert_eq!(last_event_id(&with("last-event-id", " 17")).expect("a cursor"), 17);
        assert!(last_event_id(&with("last-event-id", "x")).is_err());
    }
}
