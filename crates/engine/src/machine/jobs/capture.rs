//! What a blocking command answers with: the beginning and the end of each output, read from its log.

use bytes::{Bytes, BytesMut};
use mainbrella_job_log::{JobLog, Stream};

use crate::machine::command::{Captured, Omitted};

/// Bytes taken from the log at once.
const PIECE: usize = 256 * 1024;

/// At most `limit` bytes of what `stream` has produced, half from its beginning and half from its end.
pub(crate) fn capture(log: &JobLog, stream: Stream, limit: u64) -> std::io::Result<Captured> {
    let position = log.position();
    let total = match stream {
        Stream::Stdout => position.stdout_bytes,
        Stream::Stderr => position.stderr_bytes,
    };
    if total == 0 {
        return Ok(Captured::default());
    }
    let (first, last) = if total <= limit { (total, 0) } else { (limit.div_ceil(2), limit / 2) };
    let (head, _) = read(log, stream, 0, first, false)?;
    let from = (total - last).max(head.len() as u64);
    let (tail, start) = read(log, stream, from, total - from, true)?;
    let end = head.len() as u64;
    let omitted = (start > end).then_some(Omitted { offset: end, length: start - end });
    let mut bytes = BytesMut::from(head);
    bytes.extend_from_slice(&tail);
    Ok(Captured { bytes: bytes.freeze(), omitted, total })
}

/// Bytes of `[from, from + length)` without a hole between them: the first ones, or with `latest` the last ones; and
/// where they begin.
fn read(log: &JobLog, stream: Stream, from: u64, length: u64, latest: bool) -> std::io::Result<(Bytes, u64)> {
    let (mut bytes, mut start, end) = (BytesMut::new(), from, from + length);
    let mut reader = log.output(stream, from);
    while start + (bytes.len() as u64) < end {
        let at = start + bytes.len() as u64;
        let Some(piece) = reader.read(log, PIECE)? else {
            // The end is missing.
            if latest {
                return Ok((Bytes::new(), end));
            }
            break;
        };
        if piece.offset > at {
            if !latest {
                break;
            }
            bytes.clear();
            start = piece.offset.min(end);
        }
        let room = usize::try_from(end.saturating_sub(start + bytes.len() as u64)).unwrap_or(0);
        bytes.extend_from_slice(&piece.data[..piece.data.len().min(room)]);
    }
    Ok((bytes.freeze(), start))
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainbrella_job_log::{Entry, Event, Limits};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn beginning_and_end_are_right_and_what_is_missing_is_said(
            pieces in prop::collection::vec(1usize..400, 0..60), limit in 1u64..6000, segment in 300u64..3000,
        ) {
            let dir = tempfile::tempdir().expect("temp dir");
            let limits = Limits { segment_bytes: segment, head_segments: 2, tail_segments: 2 };
            let log = JobLog::create(dir.path(), b"", limits).expect("made");
            log.append(&[Event { cursor: 1, time_ms: 0, entry: Entry::Started { pid: 1 } }], false).expect("appended");
            let content = |from: u64, n: u64| (from..from + n).map(|i| (i % 251) as u8).collect::<Vec<u8>>();
            let mut total = 0u64;
            for (cursor, n) in (2..).zip(&pieces) {
                let data = content(total, *n as u64).into();
                let entry = Entry::Output { stream: Stream::Stdout, offset: total, data };
                log.append(&[Event { cursor, time_ms: 0, entry }], false).expect("appended");
                total += *n as u64;
            }
            let got = capture(&log, Stream::Stdout, limit).expect("read");
            prop_assert_eq!(got.total, total);
            prop_assert!(got.bytes.len() as u64 <= limit);
            let missing = got.omitted.map_or(0, |o| o.length);
            prop_assert_eq!(got.bytes.len() as u64 + missing, total);
            let whole = content(0, total);
            let head = got.omitted.map_or(got.bytes.len(), |o| o.offset as usize);
            prop_assert!(got.bytes[..head] == whole[..head]);
            prop_assert!(got.bytes[head..] == whole[head + missing as usize..]);
            if log.position().stdout_omitted == 0 {
                prop_assert_eq!(got.bytes.len() as u64, total.min(limit), "all that was asked for");
            }
            prop_assert_eq!(capture(&log, Stream::Stderr, limit).expect("read"), Captured::default());
        }
    }
}
