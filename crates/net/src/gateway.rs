//! The gateway of one machine: name server, transparent gateway and proxy, listening inside its seat and connecting from
//! the host. It is the only way out under `allow-list`. When it is gone, nobody listens: fails closed.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use mainbrella_types::egress::{GATEWAY_ADDRESS, Target};
use mainbrella_types::{Decision, DenyRule, EgressPolicy, HostName};
use socket2::SockRef;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use crate::error::{NetError, io_error};
use crate::events::{Denied, EgressLog, Verdict};
use crate::names::{BLOCK, Names};
use crate::namespace::Namespace;
use crate::resolve::{Outside, Unreached, connect, inward, reach};
use crate::rules::{GATEWAY_PORT, PROXY_PORT};
use crate::secrets::{SeatSecrets, relay};
use crate::sniff::{Sniffed, sniff};
use crate::{dns, sniff as sniffing};

/// Connections of one machine at once; more wait in the listener's queue.
const CONNECTIONS_MAX: usize = 512;
/// Connections of one machine at once that get a credential: each holds buffers of both sides. More wait.
const RELAYS_MAX: usize = 64;
/// Lookups of one machine at once; more are dropped, as datagrams are.
const LOOKUPS_MAX: usize = 64;
/// How long a connection may take to say whom it is for.
pub(crate) const HELLO_DEADLINE: Duration = Duration::from_secs(10);
/// How long a name server connection may be idle.
const DNS_IDLE: Duration = Duration::from_secs(10);
/// What a tunnel begins with.
const ESTABLISHED: &[u8] = b"HTTP/1.1 200 Connection established\r\n\r\n";
/// Longest request head of the proxy.
const HEAD_MAX: usize = 16 * 1024;

/// What the parts share.
pub(crate) struct Shared {
    policy: EgressPolicy,
    names: Names,
    pub(crate) outside: Arc<dyn Outside>,
    log: Arc<EgressLog>,
    pub(crate) secrets: Arc<SeatSecrets>,
    /// Places for connections that get a credential.
    relays: Semaphore,
}

impl Shared {
    /// For tests of parts of the gateway.
    #[cfg(test)]
    pub(crate) fn of(outside: Arc<dyn Outside>, secrets: Arc<SeatSecrets>) -> Self {
        let relays = Semaphore::new(RELAYS_MAX);
        Self { policy: EgressPolicy::Open, names: Names::default(), outside, log: Arc::default(), secrets, relays }
    }

    /// What was denied.
    #[cfg(test)]
    pub(crate) fn log(&self) -> &EgressLog {
        &self.log
    }

    async fn answer(&self, question: &[u8]) -> Option<Vec<u8>> {
        dns::answer(question, &self.policy, &self.names, &*self.outside, &self.log, &self.secrets).await
    }
}

/// A running gateway. Ends with all its connections when dropped.
pub struct Gateway {
    tasks: Vec<AbortOnDropHandle<()>>,
}

struct Sockets {
    dns: std::net::UdpSocket,
    dns_tcp: std::net::TcpListener,
    gateway: std::net::TcpListener,
    proxy: Option<std::net::TcpListener>,
}

impl Gateway {
    /// Listens inside `seat`: for lookups, and for connections: under an allow-list for all of them and for those of a proxy,
    /// under `open` for those to hosts that have a secret.
    ///
    /// # Errors
    /// When the sockets cannot be made.
    pub fn start(
        seat: &Namespace,
        policy: EgressPolicy,
        outside: Arc<dyn Outside>,
        log: Arc<EgressLog>,
        secrets: Arc<SeatSecrets>,
    ) -> Result<Self, NetError> {
        let listed = matches!(policy, EgressPolicy::AllowList(_));
        let sockets = seat.run(|| {
            let at = |port| SocketAddr::from((GATEWAY_ADDRESS, port));
            let tcp = |to: SocketAddr| {
                let s = std::net::TcpListener::bind(to)?;
                s.set_nonblocking(true)?;
                Ok::<_, io::Error>(s)
            };
            let made = || {
                let dns = std::net::UdpSocket::bind(at(53))?;
                dns.set_nonblocking(true)?;
                let proxy = if listed { Some(tcp(at(PROXY_PORT))?) } else { None };
                Ok::<_, io::Error>(Sockets { dns, dns_tcp: tcp(at(53))?, gateway: tcp(at(GATEWAY_PORT))?, proxy })
            };
            made().map_err(io_error("listening in a network seat"))
        })?;
        let relays = Semaphore::new(RELAYS_MAX);
        let shared = Arc::new(Shared { policy, names: Names::default(), outside, log, secrets, relays });
        let io = io_error;
        let mut tasks = vec![
            spawn(lookups(UdpSocket::from_std(sockets.dns).map_err(io("a socket"))?, shared.clone())),
            spawn(serve(listener(sockets.dns_tcp)?, shared.clone(), long_lookups)),
            spawn(serve(listener(sockets.gateway)?, shared.clone(), transparent)),
        ];
        if let Some(proxy) = sockets.proxy {
            tasks.push(spawn(serve(listener(proxy)?, shared, proxied)));
        }
        Ok(Self { tasks })
    }

