//! Whole trees, as tar.

use bytes::Bytes;
use connectrpc::ConnectError;
use futures::StreamExt;
use futures::stream::BoxStream;
use mainbrella_guest_protocol::{GuestError, pb};
use mainbrella_types::{ErrorCode, limits};
use tokio::time::timeout;

use super::relay::relay;
use super::upload::{Form, upload};
use super::{FILE_DEADLINE, Hold, file_failed, too_slow};
use crate::error::EngineError;
use crate::machine::link::{Link, silent};

/// What was unpacked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TreeWritten {
    /// Files, directories and links.
    pub entries: u64,
    /// Content of files.
    pub bytes: u64,
    /// Entries left out: devices and FIFOs.
    pub skipped: u64,
}

pub(crate) async fn pack(
    link: &Link,
    hold: Hold,
    path: &[u8],
) -> Result<BoxStream<'static, Result<Bytes, EngineError>>, EngineError> {
    let client = link.client().await?;
    let request = pb::PackTreeRequest { path: path.to_vec(), ..Default::default() };
    let opened = timeout(FILE_DEADLINE, async {
        let mut stream = client.streams().pack_tree(request).await.map_err(file_failed)?;
        let first = stream.message::<pb::TreeChunk>().await.map_err(file_failed)?;
        Ok::<_, EngineError>((stream, first))
    });
    let (stream, first) = opened.await.map_err(|_| too_slow())??;
    let Some(first) = first else { return Err(silent("a tree without anything")) };
    let head = Bytes::copy_from_slice(first.view().data);
    let rest = futures::stream::unfold(Some(stream), |state| async move {
        let mut stream = state?;
        match timeout(FILE_DEADLINE, stream.message::<pb::TreeChunk>()).await {
            Ok(Ok(Some(chunk))) => Some((Ok(Bytes::copy_from_slice(chunk.view().data)), Some(stream))),
            Ok(Ok(None)) => None,
            Ok(Err(e)) => Some((Err(file_failed(e)), None)),
            Err(_) => Some((Err(too_slow()), None)),
        }
    });
    Ok(relay(hold, futures::stream::iter([Ok(head)]).chain(rest)))
}

pub(crate) async fn unpack(
    link: &Link,
    _hold: Hold,
    path: &[u8],
    body: BoxStream<'static, std::io::Result<Bytes>>,
    keep_owners: bool,
) -> Result<TreeWritten, EngineError> {
    let client = link.client().await?;
    let start = pb::UnpackTreeStart { path: path.to_vec(), keep_owners, ..Default::default() };
    let form = Form {
        start: pb::UnpackTreeRequest { start: start.into(), ..Default::default() },
        data: |data| pb::UnpackTreeRequest { data, ..Default::default() },
        finish: pb::UnpackTreeRequest { finish: true, ..Default::default() },
        most: limits::TREE_BYTES_MAX,
        too_large: "an archive may have at most 32 GiB",
        outcome: "what was unpacked before stays",
        refused,
    };
    let (answer, sent) = upload(form, body, async |messages| client.streams().unpack_tree(messages).await).await?;
    let view = answer.view();
    match sent {
        Some(sent) if view.bytes <= sent => {
            Ok(TreeWritten { entries: view.entries, bytes: view.bytes, skipped: view.skipped })
        }
        _ => Err(silent("more was unpacked than was sent")),
    }
}

fn refused(error: ConnectError) -> EngineError {
    let fault = GuestError::from_connect(&error);
    let malformed = |message: &str| EngineError::new(ErrorCode::InvalidRequest, message).because(fault.to_string());
    match (fault.stage.as_str(), fault.errno) {
        ("archive", 0) => {
            malformed("the body is not a whole tar archive of a kind that is taken; what was unpacked before stays")
        }
        ("name", 0) => {
            malformed("a name in the archive leads out of the tree or is too long; what was unpacked before stays")
        }
        ("link", 0) => {
            malformed("an entry of the archive would go through a link out of the tree; what was unpacked before stays")
        }
        (_, libc::ENOSPC | libc::EDQUOT) => {
            EngineError::new(ErrorCode::GuestDiskFull, "the machine's disk is full; what was unpacked before stays")
                .because(fault.to_string())
        }
        _ => file_failed(error),
    }
}
