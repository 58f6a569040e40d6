//! A machine's side, the gateway, and a host outside with TLS of its own; all on loopback.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use futures::future::BoxFuture;
use http_body_util::StreamBody;
use hyper::body::Frame;
use hyper::client::conn::http1::SendRequest as Send1;
use hyper::client::conn::http2::SendRequest as Send2;
use mainbrella_types::{Placement, SecretSpec, SecretValue};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::client::TlsStream;

use super::*;
use crate::resolve::Outside;
use crate::secrets::{Authority, SeatSecrets, Secret};

const HOST: &str = "api.example";
const VALUE: &str = "Bearer only-the-host-sees-this";

type Body = BoxBody<Bytes, hyper::Error>;

/// Every name has one public address, and every connection ends at the host of the test.
struct World {
    host: SocketAddr,
    roots: Arc<RootCertStore>,
}

impl Outside for World {
    fn resolve<'a>(&'a self, _: &'a HostName) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async { Ok(vec!["93.184.216.34".parse().expect("an address")]) })
    }
    fn connect(&self, _: SocketAddr) -> BoxFuture<'_, io::Result<TcpStream>> {
        Box::pin(TcpStream::connect(self.host))
    }
    fn ask<'a>(&'a self, _: &'a [u8]) -> BoxFuture<'a, io::Result<Vec<u8>>> {
        Box::pin(async { Err(io::ErrorKind::Unsupported.into()) })
    }
    fn roots(&self) -> BoxFuture<'_, io::Result<Arc<RootCertStore>>> {
        Box::pin(async { Ok(self.roots.clone()) })
    }
}

fn believing(authority: &Authority) -> Arc<RootCertStore> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).expect("a certificate")).expect("taken");
    Arc::new(roots)
}

fn name(text: &str) -> HostName {
    text.parse().expect("a name")
}

/// Says what it saw, or gives back what it was sent, or becomes an echo.
async fn answer(mut request: Request<Incoming>) -> Result<Response<Body>, hyper::Error> {
    if request.headers().contains_key(header::UPGRADE) {
        tokio::spawn(async move {
            let stream = hyper::upgrade::on(&mut request).await.expect("upgraded");
            let (mut read, mut write) = tokio::io::split(TokioIo::new(stream));
            let _ = tokio::io::copy(&mut read, &mut write).await;
        });
        let mut reply = Response::new(Full::default().map_err(|e| match e {}).boxed());
        *reply.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        reply.headers_mut().insert(header::UPGRADE, "echo".parse().expect("a value"));
        reply.headers_mut().insert(header::CONNECTION, "upgrade".parse().expect("a value"));
        return Ok(reply);
    }
    if request.uri().path() == "/echo" {
        let encoding = request.headers().get(header::CONTENT_ENCODING).cloned();
        let mut reply = Response::new(request.into_body().boxed());
        if let Some(encoding) = encoding {
            reply.headers_mut().insert(header::CONTENT_ENCODING, encoding);
        }
        return Ok(reply);
    }
    let all = |name: &str| {
        let values = request.headers().get_all(name).iter().map(|v| v.to_str().unwrap_or("?"));
        values.collect::<Vec<_>>().join("|")
    };
    let text = format!("{:?} {} {}", request.version(), all("authorization"), all("x-own"));
    Ok(Response::new(Full::from(text).map_err(|e| match e {}).boxed()))
}

/// A host outside that speaks these protocols.
async fn host(authority: &Authority, protocols: &[&[u8]]) -> SocketAddr {
    let mut config = authority.server(&name(HOST)).expect("a certificate");
    config.alpn_protocols = protocols.iter().map(|p| p.to_vec()).collect();
    let (acceptor, listener) =
        (TlsAcceptor::from(Arc::new(config)), TcpListener::bind("127.0.0.1:0").await.expect("bound"));
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else { return };
                let h2 = stream.get_ref().1.alpn_protocol() == Some(H2);
                let (stream, service) = (TokioIo::new(stream), service_fn(answer));
                if h2 {
                    let _ = server2::Builder::new(TokioExecutor::new()).serve_connection(stream, service).await;
                } else {
                    let _ = server1::Builder::new().serve_connection(stream, service).with_upgrades().await;
                }
            });
        }
    });
    address
}

struct Ground {
    shared: Arc<Shared>,
    machine: Arc<Authority>,
}

impl Ground {
    /// A host that speaks `protocols`, and a machine with one secret for it.
    async fn new(protocols: &[&[u8]]) -> Self {
        let outer = Authority::generate().expect("made");
        let world = World { host: host(&outer, protocols).await, roots: believing(&outer) };
        Self::of(world)
    }

