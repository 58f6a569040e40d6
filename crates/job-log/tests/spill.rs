//! A log that goes on in memory when the disk is full.
#![allow(clippy::unwrap_used)]

use bytes::Bytes;
use mainbrella_job_log::{Cause, Entry, Event, Exit, JobLog, Limits, Stream};

const LIMITS: Limits = Limits::keeping(64 * 1024 * 1024);

fn content(from: u64, length: usize) -> Bytes {
    (from..from + length as u64).map(|i| (i % 251) as u8).collect()
}

/// Appends to a log as its owner does, in numbers.
struct Writer<'a> {
    log: &'a JobLog,
    cursor: u64,
    ends: [u64; 2],
}

impl<'a> Writer<'a> {
    fn new(log: &'a JobLog) -> Self {
        let mut this = Self { log, cursor: 0, ends: [0; 2] };
        this.append(Entry::Started { pid: 7 });
        this
    }

    fn append(&mut self, entry: Entry) {
        self.cursor += 1;
        self.log.append(&[Event { cursor: self.cursor, time_ms: 1, entry }], false).unwrap();
    }

    fn output(&mut self, stream: Stream, length: usize) {
        let i = usize::from(stream == Stream::Stderr);
        let offset = self.ends[i];
        self.ends[i] += length as u64;
        self.append(Entry::Output { stream, offset, data: content(offset, length) });
    }

    fn exit(&mut self) {
        let [stdout_bytes, stderr_bytes] = self.ends;
        let exit =
            Exit { cause: Cause::Exited, code: Some(0), signal: None, stdout_bytes, stderr_bytes, duration_ms: 1 };
        self.append(Entry::Exit(exit));
    }
}

/// Reads a log from its beginning: bytes of each output that are there, and bytes that are told to be missing.
fn read(log: &JobLog, most: usize) -> ([u64; 2], [u64; 2]) {
    let (mut there, mut missing, mut at, mut cursor) = ([0; 2], [0; 2], [0; 2], 0);
    let mut reader = log.reader(0);
    loop {
        let events = reader.read(log, most, 100).unwrap();
        if events.is_empty() {
            break;
        }
        for event in events {
            assert!(event.cursor > cursor, "{} after {cursor}", event.cursor);
            cursor = event.cursor;
            match event.entry {
                Entry::Output { stream, offset, data } => {
                    let i = usize::from(stream == Stream::Stderr);
                    assert_eq!((offset, &data), (at[i], &content(offset, data.len())));
                    (at[i], there[i]) = (offset + data.len() as u64, there[i] + data.len() as u64);
                }
                Entry::Gap { stream, offset, length } => {
                    let i = usize::from(stream == Stream::Stderr);
                    assert_eq!(offset, at[i]);
                    (at[i], missing[i]) = (offset + length, missing[i] + length);
                }
                Entry::Started { .. } | Entry::Exit(_) => {}
            }
        }
    }
    assert_eq!(cursor, log.position().cursor, "the exit is read too");
    (there, missing)
}

#[test]
fn what_was_on_the_disk_and_what_came_after_is_one_log() {
    let dir = tempfile::tempdir().unwrap();
    for spill_at in [0, 1, 7, 40] {
        let log = JobLog::create(&dir.path().join("job"), b"note", LIMITS).unwrap();
        let mut writer = Writer::new(&log);
        for n in 0..40 {
            if n == spill_at {
                log.spill();
            }
            writer.output(if n % 3 == 0 { Stream::Stderr } else { Stream::Stdout }, 1 + n * 500);
        }
        log.set_note(b"another").unwrap();
        writer.exit();
        log.rest();
        assert_eq!(read(&log, 10_000), (writer.ends, [0, 0]), "spilled at {spill_at}");
        assert_eq!(&log.note()[..], b"another");
        let mut output = log.output(Stream::Stdout, 1000);
        let mut at = 1000;
        while let Some(piece) = output.read(&log, 333).unwrap() {
            assert_eq!((piece.offset, &piece.data), (at, &content(at, piece.data.len())));
            at += piece.data.len() as u64;
        }
        assert_eq!(at, writer.ends[0]);
        log.remove().unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

#[test]
fn in_memory_a_beginning_and_an_end_are_kept_and_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("nothing is made here");
    let log = JobLog::create_in_memory(&at, b"note", LIMITS).unwrap();
    let mut writer = Writer::new(&log);
    for n in 0..400u32 {
        writer.output(if n % 2 == 0 { Stream::Stdout } else { Stream::Stderr }, 100_000);
        assert!(log.position().disk_bytes < 3_700_000, "{}", log.position().disk_bytes);
    }
    writer.exit();
    let (there, missing) = read(&log, 256 * 1024);
    for i in 0..2 {
        assert_eq!(there[i] + missing[i], writer.ends[i]);
        assert!((900_000..1_900_000).contains(&there[i]), "{there:?}");
    }
    let gaps = log.gaps(Stream::Stdout);
    assert!(gaps.len() == 1 && gaps[0].0 > 400_000 && gaps[0].0 + gaps[0].1 < writer.ends[0] - 400_000, "{gaps:?}");
    assert!(!at.exists());
    log.remove_output().unwrap();
    assert!(log.position().disk_bytes < 1000);
    log.remove().unwrap();
}

#[test]
fn what_is_kept_on_the_disk_is_not_dropped_for_what_comes_in_memory() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits { segment_bytes: 100_000, head_segments: 8, tail_segments: 8 };
    let log = JobLog::create(&dir.path().join("job"), b"", limits).unwrap();
    let mut writer = Writer::new(&log);
    for _ in 0..100 {
        writer.output(Stream::Stdout, 10_000);
    }
    log.spill();
    for _ in 0..500 {
        writer.output(Stream::Stdout, 10_000);
    }
    writer.exit();
    let gaps = log.gaps(Stream::Stdout);
    assert!(gaps.len() == 1 && gaps[0].0 > 1_000_000 + 400_000, "{gaps:?}");
    let (there, missing) = read(&log, 256 * 1024);
    assert_eq!((there[0] + missing[0], missing[0]), (6_000_000, gaps[0].1));
}
