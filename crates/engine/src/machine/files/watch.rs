//! Watching a directory. The guest's stream is always read, so that a caller who does not keep up holds up nobody
//! else on the link; what does not fit the caller's queue becomes an overflow.

use std::sync::Arc;

use futures::StreamExt;
use futures::stream::BoxStream;
use mainbrella_guest_protocol::host::WatchStream;
use mainbrella_guest_protocol::limits::WATCH_EVENTS_MAX;
use mainbrella_guest_protocol::{GuestClient, GuestError, pb};
use mainbrella_types::{ErrorCode, limits};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use super::{FILE_DEADLINE, file_failed, too_slow};
use crate::error::EngineError;
use crate::machine::command::link_lost;
use crate::machine::handle::VERDICT_WAIT;
use crate::machine::link::{Link, silent};

/// Events that wait for a caller.
const QUEUE: usize = 256;
/// How often a watch is begun again after its link broke, in a row.
const LINK_LOSSES_MAX: u32 = 5;

/// What has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileEventKind {
    /// Something is there that was not.
    Created,
    /// The content of a file.
    Modified,
    /// Something is gone.
    Removed,
    /// It has another name.
    Renamed,
    /// Its mode, owner or times.
    Attributes,
    /// FileEvents at or below the path may have been missed.
    Overflow,
    /// The watched directory is gone; the last event.
    Ended,
}

/// A change in a watched directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileEvent {
    /// What.
    pub kind: FileEventKind,
    /// Where.
    pub path: Vec<u8>,
    /// The new name of what was renamed.
    pub new_path: Option<Vec<u8>>,
}

/// FileEvents as they happen. After an error, or after [`FileEventKind::Ended`], nothing follows.
pub type FileEvents = BoxStream<'static, Result<FileEvent, EngineError>>;

/// Takes a message of a watch.
fn changes(message: pb::WatchEvents) -> Result<Vec<FileEvent>, &'static str> {
    use pb::watch_event::Kind;
    if message.events.len() > WATCH_EVENTS_MAX {
        return Err("too many events at once");
    }
    let bad = |p: &[u8]| p.first() != Some(&b'/') || p.len() > limits::PATH_MAX || p.contains(&0);
    let mut all = Vec::with_capacity(message.events.len());
    for event in message.events {
        let kind = match event.kind.as_known() {
            Some(Kind::KIND_CREATED) => FileEventKind::Created,
            Some(Kind::KIND_MODIFIED) => FileEventKind::Modified,
            Some(Kind::KIND_REMOVED) => FileEventKind::Removed,
            Some(Kind::KIND_RENAMED) => FileEventKind::Renamed,
            Some(Kind::KIND_ATTRIBUTES) => FileEventKind::Attributes,
            Some(Kind::KIND_OVERFLOW) => FileEventKind::Overflow,
            Some(Kind::KIND_ENDED) => FileEventKind::Ended,
            // A newer guest may tell what we do not know.
            _ => continue,
        };
        let new_path = (kind == FileEventKind::Renamed).then_some(event.new_path);
        // What is too deep to be named is told where it can be.
        if event.path.len() > limits::PATH_MAX || new_path.as_ref().is_some_and(|p| p.len() > limits::PATH_MAX) {
            let mut path = event.path;
            path.truncate(path[..limits::PATH_MAX.min(path.len())].iter().rposition(|b| *b == b'/').unwrap_or(0));
            if bad(&path) {
                return Err("an event at no path");
            }
            all.push(FileEvent { kind: FileEventKind::Overflow, path, new_path: None });
            continue;
        }
        if bad(&event.path) || new_path.as_deref().is_some_and(bad) {
            return Err("an event at no path");
        }
        all.push(FileEvent { kind, path: event.path, new_path });
    }
    Ok(all)
}

/// A watch, and the connection it came over.
type Begun = (GuestClient, WatchStream);

async fn begin(link: &Link, path: &[u8], recursive: bool) -> Result<Begun, EngineError> {
    let client = link.client().await?;
    let request = pb::WatchTreeRequest { path: path.to_vec(), recursive, ..Default::default() };
    let begun = timeout(FILE_DEADLINE, async {
        let mut stream = client.streams().watch_tree(request).await.map_err(file_failed)?;
        match stream.message::<pb::WatchEvents>().await.map_err(file_failed)? {
            Some(first) if first.view().events.is_empty() => Ok((client.clone(), stream)),
            _ => Err(silent("a watch that did not begin as it should")),
        }
    });
    begun.await.map_err(|_| too_slow())?
}

/// Watches `path` until the caller lets go, the directory goes, or the machine is `gone`, which `ended` then puts in words.
pub(crate) async fn watch(
    link: Arc<Link>,
    seat: OwnedSemaphorePermit,
    path: Vec<u8>,
    recursive: bool,
    gone: CancellationToken,
    ended: impl Fn() -> EngineError + Send + 'static,
) -> Result<FileEvents, EngineError> {
    let begun = begin(&link, &path, recursive).await?;
    let (events, taken) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        let _seat = seat;
        let failure = tokio::select! {
            failure = follow(&link, begun, &path, recursive, &events) => failure,
            () = gone.cancelled() => Some(ended()),
            () = events.closed() => None,
        };
        let Some(mut failure) = failure else { return };
        if failure.code() == ErrorCode::GuestUnavailable && timeout(VERDICT_WAIT, gone.cancelled()).await.is_ok() {
            // The link broke because the machine ended: that is told.
            failure = ended();
        }
        let _ = events.send(Err(failure)).await;
    });
    Ok(ReceiverStream::new(taken).boxed())
}

