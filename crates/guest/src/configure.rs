//! What is put right after a restore, in this order: clock, entropy, names.

use std::io;
use std::path::Path;

use connectrpc::ConnectError;
use mainbrella_guest_protocol::limits::{ENTROPY_MAX, GENERATION_MAX, HOSTNAME_MAX};
use mainbrella_guest_protocol::pb;

/// Adds bytes to the kernel's generator and credits them: `_IOW('R', 0x03, int[2])`.
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
/// Makes the generator use them at once: `_IO('R', 0x07)`.
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;

/// Checks a request before anything is changed.
pub(crate) fn check(request: &pb::ConfigureRequest) -> Result<(), ConnectError> {
    let invalid = |message: &'static str| Err(ConnectError::invalid_argument(message));
    if request.generation.len() > GENERATION_MAX {
        return invalid("generation: too long");
    }
    if request.clock_realtime_ns < 0 {
        return invalid("clock_realtime_ns: before the epoch");
    }
    if request.entropy.len() > ENTROPY_MAX {
        return invalid("entropy: at most 512 bytes");
    }
    let host = &request.hostname;
    if host.len() > HOSTNAME_MAX || !host.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.') {
        return invalid("hostname: at most 64 letters, digits, '-' and '.'");
    }
    let id = &request.machine_id;
    if !id.is_empty() && (id.len() != 32 || !id.bytes().all(|b| b.is_ascii_hexdigit())) {
        return invalid("machine_id: 32 hexadecimal digits");
    }
    Ok(())
}

/// A problem, for the answer.
pub(crate) fn problem(what: &str, error: &io::Error) -> pb::Problem {
    pb::Problem { what: what.to_owned(), why: error.to_string(), ..Default::default() }
}

/// Does what the request asks for and notes how each part went. What the request leaves empty stays as it is.
pub(crate) fn apply(request: &pb::ConfigureRequest, answer: &mut pb::ConfigureResponse) {
    let mut note = |what: &str, result: io::Result<()>| match result {
        Ok(()) => answer.done.push(what.to_owned()),
        Err(error) => answer.problems.push(problem(what, &error)),
    };
    if request.clock_realtime_ns > 0 {
        note("clock", set_clock(request.clock_realtime_ns));
    }
    if !request.entropy.is_empty() {
        note("entropy", add_entropy(&request.entropy));
    }
    if !request.hostname.is_empty() {
        note("hostname", set_hostname(&request.hostname, Path::new("/etc")));
    }
    if !request.machine_id.is_empty() {
        note("machine-id", set_machine_id(&request.machine_id, Path::new("/")));
    }
}

fn set_clock(ns: i64) -> io::Result<()> {
    let time = libc::timespec { tv_sec: ns / 1_000_000_000, tv_nsec: ns % 1_000_000_000 };
    // SAFETY: `time` outlives the call.
    match unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &raw const time) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn add_entropy(entropy: &[u8]) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let random = std::fs::OpenOptions::new().write(true).open("/dev/urandom")?;
    // struct rand_pool_info { int entropy_count; int buf_size; __u32 buf[]; }
    let mut pool = vec![0u32; 2 + entropy.len().div_ceil(4)];
    pool[0] = (entropy.len() * 8) as u32;
    pool[1] = entropy.len() as u32;
    for (word, bytes) in pool[2..].iter_mut().zip(entropy.chunks(4)) {
        let mut four = [0u8; 4];
        four[..bytes.len()].copy_from_slice(bytes);
        *word = u32::from_ne_bytes(four);
    }
    // SAFETY: the pool has the layout the request wants and outlives the call; the second takes no pointer.
    unsafe {
        if libc::ioctl(random.as_raw_fd(), RNDADDENTROPY as _, pool.as_ptr()) != 0
            || libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG as _, 0) != 0
        {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

fn set_hostname(name: &str, etc: &Path) -> io::Result<()> {
    rustix::system::sethostname(name.as_bytes())?;
    write_names(name, etc)
}

/// `/etc/hostname`, and the one line of `/etc/hosts` that is ours.
fn write_names(name: &str, etc: &Path) -> io::Result<()> {
    const OURS: &str = "# mainbrella";
    std::fs::write(etc.join("hostname"), format!("{name}\n"))?;
    let hosts = etc.join("hosts");
    let old = std::fs::read(&hosts).unwrap_or_default();
    let old = String::from_utf8_lossy(&old);
    let mut new: String = old.lines().filter(|line| !line.ends_with(OURS)).map(|line| format!("{line}\n")).collect();
    new.push_str(&format!("127.0.1.1\t{name}\t{OURS}\n"));
    std::fs::write(hosts, new)
}

fn set_machine_id(id: &str, root: &Path) -> io::Result<()> {
    let line = format!("{}\n", id.to_ascii_lowercase());
    std::fs::write(root.join("etc/machine-id"), &line)?;
    let dbus = root.join("var/lib/dbus/machine-id");
    // Often a link to the first; a file of its own must say the same.
    if dbus.symlink_metadata().is_ok_and(|stat| stat.is_file()) {
        std::fs::write(dbus, &line)?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_our_line_of_hosts_is_replaced() {
        let etc = tempfile::tempdir().unwrap();
        std::fs::write(etc.path().join("hosts"), "127.0.0.1 localhost\n10.0.0.1 mine\n").unwrap();
        write_names("first", etc.path()).unwrap();
        write_names("second", etc.path()).unwrap();
        let hosts = std::fs::read_to_string(etc.path().join("hosts")).unwrap();
        assert_eq!(hosts, "127.0.0.1 localhost\n10.0.0.1 mine\n127.0.1.1\tsecond\t# mainbrella\n");
        assert_eq!(std::fs::read_to_string(etc.path().join("hostname")).unwrap(), "second\n");
    }

    #[test]
    fn machine_id_reaches_dbus_only_where_that_has_its_own() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("etc")).unwrap();
        set_machine_id("0123456789ABCDEF0123456789abcdef", root.path()).unwrap();
        let read = |path: &str| std::fs::read_to_string(root.path().join(path)).unwrap();
        assert_eq!(read("etc/machine-id"), "0123456789abcdef0123456789abcdef\n");
        assert!(!root.path().join("var/lib/dbus").exists());
        std::fs::create_dir_all(root.path().join("var/lib/dbus")).unwrap();
        std::fs::write(root.path().join("var/lib/dbus/machine-id"), "old\n").unwrap();
        set_machine_id("ffffffffffffffffffffffffffffffff", root.path()).unwrap();
        assert_eq!(read("var/lib/dbus/machine-id"), "ffffffffffffffffffffffffffffffff\n");
    }

    #[test]
    fn a_request_out_of_bounds_changes_nothing() {
        let good = pb::ConfigureRequest { hostname: "box-1".into(), clock_realtime_ns: 1, ..Default::default() };
        assert!(check(&good).is_ok());
        for bad in [
            pb::ConfigureRequest { hostname: "a b".into(), ..Default::default() },
            pb::ConfigureRequest { hostname: "a\nb".into(), ..Default::default() },
            pb::ConfigureRequest { machine_id: "short".into(), ..Default::default() },
            pb::ConfigureRequest { clock_realtime_ns: -1, ..Default::default() },
            pb::ConfigureRequest { entropy: vec![0; 513], ..Default::default() },
        ] {
            assert!(check(&bad).is_err());
        }
    }
}
