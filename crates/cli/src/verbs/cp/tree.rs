//! `cp -r`: whole trees, as tar on the way.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use futures::StreamExt as _;
use indicatif::ProgressBar;
use mainbrella_client::api::FileType;
use mainbrella_client::{Client, ClientError, Download, Upload};
use mainbrella_tree::{Owners, PackOptions, Packer, TreeError, UnpackOptions, Unpacked, Unpacker};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::io::ReaderStream;

use super::{Copy, PIECE, pour, standard};
use crate::context::Files;
use crate::failure::{Exit, Failure};
use crate::values::{MachineArg, Place};

/// Pieces packed ahead.
const AHEAD: usize = 4;

/// What is unpacked here belongs to whoever unpacks, and takes no special bits.
const HERE: UnpackOptions = UnpackOptions { owners: Owners::Unpacker, mode_mask: 0o777, own_root: true };

fn failed(what: &str, e: &TreeError) -> Failure {
    match e.errno {
        Some(errno) => Failure::io(what, &errno.into()),
        None => Failure::new(Exit::Failed, "tree", format!("{what}: {}", e.text)),
    }
}

impl Copy<'_> {
    pub(super) async fn upload_tree(&self, from: Place, machine: &MachineArg, path: String) -> Result<(), Failure> {
        let local = match from {
            Place::Local(local) => local,
            _ => return self.upload_archive(machine, &path).await,
        };
        let what = format!("reading {}", local.display());
        let meta = std::fs::metadata(&local).map_err(|e| Failure::io(&what, &e))?;
        if !meta.is_dir() {
            return self.upload(Place::Local(local), machine, path).await;
        }
        let path = if path.ends_with('/') {
            let whole = std::fs::canonicalize(&local).map_err(|e| Failure::io(&what, &e))?;
            let name = whole.file_name().and_then(OsStr::to_str).ok_or_else(|| {
                Failure::usage("the name of the directory is not UTF-8; write the whole path in the machine")
            })?;
            format!("{path}{name}")
        } else {
            path
        };
        let options = PackOptions { follow: true, ..PackOptions::default() };
        let packer = Packer::open(rustix::fs::CWD, local.as_os_str().as_bytes(), options);
        let packer = packer.map_err(|e| failed(&what, &e))?;
        let client = self.context.client()?;
        let machine = self.context.resolve(&client, machine).await?;
        let bar = self.bar(None);
        let upload = Upload { bytes: packed(packer, bar.clone()), length: None };
        let written = client.upload_tree(&machine, &path, upload).await;
        bar.finish_and_clear();
        let written = written.map_err(|e| partly(e.into()))?;
        self.note_skipped(written.skipped);
        self.report_tree(written.entries, written.bytes, &format!("{}:{path}", machine.id))
    }

    /// Standard input is an archive already.
    async fn upload_archive(&self, machine: &MachineArg, path: &str) -> Result<(), Failure> {
        let client = self.context.client()?;
        let machine = self.context.resolve(&client, machine).await?;
        let bar = self.bar(None);
        let counted = bar.clone();
        let input = ReaderStream::with_capacity(standard(&io::stdin())?, PIECE).inspect(move |piece| {
            if let Ok(piece) = piece {
                counted.inc(piece.len() as u64);
            }
        });
        let written = client.upload_tree(&machine, path, Upload { bytes: input, length: None }).await;
        bar.finish_and_clear();
        let written = written.map_err(|e| partly(e.into()))?;
        self.note_skipped(written.skipped);
        self.report_tree(written.entries, written.bytes, &format!("{}:{path}", machine.id))
    }

    pub(super) async fn download_tree(
        &self,
        client: &Client,
        files: &Files,
        path: &str,
        to: Place,
    ) -> Result<(), Failure> {
        if client.stat_file(files.of(), path, true).await?.r#type != FileType::Directory {
            let target = self.download_target(path, &to)?;
            return self.download(client, files, path, target).await;
        }
        let target = match to {
            Place::Local(local) => tree_target(&local, path)?,
            _ if self.context.output.json => {
                return Err(Failure::usage("--json and the archive would mix on standard output"));
            }
            _ => {
                let download = client.download_tree(files.of(), path).await?;
                let bar = self.bar(None);
                let done = pour(download, &mut standard(&io::stdout())?, &bar, "writing to standard output").await;
                bar.finish_and_clear();
                return done.map(drop);
            }
        };
        let what = format!("writing {}", target.display());
        if target.symlink_metadata().is_ok() {
            if self.no_clobber {
                return Err(Failure::new(Exit::Conflict, "file_exists", format!("{} exists", target.display())));
            }
            if !target.is_dir() {
                return Err(Failure::usage(format!("{} is not a directory", target.display())));
            }
        }
        let download = client.download_tree(files.of(), path).await?;
        let bar = self.bar(None);
        let done = if target.is_dir() {
            let root = open(&target).map_err(|e| Failure::io(&what, &e))?;
            let options = UnpackOptions { own_root: false, ..HERE };
            unpack(download, root, options, &bar, &what).await.map_err(partly)
        } else {
            // A tree that is new stands under its name when it is whole.
            let half = HalfTree::beside(&target).map_err(|e| Failure::io(&what, &e))?;
            let root = open(&half.path).map_err(|e| Failure::io(&what, &e))?;
            let done = unpack(download, root, HERE, &bar, &what).await;
            match done {
                Ok(done) => half.put(&target).map(|()| done).map_err(|e| Failure::io(&what, &e)),
                Err(e) => Err(e),
            }
        };
        bar.finish_and_clear();
        let done = done?;
        self.note_skipped(done.skipped);
        self.report_tree(done.entries, done.bytes, &target.display().to_string())
    }

    pub(super) fn note_skipped(&self, skipped: u64) {
        if skipped > 0 {
            self.context.output.note(&format!("left out {skipped} devices and FIFOs"));
        }
    }

    pub(super) fn report_tree(&self, entries: u64, bytes: u64, place: &str) -> Result<(), Failure> {
        if self.context.output.json {
            self.context.output.json(&serde_json::json!({ "entries": entries, "bytes": bytes, "to": place }))?;
        } else if self.context.output.watched() && !self.quiet {
            let size = crate::output::size(bytes);
            self.context.output.note(&format!("{entries} entries, {size}, to {}", crate::output::printable(place)));
        }
        Ok(())
    }
}

