//! The lines between engine and bridge. What comes from a machine is bounded and checked here; the rest of the engine
//! sees only [`Said`].

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use mainbrella_types::{Millis, limits};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{CodeEnd, CodeEvent, CodeStatus, TextStream};
use crate::Omitted;

/// Rich content by MIME type: each value is JSON, a text in most cases (pictures are base64).
pub type Bundle = BTreeMap<String, Box<RawValue>>;

/// Version of these lines. A bridge outlives the service that started it; one of another version is ended.
pub(super) const VERSION: u64 = 1;

/// Longest line a bridge may send: the largest rich event, and some room for what is around it.
pub(super) const LINE_MAX: usize = limits::CODE_RESULTS_BYTES_MAX + 64 * 1024;
/// Most lines of a traceback; one more than the bridge keeps, for the mark of what it left out.
pub(super) const FRAMES_MAX: usize = 65;
/// Longest line of a traceback, and longest text of an exception, bytes.
pub(super) const FRAME_MAX: usize = 16 * 1024;
/// Most types of one rich event.
pub(super) const MIMES_MAX: usize = 32;
const MIME_MAX: usize = 127;
const NAME_MAX: usize = 1024;
/// Longest id of a context or a cell, bytes.
const ID_MAX: usize = 64;
const WHY_MAX: usize = 1024;

/// A command to the bridge.
#[derive(Debug, Serialize)]
#[serde(tag = "do", rename_all = "lowercase", rename_all_fields = "camelCase")]
pub(super) enum Order<'a> {
    Hello { nonce: &'a str },
    Start { id: &'a str, created_ms: i64, cwd: Option<&'a str>, env: &'a BTreeMap<String, String> },
    Run { id: &'a str, cell: &'a str, code: &'a str, timeout_ms: u64 },
    Interrupt { id: &'a str, cell: Option<&'a str> },
    Restart { id: &'a str },
    Close { id: &'a str },
}

#[derive(Serialize)]
struct Numbered<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    seq: Option<u64>,
    #[serde(flatten)]
    order: &'a Order<'a>,
}

impl Order<'_> {
    /// The command as a line.
    pub(super) fn line(&self, seq: Option<u64>) -> Vec<u8> {
        // Texts and numbers only: it can always be written.
        let mut line = serde_json::to_vec(&Numbered { seq, order: self }).unwrap_or_default();
        line.push(b'\n');
        line
    }
}

/// A context as the bridge describes it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Described {
    pub(super) id: String,
    pub(super) created_at: Millis,
    pub(super) dead: bool,
    pub(super) starting: bool,
    pub(super) cwd: String,
    pub(super) env: BTreeMap<String, String>,
    pub(super) cell: Option<String>,
}

/// Why the bridge did not carry out a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) kind: RefusalKind,
    /// For the log.
    pub(super) why: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RefusalKind {
    Unknown,
    Busy,
    Dead,
    Cwd,
    Failed,
}

/// How a kernel ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Death {
    Signal(i32),
    Code(i32),
    /// With the bridge, or with nobody to tell.
    Unseen,
}

/// What a cell said. `Died` stands for the end of a cell whose kernel ended.
#[derive(Debug)]
pub(super) enum CellSaid {
    Event(CodeEvent),
    Died,
}

/// Something a bridge said, checked.
#[derive(Debug)]
pub(super) enum Said {
    Hello { version: u64, nonce: String, seen: u64, contexts: Vec<Described> },
    Unable { why: String },
    Reply { seq: u64, refusal: Option<Refusal> },
    Dead { id: String, how: Death },
    Cell { id: String, cell: String, said: CellSaid },
}

