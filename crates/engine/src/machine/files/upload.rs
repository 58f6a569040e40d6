//! Sending content to the guest: a body, cut into messages, and an answer that may come before its end.

use bytes::Bytes;
use connectrpc::ConnectError;
use futures::StreamExt;
use futures::stream::BoxStream;
use mainbrella_guest_protocol::GuestError;
use mainbrella_guest_protocol::limits::CHUNK_BYTES;
use mainbrella_types::ErrorCode;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;

use super::{CHUNKS_IN_FLIGHT, FILE_DEADLINE, too_slow};
use crate::error::EngineError;
use crate::machine::link::silent;

/// What kind of upload it is: its messages, its bound, its words.
pub(super) struct Form<M> {
    /// The first message.
    pub(super) start: M,
    /// A message with content.
    pub(super) data: fn(Vec<u8>) -> M,
    /// The last message.
    pub(super) finish: M,
    /// Most bytes.
    pub(super) most: u64,
    /// Said when there are more.
    pub(super) too_large: &'static str,
    /// What has become of what was sent, when the upload fails.
    pub(super) outcome: &'static str,
    /// What a refusal of the guest means.
    pub(super) refused: fn(ConnectError) -> EngineError,
}

/// Sends `body` through `call`; gives the guest's answer and how many bytes it was sent, `None` when it answered before
/// it had everything.
pub(super) async fn upload<M, A, F>(
    form: Form<M>,
    mut body: BoxStream<'static, std::io::Result<Bytes>>,
    call: impl FnOnce(ReceiverStream<M>) -> F,
) -> Result<(A, Option<u64>), EngineError>
where
    F: Future<Output = Result<A, ConnectError>>,
{
    let (messages, requests) = mpsc::channel::<M>(CHUNKS_IN_FLIGHT);
    let Form { start, data, finish, most, too_large, outcome, refused } = form;
    let mut call = std::pin::pin!(call(ReceiverStream::new(requests)));
    let feed = async {
        let gone = || silent("the guest ended an upload early");
        send(&messages, start).await?.ok_or_else(gone)?;
        let mut size = 0u64;
        while let Some(chunk) = timeout(FILE_DEADLINE, body.next()).await.map_err(|_| {
            EngineError::new(ErrorCode::DeadlineExceeded, format!("the body of the upload stalled; {outcome}"))
        })? {
            let chunk = chunk.map_err(|e| {
                let message = format!("the body of the upload broke off; {outcome}");
                EngineError::new(ErrorCode::InvalidRequest, message).because(e.to_string())
            })?;
            size += chunk.len() as u64;
            if size > most {
                return Err(EngineError::new(ErrorCode::PayloadTooLarge, format!("{too_large}; {outcome}")));
            }
            for part in chunk.chunks(CHUNK_BYTES) {
                send(&messages, data(part.to_vec())).await?.ok_or_else(gone)?;
            }
        }
        send(&messages, finish).await?.ok_or_else(gone)?;
        Ok::<u64, EngineError>(size)
    };
    // The guest may answer (refuse) before it has been sent everything: then its answer counts.
    let sent = tokio::select! {
        biased;
        answer = &mut call => return Ok((answer.map_err(refused)?, None)),
        fed = feed => fed,
    };
    drop(messages);
    match sent {
        Ok(size) => {
            let answer = timeout(FILE_DEADLINE, call).await.map_err(|_| too_slow())?;
            Ok((answer.map_err(refused)?, Some(size)))
        }
        Err(mut failure) => {
            // Without the last message the guest undoes what it can. Its own reason, if it gave one, says more than ours.
            if let Ok(Err(e)) = timeout(FILE_DEADLINE, call).await {
                let fault = GuestError::from_connect(&e);
                if !fault.stage.is_empty() && failure.code() == ErrorCode::GuestUnavailable {
                    failure = refused(e);
                }
            }
            Err(failure)
        }
    }
}

/// Hands a message on; `None` when nobody takes messages any more.
async fn send<M>(to: &mpsc::Sender<M>, message: M) -> Result<Option<()>, EngineError> {
    match timeout(FILE_DEADLINE, to.send(message)).await {
        Ok(Ok(())) => Ok(Some(())),
        Ok(Err(_)) => Ok(None),
        Err(_) => Err(too_slow()),
    }
}
