//! An ingress on loopback, an application behind it, and callers.
#![allow(dead_code, clippy::unwrap_used)]

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::{SinkExt as _, StreamExt as _};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use mainbrella_preview::{Dial, DialFault, Ingress, Io, NoRoute, Public, Route, Routes, Tls, Token};
use mainbrella_types::GenerationKey;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::rustls;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::Role;
use tokio_util::sync::CancellationToken;

/// What the certificate is for: names directly below a single label are no names for wildcards.
const TLS_DOMAIN: &str = "previews.test";

/// What the application does.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum App {
    /// Tells what it was asked; sockets get back what they send; `/never` is not answered.
    Echo,
    /// An event stream; otherwise as `Echo`.
    Ticks,
    /// Sends for ever.
    Endless,
    /// Sends back what it is sent, as it comes.
    Count,
    /// Closes after a reply that does not say so.
    ClosesSilently,
    /// Closes without a reply.
    HangsUp,
    /// Closes in the middle of one.
    Half,
    /// Does not listen.
    None,
}

struct Behind {
    app: App,
    dials: AtomicUsize,
    open: Arc<AtomicUsize>,
}

struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[async_trait]
impl Dial for Behind {
    async fn dial(&self, route: &Route) -> Result<Box<dyn Io>, DialFault> {
        assert_eq!(route.port, 3000);
        if self.app == App::None {
            return Err(DialFault::NothingListens);
        }
        self.dials.fetch_add(1, Ordering::SeqCst);
        self.open.fetch_add(1, Ordering::SeqCst);
        let open = Open(Arc::clone(&self.open));
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        let app = self.app;
        tokio::spawn(async move {
            let _open = open;
            run(app, theirs).await;
        });
        Ok(Box::new(ours))
    }
}

async fn run(app: App, mut stream: DuplexStream) {
    match app {
        App::HangsUp | App::ClosesSilently | App::Half => {
            let mut head = [0; 4096];
            let _ = stream.read(&mut head).await;
            let reply: &[u8] = match app {
                App::ClosesSilently => b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nonce",
                App::Half => b"HTTP/1.1 200 OK\r\ncontent-length: 400\r\n\r\nonce",
                _ => b"",
            };
            let _ = stream.write_all(reply).await;
        }
        _ => {
            let service = service_fn(move |request| async move { Ok::<_, Infallible>(answer(app, request).await) });
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .with_upgrades()
                .await;
        }
    }
}

type Body = BoxBody<Bytes, Infallible>;

async fn answer(app: App, mut request: Request<Incoming>) -> Response<Body> {
    if let Some(key) = request.headers().get("sec-websocket-key").cloned() {
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let socket = TokioIo::new(upgrade.await.unwrap());
            let mut socket = WebSocketStream::from_raw_socket(socket, Role::Server, None).await;
            while let Some(Ok(message)) = socket.next().await {
                if message.is_close() || socket.send(message).await.is_err() {
                    break;
                }
            }
        });
        return Response::builder()
            .status(StatusCode::SWITCHING_PROTOCOLS)
            .header("connection", "upgrade")
            .header("upgrade", "websocket")
            .header("sec-websocket-accept", derive_accept_key(key.as_bytes()))
            .body(Full::default().boxed())
            .unwrap();
    }
    let endless = |text: &'static str, pause| {
        let stream = futures::stream::unfold((), move |()| async move {
            tokio::time::sleep(pause).await;
            Some((Ok(Frame::data(Bytes::from_static(text.as_bytes()))), ()))
        });
        Response::new(BodyExt::boxed(StreamBody::new(stream)))
    };
    match app {
        _ if request.uri().path() == "/never" => std::future::pending().await,
        App::Ticks => endless("data: tick\n\n", Duration::from_millis(100)),
        App::Endless => endless("more and more and more", Duration::ZERO),
        App::Count => {
            let body = request.into_body().into_data_stream().filter_map(|piece| async move { piece.ok() });
            Response::new(BodyExt::boxed(StreamBody::new(body.map(|piece| Ok(Frame::data(piece))))))
        }
        _ => {
            let mut told = format!("{} {} {:?}\n", request.method(), request.uri(), request.version());
            for (name, value) in request.headers() {
                told.push_str(&format!("{name}: {}\n", value.to_str().unwrap()));
            }
            let body = request.into_body().collect().await.map(|b| b.to_bytes()).unwrap_or_default();
            told.push_str(&String::from_utf8_lossy(&body));
            let reply = Response::builder().header("set-cookie", "sid=1; Domain=localhost; Path=/");
            reply.body(Full::from(told).boxed()).unwrap()
        }
    }
}

struct One {
    token: Token,
    route: Arc<Route>,
}

