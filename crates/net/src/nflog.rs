//! Packets that the rules of a seat deny and say so about, as the kernel hands them over: read in the namespace that
//! denies them. What is inside is a guest's packet; of it only addresses and ports are looked at.

use std::io;
use std::net::Ipv4Addr;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::unix::AsyncFd;

use crate::error::{NetError, io_error};
use crate::namespace::Namespace;
use crate::rules::{LOG_GROUP, LOG_INWARD, LOG_NOWHERE};

/// Bytes of each packet that are copied: the longest header of IPv4 and the ports.
const COPIED: u32 = 64;
/// Most bytes of messages taken from the kernel at once.
const BUFFER: usize = 16 * 1024;

const NETLINK_NETFILTER: i32 = 12;
const PACKET: u16 = 4 << 8;
const CONFIG: u16 = PACKET | 1;
const REQUEST: u16 = 1;
const HEADER: usize = 16;
const FAMILY: usize = 4;
const ATTRIBUTE_PAYLOAD: u16 = 9;
const ATTRIBUTE_PREFIX: u16 = 10;

/// Which rule let go of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// It was for an address no machine may reach.
    Inward,
    /// There was no way for it: no link out, and no gateway for its protocol.
    Nowhere,
}

/// A packet that went nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// Why.
    pub which: Which,
    /// Where it was going.
    pub address: Ipv4Addr,
    /// Its protocol's number.
    pub protocol: u8,
    /// The port, for protocols that have them; else 0.
    pub port: u16,
}

/// The stream of them in one seat.
pub(crate) struct Reader {
    socket: AsyncFd<Socket>,
    buffer: Vec<u8>,
}

impl Reader {
    /// Begins to listen in `seat`. One listener a seat.
    pub(crate) fn open(seat: &Namespace) -> Result<Self, NetError> {
        let socket = seat.run(|| {
            let made = || {
                let kind = Type::RAW.nonblocking().cloexec();
                let socket =
                    Socket::new(Domain::from(libc::AF_NETLINK), kind, Some(Protocol::from(NETLINK_NETFILTER)))?;
                // A flood must not fill more than this; what does not fit is lost, and counted nowhere.
                socket.set_recv_buffer_size(64 * 1024)?;
                socket.send(&bind())?;
                Ok::<_, io::Error>(socket)
            };
            made().map_err(io_error("listening for denied packets"))
        })?;
        // SAFETY: the socket is owned by what it is registered with, and keeps its descriptor until it is dropped.
        let socket = unsafe { AsyncFd::register(socket) };
        let socket = socket.map_err(|e| NetError::Io("listening for denied packets", e.into()))?;
        Ok(Self { socket, buffer: vec![0; BUFFER] })
    }

    /// The next packets, in order.
    ///
    /// # Errors
    /// When the socket cannot be read any more.
    pub(crate) async fn next(&mut self) -> io::Result<Vec<Dropped>> {
        loop {
            let mut ready = self.socket.readable().await?;
            let read = ready.try_io(|socket| {
                use std::io::Read as _;
                let mut socket: &Socket = socket.get_ref();
                socket.read(&mut self.buffer)
            });
            match read {
                Ok(Ok(n)) => return Ok(packets(self.buffer.get(..n).unwrap_or_default())),
                // Some were lost because we were slow: the next ones are there.
                Ok(Err(e)) if e.raw_os_error() == Some(libc::ENOBUFS) => {}
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(e)) => return Err(e),
                Err(_) => {}
            }
        }
    }
}

