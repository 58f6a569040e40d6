//! What `/v1/capabilities` says of the jail is what a running VMM has.

use std::fs;
use std::path::Path;

use mainbrella_tests::{Service, host};

#[tokio::test(flavor = "multi_thread")]
async fn the_jail_is_what_it_is_said_to_be() {
    let mut service = Service::start().await;
    let told = service.client().capabilities().await.expect("capabilities");
    assert_eq!(told.driver, "microvm");
    let m = service.machine().await;
    assert_eq!(m.record().await.isolation, told.isolation.kind);
    let virtualised = told.isolation.accelerator.as_deref();
    let pid = service.only_vmm();
    let arguments = fs::read_to_string(format!("/proc/{pid}/cmdline")).expect("cmdline").replace('\0', " ");
    match virtualised {
        Some("kvm") => assert!(told.isolation.kind == "hardware" && arguments.contains("kvm"), "{arguments}"),
        Some("tcg") => assert!(told.isolation.kind == "emulated" && arguments.contains("tcg"), "{arguments}"),
        other => panic!("an accelerator of the microVM driver: {other:?}"),
    }

    let jail = told.isolation.jail;
    let ids = |name: &str| host::status(pid, name).split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let (uids, gids) = (ids("Uid"), ids("Gid"));
    let other = service.machine().await;
    let theirs = crate::faults::vmm_of(&service, &other).await;
    assert_ne!(theirs, pid);
    let own = uids.iter().chain(&gids).all(|id| id != "0" && *id == uids[0])
        && host::status(theirs, "Uid") != host::status(pid, "Uid");
    assert_eq!(jail.own_uid, own, "{uids:?} {gids:?}");
    let bare = ["CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb"]
        .iter()
        .all(|set| host::status(pid, set).trim_start_matches('0').is_empty());
    assert_eq!(jail.no_new_privs, host::status(pid, "NoNewPrivs") == "1" && bare);
    assert_eq!(jail.seccomp, host::status(pid, "Seccomp") == "2");
    let apart = |name: &str| {
        let link = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{name}")).expect("namespace");
        link(&pid.to_string()) != link("self") && link(&pid.to_string()) != link(&theirs.to_string())
    };
    assert_eq!(
        (jail.mount_namespace, jail.pid_namespace, jail.network_namespace),
        (apart("mnt"), apart("pid"), apart("net"))
    );

    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("groups");
    let folder = format!("/mainbrella/{}/", host::instance(service.data()));
    let limit = |controller: &str, v1: &str, v2: &str| {
        groups.lines().any(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (names, path) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
            if !path.contains(&folder) || !(names.is_empty() || names.split(',').any(|n| n == controller)) {
                return false;
            }
            let roots = [
                format!("/sys/fs/cgroup/{controller}"),
                format!("/sys/fs/cgroup/{names}"),
                "/sys/fs/cgroup".to_owned(),
                "/sys/fs/cgroup/unified".to_owned(),
            ];
            roots.iter().any(|root| {
                [v1, v2].iter().any(|file| {
                    fs::read_to_string(format!("{root}{path}/{file}"))
                        .is_ok_and(|text| !text.starts_with("max") && !text.starts_with('-') && text.trim().len() < 18)
                })
            })
        })
    };
    assert_eq!(jail.memory_limit, limit("memory", "memory.limit_in_bytes", "memory.max"), "{groups}");
    assert_eq!(jail.cpu_limit, limit("cpu", "cpu.cfs_quota_us", "cpu.max"), "{groups}");
    assert_eq!(jail.pids_limit, limit("pids", "pids.max", "pids.max"), "{groups}");

    if jail.mount_namespace {
        let root = format!("/proc/{pid}/root");
        let names = host::names_in(Path::new(&root));
        let unexpected: Vec<_> = names
            .iter()
            .filter(|n| !["dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "usr"].contains(&n.as_str()))
            .collect();
        assert!(unexpected.is_empty(), "the VMM sees {unexpected:?}");
        assert!(!Path::new(&format!("{root}{}", service.data().display())).exists(), "nor the data directory");
        assert!(host::names_in(Path::new(&format!("{root}/etc"))).iter().all(|n| n.starts_with("ld.so")));
        let table = fs::read_to_string(format!("/proc/{pid}/mountinfo")).expect("mounts");
        let writable: Vec<&str> =
            table.lines().filter(|l| l.split(' ').nth(5).is_some_and(|o| o.split(',').any(|o| o == "rw"))).collect();
        assert!(
            writable.iter().all(|l| l.split(' ').nth(4).is_some_and(|p| p == "/proc" || p.starts_with("/dev/"))),
            "writable: {writable:#?}"
        );
        // What it holds open: nothing but its own and what is shared and sealed.
        let held = fs::read_dir(format!("/proc/{pid}/fd"))
            .expect("descriptors")
            .flatten()
            .filter_map(|e| fs::read_link(e.path()).ok());
        let own = service.vmms().into_iter().find(|(_, p)| *p == pid).expect("listed").0;
        for path in held.filter(|p| p.starts_with(service.data().parent().expect("parent"))) {
            let text = path.display().to_string();
            assert!(
                text.contains(&own) || text.contains("/frozen/") || text.contains("/templates/"),
                "it holds {text}"
            );
        }
    }
    if jail.network_namespace {
        let devices = fs::read_to_string(format!("/proc/{pid}/net/dev")).expect("devices");
        // The links of its seat, whose rules let nothing of the VMM's own out; and no other.
        let seat = ["lo:", "tap0:", "out:"];
        assert!(devices.lines().skip(2).all(|l| seat.iter().any(|s| l.trim_start().starts_with(s))), "{devices}");
    }
    service.finish().await;
}
