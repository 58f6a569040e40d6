//! The log against a model: random appends, reopenings, cuts and damage, read from random cursors.
#![allow(clippy::unwrap_used)]

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use mainbrella_job_log::{Cause, Entry, Event, Exit, JobLog, Limits, Stream};
use proptest::prelude::*;
use proptest::sample::Index;

/// Small enough that a few hundred bytes roll a segment over and a few thousand drop one.
const LIMITS: Limits = Limits { segment_bytes: 500, head_segments: 3, tail_segments: 2 };

fn content(stream: Stream, offset: u64, length: usize) -> Bytes {
    let salt = if stream == Stream::Stdout { 0x35 } else { 0xa7 };
    (offset..offset + length as u64).map(|at| (at.wrapping_mul(2_654_435_761) >> 7) as u8 ^ salt).collect()
}

#[derive(Debug, Clone)]
enum Step {
    /// Lengths of outputs, appended together.
    Append(Vec<(Stream, usize)>, bool),
    Reopen,
    Note(u8),
    /// A file loses its end.
    Cut(Index, Index),
    /// A bit of a file is turned.
    Flip(Index, Index, u8),
    /// Read from a cursor, in pieces.
    Read(Index, usize),
    Bytes(Stream, Index),
    Exit,
}

fn stream() -> impl Strategy<Value = Stream> {
    prop_oneof![3 => Just(Stream::Stdout), 1 => Just(Stream::Stderr)]
}

fn step(damage: bool) -> impl Strategy<Value = Step> {
    let weight = u32::from(damage);
    prop_oneof![
        12 => (prop::collection::vec((stream(), 1usize..300), 1..8), prop::bool::weighted(0.1)).prop_map(|(list, tight)| Step::Append(list, tight)),
        2 => Just(Step::Reopen),
        1 => any::<u8>().prop_map(Step::Note),
        weight => (any::<Index>(), any::<Index>()).prop_map(|(file, at)| Step::Cut(file, at)),
        weight => (any::<Index>(), any::<Index>(), 0u8..8).prop_map(|(file, at, bit)| Step::Flip(file, at, bit)),
        4 => (any::<Index>(), 1usize..2000).prop_map(|(after, piece)| Step::Read(after, piece)),
        1 => (stream(), any::<Index>()).prop_map(|(stream, at)| Step::Bytes(stream, at)),
        1 => Just(Step::Exit),
    ]
}

struct Model {
    log: JobLog,
    dir: PathBuf,
    events: Vec<Event>,
    totals: [u64; 2],
    note: Vec<u8>,
    /// A reader that goes on through everything, and what it was given.
    follower: mainbrella_job_log::Reader,
    followed: Vec<Event>,
}

impl Model {
    fn new(dir: &Path) -> Self {
        let log = JobLog::create(dir, b"first", LIMITS).unwrap();
        let follower = log.reader(0);
        let mut model = Self {
            log,
            dir: dir.to_owned(),
            events: Vec::new(),
            totals: [0; 2],
            note: b"first".to_vec(),
            follower,
            followed: Vec::new(),
        };
        model.append(vec![Entry::Started { pid: 7 }], false);
        model
    }

    fn ended(&self) -> bool {
        matches!(self.events.last(), Some(Event { entry: Entry::Exit(_), .. }))
    }

    fn append(&mut self, entries: Vec<Entry>, tight: bool) {
        let first = self.events.len() as u64 + 1;
        let events: Vec<Event> = (first..)
            .zip(entries)
            .map(|(cursor, entry)| Event { cursor, time_ms: cursor as i64 * 10, entry })
            .collect();
        self.log.append(&events, tight).unwrap();
        self.events.extend(events);
    }

    fn outputs(&mut self, list: Vec<(Stream, usize)>, tight: bool) {
        let entries = list
            .into_iter()
            .map(|(stream, length)| {
                let total = &mut self.totals[stream as usize];
                let offset = *total;
                *total += length as u64;
                Entry::Output { stream, offset, data: content(stream, offset, length) }
            })
            .collect();
        self.append(entries, tight);
    }

