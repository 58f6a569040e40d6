//! Connecting to a port of the machine: over the loopback addresses first, then to whatever address of this machine
//! somebody listens on.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use connectrpc::{ConnectError, InboundStream};
use futures::{Stream, StreamExt};
use mainbrella_guest_protocol::dial::{Frame, Side, carry, opening};
use mainbrella_guest_protocol::limits::{DIAL_MEMORY, DIALS_MAX};
use mainbrella_guest_protocol::{fault, pb};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc};

/// Longest wait for one connection.
const CONNECT_MOST: Duration = Duration::from_secs(5);
/// How much of a table of sockets is read, bytes; a line is 150.
const TABLE_MAX: u64 = 4 * 1024 * 1024;
/// Addresses tried beside the loopback ones.
const ADDRESSES_MAX: usize = 8;
/// Frames on their way out.
const FRAMES_IN_FLIGHT: usize = 4;

/// What all dialled connections share.
#[derive(Debug)]
pub(crate) struct Dials {
    places: Arc<Semaphore>,
    memory: Arc<Semaphore>,
}

impl Default for Dials {
    fn default() -> Self {
        Self { places: Arc::new(Semaphore::new(DIALS_MAX)), memory: Arc::new(Semaphore::new(DIAL_MEMORY)) }
    }
}

impl Dials {
    /// Connects, and carries bytes until both sides are done or one is gone.
    pub(crate) async fn dial(
        &self,
        mut requests: InboundStream<pb::DialRequest>,
    ) -> Result<impl Stream<Item = Result<pb::DialResponse, ConnectError>> + Send + use<>, ConnectError> {
        let place = Arc::clone(&self.places).try_acquire_owned();
        let place = place.map_err(|_| fault("dial", libc::EMFILE, "too many connections at once"))?;
        let missing = || fault("dial", 0, "the first message says where to");
        let first = requests.next().await.ok_or_else(missing)??.to_owned_message();
        let port = first.start.as_option().ok_or_else(missing)?.port;
        let port = u16::try_from(port).ok().filter(|p| *p > 0).ok_or_else(|| fault("dial", 0, "port: 1 to 65535"))?;
        let stream = connect(port).await?;
        let _ = stream.set_nodelay(true);
        let (outgoing, mut frames) = mpsc::channel::<Frame>(FRAMES_IN_FLIGHT);
        let memory = Arc::clone(&self.memory);
        let first = Frame::from(first);
        let carrier = tokio::spawn(async move {
            let _place = place;
            // The channel is empty, and has room for it.
            let _ = outgoing.try_send(opening());
            let incoming = requests.map(|message| message.map(|m| Frame::from(m.to_owned_message())));
            let incoming = std::pin::pin!(incoming);
            carry(Side::Callee, stream, first, incoming, outgoing, &memory).await
        });
        let mut carrier = Some(carrier);
        Ok(futures::stream::poll_fn(move |cx| match frames.poll_recv(cx) {
            std::task::Poll::Ready(Some(frame)) => std::task::Poll::Ready(Some(Ok(frame.into()))),
            std::task::Poll::Pending => std::task::Poll::Pending,
            // Nothing comes any more: how did it end?
            std::task::Poll::Ready(None) => {
                let Some(task) = carrier.as_mut() else { return std::task::Poll::Ready(None) };
                let ended = std::task::ready!(std::future::Future::poll(std::pin::Pin::new(task), cx));
                carrier = None;
                std::task::Poll::Ready(match ended {
                    Ok(Ok(())) => None,
                    Ok(Err(e)) => Some(Err(fault("carry", libc::ECONNRESET, e.to_string()))),
                    Err(_) => Some(Err(ConnectError::internal("the carrier ended abnormally"))),
                })
            }
        }))
    }
}

async fn connect(port: u16) -> Result<TcpStream, ConnectError> {
    let loopback = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
    let mut failure = match attempt(&loopback.map(|ip| SocketAddr::new(ip, port))).await {
        Ok(stream) => return Ok(stream),
        Err(e) => e,
    };
    let own = listening(port).await;
    if !own.is_empty() {
        match attempt(&own).await {
            Ok(stream) => return Ok(stream),
            Err(e) => failure = e,
        }
    }
    let errno = failure.raw_os_error().unwrap_or(libc::ETIMEDOUT);
    Err(fault("connect", errno, failure.to_string()))
}

/// The first address that answers. What was refused says more than what does not exist here.
async fn attempt(addresses: &[SocketAddr]) -> std::io::Result<TcpStream> {
    let mut failure = std::io::Error::from_raw_os_error(libc::ECONNREFUSED);
    for address in addresses {
        match tokio::time::timeout(CONNECT_MOST, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(e)) if e.kind() == std::io::ErrorKind::ConnectionRefused => failure = e,
            Ok(Err(_)) => {}
            Err(_) => failure = std::io::Error::from_raw_os_error(libc::ETIMEDOUT),
        }
    }
    Err(failure)
}

/// Addresses other than the tried ones on which somebody listens at `port`.
async fn listening(port: u16) -> Vec<SocketAddr> {
    let read = crate::service::blocking(move || {
        let mut found = Vec::new();
        for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
            use std::io::Read as _;
            let mut text = String::new();
            let file = std::fs::File::open(Path::new(table));
            if file.is_ok_and(|file| file.take(TABLE_MAX).read_to_string(&mut text).is_ok()) {
                found.extend(text.lines().filter_map(listener).filter(|a| a.port() == port));
            }
        }
        found.retain(|a| !a.ip().is_unspecified());
        found.truncate(ADDRESSES_MAX);
        Ok(found)
    });
    read.await.unwrap_or_default()
}

/// The address of a line of `/proc/net/tcp` or `tcp6`, if it is one of a listener.
fn listener(line: &str) -> Option<SocketAddr> {
    const LISTEN: &str = "0A";
    let mut words = line.split_ascii_whitespace().skip(1);
    let (local, state) = (words.next()?, words.nth(1)?);
    if state != LISTEN {
        return None;
    }
    let (address, port) = local.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    // Words of 32 bits as the processor has them in memory.
    let word = |at: usize| Some(u32::from_str_radix(address.get(at * 8..at * 8 + 8)?, 16).ok()?.to_ne_bytes());
    let ip = match address.len() {
        8 => IpAddr::V4(word(0)?.into()),
        32 => {
            let mut bytes = [0u8; 16];
            for at in 0..4 {
                bytes[at * 4..at * 4 + 4].copy_from_slice(&word(at)?);
            }
            IpAddr::V6(bytes.into()).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_are_read_from_the_tables_and_nothing_else_is() {
        let line = "   0: 0500A8C0:0BB8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0";
        assert_eq!(listener(line), Some("192.168.0.5:3000".parse().expect("an address")));
        let six = "   1: 00000000000000000000000001000000:1F90 00000000000000000000000000000000:0000 0A 0:0 0 0 0 0 0";
        assert_eq!(listener(six), Some("[::1]:8080".parse().expect("an address")));
        assert_eq!(listener(&line.replace(" 0A ", " 01 ")), None, "a connection");
        for broken in ["", "  sl  local_address rem_address   st", "0: 05:1 0:0 0A", "0: zz00A8C0:0BB8 0:0 0A", "0: é"]
        {
            assert_eq!(listener(broken), None, "{broken}");
        }
    }
}