    /// Ends every listener and connection, and waits until they are closed.
    pub async fn stop(self) {
        for task in self.tasks {
            let task = task.detach();
            task.abort();
            // It was aborted: there is no other outcome.
            let _ = task.await;
        }
    }
}

fn spawn(work: impl Future<Output = ()> + Send + 'static) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(work))
}

fn listener(socket: std::net::TcpListener) -> Result<TcpListener, NetError> {
    TcpListener::from_std(socket).map_err(io_error("a socket"))
}

async fn lookups(socket: UdpSocket, shared: Arc<Shared>) {
    let socket = Arc::new(socket);
    let places = Arc::new(Semaphore::new(LOOKUPS_MAX));
    let mut running = tokio::task::JoinSet::new();
    let mut buffer = vec![0u8; dns::QUESTION_MAX];
    loop {
        while running.try_join_next().is_some() {}
        let Ok((n, from)) = socket.recv_from(&mut buffer).await else {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let Ok(place) = places.clone().try_acquire_owned() else { continue };
        let (question, socket, shared) = (buffer[..n].to_vec(), socket.clone(), shared.clone());
        running.spawn(async move {
            let answer = shared.answer(&question).await;
            if let Some(answer) = answer {
                // A datagram may be lost; the machine asks again.
                let _ = socket.send_to(&dns::for_udp(answer, &question), from).await;
            }
            drop(place);
        });
    }
}

/// Accepts for ever; each connection runs on its own and ends with the gateway.
async fn serve<F: Future<Output = ()> + Send + 'static>(
    listener: TcpListener,
    shared: Arc<Shared>,
    handle: fn(TcpStream, Arc<Shared>) -> F,
) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut running = tokio::task::JoinSet::new();
    loop {
        while running.try_join_next().is_some() {}
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let work = handle(stream, shared.clone());
        running.spawn(async move {
            work.await;
            drop(place);
        });
    }
}

async fn long_lookups(mut stream: TcpStream, shared: Arc<Shared>) {
    let conversation = async {
        loop {
            let length = timeout(DNS_IDLE, stream.read_u16()).await??;
            let mut question = vec![0u8; usize::from(length)];
            timeout(DNS_IDLE, stream.read_exact(&mut question)).await??;
            let answer = shared.answer(&question).await;
            let answer = answer.ok_or(io::ErrorKind::InvalidData)?;
            stream.write_u16(u16::try_from(answer.len()).map_err(io::Error::other)?).await?;
            stream.write_all(&answer).await?;
        }
        #[allow(unreachable_code)]
        Ok::<(), io::Error>(())
    };
    // Its end, whatever the reason, is the end of the connection.
    let _ = conversation.await;
}

/// Where a connection may go.
enum Way {
    Name(HostName, u16),
    Address(SocketAddr),
    Nowhere,
}

/// A connection the rules turned to us: whatever address the machine chose, its name decides. One that goes nowhere ends
/// with a reset, never like an empty reply.
async fn transparent(mut inside: TcpStream, shared: Arc<Shared>) {
    let mut first = Vec::new();
    let outside = match asked_for(&inside) {
        None => None,
        Some((address, port)) => match judge(&mut inside, &mut first, address, port, &shared).await {
            Way::Nowhere => None,
            Way::Name(name, port) if shared.secrets.cover(&name, port) => {
                let Ok(_place) = shared.relays.acquire().await else { return reset(&inside) };
                return relay(inside, first, name, port, shared.clone()).await;
            }
            // What is open goes another way than by us.
            _ if shared.policy == EgressPolicy::Open => None,
            Way::Address(to) => connect(&*shared.outside, to).await.ok(),
            Way::Name(name, port) => reached(&name, port, &shared).await,
        },
    };
    match outside {
        Some(outside) => join(inside, outside, &first).await,
        None => reset(&inside),
    }
}

