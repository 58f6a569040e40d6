//! Requests that are answered before their body was read.
//!
//! A caller that only sends and then looks for the answer would find its connection reset when what it sends is not taken
//! any more. So it is taken, and thrown away, for a while after the answer; the answer says that the connection ends.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::response::Response;
use http::{HeaderValue, Version, header};
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::BodyExt as _;
use tokio_util::sync::CancellationToken;

/// A body of this size is read before its refusal is sent, so that its connection can be used again.
const SMALL: u64 = 64 * 1024;
const SMALL_WAIT: Duration = Duration::from_millis(250);
/// What is still taken after a refusal: bytes, time in all, and silence.
const BYTES: u64 = 1024 * 1024 * 1024;
const WAIT: Duration = Duration::from_secs(30);
const SILENCE: Duration = Duration::from_secs(5);

#[derive(Default)]
struct State {
    /// It was read to its end.
    ended: bool,
    /// What its reader let go of.
    left: Option<Body>,
    /// The answer was given: what is let go of now is drained at once.
    answered: Option<CancellationToken>,
}

/// Watches what becomes of the body of one request.
pub(super) struct Watched {
    state: Arc<Mutex<State>>,
    size: Option<u64>,
    /// It can only be refused by ending the connection, which other versions need not.
    first_version: bool,
    /// The caller sends the body only when it is asked for.
    expects: bool,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Puts a watch on the body of a request, if it has one.
pub(super) fn watch(request: Request) -> (Request, Option<Watched>) {
    if request.body().is_end_stream() {
        return (request, None);
    }
    let state = Arc::new(Mutex::new(State::default()));
    let watched = Watched {
        state: Arc::clone(&state),
        size: request.body().size_hint().exact(),
        first_version: request.version() <= Version::HTTP_11,
        expects: request.headers().contains_key(header::EXPECT),
    };
    (request.map(|body| Body::new(Reading { body: Some(body), state })), Some(watched))
}

impl Watched {
    /// Makes an answer fit what became of the body.
    pub(super) async fn settle(self, response: &mut Response, closing: &CancellationToken) {
        if !self.first_version {
            return;
        }
        let (ended, left) = {
            let mut state = lock(&self.state);
            (state.ended, state.left.take())
        };
        // A reply that is made of the request's body may still read it.
        if ended || (left.is_none() && response.status().is_success()) {
            return;
        }
        let left = match left {
            Some(mut body) if !self.expects && self.size.is_some_and(|n| n <= SMALL) => {
                let small = tokio::time::timeout(SMALL_WAIT, drain(&mut body, SMALL)).await;
                if matches!(small, Ok(true)) {
                    return;
                }
                Some(body)
            }
            left => left,
        };
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        match left {
            Some(body) => linger(body, closing.clone()),
            // Whoever has it lets go of it soon.
            None => {
                let mut state = lock(&self.state);
                match state.left.take() {
                    Some(body) => linger(body, closing.clone()),
                    None => state.answered = Some(closing.clone()),
                }
            }
        }
    }
}

/// Takes what still comes, within bounds. Its connection is one of those that are counted.
fn linger(mut body: Body, closing: CancellationToken) {
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
    runtime.spawn(async move {
        tokio::select! {
            () = closing.cancelled() => {}
            () = tokio::time::sleep(WAIT) => {}
            _ = drain(&mut body, BYTES) => {}
        }
    });
}

/// Reads to the end of a body; says whether it was reached within `most` bytes and without a long silence.
async fn drain(body: &mut Body, most: u64) -> bool {
    let mut read = 0u64;
    loop {
        match tokio::time::timeout(SILENCE, body.frame()).await {
            Ok(None) => return true,
            Ok(Some(Ok(frame))) if read <= most => read += frame.data_ref().map_or(0, |data| data.len() as u64),
            _ => return false,
        }
    }
}

/// A body that is kept when its reader lets go of it early.
struct Reading {
    body: Option<Body>,
    state: Arc<Mutex<State>>,
}

impl HttpBody for Reading {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Some(body) = self.body.as_mut() else { return Poll::Ready(None) };
        let polled = Pin::new(&mut *body).poll_frame(cx);
        let over = matches!(polled, Poll::Ready(None | Some(Err(_))));
        if over || (polled.is_ready() && body.is_end_stream()) {
            lock(&self.state).ended = true;
        }
        if over {
            self.body = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or(SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        let Some(body) = self.body.take() else { return };
        let mut state = lock(&self.state);
        if state.ended {
            return;
        }
        match state.answered.take() {
            Some(closing) => linger(body, closing),
            None => state.left = Some(body),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use futures::StreamExt as _;

    use super::*;

    fn request(body: Body) -> Request {
        Request::new(body)
    }

    /// An endless body; counts what is taken of it.
    fn endless(taken: &Arc<AtomicU64>, pause: Duration) -> Body {
        let taken = Arc::clone(taken);
        Body::from_stream(futures::stream::repeat(()).then(move |()| {
            let taken = Arc::clone(&taken);
            async move {
                tokio::time::sleep(pause).await;
                taken.fetch_add(1, Ordering::Relaxed);
                Ok::<_, std::io::Error>(Bytes::from_static(&[0; 1024]))
            }
        }))
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_taken_after_a_refusal_has_bounds() {
        let taken = Arc::new(AtomicU64::new(0));
        let closing = CancellationToken::new();
        let (asked, watched) = watch(request(endless(&taken, Duration::from_secs(1))));
        drop(asked);
        let mut response = Response::new(Body::empty());
        *response.status_mut() = http::StatusCode::UNAUTHORIZED;
        watched.expect("it has a body").settle(&mut response, &closing).await;
        assert_eq!(response.headers()[header::CONNECTION], "close");
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert!((8..=11).contains(&taken.load(Ordering::Relaxed)));
        tokio::time::sleep(Duration::from_secs(100)).await;
        assert!((28..=31).contains(&taken.load(Ordering::Relaxed)), "half a minute and no longer");
    }

    #[tokio::test(start_paused = true)]
    async fn a_service_that_goes_down_takes_nothing_more_and_silence_ends_it_too() {
        for (pause, after) in [(1, 3), (1000, 5)] {
            let taken = Arc::new(AtomicU64::new(0));
            let closing = CancellationToken::new();
            let (asked, watched) = watch(request(endless(&taken, Duration::from_secs(pause))));
            let mut response = Response::new(Body::empty());
            *response.status_mut() = http::StatusCode::UNAUTHORIZED;
            watched.expect("it has a body").settle(&mut response, &closing).await;
            // Its reader lets go only now.
            drop(asked);
            tokio::time::sleep(Duration::from_secs(after)).await;
            closing.cancel();
            tokio::time::sleep(Duration::from_secs(2000)).await;
            assert!(taken.load(Ordering::Relaxed) <= 3);
        }
    }

    #[tokio::test]
    async fn what_was_read_or_is_small_keeps_its_connection() {
        let closing = CancellationToken::new();
        for read in [true, false] {
            let (asked, watched) = watch(request(Body::from("small")));
            if read {
                let all = axum::body::to_bytes(asked.into_body(), 100).await.expect("read");
                assert_eq!(&all[..], b"small");
            } else {
                drop(asked);
            }
            let mut response = Response::new(Body::empty());
            *response.status_mut() = http::StatusCode::BAD_REQUEST;
            watched.expect("it has a body").settle(&mut response, &closing).await;
            assert!(!response.headers().contains_key(header::CONNECTION));
        }
        assert!(watch(request(Body::empty())).1.is_none());
    }
}
