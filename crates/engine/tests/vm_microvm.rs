//! Whole machines on the real driver. Needs root, QEMU, and images: the environment variable `MAINBRELLA_TEST_DATA` names
//! a data directory with a kernel and the `python` template, `MAINBRELLA_TEST_AGENT` the static guest agent. The launcher
//! is the `microvm` example, which is built along with the tests.

mod ground;

use std::path::Path;
use std::time::{Duration, Instant};

use ground::*;
use mainbrella_engine::driver::{Adoption, Driver, ExitReport, LaunchOrder};
use mainbrella_engine::microvm::{MicroVm, MicroVmConfig};
use mainbrella_types::{GenerationKey, SizeClass};

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_lives_and_goes_without_a_trace() {
    let t = data_dir();
    let c = config(t.path(), 0);
    let driver = open(&c).await;
    assert!(driver.templates().await.expect("templates").iter().any(|t| t.frozen == [SizeClass::Micro]));
    let o = order();
    let machine = driver.launch(&o).await.expect("launch");
    let guest = client(&*machine).await;
    assert_eq!(shell(&guest, "hostname; echo data > /root/f; sync; cat /root/f").await, "tested\ndata\n");
    assert_eq!(driver.inventory().await.expect("inventory"), [o.key]);
    assert!(driver.launch(&o).await.is_err(), "a key is used once");
    assert_eq!(shell(&guest, "cat /root/f").await, "data\n", "and the refused launch did not touch the machine");
    let usage = driver.usage(&o.key).expect("known");
    assert!(usage.memory_bytes.is_none_or(|b| b > 1 << 20), "{usage:?}");
    driver.destroy(&o.key).await.expect("destroy");
    driver.destroy(&o.key).await.expect("again");
    assert!(matches!(driver.adopt(&o.key, &o.egress).await.expect("adopt"), Adoption::Absent));
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_share_a_template_and_nothing_else() {
    let t = data_dir();
    let c = config(t.path(), 0);
    let driver = open(&c).await;
    let (a, b) = (order(), order());
    let (ma, mb) = tokio::join!(driver.launch(&a), driver.launch(&b));
    let (ga, gb) = (client(&*ma.expect("a")).await, client(&*mb.expect("b")).await);
    shell(&ga, "echo a > /root/who; echo a > /dev/shm/who").await;
    assert_eq!(shell(&gb, "cat /root/who /dev/shm/who 2>/dev/null; echo end").await, "end\n");
    let (pa, pb) = (driver.vmm_pid(&a.key).expect("a"), driver.vmm_pid(&b.key).expect("b"));
    let uid =
        |pid: i32| std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(format!("/proc/{pid}")).expect("alive"));
    assert_ne!(uid(pa), uid(pb), "each has its own user id");
    driver.destroy(&a.key).await.expect("destroy");
    assert_eq!(shell(&gb, "echo still").await, "still\n");
    driver.destroy(&b.key).await.expect("destroy");
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_vmm_becomes_a_machine_and_none_outlives_the_service() {
    let t = data_dir();
    let c = config(t.path(), 1);
    let driver = open(&c).await;
    driver.freeze(&template(), SizeClass::Micro).await.expect("freeze");
    let until = Instant::now() + Duration::from_secs(30);
    while driver.waiting(&template(), SizeClass::Micro).await == 0 {
        assert!(Instant::now() < until, "no VMM waits");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let waiting = std::fs::read_dir(t.path().join("waiting")).expect("list").count();
    assert_eq!(waiting, 1);
    let o = order();
    let machine = driver.launch(&o).await.expect("launch");
    let guest = client(&*machine).await;
    assert_eq!(shell(&guest, "echo hi").await, "hi\n");
    // The service goes without a word, with a machine and perhaps a waiting VMM.
    drop((guest, machine, driver));
    let driver = open(&MicroVmConfig { waiting: 0, ..c.clone() }).await;
    assert_eq!(driver.inventory().await.expect("inventory"), [o.key], "the machine is there and no waiting VMM is");
    assert_eq!(std::fs::read_dir(t.path().join("waiting")).expect("list").count(), 0);
    driver.destroy(&o.key).await.expect("destroyed without having been adopted");
    driver.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_is_adopted_with_its_work() {
    let t = data_dir();
    let c = config(t.path(), 0);
    let driver = open(&c).await;
    let o = order();
    let machine = driver.launch(&o).await.expect("launch");
    let guest = client(&*machine).await;
    shell(&guest, "echo kept > /root/f").await;
    guest.close();
    drop((guest, machine, driver));

    let driver = open(&c).await;
    let Adoption::Running(machine) = driver.adopt(&o.key, &o.egress).await.expect("adopt") else {
        panic!("not running")
    };
    let guest = client(&*machine).await;
    assert_eq!(shell(&guest, "cat /root/f").await, "kept\n");
    // A second stream replaces the first.
    let second = client(&*machine).await;
    assert_eq!(shell(&second, "echo second").await, "second\n");
    guest.closed().await;

    // Killed from outside while it is watched.
    let pid = driver.vmm_pid(&o.key).expect("known");
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid).expect("pid"), rustix::process::Signal::KILL)
        .expect("kill");
    let end = tokio::time::timeout(Duration::from_secs(2), machine.exited()).await.expect("seen within two seconds");
    assert!(matches!(&end, ExitReport::Vmm(_)), "{end}");
    assert_eq!(machine.exited().await, end, "and told again at once");
    driver.destroy(&o.key).await.expect("destroy");

    // Killed while no service was there.
    let o = order();
    drop(driver.launch(&o).await.expect("launch"));
    let pid = driver.vmm_pid(&o.key).expect("known");
    drop(driver);
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid).expect("pid"), rustix::process::Signal::KILL)
        .expect("kill");
    let driver = open(&c).await;
    assert!(matches!(driver.adopt(&o.key, &o.egress).await.expect("adopt"), Adoption::Dead(ExitReport::Vmm(_))));
    driver.destroy(&o.key).await.expect("destroy");
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_guest_is_told_even_to_a_service_that_was_away() {
    let t = data_dir();
    let c = config(t.path(), 0);
    let driver = open(&c).await;
    let o = order();
    let machine = driver.launch(&o).await.expect("launch");
    let guest = client(&*machine).await;
    let off = "echo 1 > /proc/sys/kernel/sysrq; (sleep 1; echo o > /proc/sysrq-trigger) >/dev/null 2>&1 &";
    shell(&guest, off).await;
    let end = tokio::time::timeout(Duration::from_secs(30), machine.exited()).await.expect("ends");
    assert_eq!(end, ExitReport::Guest("the guest shut down".to_owned()));
    driver.destroy(&o.key).await.expect("destroy");

    let o = order();
    let machine = driver.launch(&o).await.expect("launch");
    let guest = client(&*machine).await;
    shell(&guest, &off.replace("echo o", "echo c")).await;
    drop((guest, machine, driver));
    tokio::time::sleep(Duration::from_secs(4)).await;
    let driver = open(&c).await;
    let Adoption::Dead(ExitReport::Guest(why)) = driver.adopt(&o.key, &o.egress).await.expect("adopt") else {
        panic!("not dead")
    };
    assert_eq!(why, "the guest's kernel panicked");
    driver.destroy(&o.key).await.expect("destroy");
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}