/// Where a connection was going before the rules turned it to us. None for one that was for the gateway itself.
fn asked_for(inside: &TcpStream) -> Option<(Ipv4Addr, u16)> {
    let to = SockRef::from(inside).original_dst_v4().ok()?.as_socket_ipv4()?;
    (*to.ip() != GATEWAY_ADDRESS).then(|| (*to.ip(), to.port()))
}

/// Decides on a redirected connection; reads from it only as far as the decision needs, into `first`.
async fn judge(inside: &mut TcpStream, first: &mut Vec<u8>, address: Ipv4Addr, port: u16, shared: &Shared) -> Way {
    let policy = &shared.policy;
    let stands_for = if BLOCK.contains(&address) { shared.names.name(address) } else { None };
    if let Some(name) = stands_for {
        if !passes(policy, &Target::Name(&name), port, Some(&name), None, shared) {
            return Way::Nowhere;
        }
        // On the web's ports the connection itself says a name: it must be this one, or a shared server could be
        // talked into serving another.
        if matches!(port, 80 | 443) {
            match hello(inside, first).await {
                Sniffed::Tls(said) | Sniffed::Http(said) if said == name => {}
                Sniffed::Tls(said) | Sniffed::Http(said) => {
                    let why = format!("the address is that of {name}, the connection says {said}");
                    deny(shared, Some(&said), None, port, DenyRule::NameMismatch, &why);
                    return Way::Nowhere;
                }
                Sniffed::Nameless(why) => {
                    deny(shared, Some(&name), None, port, DenyRule::NoName, why);
                    return Way::Nowhere;
                }
                Sniffed::More => return Way::Nowhere,
            }
        }
        return Way::Name(name, port);
    }
    if !BLOCK.contains(&address) {
        let by_address = policy.decide(&Target::Address(address.into()), port);
        if matches!(by_address, Decision::Allowed(_)) && inward(address.into()).is_none() {
            return Way::Address((address, port).into());
        }
        if let Some(kind) = inward(address.into()) {
            let why = format!("{address} is {kind}: no machine may reach it");
            deny(shared, None, Some(address.into()), port, DenyRule::Reserved, &why);
            return Way::Nowhere;
        }
    }
    // An address nobody allowed, or one that stood for a name before the service was restarted: only a name can help.
    let said = if matches!(port, 80 | 443) {
        hello(inside, first).await
    } else {
        Sniffed::Nameless("no rule matches the address")
    };
    match said {
        Sniffed::Tls(name) | Sniffed::Http(name) => {
            if passes(policy, &Target::Name(&name), port, Some(&name), Some(address.into()), shared) {
                Way::Name(name, port)
            } else {
                Way::Nowhere
            }
        }
        Sniffed::More => Way::Nowhere,
        Sniffed::Nameless(why) => {
            if !BLOCK.contains(&address)
                && passes(policy, &Target::Address(address.into()), port, None, Some(address.into()), shared)
            {
                return Way::Address((address, port).into());
            }
            if BLOCK.contains(&address) {
                deny(shared, None, Some(address.into()), port, DenyRule::NoName, why);
            }
            Way::Nowhere
        }
    }
}

/// Reads until the connection has said whom it is for.
async fn hello(inside: &mut TcpStream, first: &mut Vec<u8>) -> Sniffed {
    let read = async {
        loop {
            let found = sniff(first);
            if found != Sniffed::More {
                return found;
            }
            let mut piece = [0u8; 4096];
            match inside.read(&mut piece).await {
                Ok(0) | Err(_) => return Sniffed::More,
                Ok(n) => first.extend_from_slice(&piece[..n]),
            }
            debug_assert!(first.len() <= sniffing::LOOKED_AT_MAX + piece.len(), "sniff gives up in time");
        }
    };
    timeout(HELLO_DEADLINE, read).await.unwrap_or(Sniffed::Nameless("it did not say whom it is for"))
}

/// Asks the policy, and records what it does not allow.
fn passes(
    policy: &EgressPolicy,
    target: &Target<'_>,
    port: u16,
    name: Option<&HostName>,
    address: Option<IpAddr>,
    shared: &Shared,
) -> bool {
    let decision = policy.decide(target, port);
    let (verdict, why) = match &decision {
        Decision::Allowed(_) => return true,
        Decision::WouldDeny(why) => (Verdict::WouldDeny, why),
        Decision::Denied(why) => (Verdict::Denied, why),
    };
    let (name, reason) = (name.map(HostName::as_str), &*why.to_string());
    shared.log.record(Denied { verdict, name, address, port, rule: why.into(), reason });
    decision.lets_pass()
}

