//! A stream with some bytes of it already read.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Gives the bytes that were read too far first, then those of the stream.
#[derive(Debug)]
pub struct Prefixed<S> {
    prefix: Vec<u8>,
    taken: usize,
    stream: S,
}

impl<S> Prefixed<S> {
    /// `prefix` comes before what `stream` gives.
    pub fn new(prefix: Vec<u8>, stream: S) -> Self {
        Self { prefix, taken: 0, stream }
    }

    /// The stream; what is left of the prefix is lost.
    pub fn into_inner(self) -> S {
        self.stream
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Prefixed<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.taken < this.prefix.len() {
            let n = buf.remaining().min(this.prefix.len() - this.taken);
            buf.put_slice(&this.prefix[this.taken..this.taken + n]);
            this.taken += n;
            if this.taken == this.prefix.len() {
                this.prefix = Vec::new();
                this.taken = 0;
            }
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut this.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Prefixed<S> {
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