#[derive(Deserialize)]
struct Line<'a> {
    #[serde(borrow)]
    ev: Cow<'a, str>,
    #[serde(default, borrow)]
    id: Option<Cow<'a, str>>,
    #[serde(default, borrow)]
    cell: Option<Cow<'a, str>>,
    #[serde(default)]
    seq: Option<u64>,
    #[serde(default)]
    seen: Option<u64>,
    #[serde(default)]
    version: Option<u64>,
    #[serde(default)]
    nonce: Option<String>,
    #[serde(default)]
    why: Option<String>,
    #[serde(default)]
    contexts: Option<Vec<LineContext>>,
    #[serde(default)]
    error: Option<LineError>,
    #[serde(default)]
    signal: Option<i32>,
    #[serde(default)]
    code: Option<i32>,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    stream: Option<String>,
    #[serde(default)]
    offset: Option<u64>,
    #[serde(default)]
    length: Option<u64>,
    #[serde(default)]
    data: Option<Bundle>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    value: Option<String>,
    #[serde(default)]
    traceback: Option<Vec<String>>,
    #[serde(default)]
    status: Option<String>,
    #[serde(default)]
    count: Option<u64>,
    #[serde(default)]
    truncated: Option<bool>,
    #[serde(default)]
    ms: Option<u64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct LineContext {
    id: String,
    state: String,
    created_ms: i64,
    cwd: String,
    env: BTreeMap<String, String>,
    cell: Option<String>,
}

#[derive(Deserialize)]
struct LineError {
    kind: String,
    why: String,
}

/// An id of ours: short and plain.
fn id(text: &str) -> Result<String, &'static str> {
    let plain = (1..=ID_MAX).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    plain.then(|| text.to_owned()).ok_or("an id of another form")
}

fn short(text: Option<String>, most: usize) -> Result<String, &'static str> {
    text.filter(|t| t.len() <= most).ok_or("a text that is missing or too long")
}

fn stream(name: &str) -> Result<TextStream, &'static str> {
    match name {
        "stdout" => Ok(TextStream::Stdout),
        "stderr" => Ok(TextStream::Stderr),
        _ => Err("an unknown stream"),
    }
}

/// Reads a line, without its end.
///
/// # Errors
/// What is wrong with it, for the log.
pub(super) fn read(line: &[u8]) -> Result<Said, &'static str> {
    // JSON escapes control characters in texts. Between values a carriage return would be allowed, and raw parts of the
    // line are passed on where it would end a line.
    if line.iter().any(|b| *b < 0x20) {
        return Err("a control character");
    }
    let line: Line<'_> = serde_json::from_slice(line).map_err(|_| "not the JSON that was agreed on")?;
    match &*line.ev {
        // What another version says of its contexts is not read.
        "hello" if line.version != Some(VERSION) => Ok(Said::Hello {
            version: line.version.unwrap_or(0),
            nonce: short(line.nonce, ID_MAX)?,
            seen: 0,
            contexts: Vec::new(),
        }),
        "hello" => {
            let list = line.contexts.ok_or("no contexts")?;
            if list.len() > limits::CONTEXTS_MAX {
                return Err("too many contexts");
            }
            let contexts = list.into_iter().map(described).collect::<Result<_, _>>()?;
            let seen = line.seen.filter(|n| *n < u64::MAX / 2).ok_or("no number")?;
            Ok(Said::Hello { version: VERSION, nonce: short(line.nonce, ID_MAX)?, seen, contexts })
        }
        "unable" => Ok(Said::Unable { why: short(line.why, WHY_MAX)? }),
        "reply" => {
            let refusal = line.error.map(refusal).transpose()?;
            Ok(Said::Reply { seq: line.seq.ok_or("no number")?, refusal })
        }
        "dead" => {
            let how = match (line.signal, line.code) {
                (Some(n), _) => Death::Signal(n.clamp(1, 64)),
                (None, Some(n)) => Death::Code(n.clamp(0, 255)),
                (None, None) => Death::Unseen,
            };
            Ok(Said::Dead { id: id(line.id.as_deref().unwrap_or_default())?, how })
        }
        _ => {
            let (context, cell) =
                (id(line.id.as_deref().unwrap_or_default())?, id(line.cell.as_deref().unwrap_or_default())?);
            Ok(Said::Cell { id: context, cell, said: cell_said(line)? })
        }
    }
}

