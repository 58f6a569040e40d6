//! `COPY` and `WORKDIR`: what goes where in a machine, as a tar stream with owners.

use std::io::{self, Read};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use mainbrella_recipe::{Context, Copy, CopyEntry, EntryKind};
use mainbrella_tree::{Archive, Meta};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;

use crate::failure::{Failure, Reason};
use crate::ground::{Machine, NodeKind};
use crate::names::{self, Owner};

/// Size of a piece of the stream, bytes.
const PIECE: usize = 128 * 1024;
/// Permissions of folders that nobody named.
const FOLDER: u32 = 0o755;

/// A folder that is there, and those below it that are to be made.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    root: String,
    missing: Vec<String>,
}

/// Where `dir`, an absolute path, begins to be missing.
async fn place(machine: &dyn Machine, dir: &str) -> Result<Place, Failure> {
    let mut root = dir.to_owned();
    let mut missing = Vec::new();
    loop {
        match machine.look(&root).await.map_err(|e| Failure::of(Reason::Step, &e))? {
            Some(node) if node.kind == NodeKind::Directory => break,
            Some(_) => return Err(Failure::new(Reason::Step, format!("{root} in the machine is not a directory"))),
            None if root == "/" => return Err(Failure::new(Reason::Machine, "the machine has no root directory")),
            None => {}
        }
        let (above, name) = split(&root);
        missing.insert(0, name);
        root = above;
    }
    Ok(Place { root, missing })
}

/// What is above an absolute path, and its last name.
fn split(path: &str) -> (String, String) {
    let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
    (if above.is_empty() { "/".to_owned() } else { above.to_owned() }, name.to_owned())
}

impl Place {
    /// Appends the folders that are missing; what everything else begins with.
    fn make(&self, archive: &mut Archive, owner: Owner, mtime: i64) -> String {
        let mut path = String::new();
        for name in &self.missing {
            path.push_str(name);
            archive.directory(&path, Meta { mode: FOLDER, uid: owner.uid, gid: owner.gid, mtime });
            path.push('/');
        }
        path
    }
}

fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() as i64)
}

/// Makes a directory, and those above it, if they are missing.
pub(crate) async fn workdir(machine: &dyn Machine, path: &str, user: Option<&str>) -> Result<(), Failure> {
    let place = place(machine, path).await?;
    if place.missing.is_empty() {
        return Ok(());
    }
    let owner = names::owner(machine, user).await?;
    let mut archive = Archive::default();
    place.make(&mut archive, owner, now());
    archive.end();
    let piece: io::Result<Bytes> = Ok(archive.take().into());
    let unpacked = machine.unpack(&place.root, futures::stream::iter([piece]).boxed()).await;
    unpacked.map_err(|e| Failure::of(Reason::Step, &e))
}

/// Copies what was planned.
pub(crate) async fn copy(machine: &dyn Machine, context: &Arc<Context>, copy: &Copy) -> Result<(), Failure> {
    let owner = names::owner(machine, copy.owner.as_deref()).await?;
    // One file without a `/` behind its destination goes there, or into it where it is a directory.
    let (place, name) = if copy.into {
        (place(machine, &copy.to).await?, None)
    } else {
        let there = machine.look(&copy.to).await.map_err(|e| Failure::of(Reason::Step, &e))?;
        let from = copy.entries.first().map_or("", |one| one.from.as_str());
        match there {
            Some(node) if node.kind == NodeKind::Directory => {
                (Place { root: copy.to.clone(), missing: Vec::new() }, Some(split(from).1))
            }
            _ => {
                let (above, name) = split(&copy.to);
                (place(machine, &above).await?, Some(name))
            }
        }
    };
    let root = place.root.clone();
    let (stream, fault) = stream(Arc::clone(context), copy.clone(), place, name, owner);
    match machine.unpack(&root, stream).await {
        Ok(()) => Ok(()),
        Err(e) => {
            // What went wrong on this side came first.
            let ours = fault.lock().unwrap_or_else(PoisonError::into_inner).take();
            Err(ours.map_or_else(|| Failure::of(Reason::Step, &e), |text| Failure::new(Reason::Context, text)))
        }
    }
}

