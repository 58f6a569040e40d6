//! Connections to an application, kept for a moment after they were used.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::time::{Instant, timeout};

use crate::body::Upload;
use crate::route::{Dial, DialFault, Io, Route};

/// How long an unused connection is kept: servers close theirs after five seconds or more.
const KEPT_FOR: Duration = Duration::from_secs(4);
/// Unused connections of one route.
const KEPT_MAX: usize = 32;
/// How long a connection whose last reply was read may need to be ready again.
const SETTLE_MOST: Duration = Duration::from_millis(20);
/// Most bytes read ahead from an application on one connection, heads included.
const BUFFER_MAX: usize = 64 * 1024;
/// Most headers of a reply.
const HEADERS_MAX: usize = 128;

/// What carries a connection; it moves on only while it is polled.
type Carrier = http1::Connection<TokioIo<Box<dyn Io>>, Upload>;

/// A connection to an application.
struct Link {
    sender: SendRequest<Upload>,
    /// `None`: a task of its own carries it. Otherwise whoever waits for a reply does, which spares every request the
    /// wake-ups between two tasks.
    carrier: Option<Box<Carrier>>,
}

impl Link {
    /// Moves it on as far as it goes without waiting.
    fn drive(&mut self, cx: &mut Context<'_>) {
        if let Some(carrier) = &mut self.carrier
            && let Poll::Ready(ended) = Pin::new(carrier).poll(cx)
        {
            told(ended);
            // Whoever waits for something of it hears that nothing comes.
            self.carrier = None;
        }
    }

    fn is_over(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop()));
        self.sender.is_closed()
    }

    /// Whether it takes a request now, or in a moment.
    async fn settles(&mut self) -> bool {
        let at_once = poll_fn(|cx| {
            self.drive(cx);
            match self.sender.poll_ready(cx) {
                Poll::Ready(ready) => Poll::Ready(Some(ready.is_ok())),
                Poll::Pending => Poll::Ready(None),
            }
        });
        match at_once.await {
            Some(ready) => ready,
            None if self.carrier.is_some() => false,
            None => matches!(timeout(SETTLE_MOST, self.sender.ready()).await, Ok(Ok(()))),
        }
    }
}

fn told(ended: hyper::Result<()>) {
    if let Err(e) = ended {
        tracing::debug!(error = %e, "a connection to an application ended badly");
    }
}

/// Unused connections of one route.
#[derive(Default)]
pub(crate) struct Pool {
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    links: VecDeque<(Instant, Link)>,
    /// Whether a task lets go of them in time.
    tended: bool,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("kept", &self.lock().links.len()).finish()
    }
}

impl Pool {
    fn lock(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The one used last; the others get the more time to be let go of.
    fn take(&self) -> Option<Link> {
        let (since, link) = self.lock().links.pop_back()?;
        (since.elapsed() < KEPT_FOR && !link.sender.is_closed()).then_some(link)
    }

    /// Keeps a connection for the next request of `route`, whose pool it is.
    fn keep(route: &Arc<Route>, link: Link) {
        if link.sender.is_closed() || route.cut.is_cancelled() {
            return;
        }
        let mut kept = route.pool.lock();
        if kept.links.len() >= KEPT_MAX {
            kept.links.pop_front();
        }
        kept.links.push_back((Instant::now(), link));
        if !std::mem::replace(&mut kept.tended, true) {
            tokio::spawn(tend(Arc::clone(route)));
        }
    }
}

async fn tend(route: Arc<Route>) {
    loop {
        tokio::select! {
            () = route.cut.cancelled() => {}
            () = tokio::time::sleep(KEPT_FOR / 2) => {}
        }
        let all = route.cut.is_cancelled();
        let mut kept = route.pool.lock();
        kept.links.retain_mut(|(since, link)| !all && since.elapsed() < KEPT_FOR && !link.is_over());
        if kept.links.is_empty() {
            kept.tended = false;
            return;
        }
    }
}

/// A connection in use by one request.
pub(crate) struct Lent {
    route: Arc<Route>,
    link: Link,
    /// Whether another request used it before.
    pub(crate) used: bool,
}

/// What became of a request that was not answered.
pub(crate) enum Unsent {
    /// It never left, and can be sent on another connection.
    Back(Box<Request<Upload>>),
    /// It may have been received.
    Lost(hyper::Error),
}

impl Lent {
    /// A connection that waits, or a new one.
    pub(crate) async fn get(route: &Arc<Route>, dial: &dyn Dial, fresh: bool) -> Result<Self, DialFault> {
        while !fresh && let Some(mut link) = route.pool.take() {
            if link.settles().await {
                return Ok(Self { route: Arc::clone(route), link, used: true });
            }
        }
        let stream = dial.dial(route).await?;
        let made = http1::Builder::new()
            .max_buf_size(BUFFER_MAX)
            .max_headers(HEADERS_MAX)
            .handshake::<_, Upload>(TokioIo::new(stream))
            .await;
        let (sender, carrier) = made.map_err(|_| DialFault::Unreachable)?;
        let link = Link { sender, carrier: Some(Box::new(carrier)) };
        Ok(Self { route: Arc::clone(route), link, used: false })
    }

    /// Gives the connection a task of its own. For requests whose two directions do not wait for each other: those with a
    /// body, and those that change the protocol.
    pub(crate) fn detach(&mut self) {
        let Some(carrier) = self.link.carrier.take() else { return };
        let cut = self.route.cut.clone();
        tokio::spawn(async move {
            tokio::select! {
                ended = carrier.with_upgrades() => told(ended),
                () = cut.cancelled() => {}
            }
        });
    }

    /// Moves the connection on, where no task does.
    pub(crate) fn drive(&mut self, cx: &mut Context<'_>) {
        self.link.drive(cx);
    }

    /// Sends a request and waits for the head of its reply.
    pub(crate) async fn send(&mut self, request: Request<Upload>) -> Result<Response<Incoming>, Unsent> {
        let mut reply = pin!(self.link.sender.try_send_request(request));
        let link = &mut self.link;
        let reply = poll_fn(|cx| {
            link.drive(cx);
            reply.as_mut().poll(cx)
        });
        reply.await.map_err(|mut e| match e.take_message() {
            Some(request) => Unsent::Back(Box::new(request)),
            None => Unsent::Lost(e.into_error()),
        })
    }

    /// The reply was read to its end.
    pub(crate) fn give_back(self) {
        Pool::keep(&self.route, self.link);
    }
}