fn described(c: LineContext) -> Result<Described, &'static str> {
    if !matches!(c.state.as_str(), "starting" | "idle" | "busy" | "dead") {
        return Err("an unknown state");
    }
    mainbrella_types::machine::check_env(&c.env).map_err(|_| "an environment out of bounds")?;
    Ok(Described {
        env: c.env,
        id: id(&c.id)?,
        created_at: Millis(c.created_ms.clamp(0, 253_402_300_799_999)),
        dead: c.state == "dead",
        starting: c.state == "starting",
        cwd: short(Some(c.cwd), limits::PATH_MAX)?,
        cell: c.cell.map(|c| id(&c)).transpose()?,
    })
}

fn refusal(e: LineError) -> Result<Refusal, &'static str> {
    let kind = match e.kind.as_str() {
        "unknown" => RefusalKind::Unknown,
        "busy" => RefusalKind::Busy,
        "dead" => RefusalKind::Dead,
        "cwd" => RefusalKind::Cwd,
        "failed" => RefusalKind::Failed,
        _ => return Err("an unknown refusal"),
    };
    Ok(Refusal { kind, why: short(Some(e.why), WHY_MAX)? })
}

fn cell_said(line: Line<'_>) -> Result<CellSaid, &'static str> {
    let event = match &*line.ev {
        name @ ("stdout" | "stderr") => CodeEvent::Text(stream(name)?, short(line.text, limits::CODE_STREAM_MAX)?),
        "gap" => {
            let (Some(offset), Some(length)) = (line.offset, line.length.filter(|n| *n > 0)) else {
                return Err("a gap without its place");
            };
            offset.checked_add(length).ok_or("a gap without end")?;
            CodeEvent::Gap(stream(line.stream.as_deref().unwrap_or_default())?, Omitted { offset, length })
        }
        name @ ("result" | "display") => {
            let data = line.data.ok_or("nothing displayed")?;
            if data.len() > MIMES_MAX || data.keys().any(|k| k.len() > MIME_MAX || !k.is_ascii()) {
                return Err("MIME types of another form");
            }
            if name == "result" { CodeEvent::Result(data) } else { CodeEvent::Display(data) }
        }
        "error" => {
            let traceback = line.traceback.unwrap_or_default();
            if traceback.len() > FRAMES_MAX || traceback.iter().any(|l| l.len() > FRAME_MAX) {
                return Err("an endless traceback");
            }
            CodeEvent::Error { name: short(line.name, NAME_MAX)?, value: short(line.value, FRAME_MAX)?, traceback }
        }
        "done" => {
            let status = match line.status.as_deref() {
                Some("ok") => CodeStatus::Ok,
                Some("error") => CodeStatus::Error,
                Some("timed_out") => CodeStatus::TimedOut,
                Some("interrupted") => CodeStatus::Interrupted,
                Some("dead") => return Ok(CellSaid::Died),
                _ => return Err("an unknown status"),
            };
            CodeEvent::Done(CodeEnd {
                status,
                execution_count: line.count,
                truncated: line.truncated.unwrap_or(false),
                duration: Duration::from_millis(line.ms.unwrap_or(0)),
            })
        }
        _ => return Err("an unknown event"),
    };
    Ok(CellSaid::Event(event))
}

/// Puts lines together from pieces, never holding more than one line of [`LINE_MAX`].
#[derive(Debug, Default)]
pub(super) struct Lines {
    held: Vec<u8>,
}

impl Lines {
    /// Takes a piece and gives every line it completes to `each`, which may end it.
    ///
    /// # Errors
    /// A line without end, or what `each` says.
    pub(super) fn take(
        &mut self,
        mut piece: &[u8],
        mut each: impl FnMut(&[u8]) -> Result<(), &'static str>,
    ) -> Result<(), &'static str> {
        while let Some(at) = piece.iter().position(|b| *b == b'\n') {
            let (line, rest) = (&piece[..at], &piece[at + 1..]);
            piece = rest;
            if self.held.is_empty() {
                each(line)?;
                continue;
            }
            self.hold(line)?;
            let line = std::mem::take(&mut self.held);
            each(&line)?;
        }
        self.hold(piece)
    }

    fn hold(&mut self, piece: &[u8]) -> Result<(), &'static str> {
        if self.held.len() + piece.len() > LINE_MAX {
            return Err("a line without end");
        }
        self.held.extend_from_slice(piece);
        Ok(())
    }
}