    fn files(&self) -> Vec<PathBuf> {
        let mut files: Vec<_> = std::fs::read_dir(&self.dir).unwrap().map(|e| e.unwrap().path()).collect();
        files.sort();
        files
    }

    /// Opens again. Says whether there is still a log; what was lost is lost in the model too.
    fn reopen(&mut self) -> bool {
        let Ok(log) = JobLog::open(&self.dir, LIMITS) else { return false };
        self.log = log;
        let position = self.log.position();
        assert!(position.cursor <= self.events.len() as u64, "nothing is invented");
        self.events.truncate(position.cursor as usize);
        self.totals = [position.stdout_bytes, position.stderr_bytes];
        for (i, stream) in [Stream::Stdout, Stream::Stderr].into_iter().enumerate() {
            let ends = self.events.iter().filter_map(|e| match &e.entry {
                Entry::Output { stream: s, offset, data } if *s == stream => Some(offset + data.len() as u64),
                _ => None,
            });
            assert_eq!(self.totals[i], ends.max().unwrap_or(0), "what is said to be there is what was appended");
        }
        // A reader that was further goes on from where the log now ends, as its owner would.
        if self.follower.cursor() > position.cursor {
            self.followed.retain(|e| e.cursor <= position.cursor);
            self.follower = self.log.reader(position.cursor.min(self.followed.last().map_or(0, |e| e.cursor)));
        }
        true
    }

    fn follow(&mut self) {
        loop {
            let events = self.follower.read(&self.log, 700, 5).unwrap();
            if events.is_empty() {
                break;
            }
            self.followed.extend(events);
        }
    }

    /// What a reader is given after `after` is exactly what was appended, or is said to be missing.
    fn check(&self, after: u64, given: &[Event]) {
        let mut last = after;
        let mut gaps: [Vec<(u64, u64)>; 2] = Default::default();
        for event in given {
            assert!(event.cursor > last, "{} after {last}", event.cursor);
            last = event.cursor;
            match &event.entry {
                Entry::Gap { stream, offset, length } => {
                    assert!(*length > 0);
                    gaps[*stream as usize].push((*offset, offset + length));
                }
                _ => assert_eq!(event, &self.events[event.cursor as usize - 1]),
            }
        }
        let cursors: std::collections::BTreeSet<u64> = given.iter().map(|e| e.cursor).collect();
        for event in self.events.iter().filter(|e| e.cursor > after) {
            let given = cursors.contains(&event.cursor)
                && !given.iter().any(|e| e.cursor == event.cursor && matches!(e.entry, Entry::Gap { .. }));
            match &event.entry {
                _ if given => {}
                Entry::Output { stream, offset, data } => {
                    let (from, to) = (*offset, offset + data.len() as u64);
                    assert!(
                        gaps[*stream as usize].iter().any(|(a, b)| *a <= from && to <= *b),
                        "event {} ({stream:?} {from}..{to}) is neither given nor missing: {gaps:?}",
                        event.cursor
                    );
                }
                other => panic!("{other:?} is missing"),
            }
        }
    }

    fn read_from(&self, after: u64, piece: usize) -> Vec<Event> {
        let mut reader = self.log.reader(after);
        let mut all = Vec::new();
        loop {
            let events = reader.read(&self.log, piece, 1000).unwrap();
            if events.is_empty() {
                return all;
            }
            all.extend(events);
            assert_eq!(reader.cursor(), all.last().unwrap().cursor);
        }
    }

    fn bytes_from(&self, stream: Stream, from: u64, damaged: bool) {
        let mut reader = self.log.output(stream, from);
        let gaps = self.log.gaps(stream);
        let mut at = from;
        while let Some(piece) = reader.read(&self.log, 130).unwrap() {
            assert!(piece.offset >= at && !piece.data.is_empty());
            if piece.offset > at && !damaged {
                assert!(gaps.iter().any(|(o, n)| *o <= at && piece.offset == o + n), "{gaps:?} {at}..{}", piece.offset);
            }
            assert_eq!(piece.data, content(stream, piece.offset, piece.data.len()));
            at = piece.offset + piece.data.len() as u64;
        }
        assert!(at <= from.max(self.totals[stream as usize]));
    }
}

