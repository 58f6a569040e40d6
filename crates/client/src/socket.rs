//! The WebSocket of a job: its events in, input and signals out.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::{SinkExt as _, StreamExt as _};
use http::header::{CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION, UPGRADE};
use reqwest::Upgraded;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::client::generate_key;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};

use mainbrella_api::{JobEvent, JobFrame};
use serde::Deserialize;

use crate::error::ClientError;
use crate::machines::MachineRef;
use crate::transport::Client;

/// Longest frame of the service, bytes.
const FRAME_MAX: usize = 1024 * 1024;
/// Input of one frame, bytes.
const INPUT_MAX: usize = 32 * 1024;
/// The service asks for a sign of life every twenty seconds; after so long without a word the connection is given up.
const SILENCE_MAX: Duration = Duration::from_secs(50);

/// What comes on the socket.
#[derive(Clone, Debug)]
pub enum JobMessage {
    /// An event.
    Event(JobEvent),
    /// What was asked last could not be done.
    Refused {
        /// A stable name.
        code: String,
        /// One sentence.
        message: String,
    },
}

/// A job at the other end of a WebSocket.
#[derive(Debug)]
pub struct JobSocket {
    stream: WebSocketStream<Upgraded>,
}

#[derive(Deserialize)]
struct Refusal {
    code: String,
    message: String,
}

impl Client {
    /// Attaches to a job: its events after `cursor`, and a way in for input, signals and sizes.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn attach_job(&self, machine: &MachineRef, job: &str, cursor: u64) -> Result<JobSocket, ClientError> {
        let key = generate_key();
        let request = self
            .events_request(machine, job, cursor)
            .header(CONNECTION, "Upgrade")
            .header(UPGRADE, "websocket")
            .header(SEC_WEBSOCKET_VERSION, "13")
            .header(SEC_WEBSOCKET_KEY, &key);
        let upgraded = async {
            let response = self.send_upgrade(request).await?;
            let accepted = response.headers().get(SEC_WEBSOCKET_ACCEPT).and_then(|v| v.to_str().ok());
            if accepted != Some(derive_accept_key(key.as_bytes()).as_str()) {
                return Err(ClientError::Malformed("the WebSocket handshake was not answered as required"));
            }
            response.upgrade().await.map_err(|e| self.failed(e))
        };
        let wait = tokio::time::timeout(self.answer_timeout(), upgraded).await;
        let upgraded = wait.map_err(|_| ClientError::StoppedWaiting)??;
        let config = WebSocketConfig::default().max_message_size(Some(FRAME_MAX)).max_frame_size(Some(FRAME_MAX));
        Ok(JobSocket { stream: WebSocketStream::from_raw_socket(upgraded, Role::Client, Some(config)).await })
    }
}

impl JobSocket {
    /// The next thing the service says; `None` when it has closed the socket. May be dropped and called again.
    ///
    /// # Errors
    /// [`ClientError::StoppedWaiting`] when the connection broke or went silent: attach again from the last cursor.
    pub async fn next(&mut self) -> Result<Option<JobMessage>, ClientError> {
        loop {
            let message = tokio::time::timeout(SILENCE_MAX, self.stream.next()).await;
            let text = match message.map_err(|_| ClientError::StoppedWaiting)? {
                None | Some(Ok(Message::Close(_))) => return Ok(None),
                Some(Err(_)) => return Err(ClientError::StoppedWaiting),
                Some(Ok(Message::Text(text))) => text,
                Some(Ok(_)) => continue,
            };
            if let Ok(event) = serde_json::from_str::<JobEvent>(&text) {
                return Ok(Some(JobMessage::Event(event)));
            }
            // A kind of a newer service is passed over.
            if let Ok(Refusal { code, message }) = serde_json::from_str(&text) {
                return Ok(Some(JobMessage::Refused { code, message }));
            }
        }
    }

    /// Asks for something.
    ///
    /// # Errors
    /// When the connection broke; it may have been done.
    pub async fn send(&mut self, frame: &JobFrame) -> Result<(), ClientError> {
        let text = serde_json::to_string(frame).map_err(|_| ClientError::Malformed("a frame has no form"))?;
        self.stream.send(Message::text(text)).await.map_err(|_| ClientError::StoppedWaiting)
    }

    /// Writes to the job's input, in as many frames as it needs.
    ///
    /// # Errors
    /// When the connection broke; some of it may have arrived.
    pub async fn write(&mut self, data: &[u8]) -> Result<(), ClientError> {
        for part in data.chunks(INPUT_MAX) {
            self.send(&JobFrame::Stdin { data_base64: STANDARD.encode(part) }).await?;
        }
        Ok(())
    }

    /// Says good-bye; the job goes on.
    pub async fn close(mut self) {
        let _ = tokio::time::timeout(Duration::from_secs(1), self.stream.close(None)).await;
    }
}