pub(crate) fn deny(
    shared: &Shared,
    name: Option<&HostName>,
    address: Option<IpAddr>,
    port: u16,
    rule: DenyRule,
    reason: &str,
) {
    let name = name.map(HostName::as_str);
    shared.log.record(Denied { verdict: Verdict::Denied, name, address, port, rule, reason });
}

pub(crate) async fn reached(name: &HostName, port: u16, shared: &Shared) -> Option<TcpStream> {
    match reach(&*shared.outside, name, port).await {
        Ok(stream) => Some(stream),
        Err(Unreached::Reserved { address, kind, .. }) => {
            let why = format!("{name} resolves to {address}, which is {kind}: no machine may reach it");
            deny(shared, Some(name), Some(address), port, DenyRule::Reserved, &why);
            None
        }
        Err(Unreached::Io(e)) => {
            tracing::debug!(%name, port, error = %e, "a host could not be reached");
            None
        }
    }
}

/// Ends a connection so that its other side learns at once that nobody took it.
fn reset(stream: &TcpStream) {
    let _ = stream.set_zero_linger();
}

async fn join(mut inside: TcpStream, mut outside: TcpStream, first: &[u8]) {
    let _ = inside.set_nodelay(true);
    if outside.write_all(first).await.is_ok() {
        // However it ends, both sides are closed now.
        let _ = copy_bidirectional(&mut inside, &mut outside).await;
    }
}

/// A connection to the proxy: `CONNECT host:port`, or a plain request with a whole URL.
async fn proxied(mut inside: TcpStream, shared: Arc<Shared>) {
    let Ok(Some((request, rest))) = timeout(HELLO_DEADLINE, head(&mut inside)).await else {
        let _ = inside.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n").await;
        return;
    };
    let policy = &shared.policy;
    if request.tunnel
        && let Ok(name) = &request.host
        && shared.secrets.cover(name, request.port)
        && passes(policy, &Target::Name(name), request.port, Some(name), None, &shared)
    {
        let Ok(_place) = shared.relays.acquire().await else { return };
        if inside.write_all(ESTABLISHED).await.is_ok() {
            relay(inside, rest, name.clone(), request.port, shared.clone()).await;
        }
        return;
    }
    let outside = match &request.host {
        Ok(name) if passes(policy, &Target::Name(name), request.port, Some(name), None, &shared) => {
            reached(name, request.port, &shared).await.ok_or(Answer::Gateway)
        }
        Err(address) if passes(policy, &Target::Address(*address), request.port, None, Some(*address), &shared) => {
            connect(&*shared.outside, (*address, request.port).into()).await.map_err(|_| Answer::Gateway)
        }
        _ => Err(Answer::Forbidden),
    };
    match outside {
        Ok(outside) => {
            if request.tunnel && inside.write_all(ESTABLISHED).await.is_err() {
                return;
            }
            let first = [request.forward, rest].concat();
            join(inside, outside, &first).await;
        }
        Err(answer) => {
            let _ = inside.write_all(answer.text().as_bytes()).await;
        }
    }
}

enum Answer {
    Forbidden,
    Gateway,
}

