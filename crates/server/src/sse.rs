//! Server-sent events: frames, signs of life, and their end when the key is revoked.

use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use http::{HeaderMap, HeaderValue, header};
use serde::Serialize;

use crate::auth::Permit;

/// How often a silent stream gives a sign of life.
pub(crate) const ALIVE: Duration = Duration::from_secs(10);

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

/// A reply whose body is a stream of events, which proxies are asked not to hold back.
pub(crate) fn response(body: Body) -> Response {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// A reply that carries `frames` until they end or the key is revoked.
pub(crate) fn reply(permit: Permit, frames: impl Stream<Item = Bytes> + Send + 'static) -> Response {
    let revoked = async move { permit.revoked().await };
    let frames = frames.map(Some).chain(futures::stream::once(async { None }));
    let begin = tokio::time::Instant::now() + ALIVE;
    let alive = futures::stream::unfold(tokio::time::interval_at(begin, ALIVE), |mut interval| async move {
        interval.tick().await;
        Some((Some(Bytes::from_static(b": alive\n\n")), interval))
    });
    let both = futures::stream::select(frames.boxed(), alive.boxed());
    let until_end = both.take_while(|frame| std::future::ready(frame.is_some())).filter_map(std::future::ready);
    let body = until_end.take_until(Box::pin(revoked)).map(Ok::<_, std::convert::Infallible>);
    let mut response = Response::new(Body::from_stream(body));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    response
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
