//! Reading a file.

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use mainbrella_guest_protocol::pb;
use tokio::time::timeout;

use super::relay::relay;
use super::{FILE_DEADLINE, FileStat, Hold, file_failed, too_slow};
use crate::error::EngineError;
use crate::machine::link::{Link, silent};

/// A file being read.
pub struct FileReader {
    /// Its metadata as it was opened.
    pub stat: FileStat,
    /// Its content. An error ends it.
    pub chunks: BoxStream<'static, Result<Bytes, EngineError>>,
}

pub(crate) async fn read(
    link: &Link,
    hold: Hold,
    path: &[u8],
    offset: u64,
    length: Option<u64>,
) -> Result<FileReader, EngineError> {
    if length == Some(0) {
        // On the wire zero means "to the end"; a caller who wants nothing still learns what the file is.
        let mut reader = Box::pin(read(link, hold, path, offset, Some(1))).await?;
        reader.chunks = futures::stream::empty().boxed();
        return Ok(reader);
    }
    let client = link.client().await?;
    let request =
        pb::ReadFileRequest { path: path.to_vec(), offset, length: length.unwrap_or(0), ..Default::default() };
    // What can be opened and not read is refused like what cannot be opened: before anybody is told of a file.
    let opened = timeout(FILE_DEADLINE, async {
        let mut stream = client.streams().read_file(request).await.map_err(file_failed)?;
        let first = stream.message::<pb::FileChunk>().await.map_err(file_failed)?;
        let second = stream.message::<pb::FileChunk>().await.map_err(file_failed)?;
        Ok::<_, EngineError>((stream, first, second))
    });
    let (stream, first, second) = opened.await.map_err(|_| too_slow())??;
    let Some(first) = first else { return Err(silent("a file without its first chunk")) };
    let view = first.view();
    if !view.stat.is_set() {
        return Err(silent("a file without its metadata"));
    }
    let stat = FileStat {
        size: view.stat.size,
        mode: view.stat.mode & 0o7777,
        uid: view.stat.uid,
        gid: view.stat.gid,
        mtime_s: view.stat.mtime_s,
    };
    let second = second.map(|chunk| Bytes::copy_from_slice(chunk.view().data));
    let ended = second.is_none();
    let head = [Some(Bytes::copy_from_slice(view.data)), second].into_iter().flatten().filter(|d| !d.is_empty());
    let head: Vec<_> = head.map(Ok).collect();
    let rest = futures::stream::unfold((!ended).then_some(stream), |state| async move {
        let mut stream = state?;
        match timeout(FILE_DEADLINE, stream.message::<pb::FileChunk>()).await {
            Ok(Ok(Some(chunk))) => Some((Ok(Bytes::copy_from_slice(chunk.view().data)), Some(stream))),
            Ok(Ok(None)) => None,
            Ok(Err(e)) => Some((Err(file_failed(e)), None)),
            Err(_) => Some((Err(too_slow()), None)),
        }
    });
    Ok(FileReader { stat, chunks: relay(hold, futures::stream::iter(head).chain(rest)) })
}
