//! Which walls stand on this host: found out by starting a real VMM behind them and looking at it from outside.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use mainbrella_types::JailReport;

use super::spec::{JailSpec, Walls};
use super::start::{JailError, start};
use crate::cgroup::{Cgroups, Controller, Limits};
use crate::microvm::command_line::SANDBOX;
use crate::microvm::process::Process;
use crate::microvm::sealed_memory::bounded_log;
use crate::microvm::vmm::{log_text, read_only};

/// Longest wait for the probe's VMM to be up.
const PATIENCE: Duration = Duration::from_secs(20);

/// What was found.
#[derive(Clone, Debug)]
pub struct Probe {
    walls: Walls,
    own_uid: bool,
    sandbox: bool,
    grouped: bool,
    report: JailReport,
    missing: Vec<(&'static str, String)>,
}

impl Probe {
    /// Walls that are built, and without which nothing starts.
    #[must_use]
    pub fn walls(&self) -> Walls {
        self.walls
    }

    /// Whether each VMM has its own user id.
    #[must_use]
    pub fn own_uid(&self) -> bool {
        self.own_uid
    }

    /// Whether QEMU takes its seccomp sandbox.
    #[must_use]
    pub fn sandbox(&self) -> bool {
        self.sandbox
    }

    /// Whether control groups can be made. If not, there are no limits, and `missing` says why.
    #[must_use]
    pub fn grouped(&self) -> bool {
        self.grouped
    }

    /// What was observed on the probe.
    #[must_use]
    pub fn report(&self) -> JailReport {
        self.report
    }

