//! Commands and files through the real protocol.

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use mainbrella_engine::machine::jobs::JobOrder;
use mainbrella_engine::{CommandEnding, CommandOrder, MachineHandle, Omitted, WriteOptions};
use mainbrella_types::ErrorCode;

use crate::{Bench, job, order};

async fn machine(bench: &Bench) -> MachineHandle {
    bench.engine.create(bench.intent("small", 600_000, None)).await.expect("made")
}

async fn content(machine: &MachineHandle, path: &[u8], offset: u64, length: Option<u64>) -> Vec<u8> {
    let reader = machine.read_file(path, offset, length).await.expect("opened");
    let parts: Vec<Bytes> = reader.chunks.map(|c| c.expect("whole")).collect().await;
    parts.concat()
}

fn body(parts: Vec<std::io::Result<Bytes>>) -> futures::stream::BoxStream<'static, std::io::Result<Bytes>> {
    futures::stream::iter(parts).boxed()
}

#[tokio::test]
async fn five_hundred_commands_at_once_each_give_their_own_code() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    let runs = futures::future::join_all((0..500).map(|i| {
        let machine = machine.clone();
        async move { machine.run(order(&format!("exit {}", i % 256))).await }
    }))
    .await;
    for (i, run) in runs.into_iter().enumerate() {
        let code = i32::try_from(i % 256).expect("small");
        assert_eq!(run.expect("ran").ending, CommandEnding::Exited(code));
    }
}

#[tokio::test]
async fn a_time_out_is_a_result_and_a_missing_program_a_typed_error() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    let mut slow = order("hang");
    slow.timeout_ms = 30;
    assert_eq!(machine.run(slow).await.expect("reported").ending, CommandEnding::TimedOut);
    let e = machine.run(order("no-such-program")).await.expect_err("cannot start");
    assert_eq!(e.code(), ErrorCode::CommandNotStarted);
}

#[tokio::test]
async fn a_command_runs_as_the_user_it_names() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    let of = |user: &str| CommandOrder { user: Some(user.to_owned()), ..order("printenv USER") };
    for (user, said) in [("app", "app\n"), ("app:1000", "app\n"), ("1000", "1000\n")] {
        assert_eq!(machine.run(of(user)).await.expect("ran").stdout.bytes, said, "{user}");
    }
    for (user, what) in [("nobody", "no such user"), ("app:staff", "no such group")] {
        let e = machine.run(of(user)).await.expect_err("nobody of that name");
        assert_eq!(e.code(), ErrorCode::CommandNotStarted);
        assert!(e.message().contains(what), "{}", e.message());
        let order = JobOrder { user: Some(user.to_owned()), ..job("true") };
        assert_eq!(machine.start_job(order, None).await.expect_err("neither").code(), ErrorCode::CommandNotStarted);
    }
}

#[tokio::test(start_paused = true)]
async fn where_the_guest_forgets_the_time_limit_the_host_answers_with_what_came_and_has_it_ended() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    bench.driver.guest.no_time_outs.store(true, Ordering::SeqCst);
    let mut slow = order("count 1000000 1000");
    slow.timeout_ms = 2500;
    let outcome = machine.run(slow).await.expect("the host's own clock answers");
    assert_eq!(outcome.ending, CommandEnding::Overdue);
    assert!(outcome.stdout.bytes.starts_with(b"1\n2\n3\n"), "what came until then is there");
    let jobs = machine.jobs();
    let ended = jobs.wait(&outcome.job_id, Duration::from_secs(10)).await.expect("it is kept as a job");
    assert!(ended.position.exit.is_some(), "the guest was told to end it");
}

#[tokio::test]
async fn output_beyond_the_budget_keeps_head_and_tail_and_says_what_is_missing() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    let mut flood = order("flood 20000000");
    flood.output_limit = 1000;
    let outcome = machine.run(flood).await.expect("ran");
    assert_eq!(outcome.stdout.total, 20_000_000);
    assert_eq!(outcome.stdout.bytes.len(), 1000);
    assert_eq!(outcome.stdout.omitted, Some(Omitted { offset: 500, length: 19_999_000 }));
}

#[tokio::test]
async fn a_guest_that_repeats_output_is_caught_and_not_believed() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    bench.driver.guest.repeat_output.store(true, Ordering::SeqCst);
    let e = machine.run(order("echo hello")).await.expect_err("caught");
    assert_eq!(e.code(), ErrorCode::GuestUnavailable);
}

