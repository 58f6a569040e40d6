//! Snapshots on the real driver: machines are saved, end, and others start from what was saved. Needs what `vm_microvm` needs.

mod ground;

use std::os::unix::fs::FileExt;
use std::path::Path;

use ground::*;
use mainbrella_engine::driver::{Adoption, DiskPart, Driver, Instance, LaunchOrder, SaveOrder, SaveReceipt};
use mainbrella_engine::microvm::MicroVm;
use mainbrella_engine::{DriverError, EgressOrder};
use mainbrella_guest_protocol::host::GuestClient;
use mainbrella_guest_protocol::proto::mainbrella::guest::v1 as pb;
use mainbrella_types::{GenerationKey, SizeClass, SnapshotKey, SnapshotKind};

fn snapshot() -> SnapshotKey {
    SnapshotKey::new(uuid::Uuid::now_v7())
}

async fn launch(driver: &MicroVm, snapshot: Option<SnapshotKey>) -> (GenerationKey, Box<dyn Instance>, GuestClient) {
    let order = LaunchOrder { snapshot, ..order() };
    let machine = driver.launch(&order).await.expect("launch");
    let guest = client(&*machine).await;
    (order.key, machine, guest)
}

async fn save(
    driver: &MicroVm,
    key: &GenerationKey,
    guest: GuestClient,
    kind: SnapshotKind,
) -> (SnapshotKey, SaveReceipt) {
    let snapshot = snapshot();
    quiesce(guest).await;
    let saving = driver.save(key, &SaveOrder { snapshot, kind }).await.expect("save");
    (snapshot, saving.durable.await.expect("durable"))
}

