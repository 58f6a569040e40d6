//! Machines that are paused when nobody uses them and come back with their next use.

use std::sync::atomic::Ordering;
use std::time::Duration;

use mainbrella_engine::{CommandEnding, EngineError, MachineHandle};
use mainbrella_types::{ErrorCode, FailureKind, MachineRecord, MachineState, OnIdle};

use crate::{Bench, job, order};

/// Short: calls to a guest have deadlines of half a minute, which a clock that is put forward passes at once.
const IDLE: Duration = Duration::from_secs(2);

fn intent(bench: &Bench, slot: &str, ttl_ms: u64) -> MachineRecord {
    let mut record = bench.intent(slot, ttl_ms, Some(2_000));
    (record.spec.on_idle, record.spec.auto_resume) = (OnIdle::Pause, true);
    bench.journal.put(record.clone());
    record
}

async fn machine(bench: &Bench) -> MachineHandle {
    bench.engine.create(intent(bench, "one", 6_000_000)).await.expect("made")
}

fn code<T: std::fmt::Debug>(answer: Result<T, EngineError>) -> ErrorCode {
    answer.expect_err("a refusal").code()
}

/// How often a machine came to be `state`.
fn times(bench: &Bench, state: MachineState) -> usize {
    bench.journal.history.lock().expect("whole").iter().filter(|(_, s)| *s == state).count()
}

async fn exits(machine: &MachineHandle, n: i32) {
    let outcome = machine.run(order(&format!("exit {n}"))).await.expect("it came back");
    assert_eq!(outcome.ending, CommandEnding::Exited(n));
}

#[tokio::test(start_paused = true)]
async fn an_unused_machine_is_paused_and_its_next_use_resumes_it_once_for_all_who_wait() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    let job = machine.start_job(job("count 8 1000"), None).await.expect("started").job.id;
    tokio::time::sleep(IDLE * 2).await;
    assert_eq!(machine.record().state, MachineState::Running, "a running job is use");
    tokio::time::sleep(IDLE * 4).await;
    assert_eq!(machine.record().state, MachineState::Paused);
    assert!(machine.jobs().get(&job).expect("its log is there").position.exit.is_some());
    assert_eq!(machine.record().state, MachineState::Paused, "what is on the host wakes nobody");

    futures::future::join_all((0..50).map(|n| exits(&machine, n))).await;
    assert_eq!((times(&bench, MachineState::Resuming), machine.record().state), (1, MachineState::Running));
    tokio::time::sleep(IDLE / 2).await;
    assert_eq!(machine.record().state, MachineState::Running, "its time without use begins with its return");
    tokio::time::sleep(IDLE).await;
    assert_eq!(machine.record().state, MachineState::Paused);
}

#[tokio::test]
async fn everything_that_needs_it_to_run_wakes_it() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    let round = async |n: usize| {
        machine.pause().await.expect("paused");
        assert_eq!(machine.record().state, MachineState::Paused);
        match n {
            0 => machine.processes().await.map(drop),
            1 => machine.start_job(job("echo hi"), None).await.map(drop),
            2 => machine.stat_path(b"/", false).await.map(drop),
            3 => machine.contexts().await.map(drop),
            4 => machine.set_egress(Default::default()).await.map(drop),
            5 => machine.watch_dir(b"/", false).await.map(drop),
            _ => machine.connect_port(1).await.map(drop).or_else(|e| match e {
                mainbrella_engine::PortError::NothingListens => Ok(()),
                mainbrella_engine::PortError::Failed(e) => Err(e),
            }),
        }
        .unwrap_or_else(|e| panic!("{n}: {e:?}"));
        assert_eq!(machine.record().state, MachineState::Running, "{n}");
    };
    for n in 0..=6 {
        round(n).await;
    }
    machine.pause().await.expect("paused");
    let mut child = bench.intent("two", 600_000, None);
    child.forked_from = Some(machine.record().generation);
    bench.journal.put(child.clone());
    let forked = bench.engine.fork(&machine, vec![child]).await.expect("woken and copied");
    assert_eq!(forked.children[0].record().state, MachineState::Running);
}

#[tokio::test]
async fn a_return_that_fails_is_told_to_all_who_waited_for_it_and_tried_again_for_the_next() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    machine.pause().await.expect("paused");
    bench.driver.host.resume.store(1, Ordering::SeqCst);
    let all = futures::future::join_all((0..20).map(|_| machine.run(order("true")))).await;
    assert_eq!(bench.driver.host.resume.load(Ordering::SeqCst), 0);
    for e in all {
        assert_eq!(code(e), ErrorCode::Internal);
    }
    assert_eq!(machine.record().state, MachineState::Paused);
    exits(&machine, 7).await;
    // The store does not take it.
    machine.pause().await.expect("paused");
    bench.journal.failures.store(1, Ordering::SeqCst);
    assert_eq!(code(machine.run(order("true")).await), ErrorCode::Internal);
    assert_eq!(machine.record().state, MachineState::Paused);
    exits(&machine, 8).await;
}

