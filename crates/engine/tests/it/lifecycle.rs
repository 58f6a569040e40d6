//! From intent to the last trace.

use std::sync::atomic::Ordering;
use std::time::Duration;

use mainbrella_engine::{CommandEnding, ExitReport, LeaseChange, StopOutcome};
use mainbrella_types::{ErrorCode, FailureKind, MachineState};

use crate::{Bench, order};

#[tokio::test]
async fn a_machine_is_made_used_and_stopped_and_nothing_is_left() {
    let bench = Bench::new();
    let record = bench.intent("small", 60_000, None);
    let machine = bench.engine.create(record.clone()).await.expect("made");
    assert_eq!(machine.record().state, MachineState::Running);
    let outcome = machine.run(order("printenv GREETING")).await.expect("ran");
    assert_eq!((outcome.ending, &outcome.stdout.bytes[..]), (CommandEnding::Exited(0), &b"hello\n"[..]));
    let StopOutcome::Stopped(last) = machine.stop().await.expect("stopped") else { panic!("uncertain") };
    assert_eq!(last.state, MachineState::Stopped);
    assert_eq!(last.ending.expect("has one").kind, FailureKind::StopRequested);
    assert_eq!(bench.driver.alive(), 0);
    assert_eq!(bench.engine.living(), 0);
    assert_eq!(machine.run(order("true")).await.expect_err("gone").code(), ErrorCode::MachineNotRunning);
    assert!(matches!(machine.stop().await, Ok(StopOutcome::Stopped(_))), "stop is idempotent");
}

