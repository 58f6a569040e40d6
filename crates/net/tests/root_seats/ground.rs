//! A host of namespaces: a host, a world behind it, and guests that are namespaces on the other end of a link.

use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use hickory_proto::op::{Message, Query};
use hickory_proto::rr::{Name, RData, RecordType};
use mainbrella_net::namespace::Namespace;
use mainbrella_net::resolve::Outside;
use mainbrella_net::{EgressEvent, NetError, Seat, SeatOrder, Uplink, UplinkConfig};
use mainbrella_types::{AllowList, EgressPolicy, HostName};

pub const PUBLIC: &str = "93.184.216.34";
pub const OTHER: &str = "93.184.217.9";
pub const PRIVATE: &str = "10.9.9.9";
pub const METADATA: &str = "169.254.169.254";
pub const WAIT: Duration = Duration::from_millis(1500);

/// Runs a command line in a namespace.
pub fn sh(ns: &Namespace, text: &str) {
    ns.run(|| {
        let out = Command::new("sh").args(["-ec", text]).output().map_err(|e| NetError::Io("sh", e))?;
        assert!(out.status.success(), "{text}: {}", String::from_utf8_lossy(&out.stderr));
        Ok(())
    })
    .expect("the command runs");
}

/// Moves one end of a new pair into another namespace.
pub fn join(a: &Namespace, a_name: &str, b: &Namespace, b_name: &str) {
    use std::os::fd::AsRawFd as _;
    let fd = b.fd().as_raw_fd();
    let path = format!("/proc/{}/fd/{fd}", std::process::id());
    sh(a, &format!("ip link add {a_name} type veth peer name {b_name} netns {path} && ip link set {a_name} up"));
    sh(b, &format!("ip link set {b_name} up; ip link set lo up"));
}

/// Answers every connection with who asked and, for what looks like HTTP, which host was asked for.
pub fn serve(ns: &Namespace, at: &'static [&'static str]) {
    for at in at {
        let listener = ns.run(|| TcpListener::bind(at).map_err(|e| NetError::Io("bind", e))).expect(at);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                std::thread::spawn(move || {
                    let _ = stream.set_read_timeout(Some(Duration::from_millis(300)));
                    let mut buffer = [0u8; 2048];
                    let n = stream.read(&mut buffer).unwrap_or(0);
                    let who = stream.peer_addr().map(|a| a.ip().to_string()).unwrap_or_default();
                    let first = String::from_utf8_lossy(&buffer[..n]).lines().next().unwrap_or("").to_owned();
                    let _ = stream.write_all(format!("from {who}: {first}").as_bytes());
                });
            }
        });
    }
}

/// A resolver with a fixed book, connecting from the namespace of the thread the runtime runs on.
pub struct Book(pub Vec<(&'static str, Vec<&'static str>)>);

impl Outside for Book {
    fn resolve<'a>(&'a self, name: &'a HostName) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        let found = self.0.iter().find(|(n, _)| *n == name.as_str());
        let addresses = found.map(|(_, a)| a.iter().map(|a| a.parse().expect("an address")).collect());
        Box::pin(async move { addresses.ok_or_else(|| io::ErrorKind::NotFound.into()) })
    }
    fn connect(&self, to: SocketAddr) -> BoxFuture<'_, io::Result<tokio::net::TcpStream>> {
        Box::pin(tokio::net::TcpStream::connect(to))
    }
    fn ask<'a>(&'a self, _: &'a [u8]) -> BoxFuture<'a, io::Result<Vec<u8>>> {
        Box::pin(async { Err(io::ErrorKind::NotConnected.into()) })
    }
}

pub struct Ground {
    pub host: Namespace,
    pub world: Namespace,
}

pub struct Guest {
    pub inside: Namespace,
    pub seat: Namespace,
    pub world: Namespace,
}

impl Ground {
    pub fn new() -> Self {
        assert!(rustix::process::geteuid().is_root(), "this tier needs root");
        let (host, world) = (Namespace::new().expect("a namespace"), Namespace::new().expect("a namespace"));
        join(&host, "wan", &world, "lan");
        // A new namespace has the settings of the first one, where a service may be running.
        sh(&host, "echo 0 > /proc/sys/net/ipv4/ip_forward");
        sh(&host, "ip link set lo up; ip addr add 203.0.113.1/24 dev wan; ip route add default via 203.0.113.2");
        sh(
            &world,
            &format!(
                "ip addr add 203.0.113.2/24 dev lan; for a in {PUBLIC} {OTHER} {PRIVATE} {METADATA}; do ip addr add $a/32 dev lo; done"
            ),
        );
        serve(&world, &["0.0.0.0:80", "0.0.0.0:443", "0.0.0.0:5432"]);
        serve(&host, &["0.0.0.0:8787"]);
        Self { host, world }
    }

