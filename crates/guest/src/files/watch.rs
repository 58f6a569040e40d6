//! Watching a directory, or everything below it: inotify, made into events a caller can use.
//!
//! inotify watches one directory each, so directories that appear are added as they are seen, and what they hold
//! already is told as created. Renames come as two halves and are put together. Whatever may have been missed (a queue
//! that ran over, more directories than are watched) is told as an overflow at the place it concerns.

mod nodes;

use std::collections::{HashSet, VecDeque};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use connectrpc::ConnectError;
use futures::Stream;
use mainbrella_guest_protocol::limits::{PAGE_BYTES, WATCH_DIRECTORIES_MAX, WATCH_EVENTS_MAX};
use mainbrella_guest_protocol::pb;
use pb::watch_event::Kind;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;
use tokio::sync::OwnedSemaphorePermit;

use super::{failed, failed_io, path_of};
use crate::service::blocking;
use nodes::Nodes;

/// How long the second half of a rename may take.
const OTHER_HALF: Duration = Duration::from_millis(50);
/// Events that are waiting to be sent before no more are read.
const QUEUE_SOFT: usize = 4 * WATCH_EVENTS_MAX;
/// Events that are waiting before a new directory's content is told as an overflow instead.
const QUEUE_HARD: usize = 16 * WATCH_EVENTS_MAX;
const READ_BYTES: usize = 16 * 1024;

const EVENTS: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::EXCL_UNLINK)
    .union(WatchFlags::ONLYDIR);

/// Watches `path`. The first message is empty: from then on everything is told.
pub(crate) async fn watch(
    path: Vec<u8>,
    recursive: bool,
    seat: OwnedSemaphorePermit,
) -> Result<impl Stream<Item = Result<pb::WatchEvents, ConnectError>> + Send + use<>, ConnectError> {
    let watcher = blocking(move || Watcher::new(path_of(&path)?, recursive)).await?;
    let ready = watcher.fd.try_clone().and_then(crate::port::watch).map_err(failed_io("watch"))?;
    let first = pb::WatchEvents::default();
    let rest = futures::stream::try_unfold((watcher, ready, seat), async |(mut watcher, ready, seat)| {
        loop {
            if let Some(events) = watcher.take() {
                return Ok(Some((events, (watcher, ready, seat))));
            }
            if watcher.ended {
                return Ok(None);
            }
            watcher = wait_and_read(watcher, &ready).await?;
        }
    });
    Ok(futures::StreamExt::chain(futures::stream::iter([Ok(first)]), rest))
}

async fn wait_and_read(mut watcher: Watcher, ready: &AsyncFd<OwnedFd>) -> Result<Watcher, ConnectError> {
    let wait = if watcher.half.is_some() { OTHER_HALF } else { Duration::MAX };
    let mut guard = match tokio::time::timeout(wait, ready.readable()).await {
        Ok(guard) => guard.map_err(failed_io("watch"))?,
        Err(_) => {
            watcher.flush_half();
            return Ok(watcher);
        }
    };
    let (watcher, drained) = blocking(move || {
        let drained = watcher.read()?;
        Ok((watcher, drained))
    })
    .await?;
    if drained {
        guard.clear_ready();
    }
    Ok(watcher)
}

/// The first half of a rename.
#[derive(Debug)]
struct Half {
    cookie: u32,
    parent: i32,
    name: Vec<u8>,
}

#[derive(Debug)]
struct Seen {
    wd: i32,
    what: ReadFlags,
    cookie: u32,
    name: Vec<u8>,
}

struct Watcher {
    fd: OwnedFd,
    root: PathBuf,
    device: u64,
    recursive: bool,
    nodes: Nodes,
    queue: VecDeque<pb::WatchEvent>,
    /// Told because a directory was looked through; inotify may tell them again.
    told: HashSet<PathBuf>,
    half: Option<Half>,
    ended: bool,
}

