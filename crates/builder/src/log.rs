//! The log of a build: numbered lines in a file, read from any number.
//!
//! One writer and any number of readers. Output beyond a limit is left out, and the log says so once; steps, notices and the
//! end are always kept. What a crash tore off the last line is cut when the log is opened again.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use mainbrella_types::limits::{BUILD_LINE_BYTES_MAX, BUILD_LOG_BYTES_MAX};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

pub use crate::ground::Output as OutputStream;
use crate::record::BuildState;

const FILE: &str = "log";
/// Longest line of the file: text as JSON is at most six times as long, and then some for the rest.
const RECORD_MAX: u64 = BUILD_LINE_BYTES_MAX as u64 * 6 + 64 * 1024;
/// Room beyond the limit of output for what is always kept.
const MESSAGE_MAX: usize = 8 * 1024;

/// What an event tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum EventKind {
    /// A step begins, or is passed over because its result is cached.
    Step {
        /// Which, from 1.
        step: u32,
        /// Of how many.
        steps: u32,
        /// The line of the recipe, from 1.
        line: u64,
        /// The instruction.
        text: String,
        /// Nothing is done: its result is cached.
        cached: bool,
    },
    /// A line that the command of a step wrote.
    Output {
        /// Where.
        stream: OutputStream,
        /// The line, without its end.
        text: String,
    },
    /// Something that is worth knowing.
    Notice {
        /// What.
        text: String,
    },
    /// The build is over. Always the last.
    Done {
        /// How it ended.
        state: BuildState,
        /// The version it became.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        template: Option<String>,
        /// Why it failed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        failure: Option<crate::failure::Failure>,
    },
}

/// An event of a build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    /// Its number, from 1, without gaps.
    pub sequence: u64,
    /// When, milliseconds since 1970.
    pub at_ms: i64,
    /// What.
    #[serde(flatten)]
    pub kind: EventKind,
}

#[derive(Debug)]
struct Writer {
    file: File,
    sequence: u64,
    bytes: u64,
    full: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Log {
    path: PathBuf,
    most: u64,
    writer: Mutex<Writer>,
    /// The number of the last event, and whether it is the last of all.
    progress: watch::Sender<(u64, bool)>,
}

impl Log {
    /// Opens the log of the build in `dir`, which may be new.
    pub(crate) fn open(dir: &Path) -> io::Result<Arc<Self>> {
        Self::open_with(dir, BUILD_LOG_BYTES_MAX)
    }

    fn open_with(dir: &Path, most: u64) -> io::Result<Arc<Self>> {
        let path = dir.join(FILE);
        let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path)?;
        let mut reader = BufReader::new(&file);
        let (mut end, mut sequence, mut over) = (0, 0, false);
        let mut line = Vec::new();
        while let Some(event) = next(&mut reader, &mut line)? {
            end += line.len() as u64;
            sequence = event.sequence;
            over = matches!(event.kind, EventKind::Done { .. });
        }
        file.set_len(end)?;
        (&file).seek(SeekFrom::Start(end))?;
        let writer = Writer { file, sequence, bytes: end, full: end > most };
        Ok(Arc::new(Self { path, most, writer: Mutex::new(writer), progress: watch::channel((sequence, over)).0 }))
    }

    /// Appends an event. What cannot be written is left out; the end is always told to readers.
    pub(crate) fn append(&self, at_ms: i64, kind: EventKind) {
        let over = matches!(kind, EventKind::Done { .. });
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let output = matches!(kind, EventKind::Output { .. });
        let kind = if output && (writer.full || writer.bytes > self.most) {
            if std::mem::replace(&mut writer.full, true) {
                return;
            }
            EventKind::Notice { text: format!("more output than {} bytes: the rest is left out", self.most) }
        } else {
            kind
        };
        let event = Event { sequence: writer.sequence + 1, at_ms, kind: bounded(kind) };
        let written = serde_json::to_vec(&event).map_err(io::Error::from).and_then(|mut line| {
            line.push(b'\n');
            writer.file.write_all(&line).map(|()| line.len() as u64)
        });
        match written {
            Ok(bytes) => {
                writer.bytes += bytes;
                writer.sequence += 1;
            }
            Err(e) => {
                tracing::warn!(error = %e, "a line of a build's log could not be written");
                // Half a line would hide what follows it.
                let end = writer.bytes;
                let _ = writer.file.set_len(end).and_then(|()| writer.file.seek(SeekFrom::Start(end)));
            }
        }
        let last = writer.sequence;
        self.progress.send_modify(|p| *p = (last, p.1 || over));
    }

    /// Events after number `after`.
    pub(crate) fn read(self: &Arc<Self>, after: u64) -> LogReader {
        LogReader { log: Arc::clone(self), progress: self.progress.subscribe(), after, offset: 0 }
    }

    /// Whether its last event is there.
    pub(crate) fn is_over(&self) -> bool {
        self.progress.borrow().1
    }

    /// The number of the last event.
    pub(crate) fn last(&self) -> u64 {
        self.progress.borrow().0
    }
}