/// What one cell may still say. The bridge keeps these limits; this is for one that does not.
#[derive(Debug)]
pub(super) struct Allowance {
    text: [usize; 2],
    gaps: [bool; 2],
    rich_bytes: usize,
    events: usize,
}

impl Default for Allowance {
    fn default() -> Self {
        Self {
            text: [limits::CODE_STREAM_MAX; 2],
            gaps: [false; 2],
            rich_bytes: limits::CODE_RESULTS_BYTES_MAX,
            // One for each 64 bytes of a head (the bridge charges that for each), the tails, and what is displayed.
            events: 2 * limits::CODE_STREAM_MAX / 64 + limits::CODE_RESULTS_MAX + 8,
        }
    }
}

impl Allowance {
    /// Counts an event.
    ///
    /// # Errors
    /// When it is more than a cell may say.
    pub(super) fn take(&mut self, event: &CodeEvent) -> Result<(), &'static str> {
        self.events = self.events.checked_sub(1).ok_or("more events than a cell may have")?;
        match event {
            CodeEvent::Text(stream, text) => {
                let left = &mut self.text[*stream as usize];
                *left = left.checked_sub(text.len()).ok_or("more text than a cell may keep")?;
            }
            CodeEvent::Gap(stream, _) => {
                if std::mem::replace(&mut self.gaps[*stream as usize], true) {
                    return Err("two gaps in one stream");
                }
            }
            CodeEvent::Result(data) | CodeEvent::Display(data) => {
                for value in data.values() {
                    let size = value.get().len();
                    self.rich_bytes = self.rich_bytes.checked_sub(size).ok_or("more results than a cell may keep")?;
                }
            }
            CodeEvent::Error { .. } | CodeEvent::Done(_) => {}
        }
        Ok(())
    }
}

/// The lines of a stream that comes in these pieces.
#[cfg(any(test, fuzzing))]
fn lines_of(pieces: &[&[u8]]) -> Result<Vec<Vec<u8>>, &'static str> {
    let (mut lines, mut all) = (Lines::default(), Vec::new());
    for piece in pieces {
        lines.take(piece, |l| {
            all.push(l.to_vec());
            Ok(())
        })?;
    }
    Ok(all)
}