    fn of(world: World) -> Self {
        let machine = Arc::new(Authority::generate().expect("made"));
        let secrets = Arc::new(SeatSecrets::default());
        secrets.replace(machine.clone(), &[secret()]);
        Self { shared: Arc::new(Shared::of(Arc::new(world), secrets)), machine }
    }

    /// A connection as a program in the machine makes one.
    async fn connect(&self, sni: &str, offers: &[&[u8]]) -> io::Result<TlsStream<TcpStream>> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let outside = TcpStream::connect(listener.local_addr()?).await?;
        let (inside, _) = listener.accept().await?;
        tokio::spawn(relay(inside, Vec::new(), name(HOST), 443, self.shared.clone()));
        let offers = offers.iter().map(|p| p.to_vec()).collect();
        connector(believing(&self.machine), offers)?.connect(server_name(&name(sni))?, outside).await
    }

    async fn http1(&self) -> Send1<Body> {
        let stream = self.connect(HOST, &[HTTP11]).await.expect("connected");
        let (sender, connection) = client1::handshake(TokioIo::new(stream)).await.expect("begun");
        tokio::spawn(connection.with_upgrades());
        sender
    }

    async fn http2(&self) -> Send2<Body> {
        let stream = self.connect(HOST, &[H2, HTTP11]).await.expect("connected");
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(H2));
        let (sender, connection) = client2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.expect("begun");
        tokio::spawn(connection);
        sender
    }

    fn reasons(&self) -> Vec<String> {
        self.shared.log().after(0, 100).events.into_iter().map(|e| e.reason).collect()
    }
}

fn secret() -> Secret {
    let placement = Placement::header("Authorization").expect("a header");
    let spec = SecretSpec { name: "s".parse().expect("a name"), host: name(HOST), port: 443, placement };
    Secret { spec, value: SecretValue::new(VALUE.into()).expect("a value") }
}

fn request(path: &str, host: &str) -> http::request::Builder {
    Request::builder().uri(path).header(header::HOST, host)
}

fn empty() -> Body {
    Full::default().map_err(|e| match e {}).boxed()
}

async fn text(response: Response<Incoming>) -> String {
    let bytes = response.into_body().collect().await.expect("whole").to_bytes();
    String::from_utf8(bytes.to_vec()).expect("text")
}

#[tokio::test]
async fn each_request_gets_the_credential_in_place_of_what_the_machine_said() {
    let ground = Ground::new(&[H2, HTTP11]).await;
    let mut sender = ground.http1().await;
    let plain = || request("/", HOST).header("x-own", "kept");
    let said = sender.send_request(plain().body(empty()).expect("a request")).await.expect("answered");
    assert_eq!(text(said).await, format!("HTTP/1.1 {VALUE} kept"));
    // Two of its own, over the same connection.
    let own = plain().header("authorization", "mine").header("authorization", "and mine");
    let said = sender.send_request(own.body(empty()).expect("a request")).await.expect("answered");
    assert_eq!(text(said).await, format!("HTTP/1.1 {VALUE} kept"));
    // Taken away: at once, on the connection that is there.
    ground.shared.secrets.clear();
    let said = sender.send_request(plain().body(empty()).expect("a request")).await.expect("answered");
    assert_eq!(text(said).await, "HTTP/1.1  kept");
    assert_eq!(ground.reasons(), Vec::<String>::new());
}

#[tokio::test]
async fn a_request_for_another_host_inside_the_connection_gets_no_credential() {
    let ground = Ground::new(&[HTTP11]).await;
    let mut sender = ground.http1().await;
    for other in ["evil.example", "api.example:8443", "api.example.evil.example"] {
        let said = sender.send_request(request("/", other).body(empty()).expect("a request")).await;
        assert_eq!(said.expect("answered").status(), StatusCode::MISDIRECTED_REQUEST, "{other}");
    }
    let whole = request("https://evil.example/", HOST).body(empty()).expect("a request");
    assert_eq!(sender.send_request(whole).await.expect("answered").status(), StatusCode::MISDIRECTED_REQUEST);
    let trace =
        Request::builder().method(Method::TRACE).uri("/").header(header::HOST, HOST).body(empty()).expect("a request");
    assert_eq!(sender.send_request(trace).await.expect("answered").status(), StatusCode::MISDIRECTED_REQUEST);
    let odd = request("/", "api.example:+443").body(empty()).expect("a request");
    assert_eq!(sender.send_request(odd).await.expect("answered").status(), StatusCode::MISDIRECTED_REQUEST);
    assert_eq!(ground.reasons().len(), 6);
    let said = sender.send_request(request("/", "API.example:443").body(empty()).expect("a request")).await;
    assert_eq!(said.expect("answered").status(), StatusCode::OK);
}

