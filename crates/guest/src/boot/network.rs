//! The machine's network card. Its addresses are the same in every machine, so they are set once, before a template is
//! frozen, and a restore has nothing to do. What it leads to is the host's affair.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::net::{AddressFamily, SocketType, socket};

/// The card.
const NAME: &str = "eth0";
/// The machine's address.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(172, 31, 255, 2);
/// Its network.
const MASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 252);
/// Its route, name server and proxy.
const GATEWAY: Ipv4Addr = Ipv4Addr::new(172, 31, 255, 1);

/// Brings the card up, if there is one.
pub(super) fn prepare() -> io::Result<()> {
    if !Path::new("/sys/class/net").join(NAME).exists() {
        return Ok(());
    }
    // Nothing out there speaks IPv6 with a machine; without addresses nobody waits for it.
    for which in ["all", "default"] {
        let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6"), "1");
    }
    let socket: OwnedFd = socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    let mut request = named(NAME);
    request.ifr_ifru.ifru_addr = address(ADDRESS);
    call(&socket, libc::SIOCSIFADDR, &request)?;
    request.ifr_ifru.ifru_netmask = address(MASK);
    call(&socket, libc::SIOCSIFNETMASK, &request)?;
    up(&socket, NAME)?;
    // SAFETY: an rtentry is plain data, for which zero is a value.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = address(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = address(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = address(GATEWAY);
    route.rt_flags = (libc::RTF_UP | libc::RTF_GATEWAY) as libc::c_ushort;
    call(&socket, libc::SIOCADDRT, &route)?;
    let text = format!("# Written by the machine's network.\nnameserver {GATEWAY}\noptions timeout:3 attempts:2\n");
    std::fs::write("/etc/resolv.conf", text)
}

/// Brings a link up.
pub(super) fn up(socket: &OwnedFd, name: &str) -> io::Result<()> {
    let mut request = named(name);
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    call(socket, libc::SIOCSIFFLAGS, &request)
}

fn named(name: &str) -> libc::ifreq {
    // SAFETY: an ifreq is plain data, for which zero is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request
}

fn address(ip: Ipv4Addr) -> libc::sockaddr {
    let [a, b, c, d] = ip.octets().map(|o| o as libc::c_char);
    // The layout of a sockaddr_in: port, then address.
    let mut sa_data = [0; 14];
    sa_data[2..6].copy_from_slice(&[a, b, c, d]);
    libc::sockaddr { sa_family: libc::AF_INET as libc::sa_family_t, sa_data }
}

fn call<T>(socket: &OwnedFd, request: libc::c_ulong, argument: &T) -> io::Result<()> {
    // SAFETY: each request here takes a pointer to the type it is called with, reads it, and keeps nothing.
    match unsafe { libc::ioctl(socket.as_raw_fd(), request as _, std::ptr::from_ref(argument)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
