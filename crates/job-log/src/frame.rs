//! Bytes on disk: the head of a segment and the frames in it.
//!
//! Everything read back is checked before it is believed: length, check sum, kind, and the form of each kind.

use bytes::Bytes;

use crate::{Cause, DATA_MAX, Exit, NOTE_MAX};

/// Length of the head of a segment, bytes.
pub(crate) const SEGMENT_HEAD: usize = 32;
/// Length of the head of a frame, bytes: length, check sum, cursor, time, kind, what came before in each lane.
pub(crate) const FRAME_HEAD: usize = 49;
/// Longest body of a frame, bytes.
pub(crate) const BODY_MAX: usize = if NOTE_MAX > DATA_MAX + 8 { NOTE_MAX } else { DATA_MAX + 8 };

const MAGIC: [u8; 4] = *b"MBJL";
const VERSION: u8 = 1;

/// The rows of segments a log is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LaneId {
    Control = 0,
    Stdout = 1,
    Stderr = 2,
}

impl LaneId {
    pub(crate) const ALL: [Self; 3] = [Self::Control, Self::Stdout, Self::Stderr];

    fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte)).copied()
    }
}

/// What stands at the beginning of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentHead {
    pub(crate) lane: LaneId,
    /// Cursor of the frame before the first, in the same lane; 0: none.
    pub(crate) prev_cursor: u64,
    /// Position in the stream of the first byte in it.
    pub(crate) first_offset: u64,
}

impl SegmentHead {
    pub(crate) fn encode(&self) -> [u8; SEGMENT_HEAD] {
        let mut out = [0; SEGMENT_HEAD];
        out[..4].copy_from_slice(&MAGIC);
        out[4] = VERSION;
        out[5] = self.lane as u8;
        out[8..16].copy_from_slice(&self.prev_cursor.to_le_bytes());
        out[16..24].copy_from_slice(&self.first_offset.to_le_bytes());
        let sum = crc32fast::hash(&out[..28]);
        out[28..].copy_from_slice(&sum.to_le_bytes());
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; SEGMENT_HEAD] = bytes.get(..SEGMENT_HEAD)?.try_into().ok()?;
        if bytes[..4] != MAGIC || bytes[4] != VERSION || u32_at(bytes, 28)? != crc32fast::hash(&bytes[..28]) {
            return None;
        }
        let lane = LaneId::from_byte(bytes[5])?;
        Some(Self { lane, prev_cursor: u64_at(bytes, 8)?, first_offset: u64_at(bytes, 16)? })
    }
}

/// What a frame says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    Note(Bytes),
    Started { pid: u32 },
    Output { offset: u64, data: Bytes },
    Exit(Exit),
}

/// One frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) cursor: u64,
    pub(crate) time_ms: i64,
    /// The last cursor of each lane before this frame. A frame whose predecessors are not all there is not believed.
    pub(crate) seen: [u64; 3],
    pub(crate) body: Body,
}

const NOTE: u8 = 1;
const STARTED: u8 = 2;
const OUTPUT: u8 = 3;
const EXIT: u8 = 4;
const EXIT_BYTES: usize = 1 + 1 + 4 + 4 + 8 + 8 + 8;

impl Frame {
    /// Appends the frame to `out`.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; 8]);
        out.extend_from_slice(&self.cursor.to_le_bytes());
        out.extend_from_slice(&self.time_ms.to_le_bytes());
        let kind = match &self.body {
            Body::Note(_) => NOTE,
            Body::Started { .. } => STARTED,
            Body::Output { .. } => OUTPUT,
            Body::Exit(_) => EXIT,
        };
        out.push(kind);
        self.seen.iter().for_each(|cursor| out.extend_from_slice(&cursor.to_le_bytes()));
        match &self.body {
            Body::Note(note) => out.extend_from_slice(note),
            Body::Started { pid } => out.extend_from_slice(&pid.to_le_bytes()),
            Body::Output { offset, data } => {
                out.extend_from_slice(&offset.to_le_bytes());
                out.extend_from_slice(data);
            }
            Body::Exit(exit) => encode_exit(exit, out),
        }
        let length = u32::try_from(out.len() - start - FRAME_HEAD).unwrap_or(u32::MAX);
        out[start..start + 4].copy_from_slice(&length.to_le_bytes());
        let sum = check_sum(&out[start..]);
        out[start + 4..start + 8].copy_from_slice(&sum.to_le_bytes());
    }

    /// Bytes of the frame that begins `bytes`, by what it says itself; `None`: it says what no frame can.
    /// Needs the first four bytes.
    pub(crate) fn length(bytes: &[u8]) -> Option<usize> {
        let body = usize::try_from(u32_at(bytes, 0)?).ok()?;
        (body <= BODY_MAX).then_some(FRAME_HEAD + body)
    }

    /// Reads a whole frame; `None` when it is none.
    pub(crate) fn decode(bytes: &Bytes) -> Option<Self> {
        if bytes.len() < FRAME_HEAD || Self::length(bytes)? != bytes.len() || u32_at(bytes, 4)? != check_sum(bytes) {
            return None;
        }
        let body = bytes.slice(FRAME_HEAD..);
        let body = match bytes[24] {
            NOTE => Body::Note(body),
            STARTED if body.len() == 4 => Body::Started { pid: u32_at(&body, 0)? },
            OUTPUT if body.len() > 8 => Body::Output { offset: u64_at(&body, 0)?, data: body.slice(8..) },
            EXIT => Body::Exit(decode_exit(&body)?),
            _ => return None,
        };
        let time_ms = i64::from_le_bytes(bytes.get(16..24)?.try_into().ok()?);
        let seen = [u64_at(bytes, 25)?, u64_at(bytes, 33)?, u64_at(bytes, 41)?];
        Some(Self { cursor: u64_at(bytes, 8)?, time_ms, seen, body })
    }
}

