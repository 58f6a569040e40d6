//! Directories, names and modes, trees, watches and signed URLs.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use reqwest::{Method, Response};

use mainbrella_api::{
    ChangeMode, CreateFileUrl, ErrorBody, FileEntry, FileEvent, FileEventType, FileList, FileUrl, MakeDirectory,
    MoveFile, RemoveFile, RemoveResult, TreeWritten,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{ApiFailure, ClientError};
use crate::files::{Download, FilesOf, Upload};
use crate::machines::MachineRef;
use crate::transport::{Client, with_json};

/// Longest event of a watch: two paths, escaped.
const EVENT_MAX: usize = 128 * 1024;

/// A watched directory.
#[derive(Debug)]
pub struct Watch {
    client: Client,
    response: Response,
    held: Vec<u8>,
}

impl Watch {
    /// The next event; `None` at the proper end, which comes after an event `ended`. The first is `ready`.
    ///
    /// # Errors
    /// [`ClientError`]: an event `error` is the failure it tells of, a cut connection is never an end.
    pub async fn next(&mut self) -> Result<Option<FileEvent>, ClientError> {
        loop {
            while let Some(end) = self.held.windows(2).position(|w| w == b"\n\n") {
                let frame: Vec<u8> = self.held.drain(..end + 2).collect();
                let Some(data) = frame.strip_prefix(b"data: ") else { continue };
                let event: FileEvent = serde_json::from_slice(data)
                    .map_err(|_| ClientError::Malformed("an event does not have the expected fields"))?;
                return match event.r#type {
                    FileEventType::Error => Err(failure(event)),
                    // A newer service may tell what this build does not know.
                    FileEventType::Unknown => continue,
                    _ => Ok(Some(event)),
                };
            }
            if self.held.len() > EVENT_MAX {
                return Err(ClientError::Malformed("an event is too long"));
            }
            // The service shows every ten seconds that it is there.
            let wait = tokio::time::timeout(self.client.answer_timeout(), self.response.chunk());
            match wait.await.map_err(|_| ClientError::StoppedWaiting)?.map_err(|e| self.client.failed(e))? {
                Some(bytes) => self.held.extend_from_slice(&bytes),
                None if self.held.is_empty() => return Ok(None),
                None => return Err(ClientError::Malformed("the events ended in the middle of one")),
            }
        }
    }
}

fn failure(event: FileEvent) -> ClientError {
    let body = ErrorBody {
        code: event.code.unwrap_or_default(),
        message: event.message.unwrap_or_default(),
        hint: event.hint.unwrap_or_default(),
        request_id: String::new(),
        preview_id: None,
    };
    let status = body.known_code().map_or(500, mainbrella_types::ErrorCode::status);
    ClientError::Api(Box::new(ApiFailure { status, body, retry_after: None }))
}

impl Client {
    async fn change<B: Serialize, T: DeserializeOwned>(
        &self,
        machine: &MachineRef,
        verb: &str,
        body: &B,
    ) -> Result<T, ClientError> {
        let request = self.request(Method::POST, self.bound(machine, &["files", verb]));
        self.json(with_json(request, body), Duration::ZERO).await
    }

    /// A page of a directory, sorted by the bytes of the names. `offset`: 0, or `next_offset` of the page before.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn list_files<'a>(
        &self,
        of: impl Into<FilesOf<'a>>,
        path: &'a str,
        offset: u64,
        limit: u32,
    ) -> Result<FileList, ClientError> {
        let (offset, limit) = (offset.to_string(), limit.to_string());
        let query = [("path", path), ("offset", offset.as_str()), ("limit", limit.as_str())];
        let of = of.into();
        let url = self.files(of, &["files", "list"], query);
        self.json(self.request(Method::GET, url), of.patience()).await
    }

    /// What is at a path: a link itself, or where it leads.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn stat_file<'a>(
        &self,
        of: impl Into<FilesOf<'a>>,
        path: &'a str,
        follow_symlinks: bool,
    ) -> Result<FileEntry, ClientError> {
        let follow = if follow_symlinks { "true" } else { "false" };
        let of = of.into();
        let url = self.files(of, &["files", "stat"], [("path", path), ("followSymlinks", follow)]);
        self.json(self.request(Method::GET, url), of.patience()).await
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn make_directory(&self, machine: &MachineRef, body: &MakeDirectory) -> Result<FileEntry, ClientError> {
        self.change(machine, "mkdir", body).await
    }

    /// Moves something to a name that is free.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn move_file(&self, machine: &MachineRef, body: &MoveFile) -> Result<FileEntry, ClientError> {
        self.change(machine, "move", body).await
    }

    /// Changes permission bits.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn change_mode(&self, machine: &MachineRef, body: &ChangeMode) -> Result<FileEntry, ClientError> {
        self.change(machine, "chmod", body).await
    }

    /// Removes something. A tree that could be removed only in part is a result that says what is left.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn remove_file(&self, machine: &MachineRef, body: &RemoveFile) -> Result<RemoveResult, ClientError> {
        self.change(machine, "remove", body).await
    }

    /// Makes a URL that reads or writes one file without a key.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn create_file_url(&self, machine: &MachineRef, body: &CreateFileUrl) -> Result<FileUrl, ClientError> {
        self.change(machine, "urls", body).await
    }

    /// Opens a tree as a tar stream. Only one that ends properly is whole.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn download_tree<'a>(&self, of: impl Into<FilesOf<'a>>, path: &'a str) -> Result<Download, ClientError> {
        let of = of.into();
        self.open_download(self.files(of, &["files", "tree"], [("path", path)]), of.patience()).await
    }

    /// Unpacks a tar stream below `path`. Never repeated. When it fails, what was unpacked before stays.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Source`] when the stream failed.
    pub async fn upload_tree<S>(
        &self,
        machine: &MachineRef,
        path: &str,
        upload: Upload<S>,
    ) -> Result<TreeWritten, ClientError>
    where
        S: Stream<Item = io::Result<Bytes>> + Send + 'static,
    {
        let query = [("createdAt", machine.created_at.as_str()), ("path", path)];
        let url = self.endpoint(&["v1", "machines", &machine.id, "files", "tree"], query);
        self.send_upload(url, "application/x-tar", upload).await
    }

    /// Watches a directory, or everything below it.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn watch_files(&self, machine: &MachineRef, path: &str, recursive: bool) -> Result<Watch, ClientError> {
        let recursive = if recursive { "true" } else { "false" };
        let query = [("createdAt", machine.created_at.as_str()), ("path", path), ("recursive", recursive)];
        let url = self.endpoint(&["v1", "machines", &machine.id, "files", "watch"], query);
        let wait = tokio::time::timeout(self.answer_timeout(), self.send(self.request(Method::GET, url)));
        let response = wait.await.map_err(|_| ClientError::StoppedWaiting)??;
        Ok(Watch { client: self.clone(), response, held: Vec::new() })
    }
}
