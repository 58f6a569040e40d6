//! From create to stop, and what makes each machine its own.

use std::collections::HashSet;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mainbrella_client::ListFilter;
use mainbrella_client::api::State;
use mainbrella_tests::{Machine, Service, Setup, base_dir, host, machine_body};
use mainbrella_types::ErrorCode;

use crate::code;

#[tokio::test(flavor = "multi_thread")]
async fn a_debian_machine_runs_commands_keeps_files_and_goes() {
    let mut service = Service::start().await;
    let mut body = machine_body();
    body.metadata.insert("purpose".into(), "first".into());
    body.env.insert("FROM_CREATE".into(), "yes é".into());
    let machine = service.create(&body).await.expect("create");
    let record = machine.record().await;
    assert_eq!((record.state, record.size.as_str(), record.catalog_id.as_str()), (State::Running, "micro", "python"));
    assert_eq!((record.limits.memory_mib, record.limits.vcpus, record.limits.disk_mib), (512, 1, 4096));
    let network = service.client().capabilities().await.expect("capabilities").networking;
    assert_eq!((record.internet, network.internet), (network.internet_default, network.internet_default));
    assert!(record.started_at_ms.is_some() && record.ended_at_ms.is_none());
    assert!(machine.text("cat /etc/os-release").await.contains("trixie"));
    assert!(machine.text("python3 -c 'print(6*7)'").await == "42\n");
    for tool in ["pip", "git", "curl", "tmux", "ps"] {
        machine.text(&format!("command -v {tool}")).await;
    }
    assert_eq!(machine.text("printf %s \"$FROM_CREATE\"").await, "yes é");
    assert_eq!(machine.write("/srv/deep/er/f", &b"a\0b\xff"[..]).await.expect("write"), 4);
    assert_eq!(machine.read("/srv/deep/er/f").await.expect("read"), b"a\0b\xff");
    assert_eq!(machine.text("ps -o pid=,comm= -p 1 | tr -s ' '").await.split_whitespace().next(), Some("1"));
    machine.stop().await;
    let record = machine.record().await;
    assert_eq!(record.state, State::Stopped);
    assert_eq!(record.reason.expect("reason").code, "stop_requested");
    machine.stop().await;
    assert_eq!(code(machine.try_sh("true").await), ErrorCode::MachineNotRunning);
    assert_eq!(code(machine.read("/etc/hostname").await), ErrorCode::MachineNotRunning);
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_machines_of_one_template_differ_and_know_the_time() {
    // What is restored is older than a moment: a clock that goes on from there would be seen.
    let frozen = std::fs::read_dir(base_dir().join("frozen")).expect("frozen").flatten();
    let made = frozen.filter_map(|e| e.metadata().ok()?.modified().ok()).max().expect("a frozen template");
    while made.elapsed().unwrap_or_default() < Duration::from_secs(10) {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let mut service = Service::with(Setup { pool: 1, ..Setup::default() }).await;
    let facts = "hostname; cat /etc/machine-id /proc/sys/kernel/random/uuid /proc/sys/kernel/random/boot_id; \
        head -c 16 /dev/urandom | od -An -tx1; python3 -c 'import os, random, uuid; print(os.urandom(16).hex()); \
        print(random.random()); print(uuid.uuid4())'; mktemp -u";
    let mut seen = HashSet::new();
    let mut machines = Vec::new();
    for _ in 0..3 {
        let machine = service.machine().await;
        // The very first command of its life asks for the time.
        let before = now();
        let told = machine.text("date +%s.%N").await.trim().parse::<f64>().expect("seconds");
        let after = now();
        assert!(told > before - 0.5 && told < after + 0.5, "clock: {before} < {told} < {after}");
        let lines: Vec<String> = machine.text(facts).await.lines().map(str::to_owned).collect();
        assert_eq!(lines.len(), 9, "{lines:?}");
        for line in lines {
            assert!(seen.insert(line.clone()), "two machines share {line}");
        }
        machines.push(machine);
    }
    let begin = Instant::now();
    let slept = machines[0]
        .text("python3 -c 'import time; a=time.monotonic(); time.sleep(1); print(time.monotonic()-a)'")
        .await;
    let slept: f64 = slept.trim().parse().expect("seconds");
    assert!((0.98..1.6).contains(&slept) && begin.elapsed() > Duration::from_millis(950), "timers run: {slept}");
    let host_boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("boot id");
    assert!(!seen.contains(host_boot.trim()));
    service.finish().await;
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs_f64()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_medium_machine_has_its_processors_memory_and_disk() {
    let mut service = Service::start().await;
    let mut body = machine_body();
    body.size = "medium".into();
    let machine = service.create(&body).await.expect("create");
    assert_eq!(machine.text("nproc").await, "2\n");
    let memory: u64 = machine.text("awk '/MemTotal/ {print $2}' /proc/meminfo").await.trim().parse().expect("KiB");
    assert!((1_850_000..=2 * 1024 * 1024).contains(&memory), "{memory} KiB");
    let disk: u64 = machine.text("df -m --output=size / | tail -n 1").await.trim().parse().expect("MiB");
    assert!((15_000..=16 * 1024).contains(&disk), "{disk} MiB");
    let both = machine.text("cat /sys/devices/system/cpu/online; taskset -c 1 true && echo second").await;
    assert_eq!(both, "0-1\nsecond\n");
    let micro = service.machine().await;
    let disk: u64 = micro.text("df -m --output=size / | tail -n 1").await.trim().parse().expect("MiB");
    assert!((3_700..=4096).contains(&disk), "{disk} MiB");
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_vmms_become_machines_and_end_with_the_service() {
    let mut service = Service::with(Setup { pool: 2, ..Setup::default() }).await;
    let waiting = |s: &Service| host::names_in(&s.data().join("waiting")).len();
    let first = service.machine().await;
    host::until("two VMMs wait", Duration::from_secs(60), async || waiting(&service) == 2).await;
    service.look();
    let second = service.machine().await;
    assert_eq!(first.text("echo a > /root/mark; cat /root/mark").await, "a\n");
    assert_eq!(second.text("ls /root").await, "", "nothing of another machine");
    host::until("the pool is full again", Duration::from_secs(60), async || waiting(&service) == 2).await;
    service.crash().await;
    assert_eq!(waiting(&service), 0, "waiting VMMs of the former service are gone until the size is used again");
    assert_eq!(first.text("cat /root/mark").await, "a\n");
    let third = service.machine().await;
    assert_eq!(third.text("echo ok").await, "ok\n");
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_are_found_by_label_and_page() {
    let mut service = Service::start().await;
    let mut made = Vec::new();
    for team in ["red", "blue", "red"] {
        let mut body = machine_body();
        body.metadata.insert("team".into(), team.into());
        made.push(service.create(&body).await.expect("create"));
    }
    made[0].stop().await;
    let ids = |l: Vec<mainbrella_client::api::Machine>| l.into_iter().map(|m| m.id).collect::<Vec<_>>();
    let all = ids(service.list().await);
    assert_eq!(all, [&made[2], &made[1], &made[0]].map(|m| m.name.id.clone()), "newest first");
    let filter =
        ListFilter { state: Some(State::Running), metadata: vec![("team".into(), "red".into())], limit: Some(1) };
    let page = service.client().list(&filter, None).await.expect("list");
    assert_eq!(ids(page.machines), [made[2].name.id.clone()]);
    let (mut walked, mut cursor) = (Vec::new(), None);
    let everything = ListFilter { limit: Some(2), ..ListFilter::default() };
    loop {
        let page = service.client().list(&everything, cursor.as_deref()).await.expect("page");
        walked.extend(ids(page.machines));
        cursor = page.next_cursor;
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(walked, all);
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_this_host_cannot_do_is_refused_and_leaves_nothing() {
    let mut service = Service::start().await;
    let has_network = service.client().capabilities().await.expect("capabilities").networking.internet;
    let mut body = machine_body();
    body.catalog_id = "no-such-template".into();
    assert_eq!(code(service.create(&body).await), ErrorCode::TemplateNotFound);
    let mut body = machine_body();
    body.size = "huge".into();
    assert_eq!(code(service.create(&body).await), ErrorCode::InvalidRequest);
    if !has_network {
        let mut body = machine_body();
        body.internet = Some(true);
        assert_eq!(code(service.create(&body).await), ErrorCode::Unsupported);
    }
    let mut body = machine_body();
    body.internet = Some(false);
    let machine: Machine = service.create(&body).await.expect("create");
    assert!(!machine.record().await.internet);
    let reached = machine.sh("timeout 5 bash -c 'echo > /dev/tcp/1.1.1.1/80'").await;
    assert_ne!(reached.raw.exit_code, 0, "it has no way out");
    assert_eq!(service.keys().len(), 1, "refused creates made nothing");
    service.finish().await;
}