impl Watcher {
    fn new(root: PathBuf, recursive: bool) -> Result<Self, ConnectError> {
        let fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).map_err(failed("watch"))?;
        let wd = inotify::add_watch(&fd, &root, EVENTS).map_err(failed("watch"))?;
        let device = std::fs::metadata(&root).map_err(failed_io("stat"))?.dev();
        let mut watcher = Self {
            fd,
            root,
            device,
            recursive,
            nodes: Nodes::new(wd),
            queue: VecDeque::new(),
            told: HashSet::new(),
            half: None,
            ended: false,
        };
        if recursive {
            watcher.look_through(wd, false);
        }
        Ok(watcher)
    }

    /// The next message, if there is anything to tell.
    fn take(&mut self) -> Option<pb::WatchEvents> {
        let mut message = pb::WatchEvents::default();
        let mut bytes = 0;
        while message.events.len() < WATCH_EVENTS_MAX && bytes < PAGE_BYTES {
            let Some(event) = self.queue.pop_front() else { break };
            bytes += event.path.len() + event.new_path.len();
            message.events.push(event);
        }
        (!message.events.is_empty()).then_some(message)
    }

    fn path(&self, wd: i32, name: &[u8]) -> Option<PathBuf> {
        let mut path = self.nodes.path(wd, &self.root)?;
        if !name.is_empty() {
            path.push(std::ffi::OsStr::from_bytes(name));
        }
        Some(path)
    }

    fn tell(&mut self, kind: Kind, path: PathBuf, new_path: Option<PathBuf>) {
        let path = path.into_os_string().into_vec();
        let same = |last: &pb::WatchEvent| last.kind == kind && last.path == path;
        // A file written to in a thousand pieces is told once, until something else happens.
        let repeats = matches!(kind, Kind::KIND_MODIFIED | Kind::KIND_ATTRIBUTES | Kind::KIND_OVERFLOW);
        if repeats && self.queue.back().is_some_and(same) {
            return;
        }
        let new_path = new_path.map(|p| p.into_os_string().into_vec()).unwrap_or_default();
        self.queue.push_back(pb::WatchEvent { kind: kind.into(), path, new_path, ..Default::default() });
    }

    /// Watches what is below a watched directory. With `tell`, says what is there.
    fn look_through(&mut self, wd: i32, tell: bool) {
        let mut left = vec![wd];
        while let Some(wd) = left.pop() {
            let Some(dir) = self.path(wd, b"") else { continue };
            let Ok(entries) = std::fs::read_dir(&dir) else { continue };
            let mut tell = tell;
            for entry in entries.flatten() {
                let path = entry.path();
                if tell && self.queue.len() >= QUEUE_HARD {
                    tell = false;
                    self.tell(Kind::KIND_OVERFLOW, dir.clone(), None);
                }
                if tell && self.told.insert(path.clone()) {
                    self.tell(Kind::KIND_CREATED, path.clone(), None);
                }
                if entry.file_type().is_ok_and(|t| t.is_dir()) {
                    left.extend(self.add(wd, entry.file_name().as_bytes(), &path));
                }
            }
        }
    }

    /// Watches one more directory; `None` when it is gone, is watched already, or is another file system.
    fn add(&mut self, parent: i32, name: &[u8], path: &Path) -> Option<i32> {
        if std::fs::symlink_metadata(path).ok().filter(|m| m.is_dir())?.dev() != self.device {
            return None;
        }
        if self.nodes.len() >= WATCH_DIRECTORIES_MAX {
            self.tell(Kind::KIND_OVERFLOW, path.to_owned(), None);
            return None;
        }
        match inotify::add_watch(&self.fd, path, EVENTS | WatchFlags::DONT_FOLLOW) {
            Ok(wd) => self.nodes.insert(wd, parent, name).then_some(wd),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => None,
            Err(_) => {
                self.tell(Kind::KIND_OVERFLOW, path.to_owned(), None);
                None
            }
        }
    }

    /// Reads what has happened; true when that was all.
    fn read(&mut self) -> Result<bool, ConnectError> {
        let mut buffer = vec![MaybeUninit::uninit(); READ_BYTES];
        loop {
            let mut batch = Vec::new();
            let mut reader = inotify::Reader::new(&self.fd, &mut buffer);
            let drained = loop {
                match reader.next() {
                    Ok(event) => batch.push(Seen {
                        wd: event.wd(),
                        what: event.events(),
                        cookie: event.cookie(),
                        name: event.file_name().map(|n| n.to_bytes().to_vec()).unwrap_or_default(),
                    }),
                    Err(Errno::AGAIN) => break true,
                    Err(Errno::INTR) => {}
                    Err(errno) => return Err(failed("watch")(errno)),
                }
                if reader.is_buffer_empty() {
                    break false;
                }
            };
            for seen in batch {
                self.happened(seen);
                if self.ended {
                    return Ok(true);
                }
            }
            if drained {
                // What was told before it was read has been read by now.
                self.told.clear();
                return Ok(true);
            }
            if self.queue.len() >= QUEUE_SOFT {
                return Ok(false);
            }
        }
    }

    fn happened(&mut self, seen: Seen) {
        let Seen { wd, what, cookie, name } = seen;
        if what.contains(ReadFlags::QUEUE_OVERFLOW) {
            self.flush_half();
            self.tell(Kind::KIND_OVERFLOW, self.root.clone(), None);
            self.renew();
            return;
        }
        let second = what.contains(ReadFlags::MOVED_TO) && self.half.as_ref().is_some_and(|h| h.cookie == cookie);
        if !second {
            self.flush_half();
        }
        let is_root = wd == self.nodes.root();
        let gone = ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::UNMOUNT | ReadFlags::IGNORED;
        if what.intersects(gone) {
            if is_root {
                self.tell(Kind::KIND_ENDED, self.root.clone(), None);
                self.ended = true;
            } else if what.contains(ReadFlags::IGNORED) {
                self.nodes.remove(wd);
            }
            return;
        }
        let Some(path) = self.path(wd, &name) else { return };
        if name.is_empty() {
            // What happens to a directory itself is told by the one it is in; the root has only itself.
            if is_root && what.contains(ReadFlags::ATTRIB) {
                self.tell(Kind::KIND_ATTRIBUTES, path, None);
            }
            return;
        }
        let enter = self.recursive && what.contains(ReadFlags::ISDIR);
        if what.contains(ReadFlags::MOVED_FROM) {
            self.half = Some(Half { cookie, parent: wd, name });
        } else if what.contains(ReadFlags::MOVED_TO) {
            let half = self.half.take();
            let from = half.as_ref().and_then(|h| self.path(h.parent, &h.name));
            match (half, from) {
                (Some(half), Some(from)) => {
                    self.tell(Kind::KIND_RENAMED, from, Some(path.clone()));
                    let known = self.nodes.rename((half.parent, &half.name), (wd, &name));
                    if enter && !known {
                        self.enter(wd, &name, &path, false);
                    }
                }
                _ => {
                    if !self.told.remove(&path) {
                        self.tell(Kind::KIND_CREATED, path.clone(), None);
                    }
                    if enter {
                        self.enter(wd, &name, &path, true);
                    }
                }
            }
        } else if what.contains(ReadFlags::CREATE) {
            if !self.told.remove(&path) {
                self.tell(Kind::KIND_CREATED, path.clone(), None);
            }
            if enter {
                self.enter(wd, &name, &path, true);
            }
        } else if what.contains(ReadFlags::DELETE) {
            self.told.remove(&path);
            self.tell(Kind::KIND_REMOVED, path, None);
        } else if what.contains(ReadFlags::MODIFY) {
            self.tell(Kind::KIND_MODIFIED, path, None);
        } else if what.contains(ReadFlags::ATTRIB) {
            self.tell(Kind::KIND_ATTRIBUTES, path, None);
        }
    }

    fn enter(&mut self, parent: i32, name: &[u8], path: &Path, tell: bool) {
        if let Some(wd) = self.add(parent, name, path) {
            self.look_through(wd, tell);
        }
    }

    /// The other half of a rename did not come: it was moved out of what is watched.
    fn flush_half(&mut self) {
        let Some(half) = self.half.take() else { return };
        if let Some(path) = self.path(half.parent, &half.name) {
            self.tell(Kind::KIND_REMOVED, path, None);
        }
        for wd in self.nodes.remove_below(half.parent, &half.name) {
            let _ = inotify::remove_watch(&self.fd, wd);
        }
    }

    /// After a queue that ran over: which directories there are is found out anew.
    fn renew(&mut self) {
        let root = self.nodes.root();
        let before = std::mem::replace(&mut self.nodes, Nodes::new(root));
        if self.recursive {
            self.look_through(root, false);
        }
        for wd in before.watches().filter(|wd| !self.nodes.contains(*wd)) {
            let _ = inotify::remove_watch(&self.fd, wd);
        }
    }
}