/// Any bytes as what a bridge says, in two pieces: lines are cut alike, and a cell never gets more through than it may.
#[cfg(any(test, fuzzing))]
pub(crate) fn any_lines(bytes: &[u8]) {
    let (first, second) = bytes.split_at(bytes.len() / 3);
    let lines = lines_of(&[first, second]);
    assert_eq!(lines, lines_of(&[bytes]));
    let (mut allowance, mut text) = (Allowance::default(), 0);
    for line in lines.unwrap_or_default() {
        match read(&line) {
            Ok(Said::Cell { id, said, .. }) => {
                assert!(id.len() <= ID_MAX && id.is_ascii());
                if let CellSaid::Event(event) = said
                    && allowance.take(&event).is_ok()
                    && let CodeEvent::Text(_, piece) = event
                {
                    text += piece.len();
                }
            }
            Ok(Said::Dead { id, .. }) => assert!(id.len() <= ID_MAX && id.is_ascii()),
            _ => {}
        }
    }
    assert!(text <= 2 * limits::CODE_STREAM_MAX);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// However a stream is cut, the same lines come out.
        #[test]
        fn lines_do_not_hang_on_how_the_stream_is_cut(text in "[a-z\n]{0,200}", cuts in proptest::collection::vec(0usize..200, 0..8)) {
            let bytes = text.as_bytes();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|w| &bytes[w[0]..w[1]]).collect();
            prop_assert_eq!(lines_of(&pieces), lines_of(&[bytes]));
        }

        /// Whatever a guest sends, reading it never panics, and what is accepted is within the bounds.
        #[test]
        fn any_bytes_are_read_without_harm(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = read(&bytes);
        }

        #[test]
        fn any_fields_are_read_without_harm(ev in "hello|unable|reply|dead|stdout|gap|result|error|done|x", id in ".{0,80}",
                                            n in any::<i64>(), text in ".{0,40}") {
            let line = serde_json::json!({"ev": ev, "id": id, "cell": id, "seq": n, "seen": n, "nonce": text, "why": text,
                "signal": n, "offset": n, "length": n, "stream": text, "text": text, "status": text, "contexts": [], "data": {}});
            if let Ok(Said::Cell { id, .. } | Said::Dead { id, .. }) = read(line.to_string().as_bytes()) {
                prop_assert!(id.len() <= ID_MAX && id.is_ascii());
            }
        }

        /// A cell never gets more through than it may.
        #[test]
        fn an_allowance_is_never_exceeded(sizes in proptest::collection::vec((any::<bool>(), 0usize..300_000), 0..40)) {
            let (mut allowance, mut taken) = (Allowance::default(), [0usize; 2]);
            for (err, size) in sizes {
                let stream = if err { TextStream::Stderr } else { TextStream::Stdout };
                if allowance.take(&CodeEvent::Text(stream, "x".repeat(size))).is_ok() {
                    taken[stream as usize] += size;
                }
                prop_assert!(taken.iter().all(|t| *t <= limits::CODE_STREAM_MAX));
            }
        }
    }

    #[test]
    fn a_line_without_end_is_given_up() {
        let mut lines = Lines::default();
        let piece = vec![b'x'; 1024 * 1024];
        let ended = (0..10).find_map(|_| lines.take(&piece, |_| Ok(())).err());
        assert_eq!(ended, Some("a line without end"));
        assert!(lines.held.len() <= LINE_MAX);
    }

    #[test]
    fn orders_look_as_agreed() {
        let line = Order::Run { id: "a", cell: "b", code: "1\n", timeout_ms: 5 }.line(Some(7));
        assert_eq!(line, b"{\"seq\":7,\"do\":\"run\",\"id\":\"a\",\"cell\":\"b\",\"code\":\"1\\n\",\"timeoutMs\":5}\n");
        assert_eq!(Order::Hello { nonce: "n" }.line(None), b"{\"do\":\"hello\",\"nonce\":\"n\"}\n");
    }

    #[test]
    fn rich_values_pass_as_they_are_and_nothing_can_end_a_line_in_them() {
        let deep = "[".repeat(100_000) + &"]".repeat(100_000);
        let line = format!(r#"{{"ev":"result","id":"a","cell":"b","data":{{"application/json":{deep}}}}}"#);
        match read(line.as_bytes()) {
            Ok(Said::Cell { said: CellSaid::Event(CodeEvent::Result(data)), .. }) => {
                assert_eq!(data["application/json"].get(), deep);
            }
            other => panic!("{other:?}"),
        }
        let e = read(b"{\"ev\":\"result\",\"id\":\"a\",\"cell\":\"b\",\"data\":{\"t\":[1,\r2]}}").expect_err("refused");
        assert_eq!(e, "a control character");
    }
}