fn check_sum(frame: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&frame[..4]);
    hasher.update(&frame[8..]);
    hasher.finalize()
}

const CAUSES: [Cause; 6] =
    [Cause::Exited, Cause::Signalled, Cause::TimedOut, Cause::Cancelled, Cause::MachineStopped, Cause::Lost];

fn encode_exit(exit: &Exit, out: &mut Vec<u8>) {
    let cause = CAUSES.iter().position(|cause| *cause == exit.cause).unwrap_or(CAUSES.len() - 1);
    out.push(cause as u8);
    out.push(u8::from(exit.code.is_some()) | u8::from(exit.signal.is_some()) << 1);
    out.extend_from_slice(&exit.code.unwrap_or(0).to_le_bytes());
    out.extend_from_slice(&exit.signal.unwrap_or(0).to_le_bytes());
    for number in [exit.stdout_bytes, exit.stderr_bytes, exit.duration_ms] {
        out.extend_from_slice(&number.to_le_bytes());
    }
}

fn decode_exit(body: &[u8]) -> Option<Exit> {
    if body.len() != EXIT_BYTES {
        return None;
    }
    let cause = *CAUSES.get(usize::from(body[0]))?;
    let i32_at = |at: usize| Some(i32::from_le_bytes(body.get(at..at + 4)?.try_into().ok()?));
    Some(Exit {
        cause,
        code: if body[1] & 1 != 0 { Some(i32_at(2)?) } else { None },
        signal: if body[1] & 2 != 0 { Some(i32_at(6)?) } else { None },
        stdout_bytes: u64_at(body, 10)?,
        stderr_bytes: u64_at(body, 18)?,
        duration_ms: u64_at(body, 26)?,
    })
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frames() -> impl Strategy<Value = Frame> {
        let exit = (0usize..6, any::<Option<i32>>(), any::<Option<i32>>(), any::<[u64; 3]>()).prop_map(
            |(cause, code, signal, [stdout_bytes, stderr_bytes, duration_ms])| {
                Body::Exit(Exit { cause: CAUSES[cause], code, signal, stdout_bytes, stderr_bytes, duration_ms })
            },
        );
        let data = || prop::collection::vec(any::<u8>(), 1..200).prop_map(Bytes::from);
        let body = prop_oneof![
            data().prop_map(Body::Note),
            any::<u32>().prop_map(|pid| Body::Started { pid }),
            (any::<u64>(), data()).prop_map(|(offset, data)| Body::Output { offset, data }),
            exit,
        ];
        (any::<u64>(), any::<i64>(), any::<[u64; 3]>(), body).prop_map(|(cursor, time_ms, seen, body)| Frame {
            cursor,
            time_ms,
            seen,
            body,
        })
    }

    proptest! {
        #[test]
        fn a_frame_reads_back_and_no_changed_one_does(frame in frames(), at in any::<prop::sample::Index>(), bit in 0u8..8) {
            let mut bytes = Vec::new();
            frame.encode(&mut bytes);
            prop_assert_eq!(Frame::length(&bytes), Some(bytes.len()));
            prop_assert_eq!(Frame::decode(&Bytes::from(bytes.clone())), Some(frame));
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            prop_assert_eq!(Frame::decode(&Bytes::from(bytes.clone())), None);
            bytes.truncate(at);
            prop_assert_eq!(Frame::decode(&Bytes::from(bytes)), None);
        }

        #[test]
        fn arbitrary_bytes_are_refused_without_harm(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let length = Frame::length(&bytes);
            prop_assert!(length.is_none_or(|n| n <= FRAME_HEAD + BODY_MAX));
            prop_assert!(Frame::decode(&Bytes::from(bytes.clone())).is_none(), "a check sum of 32 bits was met");
            prop_assert!(SegmentHead::decode(&bytes).is_none());
        }

        #[test]
        fn whatever_has_a_right_sum_is_still_checked(kind in any::<u8>(), body in prop::collection::vec(any::<u8>(), 0..64)) {
            let frame = Frame { cursor: 1, time_ms: 2, seen: [0; 3], body: Body::Note(Bytes::from(body)) };
            let mut bytes = Vec::new();
            frame.encode(&mut bytes);
            bytes[24] = kind;
            let sum = check_sum(&bytes);
            bytes[4..8].copy_from_slice(&sum.to_le_bytes());
            if let Some(Frame { body: Body::Output { data, .. }, .. }) = Frame::decode(&Bytes::from(bytes)) {
                prop_assert!(!data.is_empty());
            }
        }

        #[test]
        fn a_segment_head_reads_back(prev_cursor in any::<u64>(), first_offset in any::<u64>(), lane in 0usize..3, at in 0usize..32) {
            let head = SegmentHead { lane: LaneId::ALL[lane], prev_cursor, first_offset };
            let mut bytes = head.encode();
            prop_assert_eq!(SegmentHead::decode(&bytes), Some(head));
            bytes[at] ^= 0x10;
            prop_assert_eq!(SegmentHead::decode(&bytes), None);
        }
    }
}
