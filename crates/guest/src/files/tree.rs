//! Whole trees, as tar, in pieces.

use std::os::unix::ffi::OsStrExt;

use connectrpc::{ConnectError, InboundStream};
use futures::{Stream, StreamExt};
use mainbrella_guest_protocol::limits::{CHUNK_BYTES, CHUNK_BYTES_MAX};
use mainbrella_guest_protocol::{fault, pb};
use mainbrella_tree::{Owners, PackOptions, Packer, UnpackOptions, Unpacker};
use rustix::fs::{CWD, Mode, OFlags};
use tokio::sync::OwnedSemaphorePermit;

use super::{Owner, failed, failed_io, make_dirs, path_of, tree_failed};
use crate::service::blocking;

/// Packs what is at `path`; a link there is followed.
pub(crate) async fn pack(
    path: Vec<u8>,
    seat: OwnedSemaphorePermit,
) -> Result<impl Stream<Item = Result<pb::TreeChunk, ConnectError>> + Send + use<>, ConnectError> {
    let packer = blocking(move || {
        let path = path_of(&path)?;
        let options = PackOptions { follow: true, ..PackOptions::default() };
        Packer::open(CWD, path.as_os_str().as_bytes(), options).map_err(tree_failed)
    })
    .await?;
    Ok(futures::stream::try_unfold((packer, seat), async |(mut packer, seat)| {
        let (piece, packer) = blocking(move || {
            let piece = packer.next(CHUNK_BYTES).map_err(tree_failed)?;
            Ok((piece, packer))
        })
        .await?;
        Ok(piece.map(|data| (pb::TreeChunk { data, ..Default::default() }, (packer, seat))))
    }))
}

/// Unpacks below a directory, which is made when it is not there. What is made belongs to `owner`, unless the archive is to
/// say whom it belongs to.
pub(crate) async fn unpack(
    mut requests: InboundStream<pb::UnpackTreeRequest>,
    owner: Option<Owner>,
) -> Result<pb::UnpackTreeResponse, ConnectError> {
    let no_start = || fault("start", 0, "the first message says where to unpack");
    let first = requests.next().await.ok_or_else(no_start)??.to_owned_message();
    let start = first.start.into_option().ok_or_else(no_start)?;
    let mut unpacker = blocking(move || begin(&start, owner)).await?;
    let (mut data, mut finish) = (first.data, first.finish);
    loop {
        if data.len() > CHUNK_BYTES_MAX {
            return Err(fault("data", 0, "data: at most 128 KiB in one message"));
        }
        // Should the stream break while the unpacker is out, its drop removes the file that is not whole.
        unpacker = blocking(move || {
            unpacker.push(&data).map_err(tree_failed)?;
            Ok(unpacker)
        })
        .await?;
        if finish {
            let done = blocking(move || unpacker.finish().map_err(tree_failed)).await?;
            let (entries, bytes, skipped) = (done.entries, done.bytes, done.skipped);
            return Ok(pb::UnpackTreeResponse { entries, bytes, skipped, ..Default::default() });
        }
        match requests.next().await {
            Some(message) => {
                let message = message?.to_owned_message();
                (data, finish) = (message.data, message.finish);
            }
            None => return Err(ConnectError::aborted("the archive ended without its last message")),
        }
    }
}

fn begin(start: &pb::UnpackTreeStart, owner: Option<Owner>) -> Result<Unpacker, ConnectError> {
    let path = path_of(&start.path)?;
    let new = !path.exists();
    if new {
        make_dirs(&path, owner.filter(|_| !start.keep_owners)).map_err(failed_io("parents"))?;
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(&path, flags, Mode::empty()).map_err(failed("open"))?;
    let owners = match owner {
        _ if start.keep_owners => Owners::Archive,
        Some(owner) => Owners::All(owner.uid, owner.gid),
        None => Owners::Unpacker,
    };
    Ok(Unpacker::new(root, UnpackOptions { owners, mode_mask: 0o7777, own_root: new }))
}