pub(super) fn partly(mut e: Failure) -> Failure {
    if e.hint.is_empty() {
        e.hint = "What was copied before stays; copy again.".to_owned();
    }
    e
}

/// The local path a directory of the machine goes to.
fn tree_target(local: &Path, remote: &str) -> Result<PathBuf, Failure> {
    if !local.is_dir() && !local.as_os_str().as_bytes().ends_with(b"/") {
        return Ok(local.to_owned());
    }
    let name = remote.rsplit('/').find(|n| !n.is_empty() && *n != ".").filter(|n| *n != "..");
    name.map(|name| local.join(name))
        .ok_or_else(|| Failure::usage("the path in the machine has no name; write the whole name of the copy"))
}

fn open(path: &Path) -> io::Result<OwnedFd> {
    std::fs::File::open(path).map(OwnedFd::from)
}

/// An archive as it is packed, by a thread of its own.
fn packed(mut packer: Packer, bar: ProgressBar) -> ReceiverStream<io::Result<Bytes>> {
    let (pieces, taken) = tokio::sync::mpsc::channel(AHEAD);
    tokio::task::spawn_blocking(move || {
        loop {
            let piece = match packer.next(PIECE) {
                Ok(Some(piece)) => Ok(Bytes::from(piece)),
                Ok(None) => return,
                Err(e) => Err(e.errno.map_or_else(|| io::Error::other(e.text.clone()), io::Error::from)),
            };
            let (failed, length) = (piece.is_err(), piece.as_ref().map_or(0, Bytes::len));
            if pieces.blocking_send(piece).is_err() || failed {
                return;
            }
            bar.inc(length as u64);
        }
    });
    ReceiverStream::new(taken)
}

async fn unpack(
    mut from: Download,
    root: OwnedFd,
    options: UnpackOptions,
    bar: &ProgressBar,
    what: &str,
) -> Result<Unpacked, Failure> {
    let mut unpacker = Unpacker::new(root, options);
    let again = |e: ClientError| Failure::from(e).hint("The copy is incomplete; copy again.");
    while let Some(bytes) = from.chunk().await.map_err(again)? {
        unpacker.push(&bytes).map_err(|e| failed(what, &e))?;
        bar.inc(bytes.len() as u64);
    }
    unpacker.finish().map_err(|e| failed(what, &e))
}

/// A half-received tree, gone when it is dropped.
struct HalfTree {
    path: PathBuf,
}

impl HalfTree {
    fn beside(place: &Path) -> io::Result<Self> {
        let folder = match place.parent() {
            Some(p) if p.as_os_str().is_empty() => Path::new("."),
            Some(p) => p,
            None => return Err(io::ErrorKind::IsADirectory.into()),
        };
        let path = folder.join(format!(".mainbrella-{}", uuid::Uuid::new_v4().simple()));
        std::fs::create_dir(&path)?;
        Ok(Self { path })
    }

    fn put(self, place: &Path) -> io::Result<()> {
        let flags = rustix::fs::RenameFlags::NOREPLACE;
        rustix::fs::renameat_with(rustix::fs::CWD, &self.path, rustix::fs::CWD, place, flags).map_err(io::Error::from)
    }
}

impl Drop for HalfTree {
    fn drop(&mut self) {
        // After a rename there is nothing under this name any more. Directories may be closed to their owner.
        let folder = self.path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if let (Ok(dir), Some(name)) = (open(folder), self.path.file_name()) {
            let until = std::time::Instant::now() + std::time::Duration::from_secs(600);
            let _ = mainbrella_tree::remove(std::os::fd::AsFd::as_fd(&dir), name.as_bytes(), true, until);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_keeps_its_name_in_a_directory_and_takes_another_where_there_is_none() {
        let dir = tempfile::tempdir().expect("temp dir");
        let here = dir.path();
        assert_eq!(tree_target(here, "/srv/app/").ok(), Some(here.join("app")));
        assert_eq!(tree_target(&here.join("new"), "/srv/app").ok(), Some(here.join("new")));
        for nameless in ["/", "/srv/..", "/."] {
            assert!(tree_target(here, nameless).is_err(), "{nameless}");
        }
    }
}
