//! Saving: what goes on, what is kept, what is refused, and machines that start from what was saved.

use std::sync::atomic::Ordering;
use std::time::Duration;

use mainbrella_engine::fake::FakeDriver;
use mainbrella_engine::{CommandEnding, EngineError, MachineHandle, SaveOrder};
use mainbrella_types::{ErrorCode, FailureKind, MachineRecord, MachineState, SnapshotKey, SnapshotKind};

use crate::{Bench, job, order};

async fn machine(bench: &Bench) -> MachineHandle {
    bench.engine.create(bench.intent("trunk", 600_000, None)).await.expect("made")
}

fn save_as(kind: SnapshotKind) -> SaveOrder {
    SaveOrder { snapshot: SnapshotKey::new(uuid::Uuid::now_v7()), kind }
}

/// A durable intent of a machine from a snapshot.
fn restored(bench: &Bench, name: &str, snapshot: SnapshotKey) -> MachineRecord {
    let record = MachineRecord { restored_from: Some(snapshot), ..bench.intent(name, 600_000, None) };
    bench.journal.put(record.clone());
    record
}

async fn works(machine: &MachineHandle) {
    assert_eq!(machine.run(order("exit 9")).await.expect("it works").ending, CommandEnding::Exited(9));
}

fn code<T: std::fmt::Debug>(answer: Result<T, EngineError>) -> ErrorCode {
    answer.expect_err("a refusal").code()
}

