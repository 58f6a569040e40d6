//! One connection with a credential: TLS ended towards the machine, begun anew towards the host, the same protocol on both
//! sides, one connection outside for one inside. Bodies are handed through as they come.

use std::io::{self, Cursor};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::{http1 as client1, http2 as client2};
use hyper::server::conn::{http1 as server1, http2 as server2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use mainbrella_types::{DenyRule, HostName};
use rustls::pki_types::ServerName;
use rustls::server::Acceptor;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt as _, copy_bidirectional};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::{LazyConfigAcceptor, TlsConnector};
use tokio_util::sync::CancellationToken;

use crate::gateway::{HELLO_DEADLINE, Shared, deny, reached};

/// HTTP/2's name in a TLS hello.
const H2: &[u8] = b"h2";
/// HTTP/1.1's.
const HTTP11: &[u8] = b"http/1.1";
/// Streams of one HTTP/2 connection at once.
const STREAMS_MAX: u32 = 128;

/// What one HTTP/2 stream and one connection may have on their way, bytes: a side that does not read makes the gateway hold
/// as much and no more.
const STREAM_WINDOW: u32 = 128 * 1024;
const CONNECTION_WINDOW: u32 = 512 * 1024;
/// What one stream may have waiting to be sent, bytes.
const SEND_BUFFER: usize = 64 * 1024;

/// What goes back into the machine.
type Reply = Response<BoxBody<Bytes, hyper::Error>>;

/// Carries one connection from the machine, whose bytes so far are `first`, to `name`.
pub(crate) async fn relay(inside: TcpStream, first: Vec<u8>, name: HostName, port: u16, shared: Arc<Shared>) {
    if let Err(e) = carry(inside, first, &name, port, &shared).await {
        tracing::debug!(%name, port, error = %e, "a connection with a credential ended");
    }
}

async fn carry(inside: TcpStream, first: Vec<u8>, name: &HostName, port: u16, shared: &Arc<Shared>) -> io::Result<()> {
    let _ = inside.set_nodelay(true);
    let (read, write) = inside.into_split();
    let inside = tokio::io::join(Cursor::new(first).chain(read), write);
    let start = timeout(HELLO_DEADLINE, LazyConfigAcceptor::new(Acceptor::default(), inside)).await??;
    let (said, offered) = {
        let hello = start.client_hello();
        let said: Option<HostName> = hello.server_name().and_then(|n| n.parse().ok());
        let offers = |protocol: &[u8]| hello.alpn().is_some_and(|mut all| all.any(|p| p == protocol));
        let offered: Vec<Vec<u8>> = [H2, HTTP11].into_iter().filter(|p| offers(p)).map(<[u8]>::to_vec).collect();
        (said, offered)
    };
    if said.as_ref() != Some(name) {
        let why = format!("the connection is for {name}, its TLS hello names another host or none");
        deny(shared, said.as_ref(), None, port, DenyRule::NameMismatch, &why);
        return Ok(());
    }
    // The host first: what it speaks is what the machine is offered.
    let Some(outside) = reached(name, port, shared).await else { return Ok(()) };
    let roots = shared.outside.roots().await?;
    let outside = timeout(HELLO_DEADLINE, connector(roots, offered)?.connect(server_name(name)?, outside)).await??;
    let spoken = outside.get_ref().1.alpn_protocol().map(<[u8]>::to_vec);
    let config = shared.secrets.server(name).ok_or(io::ErrorKind::NotFound)?;
    let mut config = rustls::ServerConfig::clone(&config);
    config.alpn_protocols = spoken.iter().cloned().collect();
    let inside = timeout(HELLO_DEADLINE, start.into_stream(Arc::new(config))).await??;
    let (inside, outside) = (TokioIo::new(inside), TokioIo::new(outside));
    let place = Place { name: name.clone(), port, shared: shared.clone(), beside: Arc::default() };
    let beside = place.beside.clone();
    let done = if spoken.as_deref() == Some(H2) {
        let mut client = client2::Builder::new(TokioExecutor::new());
        client.initial_stream_window_size(STREAM_WINDOW).initial_connection_window_size(CONNECTION_WINDOW);
        client.max_send_buf_size(SEND_BUFFER);
        let (sender, connection) = client.handshake(outside).await.map_err(io::Error::other)?;
        let service = service_fn(move |request| {
            let (place, mut sender) = (place.clone(), sender.clone());
            async move {
                match place.prepare(request) {
                    Ok(request) => sender.send_request(request).await.map(|r| r.map(BodyExt::boxed)),
                    Err(refusal) => Ok(*refusal),
                }
            }
        });
        let mut server = server2::Builder::new(TokioExecutor::new());
        server.max_concurrent_streams(STREAMS_MAX).max_send_buf_size(SEND_BUFFER);
        server.initial_stream_window_size(STREAM_WINDOW).initial_connection_window_size(CONNECTION_WINDOW);
        let serving = server.serve_connection(inside, service);
        both(serving, beside.spawn(connection), &beside, |s| s.graceful_shutdown()).await
    } else {
        let (sender, connection) = client1::handshake(outside).await.map_err(io::Error::other)?;
        let sender = Arc::new(Mutex::new(sender));
        let service = service_fn(move |request| {
            let (place, sender) = (place.clone(), sender.clone());
            async move {
                match place.prepare(request) {
                    Ok(request) => place.exchange(request, &mut *sender.lock().await).await,
                    Err(refusal) => Ok(*refusal),
                }
            }
        });
        let serving = server1::Builder::new().serve_connection(inside, service).with_upgrades();
        both(serving, beside.spawn(connection.with_upgrades()), &beside, |s| s.graceful_shutdown()).await
    };
    if beside.upgraded.load(Ordering::Relaxed) {
        beside.rest().await;
    }
    done.map_err(io::Error::other)
}