    pub fn guest(&self) -> Guest {
        let (seat, inside) = (Namespace::new().expect("a namespace"), Namespace::new().expect("a namespace"));
        join(&seat, "tap0", &inside, "eth0");
        sh(
            &inside,
            "ip link set eth0 address 02:4d:42:00:00:02; ip addr add 172.31.255.2/30 dev eth0; ip route add default via 172.31.255.1",
        );
        Seat::prepare(&seat).expect("prepared");
        Guest { inside, seat, world: self.world.clone() }
    }

    /// Runs a test on a runtime inside the host's namespace.
    pub fn run<F: Future<Output = ()>>(&self, test: impl FnOnce(Arc<Uplink>) -> F + Send) {
        let config = UplinkConfig { instance: "t1".into(), block: "10.201.0.0/16".parse().expect("a block") };
        self.host
            .run(|| {
                let uplink = Arc::new(Uplink::open(config)?);
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
                runtime.block_on(test(uplink.clone()));
                drop(runtime);
                uplink.close()
            })
            .expect("the host's side");
    }
}

impl Guest {
    pub fn guest_order(&self, uplink: &Arc<Uplink>) -> SeatOrder {
        self.order(uplink, empty())
    }

    pub fn order(&self, uplink: &Arc<Uplink>, book: Book) -> SeatOrder {
        SeatOrder {
            namespace: self.seat.clone(),
            uplink: Some(uplink.clone()),
            outside: Arc::new(book),
            log: Arc::default(),
            secrets: Arc::default(),
        }
    }

    /// What a connection from inside says, or why there is none.
    pub async fn get(&self, to: &str, say: &[u8]) -> Result<String, io::ErrorKind> {
        let say = say.to_vec();
        self.connected(to, move |stream| stream.write_all(&say)).await
    }

    /// What a connection from inside says to one who says nothing, or why there is none.
    pub async fn knock(&self, to: &str) -> Result<String, io::ErrorKind> {
        self.connected(to, |_| Ok(())).await
    }

    async fn connected(
        &self,
        to: &str,
        then: impl FnOnce(&mut TcpStream) -> io::Result<()> + Send + 'static,
    ) -> Result<String, io::ErrorKind> {
        let (ns, to) = (self.inside.clone(), to.parse::<SocketAddr>().expect("an address"));
        tokio::task::spawn_blocking(move || {
            ns.run(|| {
                Ok((|| {
                    let mut stream = TcpStream::connect_timeout(&to, WAIT)?;
                    stream.set_read_timeout(Some(WAIT))?;
                    then(&mut stream)?;
                    let mut text = String::new();
                    stream.read_to_string(&mut text)?;
                    Ok::<_, io::Error>(text)
                })()
                .map_err(|e| e.kind()))
            })
            .expect("the namespace")
        })
        .await
        .expect("no panic")
    }

    /// The address the machine's name server gives for a name.
    pub async fn lookup(&self, name: &str, server: &str) -> Option<Ipv4Addr> {
        let mut m = Message::query();
        m.add_query(Query::query(Name::from_ascii(name).expect("a name"), RecordType::A));
        let (ns, server, q) = (self.inside.clone(), format!("{server}:53"), m.to_vec().expect("encodes"));
        tokio::task::spawn_blocking(move || {
            ns.run(|| {
                let socket = UdpSocket::bind("0.0.0.0:0").map_err(|e| NetError::Io("bind", e))?;
                socket.set_read_timeout(Some(WAIT)).map_err(|e| NetError::Io("time-out", e))?;
                let mut buffer = [0u8; 2048];
                let n = socket.send_to(&q, server.as_str()).and_then(|_| socket.recv(&mut buffer));
                let Ok(n) = n else { return Ok(None) };
                let answer = Message::from_vec(&buffer[..n]).expect("a message");
                Ok(answer.answers.iter().find_map(|r| if let RData::A(a) = &r.data { Some(a.0) } else { None }))
            })
            .expect("the namespace")
        })
        .await
        .expect("no panic")
    }
}

pub fn list(rules: &[&str], dry_run: bool) -> EgressPolicy {
    EgressPolicy::AllowList(
        AllowList::new(rules.iter().map(|r| r.parse().expect("a rule")).collect(), dry_run).expect("few"),
    )
}

pub fn empty() -> Book {
    Book(Vec::new())
}

pub fn hello(host: &str) -> Vec<u8> {
    format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").into_bytes()
}

/// A TLS hello that names `host`.
pub fn tls_hello(host: &str) -> Vec<u8> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let name = rustls::pki_types::ServerName::try_from(host.to_owned()).expect("a name");
    let mut connection = rustls::ClientConnection::new(Arc::new(config), name).expect("a connection");
    let mut bytes = Vec::new();
    connection.write_tls(&mut bytes).expect("a hello");
    bytes
}

pub fn reasons(events: &[EgressEvent]) -> String {
    events
        .iter()
        .map(|e| {
            format!("{} {:?} {}: {}\n", e.port, e.name, e.address.map(|a| a.to_string()).unwrap_or_default(), e.reason)
        })
        .collect()
}