    /// Walls that do not stand, each with the reason.
    #[must_use]
    pub fn missing(&self) -> &[(&'static str, String)] {
        &self.missing
    }
}

/// Where to probe.
#[derive(Clone, Copy, Debug)]
pub struct Ground<'a> {
    /// The binary that becomes the launcher.
    pub launcher: &'a Path,
    /// QEMU.
    pub qemu: &'a Path,
    /// Empty folder.
    pub scratch: &'a Path,
    /// Control groups.
    pub cgroups: &'a Cgroups,
    /// A user id for the probe; `None` when this service is not root.
    pub uid: Option<u32>,
}

/// Probes this host. Blocks for some tens of milliseconds.
///
/// # Errors
/// When QEMU does not start in any jail at all.
pub fn probe(ground: &Ground<'_>) -> Result<Probe, JailError> {
    let group = format!("probe-{}", std::process::id());
    let outcome = probe_in(ground, &group);
    // Whatever the outcome; a probe that could not be removed will be tried again by the next start's clean-up.
    if let Err(e) = ground.cgroups.remove(&group, Duration::from_secs(5)) {
        tracing::warn!(error = %e, "the control group of the jail probe could not be removed");
    }
    outcome
}

fn probe_in(ground: &Ground<'_>, group: &str) -> Result<Probe, JailError> {
    let mut p = Probe {
        walls: Walls::all(ground.uid.is_some()),
        own_uid: ground.uid.is_some(),
        sandbox: true,
        grouped: true,
        report: JailReport::default(),
        missing: Vec::new(),
    };
    if !p.own_uid {
        p.missing.push(("own uid", "the service does not run as root".to_owned()));
    }
    let limits = Limits { memory_bytes: 512 << 20, cpu_percent: 100, pids: 64 };
    let grouped = match ground.cgroups.create(group, &limits) {
        Ok(()) => true,
        Err(e) => {
            p.missing.push(("cgroup limits", e.to_string()));
            false
        }
    };
    p.grouped = grouped;
    // Each round either works or names the wall that has to go.
    for _ in 0..10 {
        match attempt(ground, &p, grouped.then_some(group)) {
            Ok(observed) => {
                p.report = observed;
                explain(&mut p, ground, grouped);
                return Ok(p);
            }
            Err(e) => {
                let JailError::Stage { stage, detail, .. } = &e else { return Err(e) };
                let (stage, detail) = (stage.clone(), detail.clone());
                if !give_up(&mut p, &stage, detail) {
                    return Err(e);
                }
            }
        }
    }
    Err(JailError::Launcher("no jail could be built", io::ErrorKind::Unsupported.into()))
}

/// Takes down the wall whose stage failed. `false`: that stage is not a wall.
fn give_up(p: &mut Probe, stage: &str, why: String) -> bool {
    let w = &mut p.walls;
    let name = match stage {
        "user namespace" if w.user_namespace => {
            // Without it and without root none of the others can be had.
            *w = Walls { landlock: w.landlock, ..Walls::default_none() };
            "namespaces"
        }
        "mount namespace" if w.mount_namespace => {
            w.mount_namespace = false;
            "mount namespace"
        }
        "pid namespace" if w.pid_namespace => {
            w.pid_namespace = false;
            "pid namespace"
        }
        "network namespace" if w.network_namespace => {
            w.network_namespace = false;
            "network namespace"
        }
        "ipc and uts namespaces" if w.ipc_uts_namespaces => {
            w.ipc_uts_namespaces = false;
            "ipc and uts namespaces"
        }
        "landlock" if w.landlock => {
            w.landlock = false;
            "landlock"
        }
        "own uid" if p.own_uid => {
            p.own_uid = false;
            "own uid"
        }
        "sandbox" if p.sandbox => {
            p.sandbox = false;
            "seccomp sandbox"
        }
        _ => return false,
    };
    p.missing.push((name, why));
    true
}

fn attempt(ground: &Ground<'_>, p: &Probe, group: Option<&str>) -> Result<JailReport, JailError> {
    let log = bounded_log(8192).map_err(|e| JailError::Launcher("no log for the probe", e))?;
    let mut argv: Vec<String> =
        ["qemu-system-x86_64", "-M", "none", "-nodefaults", "-no-user-config", "-display", "none", "-S"]
            .map(str::to_owned)
            .to_vec();
    if p.sandbox {
        argv.extend(["-sandbox".to_owned(), SANDBOX.to_owned()]);
    }
    let spec = JailSpec {
        tap: None,
        program: ground.qemu.to_owned(),
        argv,
        walls: p.walls,
        uid: ground.uid.filter(|_| p.own_uid),
        groups: Vec::new(),
        cgroup_join: group.map(|g| ground.cgroups.join_files(g)).unwrap_or_default(),
        scratch: ground.scratch.to_owned(),
        read_only: read_only(ground.qemu),
        devices: ["/dev/null", "/dev/zero", "/dev/urandom"].map(Into::into).to_vec(),
        file_size_max: 1 << 20,
        descriptors: vec![1, 2],
    };
    let started = start(ground.launcher, &spec, &[log.as_fd(), log.as_fd()], |_| Ok(()))?;
    let ended = || JailError::Stage {
        stage: if p.sandbox { "sandbox" } else { "QEMU" }.to_owned(),
        errno: 0,
        detail: format!("QEMU ended at once: {}", log_text(&log)),
    };
    let process = Process::open(started.pid, started.start_time).map_err(|_| ended())?;
    let until = Instant::now() + PATIENCE;
    // The sandbox is the last thing QEMU puts up; until then there is nothing to look at.
    let observed = loop {
        if process.ended() {
            break Err(ended());
        }
        match observe(ground, started.pid, p, group) {
            Ok(r) if r.seccomp || !p.sandbox => break Ok(r),
            Ok(r) if Instant::now() > until => break Ok(r),
            Err(e) if Instant::now() > until => break Err(JailError::Launcher("the probe cannot be looked at", e)),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    let _ = process.kill();
    while !process.ended() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    observed
}

/// What can be seen of `pid` from here.
fn observe(ground: &Ground<'_>, pid: i32, p: &Probe, group: Option<&str>) -> io::Result<JailReport> {
    let proc = |f: &str| fs::read_to_string(format!("/proc/{pid}/{f}"));
    let status = proc("status")?;
    let field = |name: &str| {
        status.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':')).unwrap_or("").trim().to_owned()
    };
    let apart = |ns: &str| -> io::Result<bool> {
        Ok(fs::read_link(format!("/proc/{pid}/ns/{ns}"))? != fs::read_link(format!("/proc/self/ns/{ns}"))?)
    };
    let no_caps = ["CapInh", "CapPrm", "CapEff", "CapAmb"].iter().all(|c| u64::from_str_radix(&field(c), 16) == Ok(0));
    let bounded = u64::from_str_radix(&field("CapBnd"), 16) == Ok(0) || !p.own_uid;
    let uids: Vec<u32> = field("Uid").split_whitespace().filter_map(|f| f.parse().ok()).collect();
    let mounts = proc("mountinfo")?;
    // Its root is the small file system made for it, and nothing of the host but what was listed is mounted below.
    let own_root = mounts.lines().any(|l| l.split(' ').nth(4) == Some("/") && l.contains(" - tmpfs "))
        && fs::read_dir(format!("/proc/{pid}/root/"))?
            .flatten()
            .all(|e| !matches!(e.file_name().to_str(), Some("root" | "home" | "var" | "tmp" | "sys")));
    let groups = proc("cgroup")?;
    let member = |c| group.is_some_and(|g| ground.cgroups.shows_membership(&groups, g, c));
    Ok(JailReport {
        own_uid: ground.uid.is_some_and(|u| uids == [u; 4]) && field("Groups").is_empty(),
        no_new_privs: field("NoNewPrivs") == "1" && no_caps && bounded,
        seccomp: field("Seccomp") == "2",
        mount_namespace: apart("mnt")? && own_root,
        pid_namespace: apart("pid")? && field("NSpid").split_whitespace().last() == Some("1"),
        network_namespace: apart("net")?,
        // The kernel shows no trace of it; the launcher fails closed, so a running process has it when it was asked for.
        landlock: p.walls.landlock,
        memory_limit: member(Controller::Memory),
        cpu_limit: member(Controller::Cpu),
        pids_limit: member(Controller::Pids),
    })
}

/// Names a reason for every wall that was not seen and has none yet.
fn explain(p: &mut Probe, ground: &Ground<'_>, grouped: bool) {
    let r = p.report;
    let seen = [
        ("own uid", r.own_uid),
        ("no new privileges", r.no_new_privs),
        ("seccomp sandbox", r.seccomp),
        ("mount namespace", r.mount_namespace),
        ("pid namespace", r.pid_namespace),
        ("network namespace", r.network_namespace),
        ("landlock", r.landlock),
    ];
    for (name, stands) in seen {
        if !stands && !p.missing.iter().any(|(n, _)| *n == name || *n == "namespaces") {
            p.missing.push((name, "it was built but not seen on the running process".to_owned()));
        }
    }
    if grouped {
        let limits = [
            ("memory limit", r.memory_limit, Controller::Memory),
            ("processor limit", r.cpu_limit, Controller::Cpu),
            ("task limit", r.pids_limit, Controller::Pids),
        ];
        for (name, stands, controller) in limits {
            if !stands {
                let why = if ground.cgroups.has(controller) {
                    "the process was not seen in its control group"
                } else {
                    "no mounted control group hierarchy has this controller"
                };
                p.missing.push((name, why.to_owned()));
            }
        }
    }
}

impl Walls {
    /// None at all.
    const fn default_none() -> Self {
        Self {
            user_namespace: false,
            mount_namespace: false,
            pid_namespace: false,
            network_namespace: false,
            ipc_uts_namespaces: false,
            landlock: false,
        }
    }
}
