//! Input on its way to a process, bounded: a process that does not read makes its writer wait.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use mainbrella_guest_protocol::limits::STDIN_PENDING_MAX;
use tokio::sync::Notify;

/// Why input was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StdinError {
    /// The job never had an open input, its end was already written, or the process closed it.
    Closed,
    /// More at once than may ever be pending.
    TooLarge,
    /// It would not fit beside what is pending, and nobody wants to wait.
    Full,
}

/// How much came in, and what became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Standing {
    /// Bytes accepted in all.
    pub(crate) accepted: u64,
    /// Of them, bytes the process has not read.
    pub(crate) pending: u64,
    /// Whether more would be taken.
    pub(crate) open: bool,
}

#[derive(Debug, Default)]
struct State {
    pending: VecDeque<u8>,
    accepted: u64,
    ended: bool,
    closed: bool,
}

impl State {
    fn standing(&self) -> Standing {
        let open = !self.ended && !self.closed;
        Standing { accepted: self.accepted, pending: self.pending.len() as u64, open }
    }
}

/// The queue between `WriteJobStdin` and the process.
#[derive(Debug, Default)]
pub(crate) struct Stdin {
    state: Mutex<State>,
    changed: Notify,
}

/// What the writer is to do next.
#[derive(Debug)]
pub(crate) enum Next {
    Write(Vec<u8>),
    End,
}

impl Stdin {
    /// A queue that begins with `first`; closed to more unless `open`.
    pub(crate) fn new(first: &[u8], open: bool) -> Self {
        let pending = first.iter().copied().collect();
        Self {
            state: Mutex::new(State { pending, accepted: first.len() as u64, ended: !open, closed: false }),
            changed: Notify::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How much came in, and what became of it.
    pub(crate) fn standing(&self) -> Standing {
        self.lock().standing()
    }

    /// Takes `data`, waiting until there is room if `wait`; says how input then stands.
    pub(crate) async fn write(&self, data: &[u8], end: bool, wait: bool) -> Result<Standing, StdinError> {
        if data.len() > STDIN_PENDING_MAX {
            return Err(StdinError::TooLarge);
        }
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            {
                let mut state = self.lock();
                if state.closed || state.ended {
                    return Err(StdinError::Closed);
                }
                if state.pending.is_empty() || state.pending.len() + data.len() <= STDIN_PENDING_MAX {
                    state.pending.extend(data);
                    state.accepted += data.len() as u64;
                    state.ended = end;
                    let standing = state.standing();
                    drop(state);
                    self.changed.notify_waiters();
                    return Ok(standing);
                }
                if !wait {
                    return Err(StdinError::Full);
                }
            }
            changed.await;
        }
    }

    /// The next bytes for the process, at most 64 KiB; they stay pending until [`Stdin::wrote`].
    pub(crate) async fn next(&self) -> Next {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            {
                let state = self.lock();
                if !state.pending.is_empty() {
                    return Next::Write(state.pending.iter().take(64 * 1024).copied().collect());
                }
                if state.ended || state.closed {
                    return Next::End;
                }
            }
            changed.await;
        }
    }

    /// The process has taken `n` bytes.
    pub(crate) fn wrote(&self, n: usize) {
        self.lock().pending.drain(..n);
        self.changed.notify_waiters();
    }

    /// Nothing more will be read: the process closed its input or ended.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.pending = VecDeque::new();
        drop(state);
        self.changed.notify_waiters();
    }
}
