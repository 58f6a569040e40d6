//! Doing things inside a network namespace. It is a property of a thread, so each piece of work gets a thread of its own
//! that ends with it: a worker of the runtime would carry the namespace into other people's work.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::error::{NetError, io_error};

/// A network namespace, held open.
#[derive(Clone, Debug)]
pub struct Namespace(Arc<OwnedFd>);

impl Namespace {
    /// The namespace of a process. The caller makes sure that it is still the process it means.
    ///
    /// # Errors
    /// When the process is gone or may not be looked at.
    pub fn of_process(pid: i32) -> io::Result<Self> {
        File::open(format!("/proc/{pid}/ns/net")).map(|f| Self(Arc::new(f.into())))
    }

    /// The namespace bound at `path`.
    ///
    /// # Errors
    /// When there is none.
    pub fn at(path: &Path) -> io::Result<Self> {
        File::open(path).map(|f| Self(Arc::new(f.into())))
    }

    /// A new, empty one. It lasts as long as somebody holds it.
    ///
    /// # Errors
    /// When the host does not allow it.
    pub fn new() -> Result<Self, NetError> {
        aside(|| {
            // SAFETY: this thread was made for this and shares no state that a network namespace governs.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }?;
            File::open("/proc/thread-self/ns/net").map(|f| Self(Arc::new(f.into())))
        })
        .and_then(|made| made.map_err(io_error("making a network namespace")))
    }

    /// Runs `work` inside, on a thread of its own, and waits for it.
    ///
    /// # Errors
    /// When the namespace cannot be entered; otherwise what `work` returns.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> Result<T, NetError> + Send) -> Result<T, NetError> {
        aside(|| {
            self.enter()?;
            work()
        })?
    }

    /// As [`Namespace::run`], for work that awaits; it gets a small runtime of its own.
    ///
    /// # Errors
    /// As [`Namespace::run`].
    pub fn run_async<T: Send, F: Future<Output = Result<T, NetError>>>(
        &self,
        work: impl FnOnce() -> F + Send,
    ) -> Result<T, NetError> {
        aside(|| {
            // Before entering: a runtime may make sockets that the whole process keeps, and they would keep the namespace.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
            let runtime = runtime.map_err(io_error("starting a runtime"))?;
            self.enter()?;
            runtime.block_on(work())
        })?
    }

    /// Moves the calling thread inside, for good.
    fn enter(&self) -> Result<(), NetError> {
        move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network))
            .map_err(|e| NetError::Io("entering a network namespace", e.into()))
    }

    /// The open namespace itself.
    #[must_use]
    pub fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn aside<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, NetError> {
    std::thread::scope(|s| {
        std::thread::Builder::new()
            .name("net".to_owned())
            .spawn_scoped(s, work)
            .map_err(io_error("starting a thread"))?
            .join()
            .map_err(|_| NetError::Io("a thread in a network namespace", io::ErrorKind::Other.into()))
    })
}