fn run(steps: Vec<Step>) {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("job");
    let mut model = Model::new(&dir);
    let mut damaged = false;
    for step in steps {
        match step {
            Step::Append(list, tight) if !model.ended() => model.outputs(list, tight),
            Step::Append(..) => {}
            Step::Reopen => {
                model.follow();
                assert!(model.reopen() || damaged);
            }
            Step::Note(byte) => {
                model.note = vec![byte; 40];
                model.log.set_note(&model.note).unwrap();
            }
            Step::Cut(file, at) => {
                let files = model.files();
                let file = std::fs::OpenOptions::new().write(true).open(&files[file.index(files.len())]).unwrap();
                let size = file.metadata().unwrap().len() as usize;
                file.set_len(at.index(size.max(1)) as u64).unwrap();
                damaged = true;
                if !model.reopen() {
                    return;
                }
            }
            Step::Flip(file, at, bit) => {
                let files = model.files();
                let path = &files[file.index(files.len())];
                let mut bytes = std::fs::read(path).unwrap();
                if !bytes.is_empty() {
                    let at = at.index(bytes.len());
                    bytes[at] ^= 1 << bit;
                    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
                    file.write_at(&bytes[at..=at], at as u64).unwrap();
                }
                damaged = true;
                // Some readers meet it before anybody opens the log again.
                for after in [0, model.events.len() as u64 / 2] {
                    let given = model.read_from(after, 900);
                    if !path.ends_with("control-00000000") {
                        model.check(after, &given);
                    }
                }
                if !model.reopen() {
                    return;
                }
            }
            Step::Read(after, piece) => {
                let after = after.index(model.events.len() + 1) as u64;
                model.check(after, &model.read_from(after, piece));
                model.follow();
            }
            Step::Bytes(stream, at) => {
                let total = model.totals[stream as usize];
                model.bytes_from(stream, at.index(total as usize + 1) as u64, damaged);
            }
            Step::Exit if !model.ended() && model.events.len() > 30 => {
                let [stdout_bytes, stderr_bytes] = model.totals;
                let cause = Cause::Exited;
                let exit = Exit { cause, code: Some(3), signal: None, stdout_bytes, stderr_bytes, duration_ms: 9 };
                model.append(vec![Entry::Exit(exit)], false);
                assert_eq!(model.log.position().exit.unwrap().0, exit);
            }
            Step::Exit => {}
        }
    }
    model.follow();
    model.check(0, &model.read_from(0, 100_000));
    if !damaged {
        model.check(0, &model.followed);
        assert!(model.reopen());
        assert_eq!(model.log.note(), model.note);
        model.check(0, &model.read_from(0, 1));
    }
    let disk: u64 = model.files().iter().map(|f| std::fs::metadata(f).unwrap().len()).sum();
    let most = 2 * u64::from(LIMITS.head_segments + LIMITS.tail_segments + 1) * (LIMITS.segment_bytes + 400) + 40_000;
    assert!(disk <= most, "{disk} bytes on disk");
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 4000, failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    #[test]
    fn nothing_is_lost_repeated_or_invented(steps in prop::collection::vec(step(false), 1..120)) {
        run(steps);
    }

    #[test]
    fn what_is_torn_or_damaged_is_cut_or_told_and_never_believed(steps in prop::collection::vec(step(true), 1..120)) {
        run(steps);
    }

    /// Any bytes at all in the place of a log.
    #[test]
    fn a_folder_full_of_anything_does_no_harm(files in prop::collection::vec((0usize..6, prop::collection::vec(any::<u8>(), 0..300)), 0..6)) {
        let dir = tempfile::tempdir().unwrap();
        let log = JobLog::create(dir.path(), b"n", LIMITS).unwrap();
        let data = content(Stream::Stdout, 0, 10);
        log.append(&[
            Event { cursor: 1, time_ms: 0, entry: Entry::Started { pid: 1 } },
            Event { cursor: 2, time_ms: 0, entry: Entry::Output { stream: Stream::Stdout, offset: 0, data } },
        ], false).unwrap();
        drop(log);
        let names = ["control-00000000", "stdout-00000000", "stdout-00000001", "stderr-00000007", "stdout-x", "other"];
        for (name, bytes) in files {
            std::fs::write(dir.path().join(names[name]), bytes).unwrap();
        }
        if let Ok(log) = JobLog::open(dir.path(), LIMITS) {
            prop_assert!(log.position().cursor <= 2);
            prop_assert!(log.reader(0).read(&log, 1000, 10).unwrap().len() <= 2);
        }
    }
}

