//! Snapshots that are read without a machine of the caller's.

use std::sync::atomic::Ordering;
use std::time::Duration;

use mainbrella_engine::fake::FakeDriver;
use mainbrella_engine::{EngineError, ReadOrder, SaveOrder};
use mainbrella_types::limits::{SNAPSHOT_READER_IDLE_MS, SNAPSHOT_READERS_MAX};
use mainbrella_types::{ErrorCode, SizeClass, SnapshotKey, SnapshotKind};

use crate::Bench;

const IDLE: Duration = Duration::from_millis(SNAPSHOT_READER_IDLE_MS);

/// A snapshot with a directory of this name; its source is gone.
async fn saved(bench: &Bench, name: &str) -> ReadOrder {
    let source = bench.engine.create(bench.intent(name, 600_000, None)).await.expect("made");
    source.make_dir(format!("/workspace/{name}").as_bytes(), true, 0o755).await.expect("made");
    let order = SaveOrder { snapshot: SnapshotKey::new(uuid::Uuid::now_v7()), kind: SnapshotKind::Workspace };
    source.save(order).await.expect("saved");
    source.stop().await.expect("stopped");
    ReadOrder { snapshot: order.snapshot, template: "python".parse().expect("valid"), size: SizeClass::Small }
}

async fn has(bench: &Bench, order: &ReadOrder, name: &str) -> bool {
    let reader = bench.engine.read_snapshot(order).await.expect("a reader");
    reader.machine().stat_path(format!("/workspace/{name}").as_bytes(), false).await.is_ok()
}

fn code<T>(answer: Result<T, EngineError>) -> ErrorCode {
    answer.err().expect("a refusal").code()
}

#[tokio::test(start_paused = true)]
async fn all_who_read_a_snapshot_share_one_machine_which_is_nobodys_and_ends_when_it_is_not_used() {
    let bench = Bench::with(FakeDriver::new(Duration::from_millis(100)));
    let order = saved(&bench, "one").await;
    let history = bench.journal.history.lock().expect("whole").len();
    let all = futures::future::join_all((0..20).map(|_| has(&bench, &order, "one"))).await;
    assert!(all.into_iter().all(|has| has));
    assert_eq!((bench.driver.alive(), bench.engine.living()), (1, 0), "one for twenty, and no machine of this host's");
    assert_eq!(bench.journal.history.lock().expect("whole").len(), history, "nothing of it is on record");
    let reader = bench.engine.read_snapshot(&order).await.expect("the same");
    let key = reader.machine().record().key;
    assert_eq!(bench.driver.egress(&key), Some(mainbrella_types::EgressPolicy::Off));
    tokio::time::sleep(IDLE * 3).await;
    assert_eq!(bench.driver.alive(), 1, "it is in use");
    drop(reader);
    tokio::time::sleep(IDLE / 2).await;
    // Nothing is asked of its guest: a clock that is put forward passes the deadlines of that.
    assert_eq!(bench.engine.read_snapshot(&order).await.expect("used again").machine().record().key, key);
    tokio::time::sleep(IDLE * 3 / 4).await;
    assert_eq!(bench.driver.alive(), 1, "its time begins with its last use");
    tokio::time::sleep(IDLE / 2).await;
    assert_eq!(bench.driver.alive(), 0);
}

#[tokio::test]
async fn there_are_only_so_many_at_once_and_an_unused_one_makes_room() {
    let bench = Bench::new();
    let mut orders = Vec::new();
    for n in 0..=SNAPSHOT_READERS_MAX {
        orders.push(saved(&bench, &format!("m{n}")).await);
    }
    let (last, first) = orders.split_last().expect("some");
    let mut held = Vec::new();
    for order in first {
        held.push(bench.engine.read_snapshot(order).await.expect("a reader"));
    }
    assert_eq!(code(bench.engine.read_snapshot(last).await), ErrorCode::Overloaded);
    assert!(has(&bench, &first[0], "m0").await, "those that are there go on");
    let unused = held.remove(1).machine().record().key;
    assert!(has(&bench, last, &format!("m{SNAPSHOT_READERS_MAX}")).await, "the unused one made room");
    assert_eq!(bench.driver.alive(), SNAPSHOT_READERS_MAX);
    assert_eq!(bench.driver.egress(&unused), None, "it is gone");
    drop(held);
    // One place after the other, whoever comes first.
    let names: Vec<String> = (0..=SNAPSHOT_READERS_MAX).map(|n| format!("m{n}")).collect();
    for _ in 0..3 {
        for (order, name) in orders.iter().zip(&names) {
            assert!(has(&bench, order, name).await);
            assert!(bench.driver.alive() <= SNAPSHOT_READERS_MAX);
        }
    }
}