/// Serves inside until that ends; once the connection outside has `ended`, only what has begun.
async fn both<S: Future<Output = hyper::Result<()>>>(
    serving: S,
    ended: CancellationToken,
    beside: &Beside,
    wind_up: impl FnOnce(std::pin::Pin<&mut S>),
) -> hyper::Result<()> {
    let mut serving = std::pin::pin!(serving);
    tokio::select! {
        done = &mut serving => return done,
        () = ended.cancelled() => {}
    }
    // One that became something else has ended as HTTP, on both sides.
    if !beside.upgraded.load(Ordering::Relaxed) {
        wind_up(serving.as_mut());
    }
    serving.await
}

/// What runs beside the connection inside; ends with it, and with the gateway.
#[derive(Default)]
struct Beside {
    tasks: std::sync::Mutex<JoinSet<()>>,
    upgraded: AtomicBool,
}

impl Beside {
    /// Runs the connection outside; tells when it has ended.
    fn spawn<C>(&self, connection: C) -> CancellationToken
    where
        C: Future<Output = hyper::Result<()>> + Send + 'static,
    {
        let ended = CancellationToken::new();
        let tell = ended.clone().drop_guard();
        self.add(async move {
            // However it ended, requests on it say so.
            let _ = connection.await;
            drop(tell);
        });
        ended
    }

    fn add(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).spawn(work);
    }

    /// Waits for all of it.
    async fn rest(&self) {
        let mut tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        while tasks.join_next().await.is_some() {}
    }
}

fn connector(roots: Arc<RootCertStore>, protocols: Vec<Vec<u8>>) -> io::Result<TlsConnector> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = protocols;
    Ok(TlsConnector::from(Arc::new(config)))
}

fn server_name(name: &HostName) -> io::Result<ServerName<'static>> {
    ServerName::try_from(name.as_str().to_owned()).map_err(io::Error::other)
}

/// Where the requests of a connection go.
#[derive(Clone)]
struct Place {
    name: HostName,
    port: u16,
    shared: Arc<Shared>,
    beside: Arc<Beside>,
}

impl Place {
    /// Checks whom a request is for, and adds the credential as it is now. A host that serves many would give what it has
    /// of another one to this credential.
    fn prepare(&self, mut request: Request<Incoming>) -> Result<Request<Incoming>, Box<Reply>> {
        let said = authority(&request);
        let unfit = [Method::CONNECT, Method::TRACE].contains(request.method());
        if unfit || !said.is_some_and(|said| self.is_meant(&said)) {
            let why = match unfit {
                // The first would lead elsewhere, the second has the host say the credential back.
                true => format!("{} gets no credential", request.method()),
                false => format!("a request inside the connection to {} names another host or none", self.name),
            };
            deny(&self.shared, Some(&self.name), None, self.port, DenyRule::NameMismatch, &why);
            return Err(Box::new(refusal()));
        }
        let credentials = self.shared.secrets.credentials(&self.name, self.port);
        // What the machine says itself in their place goes, whether it is one or several.
        for credential in &credentials {
            request.headers_mut().remove(&credential.header);
        }
        for credential in credentials {
            request.headers_mut().append(credential.header, credential.value);
        }
        Ok(request)
    }

    fn is_meant(&self, authority: &str) -> bool {
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|b| b.is_ascii_digit()) => (host, port.parse().ok()),
            Some(_) => return false,
            None => (authority, Some(443)),
        };
        port == Some(self.port) && host.parse::<HostName>().is_ok_and(|host| host == self.name)
    }

    /// One request and its answer over HTTP/1.1, which may become something else.
    async fn exchange(
        &self,
        mut request: Request<Incoming>,
        sender: &mut client1::SendRequest<Incoming>,
    ) -> Result<Reply, hyper::Error> {
        let inside = is_upgrade(request.headers()).then(|| hyper::upgrade::on(&mut request));
        sender.ready().await?;
        let mut response = sender.send_request(request).await?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS
            && let Some(inside) = inside
        {
            let outside = hyper::upgrade::on(&mut response);
            self.beside.upgraded.store(true, Ordering::Relaxed);
            self.beside.add(async move {
                if let (Ok(inside), Ok(outside)) = tokio::join!(inside, outside) {
                    let _ = copy_bidirectional(&mut TokioIo::new(inside), &mut TokioIo::new(outside)).await;
                }
            });
        }
        Ok(response.map(BodyExt::boxed))
    }
}

fn is_upgrade(headers: &HeaderMap) -> bool {
    headers.contains_key(header::UPGRADE)
}

/// The one host a request is for. `None`: it names none, or several.
fn authority(request: &Request<Incoming>) -> Option<String> {
    let mut hosts = request.headers().get_all(header::HOST).iter();
    let (first, second) = (hosts.next(), hosts.next());
    let header = match (first, second) {
        (Some(one), None) => Some(one.to_str().ok()?.to_owned()),
        (None, None) => None,
        _ => return None,
    };
    let target = request.uri().authority().map(|a| a.as_str().to_owned());
    match (target, header) {
        (Some(target), Some(header)) if !target.eq_ignore_ascii_case(&header) => None,
        (Some(one), _) | (None, Some(one)) => Some(one),
        (None, None) => None,
    }
}

/// What a request for another host gets.
fn refusal() -> Reply {
    let text =
        "This connection carries a credential for one host; the request names another, or is one that gets none.\n";
    let mut reply = Response::new(Full::new(Bytes::from_static(text.as_bytes())).map_err(|e| match e {}).boxed());
    *reply.status_mut() = StatusCode::MISDIRECTED_REQUEST;
    reply
}

#[cfg(test)]
mod tests;
