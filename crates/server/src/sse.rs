//! Server-sent events: frames, and the one loop that carries them to a caller with signs of life, until they end, their
//! key is revoked or the service goes down.

use std::io;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{Stream, StreamExt as _};
use http::{HeaderMap, HeaderValue, header};
use mainbrella_types::ErrorCode;
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use crate::auth::Permit;
use crate::error::ApiError;

/// How often a silent stream gives a sign of life.
const ALIVE: Duration = Duration::from_secs(10);

/// Whether a caller asks for events rather than for one reply.
pub(crate) fn is_wanted(headers: &HeaderMap) -> bool {
    let accepts = headers.get_all(header::ACCEPT).iter().filter_map(|v| v.to_str().ok());
    accepts
        .flat_map(|v| v.split(','))
        .any(|kind| kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("text/event-stream")))
}

/// One event. JSON has no line break, so the data is one line.
pub(crate) fn frame<T: Serialize>(name: &str, data: &T) -> Bytes {
    let mut frame = format!("event: {name}\ndata: ").into_bytes();
    if serde_json::to_writer(&mut frame, data).is_err() {
        return Bytes::new();
    }
    frame.extend_from_slice(b"\n\n");
    frame.into()
}

/// What is said when a stream ends before its events do. What it makes of the reason is the last frame; `None`: nothing,
/// for readers who go on from a number of their own.
pub(crate) trait Farewell: FnOnce(ApiError) -> Option<Bytes> + Send + 'static {}

impl<F: FnOnce(ApiError) -> Option<Bytes> + Send + 'static> Farewell for F {}

/// A reply that carries `frames` until they end, the key is revoked or the service is `closing`. A frame that is an error
/// breaks the connection off, so that its reader knows that this was not the end. Proxies are asked not to hold it back.
/// `frames` are only asked for when somebody takes them.
pub(crate) fn reply(
    permit: Permit,
    closing: CancellationToken,
    frames: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
    farewell: impl Farewell,
) -> Response {
    let carried = Carried { frames: frames.boxed(), permit, closing, farewell };
    let mut response = Response::new(Body::from_stream(carry(carried)));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

struct Carried<F> {
    frames: BoxStream<'static, io::Result<Bytes>>,
    permit: Permit,
    closing: CancellationToken,
    farewell: F,
}

fn carry<F: Farewell>(carried: Carried<F>) -> impl Stream<Item = io::Result<Bytes>> + Send {
    futures::stream::unfold(Some(carried), |carried| async move {
        let mut c = carried?;
        let next = tokio::select! {
            biased;
            () = c.permit.revoked() => Err(ApiError::new(ErrorCode::Unauthenticated, "The API key was revoked.")),
            () = c.closing.cancelled() => Err(ApiError::new(ErrorCode::ShuttingDown, "The service is going down.")),
            next = tokio::time::timeout(ALIVE, c.frames.next()) => Ok(next),
        };
        match next {
            Err(reason) => (c.farewell)(reason).map(|last| (Ok(last), None)),
            Ok(Err(_)) => Some((Ok(Bytes::from_static(b": alive\n\n")), Some(c))),
            Ok(Ok(None)) => None,
            Ok(Ok(Some(Ok(frame)))) => Some((Ok(frame), Some(c))),
            Ok(Ok(Some(Err(e)))) => Some((Err(e), None)),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_wanted_where_they_are_named() {
        let with = |v: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::ACCEPT, HeaderValue::from_static(v));
            is_wanted(&headers)
        };
        assert!(with("text/event-stream") && with("application/json;q=0.5, Text/Event-Stream; q=1"));
        assert!(!with("application/json") && !with("*/*") && !is_wanted(&HeaderMap::new()));
    }

    #[test]
    fn a_frame_is_one_line_of_data() {
        let data = serde_json::json!({"text": "a\nb\r\n"});
        assert_eq!(frame("stdout", &data), "event: stdout\ndata: {\"text\":\"a\\nb\\r\\n\"}\n\n");
    }
}
