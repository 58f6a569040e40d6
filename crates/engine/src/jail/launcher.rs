//! The launcher: runs in a fresh process with one thread, builds the walls, becomes the VMM.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use nix::unistd::{ForkResult, fork};

use super::spec::{DESCRIPTORS_MAX, GO, JailSpec, MESSAGE_MAX, Said};
use super::walls;
use crate::microvm::process::start_time;

/// A stage that failed.
pub(super) struct StageError {
    pub(super) stage: &'static str,
    pub(super) cause: io::Error,
}

pub(super) trait Stage<T> {
    fn stage(self, stage: &'static str) -> Result<T, StageError>;
}

impl<T, E: Into<io::Error>> Stage<T> for Result<T, E> {
    fn stage(self, stage: &'static str) -> Result<T, StageError> {
        self.map_err(|e| StageError { stage, cause: e.into() })
    }
}

/// The launcher. Must be called first thing in `main`, before any other thread exists, when the first argument is
/// [`super::LAUNCH_ARGUMENT`]. Descriptor 0 is the socket to the service.
pub fn launcher_main() -> ! {
    // SAFETY: descriptor 0 is open and ours: the service passes the socket there, and nothing else in this process uses it.
    let socket = unsafe { OwnedFd::from_raw_fd(0) };
    // Off the standard numbers, and closed by exec: its end of file tells the service that the VMM runs.
    let Ok(socket) = rustix::io::fcntl_dupfd_cloexec(&socket, 200) else { std::process::exit(71) };
    if let Err(e) = run(&socket) {
        say(
            socket.as_fd(),
            &Said::Failed {
                stage: e.stage.to_owned(),
                errno: e.cause.raw_os_error().unwrap_or(0),
                detail: e.cause.to_string(),
            },
        );
        std::process::exit(70);
    }
    std::process::exit(0)
}

fn say(socket: BorrowedFd<'_>, said: &Said) {
    if let Ok(text) = serde_json::to_vec(said) {
        // If the service is gone there is nobody to tell.
        let _ = rustix::net::send(socket, &text, rustix::net::SendFlags::NOSIGNAL);
    }
}

fn run(socket: &OwnedFd) -> Result<(), StageError> {
    let (spec, descriptors) = receive(socket).stage("reading the order")?;
    rustix::process::setsid().map(drop).stage("new session")?;
    for file in &spec.cgroup_join {
        std::fs::write(file, "0").stage("joining the control group")?;
    }
    walls::unshare_outer(&spec)?;
    let (mut spec, mut descriptors) = (spec, descriptors);
    if let Some(number) = spec.tap {
        if !spec.walls.network_namespace {
            return Err(io::Error::other("a tap is only made in a network namespace of its own")).stage("tap");
        }
        descriptors.push(mainbrella_net::tap::open().stage("tap")?);
        spec.descriptors.push(number);
    }
    // SAFETY: this process has one thread, so the child may go on using everything.
    match unsafe { fork() }.stage("fork")? {
        ForkResult::Parent { child } => {
            // Still in the service's process namespace and mount tree: this is the id the service knows it by.
            let start_time = start_time(child.as_raw()).stage("reading its start time")?;
            say(socket.as_fd(), &Said::Started { pid: child.as_raw(), start_time });
            Ok(())
        }
        ForkResult::Child => become_vmm(socket, &spec, descriptors),
    }
}

fn become_vmm(socket: &OwnedFd, spec: &JailSpec, descriptors: Vec<OwnedFd>) -> Result<(), StageError> {
    rustix::process::setsid().map(drop).stage("new session")?;
    walls::build_inner(spec)?;
    // Only now: nothing becomes a VMM that the service has not written down.
    let mut word = [0u8; 8];
    let n = loop {
        match rustix::net::recv(socket, &mut word[..], rustix::net::RecvFlags::empty()) {
            Ok((n, _)) => break n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(StageError { stage: "waiting for the go-ahead", cause: e.into() }),
        }
    };
    if &word[..n] != GO {
        std::process::exit(0);
    }
    place(&spec.descriptors, descriptors).stage("placing descriptors")?;
    Err(walls::exec(spec))
}

fn receive(socket: &OwnedFd) -> io::Result<(JailSpec, Vec<OwnedFd>)> {
    rustix::net::sockopt::set_socket_timeout(
        socket,
        rustix::net::sockopt::Timeout::Recv,
        Some(Duration::from_secs(20)),
    )?;
    let mut buffer = vec![0u8; MESSAGE_MAX];
    let mut control = nix::cmsg_space!([RawFd; DESCRIPTORS_MAX]);
    let mut slices = [IoSliceMut::new(&mut buffer)];
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut slices, Some(&mut control), MsgFlags::MSG_CMSG_CLOEXEC)?;
    let mut descriptors = Vec::new();
    for c in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(fds) = c {
            // SAFETY: the kernel has just made these descriptors for us.
            descriptors.extend(fds.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    let (len, cut) = (message.bytes, message.flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC));
    let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    if cut {
        return Err(bad("the order is too long"));
    }
    let spec: JailSpec = serde_json::from_slice(&buffer[..len]).map_err(|e| bad(&e.to_string()))?;
    if spec.descriptors.len() != descriptors.len() {
        return Err(bad("the order names another number of descriptors than it brings"));
    }
    Ok((spec, descriptors))
}

/// Moves each descriptor to its number; everything else closes at exec.
fn place(numbers: &[i32], descriptors: Vec<OwnedFd>) -> io::Result<()> {
    // First out of the way of each other's targets.
    let aside =
        descriptors.iter().map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 100)).collect::<Result<Vec<OwnedFd>, _>>()?;
    drop(descriptors);
    // Whatever else was inherited stays behind.
    // SAFETY: sets a flag on descriptors; closes none.
    if unsafe { libc::close_range(3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC as libc::c_int) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // Closed again before its number may be given to another.
    let null = std::fs::File::open("/dev/null")?;
    dup_to(null.as_raw_fd(), 0)?;
    drop(null);
    for (fd, number) in aside.iter().zip(numbers) {
        dup_to(fd.as_raw_fd(), *number)?;
    }
    Ok(())
}

fn dup_to(from: RawFd, to: RawFd) -> io::Result<()> {
    // SAFETY: `to` is below 100, where this process keeps nothing it still needs; the result is inherited by exec on purpose.
    if unsafe { libc::dup2(from, to) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
