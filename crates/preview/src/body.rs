//! Bodies on their way: a caller's, which may not stop, and an application's, which ends with its route.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::WaitForCancellationFutureOwned;

use crate::upstream::Lent;

/// How long a caller may send nothing of a body that is waited for.
const SILENCE_MOST: Duration = Duration::from_secs(60);

/// Why a body broke off.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    #[error("the other side broke off")]
    Hyper(#[from] hyper::Error),
    #[error("the caller sent nothing for a minute")]
    Silent,
    #[error("the preview has ended")]
    Cut,
}

/// What a caller sends.
pub(crate) struct Upload {
    /// `None`: nothing.
    body: Option<Incoming>,
    timer: Option<Pin<Box<Sleep>>>,
    waiting: bool,
}

impl Upload {
    pub(crate) fn new(body: Incoming) -> Self {
        Self { body: Some(body), timer: None, waiting: false }
    }

    pub(crate) fn empty() -> Self {
        Self { body: None, timer: None, waiting: false }
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        if let Poll::Ready(frame) = Pin::new(body).poll_frame(cx) {
            self.waiting = false;
            return Poll::Ready(frame.map(|f| f.map_err(Broken::from)));
        }
        let due = Instant::now() + SILENCE_MOST;
        let begins = !std::mem::replace(&mut self.waiting, true);
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(due)));
        if begins {
            timer.as_mut().reset(due);
        }
        ready!(timer.as_mut().poll(cx));
        Poll::Ready(Some(Err(Broken::Silent)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or(SizeHint::with_exact(0), Body::size_hint)
    }
}

/// What an application replies.
pub(crate) struct Relay {
    body: Incoming,
    /// Resolves when it may go on no longer; `None`: its whole connection ends then.
    cut: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
    /// Its connection, which can be used again once the body has ended well.
    lent: Option<Lent>,
    /// What the body gave and was not asked for yet: a frame, an error, or the end.
    held: Option<Option<Result<Frame<Bytes>, Broken>>>,
    /// Whether it broke off.
    broken: bool,
    _place: OwnedSemaphorePermit,
}

impl Relay {
    pub(crate) fn new(
        body: Incoming,
        cut: Option<WaitForCancellationFutureOwned>,
        lent: Lent,
        place: OwnedSemaphorePermit,
    ) -> Self {
        let mut relay =
            Self { body, cut: cut.map(Box::pin), lent: Some(lent), held: None, broken: false, _place: place };
        relay.settle();
        relay
    }

    /// Takes what has come already, so that it leaves in one piece with the head.
    pub(crate) async fn begin(&mut self) {
        if self.body.is_end_stream() {
            return;
        }
        self.held = poll_fn(|cx| match self.poll_body(cx) {
            Poll::Ready(held) => Poll::Ready(Some(held)),
            Poll::Pending => Poll::Ready(None),
        })
        .await;
    }

    fn settle(&mut self) {
        if self.body.is_end_stream()
            && let Some(lent) = self.lent.take()
        {
            lent.give_back();
        }
    }

    fn poll_body(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let mut polled = Pin::new(&mut self.body).poll_frame(cx);
        if polled.is_pending()
            && let Some(lent) = &mut self.lent
        {
            // Only now is it known that more is wanted.
            lent.drive(cx);
            polled = Pin::new(&mut self.body).poll_frame(cx);
        }
        let frame = ready!(polled);
        match &frame {
            Some(Ok(_)) => self.settle(),
            Some(Err(_)) => self.lent = None,
            None => {
                if let Some(lent) = self.lent.take() {
                    lent.give_back();
                }
            }
        }
        Poll::Ready(frame.map(|f| f.map_err(Broken::from)))
    }
}

/// A reply: a page of ours, or what the application says.
pub(crate) enum Reply {
    Page(Full<Bytes>),
    Relay(Box<Relay>),
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        match self.get_mut() {
            Self::Page(page) => Pin::new(page).poll_frame(cx).map(|f| f.map(|f| f.map_err(|never| match never {}))),
            Self::Relay(relay) => {
                if relay.cut.as_mut().is_some_and(|cut| cut.as_mut().poll(cx).is_ready()) {
                    relay.lent = None;
                    return Poll::Ready(Some(Err(Broken::Cut)));
                }
                let polled = match relay.held.take() {
                    Some(held) => Poll::Ready(held),
                    None => relay.poll_body(cx),
                };
                if let Poll::Ready(Some(Err(_))) = &polled
                    && !std::mem::replace(&mut relay.broken, true)
                {
                    // What came before it leaves first.
                    relay.held = if let Poll::Ready(held) = polled { Some(held) } else { None };
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                polled
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Page(page) => page.is_end_stream(),
            Self::Relay(relay) => relay.held.is_none() && relay.body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Page(page) => page.size_hint(),
            Self::Relay(relay) => {
                let mut hint = relay.body.size_hint();
                let held = match &relay.held {
                    Some(Some(Ok(frame))) => frame.data_ref().map_or(0, |data| data.len() as u64),
                    _ => 0,
                };
                if let Some(upper) = hint.upper() {
                    hint.set_upper(upper.saturating_add(held));
                }
                hint.set_lower(hint.lower().saturating_add(held));
                hint
            }
        }
    }
}