async fn over(bench: &Bench, record: &MachineRecord) -> MachineRecord {
    let over = async {
        loop {
            let now = bench.journal.get(&record.key);
            if now.state.is_final() {
                return now;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), over).await.expect("told")
}

#[tokio::test]
async fn a_machine_goes_on_and_its_files_come_back_as_they_were() {
    let bench = Bench::new();
    let source = machine(&bench).await;
    source.make_dir(b"/workspace/before", true, 0o755).await.expect("made");
    let order = save_as(SnapshotKind::Workspace);
    let receipt = source.save(order).await.expect("saved");
    assert_eq!(receipt.memory_bytes, 0);
    works(&source).await;
    source.make_dir(b"/workspace/after", true, 0o755).await.expect("made");
    assert_eq!(bench.engine.snapshots().await.expect("listed"), [order.snapshot]);
    source.stop().await.expect("stopped");

    let back = bench.engine.create(restored(&bench, "back", order.snapshot)).await.expect("made");
    works(&back).await;
    assert!(back.stat_path(b"/workspace/before", false).await.is_ok());
    assert_eq!(code(back.stat_path(b"/workspace/after", false).await), ErrorCode::FileNotFound);
    // Machines that were started from it outlive it.
    bench.engine.forget_snapshot(order.snapshot).await.expect("removed");
    bench.engine.forget_snapshot(order.snapshot).await.expect("idempotent");
    assert!(bench.engine.snapshot_remains().await.expect("listed").is_empty());
    assert!(back.stat_path(b"/workspace/before", false).await.is_ok());
}

#[tokio::test]
async fn jobs_and_their_logs_come_back_with_memory_and_only_with_it() {
    let bench = Bench::new();
    let source = machine(&bench).await;
    // Ended before: copies of the scripted guest share what they acknowledge of a job that still runs.
    let id = source.start_job(job("count 60 1"), None).await.expect("started").job.id;
    let here = source.jobs().wait(&id, Duration::from_secs(20)).await.expect("it ends");
    let whole: usize = (1..=60).map(|n: u32| n.to_string().len() + 1).sum();
    assert_eq!((here.position.stdout_bytes, here.position.exit.is_some()), (whole as u64, true));
    let (order, files) = (save_as(SnapshotKind::Full), save_as(SnapshotKind::Workspace));
    assert!(source.save(order).await.expect("saved").memory_bytes > 0);
    source.save(files).await.expect("saved");
    source.stop().await.expect("stopped");
    for name in ["one", "two"] {
        let back = bench.engine.create(restored(&bench, name, order.snapshot)).await.expect("made");
        let ended = back.jobs().wait(&id, Duration::from_secs(20)).await.expect("its own copy");
        assert!(ended.position.exit.is_some());
        assert_eq!(ended.position.stdout_bytes, whole as u64, "nothing is lost or repeated");
        works(&back).await;
    }
    let fresh = bench.engine.create(restored(&bench, "three", files.snapshot)).await.expect("made");
    assert!(fresh.jobs().get(&id).is_err(), "files have no jobs");
    bench.engine.forget_snapshot(files.snapshot).await.expect("removed");
    assert!(bench.engine.snapshot_remains().await.expect("listed").contains(&order.snapshot));
    bench.engine.forget_snapshot(order.snapshot).await.expect("removed");
    assert!(bench.engine.snapshot_remains().await.expect("listed").is_empty(), "its logs are gone, too");
}

#[tokio::test]
async fn a_save_that_fails_is_told_keeps_nothing_and_the_machine_goes_on() {
    let bench = Bench::new();
    let source = machine(&bench).await;
    let order = save_as(SnapshotKind::Full);
    bench.driver.host.save.store(1, Ordering::SeqCst);
    assert_eq!(code(source.save(order).await), ErrorCode::Internal);
    works(&source).await;
    bench.driver.host.save_host_full.store(1, Ordering::SeqCst);
    assert_eq!(code(source.save(order).await), ErrorCode::HostFull);
    works(&source).await;
    assert!(bench.engine.snapshots().await.expect("listed").is_empty());
    // The logs that were kept first are found by their name.
    bench.engine.forget_snapshot(order.snapshot).await.expect("removed");
    assert!(bench.engine.snapshot_remains().await.expect("listed").is_empty());
    bench.driver.host.forget.store(1, Ordering::SeqCst);
    source.save(order).await.expect("saved");
    assert!(bench.engine.forget_snapshot(order.snapshot).await.is_err());
    assert_eq!(bench.engine.snapshots().await.expect("listed"), [order.snapshot]);
    bench.engine.forget_snapshot(order.snapshot).await.expect("removed");
    assert!(bench.engine.snapshots().await.expect("listed").is_empty());
}

#[tokio::test]
async fn only_what_runs_is_saved_and_only_where_that_can_be_done() {
    let bench = Bench::new();
    let source = machine(&bench).await;
    source.pause().await.expect("paused");
    assert_eq!(code(source.save(save_as(SnapshotKind::Full)).await), ErrorCode::MachineNotRunning);
    source.resume().await.expect("resumed");
    source.save(save_as(SnapshotKind::Full)).await.expect("saved");
    source.stop().await.expect("stopped");
    assert_eq!(code(source.save(save_as(SnapshotKind::Workspace)).await), ErrorCode::MachineNotRunning);
    assert_eq!(bench.engine.snapshots().await.expect("listed").len(), 1);

    let bench = Bench::with(FakeDriver::default().without_snapshots());
    let source = machine(&bench).await;
    assert_eq!(code(source.save(save_as(SnapshotKind::Workspace)).await), ErrorCode::Unsupported);
    works(&source).await;
}

#[tokio::test]
async fn what_is_not_there_as_it_was_saved_is_told_apart_from_other_failures() {
    let bench = Bench::new();
    let source = machine(&bench).await;
    let order = save_as(SnapshotKind::Workspace);
    source.save(order).await.expect("saved");
    bench.driver.damage(&order.snapshot);
    let record = restored(&bench, "damaged", order.snapshot);
    assert_eq!(code(bench.engine.create(record.clone()).await.map(|_| ())), ErrorCode::SnapshotDamaged);
    assert_eq!(over(&bench, &record).await.ending.expect("a reason").kind, FailureKind::SnapshotDamaged);
    source.save(order).await.expect("saved again");
    bench.driver.host.launch.store(1, Ordering::SeqCst);
    let record = restored(&bench, "unlucky", order.snapshot);
    assert_eq!(code(bench.engine.create(record.clone()).await.map(|_| ())), ErrorCode::CreateFailed);
    assert_eq!(over(&bench, &record).await.ending.expect("a reason").kind, FailureKind::CreateFailed);
    assert_eq!(bench.driver.alive(), 1, "the source");
}

#[tokio::test]
async fn a_machine_that_was_being_made_from_a_snapshot_when_the_service_died_is_made_from_it() {
    let bench = Bench::new();
    let source = machine(&bench).await;
    source.make_dir(b"/workspace/kept", true, 0o755).await.expect("made");
    let order = save_as(SnapshotKind::Full);
    source.save(order).await.expect("saved");
    let (half, lost) =
        (restored(&bench, "half", order.snapshot), restored(&bench, "lost", save_as(order.kind).snapshot));
    bench.driver.litter(half.key);
    bench.engine.shutdown().await;
    let bench = bench.restart();
    bench.engine.recover().await.expect("recovered");
    let back = bench.engine.create(half).await.expect("made");
    assert_eq!(back.record().state, MachineState::Running);
    assert!(back.stat_path(b"/workspace/kept", false).await.is_ok(), "not from the template");
    assert_eq!(over(&bench, &lost).await.ending.expect("a reason").kind, FailureKind::SnapshotDamaged);
    assert_eq!(bench.driver.alive(), 2, "the source and the one");
}
