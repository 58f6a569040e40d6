//! The service's side of a start.

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

use super::LAUNCH_ARGUMENT;
use super::spec::{DESCRIPTORS_MAX, GO, JailSpec, MESSAGE_MAX, Said};
use crate::microvm::process::Process;

/// How long one step of a start may take on a busy host.
const PATIENCE: Duration = Duration::from_secs(20);

/// A process that runs in its jail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Started {
    /// Its process id.
    pub pid: i32,
    /// Its start time (see [`crate::microvm::process::start_time`]).
    pub start_time: u64,
}

/// A start that failed. Nothing runs.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    /// A stage in the launcher.
    #[error("{stage}: {detail}")]
    Stage {
        /// Which.
        stage: String,
        /// `errno`, or 0.
        errno: i32,
        /// What was seen.
        detail: String,
    },
    /// Something before or around the launcher.
    #[error("{0}")]
    Launcher(&'static str, #[source] io::Error),
}

/// Starts `spec` with `descriptors`, by way of `launcher` (the service binary). Blocks for some milliseconds.
///
/// `record` is called when the process exists but has not become the program yet, and must write down what finds
/// it again; if it fails, or this service dies before, the process ends by itself.
///
/// # Errors
/// Any failure, with the stage that failed. Nothing is left running.
pub fn start(
    launcher: &Path,
    spec: &JailSpec,
    descriptors: &[BorrowedFd<'_>],
    record: impl FnOnce(Started) -> io::Result<()>,
) -> Result<Started, JailError> {
    let failed = |what: &'static str| move |e: io::Error| JailError::Launcher(what, e);
    let text = serde_json::to_vec(spec).map_err(|e| JailError::Launcher("the order does not serialise", e.into()))?;
    if text.len() > MESSAGE_MAX || descriptors.len() > DESCRIPTORS_MAX || descriptors.len() != spec.descriptors.len() {
        return Err(JailError::Launcher("the order is too long", io::ErrorKind::InvalidInput.into()));
    }
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(|e| JailError::Launcher("no socket for the launcher", e.into()))?;
    for t in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&ours, t, Some(PATIENCE))
            .map_err(|e| JailError::Launcher("no time-out on the socket", e.into()))?;
    }
    let mut child = Command::new(launcher)
        .arg(LAUNCH_ARGUMENT)
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(failed("the launcher does not start"))?;
    let outcome = converse(&ours, &text, descriptors, record);
    if outcome.is_err() {
        // The launcher ends by itself once it has said why; this is for one that hangs.
        let _ = child.kill();
    }
    drop(ours);
    let _ = child.wait();
    outcome
}

fn converse(
    socket: &OwnedFd,
    order: &[u8],
    descriptors: &[BorrowedFd<'_>],
    record: impl FnOnce(Started) -> io::Result<()>,
) -> Result<Started, JailError> {
    let raw: Vec<_> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let rights = if raw.is_empty() { &rights[..0] } else { &rights[..] };
    sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(order)], rights, MsgFlags::MSG_NOSIGNAL, None)
        .map_err(|e| JailError::Launcher("the launcher does not take the order", e.into()))?;
    let started = match hear(socket)? {
        Some(Said::Started { pid, start_time }) => Started { pid, start_time },
        Some(Said::Failed { stage, errno, detail }) => return Err(JailError::Stage { stage, errno, detail }),
        None => {
            return Err(JailError::Launcher(
                "the launcher ended without a word (is the launcher binary the service itself?)",
                io::ErrorKind::UnexpectedEof.into(),
            ));
        }
    };
    let outcome = (|| {
        record(started).map_err(|e| JailError::Launcher("the process could not be recorded", e))?;
        let sent = send(socket, GO, SendFlags::NOSIGNAL)
            .map_err(|e| JailError::Launcher("the process does not take the go-ahead", e.into()));
        // Its end closes at exec. One that has ended already has said why.
        match hear(socket)? {
            None => sent.map(|_| started),
            Some(Said::Failed { stage, errno, detail }) => Err(JailError::Stage { stage, errno, detail }),
            Some(Said::Started { .. }) => {
                Err(JailError::Launcher("the launcher answered out of turn", io::ErrorKind::InvalidData.into()))
            }
        }
    })();
    if outcome.is_err()
        && let Ok(p) = Process::open(started.pid, started.start_time)
    {
        let _ = p.kill();
    }
    outcome
}

fn hear(socket: &OwnedFd) -> Result<Option<Said>, JailError> {
    let mut buffer = vec![0u8; 4096];
    let mut unread = false;
    loop {
        match recv(socket, &mut buffer[..], RecvFlags::empty()) {
            // What becomes the program reads everything first: this is an end of another kind.
            Ok((0, _)) if unread => {
                return Err(JailError::Launcher(
                    "the launcher ended without a word",
                    io::ErrorKind::ConnectionReset.into(),
                ));
            }
            Ok((0, _)) => return Ok(None),
            Ok((n, _)) => {
                return serde_json::from_slice(&buffer[..n])
                    .map(Some)
                    .map_err(|e| JailError::Launcher("the launcher said something unexpected", e.into()));
            }
            Err(rustix::io::Errno::INTR) => {}
            // Launcher and child gone with our message unread. The kernel tells this before it hands out their last words.
            Err(rustix::io::Errno::CONNRESET) if !unread => unread = true,
            Err(e) => return Err(JailError::Launcher("the launcher does not answer", e.into())),
        }
    }
}
