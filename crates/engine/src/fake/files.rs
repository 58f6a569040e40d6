//! Files of the scripted guest: a tree in memory. A directory is there when it was made or anything is in it.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use connectrpc::{ConnectError, InboundStream, ServiceStream};
use futures::StreamExt;
use mainbrella_guest_protocol::{fault, pb};
use pb::watch_event::Kind;
use tokio::sync::broadcast;

use super::guest::GuestFaults;

const CHUNK: usize = 64 * 1024;

#[derive(Clone, Debug)]
enum Node {
    File(Vec<u8>, u32),
    Directory(u32),
    /// An archive as it was sent, standing for the tree that would be there.
    Tree(Vec<u8>),
}

pub(super) struct FakeFiles {
    nodes: Mutex<BTreeMap<Vec<u8>, Node>>,
    changes: broadcast::Sender<pb::WatchEvent>,
    faults: Arc<GuestFaults>,
}

fn parent(path: &[u8]) -> &[u8] {
    match path.iter().rposition(|b| *b == b'/') {
        Some(at) => &path[..at],
        None => b"",
    }
}

fn describe(node: &Node) -> pb::FileStat {
    use pb::file_stat::Type;
    let (kind, size, mode) = match node {
        Node::File(data, mode) => (Type::TYPE_FILE, data.len() as u64, *mode),
        Node::Directory(mode) => (Type::TYPE_DIRECTORY, 0, *mode),
        Node::Tree(_) => (Type::TYPE_DIRECTORY, 0, 0o755),
    };
    pb::FileStat { r#type: kind.into(), size, mode, mtime_s: 1_790_000_000, ..Default::default() }
}

fn missing(stage: &'static str) -> ConnectError {
    fault(stage, libc::ENOENT, "no such file")
}

impl FakeFiles {
    pub(super) fn new(faults: Arc<GuestFaults>) -> Self {
        Self { nodes: Mutex::default(), changes: broadcast::channel(4096).0, faults }
    }

    /// Other files that begin as these are now.
    pub(super) fn forked(&self) -> Self {
        let files = Self::new(Arc::clone(&self.faults));
        files.lock().clone_from(&self.lock());
        files
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Vec<u8>, Node>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What every call begins with: nothing, as long as the guest is silent.
    async fn begin(&self) {
        while self.faults.mute_files.load(Ordering::SeqCst) {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    }

    fn tell(&self, kind: Kind, path: &[u8], new_path: &[u8]) {
        let event = pb::WatchEvent {
            kind: kind.into(),
            path: path.to_vec(),
            new_path: new_path.to_vec(),
            ..Default::default()
        };
        // Nobody may be watching.
        let _ = self.changes.send(event);
    }

    fn find(nodes: &BTreeMap<Vec<u8>, Node>, path: &[u8]) -> Option<Node> {
        let inside = [path.strip_suffix(b"/").unwrap_or(path), b"/"].concat();
        let implied = || nodes.keys().any(|k| k.starts_with(&inside)) || path == b"/";
        nodes.get(path).cloned().or_else(|| implied().then_some(Node::Directory(0o755)))
    }

    pub(super) async fn read(
        &self,
        request: pb::ReadFileRequest,
    ) -> Result<ServiceStream<pb::FileChunk>, ConnectError> {
        self.begin().await;
        let node = Self::find(&self.lock(), &request.path).ok_or_else(|| missing("open"))?;
        let stat = describe(&node);
        let Node::File(data, _) = node else { return Err(fault("open", libc::EISDIR, "a directory")) };
        let start = usize::try_from(request.offset).unwrap_or(usize::MAX).min(data.len());
        let length =
            if request.length == 0 { usize::MAX } else { usize::try_from(request.length).unwrap_or(usize::MAX) };
        let content = data[start..data.len().min(start.saturating_add(length))].to_vec();
        let first = pb::FileChunk { stat: stat.into(), ..Default::default() };
        let rest: Vec<_> =
            content.chunks(CHUNK).map(|part| pb::FileChunk { data: part.to_vec(), ..Default::default() }).collect();
        Ok(futures::stream::iter([first]).chain(futures::stream::iter(rest)).map(Ok).boxed())
    }

    pub(super) async fn write(
        &self,
        mut requests: InboundStream<pb::WriteFileRequest>,
    ) -> Result<pb::WriteFileResponse, ConnectError> {
        self.begin().await;
        let (mut start, mut data, mut whole) = (None, Vec::new(), false);
        while let Some(message) = requests.next().await {
            let message = message?.to_owned_message();
            if message.start.is_set() {
                start = Some((message.start.path.clone(), message.start.mode, message.start.exclusive));
            }
            data.extend_from_slice(&message.data);
            if self.faults.disk_full.load(Ordering::SeqCst) && !data.is_empty() {
                return Err(fault("write", libc::ENOSPC, "full"));
            }
            whole = message.finish;
        }
        let (path, mode, exclusive) = start.ok_or_else(|| fault("start", 0, "no start"))?;
        if !whole {
            return Err(fault("finish", 0, "the write was broken off"));
        }
        let mut nodes = self.lock();
        if exclusive && nodes.contains_key(&path) {
            return Err(fault("open", libc::EEXIST, "exists"));
        }
        let size = data.len() as u64;
        self.tell(Kind::KIND_CREATED, &path, b"");
        nodes.insert(path, Node::File(data, if mode == 0 { 0o644 } else { mode }));
        Ok(pb::WriteFileResponse { size, ..Default::default() })
    }

    pub(super) async fn stat(&self, path: &[u8]) -> Result<pb::FileStat, ConnectError> {
        self.begin().await;
        Self::find(&self.lock(), path).map(|n| describe(&n)).ok_or_else(|| missing("stat"))
    }

    pub(super) async fn list(
        &self,
        request: pb::ListDirRequest,
    ) -> Result<ServiceStream<pb::ListDirPage>, ConnectError> {
        self.begin().await;
        let nodes = self.lock();
        match Self::find(&nodes, &request.path) {
            None => return Err(missing("open")),
            Some(Node::File(..)) => return Err(fault("open", libc::ENOTDIR, "not a directory")),
            Some(_) => {}
        }
        let inside = [request.path.strip_suffix(b"/").unwrap_or(&request.path), b"/"].concat();
        let mut names: Vec<Vec<u8>> = nodes
            .keys()
            .filter_map(|k| k.strip_prefix(inside.as_slice())?.split(|b| *b == b'/').next().map(<[u8]>::to_vec))
            .filter(|n| !n.is_empty())
            .collect();
        names.sort();
        names.dedup();
        let (offset, limit) = (request.offset as usize, request.limit as usize);
        let more = names.len() > offset + limit;
        let entry = |name: Vec<u8>| {
            let stat = Self::find(&nodes, &[inside.as_slice(), &name].concat()).map(|n| describe(&n));
            pb::DirEntry { name, stat: stat.unwrap_or_default().into(), ..Default::default() }
        };
        let mut entries: Vec<_> = names.into_iter().skip(offset).take(limit).map(entry).collect();
        if self.faults.hostile_listing.load(Ordering::SeqCst) {
            entries.push(pb::DirEntry {
                name: b"../escape".to_vec(),
                stat: pb::FileStat::default().into(),
                ..Default::default()
            });
        }
        let pages: Vec<_> = entries
            .chunks(100)
            .map(|part| pb::ListDirPage { entries: part.to_vec(), more, ..Default::default() })
            .collect();
        Ok(futures::stream::iter(pages).map(Ok).boxed())
    }

    pub(super) async fn make_dir(&self, request: pb::MakeDirRequest) -> Result<pb::FileStat, ConnectError> {
        self.begin().await;
        let mut nodes = self.lock();
        match Self::find(&nodes, &request.path) {
            Some(there @ Node::Directory(_)) if request.recursive => return Ok(describe(&there)),
            Some(_) => return Err(fault("mkdir", libc::EEXIST, "exists")),
            None => {}
        }
        let above = parent(&request.path);
        if !request.recursive && !above.is_empty() && Self::find(&nodes, above).is_none() {
            return Err(missing("open"));
        }
        let node = Node::Directory(request.mode);
        let stat = describe(&node);
        self.tell(Kind::KIND_CREATED, &request.path, b"");
        nodes.insert(request.path, node);
        Ok(stat)
    }

    pub(super) async fn rename(&self, request: pb::RenameRequest) -> Result<pb::FileStat, ConnectError> {
        self.begin().await;
        let mut nodes = self.lock();
        let node = Self::find(&nodes, &request.source).ok_or_else(|| missing("rename"))?;
        if Self::find(&nodes, &request.destination).is_some() {
            return Err(fault("rename", libc::EEXIST, "exists"));
        }
        let inside = [request.source.as_slice(), b"/"].concat();
        let moved: Vec<Vec<u8>> =
            nodes.keys().filter(|k| **k == request.source || k.starts_with(&inside)).cloned().collect();
        for path in moved {
            if let Some(node) = nodes.remove(&path) {
                nodes.insert([request.destination.as_slice(), &path[request.source.len()..]].concat(), node);
            }
        }
        self.tell(Kind::KIND_RENAMED, &request.source, &request.destination);
        Ok(describe(&node))
    }

    pub(super) async fn chmod(&self, request: pb::ChmodRequest) -> Result<pb::FileStat, ConnectError> {
        self.begin().await;
        let mut nodes = self.lock();
        let mut node = Self::find(&nodes, &request.path).ok_or_else(|| missing("chmod"))?;
        if let Node::File(_, mode) | Node::Directory(mode) = &mut node {
            *mode = request.mode;
        }
        let stat = describe(&node);
        self.tell(Kind::KIND_ATTRIBUTES, &request.path, b"");
        nodes.insert(request.path, node);
        Ok(stat)
    }

    pub(super) async fn remove(&self, request: pb::RemoveRequest) -> Result<pb::RemoveResponse, ConnectError> {
        self.begin().await;
        let mut nodes = self.lock();
        if Self::find(&nodes, &request.path).is_none() {
            return Err(missing("remove"));
        }
        let inside = [request.path.as_slice(), b"/"].concat();
        let mut doomed: Vec<Vec<u8>> =
            nodes.keys().filter(|k| **k == request.path || k.starts_with(&inside)).cloned().collect();
        if !request.recursive && doomed.iter().any(|p| *p != request.path) {
            return Err(fault("remove", libc::ENOTEMPTY, "not empty"));
        }
        doomed.reverse();
        let mut answer = pb::RemoveResponse::default();
        for path in doomed {
            // What has such a name stays, and so does all it is in.
            let stubborn = path.ends_with(b"immutable")
                || answer.remaining.iter().any(|left| left.starts_with(&[path.as_slice(), b"/"].concat()));
            if stubborn {
                answer.errno = libc::EPERM;
                answer.remaining_count += 1;
                answer.remaining.push(path);
            } else {
                self.tell(Kind::KIND_REMOVED, &path, b"");
                nodes.remove(&path);
                answer.removed += 1;
            }
        }
        Ok(answer)
    }

    pub(super) async fn pack(&self, path: &[u8]) -> Result<ServiceStream<pb::TreeChunk>, ConnectError> {
        self.begin().await;
        let Some(Node::Tree(archive)) = Self::find(&self.lock(), path) else { return Err(missing("open")) };
        let broken = self.faults.broken_tree.load(Ordering::SeqCst);
        let chunks: Vec<_> =
            archive.chunks(CHUNK).map(|data| Ok(pb::TreeChunk { data: data.to_vec(), ..Default::default() })).collect();
        let end = broken.then(|| Err(fault("changed", 0, "a file became shorter")));
        Ok(futures::stream::iter(chunks.into_iter().chain(end)).boxed())
    }

    pub(super) async fn unpack(
        &self,
        mut requests: InboundStream<pb::UnpackTreeRequest>,
    ) -> Result<pb::UnpackTreeResponse, ConnectError> {
        self.begin().await;
        let (mut path, mut archive, mut whole) = (None, Vec::new(), false);
        while let Some(message) = requests.next().await {
            let message = message?.to_owned_message();
            if message.start.is_set() {
                path = Some(message.start.path.clone());
            }
            archive.extend_from_slice(&message.data);
            if archive.starts_with(b"evil") {
                return Err(fault("name", 0, "a name in the archive has `..` in it"));
            }
            whole = message.finish;
        }
        let path = path.filter(|_| whole).ok_or_else(|| ConnectError::aborted("the archive was broken off"))?;
        let bytes = archive.len() as u64;
        self.lock().insert(path, Node::Tree(archive));
        Ok(pb::UnpackTreeResponse { entries: 1, bytes, ..Default::default() })
    }

    pub(super) async fn watch(
        &self,
        request: pb::WatchTreeRequest,
    ) -> Result<ServiceStream<pb::WatchEvents>, ConnectError> {
        self.begin().await;
        if matches!(Self::find(&self.lock(), &request.path), None | Some(Node::File(..))) {
            return Err(missing("watch"));
        }
        let changes = self.changes.subscribe();
        let top = request.path.strip_suffix(b"/").unwrap_or(&request.path).to_vec();
        let start = (changes, top, request.recursive, true);
        let events = futures::stream::unfold(Some(start), |state| async move {
            let (mut changes, top, recursive, first) = state?;
            if first {
                return Some((Ok(pb::WatchEvents::default()), Some((changes, top, recursive, false))));
            }
            loop {
                let event = match changes.recv().await {
                    Ok(event) => event,
                    Err(broadcast::error::RecvError::Lagged(_)) => pb::WatchEvent {
                        kind: Kind::KIND_OVERFLOW.into(),
                        path: if top.is_empty() { b"/".to_vec() } else { top.clone() },
                        ..Default::default()
                    },
                    Err(broadcast::error::RecvError::Closed) => return None,
                };
                let inside = |path: &[u8]| {
                    path.strip_prefix(top.as_slice())
                        .and_then(|rest| rest.strip_prefix(b"/"))
                        .is_some_and(|rest| recursive || !rest.contains(&b'/'))
                };
                let ended = event.kind == Kind::KIND_REMOVED && event.path == top;
                let message = |event| pb::WatchEvents { events: vec![event], ..Default::default() };
                if ended {
                    let last = pb::WatchEvent { kind: Kind::KIND_ENDED.into(), path: top, ..Default::default() };
                    return Some((Ok(message(last)), None));
                }
                if event.kind == Kind::KIND_OVERFLOW || inside(&event.path) || inside(&event.new_path) {
                    return Some((Ok(message(event)), Some((changes, top, recursive, false))));
                }
            }
        });
        Ok(events.boxed())
    }
}
