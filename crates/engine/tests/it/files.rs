//! Directories, trees and watches through the real protocol, with faults on demand.

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use mainbrella_engine::{ExitReport, FileEvent, FileEventKind, FileEvents, FileKind, MachineHandle, WriteOptions};
use mainbrella_types::{ErrorCode, MachineRecord};

use crate::Bench;

async fn machine(bench: &Bench) -> (MachineHandle, MachineRecord) {
    let record = bench.intent("small", 600_000, None);
    (bench.engine.create(record.clone()).await.expect("made"), record)
}

fn body(data: &[u8]) -> BoxStream<'static, std::io::Result<Bytes>> {
    let parts: Vec<_> = data.chunks(70_001).map(|c| Ok(Bytes::copy_from_slice(c))).collect();
    futures::stream::iter(parts).boxed()
}

async fn put(machine: &MachineHandle, path: &[u8]) {
    machine.write_file(path, WriteOptions::default(), body(b"x")).await.expect("written");
}

#[tokio::test]
async fn a_directory_is_listed_by_the_bytes_of_its_names_page_by_page() {
    let bench = Bench::new();
    let (machine, _) = machine(&bench).await;
    let mut names: Vec<Vec<u8>> = (0..700).map(|n| format!("f{n}").into_bytes()).collect();
    names.extend([&b"\xff"[..], b"a\nb", "é".as_bytes(), b"-rf"].map(<[u8]>::to_vec));
    for name in &names {
        put(&machine, &[b"/d/".as_slice(), name].concat()).await;
    }
    put(&machine, b"/d/sub/inner").await;
    names.push(b"sub".to_vec());
    names.sort();
    let mut seen = Vec::new();
    loop {
        let page = machine.list_dir(b"/d", seen.len() as u64, 300).await.expect("listed");
        assert!(page.entries.len() <= 300);
        seen.extend(page.entries);
        if !page.more {
            break;
        }
    }
    assert!(seen.iter().map(|e| &e.name).eq(names.iter()));
    let sub = seen.iter().find(|e| e.name == b"sub").expect("there");
    assert_eq!(sub.stat.kind, FileKind::Directory);
    for (path, offset, limit, code) in [
        (&b"/none"[..], 0, 10, ErrorCode::FileNotFound),
        (b"/d/f1", 0, 10, ErrorCode::FileError),
        (b"/d", 0, 0, ErrorCode::InvalidRequest),
        (b"/d", 0, 1001, ErrorCode::InvalidRequest),
        (b"/d", 1_000_001, 1, ErrorCode::InvalidRequest),
        (b"d", 0, 1, ErrorCode::InvalidRequest),
    ] {
        assert_eq!(machine.list_dir(path, offset, limit).await.expect_err("refused").code(), code);
    }
    bench.driver.guest.hostile_listing.store(true, Ordering::SeqCst);
    let caught = machine.list_dir(b"/d", 0, 1000).await.expect_err("caught");
    assert_eq!(caught.code(), ErrorCode::GuestUnavailable, "a name that leads elsewhere is not passed on");
}

#[tokio::test]
async fn names_and_modes_change_by_the_rules() {
    let bench = Bench::new();
    let (machine, _) = machine(&bench).await;
    let code = |r: Result<_, mainbrella_engine::EngineError>| r.map(drop).expect_err("refused").code();
    let made = machine.make_dir(b"/w", false, 0o750).await.expect("made");
    assert_eq!((made.kind, made.stat.mode), (FileKind::Directory, 0o750));
    assert_eq!(code(machine.make_dir(b"/w", false, 0o755).await), ErrorCode::FileExists);
    machine.make_dir(b"/w", true, 0o755).await.expect("there is fine");
    assert_eq!(code(machine.make_dir(b"/none/x", false, 0o755).await), ErrorCode::FileNotFound);
    put(&machine, b"/w/a").await;
    put(&machine, b"/w/b").await;
    assert_eq!(code(machine.rename(b"/w/a", b"/w/b").await), ErrorCode::FileExists);
    assert_eq!(machine.rename(b"/w/a", b"/w/c").await.expect("moved").kind, FileKind::File);
    assert_eq!(code(machine.stat_path(b"/w/a", false).await), ErrorCode::FileNotFound);
    assert_eq!(machine.chmod(b"/w/c", 0o640).await.expect("changed").stat.mode, 0o640);
    assert_eq!(machine.stat_path(b"/w/c", true).await.expect("there").stat.mode, 0o640);
    for root in [&b"/"[..], b"//", b"/w/.."] {
        assert_eq!(code(machine.make_dir(root, true, 0o755).await), ErrorCode::InvalidRequest);
        assert_eq!(code(machine.rename(root, b"/x").await), ErrorCode::InvalidRequest);
        assert_eq!(code(machine.rename(b"/w", root).await), ErrorCode::InvalidRequest);
        assert_eq!(code(machine.chmod(root, 0o755).await), ErrorCode::InvalidRequest);
        assert_eq!(machine.remove(root, true).await.expect_err("refused").code(), ErrorCode::InvalidRequest);
    }
    assert_eq!(code(machine.chmod(b"/w/c", 0o10_000).await), ErrorCode::InvalidRequest);
}

