//! Counts what flow control does not: HTTP/2 frames that carry next to nothing.
//!
//! Windows bound the bytes a peer can make us hold, not the frames: an empty DATA frame costs no window, one of a
//! byte costs a byte, and each takes a place of some hundred bytes in a queue as long as nobody reads that stream.
//! Headers of informational answers queue in the same way. This reader follows the frame boundaries in both
//! directions and ends the connection when the guest sends
//!
//! - more than [`EMPTY_FRAMES_MAX`] empty DATA frames that end nothing,
//! - more than [`SMALL_FRAMES_MAX`] small DATA frames that we have not read: what was read is known from the
//!   WINDOW_UPDATE frames we send for the connection,
//! - more header blocks than our requests account for, by [`HEADERS_SLACK`].

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::limits::{CONNECTION_WINDOW, EMPTY_FRAMES_MAX, HEADERS_SLACK, SMALL_FRAMES_MAX};

/// A DATA frame of at least this many bytes pays for itself.
const SMALL: u32 = 256;
/// Small frames are counted together by where in the content they stand, in steps of this many bytes.
const STEP: u64 = 64 * 1024;
/// Steps between the first byte we may not have read and the last that may have been sent.
const STEPS: usize = 2 * CONNECTION_WINDOW as usize / STEP as usize;
const HEAD: usize = 9;
const PREFACE: u32 = 24;
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;

/// What begins a frame.
#[derive(Debug, Clone, Copy)]
struct Head {
    length: u32,
    kind: u8,
    flags: u8,
    stream: u32,
}

/// Follows frames through bytes that come in any pieces.
#[derive(Debug)]
struct Walk {
    held: [u8; HEAD + 4],
    have: usize,
    left: u32,
}

impl Walk {
    /// Begins with `skip` bytes that belong to no frame.
    fn new(skip: u32) -> Self {
        Self { held: [0; HEAD + 4], have: 0, left: skip }
    }

    /// Gives each frame's head to `each` as soon as it is whole; with it the first four bytes of a WINDOW_UPDATE.
    fn follow(&mut self, mut input: &[u8], mut each: impl FnMut(Head, u32) -> io::Result<()>) -> io::Result<()> {
        while !input.is_empty() {
            if self.left > 0 {
                let n = input.len().min(self.left as usize);
                self.left -= n as u32;
                input = &input[n..];
                continue;
            }
            let need = if self.have >= HEAD { HEAD + 4 } else { HEAD };
            let n = input.len().min(need - self.have);
            self.held[self.have..self.have + n].copy_from_slice(&input[..n]);
            self.have += n;
            input = &input[n..];
            if self.have < need {
                continue;
            }
            let word = |at: usize| {
                u32::from_be_bytes([self.held[at], self.held[at + 1], self.held[at + 2], self.held[at + 3]])
            };
            let head =
                Head { length: word(0) >> 8, kind: self.held[3], flags: self.held[4], stream: word(5) & 0x7fff_ffff };
            let update = head.kind == WINDOW_UPDATE && head.length == 4;
            if update && need == HEAD {
                continue;
            }
            let value = if update { word(HEAD) & 0x7fff_ffff } else { 0 };
            self.have = 0;
            self.left = if update { 0 } else { head.length };
            each(head, value)?;
        }
        Ok(())
    }
}

/// A host's stream to a guest, with the guest's frames counted.
#[derive(Debug)]
pub struct FrameGuard<S> {
    stream: S,
    incoming: Walk,
    outgoing: Walk,
    counts: Counts,
}

#[derive(Debug)]
struct Counts {
    empty: u32,
    /// Header blocks that may still come.
    headers: u32,
    /// Content received and content read, bytes.
    received: u64,
    consumed: u64,
    /// Small frames by the step they stand in, and how many they are in all.
    steps: Box<[u32]>,
    small: u32,
}

impl<S> FrameGuard<S> {
    /// Guards `stream`, on which a client is about to begin HTTP/2.
    pub fn new(stream: S) -> Self {
        let counts = Counts {
            empty: 0,
            headers: HEADERS_SLACK,
            received: 0,
            consumed: 0,
            steps: vec![0; STEPS].into_boxed_slice(),
            small: 0,
        };
        Self { stream, incoming: Walk::new(0), outgoing: Walk::new(PREFACE), counts }
    }
}

fn flood(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl Counts {
    fn incoming(&mut self, head: Head) -> io::Result<()> {
        match head.kind {
            DATA if head.length == 0 && head.flags & END_STREAM == 0 => {
                self.empty += 1;
                if self.empty > EMPTY_FRAMES_MAX {
                    return Err(flood("the guest floods the link with empty frames"));
                }
            }
            DATA => {
                self.received += u64::from(head.length);
                if head.length < SMALL {
                    self.steps[(self.received / STEP) as usize % STEPS] += 1;
                    self.small += 1;
                    if self.small > SMALL_FRAMES_MAX {
                        return Err(flood("the guest floods the link with small frames"));
                    }
                }
            }
            HEADERS => {
                self.headers =
                    self.headers.checked_sub(1).ok_or_else(|| flood("the guest floods the link with headers"))?;
            }
            _ => {}
        }
        Ok(())
    }

    fn outgoing(&mut self, head: Head, value: u32) {
        match head.kind {
            // An answer has a header block, and one of trailers.
            HEADERS => self.headers = self.headers.saturating_add(2).min(HEADERS_SLACK * 64),
            // The first of these only opens the window wider than the protocol's own.
            WINDOW_UPDATE if head.stream == 0 => {
                let before = self.consumed / STEP;
                self.consumed = (self.consumed + u64::from(value)).min(self.received);
                for step in before..self.consumed / STEP {
                    self.small -= std::mem::take(&mut self.steps[step as usize % STEPS]);
                }
            }
            _ => {}
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for FrameGuard<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let this = &mut *self;
        std::task::ready!(Pin::new(&mut this.stream).poll_read(cx, buf))?;
        let counts = &mut this.counts;
        Poll::Ready(this.incoming.follow(&buf.filled()[before..], |head, _| counts.incoming(head)))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for FrameGuard<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        let written = std::task::ready!(Pin::new(&mut this.stream).poll_write(cx, data))?;
        let counts = &mut this.counts;
        this.outgoing.follow(&data[..written], |head, value| {
            counts.outgoing(head, value);
            Ok(())
        })?;
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