/// Files of many kinds with their digests, whatever lies where.
const FILES: &str = r#"mkdir -p "/workspace/a b" && cd /workspace && head -c 3000000 /dev/urandom > big && ln -s big link && ln big second
printf 'x' > "a b/$(printf 'n\nl')" && chmod 0751 "a b" && chown 12:34 link -h && echo changed >> /etc/motd && rm /etc/debian_version
sha256sum big /etc/motd; stat -c '%n %a %u %g %F %h' big link second 'a b'; ls /etc/debian_version 2>&1"#;
const LOOK: &str = r#"cd /workspace; sha256sum big /etc/motd; stat -c '%n %a %u %g %F %h' big link second 'a b'; ls /etc/debian_version 2>&1"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_saved_disk_comes_back_in_a_fresh_machine_again_and_again() {
    let t = data_dir();
    let c = config(t.path(), 1);
    let driver = open(&c).await;
    let (key, machine, guest) = launch(&driver, None).await;
    let was = shell(&guest, FILES).await;
    shell(&guest, "sleep 1000 & echo $! > /workspace/pid; echo tmp > /dev/shm/x").await;
    let (first, receipt) = save(&driver, &key, guest, SnapshotKind::Workspace).await;
    assert!(receipt.memory_bytes == 0 && receipt.disk_bytes > 3_000_000, "{receipt:?}");
    // The source goes on, and what it does later is its own.
    let guest = client(&*machine).await;
    assert_eq!(shell(&guest, LOOK).await, was);
    assert_eq!(
        shell(&guest, "kill -0 $(cat /workspace/pid) && echo runs; echo later > /workspace/big").await,
        "runs\n"
    );
    driver.destroy(&key).await.expect("destroy");
    drop((machine, guest));

    let (one, machine, guest) = launch(&driver, Some(first)).await;
    assert_eq!(shell(&guest, LOOK).await, was);
    assert_eq!(
        shell(&guest, "kill -0 $(cat /workspace/pid) 2>/dev/null || echo fresh; ls /dev/shm; hostname").await,
        "fresh\ntested\n"
    );
    assert_eq!(shell(&guest, "dmesg | grep -ciE 'ext4.*(error|corrupt)'").await, "0\n");
    // It is a machine like any other: it is saved, paused, forked, and found after a restart.
    shell(&guest, "echo two > /workspace/two").await;
    let (second, _) = save(&driver, &one, guest, SnapshotKind::Workspace).await;
    quiesce(client(&*machine).await).await;
    driver.pause(&one).await.expect("pause");
    let back = driver.resume(&one, &EgressOrder::default()).await.expect("resume");
    let guest = client(&*back).await;
    assert_eq!(shell(&guest, LOOK).await, was);
    quiesce(guest).await;
    let child = GenerationKey::new(uuid::Uuid::now_v7());
    let orders = [mainbrella_engine::driver::ForkOrder { key: child, egress: EgressOrder::default() }];
    let mut forked = driver.fork(&one, &orders).await.expect("fork");
    let copy = forked.children.remove(0).expect("child");
    assert_eq!(shell(&client(&*copy).await, LOOK).await, was);
    drop((machine, back, copy));
    drop(driver);
    let driver = MicroVm::open(c.clone(), images()).await.expect("again");
    for key in [&one, &child] {
        let found = driver.adopt(key, &EgressOrder::default()).await.expect("adopt");
        let Adoption::Running(machine) = found else { panic!("it runs") };
        assert_eq!(shell(&client(&*machine).await, LOOK).await, was);
    }
    // The first is removed while a machine that was started from it goes on; the second stands by itself.
    let (again, _, guest) = launch(&driver, Some(first)).await;
    assert_eq!(shell(&guest, LOOK).await, was);
    driver.destroy(&again).await.expect("destroy");
    driver.forget(&first).await.expect("forget");
    driver.forget(&first).await.expect("again");
    assert_eq!(driver.snapshots().await.expect("list"), [second]);
    for key in [&one, &child] {
        driver.destroy(key).await.expect("destroy");
    }
    let (two, _machine, guest) = launch(&driver, Some(second)).await;
    assert_eq!(shell(&guest, &format!("{LOOK}; cat two")).await, format!("{was}two\n"));
    driver.destroy(&two).await.expect("destroy");
    driver.forget(&second).await.expect("forget");
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
    for dir in ["disks", "snapshots"] {
        assert_eq!(std::fs::read_dir(t.path().join(dir)).expect("list").count(), 0, "{dir}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_snapshot_brings_processes_back_after_a_restart_of_the_service() {
    let t = data_dir();
    let c = config(t.path(), 0);
    let driver = open(&c).await;
    let (key, machine, guest) = launch(&driver, None).await;
    let counter = "while :; do echo x >> /root/n; sleep 0.05; done";
    shell(&guest, &format!("setsid sh -c '{counter}' >/dev/null 2>&1 & echo here > /dev/shm/x")).await;
    let lines = async |guest: &GuestClient, than: u64| -> u64 {
        let script =
            format!("touch /root/n; until [ $(wc -l < /root/n) -gt {than} ]; do sleep 0.1; done; wc -l < /root/n");
        shell(guest, &script).await.trim().parse().expect("a number")
    };
    let before = lines(&guest, 3).await;
    let (full, receipt) = save(&driver, &key, guest, SnapshotKind::Full).await;
    assert!(receipt.memory_bytes > 1 << 20, "{receipt:?}");
    driver.destroy(&key).await.expect("destroy");
    drop((machine, driver));
    // A frozen template that no template or machine of this host has to do with.
    let foreign = t.path().join("frozen").join("0".repeat(32));
    std::fs::create_dir_all(&foreign).expect("mkdir");
    let driver = MicroVm::open(c.clone(), images()).await.expect("again");
    assert!(!foreign.exists());
    assert_eq!(driver.snapshots().await.expect("list"), [full]);
    let parts = driver.disk_use().await.expect("measured");
    let of = |part| parts.iter().find(|p| p.part == part).map_or(0, |p| p.bytes);
    assert!(of(DiskPart::Disks) > 100_000 && of(DiskPart::Snapshots) > receipt.memory_bytes / 2, "{parts:?}");
    let (a, _a, one) = launch(&driver, Some(full)).await;
    let (b, _b, two) = launch(&driver, Some(full)).await;
    for guest in [&one, &two] {
        assert_eq!(shell(guest, "cat /dev/shm/x").await, "here\n");
        // The process goes on where it was: its file is written by nobody else.
        lines(guest, before + 3).await;
    }
    for key in [&a, &b] {
        driver.destroy(key).await.expect("destroy");
    }
    // A changed byte anywhere is found before anything is made of it, and nothing is left of the attempt.
    let place = t.path().join("snapshots").join(full.to_string());
    let layer = std::fs::read_dir(t.path().join("disks")).expect("list").next().expect("one").expect("one").path();
    for path in [place.join("device"), place.join("memory"), layer.join("disk.qcow2"), place.join("base.raw")] {
        let refused = with_a_byte_changed(&path, async {
            driver.launch(&LaunchOrder { snapshot: Some(full), ..order() }).await.err()
        })
        .await;
        assert!(matches!(refused, Some(DriverError::Damaged(_))), "{path:?}: {refused:?}");
    }
    let (c_key, _machine, guest) = launch(&driver, Some(full)).await;
    assert_eq!(shell(&guest, "cat /dev/shm/x").await, "here\n");
    driver.destroy(&c_key).await.expect("destroy");
    let other = LaunchOrder { snapshot: Some(full), size: SizeClass::Small, ..order() };
    assert!(matches!(driver.launch(&other).await.err(), Some(DriverError::Unsupported(_))));
    let unknown = LaunchOrder { snapshot: Some(snapshot()), ..order() };
    assert!(matches!(driver.launch(&unknown).await.err(), Some(DriverError::Damaged(_))));
    driver.forget(&full).await.expect("forget");
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}

/// Folders of machines that are being made.
fn in_the_making(data: &Path) -> usize {
    std::fs::read_dir(data.join("waiting")).expect("list").count()
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_of_one_snapshot_are_made_at_once_and_its_removal_waits_for_them() {
    const CHILDREN: usize = 4;
    let t = data_dir();
    let c = config(t.path(), 0);
    let driver = std::sync::Arc::new(open(&c).await);
    let (key, machine, guest) = launch(&driver, None).await;
    shell(&guest, "head -c 3000000 /dev/urandom >/root/big; sha256sum /root/big >/root/sum").await;
    let (full, _) = save(&driver, &key, guest, SnapshotKind::Full).await;
    driver.destroy(&key).await.expect("destroy");
    drop(machine);
    let children: Vec<_> = (0..CHILDREN)
        .map(|_| {
            let (driver, order) = (driver.clone(), LaunchOrder { snapshot: Some(full), ..order() });
            let key = order.key;
            (key, tokio::spawn(async move { driver.launch(&order).await }))
        })
        .collect();
    // As long as any is being made: the most that were at once.
    let mut most = 0;
    while !children.iter().all(|(_, child)| child.is_finished()) {
        let now = in_the_making(t.path());
        if now > 0 && most == 0 {
            let driver = driver.clone();
            // It comes when those that have begun are made.
            tokio::spawn(async move { driver.forget(&full).await });
        }
        most = most.max(now);
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    assert!(most >= 2, "one after the other");
    let mut made = 0;
    for (key, child) in children {
        match child.await.expect("no panic") {
            Ok(machine) => {
                made += 1;
                let guest = client(&*machine).await;
                assert_eq!(shell(&guest, "sha256sum -c /root/sum").await, "/root/big: OK\n");
            }
            // It began after the removal had its turn.
            Err(e) => assert!(matches!(e, DriverError::Damaged(_)), "{e:?}"),
        }
        driver.destroy(&key).await.expect("destroy");
    }
    assert!(made >= 2, "{made}");
    driver.forget(&full).await.expect("forget");
    assert!(driver.snapshots().await.expect("list").is_empty());
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_disk_alone_of_a_full_snapshot_is_whole() {
    let t = data_dir();
    let c = config(t.path(), 0);
    let driver = open(&c).await;
    let (key, machine, guest) = launch(&driver, None).await;
    let was = shell(&guest, FILES).await;
    shell(&guest, "sleep 1000 & echo $! >/workspace/pid; echo late >/workspace/late").await;
    let (full, _) = save(&driver, &key, guest, SnapshotKind::Full).await;
    driver.destroy(&key).await.expect("destroy");
    drop(machine);
    let order = LaunchOrder { snapshot: Some(full), disk_only: true, ..order() };
    let machine = driver.launch(&order).await.expect("launch");
    let guest = client(&*machine).await;
    assert_eq!(shell(&guest, LOOK).await, was);
    let rest = "cat /workspace/late; kill -0 $(cat /workspace/pid) 2>/dev/null || echo fresh; dmesg | grep -ciE 'ext4.*(error|corrupt)'";
    assert_eq!(shell(&guest, rest).await, "late\nfresh\n0\n");
    driver.destroy(&order.key).await.expect("destroy");
    driver.forget(&full).await.expect("forget");
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}

/// Not a test of its own: see [`service_to_be_killed`].
#[tokio::test(flavor = "multi_thread")]
async fn the_service_that_is_killed() {
    service_to_be_killed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_killed_at_any_step_keeps_a_snapshot_whole_or_not_at_all() {
    let t = data_dir();
    let c = config(t.path(), 0);
    let driver = open(&c).await;
    let (key, machine, guest) = launch(&driver, None).await;
    shell(&guest, "head -c 9000000 /dev/urandom > /workspace/x; sha256sum /workspace/x > /workspace/sum; sync").await;
    quiesce(guest).await;
    drop((machine, driver));
    let mut seen = Vec::new();
    for (verb, ms) in [
        ("workspace", vec![0, 50, 120, 2000]),
        ("full", vec![40, 150, 300, 3000]),
        ("restore", vec![0, 60, 120, 200, 300, 500]),
        ("forget", vec![0, 2, 4, 7, 12, 1000]),
    ]
    .into_iter()
    .flat_map(|(verb, steps)| steps.into_iter().map(move |ms| (verb, ms)))
    {
        let driver = open(&c).await;
        let before = driver.snapshots().await.expect("list");
        drop(driver);
        if verb == "forget" && before.is_empty() {
            continue;
        }
        let with = c.clone();
        let done = tokio::task::spawn_blocking(move || kill_during(verb, &key, &with, ms)).await.expect("killed");
        let driver = open(&c).await;
        let Adoption::Running(machine) = driver.adopt(&key, &EgressOrder::default()).await.expect("adopt") else {
            panic!("{verb} for {ms} ms: the machine goes on")
        };
        let guest = client(&*machine).await;
        assert_eq!(shell(&guest, "sha256sum -c /workspace/sum").await, "/workspace/x: OK\n", "{verb} for {ms} ms");
        quiesce(guest).await;
        for other in driver.inventory().await.expect("inventory") {
            if other != key {
                driver.destroy(&other).await.expect("what a restore that was cut off left");
            }
        }
        assert_eq!(std::fs::read_dir(t.path().join("tmp")).expect("list").count(), 0, "{verb} for {ms} ms");
        let after = driver.snapshots().await.expect("list");
        assert!(!done || verb == "restore" || (after.len() > before.len()) == (verb != "forget"), "{verb} for {ms} ms");
        // What is there is whole.
        for snapshot in after.iter().filter(|s| !before.contains(s)) {
            let (copy, _machine, guest) = launch(&driver, Some(*snapshot)).await;
            assert_eq!(shell(&guest, "sha256sum -c /workspace/sum").await, "/workspace/x: OK\n");
            driver.destroy(&copy).await.expect("destroy");
        }
        seen.push(format!("{verb} {ms} ms{}: {} to {}", if done { " (done)" } else { "" }, before.len(), after.len()));
        // A disk has a bounded number of layers; what was saved goes, but for one.
        if verb != "forget" && after.len() > 1 {
            driver.forget(&after[0]).await.expect("forget");
        }
        drop(machine);
        driver.shutdown().await;
    }
    println!("{}", seen.join("\n"));
    let driver = open(&c).await;
    for snapshot in driver.snapshots().await.expect("list") {
        driver.forget(&snapshot).await.expect("forget");
    }
    driver.destroy(&key).await.expect("destroy");
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
    assert_eq!(std::fs::read_dir(t.path().join("disks")).expect("list").count(), 0);
}

/// Does `work` while one byte in the middle of what `path` holds is another.
async fn with_a_byte_changed<T>(path: &Path, work: impl Future<Output = T>) -> T {
    let file = std::fs::File::options().read(true).write(true).open(path).expect("open");
    let mut whole = vec![0; 64 * 1024];
    let n = file.read_at(&mut whole, 0).expect("read");
    let at = whole[..n].iter().rposition(|b| *b != 0).expect("something") as u64;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("read");
    file.write_all_at(&[!byte[0]], at).expect("change");
    let done = work.await;
    file.write_all_at(&byte, at).expect("change back");
    done
}

#[tokio::test(flavor = "multi_thread")]
async fn a_save_that_fails_or_is_cut_off_leaves_the_machine_and_nothing_else() {
    let t = tempfile::tempdir().expect("temp dir");
    // With frozen templates of its own: none is made on another file system than it is to be on.
    let small = SmallDisk::mount(t.path(), 1000);
    let c = config(t.path(), 0);
    let driver = open(&c).await;
    let (key, machine, guest) = launch(&driver, None).await;
    shell(&guest, "head -c 20000000 /dev/urandom > /workspace/x; sha256sum /workspace/x > /workspace/sum").await;
    quiesce(guest).await;
    // Full as it is now.
    let filler = std::fs::File::create(t.path().join("filler")).expect("new");
    let free = rustix::fs::statvfs(t.path()).expect("statvfs");
    filler.write_all_at(&vec![1; (free.f_bavail * free.f_frsize) as usize - (1 << 20)], 0).expect("fill");
    let order = SaveOrder { snapshot: snapshot(), kind: SnapshotKind::Full };
    let failed = match driver.save(&key, &order).await {
        Err(e) => e,
        Ok(saving) => saving.durable.await.expect_err("there is no room"),
    };
    assert!(matches!(failed, DriverError::HostFull), "{failed:?}");
    drop(filler);
    std::fs::remove_file(t.path().join("filler")).expect("remove");
    let guest = client(&*machine).await;
    assert_eq!(shell(&guest, "sha256sum -c /workspace/sum").await, "/workspace/x: OK\n");
    assert!(driver.snapshots().await.expect("list").is_empty());
    assert_eq!(std::fs::read_dir(t.path().join("tmp")).expect("list").count(), 0);
    let (saved, _) = save(&driver, &key, guest, SnapshotKind::Workspace).await;
    // What a service that died in the middle leaves: half a save, half a removal.
    let place = t.path().join("snapshots").join(saved.to_string());
    for half in [format!("save-{}", snapshot()), format!("forget-{}", snapshot())] {
        let half = t.path().join("tmp").join(half);
        std::fs::create_dir(&half).expect("mkdir");
        std::fs::copy(place.join("manifest.json"), half.join("manifest.json")).expect("copy");
    }
    driver.destroy(&key).await.expect("destroy");
    drop((machine, driver));
    let driver = MicroVm::open(c.clone(), images()).await.expect("again");
    assert_eq!(std::fs::read_dir(t.path().join("tmp")).expect("list").count(), 0);
    let (again, _machine, guest) = launch(&driver, Some(saved)).await;
    assert_eq!(shell(&guest, "sha256sum -c /workspace/sum").await, "/workspace/x: OK\n");
    driver.destroy(&again).await.expect("destroy");
    driver.forget(&saved).await.expect("forget");
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
    drop(small);
}

async fn write(guest: &GuestClient, path: &str, data: &[u8]) {
    let start = pb::WriteFileStart { path: path.as_bytes().to_vec(), ..Default::default() };
    let mut messages = vec![pb::WriteFileRequest { start: start.into(), ..Default::default() }];
    messages.extend(data.chunks(64 * 1024).map(|d| pb::WriteFileRequest { data: d.to_vec(), ..Default::default() }));
    messages.push(pb::WriteFileRequest { finish: true, ..Default::default() });
    guest.streams().write_file(futures::stream::iter(messages)).await.expect("written");
}

/// As the disk of a template that was built in a smaller size.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_system_smaller_than_its_disk_grows_when_it_is_mounted() {
    let t = data_dir();
    let c = config(t.path(), 0);
    let driver = open(&c).await;
    let small = t.path().join("small");
    std::fs::File::create(&small).expect("create").set_len(32 << 20).expect("sized");
    let mut mkfs = std::process::Command::new("mkfs.ext4");
    let made = mkfs.args(["-q", "-F", "-m", "0", "-b", "4096", "-J", "size=4"]).arg(&small).status();
    assert!(made.expect("mkfs.ext4").success());

    // The machine's own root puts it where its disk was.
    let (key, machine, guest) = launch(&driver, None).await;
    write(&guest, "/dev/shm/small", &std::fs::read(&small).expect("read")).await;
    let put = "sync; echo u >/proc/sysrq-trigger; sleep 1; cat /dev/shm/small >/dev/vdb && sync && echo put";
    assert_eq!(shell(&guest, put).await, "put\n");
    let (saved, _) = save(&driver, &key, guest, SnapshotKind::Workspace).await;
    driver.destroy(&key).await.expect("destroy");
    drop(machine);

    let (again, machine, guest) = launch(&driver, Some(saved)).await;
    let told = shell(&guest, "dmesg | grep -i 'ext4.*resiz'").await;
    assert!(told.contains("resizing filesystem from 8192 to 1048576"), "{told}");
    let use_it = "df -m / | tail -n 1 | awk '{print $2}'; head -c 300000000 /dev/zero >/big && sync && stat -c %s /big";
    let said = shell(&guest, use_it).await;
    let (grown, written) = said.trim().split_once('\n').expect("two lines");
    assert!((3900..=4096).contains(&grown.parse::<u32>().expect("a number")), "{said}");
    assert_eq!(written, "300000000");
    assert_eq!(shell(&guest, "dmesg | grep -ciE 'ext4.*(error|corrupt)'").await, "0\n");
    // It is as large when it comes back, and grows once only.
    let (second, _) = save(&driver, &again, guest, SnapshotKind::Workspace).await;
    driver.destroy(&again).await.expect("destroy");
    drop(machine);
    let (last, _machine, guest) = launch(&driver, Some(second)).await;
    let said = shell(&guest, "stat -c %s /big; dmesg | grep -c 'resizing filesystem'").await;
    assert_eq!(said, "300000000\n0\n");
    driver.destroy(&last).await.expect("destroy");
    for snapshot in [saved, second] {
        driver.forget(&snapshot).await.expect("forget");
    }
    driver.shutdown().await;
    assert_nothing_left(t.path(), &c);
}