#[tokio::test(start_paused = true)]
async fn one_that_cannot_be_paused_runs_on_open_and_is_paused_when_it_was_unused_for_as_long_again() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    bench.driver.host.pause_host_full.store(1, Ordering::SeqCst);
    tokio::time::sleep(IDLE + IDLE / 2).await;
    assert_eq!(bench.driver.host.pause_host_full.load(Ordering::SeqCst), 0, "it was tried");
    assert_eq!(machine.record().state, MachineState::Running);
    exits(&machine, 1).await;
    bench.journal.failures.store(1, Ordering::SeqCst);
    tokio::time::sleep(IDLE + IDLE / 2).await;
    assert_eq!(bench.journal.failures.load(Ordering::SeqCst), 0, "the store had its fault");
    exits(&machine, 2).await;
    tokio::time::sleep(IDLE * 2 + IDLE / 2).await;
    assert_eq!(machine.record().state, MachineState::Paused);
}

#[tokio::test]
async fn calls_between_pauses_are_all_carried_out() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    let pauses = async {
        for _ in 0..20 {
            machine.pause().await.expect("paused");
            tokio::task::yield_now().await;
        }
    };
    let calls = async {
        for n in 0..40 {
            // One that began just before a pause may be cut by it; it is refused or reported as what it is, never lost.
            match machine.stat_path(b"/", false).await {
                Ok(_) => {}
                Err(e) => assert_eq!(e.code(), ErrorCode::MachineNotRunning, "{n}: {e:?}"),
            }
        }
    };
    tokio::join!(pauses, calls);
    exits(&machine, 3).await;
    assert_eq!(machine.record().state, MachineState::Running);
}

#[tokio::test]
async fn a_stop_wins_over_whoever_wants_it_back() {
    for _ in 0..20 {
        let bench = Bench::new();
        let machine = machine(&bench).await;
        machine.pause().await.expect("paused");
        let (runs, stopped) =
            tokio::join!(futures::future::join_all((0..10).map(|_| machine.run(order("true")))), async {
                tokio::task::yield_now().await;
                machine.stop().await
            });
        stopped.expect("stopped");
        for run in runs {
            if let Err(e) = run {
                assert_eq!(e.code(), ErrorCode::MachineNotRunning, "{e:?}");
            }
        }
        assert_eq!((machine.record().state, bench.driver.alive()), (MachineState::Stopped, 0));
        assert_eq!(code(machine.run(order("true")).await), ErrorCode::MachineNotRunning);
    }
}

#[tokio::test(start_paused = true)]
async fn the_hard_lease_goes_on_and_nothing_brings_it_back_after_it() {
    let bench = Bench::new();
    let machine = bench.engine.create(intent(&bench, "one", 10_000)).await.expect("made");
    tokio::time::sleep(IDLE * 2).await;
    assert_eq!(machine.record().state, MachineState::Paused);
    tokio::time::sleep(Duration::from_millis(5_990)).await;
    let calls = futures::future::join_all((0..40).map(|n| {
        let machine = machine.clone();
        async move {
            tokio::time::sleep(Duration::from_millis(n)).await;
            machine.stat_path(b"/", false).await.map(drop)
        }
    }));
    for call in calls.await {
        if let Err(e) = call {
            assert_eq!(e.code(), ErrorCode::MachineNotRunning, "{e:?}");
        }
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let over = machine.record();
    assert_eq!(over.ending.expect("a reason").kind, FailureKind::StopDeadline);
    assert_eq!(code(machine.run(order("true")).await), ErrorCode::MachineNotRunning);
    assert_eq!(bench.driver.alive(), 0);
}

#[tokio::test]
async fn a_restart_keeps_it_all_and_one_that_does_not_come_back_by_itself_stays() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    let mut other = intent(&bench, "two", 600_000);
    other.spec.auto_resume = false;
    bench.journal.put(other.clone());
    let other = bench.engine.create(other).await.expect("made");
    machine.pause().await.expect("paused");
    other.pause().await.expect("paused");
    let (key, other_key) = (machine.record().key, other.record().key);
    bench.engine.shutdown().await;
    let bench = bench.restart();
    assert_eq!(bench.engine.recover().await.expect("recovered").adopted, 2);
    exits(&bench.engine.machine(&key).expect("known"), 4).await;
    let other = bench.engine.machine(&other_key).expect("known");
    assert_eq!(code(other.run(order("true")).await), ErrorCode::MachineNotRunning);
    assert_eq!(other.record().state, MachineState::Paused);
}
