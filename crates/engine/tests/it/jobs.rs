//! Managed jobs: the real guest agent behind a link that breaks, under a service that is killed and comes back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use mainbrella_engine::clock::TokioClock;
use mainbrella_engine::fake::FakeDriver;
use mainbrella_engine::machine::jobs::{
    Cause, Entry, Event, Follower, JobCommand, JobOrder, JobView, StartKey, Stream, TerminalSize,
};
use mainbrella_engine::{CommandEnding, CommandOrder, ExitReport, MachineHandle};
use mainbrella_guest::{Agent, AgentOptions, Authority, ReapMode, Reaper};
use mainbrella_types::{ErrorCode, MachineRecord, MachineState};
use tempfile::TempDir;

use crate::journal::MemoryJournal;
use crate::{Bench, START};

/// Machines with the real agent in them; jobs are real processes of this host.
fn real() -> FakeDriver {
    FakeDriver::default().with_guests(Arc::new(|| {
        let reaper = Reaper::start(ReapMode::Known).expect("reaper");
        Agent::new(AgentOptions {
            authority: Authority::Process,
            reaper,
            cgroup: None,
            defaults: mainbrella_guest::Defaults::default(),
            pending: None,
        })
        .service()
    }))
}

fn job(text: &str) -> JobOrder {
    JobOrder {
        command: JobCommand::Argv(vec!["/bin/sh".into(), "-c".into(), text.into()]),
        cwd: Some("/".into()),
        user: None,
        env: BTreeMap::new(),
        timeout_ms: 60_000,
        stdin: Bytes::new(),
        stdin_open: false,
        pty: None,
    }
}

/// For the scripted guest.
fn played(text: &str) -> JobOrder {
    JobOrder { command: JobCommand::Text(text.into()), ..job("") }
}

async fn machine(bench: &Bench) -> (MachineHandle, MachineRecord) {
    let record = bench.intent("small", 600_000, None);
    (bench.engine.create(record.clone()).await.expect("made"), record)
}

async fn start(machine: &MachineHandle, order: JobOrder) -> JobView {
    machine.start_job(order, None).await.expect("started").job
}

async fn ended(machine: &MachineHandle, id: &str) -> JobView {
    let job = machine.jobs().wait(id, Duration::from_secs(30)).await.expect("known");
    assert!(job.position.exit.is_some(), "it ends: {job:?}");
    job
}

fn exit(job: &JobView) -> (Cause, Option<i32>, Option<i32>) {
    let (exit, _) = job.position.exit.expect("it has ended");
    (exit.cause, exit.code, exit.signal)
}

/// Everything a follower is given, checked: numbers increase, bytes follow one another.
#[derive(Default)]
struct Seen {
    cursor: u64,
    output: [Vec<u8>; 2],
    gaps: usize,
    exit: Option<Cause>,
}

impl Seen {
    fn take(&mut self, events: Vec<Event>) {
        for event in events {
            assert!(event.cursor > self.cursor, "{} after {}", event.cursor, self.cursor);
            assert!(self.exit.is_none(), "nothing comes after the exit");
            self.cursor = event.cursor;
            match event.entry {
                Entry::Started { pid } => assert!(pid > 1),
                Entry::Output { stream, offset, data } => {
                    let output = &mut self.output[stream as usize];
                    assert_eq!(offset, output.len() as u64);
                    output.extend_from_slice(&data);
                }
                Entry::Gap { .. } => self.gaps += 1,
                Entry::Exit(exit) => {
                    assert_eq!(exit.stdout_bytes, self.output[0].len() as u64);
                    self.exit = Some(exit.cause);
                }
            }
        }
    }

    async fn follow_out(&mut self, follower: &mut Follower) {
        loop {
            let events = tokio::time::timeout(Duration::from_secs(30), follower.next(64 * 1024, 100)).await;
            let events = events.expect("it goes on").expect("read");
            if events.is_empty() {
                return;
            }
            self.take(events);
        }
    }
}

