//! Pausing and resuming: what goes on, what is refused, what a crash leaves.

use std::sync::atomic::Ordering;
use std::time::Duration;

use mainbrella_engine::fake::FakeDriver;
use mainbrella_engine::{CommandEnding, EngineError, LeaseChange, MachineHandle, StopOutcome};
use mainbrella_types::{ErrorCode, FailureKind, MachineState};

use crate::{Bench, job, order};

fn bench() -> Bench {
    Bench::new()
}

async fn machine(bench: &Bench) -> MachineHandle {
    bench.engine.create(bench.intent("one", 600_000, Some(60_000))).await.expect("made")
}

fn code<T: std::fmt::Debug>(answer: Result<T, EngineError>) -> ErrorCode {
    answer.expect_err("a refusal").code()
}

#[tokio::test]
async fn a_paused_machine_takes_nothing_and_comes_back_as_it_was() {
    let bench = bench();
    let machine = machine(&bench).await;
    let running = machine.start_job(job("count 40 20"), None).await.expect("started").job.id;
    let paused = machine.pause().await.expect("paused");
    assert_eq!(paused.state, MachineState::Paused);
    assert_eq!(machine.pause().await.expect("already so").state, MachineState::Paused);
    assert_eq!(code(machine.run(order("true")).await), ErrorCode::MachineNotRunning);
    assert_eq!(code(machine.processes().await.map(|_| ())), ErrorCode::MachineNotRunning);
    assert_eq!(code(machine.set_egress(Default::default()).await), ErrorCode::MachineNotRunning);
    let seen = machine.jobs().get(&running).expect("its log is there");
    assert!(seen.position.exit.is_none());

    let back = machine.resume().await.expect("resumed");
    assert_eq!((back.state, back.lease.hard_deadline), (MachineState::Running, paused.lease.hard_deadline));
    assert_eq!(machine.resume().await.expect("already so").state, MachineState::Running);
    assert_eq!(machine.run(order("echo hello")).await.expect("it works").ending, CommandEnding::Exited(0));
    let ended = machine.jobs().wait(&running, Duration::from_secs(20)).await.expect("followed");
    let stdout: usize = (1..=40).map(|n: u32| n.to_string().len() + 1).sum();
    assert!(ended.position.exit.is_some(), "it went on to its end");
    assert_eq!(ended.position.stdout_bytes, stdout as u64, "nothing of its output is lost or repeated");
}

#[tokio::test]
async fn what_cannot_be_saved_runs_on_and_what_cannot_be_brought_back_stays_paused() {
    let bench = bench();
    let machine = machine(&bench).await;
    bench.driver.host.pause_host_full.store(1, Ordering::SeqCst);
    assert_eq!(code(machine.pause().await), ErrorCode::HostFull);
    assert_eq!(machine.record().state, MachineState::Running);
    assert_eq!(machine.run(order("exit 3")).await.expect("it works").ending, CommandEnding::Exited(3));
    machine.pause().await.expect("paused");
    bench.driver.host.resume.store(1, Ordering::SeqCst);
    assert_eq!(code(machine.resume().await), ErrorCode::Internal);
    assert_eq!(machine.record().state, MachineState::Paused);
    machine.resume().await.expect("resumed");
    assert_eq!(machine.run(order("exit 4")).await.expect("it works").ending, CommandEnding::Exited(4));
    // A guest that does not come to rest is not saved.
    for round in 0..3 {
        machine.pause().await.expect("paused");
        machine.resume().await.unwrap_or_else(|e| panic!("{round}: {e:?}"));
    }
}

#[tokio::test]
async fn a_machine_that_is_lost_on_its_way_back_is_failed_and_says_so() {
    let bench = bench();
    let machine = machine(&bench).await;
    machine.pause().await.expect("paused");
    bench.driver.guest.configure.store(true, Ordering::SeqCst);
    assert_eq!(code(machine.resume().await), ErrorCode::Internal, "stale random numbers are not handed out");
    let mut watch = machine.watch();
    let over = watch.wait_for(|r| r.state.is_final()).await.expect("it ends").clone();
    assert_eq!(over.ending.expect("a reason").kind, FailureKind::GuestEnded);
    // The reason is told at once; what is left of it goes then.
    let gone = async {
        while bench.driver.alive() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), gone).await.expect("nothing is left of it");
}

#[tokio::test]
async fn a_driver_that_cannot_says_unsupported() {
    let bench = Bench::with(FakeDriver::default().without_snapshots());
    let machine = machine(&bench).await;
    assert_eq!(code(machine.pause().await), ErrorCode::Unsupported);
    assert_eq!(machine.run(order("true")).await.expect("it works").ending, CommandEnding::Exited(0));
}

#[tokio::test(start_paused = true)]
async fn a_paused_machine_is_never_idle_and_ends_with_its_hard_lease() {
    let bench = bench();
    let machine = machine(&bench).await;
    machine.pause().await.expect("paused");
    tokio::time::sleep(Duration::from_secs(500)).await;
    assert_eq!(machine.record().state, MachineState::Paused);
    machine.extend(LeaseChange { ttl_ms: Some(700_000), ..LeaseChange::default() }).await.expect("extended");
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(machine.record().state, MachineState::Paused, "it was given more time");
    tokio::time::sleep(Duration::from_secs(600)).await;
    let over = machine.record();
    assert_eq!(over.ending.expect("a reason").kind, FailureKind::StopDeadline);
    assert_eq!(bench.driver.alive(), 0);
}

#[tokio::test]
async fn a_machine_can_be_stopped_in_every_state() {
    let bench = bench();
    let one = machine(&bench).await;
    one.pause().await.expect("paused");
    assert!(matches!(one.stop().await.expect("stopped"), StopOutcome::Stopped(_)));
    assert_eq!((bench.driver.alive(), code(one.resume().await)), (0, ErrorCode::MachineNotRunning));
}

#[tokio::test]
async fn a_restart_finds_paused_machines_paused_and_those_in_between_running_or_paused() {
    let bench = bench();
    let (paused, between) = (machine(&bench).await, {
        let record = bench.intent("two", 600_000, None);
        bench.engine.create(record).await.expect("made")
    });
    let started = paused.start_job(job("count 30 20"), None).await.expect("started").job.id;
    paused.pause().await.expect("paused");
    // The service died after it had written that it pauses, and before it did.
    let mut record = between.record();
    bench.engine.shutdown().await;
    record.state = MachineState::Pausing;
    bench.journal.put(record.clone());
    let bench = bench.restart();
    let report = bench.engine.recover().await.expect("recovered");
    assert_eq!((report.adopted, report.failed, report.ended), (2, 0, 0), "{report:?}");
    let between = bench.engine.machine(&record.key).expect("known");
    let mut watch = between.watch();
    watch.wait_for(|r| r.state == MachineState::Running).await.expect("it goes on");
    assert_eq!(between.run(order("exit 5")).await.expect("it works").ending, CommandEnding::Exited(5));
    let paused = bench.engine.machine(&paused.record().key).expect("known");
    assert_eq!(paused.record().state, MachineState::Paused);
    assert_eq!(code(paused.run(order("true")).await), ErrorCode::MachineNotRunning);
    paused.resume().await.expect("resumed");
    let ended = paused.jobs().wait(&started, Duration::from_secs(20)).await.expect("followed");
    assert!(ended.position.exit.is_some(), "its job went on over pause and restart");
}
