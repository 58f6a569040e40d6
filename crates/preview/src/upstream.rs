//! Connections to an application, kept for a moment after they were used.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::time::{Instant, timeout};

use crate::body::Upload;
use crate::route::{Dial, DialFault, Route};

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

type Sender = SendRequest<Upload>;

/// Unused connections of one route.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    senders: VecDeque<(Instant, Sender)>,
    /// Whether a task lets go of them in time.
    tended: bool,
}

impl Pool {
    fn lock(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The one used last; the others get the more time to be let go of.
    fn take(&self) -> Option<Sender> {
        let (since, sender) = self.lock().senders.pop_back()?;
        (since.elapsed() < KEPT_FOR && !sender.is_closed()).then_some(sender)
    }

    /// Keeps a connection for the next request of `route`, whose pool it is.
    fn keep(route: &Arc<Route>, sender: Sender) {
        if sender.is_closed() || route.cut.is_cancelled() {
            return;
        }
        let mut kept = route.pool.lock();
        if kept.senders.len() >= KEPT_MAX {
            kept.senders.pop_front();
        }
        kept.senders.push_back((Instant::now(), sender));
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
        kept.senders.retain(|(since, sender)| !all && since.elapsed() < KEPT_FOR && !sender.is_closed());
        if kept.senders.is_empty() {
            kept.tended = false;
            return;
        }
    }
}

/// A connection in use by one request.
pub(crate) struct Lent {
    route: Arc<Route>,
    sender: Sender,
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
        while !fresh && let Some(mut sender) = route.pool.take() {
            if matches!(timeout(SETTLE_MOST, sender.ready()).await, Ok(Ok(()))) {
                return Ok(Self { route: Arc::clone(route), sender, used: true });
            }
        }
        let stream = dial.dial(route).await?;
        let made = http1::Builder::new()
            .max_buf_size(BUFFER_MAX)
            .max_headers(HEADERS_MAX)
            .handshake::<_, Upload>(TokioIo::new(stream))
            .await;
        let (sender, connection) = made.map_err(|_| DialFault::Unreachable)?;
        let cut = route.cut.clone();
        tokio::spawn(async move {
            tokio::select! {
                ended = connection.with_upgrades() => {
                    if let Err(e) = ended {
                        tracing::debug!(error = %e, "a connection to an application ended badly");
                    }
                }
                () = cut.cancelled() => {}
            }
        });
        Ok(Self { route: Arc::clone(route), sender, used: false })
    }

    /// Sends a request and waits for the head of its reply.
    pub(crate) async fn send(&mut self, request: Request<Upload>) -> Result<Response<Incoming>, Unsent> {
        self.sender.try_send_request(request).await.map_err(|mut e| match e.take_message() {
            Some(request) => Unsent::Back(Box::new(request)),
            None => Unsent::Lost(e.into_error()),
        })
    }

    /// The reply was read to its end.
    pub(crate) fn give_back(self) {
        Pool::keep(&self.route, self.sender);
    }
}
