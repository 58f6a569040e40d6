//! The service goes and comes; machines stay.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use mainbrella_client::api::State;
use mainbrella_tests::{Machine, Service, host};
use rustix::process::Signal;

#[tokio::test(flavor = "multi_thread")]
async fn kill_minus_nine_loses_no_machine() {
    let mut service = Service::start().await;
    let mut machines = Vec::new();
    for i in 0..6 {
        let m = service.machine().await;
        m.text(&format!("echo {i} > /root/number; sleep 1000 & echo $! > /root/pid")).await;
        machines.push(m);
    }
    let vmms: BTreeMap<String, i32> = service.vmms().into_iter().collect();
    assert_eq!(vmms.len(), 6);
    // One dies while nobody looks.
    let victim = crate::faults::vmm_of(&service, &machines[5]).await;
    service.look();
    service.kill();
    host::signal(victim, Signal::KILL);
    let begin = Instant::now();
    service.launch().await;
    eprintln!("started over six machines in {:?}", begin.elapsed());
    for (i, m) in machines[..5].iter().enumerate() {
        let m = service.attach(m.name.clone());
        assert_eq!(m.record().await.state, State::Running);
        let told = m.text("cat /root/number; kill -0 $(cat /root/pid) && echo runs").await;
        assert_eq!(told, format!("{i}\nruns\n"));
    }
    let dead = machines[5].record().await;
    assert_eq!((dead.state, dead.reason.map(|r| r.code).as_deref()), (State::Failed, Some("vmm_died")));
    let now: BTreeMap<String, i32> = service.vmms().into_iter().collect();
    assert!(now.iter().all(|(k, pid)| vmms.get(k) == Some(pid)), "the same VMMs: {vmms:?} {now:?}");
    // And again, at once.
    service.crash().await;
    service.crash().await;
    assert_eq!(machines[0].text("cat /root/number").await, "0\n");
    let log = service.log();
    assert!(log.contains("adopted=5"), "{log}");
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_was_running_goes_on_without_the_service() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    let cut = {
        let m = m.clone();
        tokio::spawn(async move { m.try_sh("sleep 3; echo late > /root/late").await })
    };
    tokio::time::sleep(Duration::from_millis(700)).await;
    service.crash().await;
    assert!(cut.await.expect("joined").is_err(), "its caller lost the connection");
    host::until("it finished its work", Duration::from_secs(15), async || {
        m.try_sh("cat /root/late").await.is_ok_and(|o| o.text() == "late\n")
    })
    .await;
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn asked_to_end_the_service_finishes_what_it_began() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    let running = {
        let m = m.clone();
        tokio::spawn(async move { m.try_sh("sleep 3; echo done").await })
    };
    tokio::time::sleep(Duration::from_millis(700)).await;
    let begin = Instant::now();
    let status = service.terminate().await;
    assert!(status.success(), "{status}");
    assert_eq!(running.await.expect("joined").expect("answered").text(), "done\n");
    assert!(begin.elapsed() < Duration::from_secs(12), "{:?}", begin.elapsed());
    assert!(host::alive(service.only_vmm()), "the machine stays");
    service.launch().await;
    let again: Machine = service.attach(m.name.clone());
    assert_eq!(again.text("echo here").await, "here\n");
    // A stop that is asked for twice at once.
    let (a, b) = tokio::join!(again.client.stop(&m.name), again.client.stop(&m.name));
    assert!(a.expect("stop").machine.state.is_final() && b.expect("stop").machine.state.is_final());
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_that_kill_minus_nine_cut_off_is_completed() {
    let mut service = Service::start().await;
    for wait_ms in [0u64, 5, 20, 60] {
        let m = service.machine().await;
        let cut = {
            let m = m.clone();
            tokio::spawn(async move { m.client.stop(&m.name).await })
        };
        tokio::time::sleep(Duration::from_millis(wait_ms)).await;
        service.crash().await;
        let _ = cut.await;
        let done = service.client().stop(&m.name).await.expect("stop again");
        assert_eq!(done.machine.state, State::Stopped, "after {wait_ms} ms: {done:?}");
    }
    host::until("nothing has a folder", Duration::from_secs(10), async || service.keys().is_empty()).await;
    service.finish().await;
}
