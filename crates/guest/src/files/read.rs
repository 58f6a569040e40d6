//! Reading files, in pieces, whatever their names are.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use connectrpc::ConnectError;
use futures::Stream;
use mainbrella_guest_protocol::limits::CHUNK_BYTES;
use mainbrella_guest_protocol::{fault, pb};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use super::{failed, failed_io, path_of, wire};
use crate::service::blocking;

struct Reading {
    file: Arc<File>,
    offset: u64,
    left: u64,
    _seat: tokio::sync::OwnedSemaphorePermit,
}

/// Opens a regular file and gives its content: first what it is, then pieces of it.
pub(crate) async fn read(
    request: pb::ReadFileRequest,
    seat: tokio::sync::OwnedSemaphorePermit,
) -> Result<impl Stream<Item = Result<pb::FileChunk, ConnectError>> + Send + use<>, ConnectError> {
    let (offset, length) = (request.offset, request.length);
    if i64::try_from(offset).is_err() {
        return Err(fault("offset", Errno::INVAL.raw_os_error(), "offset: past what a file can hold"));
    }
    let (file, stat) = blocking(move || open(&request.path)).await?;
    let left = if length == 0 { u64::MAX } else { length };
    let first = pb::FileChunk { stat: buffa::MessageField::some(stat), ..Default::default() };
    let reading = Reading { file: Arc::new(file), offset, left, _seat: seat };
    let rest = futures::stream::try_unfold(reading, async |mut reading: Reading| {
        let file = reading.file.clone();
        let (offset, most) = (reading.offset, reading.left.min(CHUNK_BYTES as u64) as usize);
        let data = blocking(move || read_piece(&file, offset, most)).await?;
        if data.is_empty() {
            return Ok(None);
        }
        reading.offset += data.len() as u64;
        reading.left -= data.len() as u64;
        Ok(Some((pb::FileChunk { data, ..Default::default() }, reading)))
    });
    Ok(futures::StreamExt::chain(futures::stream::iter([Ok(first)]), rest))
}

fn open(path: &[u8]) -> Result<(File, pb::FileStat), ConnectError> {
    let path = path_of(path)?;
    // Not blocking: a FIFO without a writer must not hold us.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let fd = rustix::fs::open(&path, flags, Mode::empty()).map_err(failed("open"))?;
    let stat = rustix::fs::fstat(&fd).map_err(failed("stat"))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok((File::from(fd), wire(&stat, Vec::new()))),
        FileType::Directory => Err(failed("open")(Errno::ISDIR)),
        _ => Err(fault("not-a-file", Errno::NXIO.raw_os_error(), "a device, socket or FIFO")),
    }
}

/// Fills up to `most` bytes; fewer only at the end of the file. A length of 0 by `stat` says nothing under /proc.
fn read_piece(file: &File, offset: u64, most: usize) -> Result<Vec<u8>, ConnectError> {
    let mut data = vec![0u8; most];
    let mut have = 0;
    while have < most {
        match file.read_at(&mut data[have..], offset + have as u64) {
            Ok(0) => break,
            Ok(n) => have += n,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed_io("read")(error)),
        }
    }
    data.truncate(have);
    Ok(data)
}