#[tokio::test]
async fn a_place_that_is_just_being_given_back_is_waited_for() {
    let bench = Bench::new();
    let mut orders = Vec::new();
    for n in 0..=SNAPSHOT_READERS_MAX {
        orders.push(saved(&bench, &format!("m{n}")).await);
    }
    let (last, first) = orders.split_last().expect("some");
    let mut held = Vec::new();
    for order in first {
        held.push(bench.engine.read_snapshot(order).await.expect("a reader"));
    }
    // What ends is not gone at once.
    bench.driver.host.destroy.store(2, Ordering::SeqCst);
    let key = held.remove(0).machine().record().key;
    let ending = bench.engine.forget_snapshot(first[0].snapshot);
    let (ended, read) = futures::future::join(ending, async {
        tokio::task::yield_now().await;
        has(&bench, last, &format!("m{SNAPSHOT_READERS_MAX}")).await
    })
    .await;
    ended.expect("removed");
    assert!(read && bench.driver.egress(&key).is_none());
    assert_eq!(bench.driver.alive(), SNAPSHOT_READERS_MAX);
}

#[tokio::test]
async fn it_ends_with_its_snapshot_and_with_the_service() {
    let bench = Bench::new();
    let (one, two) = (saved(&bench, "one").await, saved(&bench, "two").await);
    let reader = bench.engine.read_snapshot(&one).await.expect("a reader");
    assert!(has(&bench, &two, "two").await);
    bench.engine.forget_snapshot(one.snapshot).await.expect("removed");
    assert_eq!(bench.driver.alive(), 1);
    assert_eq!(code(reader.machine().stat_path(b"/", false).await), ErrorCode::MachineNotRunning);
    assert_eq!(code(bench.engine.read_snapshot(&one).await), ErrorCode::SnapshotDamaged);
    bench.engine.shutdown().await;
    assert_eq!(bench.driver.alive(), 0);
    assert_eq!(code(bench.engine.read_snapshot(&two).await), ErrorCode::ShuttingDown);
}

#[tokio::test]
async fn nothing_of_it_is_left_by_a_service_that_died_or_by_a_failure() {
    let bench = Bench::new();
    let order = saved(&bench, "one").await;
    bench.driver.host.launch.store(1, Ordering::SeqCst);
    assert_eq!(code(bench.engine.read_snapshot(&order).await), ErrorCode::CreateFailed);
    assert_eq!(bench.driver.alive(), 0);
    // Tried anew, and whoever asks learns of it; what cannot be removed at once is removed by and by.
    bench.driver.host.destroy.store(2, Ordering::SeqCst);
    let key = bench.engine.read_snapshot(&order).await.expect("a reader").machine().record().key;
    bench.driver.kill(&key, mainbrella_engine::ExitReport::Vmm("killed".into()));
    let other = async {
        loop {
            match bench.engine.read_snapshot(&order).await {
                Ok(reader) if reader.machine().record().key != key => break,
                _ => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), other).await.expect("another one");
    let gone = async {
        while bench.driver.egress(&key).is_some() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), gone).await.expect("removed");
    // No shutdown: the service died.
    let bench = bench.restart();
    assert_eq!(bench.driver.alive(), 1);
    let report = bench.engine.recover().await.expect("recovered");
    assert_eq!((report.removed, report.adopted, bench.driver.alive()), (1, 0, 0));
    assert!(has(&bench, &order, "one").await);
}
