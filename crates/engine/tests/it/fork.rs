//! Forking: children of their own, the source that goes on, and what is told when something fails.

use std::sync::atomic::Ordering;
use std::time::Duration;

use mainbrella_engine::fake::FakeDriver;
use mainbrella_engine::{CommandEnding, MachineHandle};
use mainbrella_types::{ErrorCode, FailureKind, MachineRecord, MachineState};

use crate::{Bench, job, order};

async fn machine(bench: &Bench) -> MachineHandle {
    bench.engine.create(bench.intent("trunk", 600_000, None)).await.expect("made")
}

/// Durable intents of children.
fn children(bench: &Bench, source: &MachineHandle, names: &[&str]) -> Vec<MachineRecord> {
    let child = |name: &&str| {
        let record = bench.intent(name, 600_000, None);
        let record = MachineRecord { forked_from: Some(source.record().generation), ..record };
        bench.journal.put(record.clone());
        record
    };
    names.iter().map(child).collect()
}

async fn works(machine: &MachineHandle) {
    assert_eq!(machine.run(order("exit 9")).await.expect("it works").ending, CommandEnding::Exited(9));
}

#[tokio::test]
async fn children_run_on_their_own_with_the_jobs_of_their_source_and_their_logs() {
    let bench = Bench::new();
    let source = machine(&bench).await;
    let id = source.start_job(job("count 60 20"), None).await.expect("started").job.id;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let records = children(&bench, &source, &["one", "two"]);
    let receipt = bench.engine.fork(&source, records).await.expect("forked");
    works(&source).await;
    source.stop().await.expect("the source may go first");
    let whole: usize = (1..=60).map(|n: u32| n.to_string().len() + 1).sum();
    for child in &receipt.children {
        let record = child.record();
        assert_eq!(record.state, MachineState::Running, "{:?}", record.ending);
        works(child).await;
        let ended = child.jobs().wait(&id, Duration::from_secs(20)).await.expect("its own copy");
        assert!(ended.position.exit.is_some());
        assert_eq!(ended.position.stdout_bytes, whole as u64, "nothing is lost or repeated");
        child.stop().await.expect("stopped");
    }
    assert_eq!(bench.driver.alive(), 0);
}

#[tokio::test]
async fn what_fails_is_told_child_by_child_and_the_source_goes_on() {
    let bench = Bench::new();
    let source = machine(&bench).await;
    bench.driver.host.fork_child.store(1, Ordering::SeqCst);
    let receipt = bench.engine.fork(&source, children(&bench, &source, &["a", "b"])).await.expect("forked");
    let states: Vec<_> = receipt.children.iter().map(|c| c.record().state).collect();
    assert_eq!(states, [MachineState::Failed, MachineState::Running]);
    works(&source).await;
    works(&receipt.children[1]).await;

    bench.driver.host.fork.store(1, Ordering::SeqCst);
    let records = children(&bench, &source, &["c", "d"]);
    let keys: Vec<_> = records.iter().map(|r| r.key).collect();
    assert!(bench.engine.fork(&source, records).await.is_err());
    works(&source).await;
    for key in keys {
        let over = async {
            loop {
                let record = bench.journal.get(&key);
                if record.state.is_final() {
                    return record;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let over = tokio::time::timeout(Duration::from_secs(10), over).await.expect("told");
        assert_eq!(over.ending.expect("a reason").kind, FailureKind::CreateFailed);
    }
    assert_eq!(bench.driver.alive(), 2, "the source and the one child");
}

#[tokio::test]
async fn a_machine_that_does_not_run_or_cannot_be_copied_is_not_forked() {
    let bench = Bench::new();
    let source = machine(&bench).await;
    source.pause().await.expect("paused");
    let refused = bench.engine.fork(&source, children(&bench, &source, &["a"])).await;
    assert_eq!(refused.err().expect("refused").code(), ErrorCode::MachineNotRunning);
    source.resume().await.expect("resumed");
    works(&source).await;
    let bench = Bench::with(FakeDriver::default().without_snapshots());
    let source = machine(&bench).await;
    let refused = bench.engine.fork(&source, children(&bench, &source, &["a"])).await;
    assert_eq!(refused.err().expect("refused").code(), ErrorCode::Unsupported);
    works(&source).await;
}

#[tokio::test]
async fn a_child_that_was_being_copied_when_the_service_died_is_not_made_from_the_template() {
    let bench = Bench::new();
    let source = machine(&bench).await;
    let child = children(&bench, &source, &["half"]).remove(0);
    bench.driver.litter(child.key);
    bench.engine.shutdown().await;
    let bench = bench.restart();
    bench.engine.recover().await.expect("recovered");
    let over = async {
        while !bench.journal.get(&child.key).state.is_final() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), over).await.expect("told");
    assert_eq!(bench.journal.get(&child.key).ending.expect("a reason").kind, FailureKind::CreateFailed);
    assert_eq!(bench.driver.alive(), 1, "only the source");
}

#[tokio::test]
async fn a_machine_that_a_dead_service_left_frozen_is_put_right_when_it_is_found() {
    let bench = Bench::new();
    let source = machine(&bench).await;
    bench.engine.shutdown().await;
    bench.driver.guest.frozen.store(true, Ordering::SeqCst);
    let bench = bench.restart();
    bench.engine.recover().await.expect("recovered");
    let source = bench.engine.machine(&source.record().key).expect("adopted");
    works(&source).await;
    assert!(!bench.driver.guest.frozen.load(Ordering::SeqCst), "nobody's processes stay frozen");
}
