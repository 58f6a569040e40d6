//! The listener of the ingress and its connections, with the bounds that hold before a token is known.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::patience::Patient;
use crate::proxy::Ingress;
use crate::route::{Io, Route};
use crate::tls::Tls;

/// Largest head of a request, bytes: request line and headers.
const HEAD_BYTES_MAX: usize = 64 * 1024;
/// Most headers of a request.
const HEADERS_MAX: usize = 128;
/// How long a caller may take for the head of a request, and a connection be unused.
const HEAD_WAIT: Duration = Duration::from_secs(30);
/// How long a TLS handshake may take.
const HANDSHAKE_WAIT: Duration = Duration::from_secs(10);
/// Requests in progress on one HTTP/2 connection.
const STREAMS_MAX: u32 = 256;
/// Receive window of one HTTP/2 request.
const STREAM_WINDOW: u32 = 256 * 1024;
/// Pause after the system refused a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long replies may take to finish at the end.
const FINISH_WAIT: Duration = Duration::from_secs(1);

/// A place among the connections, held by whatever goes on over one.
pub(crate) type Place = Arc<OwnedSemaphorePermit>;

/// A caller's connection, as its requests see it.
pub(crate) struct Connection {
    pub(crate) peer: SocketAddr,
    pub(crate) place: Place,
    pub(crate) closing: CancellationToken,
    used: Mutex<Option<Arc<Route>>>,
    changed: Notify,
}

impl Connection {
    /// Notes which route the newest request uses.
    pub(crate) fn uses(&self, route: &Arc<Route>) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if used.as_ref().is_none_or(|before| !Arc::ptr_eq(before, route)) {
            *used = Some(Arc::clone(route));
            self.changed.notify_one();
        }
    }

    /// Resolves when the route that was used last is cut.
    async fn cut(&self) {
        loop {
            let route = self.used.lock().unwrap_or_else(PoisonError::into_inner).clone();
            match route {
                Some(route) => tokio::select! {
                    () = route.cut.cancelled() => return,
                    () = self.changed.notified() => {}
                },
                None => self.changed.notified().await,
            }
        }
    }
}

/// Serves previews on `listener` until `closing`; connections that are open a second later are broken off.
pub async fn serve(
    listener: TcpListener,
    ingress: Ingress,
    tls: Option<Tls>,
    connections_max: usize,
    closing: CancellationToken,
) {
    let places = Arc::new(Semaphore::new(connections_max));
    let tasks = TaskTracker::new();
    let abort = CancellationToken::new();
    loop {
        let accepted = tokio::select! {
            biased;
            () = closing.cancelled() => break,
            accepted = accept(&listener, &places) => accepted,
        };
        let Some((stream, peer, place)) = accepted else { continue };
        let connection = Connection {
            peer,
            place: Arc::new(place),
            closing: closing.clone(),
            used: Mutex::default(),
            changed: Notify::new(),
        };
        let (ingress, tls, abort) = (ingress.clone(), tls.clone(), abort.clone());
        tasks.spawn(async move {
            tokio::select! {
                biased;
                () = abort.cancelled() => {}
                () = welcome(stream, ingress, tls, connection) => {}
            }
        });
    }
    drop(listener);
    tasks.close();
    if timeout(FINISH_WAIT, tasks.wait()).await.is_err() {
        abort.cancel();
        tasks.wait().await;
    }
}

async fn welcome(stream: TcpStream, ingress: Ingress, tls: Option<Tls>, connection: Connection) {
    let Some(tls) = tls else { return converse(stream, ingress, connection).await };
    match timeout(HANDSHAKE_WAIT, tls.0.accept(stream)).await {
        Ok(Ok(stream)) => converse(stream, ingress, connection).await,
        Ok(Err(e)) => tracing::debug!(error = %e, "a TLS handshake failed"),
        Err(_) => {}
    }
}

async fn converse(stream: impl Io, ingress: Ingress, connection: Connection) {
    let connection = Arc::new(connection);
    let serving = Arc::clone(&connection);
    let service = service_fn(move |request: http::Request<hyper::body::Incoming>| {
        let (ingress, connection) = (ingress.clone(), Arc::clone(&serving));
        async move { Ok::<_, Infallible>(ingress.answer(&connection, request).await) }
    });
    let builder = builder();
    let mut conversation =
        std::pin::pin!(builder.serve_connection_with_upgrades(TokioIo::new(Patient::new(stream)), service));
    let ended = tokio::select! {
        ended = conversation.as_mut() => ended,
        // Whatever is still under way is broken off.
        () = connection.cut() => return,
        () = connection.closing.cancelled() => {
            conversation.as_mut().graceful_shutdown();
            conversation.await
        }
    };
    if let Err(e) = ended {
        tracing::debug!(error = %e, "a connection to the ingress ended badly");
    }
}

fn builder() -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WAIT)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .half_close(false);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(HEAD_BYTES_MAX as u32)
        .max_concurrent_streams(STREAMS_MAX)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(STREAM_WINDOW * 4)
        .max_send_buf_size(STREAM_WINDOW as usize)
        .keep_alive_interval(HEAD_WAIT)
        .keep_alive_timeout(HEAD_WAIT);
    builder
}

async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> Option<(TcpStream, SocketAddr, OwnedSemaphorePermit)> {
    // Without a place the connection waits in the kernel's queue, which is bounded too.
    let place = Arc::clone(places).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, peer)) => {
            let _ = stream.set_nodelay(true);
            Some((stream, peer, place))
        }
        Err(e) => {
            if e.kind() != io::ErrorKind::ConnectionAborted {
                tracing::warn!(error = %e, "a connection to the ingress could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
            None
        }
    }
}
