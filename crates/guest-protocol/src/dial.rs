//! One TCP connection over one call: bytes both ways, half-closed either way.
//!
//! The window of an HTTP/2 connection is shared by everything on a link, so a reader who takes nothing must not leave
//! bytes in it. Both sides therefore read their stream always, into a buffer whose size they promised the other side
//! as *credit*: what has no credit is not sent, and what comes without is the end of the connection. A connection begins
//! with [`DIAL_WINDOW_FIRST`] bytes each way and gets [`DIAL_WINDOW`] once it carries more, as long as [`DIAL_MEMORY`]
//! lasts.
//!
//! [`DIAL_MEMORY`]: crate::limits::DIAL_MEMORY

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use connectrpc::ConnectError;
use futures::{Stream, StreamExt};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};

use crate::host::{AbortOnDrop, GuestClient};
use crate::limits::{DIAL_CHUNK, DIAL_WINDOW, DIAL_WINDOW_FIRST};
use crate::pb;

/// What is read at once from a connection that carries little, bytes: what an idle one costs.
const SMALL_READ: usize = 4 * 1024;
/// Bytes between a [`PortStream`] and the task that carries them, each way.
const LOCAL_BUFFER: usize = 16 * 1024;
/// Frames on their way out.
const FRAMES_IN_FLIGHT: usize = 4;

/// One message of a call, in either direction.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Frame {
    /// Content.
    pub data: Bytes,
    /// No content follows.
    pub finish: bool,
    /// So many bytes more may be sent to whoever sent this.
    pub credit: u32,
}

impl From<pb::DialRequest> for Frame {
    fn from(m: pb::DialRequest) -> Self {
        Self { data: m.data.into(), finish: m.finish, credit: m.credit }
    }
}

impl From<pb::DialResponse> for Frame {
    fn from(m: pb::DialResponse) -> Self {
        Self { data: m.data.into(), finish: m.finish, credit: m.credit }
    }
}

impl From<Frame> for pb::DialRequest {
    fn from(f: Frame) -> Self {
        Self { data: f.data.into(), finish: f.finish, credit: f.credit, ..Default::default() }
    }
}

impl From<Frame> for pb::DialResponse {
    fn from(f: Frame) -> Self {
        Self { data: f.data.into(), finish: f.finish, credit: f.credit, ..Default::default() }
    }
}

/// The first frame of each side: what the other may send.
#[must_use]
pub fn opening() -> Frame {
    Frame { credit: DIAL_WINDOW_FIRST as u32, ..Frame::default() }
}

/// Which side of a call it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The host, which made the call: it ends when the other side has.
    Caller,
    /// The guest, which ends the call when both directions are done.
    Callee,
}

/// Why a connection ended before both of its directions were done.
#[derive(Debug, thiserror::Error)]
pub enum CarryError {
    /// The call ended, with what was told.
    #[error("the call ended early: {0}")]
    Call(String),
    /// The other side sent what it had no credit for, or more credit than there is.
    #[error("the other side does not keep to its credit")]
    Credit,
    /// The local end broke.
    #[error("the connection broke")]
    Local(#[source] io::Error),
}

#[derive(Default)]
struct Books {
    inbox: VecDeque<Bytes>,
    /// Small pieces that came last, put together: a place in the queue costs as much as some of them.
    tail: BytesMut,
    /// Bytes the other side may still send.
    allowed: usize,
    /// Whether it said that it sends no more.
    finished: bool,
    /// Bytes we may still send.
    credit: usize,
}

impl Books {
    fn keep(&mut self, data: Bytes) {
        if data.len() < SMALL_READ {
            self.tail.extend_from_slice(&data);
        }
        if !self.tail.is_empty() && (data.len() >= SMALL_READ || self.tail.len() >= 4 * SMALL_READ) {
            let tail = self.tail.split().freeze();
            self.inbox.push_back(tail);
        }
        if data.len() >= SMALL_READ {
            self.inbox.push_back(data);
        }
    }
}

#[derive(Default)]
struct Desk {
    books: Mutex<Books>,
    arrived: Notify,
    credited: Notify,
}

impl Desk {
    fn lock(&self) -> MutexGuard<'_, Books> {
        // Nothing panics while holding it.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a frame of the other side.
    fn take(&self, frame: Frame) -> Result<(), CarryError> {
        let mut books = self.lock();
        let credit = books.credit.saturating_add(frame.credit as usize);
        if frame.data.len() > books.allowed || credit > DIAL_WINDOW || (books.finished && !frame.data.is_empty()) {
            return Err(CarryError::Credit);
        }
        books.allowed -= frame.data.len();
        books.credit = credit;
        books.finished |= frame.finish;
        books.keep(frame.data);
        drop(books);
        self.arrived.notify_one();
        self.credited.notify_one();
        Ok(())
    }