#[tokio::test]
async fn every_failing_step_of_a_creation_leaves_nothing_and_is_told_as_what_it_is() {
    type Fault = fn(&Bench);
    let faults: [(Fault, ErrorCode); 5] = [
        (|b| b.driver.host.launch.store(1, Ordering::SeqCst), ErrorCode::CreateFailed),
        (|b| b.driver.host.launch_host_full.store(1, Ordering::SeqCst), ErrorCode::HostFull),
        (|b| b.driver.host.dial.store(1, Ordering::SeqCst), ErrorCode::CreateFailed),
        (|b| b.driver.guest.configure.store(true, Ordering::SeqCst), ErrorCode::CreateFailed),
        (|b| b.journal.failures.store(1, Ordering::SeqCst), ErrorCode::Internal),
    ];
    for (i, (fault, code)) in faults.into_iter().enumerate() {
        let bench = Bench::new();
        fault(&bench);
        // A removal that fails first must not leave anything either.
        bench.driver.host.destroy.store(1, Ordering::SeqCst);
        let record = bench.intent("small", 60_000, None);
        let e = bench.engine.create(record.clone()).await.err().unwrap_or_else(|| panic!("fault {i} was not met"));
        assert_eq!(e.code(), code, "fault {i}");
        tokio::time::timeout(Duration::from_secs(5), async {
            while bench.engine.living() > 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await
        .expect("the actor ends");
        assert_eq!(bench.driver.alive(), 0, "fault {i} left something");
        assert_eq!(bench.journal.get(&record.key).state, MachineState::Failed, "fault {i}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_never_answers_fails_the_creation_in_bounded_time() {
    let bench = Bench::new();
    bench.driver.guest.mute.store(true, Ordering::SeqCst);
    let record = bench.intent("small", 600_000, None);
    let e = bench.engine.create(record).await.err().expect("mute");
    assert_eq!(e.code(), ErrorCode::CreateFailed);
}

#[tokio::test]
async fn a_killed_machine_fails_with_the_reason_and_ends_running_commands_at_once() {
    let bench = Bench::new();
    let record = bench.intent("small", 60_000, None);
    let machine = bench.engine.create(record.clone()).await.expect("made");
    let user = machine.clone();
    let command = tokio::spawn(async move { user.run(order("hang")).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    let killed = std::time::Instant::now();
    bench.driver.kill(&record.key, ExitReport::Vmm("its VMM was killed".into()));
    let e = command.await.expect("joined").expect_err("the machine died");
    assert!(killed.elapsed() < Duration::from_secs(2));
    assert_eq!(e.code(), ErrorCode::MachineNotRunning);
    assert!(e.message().contains("its VMM was killed"), "{}", e.message());
    let last = bench.journal.get(&record.key);
    assert_eq!((last.state, last.ending.expect("has one").kind), (MachineState::Failed, FailureKind::VmmDied));
}

#[tokio::test]
async fn a_stop_that_cannot_be_confirmed_says_so_and_goes_on_until_it_can() {
    let bench = Bench::new();
    bench.driver.host.destroy.store(4, Ordering::SeqCst);
    let machine = bench.engine.create(bench.intent("small", 60_000, None)).await.expect("made");
    let StopOutcome::Uncertain(record) = machine.stop().await.expect("answered") else { panic!("too sure") };
    assert_eq!(record.state, MachineState::Stopping);
    let mut watch = machine.watch();
    let last = tokio::time::timeout(Duration::from_secs(20), watch.wait_for(|r| r.state.is_final())).await;
    assert_eq!(last.expect("in time").expect("actor").state, MachineState::Stopped);
    assert_eq!(bench.driver.alive(), 0);
}

#[tokio::test]
async fn a_stop_that_cannot_be_made_durable_changes_nothing() {
    let bench = Bench::new();
    let machine = bench.engine.create(bench.intent("small", 60_000, None)).await.expect("made");
    bench.journal.failures.store(1, Ordering::SeqCst);
    assert_eq!(machine.stop().await.expect_err("refused").code(), ErrorCode::Internal);
    assert_eq!(machine.run(order("exit 3")).await.expect("still there").ending, CommandEnding::Exited(3));
    assert!(matches!(machine.stop().await, Ok(StopOutcome::Stopped(_))));
}

#[tokio::test]
async fn two_hundred_stops_at_once_are_one_stop() {
    let bench = Bench::new();
    let machine = bench.engine.create(bench.intent("small", 60_000, None)).await.expect("made");
    let stops = futures::future::join_all((0..200).map(|_| {
        let machine = machine.clone();
        async move { machine.stop().await }
    }))
    .await;
    assert!(stops.iter().all(|s| matches!(s, Ok(StopOutcome::Stopped(_)))));
    let stopping =
        bench.journal.history.lock().expect("whole").iter().filter(|(_, s)| *s == MachineState::Stopping).count();
    assert_eq!(stopping, 1);
}

#[tokio::test(start_paused = true)]
async fn the_hard_lease_ends_a_machine_however_busy_and_an_extension_moves_it() {
    let bench = Bench::new();
    let machine = bench.engine.create(bench.intent("small", 60_000, None)).await.expect("made");
    tokio::time::sleep(Duration::from_secs(50)).await;
    let record =
        machine.extend(LeaseChange { ttl_ms: Some(60_000), ..LeaseChange::default() }).await.expect("extended");
    let later = record.lease.hard_deadline;
    let same = machine.extend(LeaseChange { ttl_ms: Some(10_000), ..LeaseChange::default() }).await.expect("extended");
    assert_eq!(same.lease.hard_deadline, later, "an extension never shortens");
    let user = machine.clone();
    let mut long = order("hang");
    long.timeout_ms = 600_000;
    let command = tokio::spawn(async move { user.run(long).await });
    tokio::time::sleep(Duration::from_secs(58)).await;
    assert_eq!(machine.record().state, MachineState::Running);
    let mut watch = machine.watch();
    let last = watch.wait_for(|r| r.state.is_final()).await.expect("ends").clone();
    assert_eq!(last.ending.expect("has one").kind, FailureKind::StopDeadline);
    assert!(command.await.expect("joined").is_err());
}

#[tokio::test(start_paused = true)]
async fn an_idle_machine_ends_and_a_used_one_does_not() {
    let bench = Bench::new();
    let used = bench.engine.create(bench.intent("used", 3_600_000, Some(5_000))).await.expect("made");
    let idle = bench.engine.create(bench.intent("idle", 3_600_000, Some(5_000))).await.expect("made");
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(4_950)).await;
        used.run(order("true")).await.expect("kept alive by use");
    }
    assert_eq!(idle.record().ending.expect("ended").kind, FailureKind::StopIdle);
    assert_eq!(used.record().state, MachineState::Running);
}

#[tokio::test(start_paused = true)]
async fn a_running_command_keeps_a_machine_from_being_idle() {
    let bench = Bench::new();
    let machine = bench.engine.create(bench.intent("small", 3_600_000, Some(5_000))).await.expect("made");
    let mut long = order("sleep 60000");
    long.timeout_ms = 120_000;
    assert_eq!(machine.run(long).await.expect("ran to its end").ending, CommandEnding::Exited(0));
}
