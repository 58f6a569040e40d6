//! What a command says, on its way to this program's own output.

use std::collections::VecDeque;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mainbrella_client::JobStream;
use mainbrella_client::api::{ExitCause, JobEventKind, OmittedRange, StreamName};
use tokio::io::{AsyncWrite, AsyncWriteExt as _, Stderr, Stdout};

use crate::failure::{Exit, Failure};
use crate::output::Output;

/// How a command ended.
pub struct Ended {
    pub cause: ExitCause,
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub stdout_bytes: u64,
    pub stderr_bytes: u64,
    pub duration_ms: u64,
}

/// Where output goes.
pub enum Sink {
    /// To this program's standard output and error, as it comes. Writes wait elsewhere, so that a reader who stands still
    /// does not keep signals from being heard.
    Shown(Stdout, Stderr),
    /// Into memory, for one document at the end: standard output and error.
    Kept(Box<[Kept; 2]>),
}

impl Sink {
    /// To this program's own output.
    pub fn shown() -> Self {
        Self::Shown(tokio::io::stdout(), tokio::io::stderr())
    }

    async fn take(&mut self, stream: StreamName, offset: u64, data: &[u8]) -> Result<(), Failure> {
        match (self, stream) {
            (Self::Shown(out, _), StreamName::Stdout) => put(out, data, "writing to standard output").await,
            (Self::Shown(_, err), StreamName::Stderr) => put(err, data, "writing to standard error").await,
            (Self::Kept(kept), stream) => {
                kept[usize::from(stream == StreamName::Stderr)].take(offset, data);
                Ok(())
            }
        }
    }
}

async fn put(to: &mut (impl AsyncWrite + Unpin), data: &[u8], what: &str) -> Result<(), Failure> {
    let written = async {
        to.write_all(data).await?;
        // Both outputs may be one terminal: what was written first is seen first.
        to.flush().await
    };
    written.await.map_err(|e| Failure::io(what, &e))
}

/// Follows a command to its end.
pub async fn follow(output: Output, mut stream: JobStream, sink: &mut Sink) -> Result<Ended, Failure> {
    while let Some(event) = stream.next().await? {
        match event.kind {
            JobEventKind::Output { stream, offset, data_base64 } => {
                let data = STANDARD.decode(data_base64).map_err(|_| {
                    Failure::new(Exit::Exec, "invalid_response", "the output in an event is not base64")
                })?;
                sink.take(stream, offset, &data).await?;
            }
            JobEventKind::Gap { stream, offset, length } => {
                let name = if stream == StreamName::Stdout { "stdout" } else { "stderr" };
                output.note(&format!(
                    "mainbrella: {length} bytes of {name} are missing after the first {offset}: they came faster than they were taken; \
                     send it to a file and `cp` it"
                ));
            }
            JobEventKind::Exit { cause, code, signal, stdout_bytes, stderr_bytes, duration_ms } => {
                return Ok(Ended { cause, code, signal, stdout_bytes, stderr_bytes, duration_ms });
            }
            JobEventKind::Started { .. } => {}
        }
    }
    Err(Failure::new(Exit::Exec, "invalid_response", "the events of the command ended without its exit"))
}

/// The beginning and the end of one output.
#[derive(Debug)]
pub struct Kept {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    /// Most bytes of each.
    most: (usize, usize),
    /// Position after the last byte.
    end: u64,
}

impl Kept {
    /// Of at most `limit` bytes in all.
    pub fn new(limit: u64) -> Self {
        let part = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let most = (part(limit.div_ceil(2)), part(limit / 2));
        Self { head: Vec::new(), tail: VecDeque::new(), most, end: 0 }
    }

    fn take(&mut self, offset: u64, data: &[u8]) {
        self.skip_to(offset);
        self.end += data.len() as u64;
        let room = self.most.0.saturating_sub(self.head.len()).min(data.len());
        let (first, rest) = data.split_at(room);
        self.head.extend_from_slice(first);
        let rest = &rest[rest.len().saturating_sub(self.most.1)..];
        let over = (self.tail.len() + rest.len()).saturating_sub(self.most.1);
        self.tail.drain(..over);
        self.tail.extend(rest);
    }

    /// What lies before `offset` and did not come is missing; only what follows it is an end.
    fn skip_to(&mut self, offset: u64) {
        if offset > self.end {
            // The head ends where bytes are missing.
            self.most.0 = self.head.len();
            self.tail.clear();
            self.end = offset;
        }
    }

    /// The bytes in base64, and what is missing between them, of `total` bytes.
    pub fn finish(mut self, total: u64) -> (String, Option<OmittedRange>) {
        self.skip_to(total);
        let (first, start) = (self.head.len() as u64, self.end - self.tail.len() as u64);
        let omitted = (start > first).then_some(OmittedRange { offset: first, length: start - first });
        self.head.extend(&self.tail);
        (STANDARD.encode(&self.head), omitted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is kept of `total` bytes that came in pieces of `piece` bytes, those in `missing` not at all.
    fn kept(
        limit: u64,
        total: usize,
        piece: usize,
        missing: std::ops::Range<usize>,
    ) -> (Vec<u8>, Option<OmittedRange>) {
        let all: Vec<u8> = (0..total).map(|i| (i % 251) as u8).collect();
        let mut kept = Kept::new(limit);
        for (n, data) in all.chunks(piece).enumerate() {
            if !missing.contains(&(n * piece)) {
                kept.take((n * piece) as u64, data);
            }
        }
        let (text, omitted) = kept.finish(total as u64);
        (STANDARD.decode(text).expect("base64"), omitted)
    }

    #[test]
    fn beginning_and_end_are_kept_and_what_is_missing_is_said() {
        for limit in [1, 2, 7, 64, 1000] {
            for total in [0usize, 1, 2, 6, 7, 8, 63, 64, 65, 999, 1000, 1001, 5000] {
                for piece in [1, 3, 64, 5000] {
                    for missing in
                        [0..0, 3 * piece..9 * piece, 0..piece, total.saturating_sub(1) / piece * piece..total]
                    {
                        let (bytes, omitted) = kept(limit, total, piece, missing.clone());
                        let (offset, length) =
                            omitted.map_or((bytes.len(), 0), |o| (o.offset as usize, o.length as usize));
                        let case = format!("{limit} {total} {piece} {missing:?}");
                        assert!(bytes.len() as u64 <= limit, "{case}");
                        assert_eq!(bytes.len() + length, total, "{case}");
                        let byte = |i: usize| (i % 251) as u8;
                        assert!((0..offset).all(|i| bytes[i] == byte(i)), "{case}");
                        assert!((offset..bytes.len()).all(|i| bytes[i] == byte(i + length)), "{case}");
                        assert!(
                            missing.start < missing.end || length == total.saturating_sub(limit as usize),
                            "{case}"
                        );
                    }
                }
            }
        }
    }
}
