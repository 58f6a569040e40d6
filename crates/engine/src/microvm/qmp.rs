//! A small client of QEMU's control channel.
//!
//! The other side may be in the hands of a hostile guest: lines are bounded, every call has a time-out, events beyond
//! what is awaited are dropped, and no answer is trusted to mean more than it says.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot};

/// Longest line taken from QEMU, bytes. The longest honest one is a full console ring as JSON text.
pub const LINE_MAX: usize = 512 * 1024;
/// Events kept for the supervisor; more are dropped.
const EVENTS_MAX: usize = 64;
/// Longest text of an error that is kept, bytes.
pub const ERROR_TEXT_MAX: usize = 512;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// QEMU refused the command.
    #[error("{command} was refused: {class}: {text}")]
    Refused {
        /// The command.
        command: &'static str,
        /// QEMU's error class.
        class: String,
        /// QEMU's own text, cut.
        text: String,
    },
    /// No answer in time.
    #[error("{0} was not answered in time")]
    TimedOut(&'static str),
    /// The channel is closed.
    #[error("the control channel is closed")]
    Closed,
    /// What came is not the protocol.
    #[error("the control channel carried {0}")]
    Protocol(&'static str),
    /// The socket failed.
    #[error("control socket")]
    Io(#[from] io::Error),
}

/// Something QEMU says by itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Its name, e.g. `SHUTDOWN`.
    pub name: String,
    /// Its data; `Null` if none.
    pub data: Value,
}

/// One line of the protocol.
#[derive(Clone, Debug, PartialEq)]
pub enum Line {
    /// The first line.
    Greeting {
        /// QEMU's version, `7.2.22`.
        version: String,
    },
    /// The answer to a call.
    Answer {
        /// The call's id.
        id: u64,
        /// Result, or class and text.
        outcome: Result<Value, (String, String)>,
    },
    /// An event.
    Event(Event),
}

/// Reads one line. Never fails in any other way than by `None`: not the protocol.
#[must_use]
pub fn parse(line: &[u8]) -> Option<Line> {
    let Value::Object(mut o) = serde_json::from_slice(line).ok()? else { return None };
    let cut = |v: Option<&Value>| {
        let s = v.and_then(Value::as_str).unwrap_or("");
        let mut end = s.len().min(ERROR_TEXT_MAX);
        while !s.is_char_boundary(end) {
            end -= 1;
        }
        s[..end].to_owned()
    };
    if let Some(greeting) = o.get("QMP") {
        let v = &greeting["version"]["qemu"];
        let n = |k: &str| v[k].as_u64().unwrap_or(0);
        return Some(Line::Greeting { version: format!("{}.{}.{}", n("major"), n("minor"), n("micro")) });
    }
    if let Some(Value::String(name)) = o.remove("event") {
        return Some(Line::Event(Event { name, data: o.remove("data").unwrap_or(Value::Null) }));
    }
    let id = o.get("id").and_then(Value::as_u64)?;
    if let Some(value) = o.remove("return") {
        return Some(Line::Answer { id, outcome: Ok(value) });
    }
    let e = o.get("error")?;
    Some(Line::Answer { id, outcome: Err((cut(e.get("class")), cut(e.get("desc")))) })
}

type Outcome = Result<Value, (String, String)>;

struct Shared {
    next: AtomicU64,
    waiting: std::sync::Mutex<Option<HashMap<u64, oneshot::Sender<Outcome>>>>,
}

impl Shared {
    fn waiting(&self) -> std::sync::MutexGuard<'_, Option<HashMap<u64, oneshot::Sender<Outcome>>>> {
        self.waiting.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// A connection. Dropping it closes the channel; QEMU then waits for the next client.
pub struct Qmp {
    shared: Arc<Shared>,
    writer: tokio::sync::Mutex<OwnedWriteHalf>,
    reader: tokio::task::JoinHandle<()>,
    version: String,
}

impl std::fmt::Debug for Qmp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Qmp").field("version", &self.version).finish_non_exhaustive()
    }
}

impl Drop for Qmp {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Qmp {
    /// Takes a fresh connection through the greeting. Events arrive at the receiver; it ends when the channel closes.
    ///
    /// # Errors
    /// When the other side does not speak the protocol within `patience`.
    pub async fn open(stream: UnixStream, patience: Duration) -> Result<(Self, mpsc::Receiver<Event>), QmpError> {
        tokio::time::timeout(patience, Self::greet(stream, patience))
            .await
            .map_err(|_| QmpError::TimedOut("greeting"))?
    }

