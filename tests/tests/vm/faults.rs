//! A VMM or a guest that ends by itself, or falls silent.

use std::time::{Duration, Instant};

use mainbrella_client::api::State;
use mainbrella_tests::{Machine, Service, host, machine_body};
use mainbrella_types::ErrorCode;
use rustix::process::Signal;

use crate::code;

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_vmm_is_a_failed_machine_and_never_replaced() {
    let mut service = Service::start().await;
    let mut body = machine_body();
    body.slot = Some("fragile".into());
    let m = service.create(&body).await.expect("create");
    m.text("echo data > /root/f").await;
    let running = {
        let m = m.clone();
        tokio::spawn(async move { m.try_sh("sleep 60").await })
    };
    tokio::time::sleep(Duration::from_millis(500)).await;
    let begin = Instant::now();
    host::signal(service.only_vmm(), Signal::KILL);
    let refusal = code(running.await.expect("joined"));
    assert!(begin.elapsed() < Duration::from_secs(2), "told after {:?}", begin.elapsed());
    assert!(matches!(refusal, ErrorCode::MachineNotRunning | ErrorCode::GuestUnavailable), "{refusal:?}");
    let ended = m.ended(Duration::from_secs(5)).await;
    let reason = ended.reason.expect("reason");
    assert_eq!((ended.state, reason.code.as_str()), (State::Failed, "vmm_died"));
    assert!(reason.message.contains("signal 9") || reason.message.contains("kill"), "{}", reason.message);
    assert_eq!(code(m.try_sh("true").await), ErrorCode::MachineNotRunning);
    m.client.stop(&m.name).await.expect("stopping what has failed is harmless");
    assert_eq!(m.record().await.state, State::Failed, "and does not change how it ended");
    let next = service.create(&body).await.expect("the slot is free");
    assert_eq!(next.text("ls /root").await, "", "another machine, not a copy");
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_shuts_down_restarts_or_panics_has_ended() {
    let mut service = Service::start().await;
    let calls = [
        ("power off", "python3 -c 'import ctypes; ctypes.CDLL(None).reboot(0x4321fedc)'", "shut down"),
        ("restart", "python3 -c 'import ctypes; ctypes.CDLL(None).reboot(0x01234567)'", ""),
        ("panic", "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger", "panic"),
    ];
    for (what, script, word) in calls {
        let m = service.machine().await;
        let begin = Instant::now();
        let answer = m.run(&Machine::shell_order(&format!("{script}; sleep 30"))).await;
        assert!(answer.is_err(), "{what}: {answer:?}");
        let ended = m.ended(Duration::from_secs(15)).await;
        let reason = ended.reason.expect("reason");
        assert_eq!((ended.state, reason.code.as_str()), (State::Failed, "guest_ended"), "{what}: {}", reason.message);
        assert!(reason.message.contains(word), "{what}: {}", reason.message);
        assert!(begin.elapsed() < Duration::from_secs(15), "{what}: {:?}", begin.elapsed());
    }
    host::until("their folders are gone", Duration::from_secs(10), async || service.keys().is_empty()).await;
    let m = service.machine().await;
    m.sh("kill -9 1; kill -TERM 1; kill -INT 1").await;
    assert_eq!(m.text("echo unmoved").await, "unmoved\n", "the agent cannot be killed from inside");
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_to_a_silent_machine_ends_by_itself() {
    let mut service = Service::start().await;
    let (m, other) = (service.machine().await, service.machine().await);
    m.text("true").await;
    let pid = vmm_of(&service, &m).await;
    host::signal(pid, Signal::STOP);
    let mut order = Machine::shell_order("echo hi");
    order.timeout_ms = Some(1000);
    let begin = Instant::now();
    let answer = tokio::time::timeout(Duration::from_secs(60), m.run(&order)).await;
    let waited = begin.elapsed();
    assert_eq!(other.text("echo other").await, "other\n");
    host::signal(pid, Signal::CONT);
    let refusal = code(answer.expect("the call ended"));
    assert!(matches!(refusal, ErrorCode::GuestUnavailable | ErrorCode::DeadlineExceeded), "{refusal:?}");
    eprintln!("a silent machine was told after {waited:?}");
    host::until("it answers again", Duration::from_secs(30), async || {
        m.try_sh("echo back").await.is_ok_and(|o| o.text() == "back\n")
    })
    .await;
    // And one that stays silent can be stopped.
    host::signal(pid, Signal::STOP);
    let begin = Instant::now();
    m.stop().await;
    assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
    service.finish().await;
}

/// The VMM of `m`: the one that works when it does.
pub async fn vmm_of(service: &Service, m: &Machine) -> i32 {
    let ticks = |pid: i32| -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("stat");
        let rest = stat.rsplit_once(") ").expect("form").1;
        rest.split(' ').skip(11).take(2).map(|n| n.parse::<u64>().expect("ticks")).sum()
    };
    let before: Vec<(i32, u64)> = service.vmms().into_iter().map(|(_, pid)| (pid, ticks(pid))).collect();
    m.text("timeout 1 sh -c 'while :; do :; done' || true").await;
    before.into_iter().max_by_key(|(pid, then)| ticks(*pid) - then).expect("a VMM").0
}
