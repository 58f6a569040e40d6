//! Connections that changed their protocol: bytes both ways until one side or the route ends.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;

use crate::serve::Place;

/// Buffer of one direction, bytes.
const BUFFER: usize = 8 * 1024;

/// Carries a tunnel, holding its places.
pub(crate) async fn carry(
    caller: OnUpgrade,
    application: OnUpgrade,
    cut: CancellationToken,
    closing: CancellationToken,
    places: (OwnedSemaphorePermit, Place),
) {
    let work = async {
        let (caller, application) = (caller.await?, application.await?);
        let (mut caller, mut application) = (TokioIo::new(caller), TokioIo::new(application));
        let copied = tokio::io::copy_bidirectional_with_sizes(&mut caller, &mut application, BUFFER, BUFFER).await;
        if let Err(e) = copied {
            tracing::debug!(error = %e, "a tunnel broke off");
        }
        Ok::<(), hyper::Error>(())
    };
    tokio::select! {
        biased;
        () = cut.cancelled() => {}
        () = closing.cancelled() => {}
        done = work => {
            if let Err(e) = done {
                tracing::debug!(error = %e, "a tunnel did not begin");
            }
        }
    }
    drop(places);
}