#[async_trait]
impl Routes for One {
    async fn find(&self, token: &Token) -> Result<Arc<Route>, NoRoute> {
        if *token != self.token {
            Err(NoRoute::Unknown)
        } else if self.route.cut.is_cancelled() {
            Err(NoRoute::Over)
        } else {
            Ok(Arc::clone(&self.route))
        }
    }
}

/// The ingress with one preview.
pub struct Site {
    pub address: SocketAddr,
    domain: &'static str,
    pub token: Token,
    route: Arc<Route>,
    behind: Arc<Behind>,
    closing: CancellationToken,
}

impl Drop for Site {
    fn drop(&mut self) {
        self.closing.cancel();
    }
}

impl Site {
    pub async fn start(app: App) -> Self {
        Self::with(app, None).await
    }

    pub async fn start_tls(app: App) -> Self {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support");
        Self::with(app, Some(Tls::load(&dir.join("certificate.pem"), &dir.join("key.pem")).unwrap())).await
    }

    async fn with(app: App, tls: Option<Tls>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let domain = if tls.is_some() { TLS_DOMAIN } else { "localhost" };
        let public = Public { https: tls.is_some(), domain: domain.into(), port: address.port(), behind_proxy: false };
        let token = Token::of(b"twenty bytes in all!");
        let route = Route::new("p1".into(), GenerationKey::new(uuid::Uuid::now_v7()), 3000);
        let behind = Arc::new(Behind { app, dials: AtomicUsize::new(0), open: Arc::default() });
        let routes = Arc::new(One { token: token.clone(), route: Arc::clone(&route) });
        let ingress = Ingress::new(public, routes, Arc::clone(&behind) as Arc<dyn Dial>);
        let closing = CancellationToken::new();
        tokio::spawn(mainbrella_preview::serve(listener, ingress, tls, 4096, closing.clone()));
        Self { address, domain, token, route, behind, closing }
    }

    pub fn host(&self) -> String {
        format!("{}.{}:{}", self.token.expose(), self.domain, self.address.port())
    }

    pub fn cut(&self) {
        self.route.cut.cancel();
    }

    pub fn dials(&self) -> usize {
        self.behind.dials.load(Ordering::SeqCst)
    }

    /// Waits until nothing is connected to the application any more.
    pub async fn settles(&self) {
        for _ in 0..300 {
            if self.behind.open.load(Ordering::SeqCst) == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{} connections to the application are left", self.behind.open.load(Ordering::SeqCst));
    }

    /// The reply to a request on a connection of its own.
    pub async fn open<B>(&self, request: Request<B>) -> Response<Incoming>
    where
        B: hyper::body::Body<Data = Bytes> + Send + 'static,
        B::Error: std::error::Error + Send + Sync,
    {
        open(self.address, request).await.unwrap()
    }

    pub fn sender(
        &self,
        request: Request<Full<Bytes>>,
    ) -> impl Future<Output = hyper::Result<Response<Incoming>>> + use<> {
        let address = self.address;
        async move { open(address, request).await }
    }

    pub async fn send(&self, request: Request<Full<Bytes>>) -> Reply {
        let (parts, body) = self.open(request).await.into_parts();
        let body = tokio::time::timeout(Duration::from_secs(10), body.collect()).await.unwrap().unwrap().to_bytes();
        Reply { status: parts.status, headers: parts.headers, body }
    }

    pub async fn socket(&self, url: &str) -> (WebSocketStream<TcpStream>, Response<Option<Vec<u8>>>) {
        let stream = TcpStream::connect(self.address).await.unwrap();
        tokio_tungstenite::client_async(url, stream).await.unwrap()
    }

    pub async fn tls(&self, alpn: &str) -> tokio_rustls::client::TlsStream<TcpStream> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = rustls::RootCertStore::empty();
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/certificate.pem");
        use rustls::pki_types::pem::PemObject as _;
        roots.add(rustls::pki_types::CertificateDer::from_pem_file(file).unwrap()).unwrap();
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![alpn.as_bytes().to_vec()];
        let stream = TcpStream::connect(self.address).await.unwrap();
        let name = format!("{}.{}", self.token.expose(), self.domain);
        tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name.try_into().unwrap(), stream).await.unwrap()
    }
}

async fn open<B>(address: SocketAddr, request: Request<B>) -> hyper::Result<Response<Incoming>>
where
    B: hyper::body::Body<Data = Bytes> + Send + 'static,
    B::Error: std::error::Error + Send + Sync,
{
    let stream = TcpStream::connect(address).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    sender.send_request(request.map(Box::pin)).await
}

pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Reply {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

pub fn request(method: &str, host: &str, uri: &str) -> Request<Full<Bytes>> {
    Request::builder().method(method).uri(uri).header("host", host).body(Full::default()).unwrap()
}

/// Resident memory of this process, bytes.
pub fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}
