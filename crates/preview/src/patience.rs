//! A caller who takes nothing of what is sent, or begins with nothing, loses its connection.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// How long a caller may take nothing.
pub(crate) const STALL_MOST: Duration = Duration::from_secs(60);

/// How long a caller may take to show which version of HTTP it speaks.
pub(crate) const BEGIN_MOST: Duration = Duration::from_secs(30);
/// What HTTP/2 begins with: until something differs from it, nobody else measures the time.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A stream whose writes fail after [`STALL_MOST`] without progress, and whose first read after [`BEGIN_MOST`].
pub(crate) struct Patient<S> {
    stream: S,
    timer: Pin<Box<Sleep>>,
    waiting: bool,
    /// Bytes of the preface that were read; `None`: it is known what is spoken.
    preface: Option<usize>,
    begin: Pin<Box<Sleep>>,
}

impl<S> Patient<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self {
            stream,
            timer: Box::pin(tokio::time::sleep(STALL_MOST)),
            waiting: false,
            preface: Some(0),
            begin: Box::pin(tokio::time::sleep(BEGIN_MOST)),
        }
    }

    fn begun(&mut self, data: &[u8]) {
        let Some(seen) = self.preface else { return };
        let same = data.iter().zip(&PREFACE[seen..]).take_while(|(a, b)| a == b).count();
        let more = same == data.len() && seen + same < PREFACE.len() && !data.is_empty();
        self.preface = more.then_some(seen + same);
    }

    fn judge<T>(&mut self, cx: &mut Context<'_>, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.waiting = false;
            return polled;
        }
        if !self.waiting {
            self.waiting = true;
            self.timer.as_mut().reset(Instant::now() + STALL_MOST);
        }
        match self.timer.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        if self.preface.is_some() {
            if polled.is_ready() {
                self.begun(&buf.filled()[before..]);
            } else if self.begin.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, data);
        self.judge(cx, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, data);
        self.judge(cx, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(cx);
        self.judge(cx, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.judge(cx, polled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    #[tokio::test(start_paused = true)]
    async fn silence_of_a_reader_ends_a_write_and_a_slow_one_does_not() {
        let (ours, mut theirs) = tokio::io::duplex(10);
        let mut patient = Patient::new(ours);
        let slow = tokio::spawn(async move {
            let mut buffer = [0; 10];
            for _ in 0..5 {
                tokio::time::sleep(STALL_MOST / 2).await;
                theirs.read_exact(&mut buffer).await.expect("sent");
            }
            theirs
        });
        patient.write_all(&[0; 60]).await.expect("a slow reader is waited for");
        let _theirs = slow.await.expect("read");
        let before = Instant::now();
        let error = patient.write_all(&[0; 20]).await.expect_err("nobody reads");
        assert_eq!((error.kind(), before.elapsed().as_secs()), (io::ErrorKind::TimedOut, STALL_MOST.as_secs()));
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_does_not_begin_is_not_waited_for() {
        for begin in [&b""[..], b"PRI", &PREFACE[..23]] {
            let (ours, mut theirs) = tokio::io::duplex(100);
            let mut patient = Patient::new(ours);
            theirs.write_all(begin).await.expect("sent");
            let before = Instant::now();
            let error = patient.read_to_end(&mut Vec::new()).await.expect_err("nothing more comes");
            assert_eq!((error.kind(), before.elapsed().as_secs()), (io::ErrorKind::TimedOut, BEGIN_MOST.as_secs()));
        }
        for begin in [&b"G"[..], b"PRX", PREFACE, b"PRI * HTTP/1.1"] {
            let (ours, mut theirs) = tokio::io::duplex(100);
            let mut patient = Patient::new(ours);
            theirs.write_all(begin).await.expect("sent");
            let read = tokio::time::timeout(BEGIN_MOST * 3, patient.read_to_end(&mut Vec::new())).await;
            assert!(read.is_err(), "others measure the time from here on");
        }
    }
}
