//! Guests that behave badly are a matter of their own.

use std::time::{Duration, Instant};

use mainbrella_tests::{Machine, Service, host};

async fn answers_quickly(service: &Service, other: &Machine) {
    let begin = Instant::now();
    assert_eq!(other.text("echo calm").await, "calm\n");
    assert!(begin.elapsed() < Duration::from_secs(10), "another machine answers after {:?}", begin.elapsed());
    let begin = Instant::now();
    service.client().health().await.expect("health");
    service.list().await;
    assert!(begin.elapsed() < Duration::from_secs(2), "the service answers after {:?}", begin.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_bomb_stays_in_its_machine() {
    let mut service = Service::start().await;
    let (bomb, other) = (service.machine().await, service.machine().await);
    let mut order = Machine::argv_order(&["bash", "-c", ":() { : | : & }; :"]);
    order.timeout_ms = Some(5000);
    let _ = bomb.run(&order).await;
    answers_quickly(&service, &other).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    answers_quickly(&service, &other).await;
    let begin = Instant::now();
    bomb.stop().await;
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_memory_hog_is_ended_and_its_machine_goes_on() {
    let mut service = Service::start().await;
    let (hog, other) = (service.machine().await, service.machine().await);
    let mut order = Machine::shell_order("python3 -c 'x = []\nwhile True: x.append(bytearray(16 << 20))'");
    order.timeout_ms = Some(60_000);
    // More than once: the first finds memory that nothing was read into yet.
    for _ in 0..3 {
        let out = hog.run(&order).await.expect("it is the command that ends");
        assert!(!out.raw.timed_out && out.raw.exit_code != 0, "{:?} {}", out.raw, out.error());
        assert_eq!(hog.text("echo alive").await, "alive\n");
    }
    answers_quickly(&service, &other).await;
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_on_the_console_fills_nothing() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    let before = host::disk_usage(service.data());
    let rss = host::status_kib(service.pid(), "VmRSS");
    let vmm = service.only_vmm();
    let vmm_before = host::status_kib(vmm, "RssAnon");
    for target in ["/dev/console", "/dev/kmsg", "/dev/ttyS0", "/dev/hvc0"] {
        let out =
            m.sh(&format!("test -e {target} && timeout 4 sh -c 'yes flooding the console > {target}'; true")).await;
        assert_eq!(out.raw.exit_code, 0, "{target}: {}", out.error());
    }
    let grown = host::disk_usage(service.data()).saturating_sub(before);
    assert!(grown < 8 << 20, "{grown} bytes of disk");
    let grown = host::status_kib(service.pid(), "VmRSS").saturating_sub(rss);
    assert!(grown < 32 * 1024, "{grown} KiB of the service");
    let grown = host::status_kib(vmm, "RssAnon").saturating_sub(vmm_before);
    assert!(grown < 192 * 1024, "{grown} KiB of the VMM");
    assert_eq!(m.text("echo works").await, "works\n");
    assert!(service.log().len() < 1 << 20, "nor the log");
    service.finish().await;
}