impl Answer {
    fn text(&self) -> String {
        let (status, body) = match self {
            Self::Forbidden => {
                ("403 Forbidden", "The egress policy of this machine does not allow this host and port.\n")
            }
            Self::Gateway => ("502 Bad Gateway", "The host could not be reached.\n"),
        };
        format!(
            "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
    }
}

struct ProxyRequest {
    host: Result<HostName, IpAddr>,
    port: u16,
    tunnel: bool,
    /// What goes to the host first: nothing for a tunnel, else the request as a host expects it.
    forward: Vec<u8>,
}

/// Reads a request head, and what came after it. `None`: it is none.
async fn head(stream: &mut TcpStream) -> Option<(ProxyRequest, Vec<u8>)> {
    let mut bytes = Vec::new();
    loop {
        let mut piece = [0u8; 2048];
        let n = stream.read(&mut piece).await.ok().filter(|n| *n > 0)?;
        bytes.extend_from_slice(&piece[..n]);
        match parse_head(&bytes) {
            Ok(Some((request, length))) => return Some((request, bytes.split_off(length))),
            Ok(None) if bytes.len() < HEAD_MAX => {}
            _ => return None,
        }
    }
}

/// A proxy request in the first bytes of a connection, and its length. `Ok(None)`: not all of it is there.
fn parse_head(bytes: &[u8]) -> Result<Option<(ProxyRequest, usize)>, ()> {
    let mut headers = [httparse::EMPTY_HEADER; 96];
    let mut request = httparse::Request::new(&mut headers);
    let length = match request.parse(bytes).map_err(drop)? {
        httparse::Status::Partial => return Ok(None),
        httparse::Status::Complete(n) => n,
    };
    let (method, target) = (request.method.ok_or(())?, request.path.ok_or(())?);
    let tunnel = method == "CONNECT";
    let (authority, path) = if tunnel {
        (target, "")
    } else {
        let rest = target.strip_prefix("http://").ok_or(())?;
        rest.find('/').map_or((rest, "/"), |at| rest.split_at(at))
    };
    let (host, port) = split(authority, if tunnel { None } else { Some(80) }).ok_or(())?;
    let mut forward = Vec::new();
    if !tunnel {
        // One request a connection: the next may be for another host.
        forward.extend_from_slice(
            format!("{method} {path} HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n").as_bytes(),
        );
        for h in request.headers.iter() {
            let hop = ["host", "connection", "proxy-connection", "proxy-authorization", "keep-alive", "upgrade", "te"];
            if !hop.iter().any(|n| h.name.eq_ignore_ascii_case(n)) {
                forward.extend_from_slice(h.name.as_bytes());
                forward.extend_from_slice(b": ");
                forward.extend_from_slice(h.value);
                forward.extend_from_slice(b"\r\n");
            }
        }
        forward.extend_from_slice(b"\r\n");
    }
    Ok(Some((ProxyRequest { host, port, tunnel, forward }, length)))
}

/// Host and port of an authority. User names in it are refused.
fn split(authority: &str, default_port: Option<u16>) -> Option<(Result<HostName, IpAddr>, u16)> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']')?;
            (host, rest.strip_prefix(':'))
        }
        None => authority.rsplit_once(':').map_or((authority, None), |(h, p)| (h, Some(p))),
    };
    let port = match port {
        Some(p) => p.parse().ok().filter(|p| *p > 0)?,
        None => default_port?,
    };
    if let Ok(address) = host.parse::<IpAddr>() {
        return Some((Err(mainbrella_types::egress::unmapped(address)), port));
    }
    Some((Ok(host.parse().ok()?), port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parsed(text: &str) -> Option<(String, u16, bool, String)> {
        let (r, _) = parse_head(text.as_bytes()).ok()??;
        let host = match r.host {
            Ok(n) => n.to_string(),
            Err(a) => a.to_string(),
        };
        Some((host, r.port, r.tunnel, String::from_utf8(r.forward).expect("text")))
    }

    #[test]
    fn a_tunnel_names_host_and_port() {
        assert_eq!(
            parsed("CONNECT Example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n"),
            Some(("example.org".into(), 443, true, String::new()))
        );
        assert_eq!(
            parsed("CONNECT [::ffff:10.0.0.1]:443 HTTP/1.1\r\n\r\n"),
            Some(("10.0.0.1".into(), 443, true, String::new()))
        );
        assert_eq!(parsed("CONNECT example.org HTTP/1.1\r\n\r\n"), None);
    }

    #[test]
    fn a_plain_request_is_passed_on_as_its_host_expects_it_without_what_is_the_proxys() {
        let text = "GET http://example.org:8080/a?b HTTP/1.1\r\nHost: evil\r\nProxy-Authorization: Basic x\r\nA: b\r\nConnection: keep-alive\r\n\r\n";
        let forward = "GET /a?b HTTP/1.1\r\nHost: example.org:8080\r\nConnection: close\r\nA: b\r\n\r\n";
        assert_eq!(parsed(text), Some(("example.org".into(), 8080, false, forward.into())));
        for bad in [
            "GET / HTTP/1.1\r\n\r\n",
            "GET https://a.org/ HTTP/1.1\r\n\r\n",
            "GET http://u@a.org/ HTTP/1.1\r\n\r\n",
            "\r\n\r\n",
        ] {
            assert_eq!(parsed(bad), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_request_or_not(bytes in proptest::collection::vec(any::<u8>(), 0..400), text in "[A-Z]{1,7} [ -~]{0,60} HTTP/1.1\r\n\r\n") {
            let _ = parse_head(&bytes);
            let _ = parse_head(text.as_bytes());
        }
    }
}
