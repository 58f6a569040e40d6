//! The service dies and comes back.

use std::sync::atomic::Ordering;
use std::time::Duration;

use mainbrella_engine::{CommandEnding, ExitReport, RecoveryReport};
use mainbrella_types::{FailureKind, GenerationKey, MachineState};

use crate::{Bench, order};

#[tokio::test]
async fn fifty_running_machines_are_adopted_and_answer() {
    let bench = Bench::new();
    let mut keys = Vec::new();
    for i in 0..50 {
        let record = bench.intent(&format!("m{i}"), 600_000, None);
        keys.push(record.key);
        bench.engine.create(record).await.expect("made");
    }
    let bench = bench.restart();
    let report = bench.engine.recover().await.expect("recovered");
    assert_eq!(report, RecoveryReport { adopted: 50, ..RecoveryReport::default() });
    for (i, key) in keys.iter().enumerate() {
        let machine = bench.engine.machine(key).expect("adopted");
        let code = i32::try_from(i).expect("small");
        let outcome = machine.run(order(&format!("exit {code}"))).await.expect("answers");
        assert_eq!(outcome.ending, CommandEnding::Exited(code));
    }
}

#[tokio::test]
async fn each_kind_of_leftover_is_adopted_finished_failed_or_removed() {
    let bench = Bench::new();
    let running = bench.intent("running", 600_000, None);
    bench.engine.create(running.clone()).await.expect("made");
    let killed = bench.intent("killed", 600_000, None);
    bench.engine.create(killed.clone()).await.expect("made");
    let vanished = bench.intent("vanished", 600_000, None);
    bench.engine.create(vanished.clone()).await.expect("made");
    let half_made = bench.intent("half-made", 600_000, None);
    bench.driver.litter(half_made.key);
    let only_intent = bench.intent("only-intent", 600_000, None);
    let nobody = GenerationKey::new(uuid::Uuid::now_v7());
    bench.driver.litter(nobody);
    bench.engine.shutdown().await;
    bench.driver.kill(&killed.key, ExitReport::Vmm("its VMM was killed".into()));
    use mainbrella_engine::Driver;
    bench.driver.destroy(&vanished.key).await.expect("gone");

    let bench = bench.restart();
    let report = bench.engine.recover().await.expect("recovered");
    assert_eq!(report, RecoveryReport { adopted: 1, completed: 2, failed: 2, ended: 0, removed: 1 });
    for completed in [&half_made, &only_intent] {
        let machine = bench.engine.machine(&completed.key).expect("being made");
        machine.ready().await.expect("completed");
        assert!(machine.run(order("true")).await.is_ok());
    }
    for (failed, kind) in [(&killed, FailureKind::VmmDied), (&vanished, FailureKind::Lost)] {
        if let Some(machine) = bench.engine.machine(&failed.key) {
            let _ = machine.watch().wait_for(|r| r.state.is_final()).await;
        }
        let record = bench.journal.get(&failed.key);
        assert_eq!((record.state, record.ending.expect("has one").kind), (MachineState::Failed, kind));
    }
    tokio::time::timeout(Duration::from_secs(5), async {
        while bench.driver.alive() != 3 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("only the living are left");
}

#[tokio::test(start_paused = true)]
async fn leases_that_ended_meanwhile_are_reaped_and_others_are_not_shortened() {
    let bench = Bench::new();
    let short = bench.intent("short", 60_000, None);
    bench.engine.create(short.clone()).await.expect("made");
    let long = bench.intent("long", 600_000, None);
    bench.engine.create(long.clone()).await.expect("made");
    let deadline = bench.journal.get(&long.key).lease.hard_deadline;
    bench.engine.shutdown().await;
    tokio::time::sleep(Duration::from_secs(120)).await;
    let bench = bench.restart();
    bench.engine.recover().await.expect("recovered");
    let machine = bench.engine.machine(&short.key).expect("being ended");
    let last = machine.watch().wait_for(|r| r.state.is_final()).await.expect("ends").clone();
    assert_eq!(last.ending.expect("has one").kind, FailureKind::StopDeadline);
    let machine = bench.engine.machine(&long.key).expect("adopted");
    assert_eq!(machine.record().lease.hard_deadline, deadline);
    assert_eq!(machine.record().state, MachineState::Running);
}

#[tokio::test]
async fn a_stop_that_was_under_way_is_finished_by_the_next_start() {
    let bench = Bench::new();
    bench.driver.host.destroy.store(u32::MAX, Ordering::SeqCst);
    let record = bench.intent("small", 600_000, None);
    let machine = bench.engine.create(record.clone()).await.expect("made");
    machine.stop().await.expect("uncertain");
    bench.engine.shutdown().await;
    bench.driver.host.destroy.store(0, Ordering::SeqCst);
    let bench = bench.restart();
    assert_eq!(bench.engine.recover().await.expect("recovered").ended, 1);
    if let Some(machine) = bench.engine.machine(&record.key) {
        let _ = machine.watch().wait_for(|r| r.state.is_final()).await;
    }
    assert_eq!(bench.journal.get(&record.key).state, MachineState::Stopped);
    assert_eq!(bench.driver.alive(), 0);
}
