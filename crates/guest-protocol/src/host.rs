//! The host's end of a link: a client that any number of tasks may share.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use connectrpc::client::{ClientBody, ClientConfig, ServiceTransport};
use futures::future::BoxFuture;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::frames::FrameGuard;
use crate::limits::{
    CONNECTION_WINDOW, DIAL_MEMORY, DIALS_MAX, ELEMENT_MEMORY_MAX, FRAME_BYTES, HEADER_LIST_MAX, RESPONSE_BYTES_MAX,
    SEND_BUFFER, STREAM_WINDOW, STREAMING_CALLS_MAX, UNARY_CALLS_MAX,
};
use crate::link::{LinkError, attach_host};
use crate::proto::mainbrella::guest::v1 as pb;

/// Methods that stream, in either direction.
const STREAMING: &[&str] =
    &["RunJob", "FollowJob", "ReadFile", "WriteFile", "ListDir", "PackTree", "UnpackTree", "WatchTree"];

/// The method that carries connections to ports.
const DIAL: &str = "Dial";

/// How a host attaches.
#[derive(Debug, Clone)]
pub struct LinkOptions {
    /// Longest time for the preamble and the start of HTTP/2 together.
    pub deadline: Duration,
    /// Deadline of a unary call that brings none of its own.
    pub call_timeout: Duration,
}

impl Default for LinkOptions {
    fn default() -> Self {
        Self { deadline: Duration::from_secs(10), call_timeout: Duration::from_secs(30) }
    }
}

/// The generated client over this module's transport.
pub type Rpc = pb::GuestClient<ServiceTransport<LinkTransport>>;
/// A stream of job events as the generated client gives it.
pub type JobStream = connectrpc::client::ServerStream<LinkBody, pb::JobEventView<'static>>;
/// A stream of file chunks as the generated client gives it.
pub type FileStream = connectrpc::client::ServerStream<LinkBody, pb::FileChunkView<'static>>;
/// A stream of the bytes of a packed tree.
pub type TreeStream = connectrpc::client::ServerStream<LinkBody, pb::TreeChunkView<'static>>;
/// A stream of what happens in a watched directory.
pub type WatchStream = connectrpc::client::ServerStream<LinkBody, pb::WatchEventsView<'static>>;

/// An attached guest. Cheap to clone; every clone speaks over the same connection. It never dials again by
/// itself: when [`GuestClient::closed`] returns, every call fails and the owner attaches anew.
///
/// The connection ends when the last clone is dropped: response streams that still run fail then.
#[derive(Clone)]
pub struct GuestClient {
    rpc: Rpc,
    streams: Rpc,
    closed: watch::Receiver<Option<Arc<str>>>,
    abort: Arc<AbortOnDrop>,
    dial_memory: Arc<Semaphore>,
}

pub(crate) struct AbortOnDrop(pub(crate) tokio::task::AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl std::fmt::Debug for GuestClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GuestClient").field("closed", &*self.closed.borrow()).finish_non_exhaustive()
    }
}