#[tokio::test]
async fn a_removal_that_goes_only_half_way_says_what_is_left_and_why() {
    let bench = Bench::new();
    let (machine, _) = machine(&bench).await;
    for path in [&b"/t/a"[..], b"/t/sub/b", b"/t/sub/immutable"] {
        put(&machine, path).await;
    }
    let e = machine.remove(b"/t", false).await.expect_err("not empty");
    assert_eq!(
        (e.code(), e.message()),
        (ErrorCode::FileError, "the machine's file system answered: directory not empty")
    );
    let done = machine.remove(b"/t", true).await.expect("a result");
    assert_eq!(done.remaining, [b"/t/sub/immutable"]);
    assert_eq!((done.removed, done.remaining_count, done.reason.as_deref()), (2, 1, Some("operation not permitted")));
    assert_eq!(machine.remove(b"/none", true).await.expect_err("none").code(), ErrorCode::FileNotFound);
}

#[tokio::test]
async fn trees_go_both_ways_and_a_broken_one_is_not_passed_off_as_whole() {
    let bench = Bench::new();
    let (machine, _) = machine(&bench).await;
    let archive: Vec<u8> = (0..2_000_000u32).map(|i| (i % 251) as u8).collect();
    let done = machine.unpack_tree(b"/t", body(&archive), false).await.expect("unpacked");
    assert_eq!((done.entries, done.bytes), (1, 2_000_000));
    let parts: Vec<_> = machine.pack_tree(b"/t").await.expect("opened").collect().await;
    let back: Vec<u8> = parts.into_iter().flat_map(|p| p.expect("whole")).collect();
    assert!(back == archive);
    bench.driver.guest.broken_tree.store(true, Ordering::SeqCst);
    let parts: Vec<_> = machine.pack_tree(b"/t").await.expect("opened").collect().await;
    let last = parts.last().expect("something").as_ref().expect_err("broken");
    assert_eq!((last.code(), last.message()), (ErrorCode::FileError, "a file became shorter while it was read"));
    let e = machine.unpack_tree(b"/t", body(b"evil"), false).await.expect_err("leads out");
    assert_eq!(e.code(), ErrorCode::InvalidRequest, "{e:?}");
    let broken = vec![Ok(Bytes::from_static(b"x")), Err(std::io::Error::other("gone"))];
    let e = machine.unpack_tree(b"/t", futures::stream::iter(broken).boxed(), false).await.expect_err("cut");
    assert_eq!(e.code(), ErrorCode::InvalidRequest);
    assert_eq!(machine.pack_tree(b"/none").await.err().expect("none").code(), ErrorCode::FileNotFound);
}

#[tokio::test(start_paused = true)]
async fn four_at_once_the_others_wait_and_nobody_longer_than_thirty_seconds() {
    let bench = Bench::new();
    let (machine, _) = machine(&bench).await;
    put(&machine, b"/f").await;
    bench.driver.guest.mute_files.store(true, Ordering::SeqCst);
    let begin = tokio::time::Instant::now();
    let mut calls: Vec<_> = (0..4)
        .map(|_| {
            let machine = machine.clone();
            tokio::spawn(async move { machine.stat_path(b"/f", false).await.map(drop) })
        })
        .collect();
    tokio::time::sleep(Duration::from_secs(10)).await;
    let waits = {
        let machine = machine.clone();
        tokio::spawn(async move { machine.list_dir(b"/", 0, 10).await.map(drop) })
    };
    for call in calls.drain(..) {
        assert_eq!(call.await.expect("joined").expect_err("silent").code(), ErrorCode::DeadlineExceeded);
    }
    assert!((30..32).contains(&begin.elapsed().as_secs()), "{:?}", begin.elapsed());
    bench.driver.guest.mute_files.store(false, Ordering::SeqCst);
    waits.await.expect("joined").expect("its turn came");
}

#[tokio::test(start_paused = true)]
async fn a_reader_who_stands_still_gives_its_place_back_and_is_told() {
    let bench = Bench::new();
    let (machine, _) = machine(&bench).await;
    machine.unpack_tree(b"/t", body(&vec![7; 3_000_000]), false).await.expect("unpacked");
    let mut stalled = Vec::new();
    for _ in 0..4 {
        let mut reader = machine.pack_tree(b"/t").await.expect("opened");
        reader.next().await.expect("a first piece").expect("whole");
        stalled.push(reader);
    }
    tokio::time::sleep(Duration::from_secs(31)).await;
    // (A listing: single calls take their deadlines from the real clock.)
    machine.list_dir(b"/", 0, 10).await.expect("the places are free again");
    let rest: Vec<_> = stalled.remove(0).collect().await;
    assert_eq!(rest.last().expect("an end").as_ref().expect_err("told").code(), ErrorCode::DeadlineExceeded);
    drop(stalled);
}

async fn next(events: &mut FileEvents) -> FileEvent {
    let next = tokio::time::timeout(Duration::from_secs(10), events.next()).await.expect("in time");
    next.expect("not over").expect("no error")
}

