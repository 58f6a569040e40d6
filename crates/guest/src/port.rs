//! Byte streams the agent serves: the virtio-serial port of a machine, or a unix socket for tests.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use mainbrella_guest_protocol::guest_side::{GuestService, serve};
use rustix::event::{PollFd, PollFlags, epoll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Finds the port that carries `name` among those the kernel knows.
pub fn find(name: &str) -> io::Result<Option<PathBuf>> {
    find_in(Path::new("/sys/class/virtio-ports"), name)
}

fn find_in(class: &Path, name: &str) -> io::Result<Option<PathBuf>> {
    let entries = match std::fs::read_dir(class) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    for entry in entries {
        let entry = entry?;
        // A port without a name has no such file.
        let Ok(found) = std::fs::read_to_string(entry.path().join("name")) else { continue };
        if found.trim() == name {
            return Ok(Some(Path::new("/dev").join(entry.file_name())));
        }
    }
    Ok(None)
}

/// Registers a descriptor with the runtime.
pub(crate) fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open as long as it lives, and gives the same descriptor each time.
    unsafe { AsyncFd::register(fd) }.map_err(|error| error.into_parts().1)
}

/// Opens a port.
pub fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    Ok(File::from(rustix::fs::open(path, flags, Mode::empty())?))
}

/// Serves hosts on a port, one after the other, for ever.
///
/// # Errors
/// When the port itself fails; a connection that fails does not end this.
pub async fn serve_port(port: File, service: GuestService) -> io::Result<()> {
    loop {
        let waiting = port.try_clone()?;
        tokio::task::spawn_blocking(move || wait_for_host(&waiting)).await.map_err(io::Error::other)??;
        // A hang-up is final to a registration, so each connection has one of its own.
        let stream = PortStream { port: watch(port.try_clone()?.into())? };
        // An error is how a connection ends when the host goes away; the next one begins with the preamble.
        let _ = serve(stream, service.clone()).await;
    }
}

/// Blocks while no host holds the other end. The kernel wakes an edge-triggered wait when one comes; the time-out is
/// for kernels that do not.
fn wait_for_host(port: &File) -> io::Result<()> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
    epoll::add(&epoll, port, epoll::EventData::new_u64(0), flags)?;
    loop {
        let mut fds = [PollFd::new(port, PollFlags::IN | PollFlags::OUT)];
        match rustix::event::poll(&mut fds, Some(&timespec(Duration::ZERO))) {
            Ok(_) if !fds[0].revents().contains(PollFlags::HUP) => return Ok(()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }];
        match epoll::wait(&epoll, &mut events, Some(&timespec(Duration::from_millis(500)))) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        // The first event is the state at hand, not a change of it.
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn timespec(duration: Duration) -> rustix::event::Timespec {
    rustix::event::Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: duration.subsec_nanos().into() }
}

/// A port as a byte stream. It cannot be closed in one direction; dropping it only ends our use of it.
struct PortStream {
    port: AsyncFd<OwnedFd>,
}

impl AsyncRead for PortStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            let mut guard = ready!(self.port.poll_read_ready(cx))?;
            match rustix::io::read(self.port.get_ref().as_fd(), buf.initialize_unfilled()) {
                Ok(n) => {
                    buf.advance(n);
                    return Poll::Ready(Ok(()));
                }
                Err(Errno::AGAIN) => guard.clear_ready(),
                Err(Errno::INTR) => {}
                Err(errno) => return Poll::Ready(Err(errno.into())),
            }
        }
    }
}

impl AsyncWrite for PortStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = ready!(self.port.poll_write_ready(cx))?;
            match rustix::io::write(self.port.get_ref().as_fd(), data) {
                Ok(n) => return Poll::Ready(Ok(n)),
                Err(Errno::AGAIN) => guard.clear_ready(),
                Err(Errno::INTR) => {}
                Err(errno) => return Poll::Ready(Err(errno.into())),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Serves hosts on a unix socket, any number at once, until the listener fails.
///
/// # Errors
/// When the socket cannot be made or accepts no more.
pub async fn serve_unix(path: &Path, service: GuestService) -> io::Result<()> {
    let listener = tokio::net::UnixListener::bind(path)?;
    let seats = Arc::new(tokio::sync::Semaphore::new(64));
    loop {
        let seat = seats.clone().acquire_owned().await.map_err(io::Error::other)?;
        let (stream, _) = listener.accept().await?;
        let service = service.clone();
        tokio::spawn(async move {
            let _ = serve(stream, service).await;
            drop(seat);
        });
    }
}
