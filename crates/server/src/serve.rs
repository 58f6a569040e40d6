//! The listener: bounded connections, bounded headers, an orderly end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use http::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

use crate::layers::Peer;

/// Largest head of a request, bytes: request line and headers.
const HEAD_BYTES_MAX: usize = 256 * 1024;
/// Most headers of a request.
const HEADERS_MAX: usize = 100;
/// How long a caller may take to send the head of a request, and how long a connection may be unused.
const HEAD_WAIT: Duration = Duration::from_secs(60);
/// Requests in progress on one HTTP/2 connection.
const STREAMS_MAX: u32 = 256;
/// Receive window of one HTTP/2 request.
const STREAM_WINDOW: u32 = 256 * 1024;
/// Pause after the system refused a connection (too many open files).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long aborted connections may take to let go.
const ABORT_WAIT: Duration = Duration::from_secs(2);

/// When to end, in two steps.
#[derive(Clone, Debug, Default)]
pub struct Ending {
    /// Take no more connections; finish what is in progress.
    pub stop: CancellationToken,
    /// Finish nothing more.
    pub abort: CancellationToken,
}

/// Serves `app` until told to stop, then lets requests in progress finish for at most `grace`.
///
/// Returns whether all of them did.
pub async fn serve(
    listener: TcpListener,
    app: Router,
    connections_max: usize,
    grace: Duration,
    ending: Ending,
) -> bool {
    let places = Arc::new(Semaphore::new(connections_max));
    let graceful = GracefulShutdown::new();
    let tasks = TaskTracker::new();
    let abort = CancellationToken::new();
    let builder = Arc::new(builder());
    loop {
        let accepted = tokio::select! {
            biased;
            () = ending.stop.cancelled() => break,
            accepted = accept(&listener, &places) => accepted,
        };
        let Some((stream, peer, place)) = accepted else { continue };
        let app = app.clone();
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(Peer(peer));
            app.clone().oneshot(request)
        });
        let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service).into_owned();
        let connection = graceful.watch(connection);
        let abort = abort.clone();
        tasks.spawn(async move {
            tokio::select! {
                biased;
                () = abort.cancelled() => {}
                // A connection that ends badly is the caller's affair; what failed of ours was logged by its request.
                ended = connection => if let Err(e) = ended { tracing::debug!(%peer, error = %e, "a connection ended badly") },
            }
            drop(place);
        });
    }
    drop(listener);
    tasks.close();
    let finished = tokio::select! {
        () = async { graceful.shutdown().await; tasks.wait().await } => true,
        () = tokio::time::sleep(grace) => false,
        () = ending.abort.cancelled() => false,
    };
    if !finished {
        abort.cancel();
        let _ = tokio::time::timeout(ABORT_WAIT, tasks.wait()).await;
    }
    finished
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
        .keep_alive_interval(HEAD_WAIT)
        .keep_alive_timeout(HEAD_WAIT);
    builder
}

async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> Option<(TcpStream, SocketAddr, tokio::sync::OwnedSemaphorePermit)> {
    // Without a place the connection waits in the kernel's queue, which is bounded too.
    let place = places.clone().acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, peer)) => {
            let _ = stream.set_nodelay(true);
            Some((stream, peer, place))
        }
        Err(e) => {
            tracing::warn!(error = %e, "a connection could not be accepted");
            tokio::time::sleep(ACCEPT_PAUSE).await;
            None
        }
    }
}
