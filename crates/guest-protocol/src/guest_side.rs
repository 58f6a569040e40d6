//! The guest's end of a link: serves a router on one stream, with the bounds both sides keep.

use connectrpc::{ConnectRpcService, Limits, Router};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::limits::{
    CONCURRENT_STREAMS, CONNECTION_WINDOW, ELEMENT_MEMORY_MAX, FRAME_BYTES, HEADER_LIST_MAX, REQUEST_BYTES_MAX,
    SEND_BUFFER, STREAM_WINDOW,
};
use crate::link::{LinkError, attach_guest};

/// The service as it answers requests; made once, shared by all connections.
pub type GuestService = ConnectRpcService<Router>;

/// Wraps a router with the bounds on what it accepts.
pub fn service(router: Router) -> GuestService {
    let limits = Limits::default()
        .with_max_request_body_size(REQUEST_BYTES_MAX + 5)
        .with_max_message_size(REQUEST_BYTES_MAX)
        .with_element_memory_limit(ELEMENT_MEMORY_MAX);
    ConnectRpcService::new(router).with_limits(limits)
}

/// Waits for a host on `stream` and serves it until the connection ends.
///
/// # Errors
/// When the stream breaks, ends, or carries what is neither preamble nor HTTP/2. A caller with a stream that
/// outlives connections (a port) simply serves again.
pub async fn serve<S>(stream: S, service: GuestService) -> Result<(), LinkError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let stream = attach_guest(stream).await?;
    hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME_BYTES)
        .max_header_list_size(HEADER_LIST_MAX)
        .max_concurrent_streams(CONCURRENT_STREAMS)
        .max_send_buf_size(SEND_BUFFER)
        // A host may give up as many calls as it may make before this side has looked at them.
        .max_pending_accept_reset_streams(Some(CONCURRENT_STREAMS as usize))
        .keep_alive_interval(None)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service))
        .await?;
    Ok(())
}
