//! Snapshots, and the workspace of a machine as an archive.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use reqwest::Method;

use mainbrella_api::{
    RestoreSnapshot, SaveSnapshot, Snapshot, SnapshotKind, SnapshotList, TreeWritten, UpdateSnapshot, headers,
};

use crate::error::ClientError;
use crate::files::{Download, FilesOf, Upload};
use crate::machines::{Created, MachineRef};
use crate::transport::{Client, with_json};

/// How long a save or a restore may take beyond the usual wait: memory and disks are written.
const SAVE: Duration = Duration::from_secs(360);

/// Which snapshots to list.
#[derive(Clone, Debug, Default)]
pub struct SnapshotFilter {
    /// Only of this kind.
    pub kind: Option<SnapshotKind>,
    /// Only those that were put aside, or only the others.
    pub archived: Option<bool>,
    /// Only of exactly this name.
    pub name: Option<String>,
    /// Snapshots a page; the service's default when `None`.
    pub limit: Option<u32>,
}

impl Client {
    /// Saves a machine: one request, no repetition.
    ///
    /// # Errors
    /// [`ClientError`]. When it is ambiguous, send the same body with the same key again.
    pub async fn save(&self, machine: &MachineRef, body: &SaveSnapshot, key: &str) -> Result<Snapshot, ClientError> {
        let request = self.request(Method::POST, self.bound(machine, &["snapshots"]));
        self.json(with_json(request.header(headers::IDEMPOTENCY_KEY, key), body), SAVE).await
    }

    /// Starts a machine from a snapshot: one request, no repetition.
    ///
    /// # Errors
    /// [`ClientError`]. When it is ambiguous, send the same body with the same key again.
    pub async fn restore(&self, id: &str, body: &RestoreSnapshot, key: &str) -> Result<Created, ClientError> {
        let request = self.request(Method::POST, self.endpoint(&["v1", "snapshots", id, "restore"], []));
        let request = request.header(headers::IDEMPOTENCY_KEY, key).timeout(self.answer_timeout() + SAVE);
        let response = self.send(with_json(request, body)).await?;
        let replayed = response.headers().get(headers::IDEMPOTENCY_REPLAYED).is_some_and(|v| v == "true");
        Ok(Created { machine: self.parse(response).await?, replayed })
    }

    /// One page of snapshots, newest first. `cursor`: the `next_cursor` of the page before.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn snapshots(&self, filter: &SnapshotFilter, cursor: Option<&str>) -> Result<SnapshotList, ClientError> {
        let limit = filter.limit.map(|n| n.to_string());
        let query = (filter.kind.map(|kind| ("kind", kind.as_str())).into_iter())
            .chain(filter.archived.map(|archived| ("archived", if archived { "true" } else { "false" })))
            .chain(filter.name.as_deref().map(|name| ("name", name)))
            .chain(limit.as_deref().map(|n| ("limit", n)))
            .chain(cursor.map(|c| ("cursor", c)));
        let url = self.endpoint(&["v1", "snapshots"], query);
        self.json(self.request(Method::GET, url), Duration::ZERO).await
    }

    /// A snapshot.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn snapshot(&self, id: &str) -> Result<Snapshot, ClientError> {
        let url = self.endpoint(&["v1", "snapshots", id], []);
        self.json(self.request(Method::GET, url), Duration::ZERO).await
    }

    /// Renames a snapshot, or puts it aside.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn update_snapshot(&self, id: &str, body: &UpdateSnapshot) -> Result<Snapshot, ClientError> {
        let url = self.endpoint(&["v1", "snapshots", id], []);
        self.json(with_json(self.request(Method::PATCH, url), body), Duration::ZERO).await
    }

    /// Deletes a snapshot.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn delete_snapshot(&self, id: &str) -> Result<(), ClientError> {
        let request = self.request(Method::DELETE, self.endpoint(&["v1", "snapshots", id], []));
        self.send(request.timeout(self.answer_timeout())).await.map(drop)
    }

    /// Opens the workspace of a machine or a snapshot as a gzip tar stream. Only one that ends properly is whole.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn export_workspace<'a>(&self, of: impl Into<FilesOf<'a>>) -> Result<Download, ClientError> {
        let of = of.into();
        self.open_download(self.files(of, &["workspace"], []), of.patience()).await
    }

    /// Unpacks a tar stream, packed with gzip or not, into the workspace. Never repeated. When it fails, what was unpacked before stays.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Source`] when the stream failed.
    pub async fn import_workspace<S>(&self, machine: &MachineRef, upload: Upload<S>) -> Result<TreeWritten, ClientError>
    where
        S: Stream<Item = io::Result<Bytes>> + Send + 'static,
    {
        self.send_upload(self.bound(machine, &["workspace"]), "application/gzip", upload).await
    }
}