fn told(kind: FileEventKind, path: &[u8]) -> FileEvent {
    FileEvent { kind, path: path.to_vec(), new_path: None }
}

#[tokio::test]
async fn a_watch_tells_what_happens_to_its_end() {
    let bench = Bench::new();
    let (machine, _) = machine(&bench).await;
    machine.make_dir(b"/w", false, 0o755).await.expect("made");
    let mut all = machine.watch_dir(b"/w", true).await.expect("watched");
    let mut one = machine.watch_dir(b"/w", false).await.expect("watched");
    put(&machine, b"/w/sub/a").await;
    put(&machine, b"/w/b").await;
    machine.rename(b"/w/b", b"/w/c").await.expect("moved");
    machine.remove(b"/w/sub/a", false).await.expect("removed");
    machine.remove(b"/w/c", false).await.expect("removed");
    machine.remove(b"/w", true).await.expect("removed");
    let renamed = FileEvent { new_path: Some(b"/w/c".to_vec()), ..told(FileEventKind::Renamed, b"/w/b") };
    assert_eq!(next(&mut all).await, told(FileEventKind::Created, b"/w/sub/a"));
    for events in [&mut all, &mut one] {
        assert_eq!(next(events).await, told(FileEventKind::Created, b"/w/b"));
        assert_eq!(next(events).await, renamed);
    }
    assert_eq!(next(&mut all).await, told(FileEventKind::Removed, b"/w/sub/a"));
    for events in [&mut all, &mut one] {
        assert_eq!(next(events).await, told(FileEventKind::Removed, b"/w/c"));
        assert_eq!(next(events).await, told(FileEventKind::Ended, b"/w"));
        assert!(events.next().await.is_none());
    }
    assert_eq!(machine.watch_dir(b"/none", true).await.err().expect("none").code(), ErrorCode::FileNotFound);
}

#[tokio::test]
async fn a_watcher_who_does_not_keep_up_is_told_so_and_holds_up_nobody() {
    let bench = Bench::new();
    let (machine, _) = machine(&bench).await;
    machine.make_dir(b"/w", false, 0o755).await.expect("made");
    let mut slow: Vec<FileEvents> = Vec::new();
    for _ in 0..8 {
        slow.push(machine.watch_dir(b"/w", true).await.expect("watched"));
    }
    let e = machine.watch_dir(b"/w", true).await.err().expect("the ninth");
    assert_eq!(e.code(), ErrorCode::Overloaded);
    for n in 0..2000 {
        put(&machine, format!("/w/{n}").as_bytes()).await;
    }
    // Nobody has read; file calls have gone on all the same.
    for events in &mut slow {
        let mut seen = 0;
        loop {
            let event = next(events).await;
            if event.kind == FileEventKind::Overflow {
                assert_eq!(event.path, b"/w");
                break;
            }
            assert_eq!(event.path, format!("/w/{seen}").into_bytes(), "in order up to the gap");
            seen += 1;
        }
        assert!(seen < 400, "{seen}");
    }
    put(&machine, b"/w/after").await;
    for events in &mut slow {
        while next(events).await.path != b"/w/after" {}
    }
    drop(slow);
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(machine.watch_dir(b"/w", true).await.expect("their places are free"));
}

#[tokio::test]
async fn a_watch_survives_a_broken_link_and_says_that_it_may_have_missed_something() {
    let bench = Bench::new();
    let (machine, record) = machine(&bench).await;
    machine.make_dir(b"/w", false, 0o755).await.expect("made");
    let mut events = machine.watch_dir(b"/w", true).await.expect("watched");
    bench.driver.cut(&record.key);
    assert_eq!(next(&mut events).await, told(FileEventKind::Overflow, b"/w"));
    put(&machine, b"/w/a").await;
    assert_eq!(next(&mut events).await, told(FileEventKind::Created, b"/w/a"));
    // A dead machine ends it with an error, soon.
    bench.driver.kill(&record.key, ExitReport::Vmm("it was killed".into()));
    let end = tokio::time::timeout(Duration::from_secs(4), async {
        loop {
            match events.next().await {
                Some(Err(e)) => return e,
                Some(Ok(_)) => {}
                None => panic!("it ended as if all were well"),
            }
        }
    });
    assert_eq!(end.await.expect("within seconds").code(), ErrorCode::MachineNotRunning);
}

#[tokio::test(start_paused = true)]
async fn a_watch_alone_keeps_no_machine_from_being_idle() {
    let bench = Bench::new();
    let record = bench.intent("idle", 600_000, Some(20_000));
    let machine = bench.engine.create(record).await.expect("made");
    machine.make_dir(b"/w", false, 0o755).await.expect("made");
    let mut events = machine.watch_dir(b"/w", true).await.expect("watched");
    let end = tokio::time::timeout(Duration::from_secs(60), events.next()).await.expect("it is stopped");
    assert_eq!(end.expect("told").expect_err("an error").code(), ErrorCode::MachineNotRunning);
}
