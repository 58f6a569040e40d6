//! Deadlines, for real.

use std::time::Duration;

use mainbrella_client::api::{ExtendMachine, State};
use mainbrella_tests::{Machine, Service, host, machine_body};
use mainbrella_types::ErrorCode;

use crate::code;

fn extend(ttl: Option<u64>, idle: Option<u64>) -> ExtendMachine {
    ExtendMachine { ttl_seconds: ttl, idle_timeout_seconds: idle, ..ExtendMachine::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_end_when_their_lease_does_and_not_before() {
    let mut service = Service::start().await;
    let mut body = machine_body();
    body.ttl_seconds = Some(12);
    let short = service.create(&body).await.expect("create");
    let longer = service.create(&body).await.expect("create");
    body.ttl_seconds = Some(600);
    body.idle_timeout_seconds = Some(6);
    let idle = service.create(&body).await.expect("create");
    let used = service.create(&body).await.expect("create");
    let busy = service.create(&body).await.expect("create");

    let before = longer.record().await.hard_deadline_ms;
    let after = service.client().extend(&longer.name, &extend(Some(300), None)).await.expect("extend");
    assert!(after.hard_deadline_ms > before + 200_000);
    let same = service.client().extend(&longer.name, &extend(Some(20), None)).await.expect("extend");
    assert_eq!(same.hard_deadline_ms, after.hard_deadline_ms, "a lease is never shortened");

    // A command that runs is use, however quiet it is.
    let working = {
        let busy = busy.clone();
        tokio::spawn(async move { busy.sh("sleep 11; echo done").await })
    };
    let user = {
        let used = used.clone();
        tokio::spawn(async move {
            for _ in 0..5 {
                tokio::time::sleep(Duration::from_secs(2)).await;
                assert_eq!(used.text("echo used").await, "used\n");
            }
        })
    };
    // Looking at it is not use: it must end although it is inspected all the time.
    let ended = idle.ended(Duration::from_secs(15)).await;
    let reason = ended.reason.expect("reason");
    assert_eq!((ended.state, reason.code.as_str()), (State::Stopped, "idle"), "{}", reason.message);
    let lived = ended.ended_at_ms.expect("ended") - ended.started_at_ms.expect("started");
    assert!((5500..11_000).contains(&lived), "idle for 6 s: {lived} ms");
    let ended = short.ended(Duration::from_secs(20)).await;
    assert_eq!(ended.reason.as_ref().map(|r| r.code.as_str()), Some("deadline"));
    let late = ended.ended_at_ms.expect("ended") - ended.hard_deadline_ms;
    assert!((0..4000).contains(&late), "{late} ms late");
    assert_eq!(code(short.try_sh("true").await), ErrorCode::MachineNotRunning);
    assert_eq!(code(service.client().extend(&short.name, &extend(Some(60), None)).await), ErrorCode::MachineNotRunning);

    assert_eq!(working.await.expect("joined").text(), "done\n");
    user.await.expect("it was used all the time");
    assert_eq!(used.record().await.state, State::Running);
    assert_eq!(longer.text("echo still").await, "still\n");
    host::until("only the living have folders", Duration::from_secs(10), async || service.keys().len() <= 3).await;
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_ran_out_while_no_service_was_there_is_ended_at_the_start() {
    let mut service = Service::start().await;
    let mut body = machine_body();
    body.ttl_seconds = Some(10);
    let short = service.create(&body).await.expect("create");
    let stays: Machine = service.machine().await;
    service.look();
    service.kill();
    tokio::time::sleep(Duration::from_secs(11)).await;
    service.launch().await;
    let ended = short.ended(Duration::from_secs(5)).await;
    assert_eq!(ended.reason.map(|r| r.code).as_deref(), Some("deadline"));
    assert_eq!(stays.text("echo here").await, "here\n");
    host::until("it is removed", Duration::from_secs(10), async || service.keys().len() == 1).await;
    service.finish().await;
}