async fn all(machine: &MachineHandle, id: &str) -> Seen {
    let mut seen = Seen::default();
    seen.follow_out(&mut machine.jobs().follow(id, 0).expect("followed")).await;
    seen
}

#[tokio::test(flavor = "multi_thread")]
async fn each_ending_is_told_as_what_it_was() {
    let bench = Bench::with(real());
    let (machine, _) = machine(&bench).await;
    let exits = start(&machine, job("echo out; echo err >&2; exit 7")).await;
    assert!(exits.position.pid.is_some());
    assert_eq!(exit(&ended(&machine, &exits.id).await), (Cause::Exited, Some(7), None));
    let seen = all(&machine, &exits.id).await;
    assert_eq!((seen.output[0].as_slice(), seen.output[1].as_slice()), (&b"out\n"[..], &b"err\n"[..]));

    let dies = start(&machine, job("kill -9 $$")).await;
    assert_eq!(exit(&ended(&machine, &dies.id).await), (Cause::Signalled, None, Some(9)));

    let slow = start(&machine, JobOrder { timeout_ms: 100, ..job("echo partial; exec sleep 300") }).await;
    assert_eq!(exit(&ended(&machine, &slow.id).await), (Cause::TimedOut, None, Some(9)));
    assert_eq!(all(&machine, &slow.id).await.output[0], b"partial\n");

    let group = start(&machine, job("sleep 301 | sleep 301")).await;
    let asked = machine.cancel_job(&group.id, Duration::from_secs(5)).await.expect("asked");
    assert_eq!(asked.id, group.id);
    assert_eq!(exit(&ended(&machine, &group.id).await).0, Cause::Cancelled);
    let again = machine.cancel_job(&group.id, Duration::ZERO).await.expect("idempotent");
    assert_eq!(exit(&again).0, Cause::Cancelled);

    let trap = start(&machine, job("trap 'echo usr; exit 4' USR1; echo up; while :; do sleep 0.02; done")).await;
    let mut follower = machine.jobs().follow(&trap.id, 0).expect("followed");
    let mut seen = Seen::default();
    while seen.output[0] != b"up\n" {
        seen.take(follower.next(1000, 10).await.expect("read"));
    }
    machine.signal_job(&trap.id, 10).await.expect("sent");
    seen.follow_out(&mut follower).await;
    assert_eq!((seen.output[0].as_slice(), seen.exit), (&b"up\nusr\n"[..], Some(Cause::Exited)));
    let late = machine.signal_job(&trap.id, 10).await.expect_err("over");
    assert_eq!(late.code(), ErrorCode::JobEnded);

    let e = machine.start_job(JobOrder { cwd: Some("/no/such".into()), ..job("true") }, None).await.expect_err("none");
    assert_eq!(e.code(), ErrorCode::CommandNotStarted);
    let list = machine.jobs().list(3, None);
    assert_eq!(list.jobs.iter().map(|j| j.id.as_str()).collect::<Vec<_>>(), [&trap.id, &group.id, &slow.id]);
    let rest = machine.jobs().list(3, list.next.as_deref());
    assert_eq!(rest.jobs.iter().map(|j| j.id.as_str()).collect::<Vec<_>>(), [&dies.id, &exits.id]);
    assert_eq!(rest.next, None);

    machine.jobs().forget(&exits.id, START).expect("forgotten");
    assert_eq!(machine.jobs().get(&exits.id).expect_err("gone").code(), ErrorCode::NotFound);
    let runs = start(&machine, job("sleep 300")).await;
    assert_eq!(machine.jobs().forget(&runs.id, START).expect_err("runs").code(), ErrorCode::JobRunning);
    machine.stop().await.expect("stopped");
    assert_eq!(exit(&machine.jobs().get(&runs.id).expect("kept")).0, Cause::MachineStopped);
    assert_eq!(machine.start_job(job("true"), None).await.expect_err("over").code(), ErrorCode::MachineNotRunning);
}