/// Attaches to the guest at the other end of `stream`.
///
/// # Errors
/// See [`LinkError`]. The stream is closed on every error.
pub async fn connect<S>(stream: S, options: LinkOptions) -> Result<GuestClient, LinkError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let started = tokio::time::Instant::now();
    let stream = attach_host(stream, options.deadline).await?;
    let left = options.deadline.saturating_sub(started.elapsed());
    let handshake = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME_BYTES)
        .max_header_list_size(HEADER_LIST_MAX)
        .header_table_size(4096)
        .max_send_buf_size(SEND_BUFFER)
        .max_concurrent_reset_streams(64)
        // No pings: a machine under emulation may be slow for seconds and is not dead. Calls have deadlines.
        .keep_alive_interval(None)
        .handshake::<_, ClientBody>(TokioIo::new(FrameGuard::new(stream)));
    let (sender, connection) = match tokio::time::timeout(left, handshake).await {
        Ok(done) => done?,
        Err(_) => return Err(LinkError::Timeout(options.deadline)),
    };
    let (closing, closed) = watch::channel(None);
    let driver = tokio::spawn(async move {
        let why: Arc<str> = match connection.await {
            Ok(()) => "the connection ended".into(),
            Err(error) => error_chain(&error).into(),
        };
        closing.send_replace(Some(why));
    });
    let transport = LinkTransport {
        sender,
        streaming: Arc::new(Semaphore::new(STREAMING_CALLS_MAX)),
        dials: Arc::new(Semaphore::new(DIALS_MAX)),
        unary: Arc::new(Semaphore::new(UNARY_CALLS_MAX)),
    };
    let uri = http::Uri::from_static("http://guest");
    let streams_config = ClientConfig::new(uri)
        .with_protocol(connectrpc::Protocol::Grpc)
        .proto()
        .with_default_max_message_size(RESPONSE_BYTES_MAX)
        .with_default_element_memory_limit(ELEMENT_MEMORY_MAX);
    let config = streams_config.clone().with_default_timeout(options.call_timeout);
    Ok(GuestClient {
        rpc: pb::GuestClient::new(ServiceTransport::new(transport.clone()), config),
        streams: pb::GuestClient::new(ServiceTransport::new(transport), streams_config),
        closed,
        abort: Arc::new(AbortOnDrop(driver.abort_handle())),
        dial_memory: Arc::new(Semaphore::new(DIAL_MEMORY)),
    })
}

fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        source = inner.source();
    }
    text
}

impl GuestClient {
    /// The generated client for calls that answer once. Each has the default deadline unless it brings another
    /// (`connectrpc::client::CallOptions`).
    pub fn rpc(&self) -> &Rpc {
        &self.rpc
    }

    /// The generated client for calls that stream (`run_job`, `follow_job`, `read_file`, `write_file`). They
    /// have no deadline unless the call brings one.
    pub fn streams(&self) -> &Rpc {
        &self.streams
    }

    /// Waits until the connection has ended, and says why (internal text).
    pub async fn closed(&self) -> Arc<str> {
        let mut closed = self.closed.clone();
        match closed.wait_for(Option::is_some).await {
            Ok(why) => why.clone().unwrap_or_else(|| "the connection ended".into()),
            Err(_) => "the connection was dropped".into(),
        }
    }

    /// Whether the connection has ended.
    pub fn is_closed(&self) -> bool {
        self.closed.borrow().is_some() || self.closed.has_changed().is_err()
    }

    /// What is left for wider windows of dialled connections.
    pub(crate) fn dial_memory(&self) -> &Arc<Semaphore> {
        &self.dial_memory
    }

    /// Ends the connection now: running calls fail, in every clone. Jobs in the guest go on.
    pub fn close(&self) {
        self.abort.0.abort();
    }
}

/// Sends requests over the one connection, no more at once than both sides agreed on.
#[derive(Clone)]
pub struct LinkTransport {
    sender: hyper::client::conn::http2::SendRequest<ClientBody>,
    streaming: Arc<Semaphore>,
    dials: Arc<Semaphore>,
    unary: Arc<Semaphore>,
}

impl tower::Service<http::Request<ClientBody>> for LinkTransport {
    type Response = http::Response<LinkBody>;
    type Error = hyper::Error;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.sender.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<ClientBody>) -> Self::Future {
        let path = request.uri().path();
        let method = path.rsplit('/').next().unwrap_or_default();
        let slots = match method {
            DIAL => &self.dials,
            method if STREAMING.contains(&method) => &self.streaming,
            _ => &self.unary,
        };
        let slots = Arc::clone(slots);
        let mut sender = self.sender.clone();
        Box::pin(async move {
            // Never closed, so acquiring fails never; without a permit the call would only be uncounted.
            let permit = slots.acquire_owned().await.ok();
            let response = sender.send_request(request).await?;
            Ok(response.map(|body| LinkBody { body, permit }))
        })
    }
}

/// A response body that holds its place among the calls until it has ended.
pub struct LinkBody {
    body: Incoming,
    permit: Option<OwnedSemaphorePermit>,
}

impl hyper::body::Body for LinkBody {
    type Data = bytes::Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<hyper::body::Frame<Self::Data>, Self::Error>>> {
        let polled = std::pin::Pin::new(&mut self.body).poll_frame(cx);
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            self.permit = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}