    async fn greet(stream: UnixStream, patience: Duration) -> Result<(Self, mpsc::Receiver<Event>), QmpError> {
        let (read, write) = stream.into_split();
        let mut read = BufReader::with_capacity(16 * 1024, read);
        let first = bounded_line(&mut read).await?.ok_or(QmpError::Closed)?;
        let Some(Line::Greeting { version }) = parse(&first) else { return Err(QmpError::Protocol("no greeting")) };
        let shared = Arc::new(Shared { next: AtomicU64::new(1), waiting: std::sync::Mutex::new(Some(HashMap::new())) });
        let (events, receiver) = mpsc::channel(EVENTS_MAX);
        let reader = tokio::spawn(pump(read, shared.clone(), events));
        let qmp = Self { shared, writer: tokio::sync::Mutex::new(write), reader, version };
        qmp.call("qmp_capabilities", json!({}), patience).await?;
        Ok((qmp, receiver))
    }

    /// QEMU's version, `7.2.22`.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Calls `command`.
    ///
    /// # Errors
    /// See [`QmpError`].
    pub async fn call(&self, command: &'static str, arguments: Value, patience: Duration) -> Result<Value, QmpError> {
        self.call_with(command, arguments, None, patience).await
    }

    /// As [`Self::call`], handing over a descriptor with it (`getfd`, `add-fd`).
    ///
    /// # Errors
    /// See [`QmpError`].
    pub async fn call_with(
        &self,
        command: &'static str,
        arguments: Value,
        descriptor: Option<BorrowedFd<'_>>,
        patience: Duration,
    ) -> Result<Value, QmpError> {
        let id = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let (tx, rx) = oneshot::channel();
        self.shared.waiting().as_mut().ok_or(QmpError::Closed)?.insert(id, tx);
        let mut line = serde_json::to_vec(&json!({"execute": command, "arguments": arguments, "id": id}))
            .map_err(|_| QmpError::Protocol("an unprintable call"))?;
        line.push(b'\n');
        let exchange = async {
            self.send(&line, descriptor).await?;
            rx.await.map_err(|_| QmpError::Closed)
        };
        let outcome = tokio::time::timeout(patience, exchange).await;
        if let Some(waiting) = self.shared.waiting().as_mut() {
            waiting.remove(&id);
        }
        outcome.map_err(|_| QmpError::TimedOut(command))??.map_err(|(class, text)| QmpError::Refused {
            command,
            class,
            text,
        })
    }