    /// Lets the other side send so much more; says whether it still sends anything.
    fn allow(&self, credit: usize) -> bool {
        let mut books = self.lock();
        books.allowed += credit;
        !books.finished
    }

    /// What is to be written next; `None` when all of it was.
    async fn next(&self) -> Option<Bytes> {
        loop {
            {
                let mut books = self.lock();
                if let Some(data) = books.inbox.pop_front() {
                    return Some(data);
                }
                if !books.tail.is_empty() {
                    return Some(books.tail.split().freeze());
                }
                if books.finished {
                    return None;
                }
            }
            self.arrived.notified().await;
        }
    }

    /// How much may be sent, at least one byte.
    async fn credit(&self) -> usize {
        loop {
            let credit = self.lock().credit;
            if credit > 0 {
                return credit;
            }
            self.credited.notified().await;
        }
    }
}

/// Carries bytes between `stream` and a call until both directions are done.
///
/// `first` is the other side's opening frame; ours ([`opening`]) must have been sent. `memory` is what there is for
/// wider windows, in bytes.
///
/// # Errors
/// Why it ended before.
pub async fn carry<S, I>(
    side: Side,
    stream: S,
    first: Frame,
    mut incoming: I,
    outgoing: mpsc::Sender<Frame>,
    memory: &Arc<Semaphore>,
) -> Result<(), CarryError>
where
    S: AsyncRead + AsyncWrite,
    I: Stream<Item = Result<Frame, ConnectError>> + Unpin,
{
    let desk = Desk::default();
    desk.lock().allowed = DIAL_WINDOW_FIRST;
    desk.take(first)?;
    let (reader, writer) = tokio::io::split(stream);
    let listen = async {
        while let Some(frame) = incoming.next().await {
            desk.take(frame.map_err(|e| CarryError::Call(e.to_string()))?)?;
        }
        if desk.lock().finished { Ok(()) } else { Err(CarryError::Call("without a word".to_owned())) }
    };
    let mut listen = std::pin::pin!(listen);
    let mut write = std::pin::pin!(write(&desk, writer, outgoing.clone(), memory));
    let mut read = std::pin::pin!(read(&desk, reader, outgoing.clone()));
    // The two below hold their own; without this one the call's sending half ends with them.
    let mut closed = Some(outgoing);
    let (mut listened, mut written, mut sent) = (false, false, false);
    loop {
        let gone = async {
            // What a caller is still told comes after its own part is taken no more.
            match &closed {
                Some(outgoing) if side == Side::Callee => outgoing.closed().await,
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            done = &mut listen, if !listened => { done?; listened = true; }
            done = &mut write, if !written => { done?; written = true; }
            done = &mut read, if !sent => { done?; sent = true; }
            () = gone => return Err(CarryError::Call("nobody takes what is sent".to_owned())),
        }
        if written && sent {
            closed = None;
            if listened || side == Side::Callee {
                return Ok(());
            }
        } else if listened && written {
            return Err(CarryError::Call("the other side went away".to_owned()));
        }
    }
}

/// What arrived goes to the local end; what it took becomes credit.
async fn write<S: AsyncRead + AsyncWrite>(
    desk: &Desk,
    mut writer: tokio::io::WriteHalf<S>,
    outgoing: mpsc::Sender<Frame>,
    memory: &Arc<Semaphore>,
) -> Result<(), CarryError> {
    let mut wider: Option<OwnedSemaphorePermit> = None;
    let (mut window, mut taken, mut total, mut broken) = (DIAL_WINDOW_FIRST, 0, 0u64, false);
    while let Some(data) = desk.next().await {
        // A local end that takes nothing more may still have something to say: the rest is thrown away.
        broken = broken || writer.write_all(&data).await.is_err();
        taken += data.len();
        total += data.len() as u64;
        let extra = DIAL_WINDOW - DIAL_WINDOW_FIRST;
        let mut grown = 0;
        if wider.is_none() && total >= DIAL_WINDOW_FIRST as u64 {
            wider = Arc::clone(memory).try_acquire_many_owned(extra as u32).ok();
            grown = if wider.is_some() { extra } else { 0 };
            window += grown;
        }
        if taken + grown >= window / 2 || grown > 0 {
            let credit = std::mem::take(&mut taken) + grown;
            // Whoever sends no more needs none, and may be gone.
            if desk.allow(credit) {
                let _ = outgoing.send(Frame { credit: credit as u32, ..Frame::default() }).await;
            }
        }
    }
    if !broken {
        // Whoever is not there to be told has ended by itself.
        let _ = writer.shutdown().await;
    }
    Ok(())
}

/// What the local end says goes out as far as there is credit.
async fn read<S: AsyncRead + AsyncWrite>(
    desk: &Desk,
    mut reader: tokio::io::ReadHalf<S>,
    outgoing: mpsc::Sender<Frame>,
) -> Result<(), CarryError> {
    let gone = |_| CarryError::Call("nobody takes what is sent".to_owned());
    let mut size = SMALL_READ;
    loop {
        let most = desk.credit().await.min(size);
        let mut buffer = BytesMut::with_capacity(most);
        let got = (&mut reader).take(most as u64).read_buf(&mut buffer).await.map_err(CarryError::Local)?;
        if got == 0 {
            return outgoing.send(Frame { finish: true, ..Frame::default() }).await.map_err(gone);
        }
        size = if got == size { (size * 4).min(DIAL_CHUNK) } else { SMALL_READ.max(got.next_power_of_two()) };
        desk.lock().credit -= got;
        outgoing.send(Frame { data: buffer.freeze(), ..Frame::default() }).await.map_err(gone)?;
    }
}

/// A connection to a port of a machine. Dropping it ends it.
pub struct PortStream {
    local: DuplexStream,
    orderly: Arc<AtomicBool>,
    _carrier: AbortOnDrop,
}

impl std::fmt::Debug for PortStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PortStream").finish_non_exhaustive()
    }
}