fn bounded(mut kind: EventKind) -> EventKind {
    let text = match &mut kind {
        EventKind::Step { text, .. } | EventKind::Notice { text } => Some(text),
        EventKind::Done { failure: Some(failure), .. } => Some(&mut failure.message),
        _ => None,
    };
    if let Some(text) = text
        && text.len() > MESSAGE_MAX
    {
        let end = (0..=MESSAGE_MAX).rev().find(|n| text.is_char_boundary(*n)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    kind
}

/// The next whole line; `line` holds its bytes.
fn next(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<Option<Event>> {
    line.clear();
    let n = reader.take(RECORD_MAX).read_until(b'\n', line)?;
    if n == 0 || line.last() != Some(&b'\n') {
        return Ok(None);
    }
    // What is no event was torn: nothing after it can be trusted.
    Ok(serde_json::from_slice(line).ok())
}

/// Reads a build's log. What it holds is one page.
#[derive(Clone, Debug)]
pub struct LogReader {
    log: Arc<Log>,
    progress: watch::Receiver<(u64, bool)>,
    after: u64,
    offset: u64,
}

impl LogReader {
    /// The next events there are already, at most `count` of them.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub async fn page(&mut self, count: usize) -> io::Result<Vec<Event>> {
        let (path, after, offset, last) = (self.log.path.clone(), self.after, self.offset, self.log.last());
        let read = tokio::task::spawn_blocking(move || {
            let mut file = File::open(path)?;
            file.seek(SeekFrom::Start(offset))?;
            let mut reader = BufReader::new(file);
            let (mut events, mut offset, mut line) = (Vec::new(), offset, Vec::new());
            while events.len() < count {
                // What is being appended just now is not whole yet.
                let Some(event) = next(&mut reader, &mut line)?.filter(|e| e.sequence <= last) else { break };
                offset += line.len() as u64;
                if event.sequence > after {
                    events.push(event);
                }
            }
            io::Result::Ok((events, offset))
        });
        let (events, offset) = read.await.map_err(io::Error::other)??;
        self.offset = offset;
        self.after = events.last().map_or(self.after, |e| e.sequence);
        Ok(events)
    }

    /// The next events, waiting for the first of them; none when there are no more.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub async fn next(&mut self, count: usize) -> io::Result<Vec<Event>> {
        loop {
            let (last, over) = *self.progress.borrow_and_update();
            if last > self.after {
                let events = self.page(count).await?;
                if !events.is_empty() {
                    return Ok(events);
                }
            }
            if over || self.progress.changed().await.is_err() {
                return Ok(Vec::new());
            }
        }
    }

    /// The number of the last event given.
    #[must_use]
    pub fn cursor(&self) -> u64 {
        self.after
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(text: &str) -> EventKind {
        EventKind::Output { stream: OutputStream::Stdout, text: text.to_owned() }
    }

    fn done() -> EventKind {
        EventKind::Done { state: BuildState::Succeeded, template: None, failure: None }
    }

    #[tokio::test]
    async fn events_are_read_from_any_number_and_followed_to_the_end() {
        let dir = tempfile::tempdir().expect("a folder");
        let log = Log::open(dir.path()).expect("opened");
        for n in 0..5 {
            log.append(n, output(&n.to_string()));
        }
        let mut reader = log.read(3);
        let page = reader.next(1).await.expect("read");
        assert_eq!((page[0].sequence, &page[0].kind), (4, &output("3")));
        let follow = tokio::spawn(async move {
            let mut all = Vec::new();
            loop {
                let page = reader.next(10).await.expect("read");
                if page.is_empty() {
                    return all;
                }
                all.extend(page.into_iter().map(|e| e.sequence));
            }
        });
        tokio::task::yield_now().await;
        log.append(9, done());
        assert_eq!(follow.await.expect("ended"), [5, 6]);
        // Whoever comes when it is over gets all of it and an end.
        let mut reader = Log::open(dir.path()).expect("opened").read(0);
        assert_eq!(reader.next(100).await.expect("read").len(), 6);
        assert!(reader.next(100).await.expect("read").is_empty());
    }

    #[test]
    fn what_was_torn_is_cut_and_numbers_go_on() {
        let dir = tempfile::tempdir().expect("a folder");
        let log = Log::open(dir.path()).expect("opened");
        log.append(1, output("whole"));
        drop(log);
        let path = dir.path().join(FILE);
        let whole = std::fs::read(&path).expect("read");
        for torn in [&b"{\"sequence\":2,\"atMs\":1"[..], b"\0\0\0\n", b"{}\n"] {
            std::fs::write(&path, [whole.as_slice(), torn].concat()).expect("written");
            let log = Log::open(dir.path()).expect("opened");
            assert_eq!((log.last(), std::fs::read(&path).expect("read")), (1, whole.clone()));
        }
        let log = Log::open(dir.path()).expect("opened");
        log.append(2, done());
        assert_eq!(log.last(), 2);
    }

    #[tokio::test]
    async fn a_flood_is_bounded_and_the_end_is_kept() {
        let dir = tempfile::tempdir().expect("a folder");
        let log = Log::open_with(dir.path(), 10_000).expect("opened");
        for _ in 0..10_000 {
            log.append(0, output("0123456789"));
        }
        log.append(0, EventKind::Step { step: 1, steps: 1, line: 1, text: "x".repeat(100_000), cached: false });
        log.append(0, done());
        assert!(std::fs::metadata(dir.path().join(FILE)).expect("there").len() < 30_000);
        let events = log.read(0).next(usize::MAX).await.expect("read");
        let tail: Vec<_> = events.iter().rev().take(3).map(|e| &e.kind).collect();
        assert!(matches!(tail[..], [EventKind::Done { .. }, EventKind::Step { .. }, EventKind::Notice { .. }]));
        assert!(events.iter().enumerate().all(|(n, e)| e.sequence == n as u64 + 1));
    }
}
