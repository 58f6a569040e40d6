//! Counts what flow control does not: HTTP/2 frames that carry next to nothing.
//!
//! Windows bound the bytes a peer can make us hold, but an empty DATA frame costs no window and still takes a
//! place in a queue, and every PING or SETTINGS asks for an answer. This reader follows the frame boundaries of
//! what comes in and ends the stream when small frames outnumber content by far.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::limits::SMALL_FRAMES_MAX;

/// A frame of at least this many payload bytes pays for itself.
const SMALL: u32 = 32;
/// Content that earns the right to one more small frame, bytes.
const BYTES_A_CREDIT: u32 = 64;
const HEAD: usize = 9;
const DATA: u8 = 0;
const WINDOW_UPDATE: u8 = 8;

/// A stream whose incoming frames are counted.
#[derive(Debug)]
pub struct FrameGuard<S> {
    stream: S,
    head: [u8; HEAD],
    held: usize,
    payload_left: u32,
    /// Small frames that may still come.
    credit: u32,
    /// Content that earned no credit yet, bytes.
    earned: u32,
}

impl<S> FrameGuard<S> {
    /// Guards `stream`, which begins with a frame.
    pub fn new(stream: S) -> Self {
        Self { stream, head: [0; HEAD], held: 0, payload_left: 0, credit: SMALL_FRAMES_MAX, earned: 0 }
    }

    fn count(&mut self, mut input: &[u8]) -> io::Result<()> {
        while !input.is_empty() {
            if self.payload_left > 0 {
                let n = input.len().min(self.payload_left as usize);
                self.payload_left -= n as u32;
                input = &input[n..];
                continue;
            }
            let n = input.len().min(HEAD - self.held);
            self.head[self.held..self.held + n].copy_from_slice(&input[..n]);
            self.held += n;
            input = &input[n..];
            if self.held == HEAD {
                self.held = 0;
                self.frame()?;
            }
        }
        Ok(())
    }

    fn frame(&mut self) -> io::Result<()> {
        let length = u32::from_be_bytes([0, self.head[0], self.head[1], self.head[2]]);
        let (kind, flags) = (self.head[3], self.head[4]);
        self.payload_left = length;
        // A DATA frame that ends its stream, and updates of windows we use, are no burden.
        if kind == WINDOW_UPDATE || (kind == DATA && flags & 1 != 0) {
            return Ok(());
        }
        if length < SMALL || kind != DATA {
            self.credit = self.credit.checked_sub(1).ok_or_else(|| {
                io::Error::new(io::ErrorKind::InvalidData, "the guest floods the link with empty frames")
            })?;
        }
        if kind == DATA {
            self.earned += length;
            self.credit = (self.credit + self.earned / BYTES_A_CREDIT).min(SMALL_FRAMES_MAX);
            self.earned %= BYTES_A_CREDIT;
        }
        Ok(())
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for FrameGuard<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        std::task::ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        self.count(&buf.filled()[before..])?;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for FrameGuard<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
