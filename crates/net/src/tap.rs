//! The machine's end of its link: a tap in the namespace of the caller.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// Name of every machine's tap, in its own namespace.
pub const NAME: &str = "tap0";
/// Hardware address of every machine's network card. The same in each: a restored machine finds it as it was.
pub const GUEST_MAC: [u8; 6] = [0x02, 0x4d, 0x42, 0x00, 0x00, 0x02];
/// Hardware address of every machine's gateway, for the same reason.
pub const GATEWAY_MAC: [u8; 6] = [0x02, 0x4d, 0x42, 0x00, 0x00, 0x01];

nix::ioctl_write_int!(
    /// `TUNSETIFF`.
    set_interface, b'T', 202);

/// Makes the tap. It is there as long as the descriptor (or a copy) is open, and down until a seat is attached.
///
/// # Errors
/// When the host has no tap driver or the caller may not use it here.
pub fn open() -> io::Result<OwnedFd> {
    let file = File::options().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: zero is a valid value of every field.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(NAME.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    // SAFETY: the kernel reads one ifreq at this address during the call.
    unsafe { set_interface(file.as_raw_fd(), (&raw const request) as u64) }?;
    Ok(file.into())
}
