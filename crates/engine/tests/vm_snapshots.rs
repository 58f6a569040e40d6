//! Machines that are paused, brought back and forked, on the real driver. Needs what `vm_microvm` needs.

mod ground;

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ground::*;
use mainbrella_engine::driver::{Adoption, Driver, EgressOrder, ForkOrder, Instance, LaunchOrder};
use mainbrella_engine::microvm::MicroVm;
use mainbrella_engine::{DriverError, Outcome};
use mainbrella_guest_protocol::host::GuestClient;
use mainbrella_guest_protocol::proto::mainbrella::guest::v1 as pb;
use mainbrella_types::{EgressPolicy, GenerationKey, SizeClass, Target};

/// Holds 60 MB of which it changes some all the time and checks all; and a file that has no name any more. Each round that
/// found everything as it was left is a line `good N` in /root/rounds; anything else is `bad`.
const HOLDER: &str = r#"
import os, time, zlib
os.chdir("/root")
blocks = [bytearray(os.urandom(1 << 20)) for _ in range(60)]
sums = [zlib.crc32(b) for b in blocks]
held = open("held", "w+")
os.unlink("held")
rounds = open("rounds", "a", buffering=1)
n = 0
while True:
    n += 1
    b = n * 7 % len(blocks)
    blocks[b][n % 4096::4096] = os.urandom(len(blocks[b][n % 4096::4096]))
    sums[b] = zlib.crc32(blocks[b])
    held.write("%d\n" % n)
    held.seek(0)
    good = [zlib.crc32(x) for x in blocks] == sums and held.read() == "".join("%d\n" % i for i in range(1, n + 1))
    rounds.write("%s %d\n" % ("good" if good else "bad", n))
    time.sleep(0.05)
"#;

/// Starts [`HOLDER`] and waits for its first rounds.
async fn hold(guest: &GuestClient) {
    let start =
        format!("cat > /root/holder.py <<'END'{HOLDER}END\nsetsid python3 /root/holder.py >/root/errors 2>&1 &");
    shell(guest, &start).await;
    rounds_after(guest, 1).await;
}