#[tokio::test(flavor = "multi_thread")]
async fn half_made_and_damaged_remains_are_found_and_removed() {
    let t = data_dir();
    let c = config(t.path(), 0);
    let driver = open(&c).await;
    // The service died right after making the folder.
    let early = GenerationKey::new(uuid::Uuid::now_v7());
    std::fs::create_dir(t.path().join("machines").join(early.to_string())).expect("mkdir");
    // And the record of another is damaged while its VMM runs.
    let o = order();
    drop(driver.launch(&o).await.expect("launch"));
    let pid = driver.vmm_pid(&o.key).expect("known");
    std::fs::write(t.path().join("machines").join(o.key.to_string()).join("vmm.json"), "{").expect("write");
    drop(driver);
    let driver = open(&c).await;
    let mut found = driver.inventory().await.expect("inventory");
    found.sort_unstable();
    let mut expected = vec![early, o.key];
    expected.sort_unstable();
    assert_eq!(found, expected);
    for key in expected {
        assert!(matches!(driver.adopt(&key, &Default::default()).await.expect("adopt"), Adoption::Dead(_)));
        driver.destroy(&key).await.expect("destroy");
    }
    assert!(gone(Path::new(&format!("/proc/{pid}"))), "found by its control group");
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_that_give_up_leave_nothing() {
    let t = data_dir();
    let c = config(t.path(), 0);
    let driver = open(&c).await;
    for wait_ms in [0, 5, 30, 60, 120] {
        let o = order();
        let cut = tokio::time::timeout(Duration::from_millis(wait_ms), driver.launch(&o)).await;
        drop(cut);
        driver.destroy(&o.key).await.expect("destroy waits for the launch and removes it");
        assert!(driver.inventory().await.expect("inventory").is_empty());
    }
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_host_stops_a_machine_and_space_lets_it_go_on_unharmed() {
    let t = tempfile::tempdir().expect("temp dir");
    let disk = SmallDisk::mount(t.path(), 24);
    link_frozen(t.path());
    let c = MicroVmConfig { full_patience: Duration::from_secs(40), ..config(t.path(), 0) };
    let driver = open(&c).await;
    let o = order();
    let machine = driver.launch(&o).await.expect("launch");
    let guest = client(&*machine).await;
    let script = "head -c 40000000 /dev/urandom > /root/big && sync && sha256sum < /root/big && echo 3 > /proc/sys/vm/drop_caches \
        && sha256sum < /root/big";
    let work = shell(&guest, script);
    let help = async {
        // Long enough that it is stopped; short of what the guest's own time-outs would notice.
        tokio::time::sleep(Duration::from_secs(6)).await;
        disk.grow(512);
    };
    let (out, ()) = tokio::join!(work, help);
    let sums: Vec<&str> = out.lines().collect();
    assert_eq!(sums.len(), 2, "{out}");
    assert_eq!(sums[0], sums[1], "what was written is what is read");
    driver.destroy(&o.key).await.expect("destroy");

    // And when no space comes back, it is given up with the true reason.
    let c = MicroVmConfig { full_patience: Duration::from_secs(4), ..c };
    drop((guest, machine, driver));
    let driver = open(&c).await;
    let o = order();
    let machine = driver.launch(&o).await.expect("launch");
    let guest = client(&*machine).await;
    disk.grow(16);
    let fill = shell(&guest, "head -c 100000000 /dev/urandom > /root/big; sync");
    let end = tokio::select! {
        end = machine.exited() => end,
        _ = fill => panic!("more was written than the host has"),
        () = tokio::time::sleep(Duration::from_secs(60)) => panic!("not given up"),
    };
    assert_eq!(end, ExitReport::HostFull);
    driver.destroy(&o.key).await.expect("destroy");
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}

/// A world behind the host: a namespace with a public address and a private one, and a server on both.
struct World {
    _namespace: mainbrella_net::namespace::Namespace,
    link: String,
}

impl World {
    const PUBLIC: &str = "203.0.113.34";
    const PRIVATE: &str = "10.254.253.9";

    fn new() -> Self {
        use std::os::fd::AsRawFd as _;
        let namespace = mainbrella_net::namespace::Namespace::new().expect("a namespace");
        let link = format!("mbw{}", std::process::id() % 100_000);
        let sh = |text: String| {
            let out = std::process::Command::new("sh").args(["-ec", &text]).output().expect("sh");
            assert!(out.status.success(), "{text}: {}", String::from_utf8_lossy(&out.stderr));
        };
        let there = format!("/proc/{}/fd/{}", std::process::id(), namespace.fd().as_raw_fd());
        sh(format!(
            "ip link add {link} type veth peer name world netns {there}; ip addr add 203.0.113.1/32 dev {link}; ip link set {link} up; \
             ip route add {} dev {link}; ip route add {} dev {link}",
            Self::PUBLIC,
            Self::PRIVATE
        ));
        let inside = format!(
            "ip link set lo up; ip link set world up; ip addr add {}/32 dev world; ip addr add {}/32 dev lo; ip route add 203.0.113.1 dev world",
            Self::PUBLIC,
            Self::PRIVATE
        );
        let listener = namespace
            .run(|| {
                sh(inside);
                Ok(std::net::TcpListener::bind("0.0.0.0:80").expect("bind"))
            })
            .expect("the namespace");
        std::thread::spawn(move || {
            use std::io::Write as _;
            for stream in listener.incoming().flatten() {
                let mut stream = stream;
                let _ = stream.write_all(b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\nworld");
            }
        });
        Self { _namespace: namespace, link }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = std::process::Command::new("ip").args(["link", "del", &self.link]).status();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_reaches_what_its_policy_says_also_after_a_restart() {
    let world = World::new();
    let t = data_dir();
    let c = config(t.path(), 1);
    let driver = open(&c).await;
    assert!(driver.report().internet && driver.report().internet_off, "{:?}", driver.missing_walls());
    let get =
        |to: &str, host: &str| format!("curl -sS -m 10 -o - http://{to}/ -H 'Host: {host}' 2>/dev/null || echo none");
    let public = get(World::PUBLIC, "x");
    let launch = async |driver: &MicroVm, policy: &str| {
        let egress = policy.parse::<mainbrella_types::EgressPolicy>().expect("a policy").into();
        let o = LaunchOrder { egress, ..order() };
        let machine = driver.launch(&o).await.expect("launch");
        (o, machine)
    };
    let (open_order, open_machine) = launch(&driver, "open").await;
    let (off_order, off_machine) = launch(&driver, "off").await;
    let (list_order, list_machine) = launch(&driver, "allow-list 203.0.113.34:80").await;
    let mut clients = Vec::new();
    for machine in [&open_machine, &off_machine, &list_machine] {
        clients.push(client(&**machine).await);
    }
    assert_eq!(shell(&clients[0], &public).await, "world");
    assert_eq!(shell(&clients[1], &public).await, "none\n");
    assert_eq!(shell(&clients[2], &public).await, "world");
    for client in &clients {
        for to in [World::PRIVATE, "203.0.113.1", "169.254.169.254", "127.0.0.2", "172.31.255.1"] {
            assert_eq!(shell(client, &get(to, "x")).await, "none\n", "{to}");
        }
    }
    assert_eq!(shell(&clients[2], &get("203.0.113.35", "x")).await, "none\n", "no rule names it");
    drop(clients);
    drop((open_machine, off_machine, list_machine));
    driver.shutdown().await;
    drop(driver);

    // Another service finds them and enforces the same.
    let driver = MicroVm::open(c.clone(), images()).await.expect("driver");
    for (o, expected) in [(&open_order, "world"), (&off_order, "none\n"), (&list_order, "world")] {
        let Adoption::Running(machine) = driver.adopt(&o.key, &o.egress).await.expect("adopt") else {
            panic!("it runs")
        };
        let client = client(&*machine).await;
        assert_eq!(shell(&client, &public).await, expected, "{}", o.egress.policy);
        assert_eq!(shell(&client, &get(World::PRIVATE, "x")).await, "none\n", "{}", o.egress.policy);
    }
    for o in [&open_order, &off_order, &list_order] {
        driver.destroy(&o.key).await.expect("destroy");
    }
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
    drop(world);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_is_frozen_once_and_again_when_damaged() {
    let t = tempfile::tempdir().expect("temp dir");
    let c = config(t.path(), 0);
    let driver = MicroVm::open(c.clone(), images()).await.expect("driver");
    let all =
        futures::future::join_all((0..4).map(|_| async { driver.freeze(&template(), SizeClass::Micro).await })).await;
    assert!(all.iter().all(Result::is_ok), "{all:?}");
    let frozen =
        || std::fs::read_dir(t.path().join("frozen")).expect("list").flatten().map(|e| e.path()).collect::<Vec<_>>();
    let first = frozen();
    assert_eq!(first.len(), 1);
    let made = |p: &Path| std::fs::metadata(p.join("manifest.json")).and_then(|m| m.modified()).expect("manifest");
    let before = made(&first[0]);
    driver.shutdown().await;
    drop(driver);

    // Found again as it is.
    let driver = MicroVm::open(c.clone(), images()).await.expect("driver");
    driver.freeze(&template(), SizeClass::Micro).await.expect("found");
    assert_eq!(made(&first[0]), before);
    drop(driver);

    // Damaged device state is seen, and the template made again under the same key.
    std::fs::write(first[0].join("device"), "damaged").expect("write");
    let driver = MicroVm::open(c.clone(), images()).await.expect("driver");
    let o = order();
    let machine = driver.launch(&o).await.expect("made again on the way");
    assert_eq!(shell(&client(&*machine).await, "echo ok").await, "ok\n");
    assert_eq!(frozen(), first);
    assert_ne!(made(&first[0]), before);
    driver.destroy(&o.key).await.expect("destroy");
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}
