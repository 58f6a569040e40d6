//! Connections to ports of a machine, carried by its guest agent: they need no network of the machine's own.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use connectrpc::ConnectError;
use mainbrella_guest_protocol::{GuestError, PortStream};
use mainbrella_types::ErrorCode;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use crate::error::EngineError;
use crate::machine::handle::{MachineHandle, Shared};
use crate::machine::link::silent;

/// Longest wait for a connection.
const CONNECT_DEADLINE: Duration = Duration::from_secs(15);
/// How often traffic is noted as use of the machine.
const USE_GRAIN: Duration = Duration::from_secs(1);

/// Why there is no connection.
#[derive(Debug)]
pub enum PortError {
    /// The machine runs, and nothing in it listens at this port.
    NothingListens,
    /// Anything else.
    Failed(EngineError),
}

impl From<EngineError> for PortError {
    fn from(e: EngineError) -> Self {
        Self::Failed(e)
    }
}

/// A connection to a port of a machine. It breaks when the machine ends; dropping it ends it.
pub struct PortConnection {
    stream: PortStream,
    gone: Pin<Box<WaitForCancellationFutureOwned>>,
    shared: Arc<Shared>,
    noted: Instant,
    _place: OwnedSemaphorePermit,
}

impl MachineHandle {
    /// Cancelled when the machine begins to end. It stays untouched when only the service does.
    #[must_use]
    pub fn gone(&self) -> CancellationToken {
        self.shared.gone.clone()
    }

    /// Connects to a TCP port of the machine, as a program in it would: over its loopback addresses, then over the
    /// others somebody listens on. What is carried is use of the machine; a connection that carries nothing is not.
    ///
    /// # Errors
    /// [`PortError::NothingListens`]; `overloaded` when the machine has as many connections as it may; when it does not
    /// run or its guest does not answer.
    pub async fn connect_port(&self, port: u16) -> Result<PortConnection, PortError> {
        let _pass = self.enter().await?;
        let place = Arc::clone(&self.shared.ports).try_acquire_owned().map_err(|_| {
            EngineError::new(ErrorCode::Overloaded, "the machine has as many connections to its ports as it may")
        })?;
        let link = self.link()?;
        let call = async {
            let client = link.client().await?;
            let dialled = timeout(CONNECT_DEADLINE, client.dial(port)).await;
            let dialled = dialled.map_err(|_| silent("it did not answer a dial in time"))?;
            match dialled {
                Ok(stream) => Ok(Some(stream)),
                Err(e) if nothing_listens(&e) => Ok(None),
                Err(e) => Err(failed(&e)),
            }
        };
        let stream = self.unless_gone(call).await?.ok_or(PortError::NothingListens)?;
        let gone = Box::pin(self.shared.gone.clone().cancelled_owned());
        Ok(PortConnection { stream, gone, shared: Arc::clone(&self.shared), noted: Instant::now(), _place: place })
    }
}

fn nothing_listens(e: &ConnectError) -> bool {
    let fault = GuestError::from_connect(e);
    fault.stage == "connect" && fault.errno == libc::ECONNREFUSED
}

fn failed(e: &ConnectError) -> EngineError {
    let fault = GuestError::from_connect(e);
    let told = |code, message: &'static str| EngineError::new(code, message).because(fault.to_string());
    match (fault.stage.as_str(), fault.errno) {
        ("connect", libc::ETIMEDOUT) => told(ErrorCode::GuestUnavailable, "the port did not answer in time"),
        ("connect", _) => told(ErrorCode::GuestUnavailable, "the port could not be connected to"),
        ("dial", libc::EMFILE) => {
            told(ErrorCode::Overloaded, "the machine has as many connections to its ports as it may")
        }
        _ if fault.code == connectrpc::ErrorCode::Unimplemented => {
            told(ErrorCode::Unsupported, "this machine was made by an older version, which cannot connect to ports")
        }
        _ => silent(&fault.to_string()),
    }
}

impl PortConnection {
    fn broken(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match self.gone.as_mut().poll(cx) {
            Poll::Ready(()) => Err(io::ErrorKind::ConnectionReset.into()),
            Poll::Pending => Ok(()),
        }
    }

    fn note_use(&mut self) {
        if self.noted.elapsed() >= USE_GRAIN {
            self.noted = Instant::now();
            self.shared.gate.touch();
        }
    }
}

impl AsyncRead for PortConnection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.broken(cx)?;
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        self.note_use();
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for PortConnection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        self.broken(cx)?;
        let written = ready!(Pin::new(&mut self.stream).poll_write(cx, data))?;
        self.note_use();
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainbrella_guest_protocol::fault;

    #[test]
    fn what_a_guest_says_of_a_dial_is_said_in_words_of_ours() {
        assert!(nothing_listens(&fault("connect", libc::ECONNREFUSED, "secret")));
        for (e, code) in [
            (fault("connect", libc::ETIMEDOUT, "secret"), ErrorCode::GuestUnavailable),
            (fault("connect", libc::EHOSTUNREACH, "secret"), ErrorCode::GuestUnavailable),
            (fault("dial", libc::EMFILE, "secret"), ErrorCode::Overloaded),
            (fault("open", libc::ECONNREFUSED, "secret"), ErrorCode::GuestUnavailable),
            (ConnectError::unimplemented("secret"), ErrorCode::Unsupported),
        ] {
            assert!(!nothing_listens(&e));
            let e = failed(&e);
            assert_eq!(e.code(), code);
            assert!(!e.message().contains("secret"));
        }
    }
}
