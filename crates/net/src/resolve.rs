//! The way out of the gateway: resolving names and connecting, from the host's own network.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use mainbrella_types::HostName;
use mainbrella_types::egress::reserved;
use rustls::RootCertStore;
use tokio::net::{TcpStream, UdpSocket, lookup_host};
use tokio::time::timeout;

/// Longest lookup.
pub const RESOLVE_DEADLINE: Duration = Duration::from_secs(10);
/// Longest attempt on one address.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);
/// Addresses of one name that are tried.
const ADDRESSES_MAX: usize = 8;
/// Longest answer of a name server that is passed on.
const ANSWER_MAX: usize = 4096;

/// What the gateway needs of the world. The host's own ([`Host`]), or a test's.
pub trait Outside: Send + Sync + 'static {
    /// Addresses of a name.
    fn resolve<'a>(&'a self, name: &'a HostName) -> BoxFuture<'a, io::Result<Vec<IpAddr>>>;
    /// A connection to an address.
    fn connect(&self, to: SocketAddr) -> BoxFuture<'_, io::Result<TcpStream>>;
    /// Asks the host's name server a question in its own form, and returns its answer in the same form.
    fn ask<'a>(&'a self, question: &'a [u8]) -> BoxFuture<'a, io::Result<Vec<u8>>>;
    /// Authorities that hosts outside are believed by. Without any, no connection gets a credential.
    fn roots(&self) -> BoxFuture<'_, io::Result<Arc<RootCertStore>>> {
        Box::pin(async { Err(io::ErrorKind::Unsupported.into()) })
    }
}

/// Why a host could not be reached.
#[derive(Debug, thiserror::Error)]
pub enum Unreached {
    /// Every address of the name is one no machine may reach.
    #[error("{name} resolves to {address}, which is {kind}: no machine may reach it")]
    Reserved {
        /// The name.
        name: HostName,
        /// The first such address.
        address: IpAddr,
        /// What kind it is.
        kind: &'static str,
    },
    /// It has no address, or none answers.
    #[error("the host could not be reached")]
    Io(#[from] io::Error),
}

/// Resolves `name` and connects. Addresses no machine may reach are left out: a name cannot lead inwards.
///
/// # Errors
/// When no address is left or none answers.
pub async fn reach(outside: &dyn Outside, name: &HostName, port: u16) -> Result<TcpStream, Unreached> {
    let found = timeout(RESOLVE_DEADLINE, outside.resolve(name)).await.map_err(|_| timed_out())??;
    let inward = found.iter().find_map(|a| Some((*a, inward(*a)?)));
    let mut last = None;
    for address in found.into_iter().filter(|a| self::inward(*a).is_none()).take(ADDRESSES_MAX) {
        match connect(outside, SocketAddr::new(address, port)).await {
            Ok(stream) => return Ok(stream),
            Err(e) => last = Some(e),
        }
    }
    match (last, inward) {
        (Some(e), _) => Err(e.into()),
        (None, Some((address, kind))) => Err(Unreached::Reserved { name: name.clone(), address, kind }),
        (None, None) => Err(io::Error::from(io::ErrorKind::NotFound).into()),
    }
}

/// Connects to an address that was allowed as such.
///
/// # Errors
/// When it is reserved or does not answer.
pub async fn connect(outside: &dyn Outside, to: SocketAddr) -> io::Result<TcpStream> {
    if inward(to.ip()).is_some() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let stream = timeout(CONNECT_DEADLINE, outside.connect(to)).await.map_err(|_| timed_out())??;
    let _ = stream.set_nodelay(true);
    Ok(stream)
}

/// What kind of address this is, when no machine may reach it: a reserved one, or one of this host's own, behind which
/// are the service and whatever else listens here.
#[must_use]
pub fn inward(address: IpAddr) -> Option<&'static str> {
    // Only an address of the host's own can be bound.
    reserved(address).or_else(|| std::net::UdpSocket::bind((address, 0)).is_ok().then_some("an address of this host"))
}

