//! What machines may reach: on record, in force, and the same after everything.

use std::sync::atomic::Ordering;

use mainbrella_engine::fake::FakeDriver;
use mainbrella_engine::{MachineHandle, Outcome};
use mainbrella_types::{EgressPolicy, ErrorCode, GenerationKey, HostName, Target};

use crate::Bench;

fn policy(text: &str) -> EgressPolicy {
    text.parse().expect(text)
}

async fn made(bench: &Bench, slot: &str, egress: &str) -> (MachineHandle, GenerationKey) {
    let mut record = bench.intent(slot, 600_000, None);
    record.spec.egress = policy(egress);
    bench.journal.put(record.clone());
    let key = record.key;
    (bench.engine.create(record).await.expect("made"), key)
}

async fn outcome(machine: &MachineHandle, host: &str) -> Outcome {
    let name: HostName = host.parse().expect("a name");
    machine.explain_egress(&Target::Name(&name), 443).await.expect("an answer").outcome
}

#[tokio::test]
async fn what_is_on_record_is_in_force_also_after_restarts() {
    let mut bench = Bench::with(FakeDriver::default().with_internet());
    let policies = ["off", "open", "allow-list a.example", "allow-list dry-run", "allow-list"];
    let mut keys = Vec::new();
    for (n, text) in policies.iter().enumerate() {
        keys.push(made(&bench, &format!("m{n}"), text).await.1);
    }
    for _ in 0..2 {
        for (key, text) in keys.iter().zip(policies) {
            assert_eq!(bench.driver.egress(key), Some(policy(text)), "{text}");
        }
        bench = bench.restart();
        assert_eq!(bench.engine.recover().await.expect("recovered").adopted, policies.len());
    }
}

#[tokio::test]
async fn a_change_is_on_record_before_it_is_in_force_and_off_is_for_ever() {
    let bench = Bench::with(FakeDriver::default().with_internet());
    let (machine, key) = made(&bench, "m", "open").await;
    let list = policy("allow-list a.example");
    assert_eq!(machine.set_egress(list.clone()).await.expect("changed").spec.egress, list);
    assert_eq!((bench.driver.egress(&key), bench.journal.get(&key).spec.egress), (Some(list.clone()), list.clone()));
    // What cannot be put on record changes nothing.
    bench.journal.failures.store(1, Ordering::SeqCst);
    assert_eq!(machine.set_egress(EgressPolicy::Open).await.expect_err("refused").code(), ErrorCode::Internal);
    assert_eq!(bench.driver.egress(&key), Some(list));
    machine.set_egress(EgressPolicy::Off).await.expect("changed");
    for loose in ["open", "allow-list", "allow-list dry-run"] {
        assert_eq!(machine.set_egress(policy(loose)).await.expect_err("refused").code(), ErrorCode::EgressLocked);
    }
    assert_eq!(
        (bench.driver.egress(&key), outcome(&machine, "a.example").await),
        (Some(EgressPolicy::Off), Outcome::Denied)
    );
}

#[tokio::test]
async fn what_fails_is_closed_until_it_is_set_again_or_found_again() {
    let bench = Bench::with(FakeDriver::default().with_internet());
    let (machine, key) = made(&bench, "m", "open").await;
    bench.driver.host.egress.store(1, Ordering::SeqCst);
    let failed = machine.set_egress(policy("allow-list a.example")).await.expect_err("a fault");
    assert_eq!((failed.code(), bench.driver.egress(&key)), (ErrorCode::Internal, None));
    assert_eq!(outcome(&machine, "a.example").await, Outcome::Denied);
    drop(machine);
    let bench = bench.restart();
    bench.driver.host.egress.store(1, Ordering::SeqCst);
    assert_eq!(bench.engine.recover().await.expect("recovered").adopted, 1);
    assert_eq!(bench.driver.egress(&key), None, "it lives, without a network");
    let machine = bench.engine.machine(&key).expect("adopted");
    assert_eq!(outcome(&machine, "a.example").await, Outcome::Denied);
    machine.set_egress(policy("allow-list a.example")).await.expect("mended");
    assert_eq!(outcome(&machine, "a.example").await, Outcome::Allowed);
}

#[tokio::test]
async fn a_host_that_cannot_enforce_a_policy_refuses_it() {
    let bench = Bench::new();
    let (machine, key) = made(&bench, "m", "off").await;
    assert_eq!(bench.driver.egress(&key), Some(EgressPolicy::Off));
    assert_eq!(machine.set_egress(EgressPolicy::Open).await.expect_err("refused").code(), ErrorCode::EgressLocked);
    let mut record = bench.intent("n", 600_000, None);
    record.spec.egress = EgressPolicy::Open;
    bench.journal.put(record.clone());
    let refused = bench.engine.create(record).await.err().expect("refused");
    assert_eq!(refused.code(), ErrorCode::Unsupported);
}
