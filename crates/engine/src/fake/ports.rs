//! What listens in fake machines: scripted servers on in-memory streams.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use connectrpc::{ConnectError, InboundStream};
use futures::{Stream, StreamExt};
use mainbrella_guest_protocol::dial::{Frame, Side, carry, opening};
use mainbrella_guest_protocol::limits::DIAL_MEMORY;
use mainbrella_guest_protocol::{fault, pb};
use tokio::io::DuplexStream;
use tokio::sync::{Semaphore, mpsc};

/// Serves one connection. Called in the runtime of the machine; what it does with the stream is its own affair.
pub type Listener = Arc<dyn Fn(DuplexStream) + Send + Sync>;

/// Bytes between a scripted server and the link, each way.
const BUFFER: usize = 64 * 1024;

/// What listens in every machine of a driver, by port.
#[derive(Clone, Default)]
pub struct FakePorts {
    listeners: Arc<Mutex<HashMap<u16, Listener>>>,
}

impl FakePorts {
    /// From now on `listener` serves what connects to `port`, in every machine.
    pub fn listen(&self, port: u16, listener: Listener) {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner).insert(port, listener);
    }

    /// Nothing listens at `port` any more; connections go on.
    pub fn close(&self, port: u16) {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner).remove(&port);
    }

    pub(super) async fn dial(
        &self,
        mut requests: InboundStream<pb::DialRequest>,
    ) -> Result<impl Stream<Item = Result<pb::DialResponse, ConnectError>> + Send + use<>, ConnectError> {
        let missing = || fault("dial", 0, "the first message says where to");
        let first = requests.next().await.ok_or_else(missing)??.to_owned_message();
        let port = first.start.as_option().ok_or_else(missing)?.port;
        let listener = u16::try_from(port)
            .ok()
            .and_then(|port| self.listeners.lock().unwrap_or_else(PoisonError::into_inner).get(&port).cloned());
        let listener = listener.ok_or_else(|| fault("connect", libc::ECONNREFUSED, "nothing listens"))?;
        let (ours, theirs) = tokio::io::duplex(BUFFER);
        listener(theirs);
        let (outgoing, mut frames) = mpsc::channel::<Frame>(4);
        let _ = outgoing.try_send(opening());
        tokio::spawn(async move {
            let incoming = requests.map(|message| message.map(|m| Frame::from(m.to_owned_message())));
            let incoming = std::pin::pin!(incoming);
            let memory = Arc::new(Semaphore::new(DIAL_MEMORY));
            carry(Side::Callee, ours, first.into(), incoming, outgoing, &memory).await
        });
        Ok(futures::stream::poll_fn(move |cx| frames.poll_recv(cx).map(|frame| frame.map(|f| Ok(f.into())))))
    }
}
