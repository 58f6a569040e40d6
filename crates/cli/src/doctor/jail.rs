//! The walls around a VMM: found out by starting one behind them, as the service does.

use std::path::Path;

use mainbrella_engine::cgroup::{Cgroups, Controller};
use mainbrella_engine::jail::{self, Ground};
use mainbrella_engine::microvm::MicroVmConfig;

use super::Check;

const JAIL: &str = "Jail";

/// Which walls stand on this host.
pub fn checks() -> Vec<Check> {
    let mut checks = Vec::new();
    let cgroups = match Cgroups::discover("doctor") {
        Ok(c) => c,
        Err(_) => return vec![Check::fail(JAIL, "control groups", "the mount table cannot be read", "Mount /proc.")],
    };
    let missing: Vec<&str> = [("memory", Controller::Memory), ("cpu", Controller::Cpu), ("pids", Controller::Pids)]
        .into_iter()
        .filter(|(_, c)| !cgroups.has(*c))
        .map(|(name, _)| name)
        .collect();
    if missing.is_empty() {
        checks.push(Check::ok(JAIL, "control groups", "memory, cpu and pids controllers are mounted"));
    } else {
        checks.push(Check::warn(
            JAIL,
            "control groups",
            format!("not mounted: {}", missing.join(", ")),
            "Without them a machine can take more of the host than its size says; mount them, or use a unified hierarchy.",
        ));
    }
    checks.extend(walls(&cgroups));
    cgroups.remove_instance();
    checks
}

fn walls(cgroups: &Cgroups) -> Vec<Check> {
    let root = rustix::process::geteuid().is_root();
    let defaults = MicroVmConfig::new(std::path::PathBuf::new());
    if !defaults.qemu.exists() {
        return vec![Check::warn(JAIL, "walls", "cannot be tried without QEMU", "apt install qemu-system-x86")];
    }
    let scratch = std::env::temp_dir().join(format!("mainbrella-doctor-{}", std::process::id()));
    if let Err(e) = std::fs::create_dir(&scratch) {
        return vec![Check::fail(
            JAIL,
            "walls",
            format!("no temporary folder can be made: {e}"),
            "Make TMPDIR writable.",
        )];
    }
    let uid = root.then_some(mainbrella_engine::microvm::uids::SPARE);
    let launcher = Path::new("/proc/self/exe");
    let probed = jail::probe(&Ground { launcher, qemu: &defaults.qemu, scratch: &scratch, cgroups, uid });
    let _ = std::fs::remove_dir_all(&scratch);
    let probe = match probed {
        Ok(p) => p,
        Err(e) => {
            return vec![Check::fail(
                JAIL,
                "walls",
                format!("QEMU does not start in any jail: {e}"),
                "Run `qemu-system-x86_64 --version` to see whether QEMU itself works.",
            )];
        }
    };
    let r = probe.report();
    let walls = [
        ("own user id", r.own_uid, "run the service as root"),
        ("no new privileges", r.no_new_privs, ""),
        ("seccomp", r.seccomp, "use a QEMU built with seccomp"),
        ("mount namespace", r.mount_namespace, "run as root, or allow unprivileged user namespaces"),
        ("process namespace", r.pid_namespace, "run as root, or allow unprivileged user namespaces"),
        ("network namespace", r.network_namespace, "run as root, or allow unprivileged user namespaces"),
        ("landlock", r.landlock, "use a kernel from 5.13 on with landlock in its `lsm=` list"),
        ("memory limit", r.memory_limit, "let the service write its control group"),
        ("processor limit", r.cpu_limit, "let the service write its control group"),
        ("task limit", r.pids_limit, "let the service write its control group"),
    ];
    let standing: Vec<&str> = walls.iter().filter(|w| w.1).map(|w| w.0).collect();
    let mut checks = Vec::new();
    if !standing.is_empty() {
        checks.push(Check::ok(JAIL, "seen on a trial QEMU", standing.join(", ")));
    }
    for (name, _, fix) in walls.iter().filter(|w| !w.1) {
        let why = probe.missing().iter().find(|(wall, _)| name.starts_with(wall.split(' ').next().unwrap_or(wall)));
        let why = why.map(|(_, why)| format!("missing: {why}")).unwrap_or_else(|| "missing".to_owned());
        checks.push(Check::warn(
            JAIL,
            name,
            why,
            if fix.is_empty() { String::new() } else { format!("To have it, {fix}.") },
        ));
    }
    checks
}