/// Follows a watch over broken links; gives why it is over, `None` after its proper end.
async fn follow(
    link: &Link,
    (mut client, mut stream): Begun,
    path: &[u8],
    recursive: bool,
    events: &mpsc::Sender<Result<FileEvent, EngineError>>,
) -> Option<EngineError> {
    let mut queue = Queue { events, missed: false, root: path };
    let mut losses = 0;
    loop {
        let next = tokio::select! {
            next = stream.message::<pb::WatchEvents>() => next,
            () = queue.catch_up(), if queue.missed => continue,
        };
        match next {
            Ok(Some(message)) => {
                losses = 0;
                let changes = match changes(message.to_owned_message()) {
                    Ok(changes) => changes,
                    Err(why) => return Some(silent(why)),
                };
                for change in changes {
                    if change.kind == FileEventKind::Ended {
                        // The last one always finds its place.
                        if queue.missed {
                            queue.catch_up().await;
                        }
                        let _ = events.send(Ok(change)).await;
                        return None;
                    }
                    queue.put(change);
                }
            }
            Ok(None) => return Some(silent("a watch ended without its last event")),
            Err(e) => {
                losses += 1;
                if losses > LINK_LOSSES_MAX || !link_lost(&client, &GuestError::from_connect(&e)).await {
                    return Some(file_failed(e));
                }
                (client, stream) = match begin(link, path, recursive).await {
                    Ok(begun) => begun,
                    Err(e) => return Some(e),
                };
                queue.missed = true;
            }
        }
    }
}

struct Queue<'a> {
    events: &'a mpsc::Sender<Result<FileEvent, EngineError>>,
    /// Something did not fit, and that was not said yet.
    missed: bool,
    root: &'a [u8],
}

impl Queue<'_> {
    fn put(&mut self, change: FileEvent) {
        // What follows a gap is not told before the gap.
        if self.missed || self.events.try_send(Ok(change)).is_err() {
            self.missed = true;
        }
    }

    /// Says that something was missed, once there is room for it.
    async fn catch_up(&mut self) {
        if let Ok(place) = self.events.reserve().await {
            place.send(Ok(FileEvent { kind: FileEventKind::Overflow, path: self.root.to_vec(), new_path: None }));
        }
        self.missed = false;
    }
}

/// Any bytes as a message of a watch: what is passed on is bounded and names paths.
#[cfg(any(test, fuzzing))]
pub(crate) fn any_changes(bytes: &[u8]) {
    use buffa::Message as _;
    let Ok(message) = pb::WatchEvents::decode_from_slice(bytes) else { return };
    let Ok(all) = changes(message) else { return };
    assert!(all.len() <= WATCH_EVENTS_MAX);
    for c in all {
        assert!(c.path.starts_with(b"/") && c.path.len() <= limits::PATH_MAX && !c.path.contains(&0));
        assert_eq!(c.new_path.is_some(), c.kind == FileEventKind::Renamed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever a guest tells, what is passed on is bounded and names paths.
        #[test]
        fn events_are_bounded(list in proptest::collection::vec((-1i32..12, 0usize..9000, any::<bool>(), any::<u8>()), 0..300)) {
            let events: Vec<_> = list.into_iter().map(|(kind, length, absolute, byte)| {
                let mut path = vec![byte; length];
                if absolute && length > 0 {
                    path[0] = b'/';
                }
                pb::WatchEvent { kind: buffa::EnumValue::from(kind), new_path: path.clone(), path, ..Default::default() }
            }).collect();
            if let Ok(all) = changes(pb::WatchEvents { events, ..Default::default() }) {
                prop_assert!(all.len() <= WATCH_EVENTS_MAX);
                for c in all {
                    prop_assert!(c.path.starts_with(b"/") && c.path.len() <= limits::PATH_MAX && !c.path.contains(&0));
                    prop_assert_eq!(c.new_path.is_some(), c.kind == FileEventKind::Renamed);
                }
            }
        }

        #[test]
        fn any_bytes_can_be_decoded(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            use buffa::Message as _;
            if let Ok(message) = pb::WatchEvents::decode_from_slice(&bytes) {
                let _ = changes(message);
            }
        }
    }

    #[tokio::test]
    async fn what_does_not_fit_is_told_as_missed_and_in_its_place() {
        let (events, mut taken) = mpsc::channel(3);
        let mut queue = Queue { events: &events, missed: false, root: b"/w" };
        let change = |n: u8| FileEvent { kind: FileEventKind::Created, path: vec![b'/', n], new_path: None };
        for n in 0..10 {
            queue.put(change(b'0' + n));
        }
        assert!(queue.missed);
        let mut got = Vec::new();
        for _ in 0..3 {
            got.push(taken.recv().await.expect("an event").expect("no error").path);
        }
        queue.catch_up().await;
        queue.put(change(b'x'));
        let gap = taken.recv().await.expect("an event").expect("no error");
        assert_eq!((gap.kind, gap.path.as_slice()), (FileEventKind::Overflow, &b"/w"[..]));
        assert_eq!(taken.recv().await.expect("an event").expect("no error"), change(b'x'));
        assert_eq!(got, [b"/0", b"/1", b"/2"]);
    }
}