fn timed_out() -> io::Error {
    io::ErrorKind::TimedOut.into()
}

/// The host's resolver and network.
#[derive(Debug, Default)]
pub struct Host {
    /// Name servers for questions that are passed on as they are. Empty: those of `/etc/resolv.conf`.
    pub servers: Vec<SocketAddr>,
    /// The host's own authorities, once they have been read.
    roots: tokio::sync::OnceCell<Arc<RootCertStore>>,
}

/// Reads the authorities the host believes in: where OpenSSL has them, or `SSL_CERT_FILE` and `SSL_CERT_DIR`.
fn native_roots() -> io::Result<Arc<RootCertStore>> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    let (known, _) = roots.add_parsable_certificates(found.certs);
    match (known, found.errors.into_iter().next()) {
        (0, Some(e)) => Err(io::Error::other(e)),
        (0, None) => Err(io::Error::other("this host has no certificate authorities: install ca-certificates")),
        _ => Ok(Arc::new(roots)),
    }
}

impl Host {
    async fn servers(&self) -> Vec<SocketAddr> {
        if !self.servers.is_empty() {
            return self.servers.clone();
        }
        let text = tokio::fs::read_to_string("/etc/resolv.conf").await.unwrap_or_default();
        servers_of(&text)
    }
}

/// Name servers named in the text of a `resolv.conf`, at most three.
fn servers_of(text: &str) -> Vec<SocketAddr> {
    let server = |line: &str| {
        let address = line.trim().strip_prefix("nameserver")?.trim().split(['%', ' ', '\t', '#']).next()?;
        Some(SocketAddr::new(address.parse().ok()?, 53))
    };
    text.lines().filter_map(server).take(3).collect()
}

impl Outside for Host {
    fn resolve<'a>(&'a self, name: &'a HostName) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async move { Ok(lookup_host((name.as_str(), 0)).await?.map(|a| a.ip()).collect()) })
    }

    fn connect(&self, to: SocketAddr) -> BoxFuture<'_, io::Result<TcpStream>> {
        Box::pin(TcpStream::connect(to))
    }

    fn roots(&self) -> BoxFuture<'_, io::Result<Arc<RootCertStore>>> {
        let read = || async { tokio::task::spawn_blocking(native_roots).await.map_err(io::Error::other)? };
        Box::pin(async move { self.roots.get_or_try_init(read).await.cloned() })
    }

    fn ask<'a>(&'a self, question: &'a [u8]) -> BoxFuture<'a, io::Result<Vec<u8>>> {
        Box::pin(async move {
            for server in self.servers().await {
                let local: SocketAddr = if server.is_ipv4() { ([0u8; 4], 0).into() } else { ([0u16; 8], 0).into() };
                let asked = timeout(Duration::from_secs(3), async {
                    let socket = UdpSocket::bind(local).await?;
                    socket.connect(server).await?;
                    socket.send(question).await?;
                    let mut answer = vec![0u8; ANSWER_MAX];
                    loop {
                        let n = socket.recv(&mut answer).await?;
                        // Its number is the first two bytes: an answer to another question is not ours.
                        if n >= 12 && answer.get(..2) == question.get(..2) {
                            answer.truncate(n);
                            return Ok::<_, io::Error>(answer);
                        }
                    }
                });
                if let Ok(Ok(answer)) = asked.await {
                    return Ok(answer);
                }
            }
            Err(timed_out())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers_are_found_in_the_hosts_file() {
        let text = "# nameserver 9.9.9.9\nsearch a b\nnameserver 10.0.0.53\nnameserver\tfe80::1%eth0\nnameserver x\nnameserver 1.1.1.1 # b\n";
        let found: Vec<String> = servers_of(text).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["10.0.0.53:53", "[fe80::1]:53", "1.1.1.1:53"]);
    }
}
