//! Files of a machine: streams in both directions, memory flat on this side whatever the size.

use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use mainbrella_guest_protocol::limits::CHUNK_BYTES;
use mainbrella_guest_protocol::{GuestError, pb};
use mainbrella_types::{ErrorCode, limits};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;

use crate::error::EngineError;
use crate::machine::command::reason;
use crate::machine::gate::Pass;
use crate::machine::link::{Link, silent};

/// Longest pause between two steps of a transfer, and longest time of one small operation.
pub(crate) const FILE_DEADLINE: Duration = Duration::from_secs(30);
/// Chunks on their way between the two sides of one transfer.
const CHUNKS_IN_FLIGHT: usize = 4;

/// What is held while a file operation runs: its place among the four, and the machine's attention.
pub(crate) struct Hold {
    pub(crate) _place: OwnedSemaphorePermit,
    pub(crate) _pass: Pass,
}

/// Metadata of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStat {
    /// Bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last modification, seconds since the epoch.
    pub mtime_s: i64,
}

/// A file being read.
pub struct FileReader {
    /// Its metadata as it was opened.
    pub stat: FileStat,
    /// Its content. An error ends it.
    pub chunks: BoxStream<'static, Result<Bytes, EngineError>>,
}

/// How a file is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteOptions {
    /// Permission bits; `None`: 0644, or those of the file that is replaced.
    pub mode: Option<u32>,
    /// Make missing directories above it.
    pub create_parents: bool,
    /// Fail when it exists.
    pub exclusive: bool,
}

/// Checks a guest path.
///
/// # Errors
/// When it is not absolute, too long, or holds a NUL.
pub fn check_path(path: &[u8]) -> Result<(), EngineError> {
    let component_too_long = path.split(|b| *b == b'/').any(|c| c.len() > limits::PATH_COMPONENT_MAX);
    if path.first() != Some(&b'/') || path.contains(&0) {
        return Err(EngineError::new(ErrorCode::InvalidRequest, "path must be absolute and without NUL"));
    }
    if path.len() > limits::PATH_MAX || component_too_long {
        return Err(EngineError::new(
            ErrorCode::InvalidRequest,
            "path must be at most 4095 bytes, each name in it at most 255",
        ));
    }
    Ok(())
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
    let opened = timeout(FILE_DEADLINE, async {
        let mut stream = client.streams().read_file(request).await.map_err(file_failed)?;
        let first = stream.message::<pb::FileChunk>().await.map_err(file_failed)?;
        Ok::<_, EngineError>((stream, first))
    });
    let (stream, first) = opened.await.map_err(|_| too_slow())??;
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
    let head = Bytes::copy_from_slice(view.data);
    let rest = futures::stream::unfold(Some((stream, hold)), |state| async move {
        let (mut stream, hold) = state?;
        match timeout(FILE_DEADLINE, stream.message::<pb::FileChunk>()).await {
            Ok(Ok(Some(chunk))) => Some((Ok(Bytes::copy_from_slice(chunk.view().data)), Some((stream, hold)))),
            Ok(Ok(None)) => None,
            Ok(Err(e)) => Some((Err(file_failed(e)), None)),
            Err(_) => Some((Err(too_slow()), None)),
        }
    });
    let head = futures::stream::iter((!head.is_empty()).then_some(Ok(head)));
    Ok(FileReader { stat, chunks: head.chain(rest).boxed() })
}

