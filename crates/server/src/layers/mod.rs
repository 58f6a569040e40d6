//! What stands around every request, known path or not: an id, a place in the queue, the host check, one form of
//! error, one line in the log.

mod host;
mod linger;
mod render;

use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::{Body, Bytes};
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use futures::FutureExt as _;
use http::{HeaderMap, HeaderValue, header};
use http_body::{Body as HttpBody, Frame, SizeHint};
use mainbrella_api::headers::REQUEST_ID;
use mainbrella_types::ErrorCode;
use tokio::sync::OwnedSemaphorePermit;
use tracing::Instrument as _;

pub use host::HostRule;

use crate::error::ApiError;
use crate::state::AppState;

/// Longest request id that is taken over from a caller.
const REQUEST_ID_MAX: usize = 64;

/// The other end of the connection, set by the listener.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub SocketAddr);

/// What is known of a request while it is handled.
#[derive(Debug)]
pub struct RequestInfo {
    /// Its id, in the reply and in every line of the log about it.
    pub id: String,
    /// The other end.
    pub peer: Option<SocketAddr>,
    key: OnceLock<String>,
}

impl RequestInfo {
    fn new(headers: &HeaderMap, peer: Option<SocketAddr>) -> Self {
        let given = headers.get(REQUEST_ID).and_then(|v| v.to_str().ok()).filter(|v| is_sane(v));
        let id = given.map_or_else(|| uuid::Uuid::new_v4().simple().to_string(), str::to_owned);
        Self { id, peer, key: OnceLock::new() }
    }

    /// Notes the key under which the request came.
    pub(crate) fn set_key(&self, id: &str) {
        let _ = self.key.set(id.to_owned());
    }
}

fn is_sane(id: &str) -> bool {
    (1..=REQUEST_ID_MAX).contains(&id.len())
        && id.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

/// The outermost layer.
pub async fn outermost(State(state): State<AppState>, mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let peer = request.extensions().get::<Peer>().map(|p| p.0);
    let info = Arc::new(RequestInfo::new(request.headers(), peer));
    let method = request.method().clone();
    let path = request.extensions().get::<MatchedPath>().map_or_else(|| "(none)".to_owned(), |p| p.as_str().to_owned());
    let span = tracing::info_span!("request", id = info.id);
    request.extensions_mut().insert(info.clone());

    let (request, body) = linger::watch(request);
    let mut response = admit(&state, request, next).instrument(span.clone()).await;
    let error = render::apply(&mut response, &info.id);
    if let Some(body) = body {
        body.settle(&mut response, &state.closing).await;
    }
    if let Ok(value) = HeaderValue::from_str(&info.id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response.headers_mut().entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));

    let _entered = span.enter();
    let code = error.as_ref().map(|e| e.code.as_str());
    if let Some(error) = &error {
        render::log(error);
    }
    tracing::info!(
        target: "mainbrella_server::access",
        %method,
        path,
        status = response.status().as_u16(),
        code,
        key = info.key.get().map(String::as_str),
        ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
    );
    response
}

async fn admit(state: &AppState, request: Request, next: Next) -> Response {
    if let Err(e) = state.host_rule.check(request.headers(), request.uri()) {
        return e.into_response();
    }
    let Ok(place) = state.places.clone().try_acquire_owned() else {
        return ApiError::new(ErrorCode::Overloaded, "The service has as many requests in progress as it takes.")
            .into_response();
    };
    match AssertUnwindSafe(next.run(request)).catch_unwind().await {
        Ok(response) => response.map(|body| Body::new(Held { body, place: Some(place) })),
        Err(panic) => {
            let text = panic
                .downcast_ref::<&str>()
                .map(|s| (*s).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| "no message".into());
            ApiError::internal(format!("a handler panicked: {text}")).into_response()
        }
    }
}

/// A body that keeps its request's place until it has been sent.
struct Held {
    body: Body,
    place: Option<OwnedSemaphorePermit>,
}

impl HttpBody for Held {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            self.place = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sane_request_ids_are_taken_over() {
        let with = |v: &[u8]| {
            let mut h = HeaderMap::new();
            h.insert(REQUEST_ID, HeaderValue::from_bytes(v).expect("a header value"));
            RequestInfo::new(&h, None).id
        };
        assert_eq!(with(b"abc-DEF_1.2"), "abc-DEF_1.2");
        for bad in [&b""[..], b"a b", b"a\"b", "\u{e9}".as_bytes(), &[b'a'; 65]] {
            let id = with(bad);
            assert!(id.len() == 32 && id.as_bytes() != bad, "{id}");
        }
        assert_ne!(with(b""), with(b""));
    }
}
