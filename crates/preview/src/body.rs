//! Bodies on their way: a caller's, which may not stop, and an application's, which ends with its route.

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
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    /// Its connection, which can be used again once the body has ended well.
    lent: Option<Lent>,
    _place: OwnedSemaphorePermit,
}

impl Relay {
    pub(crate) fn new(
        body: Incoming,
        cut: WaitForCancellationFutureOwned,
        lent: Lent,
        place: OwnedSemaphorePermit,
    ) -> Self {
        let mut relay = Self { body, cut: Box::pin(cut), lent: Some(lent), _place: place };
        relay.settle();
        relay
    }

    fn settle(&mut self) {
        if self.body.is_end_stream()
            && let Some(lent) = self.lent.take()
        {
            lent.give_back();
        }
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
                if relay.cut.as_mut().poll(cx).is_ready() {
                    relay.lent = None;
                    return Poll::Ready(Some(Err(Broken::Cut)));
                }
                let frame = ready!(Pin::new(&mut relay.body).poll_frame(cx));
                match &frame {
                    Some(Ok(_)) => relay.settle(),
                    Some(Err(_)) => relay.lent = None,
                    None => {
                        if let Some(lent) = relay.lent.take() {
                            lent.give_back();
                        }
                    }
                }
                Poll::Ready(frame.map(|f| f.map_err(Broken::from)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Page(page) => page.is_end_stream(),
            Self::Relay(relay) => relay.body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Page(page) => page.size_hint(),
            Self::Relay(relay) => relay.body.size_hint(),
        }
    }
}