#[tokio::test]
async fn a_cut_link_neither_loses_nor_repeats_a_running_command() {
    let bench = Bench::new();
    let record = bench.intent("small", 600_000, None);
    let machine = bench.engine.create(record.clone()).await.expect("made");
    let user = machine.clone();
    let command = tokio::spawn(async move { user.run(order("sleep 300")).await });
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        bench.driver.cut(&record.key);
    }
    assert_eq!(command.await.expect("joined").expect("followed to its end").ending, CommandEnding::Exited(0));
}

#[tokio::test]
async fn files_of_any_name_round_trip_byte_for_byte() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    let data: Vec<u8> = (0..300_000u32).map(|i| (i % 251) as u8).collect();
    for name in [&b"/re\"port"[..], b"/a\nb", b"/x\\", "/é".as_bytes(), b"/\xff"] {
        let parts = data.chunks(70_001).map(|c| Ok(Bytes::copy_from_slice(c))).collect();
        assert_eq!(machine.write_file(name, WriteOptions::default(), body(parts)).await.expect("written"), 300_000);
        assert_eq!(content(&machine, name, 0, None).await, data);
        assert_eq!(content(&machine, name, 100, Some(10)).await, data[100..110]);
        assert_eq!(content(&machine, name, 0, Some(0)).await, b"");
    }
    let e = machine.read_file(b"/none", 0, None).await.err().expect("none");
    assert_eq!(e.code(), ErrorCode::FileNotFound, "{e:?}");
}

#[tokio::test]
async fn a_write_that_breaks_off_replaces_nothing_and_a_full_disk_is_said() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    let write = |parts| machine.write_file(b"/f", WriteOptions::default(), body(parts));
    write(vec![Ok(Bytes::from_static(b"first"))]).await.expect("written");
    let broken = vec![Ok(Bytes::from_static(b"sec")), Err(std::io::Error::other("the client went away"))];
    assert_eq!(write(broken).await.expect_err("broken").code(), ErrorCode::InvalidRequest);
    assert_eq!(content(&machine, b"/f", 0, None).await, b"first");
    bench.driver.guest.disk_full.store(true, Ordering::SeqCst);
    assert_eq!(write(vec![Ok(Bytes::from_static(b"x"))]).await.expect_err("full").code(), ErrorCode::GuestDiskFull);
    let exclusive = WriteOptions { exclusive: true, ..WriteOptions::default() };
    bench.driver.guest.disk_full.store(false, Ordering::SeqCst);
    let e = machine.write_file(b"/f", exclusive, body(vec![])).await.expect_err("exists");
    assert_eq!(e.code(), ErrorCode::FileExists);
}

#[tokio::test(start_paused = true)]
async fn readers_who_take_nothing_do_not_keep_the_place_of_others() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    let large = vec![Ok(Bytes::from(vec![7; 8 << 20]))];
    machine.write_file(b"/large", WriteOptions::default(), body(large)).await.expect("written");
    let mut stalled = Vec::new();
    for _ in 0..4 {
        stalled.push(machine.read_file(b"/large", 0, None).await.expect("opened"));
    }
    machine.write_file(b"/other", WriteOptions::default(), body(vec![])).await.expect("a place is free in time");
    for reader in stalled {
        let all: Vec<_> = reader.chunks.collect().await;
        let error = all.last().expect("something").as_ref().expect_err("what was cut off does not look whole");
        assert_eq!(error.code(), ErrorCode::DeadlineExceeded);
        assert_eq!(all.iter().filter(|c| c.is_err()).count(), 1);
    }
    // One who goes away gives the place back at once.
    let readers: Vec<_> = futures::future::join_all((0..4).map(|_| machine.read_file(b"/large", 0, None))).await;
    drop(readers);
    let begin = tokio::time::Instant::now();
    assert_eq!(content(&machine, b"/large", 5, Some(3)).await, [7, 7, 7]);
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_stands_still_from_its_beginning_is_dialled_again() {
    let bench = Bench::new();
    let record = bench.intent("small", 600_000, None);
    let machine = bench.engine.create(record.clone()).await.expect("made");
    bench.driver.guest.lost_hellos.store(2, Ordering::SeqCst);
    bench.driver.cut(&record.key);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let begin = tokio::time::Instant::now();
    assert_eq!(machine.run(order("echo hello")).await.expect("reached").ending, CommandEnding::Exited(0));
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    // One that never answers is given up, in bounded time.
    bench.driver.guest.lost_hellos.store(u32::MAX, Ordering::SeqCst);
    bench.driver.cut(&record.key);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let begin = tokio::time::Instant::now();
    let e = machine.run(order("echo hello")).await.expect_err("out of reach");
    assert_eq!(e.code(), ErrorCode::GuestUnavailable);
    assert!(begin.elapsed() < Duration::from_secs(25), "{:?}", begin.elapsed());
}