type Fault = Arc<Mutex<Option<String>>>;

/// The planned entries; the first fault ends the stream with an error.
fn stream(
    context: Arc<Context>,
    copy: Copy,
    place: Place,
    name: Option<String>,
    owner: Owner,
) -> (BoxStream<'static, io::Result<Bytes>>, Fault) {
    let fault = Fault::default();
    let (sender, receiver) = mpsc::channel::<io::Result<Bytes>>(4);
    let told = Arc::clone(&fault);
    tokio::task::spawn_blocking(move || {
        let mut out = Out { archive: Archive::default(), sender };
        let mtime = now();
        let prefix = place.make(&mut out.archive, owner, mtime);
        for one in &copy.entries {
            let to = format!("{prefix}{}", name.as_deref().unwrap_or(&one.to));
            let meta = Meta { mode: copy.mode.unwrap_or(one.entry.mode), uid: owner.uid, gid: owner.gid, mtime };
            match out.entry(&context, one, &to, meta) {
                Ok(true) => {}
                // Nobody takes it any more.
                Ok(false) => return,
                Err(text) => {
                    *told.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
                    let _ = out.sender.blocking_send(Err(io::Error::other("the context has changed")));
                    return;
                }
            }
        }
        out.archive.end();
        out.flush(0);
    });
    let stream = futures::stream::unfold(receiver, |mut receiver| async move {
        let piece = receiver.recv().await?;
        Some((piece, receiver))
    });
    (stream.boxed(), fault)
}

struct Out {
    archive: Archive,
    sender: mpsc::Sender<io::Result<Bytes>>,
}

impl Out {
    /// Hands over what waits, once it is `most`; false when nobody takes it.
    fn flush(&mut self, most: usize) -> bool {
        self.archive.waiting() <= most || self.sender.blocking_send(Ok(self.archive.take().into())).is_ok()
    }

    fn entry(&mut self, context: &Context, one: &CopyEntry, to: &str, meta: Meta) -> Result<bool, String> {
        match &one.entry.kind {
            EntryKind::Directory => self.archive.directory(to, meta),
            EntryKind::Link { target } => self.archive.link(to, target, meta),
            EntryKind::File { bytes } => return self.file(context, one, *bytes, to, meta),
            EntryKind::Other => {}
        }
        Ok(self.flush(PIECE))
    }

    fn file(&mut self, context: &Context, one: &CopyEntry, size: u64, to: &str, meta: Meta) -> Result<bool, String> {
        let changed = || format!("`{}` in the context changed while the build was under way", one.from);
        let mut file = context.read(&one.from).map_err(|_| changed())?;
        let seen = file.metadata().map_err(|_| changed())?;
        let mtime = seen.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
        let mtime = mtime.map_or(meta.mtime, |d| d.as_secs() as i64);
        self.archive.file(to, size, Meta { mtime, ..meta });
        let mut hash = Sha256::new();
        let mut left = size;
        let mut buffer = vec![0; PIECE];
        while left > 0 {
            let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            match file.read(&mut buffer[..most]) {
                Ok(0) => return Err(changed()),
                Ok(n) => {
                    hash.update(&buffer[..n]);
                    self.archive.content(&buffer[..n]);
                    left -= n as u64;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(changed()),
            }
            // The last bytes are held back until it is known that they are the right ones.
            if left > 0 && !self.flush(PIECE) {
                return Ok(false);
            }
        }
        let longer = !matches!(file.read(&mut buffer[..1]), Ok(0));
        if longer || one.digest.as_deref() != Some(hex::encode(hash.finalize()).as_str()) {
            return Err(changed());
        }
        self.archive.pad(size);
        Ok(self.flush(PIECE))
    }
}