#[test]
fn what_does_not_follow_is_refused_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = Model::new(dir.path());
    model.outputs(vec![(Stream::Stdout, 10)], false);
    let out = |cursor, offset, length| Event {
        cursor,
        time_ms: 0,
        entry: Entry::Output { stream: Stream::Stdout, offset, data: content(Stream::Stdout, offset, length) },
    };
    let gap = Event { cursor: 3, time_ms: 0, entry: Entry::Gap { stream: Stream::Stdout, offset: 10, length: 1 } };
    let exit = |exit| Event { cursor: 3, time_ms: 0, entry: Entry::Exit(exit) };
    let wrong = Exit { cause: Cause::Lost, code: None, signal: None, stdout_bytes: 9, stderr_bytes: 0, duration_ms: 0 };
    for bad in [out(4, 10, 1), out(2, 10, 1), out(3, 9, 1), out(3, 11, 1), out(3, 10, 0), gap, exit(wrong)] {
        let error = model.log.append(&[out(3, 10, 5), bad.clone()], false).err();
        let alone = model.log.append(&[bad], false).unwrap_err();
        assert_eq!((alone.kind(), error.is_some()), (std::io::ErrorKind::InvalidInput, true));
    }
    assert_eq!(model.log.position().cursor, 2);
    let right = Exit { stdout_bytes: 10, ..wrong };
    model.log.append(&[exit(right)], false).unwrap();
    assert!(model.log.append(&[Event { cursor: 4, ..out(4, 10, 1) }], false).is_err(), "after the end nothing comes");
}

#[test]
fn a_full_disk_leaves_the_log_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = Model::new(dir.path());
    model.outputs(vec![(Stream::Stdout, 100); 3], false);
    let before = model.log.position();
    // A folder stands where the next segment would be made.
    let number = model.files().iter().filter(|f| f.to_string_lossy().contains("stderr")).count();
    let blocked = dir.path().join(format!("stderr-{number:08}"));
    std::fs::create_dir(&blocked).unwrap();
    let next = |cursor, stream, offset| Event {
        cursor,
        time_ms: 1,
        entry: Entry::Output { stream, offset, data: content(stream, offset, 50) },
    };
    let batch = [next(5, Stream::Stdout, 300), next(6, Stream::Stderr, 0)];
    assert!(model.log.append(&batch, false).is_err());
    assert_eq!(model.log.position(), before);
    std::fs::remove_dir(&blocked).unwrap();
    let opened = JobLog::open(dir.path(), LIMITS).unwrap();
    assert_eq!(opened.position().cursor, before.cursor, "nor is anything on the disk");
    model.log.append(&batch, false).unwrap();
    assert_eq!(JobLog::open(dir.path(), LIMITS).unwrap().position().cursor, 6);
}

#[test]
fn a_log_that_has_ended_can_give_up_its_output_and_keep_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = Model::new(dir.path());
    model.outputs(vec![(Stream::Stdout, 200); 40], false);
    assert!(model.log.remove_output().is_err(), "not while it is written");
    let exit =
        Exit { cause: Cause::Exited, code: Some(0), signal: None, stdout_bytes: 8000, stderr_bytes: 0, duration_ms: 1 };
    model.append(vec![Entry::Exit(exit)], false);
    model.log.remove_output().unwrap();
    assert_eq!(model.files().len(), 1);
    for _ in 0..2 {
        let all = model.read_from(0, 10_000);
        model.check(0, &all);
        assert_eq!(all.len(), 3, "start, gap, exit: {all:?}");
        let position = model.log.position();
        assert_eq!((position.stdout_omitted, position.stdout_bytes), (8000, 8000));
        model.log = JobLog::open(dir.path(), LIMITS).unwrap();
    }
    model.log.remove().unwrap();
    assert!(!dir.path().exists());
    model.log.remove().unwrap();
}
