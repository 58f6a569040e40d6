//! Files in a machine, streamed: never more than a few buffers in memory.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use reqwest::{Body, Method, Response};

use mainbrella_api::{FileWritten, headers};

use crate::error::ClientError;
use crate::machines::MachineRef;
use crate::transport::Client;

/// Longest time until a snapshot can be read.
const SNAPSHOT_OPENS: Duration = Duration::from_secs(330);

/// A file that is being read.
#[derive(Debug)]
pub struct Download {
    client: Client,
    response: Response,
    got: u64,
    /// Bytes the file had when it was opened; `None` when the service did not say.
    pub size: Option<u64>,
    /// Permission bits.
    pub mode: Option<u32>,
    /// Bytes this answer will have; `None` when it does not say.
    pub length: Option<u64>,
}

impl Download {
    /// The next bytes; `None` at the proper end. A cut connection is an error, never an end.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, ClientError> {
        let wait = tokio::time::timeout(self.client.answer_timeout(), self.response.chunk());
        let chunk = wait.await.map_err(|_| ClientError::StoppedWaiting)?.map_err(|e| self.client.failed(e))?;
        match &chunk {
            Some(bytes) => self.got += bytes.len() as u64,
            None if self.length.is_some_and(|n| self.got < n) => {
                return Err(ClientError::Malformed("the file ended before it was complete"));
            }
            None => {}
        }
        Ok(chunk)
    }
}

/// How a file is written.
#[derive(Clone, Debug)]
pub struct WriteOptions {
    /// Permission bits; the service's default when `None`.
    pub mode: Option<u32>,
    /// Make missing directories above it.
    pub create_parents: bool,
    /// Fail when it exists.
    pub exclusive: bool,
}

impl Default for WriteOptions {
    fn default() -> Self {
        Self { mode: None, create_parents: true, exclusive: false }
    }
}

/// What is written.
#[derive(Debug)]
pub struct Upload<S> {
    /// The bytes.
    pub bytes: S,
    /// How many there will be, when that is certain.
    pub length: Option<u64>,
}

/// Whose files are read.
#[derive(Clone, Copy, Debug)]
pub enum FilesOf<'a> {
    /// A machine's.
    Machine(&'a MachineRef),
    /// A snapshot's; no machine has to be started for that.
    Snapshot(&'a str),
}

impl FilesOf<'_> {
    /// How long an answer may take beyond the usual wait: the first read of a snapshot has something started.
    pub(crate) fn patience(self) -> Duration {
        match self {
            Self::Machine(_) => Duration::ZERO,
            Self::Snapshot(_) => SNAPSHOT_OPENS,
        }
    }
}

impl<'a> From<&'a MachineRef> for FilesOf<'a> {
    fn from(machine: &'a MachineRef) -> Self {
        Self::Machine(machine)
    }
}

impl Client {
    /// Where files are read.
    pub(crate) fn files<'a>(
        &self,
        of: FilesOf<'a>,
        path: &[&'a str],
        query: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> url::Url {
        let (kind, id, generation) = match of {
            FilesOf::Machine(machine) => {
                ("machines", machine.id.as_str(), Some(("createdAt", machine.created_at.as_str())))
            }
            FilesOf::Snapshot(id) => ("snapshots", id, None),
        };
        let path: Vec<&str> = ["v1", kind, id].into_iter().chain(path.iter().copied()).collect();
        self.endpoint(&path, generation.into_iter().chain(query))
    }

    /// Opens a file for reading, or `length` bytes of it from `offset`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn read_file<'a>(
        &self,
        of: impl Into<FilesOf<'a>>,
        path: &'a str,
        offset: Option<u64>,
        length: Option<u64>,
    ) -> Result<Download, ClientError> {
        let (offset, length) = (offset.map(|n| n.to_string()), length.map(|n| n.to_string()));
        let query = [("path", path)]
            .into_iter()
            .chain(offset.as_deref().map(|n| ("offset", n)))
            .chain(length.as_deref().map(|n| ("length", n)));
        let of = of.into();
        self.open_download(self.files(of, &["files", "content"], query), of.patience()).await
    }

    /// Opens what is at `url` for reading; its answer may take `patience` beyond the usual wait.
    pub(crate) async fn open_download(&self, url: url::Url, patience: Duration) -> Result<Download, ClientError> {
        let wait = tokio::time::timeout(self.answer_timeout() + patience, self.send(self.request(Method::GET, url)));
        let response = wait.await.map_err(|_| ClientError::StoppedWaiting)??;
        let header = |name: &str| response.headers().get(name)?.to_str().ok();
        let size = header(headers::FILE_SIZE).and_then(|s| s.parse().ok());
        let mode = header(headers::FILE_MODE).and_then(|s| u32::from_str_radix(s, 8).ok());
        let declared = header("content-length").and_then(|s| s.parse().ok());
        Ok(Download { client: self.clone(), got: 0, size, mode, length: declared, response })
    }

    /// Writes a file from a stream. Never repeated. When the stream fails, the machine keeps what it had.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Source`] when the stream failed.
    pub async fn write_file<S>(
        &self,
        machine: &MachineRef,
        path: &str,
        options: &WriteOptions,
        upload: Upload<S>,
    ) -> Result<FileWritten, ClientError>
    where
        S: Stream<Item = io::Result<Bytes>> + Send + 'static,
    {
        let mode = options.mode.map(|m| format!("{m:04o}"));
        let flag = |b: bool| if b { "true" } else { "false" };
        let query = [
            ("createdAt", machine.created_at.as_str()),
            ("path", path),
            ("createParents", flag(options.create_parents)),
            ("exclusive", flag(options.exclusive)),
        ]
        .into_iter()
        .chain(mode.as_deref().map(|m| ("mode", m)));
        let url = self.endpoint(&["v1", "machines", &machine.id, "files", "content"], query);
        self.send_upload(url, "application/octet-stream", upload).await
    }

    /// Sends a body for as long as it moves, and reads the answer.
    pub(crate) async fn send_upload<S, T>(
        &self,
        url: url::Url,
        kind: &'static str,
        upload: Upload<S>,
    ) -> Result<T, ClientError>
    where
        S: Stream<Item = io::Result<Bytes>> + Send + 'static,
        T: serde::de::DeserializeOwned,
    {
        let moved = Arc::new(AtomicU64::new(0));
        let failure = Arc::new(std::sync::Mutex::new(None::<io::Error>));
        let body = {
            let (moved, failure) = (moved.clone(), failure.clone());
            upload.bytes.map(move |item| {
                moved.fetch_add(1, Ordering::Relaxed);
                item.inspect_err(|e| {
                    let copy = e
                        .raw_os_error()
                        .map_or_else(|| io::Error::new(e.kind(), e.to_string()), io::Error::from_raw_os_error);
                    *failure.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(copy);
                })
            })
        };
        let mut request = self.request(Method::PUT, url).header("content-type", kind).body(Body::wrap_stream(body));
        if let Some(n) = upload.length {
            request = request.header("content-length", n);
        }
        let answer = async {
            let response = self.send(request).await?;
            self.parse(response).await
        };
        tokio::pin!(answer);
        loop {
            let before = moved.load(Ordering::Relaxed);
            match tokio::time::timeout(self.answer_timeout().max(Duration::from_millis(1)), &mut answer).await {
                Ok(result) => {
                    let source = failure.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
                    return match source {
                        Some(e) => Err(ClientError::Source(e)),
                        None => result,
                    };
                }
                Err(_) if moved.load(Ordering::Relaxed) == before => return Err(ClientError::StoppedWaiting),
                Err(_) => {}
            }
        }
    }
}