impl GuestClient {
    /// Connects to a TCP port of the machine.
    ///
    /// # Errors
    /// What the guest says, as a fault at the stage `connect` (`ECONNREFUSED`: nothing listens) or `dial`; or that the
    /// link failed.
    pub async fn dial(&self, port: u16) -> Result<PortStream, ConnectError> {
        let (mut sending, mut receiving) = self.streams().dial().await?.into_split();
        let start = pb::DialStart { port: port.into(), ..Default::default() };
        // When it cannot be sent any more, the reason comes as the answer.
        let _ = sending.send(pb::DialRequest { start: start.into(), ..opening().into() }).await;
        let first = receiving.message().await?;
        let first = first.ok_or_else(|| ConnectError::internal("the guest ended a dial without an answer"))?;
        let first = Frame::from(first.to_owned_message());
        let (local, remote) = tokio::io::duplex(LOCAL_BUFFER);
        let orderly = Arc::new(AtomicBool::new(false));
        let remote = Remote { stream: remote, orderly: Arc::clone(&orderly) };
        let (outgoing, mut frames) = mpsc::channel::<Frame>(FRAMES_IN_FLIGHT);
        // The link lives as long as what is carried over it.
        let client = self.clone();
        let carrier = tokio::spawn(async move {
            let incoming = futures::stream::unfold(receiving, |mut receiving| async move {
                let message = receiving.message().await.transpose()?;
                Some((message.map(|m| Frame::from(m.to_owned_message())), receiving))
            });
            let forward = async {
                while let Some(frame) = frames.recv().await {
                    // Why nothing is taken any more is told on the other half.
                    let _ = sending.send(frame.into()).await;
                }
                sending.close_send();
                std::future::pending::<()>().await;
            };
            let incoming = std::pin::pin!(incoming);
            tokio::select! {
                ended = carry(Side::Caller, remote, first, incoming, outgoing, client.dial_memory()) => {
                    if let Err(e) = ended {
                        tracing::debug!(error = %e, "a connection to a port ended early");
                    }
                }
                () = forward => {}
            }
        });
        Ok(PortStream { local, orderly, _carrier: AbortOnDrop(carrier.abort_handle()) })
    }
}

/// The carrier's end. What it says last is the end of the other side only when it says so by shutting down.
struct Remote {
    stream: DuplexStream,
    orderly: Arc<AtomicBool>,
}

impl AsyncRead for Remote {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Remote {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.orderly.store(true, Ordering::Release);
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl AsyncRead for PortStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.local).poll_read(cx, buf))?;
        if buf.filled().len() == before && buf.remaining() > 0 && !self.orderly.load(Ordering::Acquire) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for PortStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.local).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.local).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.local).poll_shutdown(cx)
    }
}