#[tokio::test]
async fn http2_carries_many_requests_at_once_and_each_is_checked() {
    let ground = Ground::new(&[H2, HTTP11]).await;
    let sender = ground.http2().await;
    let asked = (0..50).map(|n| {
        let mut sender = sender.clone();
        async move {
            let host = if n % 10 == 9 { "evil.example" } else { HOST };
            let request = Request::builder().uri(format!("https://{host}/")).header("x-own", n);
            let said = sender.send_request(request.body(empty()).expect("a request")).await.expect("answered");
            if n % 10 == 9 {
                assert_eq!(said.status(), StatusCode::MISDIRECTED_REQUEST);
            } else {
                assert_eq!(text(said).await, format!("HTTP/2.0 {VALUE} {n}"));
            }
        }
    });
    futures::future::join_all(asked).await;
}

/// 50 MB that no gateway may unpack, sent and given back in pieces.
#[tokio::test(flavor = "multi_thread")]
async fn large_packed_bodies_pass_untouched_both_ways_over_either_protocol() {
    let ground = Ground::new(&[H2, HTTP11]).await;
    let piece: Bytes =
        (0..1 << 16).map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect::<Vec<_>>().into();
    let pieces = 50_000_000 / piece.len();
    let body = || {
        let all = futures::stream::iter((0..pieces).map({
            let piece = piece.clone();
            move |_| Ok::<_, hyper::Error>(Frame::data(piece.clone()))
        }));
        BoxBody::new(StreamBody::new(all))
    };
    let (mut one, mut two) = (ground.http1().await, ground.http2().await);
    let head = |uri: &str| Request::post(uri).header(header::CONTENT_ENCODING, "gzip");
    let first = one.send_request(head("/echo").header(header::HOST, HOST).body(body()).expect("a request"));
    let second = two.send_request(head("https://api.example/echo").body(body()).expect("a request"));
    for reply in [first.await, second.await] {
        let reply = reply.expect("answered");
        assert_eq!(reply.headers()[header::CONTENT_ENCODING], "gzip");
        let mut back = reply.into_body();
        let (mut at, mut seen) = (0, 0);
        while let Some(frame) = back.frame().await {
            let data = frame.expect("whole").into_data().expect("data");
            for byte in &data {
                assert_eq!(*byte, piece[at], "at {seen}");
                (at, seen) = ((at + 1) % piece.len(), seen + 1);
            }
        }
        assert_eq!(seen, pieces * piece.len());
    }
}

#[tokio::test]
async fn what_becomes_something_else_goes_on_as_that() {
    let ground = Ground::new(&[HTTP11]).await;
    let mut sender = ground.http1().await;
    let wish = request("/socket", HOST).header(header::UPGRADE, "echo").header(header::CONNECTION, "upgrade");
    let mut reply = sender.send_request(wish.body(empty()).expect("a request")).await.expect("answered");
    assert_eq!(reply.status(), StatusCode::SWITCHING_PROTOCOLS);
    let mut stream = TokioIo::new(hyper::upgrade::on(&mut reply).await.expect("upgraded"));
    for round in 0..20u8 {
        stream.write_all(&[round; 1000]).await.expect("written");
        let mut back = [0u8; 1000];
        stream.read_exact(&mut back).await.expect("read");
        assert_eq!(back, [round; 1000]);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn the_machine_is_offered_what_the_host_speaks() {
    let ground = Ground::new(&[HTTP11]).await;
    let stream = ground.connect(HOST, &[H2, HTTP11]).await.expect("connected");
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(HTTP11));
    let stream = ground.connect(HOST, &[]).await.expect("connected");
    assert_eq!(stream.get_ref().1.alpn_protocol(), None);
}

#[tokio::test]
async fn a_connection_for_another_name_ends_and_is_told() {
    let ground = Ground::new(&[HTTP11]).await;
    assert!(ground.connect("other.example", &[HTTP11]).await.is_err());
    let reasons = ground.reasons();
    assert!(reasons.len() == 1 && reasons[0].contains("another host"), "{reasons:?}");
}

#[tokio::test]
async fn a_host_that_cannot_prove_its_name_gets_nothing() {
    let (outer, believed) = (Authority::generate().expect("made"), Authority::generate().expect("made"));
    let world = World { host: host(&outer, &[HTTP11]).await, roots: believing(&believed) };
    assert!(Ground::of(world).connect(HOST, &[HTTP11]).await.is_err());
}