pub(crate) async fn write(
    link: &Link,
    _hold: Hold,
    path: &[u8],
    options: WriteOptions,
    mut body: BoxStream<'static, std::io::Result<Bytes>>,
) -> Result<u64, EngineError> {
    let client = link.client().await?;
    let (messages, requests) = mpsc::channel::<pb::WriteFileRequest>(CHUNKS_IN_FLIGHT);
    let start = pb::WriteFileStart {
        path: path.to_vec(),
        mode: options.mode.unwrap_or(0),
        create_parents: options.create_parents,
        exclusive: options.exclusive,
        ..Default::default()
    };
    let mut call = Box::pin(async move { client.streams().write_file(ReceiverStream::new(requests)).await });
    let feed = async {
        let gone = || silent("the guest ended a write early");
        let first = pb::WriteFileRequest { start: start.into(), ..Default::default() };
        send(&messages, first).await?.ok_or_else(gone)?;
        let mut size = 0u64;
        while let Some(chunk) = timeout(FILE_DEADLINE, body.next()).await.map_err(|_| {
            EngineError::new(ErrorCode::DeadlineExceeded, "the body of the upload stalled; nothing was written")
        })? {
            let chunk = chunk.map_err(|e| {
                EngineError::new(ErrorCode::InvalidRequest, "the body of the upload broke off; nothing was written")
                    .because(e.to_string())
            })?;
            size += chunk.len() as u64;
            if size > limits::FILE_BYTES_MAX {
                return Err(EngineError::new(
                    ErrorCode::PayloadTooLarge,
                    "a file may have at most 5 GiB; nothing was written",
                ));
            }
            for part in chunk.chunks(CHUNK_BYTES) {
                let message = pb::WriteFileRequest { data: part.to_vec(), ..Default::default() };
                send(&messages, message).await?.ok_or_else(gone)?;
            }
        }
        send(&messages, pb::WriteFileRequest { finish: true, ..Default::default() }).await?.ok_or_else(gone)?;
        Ok::<u64, EngineError>(size)
    };
    // The guest may answer (refuse) before it has been sent everything: then its answer counts.
    let sent = tokio::select! {
        biased;
        answer = &mut call => return finish(answer, None),
        fed = feed => fed,
    };
    drop(messages);
    match sent {
        Ok(size) => {
            let answer = timeout(FILE_DEADLINE, call).await.map_err(|_| too_slow())?;
            finish(answer, Some(size))
        }
        Err(mut failure) => {
            // Without `finish` the guest undoes the write. Its own reason, if it gave one, says more than ours.
            if let Ok(Err(e)) = timeout(FILE_DEADLINE, call).await {
                let fault = GuestError::from_connect(&e);
                if fault.errno != 0 && failure.code() == ErrorCode::GuestUnavailable {
                    failure = file_failed(e);
                }
            }
            Err(failure)
        }
    }
}

type WriteAnswer<V> = Result<connectrpc::client::UnaryResponse<V>, connectrpc::ConnectError>;

fn finish(
    answer: WriteAnswer<buffa::view::OwnedView<pb::WriteFileResponseView<'static>>>,
    sent: Option<u64>,
) -> Result<u64, EngineError> {
    let size = answer.map_err(file_failed)?.view().size;
    if sent == Some(size) { Ok(size) } else { Err(silent("a write of another size was confirmed")) }
}

/// Hands a message on; `None` when nobody takes messages any more.
async fn send(
    to: &mpsc::Sender<pb::WriteFileRequest>,
    message: pb::WriteFileRequest,
) -> Result<Option<()>, EngineError> {
    match timeout(FILE_DEADLINE, to.send(message)).await {
        Ok(Ok(())) => Ok(Some(())),
        Ok(Err(_)) => Ok(None),
        Err(_) => Err(too_slow()),
    }
}

fn too_slow() -> EngineError {
    EngineError::new(ErrorCode::DeadlineExceeded, "the machine made no progress with the file for 30 seconds")
}

fn file_failed(error: connectrpc::ConnectError) -> EngineError {
    let fault = GuestError::from_connect(&error);
    let why = reason(&std::io::Error::from_raw_os_error(fault.errno));
    let failed = |code, message: String| EngineError::new(code, message).because(fault.to_string());
    match fault.errno {
        0 if fault.stage.is_empty() => silent(&fault.to_string()),
        _ if fault.stage == "not-a-file" => {
            failed(ErrorCode::FileError, "only regular files can be read or written".into())
        }
        0 => failed(ErrorCode::FileError, format!("the machine refused the file operation at {}", fault.stage)),
        libc::ENOENT => failed(ErrorCode::FileNotFound, "no such file or directory in the machine".into()),
        libc::EEXIST => failed(ErrorCode::FileExists, "there is a file of this name in the machine already".into()),
        libc::ENOSPC | libc::EDQUOT => {
            failed(ErrorCode::GuestDiskFull, "the machine's disk is full; nothing was written".into())
        }
        _ => failed(ErrorCode::FileError, format!("the machine's file system answered: {why}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_any_name_are_accepted_and_only_malformed_ones_refused() {
        for ok in [&b"/a"[..], b"/", b"/re\"port", b"/a\nb", b"/x\\", "/é".as_bytes(), b"/\xff\xfe", b"/-rf"] {
            assert!(check_path(ok).is_ok(), "{ok:?}");
        }
        let long = [b"/".as_slice(), &[b'x'; 255]].concat();
        assert!(check_path(&long).is_ok());
        let longer = [b"/".as_slice(), &[b'x'; 256]].concat();
        for bad in [&b""[..], b"a", b"./a", b"/a\0b", &longer, &b"/x".repeat(2048)] {
            assert_eq!(check_path(bad).err().map(|e| e.code()), Some(ErrorCode::InvalidRequest));
        }
    }
}
