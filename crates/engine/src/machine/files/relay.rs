//! Handing content on to a caller: bounded by silence on both sides.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{Stream, StreamExt};
use mainbrella_types::ErrorCode;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::{CHUNKS_IN_FLIGHT, Hold, READER_DEADLINE};
use crate::error::EngineError;

/// Gives what `content` gives, read by a task of its own. A caller who takes nothing for as long as the deadline loses
/// the transfer and with it its place among the file operations; one who is gone loses it at once.
pub(super) fn relay(
    hold: Hold,
    content: impl Stream<Item = Result<Bytes, EngineError>> + Send + 'static,
) -> BoxStream<'static, Result<Bytes, EngineError>> {
    let (pieces, taken) = mpsc::channel(CHUNKS_IN_FLIGHT);
    let whole = Arc::new(AtomicBool::new(false));
    let complete = Arc::clone(&whole);
    tokio::spawn(async move {
        let _hold = hold;
        let mut content = std::pin::pin!(content);
        loop {
            let next = tokio::select! {
                next = content.next() => next,
                () = pieces.closed() => return,
            };
            let Some(next) = next else { break };
            let failed = next.is_err();
            match timeout(READER_DEADLINE, pieces.send(next)).await {
                Ok(Ok(())) if failed => break,
                Ok(Ok(())) => {}
                _ => return,
            }
        }
        complete.store(true, Ordering::Release);
    });
    futures::stream::unfold(Some(taken), move |state| {
        let whole = Arc::clone(&whole);
        async move {
            let mut taken = state?;
            match taken.recv().await {
                Some(piece) => Some((piece, Some(taken))),
                None if whole.load(Ordering::Acquire) => None,
                None => {
                    let message = "nobody took the content for 25 seconds";
                    Some((Err(EngineError::new(ErrorCode::DeadlineExceeded, message)), None))
                }
            }
        }
    })
    .boxed()
}