/// Waits until there are two rounds more than `least`; every one was good. Returns how many there are.
async fn rounds_after(guest: &GuestClient, least: u64) -> u64 {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let out = shell(guest, "grep -vc good /root/rounds; tail -n 1 /root/rounds; cat /root/errors").await;
        let mut lines = out.lines();
        let (bad, last) = (lines.next().unwrap_or(""), lines.next().unwrap_or(""));
        let n = last.strip_prefix("good ").and_then(|n| n.parse::<u64>().ok());
        assert!(bad.parse::<u32>().is_err() || bad == "0", "{out}");
        if let Some(n) = n.filter(|n| *n > least + 1) {
            return n;
        }
        assert!(Instant::now() < until, "no more rounds: {out}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// What a job printed from event `after` on, up to `lines` lines or its end; and the last event seen.
async fn follow(guest: &GuestClient, job: &str, after: u64, lines: usize) -> (String, u64) {
    let request = pb::FollowJobRequest { job_id: job.into(), after_sequence: after, ..Default::default() };
    let mut stream = guest.streams().follow_job(request).await.expect("follow");
    let (mut out, mut last) = (String::new(), after);
    while out.lines().count() < lines {
        let Some(event) = stream.message().await.expect("event") else { break };
        let event = event.to_owned_message();
        last = event.sequence;
        if let Some(pb::job_event::Event::Output(o)) = event.event {
            out.push_str(&String::from_utf8_lossy(&o.data));
        }
    }
    (out, last)
}

/// What of `/proc/PID/status` says that the jail is in force.
fn jailed(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let field = |name: &str| {
        let line = status.lines().find(|l| l.starts_with(name)).unwrap_or("");
        line.split_ascii_whitespace().nth(1).unwrap_or("").to_owned()
    };
    let root = std::fs::metadata(format!("/proc/{pid}/root/home")).is_err();
    field("Seccomp:") == "2" && field("NoNewPrivs:") == "1" && field("CapEff:").chars().all(|c| c == '0') && root
}

/// KiB that a process has for itself.
fn private_kib(pid: i32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("smaps_rollup");
    let field = |l: &str| l.split_ascii_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
    text.lines().filter(|l| l.starts_with("Private_")).map(field).sum()
}

fn egress() -> EgressOrder {
    EgressOrder::default()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_goes_on_where_it_was_three_times() {
    let t = data_dir();
    let c = config(t.path(), 0);
    let driver = open(&c).await;
    let o = order();
    let machine = driver.launch(&o).await.expect("launch");
    let mut guest = client(&*machine).await;
    hold(&guest).await;
    let job = uuid::Uuid::now_v7().to_string();
    let script = "i=0; while [ $i -lt 1000 ]; do i=$((i+1)); echo line $i; sleep 0.2; done";
    let request = pb::StartJobRequest {
        job_id: job.clone(),
        argv: ["/bin/sh", "-c", script].iter().map(|a| a.as_bytes().to_vec()).collect(),
        acked: true,
        ..Default::default()
    };
    drop(guest.streams().run_job(request).await.expect("run"));
    let (mut seen, mut last) = follow(&guest, &job, 0, 3).await;
    let mut rounds = rounds_after(&guest, 1).await;
    let mut instance = machine;
    for cycle in 1..=3 {
        let uid = driver.vmm_pid(&o.key).expect("it runs");
        quiesce(guest).await;
        let receipt = driver.pause(&o.key).await.expect("pause");
        instance.exited().await;
        assert!(instance.dial().await.is_err(), "the instance is over");
        assert!(gone(Path::new(&format!("/proc/{uid}"))), "its VMM is gone");
        assert!(driver.vmm_pid(&o.key).is_none() && driver.usage(&o.key).is_none());
        assert_eq!(driver.inventory().await.expect("inventory"), [o.key]);
        assert!(matches!(driver.adopt(&o.key, &egress()).await.expect("adopt"), Adoption::Paused));
        assert!(matches!(driver.pause(&o.key).await, Err(DriverError::WrongState(_))), "it is paused");
        assert!(receipt.memory_bytes > 60 << 20 && receipt.device_bytes > 0, "{receipt:?}");
        let since = Instant::now();
        instance = driver.resume(&o.key, &egress()).await.expect("resume");
        let resumed = since.elapsed();
        guest = client(&*instance).await;
        println!(
            "cycle {cycle}: {} MiB of memory, {} KiB of devices, still for {} ms; back after {} ms, answering after {} ms",
            receipt.memory_bytes >> 20,
            receipt.device_bytes >> 10,
            receipt.still_ms,
            resumed.as_millis(),
            since.elapsed().as_millis()
        );
        assert!(jailed(driver.vmm_pid(&o.key).expect("it runs")));
        assert!(matches!(driver.resume(&o.key, &egress()).await, Err(DriverError::WrongState(_))), "it runs");
        let skew = shell(&guest, "date +%s").await.trim().parse::<u64>().expect("a number");
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("now").as_secs();
        assert!(now.abs_diff(skew) < 5, "its clock is right: {skew} and {now}");
        rounds = rounds_after(&guest, rounds).await;
        let (more, at) = follow(&guest, &job, last, 3).await;
        seen.push_str(&more);
        last = at;
    }
    let expected: String = (1..=seen.lines().count()).map(|n| format!("line {n}\n")).collect();
    assert_eq!(seen, expected, "no line is lost and none comes twice");
    assert!(seen.lines().count() >= 12);
    assert!(std::fs::read_dir(t.path().join("waiting")).expect("list").next().is_none());
    drop((guest, instance));
    driver.destroy(&o.key).await.expect("destroy");
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_that_finds_the_host_full_leaves_the_machine_running() {
    let t = tempfile::tempdir().expect("temp dir");
    let disk = SmallDisk::mount(t.path(), 40);
    link_frozen(t.path());
    let c = config(t.path(), 0);
    let driver = open(&c).await;
    let o = order();
    let machine = driver.launch(&o).await.expect("launch");
    let guest = client(&*machine).await;
    hold(&guest).await;
    let rounds = rounds_after(&guest, 1).await;
    quiesce(guest).await;
    let full = driver.pause(&o.key).await;
    assert!(matches!(full, Err(DriverError::HostFull)), "{full:?}");
    let place = t.path().join("machines").join(o.key.to_string());
    assert!(!place.join("paused").exists() && !place.join("paused.new").exists(), "nothing of it is left");
    let guest = client(&*machine).await;
    let rounds = rounds_after(&guest, rounds).await;
    // Nor can it be forked, once there is not even room for a disk.
    quiesce(guest).await;
    let filler = disk.fill();
    let child = ForkOrder { key: order().key, egress: egress() };
    let full = driver.fork(&o.key, std::slice::from_ref(&child)).await.err();
    assert!(matches!(full, Some(DriverError::HostFull)), "{full:?}");
    drop(filler);
    for dir in ["disks", "tmp", "waiting"] {
        assert_eq!(std::fs::read_dir(t.path().join(dir)).expect("list").count(), 0, "{dir}");
    }
    let names = || {
        let files = std::fs::read_dir(&place).expect("list").flatten();
        let mut names: Vec<_> = files.map(|f| f.file_name().to_string_lossy().into_owned()).collect();
        names.sort_unstable();
        names
    };
    assert_eq!(names(), ["agent.sock", "disk.qcow2", "qmp.sock", "vmm.json"]);
    let guest = client(&*machine).await;
    let rounds = rounds_after(&guest, rounds).await;
    disk.grow(512);
    quiesce(guest).await;
    driver.pause(&o.key).await.expect("there is room now");
    assert_eq!(names(), ["disk.qcow2", "paused"]);
    let machine = driver.resume(&o.key, &egress()).await.expect("resume");
    let guest = client(&*machine).await;
    rounds_after(&guest, rounds).await;
    driver.destroy(&o.key).await.expect("destroy");
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_machine_outlives_the_service_and_damage_is_found_before_it_is_used() {
    let t = data_dir();
    let c = config(t.path(), 0);
    let driver = open(&c).await;
    let (o, other) = (order(), order());
    let machine = driver.launch(&o).await.expect("launch");
    let guest = client(&*machine).await;
    shell(&guest, "echo kept > /root/f; echo shared > /dev/shm/f").await;
    quiesce(guest).await;
    driver.pause(&o.key).await.expect("pause");
    let machine = driver.launch(&other).await.expect("launch");
    let guest = client(&*machine).await;
    quiesce(guest).await;
    driver.pause(&other.key).await.expect("pause");
    drop((machine, driver));

    let machines = t.path().join("machines");
    let half = machines.join(other.key.to_string()).join("paused.new");
    std::fs::create_dir(&half).expect("mkdir");
    let driver = open(&c).await;
    assert!(!half.exists(), "half a pause is removed at the start");
    for key in [&o.key, &other.key] {
        assert!(matches!(driver.adopt(key, &egress()).await.expect("adopt"), Adoption::Paused));
    }
    assert!(driver.launch(&o).await.is_err(), "its key is taken");

    // One bit of its memory, its devices, its manifest.
    let paused = machines.join(o.key.to_string()).join("paused");
    for (name, at) in [("memory", 1 << 20), ("memory", 20), ("memory", 80), ("device", 1000), ("manifest.json", 0)] {
        let file = std::fs::File::options().read(true).write(true).open(paused.join(name)).expect("open");
        let mut byte = [0u8];
        file.read_exact_at(&mut byte, at).expect("read");
        file.write_all_at(&[byte[0] ^ 1], at).expect("write");
        let refused = driver.resume(&o.key, &egress()).await.err();
        assert!(matches!(refused, Some(DriverError::Damaged(_))), "{name} at {at}: {refused:?}");
        assert!(matches!(driver.adopt(&o.key, &egress()).await.expect("adopt"), Adoption::Paused));
        file.write_all_at(&byte, at).expect("write");
    }
    // Two at once: one of them brings it back, under the policy that is asked for now.
    let list: EgressOrder = "allow-list 203.0.113.34:80".parse::<EgressPolicy>().expect("a policy").into();
    let (a, b) = tokio::join!(driver.resume(&o.key, &list), driver.resume(&o.key, &list));
    let ((Ok(machine), Err(DriverError::WrongState(_))) | (Err(DriverError::WrongState(_)), Ok(machine))) = (a, b)
    else {
        panic!("neither or both")
    };
    let network = machine.network().expect("a network");
    for (to, expected) in [("203.0.113.34", Outcome::Allowed), ("203.0.113.35", Outcome::Denied)] {
        let to = Target::Address(to.parse().expect("an address"));
        assert_eq!(network.explain(&to, 80).await.outcome, expected);
    }
    let guest = client(&*machine).await;
    assert_eq!(shell(&guest, "cat /root/f /dev/shm/f").await, "kept\nshared\n");
    assert!(!paused.exists(), "what was kept is let go");

    // A service that died right before a VMM was to go on, and what it had already set aside.
    quiesce(guest).await;
    drop((machine, driver));
    let place = machines.join(o.key.to_string());
    stop_vmm(&place);
    let aside = t.path().join("waiting").join(uuid::Uuid::now_v7().simple().to_string());
    std::fs::create_dir_all(aside.join("paused")).expect("mkdir");
    let driver = open(&c).await;
    assert!(!aside.exists());
    let Adoption::Running(machine) = driver.adopt(&o.key, &egress()).await.expect("adopt") else { panic!("it runs") };
    let guest = client(&*machine).await;
    assert_eq!(shell(&guest, "cat /root/f /dev/shm/f").await, "kept\nshared\n");
    quiesce(guest).await;

    // And one that died right after what was kept had its name.
    let pid = driver.vmm_pid(&o.key).expect("it runs");
    drop((machine, driver));
    stop_vmm(&place);
    std::fs::create_dir(&paused).expect("mkdir");
    let driver = open(&c).await;
    assert!(gone(Path::new(&format!("/proc/{pid}"))), "never both");
    assert!(matches!(driver.adopt(&o.key, &egress()).await.expect("adopt"), Adoption::Paused));
    let empty = driver.resume(&o.key, &egress()).await.err();
    assert!(matches!(empty, Some(DriverError::Damaged(_))), "{empty:?}");
    driver.destroy(&other.key).await.expect("a paused one is destroyed");
    driver.destroy(&other.key).await.expect("again");
    assert_eq!(driver.inventory().await.expect("inventory"), [o.key]);
    driver.destroy(&o.key).await.expect("destroy");
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}

/// Stops the VMM in `place` behind its service's back.
fn stop_vmm(place: &Path) {
    use std::io::Write;
    let mut channel = std::os::unix::net::UnixStream::connect(place.join("qmp.sock")).expect("connect");
    channel.write_all(b"{\"execute\":\"qmp_capabilities\"}{\"execute\":\"stop\",\"id\":1}").expect("write");
    let lines = BufReader::new(channel).lines();
    assert!(lines.map_while(Result::ok).any(|l| l.contains("\"id\": 1")), "stopped");
}

/// Not a test of its own: see [`service_to_be_killed`].
#[tokio::test(flavor = "multi_thread")]
async fn the_service_that_is_killed() {
    service_to_be_killed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_killed_at_any_step_leaves_the_machine_running_or_paused() {
    let t = data_dir();
    let c = config(t.path(), 0);
    let driver = open(&c).await;
    let o = order();
    let machine = driver.launch(&o).await.expect("launch");
    let guest = client(&*machine).await;
    hold(&guest).await;
    let mut rounds = rounds_after(&guest, 1).await;
    quiesce(guest).await;
    drop((machine, driver));
    let mut paused = false;
    let mut seen = Vec::new();
    let steps = [0, 15, 40, 80, 120, 160, 220, 300, 400, 550, 700, 900];
    for ms in steps.into_iter().chain(steps.into_iter().rev()) {
        let verb = if paused { "resume" } else { "pause" };
        let (of, with) = (o.key, c.clone());
        let done = tokio::task::spawn_blocking(move || kill_during(verb, &of, &with, ms)).await.expect("killed");
        let driver = open(&c).await;
        assert_eq!(driver.inventory().await.expect("inventory"), [o.key], "{verb} for {ms} ms");
        assert!(std::fs::read_dir(t.path().join("waiting")).expect("list").next().is_none());
        paused = match driver.adopt(&o.key, &egress()).await.expect("adopt") {
            Adoption::Running(machine) => {
                assert!(!(done && verb == "pause"), "it was told to be paused");
                let guest = client(&*machine).await;
                rounds = rounds_after(&guest, rounds).await;
                quiesce(guest).await;
                false
            }
            Adoption::Paused => {
                assert!(!(done && verb == "resume"), "it was told to run");
                true
            }
            Adoption::Dead(why) => panic!("{verb} for {ms} ms: dead: {why}"),
            Adoption::Absent => panic!("{verb} for {ms} ms: absent"),
        };
        seen.push(format!(
            "{verb} {ms} ms{}: {}",
            if done { " (done)" } else { "" },
            if paused { "paused" } else { "runs" }
        ));
    }
    println!("{}", seen.join("\n"));
    let driver = open(&c).await;
    if paused {
        drop(driver.resume(&o.key, &egress()).await.expect("resume"));
    } else {
        drop(driver.adopt(&o.key, &egress()).await.expect("adopt"));
    }
    driver.destroy(&o.key).await.expect("destroy");
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}

/// How many layers the disk of a machine has.
fn layers(data: &Path, key: &GenerationKey) -> usize {
    match std::fs::read_to_string(data.join("machines").join(key.to_string()).join("layers.json")) {
        Ok(text) => {
            serde_json::from_str::<serde_json::Value>(&text).expect("json")["layers"].as_array().expect("a list").len()
        }
        Err(_) => 0,
    }
}

/// What a script says; on a busy host one that was ended by its time limit, saying nothing, is run again.
async fn patiently(guest: &GuestClient, script: &str) -> String {
    for _ in 0..10 {
        let said = shell(guest, script).await;
        if !said.is_empty() {
            return said;
        }
    }
    String::new()
}

/// Waits until the disk of a machine has no more layers than are left alone.
async fn flat(data: &Path, key: &GenerationKey) {
    let until = Instant::now() + Duration::from_secs(180);
    while layers(data, key) > 4 {
        assert!(Instant::now() < until, "it is not flattened");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn forks_of_forks_twelve_deep_read_what_was_written_at_every_depth_and_their_layers_are_bounded() {
    let t = data_dir();
    let c = config(t.path(), 0);
    let mut driver = open(&c).await;
    let mut o = order();
    let mut machine = driver.launch(&o).await.expect("launch");
    let check = "sync; echo 3 > /proc/sys/vm/drop_caches; cd /root && sha256sum -c --quiet sums && wc -l < sums";
    for depth in 1..=12u64 {
        let guest = client(&*machine).await;
        let write = format!(
            "cd /root && head -c 1500000 /dev/urandom > f{depth} && head -c 250000 /dev/urandom | dd of=f1 conv=notrunc status=none \
             && sha256sum f* > sums; sync"
        );
        assert_eq!(patiently(&guest, &format!("{write}; echo written")).await, "written\n");
        driver.ready_to_fork(&o.key).await.expect("put together where it has to be");
        quiesce(guest).await;
        let (key, child) = fork(&driver, &o, 1).await.pop().expect("one");
        // What only the source named goes with it.
        driver.destroy(&o.key).await.expect("destroy");
        (o.key, machine) = (key, child);
        assert!(layers(t.path(), &o.key) <= 8, "{depth}");
        if depth % 5 == 0 {
            // The fifth layer has QEMU flatten it; the service is killed while it is at it, or just before or after.
            drop((machine, driver));
            for ms in [0, 100, 400] {
                let (of, with) = (o.key, c.clone());
                tokio::task::spawn_blocking(move || kill_during("flatten", &of, &with, ms)).await.expect("killed");
            }
            driver = open(&c).await;
            let Adoption::Running(found) = driver.adopt(&o.key, &egress()).await.expect("adopt") else {
                panic!("it runs")
            };
            machine = found;
        }
        let guest = client(&*machine).await;
        let since = Instant::now();
        let said = patiently(&guest, check).await;
        println!("read at depth {depth} after {} ms, {} layers", since.elapsed().as_millis(), layers(t.path(), &o.key));
        assert_eq!(said, format!("{depth}\n"));
    }
    flat(t.path(), &o.key).await;
    let guest = client(&*machine).await;
    // Whatever is written meanwhile, while nothing lies between.
    assert_eq!(patiently(&guest, check).await, "12\n");
    quiesce(guest).await;
    driver.pause(&o.key).await.expect("pause");
    let machine = driver.resume(&o.key, &egress()).await.expect("resume");
    let guest = client(&*machine).await;
    assert_eq!(patiently(&guest, check).await, "12\n");
    let left = std::fs::read_dir(t.path().join("disks")).expect("list").count();
    assert_eq!(left, layers(t.path(), &o.key), "former layers that nobody names are gone");
    drop(guest);
    driver.destroy(&o.key).await.expect("destroy");
    assert_eq!(std::fs::read_dir(t.path().join("disks")).expect("list").count(), 0);
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}

/// Runs a fork into `n` children and says what it measured.
async fn fork(driver: &Arc<MicroVm>, source: &LaunchOrder, n: usize) -> Vec<(GenerationKey, Box<dyn Instance>)> {
    let orders: Vec<_> = (0..n).map(|_| ForkOrder { key: order().key, egress: egress() }).collect();
    let since = Instant::now();
    let forked = driver.fork(&source.key, &orders).await.expect("fork");
    println!(
        "fork into {n}: source still for {} ms, {} MiB of memory, children after {} ms",
        forked.still_ms,
        forked.memory_bytes >> 20,
        since.elapsed().as_millis()
    );
    let children = forked.children.into_iter().map(|c| c.expect("child"));
    orders.iter().map(|o| o.key).zip(children).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn children_go_on_by_themselves_and_outlive_their_source() {
    let t = data_dir();
    let c = config(t.path(), 0);
    let driver = open(&c).await;
    let o = order();
    let machine = driver.launch(&o).await.expect("launch");
    let guest = client(&*machine).await;
    hold(&guest).await;
    shell(
        &guest,
        "head -c 20000000 /dev/urandom > /root/big; sha256sum /root/big > /root/sum; echo source > /root/who",
    )
    .await;
    let rounds = rounds_after(&guest, 1).await;
    quiesce(guest).await;
    let taken = ForkOrder { key: o.key, egress: egress() };
    let refused = driver.fork(&o.key, &[taken]).await.err();
    assert!(matches!(refused, Some(DriverError::Stage { .. })), "a key is used once: {refused:?}");
    let children = fork(&driver, &o, 2).await;
    assert_eq!(driver.inventory().await.expect("inventory").len(), 3);
    let guest = client(&*machine).await;
    let mut guests = vec![guest];
    for (_, child) in &children {
        guests.push(client(&**child).await);
    }
    for (n, guest) in guests.iter().enumerate() {
        rounds_after(guest, rounds).await;
        assert_eq!(shell(guest, "cat /root/who").await, "source\n");
        let check = "sync; echo 3 > /proc/sys/vm/drop_caches; sha256sum -c --quiet /root/sum && echo same";
        assert_eq!(shell(guest, check).await, "same\n", "the disk as it was, read again");
        shell(guest, &format!("echo {n} > /root/who; echo {n} > /dev/shm/who; sync")).await;
    }
    for (n, guest) in guests.iter().enumerate() {
        let out = shell(guest, "echo 3 > /proc/sys/vm/drop_caches; cat /root/who /dev/shm/who").await;
        assert_eq!(out, format!("{n}\n{n}\n"), "each has its own");
    }
    for (key, _) in &children {
        let pid = driver.vmm_pid(key).expect("it runs");
        assert!(jailed(pid));
        println!("child: {} MiB of its own, of {}", private_kib(pid) >> 10, SizeClass::Micro.spec().memory_mib);
    }
    let disks = || std::fs::read_dir(t.path().join("disks")).expect("list").count();
    assert_eq!(disks(), 1);

    // The source goes first; a child is paused, outlives the service, comes back and is forked itself.
    let mut guests = guests.into_iter();
    drop(guests.next());
    driver.destroy(&o.key).await.expect("destroy");
    assert_eq!(disks(), 1, "its children still use it");
    let (one, two) = (guests.next().expect("one"), guests.next().expect("two"));
    quiesce(one).await;
    driver.pause(&children[0].0).await.expect("pause");
    quiesce(two).await;
    let [(first, _), (second, second_instance)] = <[_; 2]>::try_from(children).ok().expect("two");
    drop((second_instance, driver));
    let driver = open(&c).await;
    assert_eq!(disks(), 1);
    let Adoption::Running(adopted) = driver.adopt(&second, &egress()).await.expect("adopt") else { panic!("it runs") };
    let resumed = driver.resume(&first, &egress()).await.expect("resume");
    for (n, instance) in [(1, &resumed), (2, &adopted)] {
        let guest = client(&**instance).await;
        let out = shell(
            &guest,
            "echo 3 > /proc/sys/vm/drop_caches; cat /root/who; sha256sum -c --quiet /root/sum && echo same",
        );
        assert_eq!(out.await, format!("{n}\nsame\n"));
        quiesce(guest).await;
    }
    let first_order = LaunchOrder { key: first, ..order() };
    let grand = fork(&driver, &first_order, 1).await;
    assert_eq!(disks(), 2);
    let guest = client(&*grand[0].1).await;
    rounds_after(&guest, rounds).await;
    assert_eq!(shell(&guest, "cat /root/who; sha256sum -c --quiet /root/sum && echo same").await, "1\nsame\n");
    drop(guest);
    for key in [first, second] {
        driver.destroy(&key).await.expect("destroy");
    }
    assert_eq!(disks(), 2, "the grandchild reads both");
    driver.destroy(&grand[0].0).await.expect("destroy");
    assert_eq!(disks(), 0);
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_is_forked_again_and_again_up_to_a_bound_and_is_paused_after() {
    let t = data_dir();
    let c = config(t.path(), 0);
    let driver = open(&c).await;
    let o = order();
    let machine = driver.launch(&o).await.expect("launch");
    for n in 1..=12 {
        let guest = client(&*machine).await;
        shell(&guest, &format!("echo {n} >> /root/f; sync")).await;
        driver.ready_to_fork(&o.key).await.expect("put together where it has to be");
        quiesce(guest).await;
        for (key, _) in fork(&driver, &o, 1).await {
            driver.destroy(&key).await.expect("destroy");
        }
        assert!(layers(t.path(), &o.key) <= 8, "{n}");
    }
    let guest = client(&*machine).await;
    quiesce(guest).await;
    driver.pause(&o.key).await.expect("pause");
    let machine = driver.resume(&o.key, &egress()).await.expect("resume");
    let guest = client(&*machine).await;
    let out = shell(&guest, "echo 3 > /proc/sys/vm/drop_caches; tr '\\n' ' ' < /root/f").await;
    assert_eq!(out, "1 2 3 4 5 6 7 8 9 10 11 12 ");
    drop(guest);
    driver.destroy(&o.key).await.expect("destroy");
    assert_eq!(std::fs::read_dir(t.path().join("disks")).expect("list").count(), 0);
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_that_was_cut_off_is_finished_or_taken_back() {
    let t = data_dir();
    let c = config(t.path(), 0);
    let driver = open(&c).await;
    let o = order();
    let machine = driver.launch(&o).await.expect("launch");
    let guest = client(&*machine).await;
    shell(&guest, "echo before > /root/f; sync").await;
    quiesce(guest).await;
    let children = fork(&driver, &o, 1).await;
    driver.destroy(&children[0].0).await.expect("destroy");
    let guest = client(&*machine).await;
    shell(&guest, "echo after >> /root/f; sync").await;
    quiesce(guest).await;
    drop((machine, driver));

    // As it was when QEMU wrote to the fresh overlay already, but nothing had its name.
    let place = t.path().join("machines").join(o.key.to_string());
    let disks = || std::fs::read_dir(t.path().join("disks")).expect("list").flatten().map(|e| e.path());
    let below = disks().next().expect("one");
    std::fs::rename(place.join("disk.qcow2"), place.join("disk.next.qcow2")).expect("rename");
    std::fs::rename(place.join("layers.json"), place.join("layers.next.json")).expect("rename");
    std::fs::hard_link(below.join("disk.qcow2"), place.join("disk.qcow2")).expect("link");
    let driver = open(&c).await;
    let Adoption::Running(machine) = driver.adopt(&o.key, &egress()).await.expect("adopt") else { panic!("it runs") };
    assert!(place.join("layers.json").exists() && !place.join("disk.next.qcow2").exists());
    drop((machine, driver));

    // And as it was when the fresh overlay was not on top yet.
    let id = uuid::Uuid::now_v7().simple().to_string();
    let text = std::fs::read_to_string(place.join("layers.json")).expect("read");
    std::fs::write(place.join("layers.next.json"), text.replace("]", &format!(",\"{id}\"]"))).expect("write");
    std::fs::write(place.join("disk.next.qcow2"), "").expect("write");
    std::fs::create_dir(t.path().join("disks").join(&id)).expect("mkdir");
    let driver = open(&c).await;
    assert_eq!(disks().count(), 2, "it may be in use");
    let Adoption::Running(machine) = driver.adopt(&o.key, &egress()).await.expect("adopt") else { panic!("it runs") };
    assert!(!place.join("layers.next.json").exists() && !place.join("disk.next.qcow2").exists());
    assert_eq!(disks().count(), 1);

    // Either way it is kept, and found again, with the disk it has.
    driver.pause(&o.key).await.expect("pause");
    drop(machine);
    let machine = driver.resume(&o.key, &egress()).await.expect("resume");
    let guest = client(&*machine).await;
    let out = shell(&guest, "echo 3 > /proc/sys/vm/drop_caches; cat /root/f").await;
    assert_eq!(out, "before\nafter\n");
    drop(guest);
    driver.destroy(&o.key).await.expect("destroy");
    assert_eq!(disks().count(), 0);
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_killed_during_a_fork_leaves_the_source_whole() {
    let t = data_dir();
    let c = config(t.path(), 0);
    let driver = open(&c).await;
    let o = order();
    let machine = driver.launch(&o).await.expect("launch");
    let guest = client(&*machine).await;
    hold(&guest).await;
    let mut rounds = rounds_after(&guest, 1).await;
    quiesce(guest).await;
    drop((machine, driver));
    for ms in [0, 20, 50, 80, 120, 200, 400] {
        let (of, with) = (o.key, c.clone());
        tokio::task::spawn_blocking(move || kill_during("fork", &of, &with, ms)).await.expect("killed");
        let driver = open(&c).await;
        assert!(std::fs::read_dir(t.path().join("waiting")).expect("list").next().is_none());
        for key in driver.inventory().await.expect("inventory") {
            if key != o.key {
                driver.destroy(&key).await.expect("a child nobody asked for");
            }
        }
        let Adoption::Running(machine) = driver.adopt(&o.key, &egress()).await.expect("adopt") else {
            panic!("it runs")
        };
        let guest = client(&*machine).await;
        rounds = rounds_after(&guest, rounds).await;
        shell(&guest, &format!("echo {ms} >> /root/f; sync")).await;
        // What is on its disk's top now is what is kept and found again.
        quiesce(guest).await;
        driver.pause(&o.key).await.expect("pause");
        let machine = driver.resume(&o.key, &egress()).await.expect("resume");
        let guest = client(&*machine).await;
        let out = shell(&guest, "echo 3 > /proc/sys/vm/drop_caches; tail -n 1 /root/f").await;
        assert_eq!(out, format!("{ms}\n"));
        quiesce(guest).await;
        drop((machine, driver));
    }
    let driver = open(&c).await;
    driver.destroy(&o.key).await.expect("destroy");
    assert_eq!(std::fs::read_dir(t.path().join("disks")).expect("list").count(), 0);
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}