    async fn send(&self, line: &[u8], descriptor: Option<BorrowedFd<'_>>) -> Result<(), QmpError> {
        let mut writer = self.writer.lock().await;
        let mut rest = line;
        if let Some(fd) = descriptor {
            let stream: &UnixStream = writer.as_ref();
            let sent = stream
                .async_io(Interest::WRITABLE, || {
                    let raw = [fd.as_raw_fd()];
                    let rights = [ControlMessage::ScmRights(&raw)];
                    sendmsg::<()>(stream.as_raw_fd(), &[IoSlice::new(line)], &rights, MsgFlags::MSG_NOSIGNAL, None)
                        .map_err(io::Error::from)
                })
                .await?;
            rest = &line[sent..];
        }
        writer.write_all(rest).await?;
        Ok(())
    }
}

async fn pump(mut read: BufReader<OwnedReadHalf>, shared: Arc<Shared>, events: mpsc::Sender<Event>) {
    while let Ok(Some(line)) = bounded_line(&mut read).await {
        match parse(&line) {
            Some(Line::Answer { id, outcome }) => {
                if let Some(tx) = shared.waiting().as_mut().and_then(|w| w.remove(&id)) {
                    // The caller may have given up.
                    let _ = tx.send(outcome);
                }
            }
            Some(Line::Event(event)) => {
                if events.try_send(event).is_err() {
                    tracing::debug!("an event of a VMM was dropped");
                }
            }
            Some(Line::Greeting { .. }) | None => break,
        }
    }
    // Everyone who waits learns that nothing will come.
    *shared.waiting() = None;
}

async fn bounded_line(read: &mut BufReader<OwnedReadHalf>) -> Result<Option<Vec<u8>>, QmpError> {
    let mut line = Vec::new();
    loop {
        let chunk = read.fill_buf().await?;
        if chunk.is_empty() {
            return Ok(None);
        }
        let (take, whole) = match chunk.iter().position(|b| *b == b'\n') {
            Some(at) => (at + 1, true),
            None => (chunk.len(), false),
        };
        if line.len() + take > LINE_MAX {
            return Err(QmpError::Protocol("a line beyond the limit"));
        }
        line.extend_from_slice(&chunk[..take]);
        read.consume(take);
        if whole {
            return Ok(Some(line));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GREETING: &[u8] =
        b"{\"QMP\": {\"version\": {\"qemu\": {\"micro\": 22, \"minor\": 2, \"major\": 7}}, \"capabilities\": []}}\r\n";
    const SECOND: Duration = Duration::from_secs(5);

    proptest! {
        #[test]
        fn no_line_makes_the_parser_fail(line in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&line);
        }

        #[test]
        fn answers_keep_their_id_and_long_errors_are_cut(id in any::<u64>(), text in ".{0,700}") {
            let line = serde_json::to_vec(&json!({"id": id, "error": {"class": "GenericError", "desc": text}})).expect("json");
            let Some(Line::Answer { id: got, outcome: Err((class, kept)) }) = parse(&line) else { panic!("not an answer") };
            prop_assert_eq!(got, id);
            prop_assert_eq!(class, "GenericError");
            prop_assert!(kept.len() <= ERROR_TEXT_MAX && text.starts_with(&kept));
        }
    }

    async fn pair() -> (Qmp, mpsc::Receiver<Event>, BufReader<OwnedReadHalf>, OwnedWriteHalf) {
        let (a, b) = UnixStream::pair().expect("pair");
        let (r, mut w) = b.into_split();
        let mut r = BufReader::new(r);
        let server = async {
            w.write_all(GREETING).await.expect("write");
            bounded_line(&mut r).await.expect("line").expect("some");
            w.write_all(b"{\"return\": {}, \"id\": 1}\n").await.expect("write");
        };
        let (opened, ()) = tokio::join!(Qmp::open(a, SECOND), server);
        let (q, e) = opened.expect("open");
        (q, e, r, w)
    }

    #[tokio::test]
    async fn calls_and_events_are_told_apart_and_answers_may_come_in_any_order() {
        let (q, mut events, mut r, mut w) = pair().await;
        assert_eq!(q.version(), "7.2.22");
        let server = async {
            for _ in 0..2 {
                bounded_line(&mut r).await.expect("line").expect("some");
            }
            w.write_all(
                b"{\"event\": \"STOP\", \"timestamp\": {}}\n{\"id\": 3, \"return\": 3}\n{\"id\": 2, \"return\": 2}\n",
            )
            .await
            .expect("write");
        };
        let (two, three, ()) = tokio::join!(q.call("a", json!({}), SECOND), q.call("b", json!({}), SECOND), server);
        assert_eq!((two.expect("two"), three.expect("three")), (json!(2), json!(3)));
        assert_eq!(events.recv().await.expect("event").name, "STOP");
    }

    #[tokio::test]
    async fn a_silent_a_closing_and_a_shouting_peer_each_end_the_call() {
        let (q, _e, _r, _w) = pair().await;
        let silent = q.call("a", json!({}), Duration::from_millis(20)).await;
        assert!(matches!(silent, Err(QmpError::TimedOut("a"))), "{silent:?}");

        let (q, _e, r, w) = pair().await;
        drop((r, w));
        let closed = q.call("a", json!({}), SECOND).await;
        assert!(matches!(closed, Err(QmpError::Closed | QmpError::Io(_))), "{closed:?}");

        let (q, _e, _r, mut w) = pair().await;
        let shout = async { w.write_all(&vec![b'x'; LINE_MAX + 2]).await.expect("write") };
        let (shouted, ()) = tokio::join!(q.call("a", json!({}), SECOND), shout);
        assert!(matches!(shouted, Err(QmpError::Closed)), "{shouted:?}");
    }

    #[tokio::test]
    async fn a_flood_of_events_is_dropped_and_calls_go_on() {
        let (q, mut events, mut r, mut w) = pair().await;
        let server = async {
            bounded_line(&mut r).await.expect("line").expect("some");
            for _ in 0..10_000 {
                w.write_all(b"{\"event\": \"STOP\"}\n").await.expect("write");
            }
            w.write_all(b"{\"id\": 2, \"return\": {}}\n").await.expect("write");
        };
        let (answer, ()) = tokio::join!(q.call("a", json!({}), SECOND), server);
        answer.expect("answered");
        let mut kept = 0;
        while events.try_recv().is_ok() {
            kept += 1;
        }
        assert_eq!(kept, EVENTS_MAX);
    }
}