/// The request to get the packets of our group, cut to what is looked at.
fn bind() -> Vec<u8> {
    let mut mode = COPIED.to_be_bytes().to_vec();
    // Copy packets; then padding of the structure.
    mode.extend([2, 0]);
    // Command 1: bind to the group. The threshold: tell of each packet at once.
    let attributes = [(1u16, vec![1u8]), (2, mode), (5, 1u32.to_be_bytes().to_vec())];
    let mut body = vec![libc::AF_UNSPEC as u8, 0];
    body.extend(LOG_GROUP.to_be_bytes());
    for (kind, value) in attributes {
        let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
        body.extend(length.to_ne_bytes());
        body.extend(kind.to_ne_bytes());
        body.extend(value);
        body.resize(body.len().next_multiple_of(4), 0);
    }
    let mut message = u32::try_from(HEADER + body.len()).unwrap_or(u32::MAX).to_ne_bytes().to_vec();
    message.extend(CONFIG.to_ne_bytes());
    message.extend(REQUEST.to_ne_bytes());
    message.extend([0; 8]);
    message.extend(body);
    message
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

/// The packets in what the kernel wrote. What is damaged or not of ours is left out.
fn packets(mut bytes: &[u8]) -> Vec<Dropped> {
    let mut found = Vec::new();
    while let Some(length) = bytes.get(..4).and_then(|b| b.try_into().ok()).map(u32::from_ne_bytes) {
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let Some(message) = bytes.get(..length).filter(|m| m.len() >= HEADER) else { break };
        if u16_at(message, 4) == Some(PACKET) {
            found.extend(packet(message.get(HEADER + FAMILY..).unwrap_or_default()));
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

/// One packet, from the attributes of its message.
fn packet(mut bytes: &[u8]) -> Option<Dropped> {
    let (mut which, mut payload) = (None, None);
    while let Some(length) = u16_at(bytes, 0).map(usize::from).filter(|l| *l >= 4) {
        let Some(attribute) = bytes.get(..length) else { break };
        let value = attribute.get(4..).unwrap_or_default();
        match u16_at(attribute, 2) {
            Some(ATTRIBUTE_PREFIX) => {
                let text = value.split(|b| *b == 0).next().unwrap_or_default();
                which = [(LOG_INWARD, Which::Inward), (LOG_NOWHERE, Which::Nowhere)]
                    .into_iter()
                    .find_map(|(name, which)| (text == name.as_bytes()).then_some(which));
            }
            Some(ATTRIBUTE_PAYLOAD) => payload = Some(value),
            _ => {}
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    destination(which?, payload?)
}

/// Where an IPv4 packet is going.
fn destination(which: Which, packet: &[u8]) -> Option<Dropped> {
    let first = *packet.first()?;
    if first >> 4 != 4 {
        return None;
    }
    let address: [u8; 4] = packet.get(16..20)?.try_into().ok()?;
    let protocol = *packet.get(9)?;
    let fragment = u16::from_be_bytes([*packet.get(6)?, *packet.get(7)?]) & 0x1fff;
    let header = usize::from(first & 0x0f) * 4;
    let has_ports =
        matches!(i32::from(protocol), libc::IPPROTO_TCP | libc::IPPROTO_UDP) && fragment == 0 && header >= 20;
    let port = match (has_ports, packet.get(header + 2), packet.get(header + 3)) {
        (true, Some(high), Some(low)) => u16::from_be_bytes([*high, *low]),
        _ => 0,
    };
    Some(Dropped { which, address: address.into(), protocol, port })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = u16::try_from(4 + value.len()).expect("short").to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn message(kind: u16, attributes: &[Vec<u8>]) -> Vec<u8> {
        let body: Vec<u8> = [vec![0u8; FAMILY], attributes.concat()].concat();
        let mut bytes = u32::try_from(HEADER + body.len()).expect("short").to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend([0u8; 10]);
        bytes.extend(body);
        bytes
    }

    fn udp(to: [u8; 4], port: u16) -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 172, 31, 255, 2];
        packet.extend(to);
        packet.extend(4000u16.to_be_bytes());
        packet.extend(port.to_be_bytes());
        packet.extend([0, 8, 0, 0]);
        packet
    }

    #[test]
    fn a_packet_says_where_it_was_going() {
        let inward = format!("{LOG_INWARD}\0");
        let one = message(
            PACKET,
            &[attribute(ATTRIBUTE_PREFIX, inward.as_bytes()), attribute(ATTRIBUTE_PAYLOAD, &udp([10, 0, 0, 1], 53))],
        );
        let other = message(CONFIG, &[]);
        let two = message(
            PACKET,
            &[
                attribute(ATTRIBUTE_PREFIX, LOG_NOWHERE.as_bytes()),
                attribute(ATTRIBUTE_PAYLOAD, &udp([8, 8, 8, 8], 443)),
            ],
        );
        let found = packets(&[one.clone(), other, two].concat());
        let at = |which, address: [u8; 4], port| Dropped { which, address: address.into(), protocol: 17, port };
        assert_eq!(found, [at(Which::Inward, [10, 0, 0, 1], 53), at(Which::Nowhere, [8, 8, 8, 8], 443)]);
        for cut in 0..one.len() {
            assert!(packets(&one[..cut]).is_empty(), "{cut}");
        }
    }

    #[test]
    fn a_later_fragment_has_no_port_and_other_versions_are_not_read() {
        let mut packet = udp([10, 0, 0, 1], 53);
        packet[7] = 9;
        assert_eq!(destination(Which::Inward, &packet).map(|d| d.port), Some(0));
        packet[0] = 0x65;
        assert_eq!(destination(Which::Inward, &packet), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_packets_or_not(bytes in proptest::collection::vec(any::<u8>(), 0..200), rest in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = packets(&bytes);
            let _ = packet(&bytes);
            let _ = destination(Which::Nowhere, &rest);
            let _ = packets(&message(PACKET, &[bytes, rest]));
        }
    }
}