#[tokio::test(flavor = "multi_thread")]
async fn input_arrives_in_order_within_its_bounds_and_ends() {
    let bench = Bench::with(real());
    let (machine, _) = machine(&bench).await;
    let cat = start(&machine, JobOrder { stdin_open: true, ..job("cat; echo over") }).await;
    for part in ["one ", "two ", "three"] {
        let done = machine.write_job_stdin(&cat.id, Bytes::from(part), false).await.expect("taken");
        assert!(!done.closed);
    }
    let done = machine.write_job_stdin(&cat.id, Bytes::new(), true).await.expect("taken");
    assert_eq!((done.accepted, done.closed), (13, true));
    let late = machine.write_job_stdin(&cat.id, Bytes::from("x"), false).await.expect_err("closed");
    assert!(matches!(late.code(), ErrorCode::StdinClosed | ErrorCode::JobEnded), "{late:?}");
    assert_eq!(all(&machine, &cat.id).await.output[0], b"one two threeover\n");
    assert_eq!(machine.jobs().get(&cat.id).expect("known").stdin_accepted, 13);

    let deaf = start(&machine, JobOrder { stdin_open: true, ..job("sleep 300") }).await;
    let write = |n: usize| machine.write_job_stdin(&deaf.id, Bytes::from(vec![b'x'; n]), false);
    assert_eq!(write(65_537).await.expect_err("too much").code(), ErrorCode::PayloadTooLarge);
    let mut taken = 0;
    let full = loop {
        match write(65_536).await {
            Ok(done) => {
                taken += 65_536;
                assert_eq!(done.accepted, taken);
                assert!(done.pending <= 256 * 1024);
            }
            Err(e) => break e,
        }
    };
    assert_eq!(full.code(), ErrorCode::StdinFull);
    assert!((192 * 1024..=320 * 1024).contains(&taken), "{taken}");
    assert_eq!(machine.jobs().get(&deaf.id).expect("known").stdin_accepted, taken, "what was refused is not counted");

    let eats = start(&machine, JobOrder { stdin_open: true, ..job("cat >/dev/null") }).await;
    let mut taken = 0u64;
    let limit = loop {
        match machine.write_job_stdin(&eats.id, Bytes::from(vec![b'x'; 60_000]), false).await {
            Ok(_) => taken += 60_000,
            Err(e) if e.code() == ErrorCode::StdinFull => tokio::time::sleep(Duration::from_millis(5)).await,
            Err(e) => break e,
        }
    };
    assert_eq!((limit.code(), taken), (ErrorCode::StdinLimit, 1_020_000));
    // Exactly 1 MiB, as soon as there is room.
    while let Err(e) = machine.write_job_stdin(&eats.id, Bytes::from(vec![b'x'; 28_576]), true).await {
        assert_eq!(e.code(), ErrorCode::StdinFull);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(exit(&ended(&machine, &eats.id).await).1, Some(0));

    let none = start(&machine, job("sleep 300")).await;
    let e = machine.write_job_stdin(&none.id, Bytes::from("x"), false).await.expect_err("takes none");
    assert_eq!(e.code(), ErrorCode::StdinClosed);
    let size = TerminalSize { cols: 80, rows: 24 };
    assert_eq!(machine.resize_job(&none.id, size).await.expect_err("no terminal").code(), ErrorCode::InvalidRequest);
    machine.stop().await.expect("stopped");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_takes_input_and_hears_of_its_size() {
    let bench = Bench::with(real());
    let (machine, _) = machine(&bench).await;
    let script =
        "stty size; trap 'stty size' WINCH; echo ready; while :; do read -r line && echo \"<$line>\" && break; done";
    let order = JobOrder { pty: Some(TerminalSize { cols: 80, rows: 24 }), ..job(script) };
    let tty = start(&machine, order).await;
    let mut follower = machine.jobs().follow(&tty.id, 0).expect("followed");
    let mut seen = Seen::default();
    let text = |seen: &Seen| String::from_utf8_lossy(&seen.output[0]).into_owned();
    while !text(&seen).contains("ready") {
        seen.take(follower.next(1000, 10).await.expect("read"));
    }
    let resized = machine.resize_job(&tty.id, TerminalSize { cols: 132, rows: 43 }).await.expect("resized");
    assert_eq!(resized.pty, Some(TerminalSize { cols: 132, rows: 43 }));
    machine.write_job_stdin(&tty.id, Bytes::from("hello\n"), false).await.expect("taken");
    seen.follow_out(&mut follower).await;
    let said = text(&seen);
    assert!(said.starts_with("24 80\r\n") && said.contains("43 132\r\n") && said.contains("<hello>"), "{said:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_with_a_key_happens_once() {
    let bench = Bench::with(real());
    let (machine, record) = machine(&bench).await;
    let key = StartKey { key: [7; 32], body: [1; 32] };
    let starts = (0..20).map(|_| machine.start_job(job("sleep 300"), Some(key.clone())));
    let started = futures::future::join_all(starts).await;
    let ids: std::collections::BTreeSet<_> =
        started.iter().map(|s| s.as_ref().expect("started").job.id.clone()).collect();
    assert_eq!(ids.len(), 1, "one job");
    assert_eq!(started.iter().filter(|s| !s.as_ref().expect("started").replayed).count(), 1);
    let other = StartKey { body: [2; 32], ..key.clone() };
    let e = machine.start_job(job("true"), Some(other.clone())).await.expect_err("another body");
    assert_eq!(e.code(), ErrorCode::IdempotencyConflict);
    let id = ids.into_iter().next().expect("one");
    machine.cancel_job(&id, Duration::ZERO).await.expect("asked");
    ended(&machine, &id).await;
    machine.jobs().forget(&id, START).expect("forgotten");
    assert_eq!(machine.jobs().get(&id).expect_err("gone").code(), ErrorCode::NotFound);
    for restarted in [false, true] {
        let bench = if restarted {
            bench.engine.shutdown().await;
            let bench =
                Bench::over(bench.driver.clone(), bench.journal.clone(), bench.clock.clone(), bench.dir.clone());
            bench.engine.recover().await.expect("recovered");
            bench
        } else {
            Bench::over(bench.driver.clone(), bench.journal.clone(), bench.clock.clone(), bench.dir.clone())
        };
        let machine = if restarted { bench.engine.machine(&record.key).expect("adopted") } else { machine.clone() };
        let again = machine.start_job(job("sleep 300"), Some(key.clone())).await.expect("known");
        assert!(
            again.replayed && again.job.id == id && again.job.position.exit.is_some(),
            "the key goes on to name it"
        );
        let e = machine.start_job(job("true"), Some(other.clone())).await.expect_err("another body");
        assert_eq!(e.code(), ErrorCode::IdempotencyConflict);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_the_guest_never_heard_of_is_lost_and_who_asks_again_is_told() {
    let bench = Bench::with(real());
    let (machine, record) = machine(&bench).await;
    let key = StartKey { key: [7; 32], body: [1; 32] };
    let id = machine.start_job(job("sleep 300"), Some(key.clone())).await.expect("started").job.id;
    bench.engine.shutdown().await;
    // As a service leaves it that dies with the start on disk and not sent: a log without events, of a job no guest knows.
    let unheard = "0".repeat(32);
    let folder = bench.dir.path().join("jobs").join(record.key.to_string());
    let limits = mainbrella_job_log::Limits { segment_bytes: 65_536, head_segments: 2, tail_segments: 2 };
    let note = mainbrella_job_log::JobLog::open(&folder.join(&id), limits).expect("opened").note();
    std::fs::remove_dir_all(folder.join(&id)).expect("removed");
    drop(mainbrella_job_log::JobLog::create(&folder.join(&unheard), &note, limits).expect("made"));
    let bench = bench.restart();
    bench.engine.recover().await.expect("recovered");
    let machine = bench.engine.machine(&record.key).expect("adopted");
    for _ in 0..2 {
        let again = machine.start_job(job("sleep 300"), Some(key.clone())).await.expect("told");
        assert!(again.replayed && again.job.id == unheard);
        assert_eq!(exit(&again.job).0, Cause::Lost);
    }
}

/// Numbered lines in spurts, about 2 MB, and something on the other output.
const NUMBERS: &str =
    "for k in $(seq 0 14); do seq $((k * 20000 + 1)) $(((k + 1) * 20000)); echo $k >&2; sleep 0.05; done";

fn numbers() -> Vec<u8> {
    (1..=300_000).map(|n| format!("{n}\n")).collect::<String>().into_bytes()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_cut_at_any_moment_loses_and_repeats_nothing() {
    let bench = Bench::with(real());
    let (machine, record) = machine(&bench).await;
    let numbered = start(&machine, job(NUMBERS)).await;
    let driver = bench.driver.clone();
    let cutter = tokio::spawn(async move {
        for i in 0..40u64 {
            tokio::time::sleep(Duration::from_millis(5 + i * 7 % 31)).await;
            driver.cut(&record.key);
        }
    });
    let mut slow = machine.jobs().follow(&numbered.id, 0).expect("followed");
    let seen = all(&machine, &numbered.id).await;
    assert!(seen.output[0] == numbers(), "{} bytes", seen.output[0].len());
    assert_eq!((seen.output[1].len(), seen.gaps, seen.exit), (35, 0, Some(Cause::Exited)));
    // One that reads nothing until then gets the same, piece by piece.
    let mut late = Seen::default();
    while late.exit.is_none() {
        late.take(slow.next(3000, 3).await.expect("read"));
    }
    assert!(late.output == seen.output);
    cutter.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_killed_at_any_moment_goes_on_where_its_log_ends() {
    // Machines live on this runtime, each service on one of its own that is torn down without a word.
    let (driver, journal) = (real(), Arc::<MemoryJournal>::default());
    let clock = Arc::new(TokioClock::starting_at(START));
    let dir = Arc::new(TempDir::new().expect("temp dir"));
    let mut id = None;
    let mut record: Option<MachineRecord> = None;
    let mut seen = Seen::default();
    for life in 0..6u64 {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("runtime");
        let bench = Bench::over(driver.clone(), journal.clone(), clock.clone(), dir.clone());
        let (known, last, before) = (record.clone(), life == 5, std::mem::take(&mut seen));
        let what = id.clone();
        let lived = runtime.spawn(async move {
            let mut seen = before;
            let (machine, record) = match known {
                None => machine(&bench).await,
                Some(record) => {
                    assert_eq!(bench.engine.recover().await.expect("recovered").adopted, 1);
                    (bench.engine.machine(&record.key).expect("adopted"), record)
                }
            };
            let id = match what {
                Some(id) => id,
                None => start(&machine, job(NUMBERS)).await.id,
            };
            let mut follower = machine.jobs().follow(&id, seen.cursor).expect("followed");
            if last {
                seen.follow_out(&mut follower).await;
            } else {
                let end = Instant::now() + Duration::from_millis(60 + life * 37);
                while Instant::now() < end {
                    if let Ok(events) = tokio::time::timeout(Duration::from_millis(10), follower.next(4096, 7)).await {
                        seen.take(events.expect("read"));
                    }
                }
            }
            (id, record, seen)
        });
        let (found, of, was) = lived.await.expect("lived");
        (id, record, seen) = (Some(found), Some(of), was);
        let torn = tokio::task::spawn_blocking(move || runtime.shutdown_timeout(Duration::from_secs(5)));
        torn.await.expect("torn down");
    }
    assert!(seen.output[0] == numbers(), "{} bytes", seen.output[0].len());
    assert_eq!((seen.output[1].len(), seen.gaps, seen.exit), (35, 0, Some(Cause::Exited)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_short_jobs_at_once_each_end_with_their_own_code() {
    let bench = Bench::new();
    let (machine, record) = machine(&bench).await;
    let started = (0..1000).map(|i| {
        let machine = machine.clone();
        async move { (i, start(&machine, played(&format!("exit {}", i % 256))).await.id) }
    });
    let started = futures::future::join_all(started).await;
    bench.driver.cut(&record.key);
    for (i, id) in started {
        assert_eq!(exit(&ended(&machine, &id).await).1, Some(i % 256));
    }
    assert_eq!(machine.jobs().list(2000, None).jobs.len(), 1000, "all are kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_machine_ends_its_jobs_at_once_and_they_stay_readable() {
    let bench = Bench::new();
    let (machine, record) = machine(&bench).await;
    let id = start(&machine, played("count 100000 1")).await.id;
    let mut follower = machine.jobs().follow(&id, 0).expect("followed");
    let mut seen = Seen::default();
    while seen.output[0].len() < 20 {
        seen.take(follower.next(1000, 10).await.expect("read"));
    }
    let killed = Instant::now();
    bench.driver.kill(&record.key, ExitReport::Vmm("its VMM was killed".into()));
    seen.follow_out(&mut follower).await;
    assert!(killed.elapsed() < Duration::from_secs(2), "{:?}", killed.elapsed());
    assert_eq!(seen.exit, Some(Cause::Lost));
    let mut watch = machine.watch();
    let over = watch.wait_for(|r| r.state == MachineState::Failed).await.expect("failed").clone();
    // By the same engine, and by one that never saw the machine alive.
    for restarted in [false, true] {
        let other = Bench::over(bench.driver.clone(), bench.journal.clone(), bench.clock.clone(), bench.dir.clone());
        let engine = if restarted { &other.engine } else { &bench.engine };
        let jobs = engine.jobs_of(&over).await.expect("kept");
        assert_eq!(exit(&jobs.get(&id).expect("kept")).0, Cause::Lost);
        let mut again = Seen::default();
        again.follow_out(&mut jobs.follow(&id, 0).expect("followed")).await;
        assert_eq!(again.output, seen.output);
        if restarted {
            assert_eq!(engine.kept_jobs().await.expect("listed"), [record.key]);
            engine.forget_jobs(record.key).await;
            assert!(engine.kept_jobs().await.expect("listed").is_empty());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_a_machine_that_died_with_the_service_are_lost_and_of_one_that_forgot_them_too() {
    let bench = Bench::new();
    let (machine, record) = machine(&bench).await;
    let id = start(&machine, played("hang")).await.id;
    bench.engine.shutdown().await;
    let guard = machine.jobs().get(&id).expect("known");
    assert!(guard.position.exit.is_none(), "a service that ends leaves its jobs running");
    bench.driver.kill(&record.key, ExitReport::Guest("the guest shut down".into()));
    let bench = bench.restart();
    bench.engine.recover().await.expect("recovered");
    let over = loop {
        let now = bench.journal.get(&record.key);
        if now.state.is_final() {
            break now;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let jobs = bench.engine.jobs_of(&over).await.expect("kept");
    let job = jobs.wait(&id, Duration::from_secs(2)).await.expect("kept");
    assert_eq!(exit(&job).0, Cause::Lost);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blocking_command_is_a_job_that_is_kept_only_if_nobody_heard_its_end() {
    let bench = Bench::with(real());
    let (machine, _) = machine(&bench).await;
    let shell = |text: &str| CommandOrder {
        argv: vec!["/bin/sh".into(), "-c".into(), text.into()],
        cwd: Some("/".into()),
        timeout_ms: 30_000,
        output_limit: 1000,
        ..CommandOrder::default()
    };
    let done = machine.run(shell("echo hi; echo oh >&2; exit 3")).await.expect("ran");
    assert_eq!(
        (done.ending, &done.stdout.bytes[..], &done.stderr.bytes[..]),
        (CommandEnding::Exited(3), &b"hi\n"[..], &b"oh\n"[..])
    );
    let gone = async || {
        for _ in 0..200 {
            if machine.jobs().list(10, None).jobs.is_empty() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("a command whose end was told is let go of");
    };
    gone().await;
    assert_eq!(
        std::fs::read_dir(bench.dir.path().join("jobs"))
            .expect("made")
            .flatten()
            .map(|d| std::fs::read_dir(d.path()).expect("dir").count())
            .sum::<usize>(),
        0
    );

    // Waited for only so long.
    let order = CommandOrder { wait_ms: Some(150), ..shell("echo begun; sleep 0.6; echo done") };
    let part = machine.run(order).await.expect("waited");
    assert_eq!((part.ending, &part.stdout.bytes[..]), (CommandEnding::Running, &b"begun\n"[..]));
    assert_eq!(all(&machine, &part.job_id).await.output[0], b"begun\ndone\n");

    // Its caller goes away.
    let runs = machine.run(shell("sleep 0.3; echo alone"));
    assert!(tokio::time::timeout(Duration::from_millis(100), runs).await.is_err());
    let left = machine.jobs().list(10, None).jobs;
    assert_eq!(left.len(), 2);
    assert_eq!(all(&machine, &left[0].id).await.output[0], b"alone\n");

    // Much on one output takes nothing from the other.
    let order = shell("head -c 5000000 /dev/zero; echo seen >&2; head -c 5000000 /dev/zero; exit 1");
    let flood = machine.run(order).await.expect("ran");
    assert_eq!(
        (&flood.stderr.bytes[..], flood.stdout.total, flood.stdout.bytes.len()),
        (&b"seen\n"[..], 10_000_000, 1000)
    );
    assert_eq!(flood.stdout.omitted.map(|o| (o.offset, o.length)), Some((500, 9_999_000)));
}

#[tokio::test(start_paused = true)]
async fn a_running_job_keeps_an_idle_machine_and_a_silent_follower_does_not() {
    let bench = Bench::new();
    let record = bench.intent("idle", 3_600_000, Some(10_000));
    let machine = bench.engine.create(record).await.expect("made");
    let id = start(&machine, JobOrder { timeout_ms: 40_000, ..played("hang") }).await.id;
    let mut follower = machine.jobs().follow(&id, 0).expect("followed");
    tokio::time::sleep(Duration::from_secs(35)).await;
    assert_eq!(machine.record().state, MachineState::Running, "its job runs");
    let mut seen = Seen::default();
    seen.follow_out(&mut follower).await;
    assert_eq!(seen.exit, Some(Cause::TimedOut));
    let _open = machine.jobs().follow(&id, 0).expect("followed");
    tokio::time::sleep(Duration::from_secs(25)).await;
    assert!(machine.record().state.is_final(), "a stream that is open does not count as use");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_lies_about_a_job_is_not_believed() {
    let bench = Bench::new();
    let (machine, _) = machine(&bench).await;
    bench.driver.guest.repeat_output.store(true, Ordering::SeqCst);
    let id = start(&machine, played("echo hello")).await.id;
    assert_eq!(exit(&ended(&machine, &id).await).0, Cause::Lost);
    assert!(machine.jobs().follow(&id, 99).is_err(), "a cursor from the future is refused");
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_of_an_output_are_read_from_any_offset() {
    let bench = Bench::new();
    let (machine, _) = machine(&bench).await;
    let id = start(&machine, played("count 300 0")).await.id;
    ended(&machine, &id).await;
    let whole: Vec<u8> = (1..=300).map(|n| format!("{n}\n")).collect::<String>().into_bytes();
    for offset in [0u64, 1, 57, 1000, whole.len() as u64, 10_000] {
        let mut output = machine.jobs().output(&id, Stream::Stdout, offset).expect("known");
        let mut got = Vec::new();
        while let Some((at, data)) = output.next(100).await.expect("read") {
            assert_eq!(at, offset + got.len() as u64);
            got.extend_from_slice(&data);
        }
        assert!(got == whole[whole.len().min(offset as usize)..], "{offset}");
    }
    let processes = machine.processes().await.expect("listed");
    assert!(processes.processes.iter().any(|p| p.pid == 1));
    let hangs = start(&machine, played("hang")).await;
    let list = machine.processes().await.expect("listed").processes;
    let own = list.iter().find(|p| p.job_id.as_deref() == Some(hangs.id.as_str())).expect("in the list");
    machine.signal_process(own.pid, 15).await.expect("sent");
    assert_eq!(exit(&ended(&machine, &hangs.id).await), (Cause::Signalled, None, Some(15)));
    assert_eq!(machine.signal_process(own.pid, 15).await.expect_err("gone").code(), ErrorCode::NotFound);
}
