//! Control groups for VMMs: one group a machine, in every hierarchy that carries a controller we limit.
//!
//! Works with the unified hierarchy (v2), the old separate ones (v1), and mixtures of both. Files are written
//! directly; nothing here needs a daemon. All calls block for microseconds, except [`Cgroups::remove`].

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// What a controller limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Controller {
    /// Memory.
    Memory,
    /// Processor time.
    Cpu,
    /// Number of tasks.
    Pids,
    /// Processor time accounting (v1 only; v2 counts in `cpu.stat`).
    CpuAccounting,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Hierarchy {
    version: Version,
    root: PathBuf,
    controllers: Vec<Controller>,
}

/// Limits of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of memory the group may be charged for.
    pub memory_bytes: u64,
    /// Processor time, in hundredths of one processor (150: one and a half).
    pub cpu_percent: u32,
    /// Tasks (processes and threads).
    pub pids: u32,
}

/// What a group uses now. `None`: not counted on this host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Memory charged, bytes.
    pub memory_bytes: Option<u64>,
    /// Processor time used, microseconds.
    pub cpu_us: Option<u64>,
    /// Tasks.
    pub pids: Option<u64>,
}

/// Period of the processor quota, microseconds (the kernel's own default).
const CPU_PERIOD_US: u64 = 100_000;
/// The folder that holds the groups of every instance on this host.
const PARENT: &str = "mainbrella";

/// The groups of one service instance.
#[derive(Clone, Debug)]
pub struct Cgroups {
    hierarchies: Vec<Hierarchy>,
    instance: String,
}

impl Cgroups {
    /// Finds the hierarchies of this host. `instance` keeps several services on one host apart; it becomes a folder name.
    ///
    /// # Errors
    /// When the mount table cannot be read.
    pub fn discover(instance: &str) -> io::Result<Self> {
        Ok(Self::from_mount_table(&fs::read_to_string("/proc/self/mountinfo")?, Path::new("/"), instance))
    }

    /// As [`Self::discover`], from the text of a mount table; `prefix` is put before every mount point (tests: a fake tree).
    #[must_use]
    pub fn from_mount_table(table: &str, prefix: &Path, instance: &str) -> Self {
        let mut hierarchies: Vec<Hierarchy> = Vec::new();
        for line in table.lines() {
            let Some((left, right)) = line.split_once(" - ") else { continue };
            let mut right = right.split(' ');
            let (kind, options) = (right.next().unwrap_or(""), right.nth(1).unwrap_or(""));
            let Some(point) = left.split(' ').nth(4) else { continue };
            let root = prefix.join(point.trim_start_matches('/'));
            let names: Vec<String>;
            let version = match kind {
                "cgroup2" => {
                    let text = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
                    names = text.split_whitespace().map(str::to_owned).collect();
                    Version::V2
                }
                "cgroup" => {
                    names = options.split(',').map(str::to_owned).collect();
                    Version::V1
                }
                _ => continue,
            };
            let taken = |c: Controller| hierarchies.iter().any(|h| h.controllers.contains(&c));
            let controllers: Vec<Controller> = names
                .iter()
                .filter_map(|n| match n.as_str() {
                    "memory" => Some(Controller::Memory),
                    "cpu" => Some(Controller::Cpu),
                    "pids" => Some(Controller::Pids),
                    "cpuacct" => Some(Controller::CpuAccounting),
                    _ => None,
                })
                .filter(|c| !taken(*c))
                .collect();
            if !controllers.is_empty() && root.is_dir() {
                hierarchies.push(Hierarchy { version, root, controllers });
            }
        }
        Self { hierarchies, instance: instance.to_owned() }
    }

    /// Whether this host has `controller` in any hierarchy.
    #[must_use]
    pub fn has(&self, controller: Controller) -> bool {
        self.hierarchies.iter().any(|h| h.controllers.contains(&controller))
    }

    /// Makes the group `name` with `limits`, in every hierarchy. A group that exists gets the limits.
    ///
    /// # Errors
    /// When a folder cannot be made or a limit is not accepted; the error names the file.
    pub fn create(&self, name: &str, limits: &Limits) -> io::Result<()> {
        for h in &self.hierarchies {
            self.prepare_parents(h)?;
            let dir = self.dir(h, name);
            make_dir(&dir)?;
            for c in &h.controllers {
                limit(h.version, *c, &dir, limits)?;
            }
        }
        Ok(())
    }

    fn prepare_parents(&self, h: &Hierarchy) -> io::Result<()> {
        let parent = h.root.join(PARENT);
        let instance = parent.join(&self.instance);
        if h.version == Version::V1 {
            make_dir(&parent)?;
            return make_dir(&instance);
        }
        // In the unified hierarchy a controller is usable in a folder when its parent hands it on.
        hand_on(&h.root, &h.controllers)?;
        make_dir(&parent)?;
        hand_on(&parent, &h.controllers)?;
        make_dir(&instance)?;
        hand_on(&instance, &h.controllers)
    }

    /// The files a process writes its own id to (`0`) to join the group `name`.
    #[must_use]
    pub fn join_files(&self, name: &str) -> Vec<PathBuf> {
        self.hierarchies.iter().map(|h| self.dir(h, name).join("cgroup.procs")).collect()
    }

    /// Whether `text`, the content of a process's `/proc/PID/cgroup`, shows it in group `name` for `controller`.
    #[must_use]
    pub fn shows_membership(&self, text: &str, name: &str, controller: Controller) -> bool {
        let suffix = format!("/{PARENT}/{}/{name}", self.instance);
        let Some(h) = self.hierarchies.iter().find(|h| h.controllers.contains(&controller)) else { return false };
        let wanted = match controller {
            Controller::Memory => "memory",
            Controller::Cpu => "cpu",
            Controller::Pids => "pids",
            Controller::CpuAccounting => "cpuacct",
        };
        text.lines().filter_map(|l| l.split_once(':').and_then(|(_, r)| r.split_once(':'))).any(|(names, path)| {
            let here = match h.version {
                Version::V1 => names.split(',').any(|n| n == wanted),
                Version::V2 => names.is_empty(),
            };
            here && path.ends_with(&suffix)
        })
    }

    /// What the group `name` uses.
    #[must_use]
    pub fn usage(&self, name: &str) -> Usage {
        let mut u = Usage::default();
        for h in &self.hierarchies {
            let dir = self.dir(h, name);
            let number = |file: &str| fs::read_to_string(dir.join(file)).ok()?.trim().parse::<u64>().ok();
            for c in &h.controllers {
                match (h.version, c) {
                    (Version::V1, Controller::Memory) => u.memory_bytes = number("memory.usage_in_bytes"),
                    (Version::V2, Controller::Memory) => u.memory_bytes = number("memory.current"),
                    (_, Controller::Pids) => u.pids = number("pids.current"),
                    (Version::V1, Controller::CpuAccounting) => u.cpu_us = number("cpuacct.usage").map(|ns| ns / 1000),
                    (Version::V2, Controller::Cpu) => {
                        let text = fs::read_to_string(dir.join("cpu.stat")).unwrap_or_default();
                        u.cpu_us = text.lines().find_map(|l| l.strip_prefix("usage_usec ")?.trim().parse().ok());
                    }
                    _ => {}
                }
            }
        }
        u
    }

    /// Names of the groups of this instance.
    #[must_use]
    pub fn list(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .hierarchies
            .iter()
            .filter_map(|h| fs::read_dir(h.root.join(PARENT).join(&self.instance)).ok())
            .flatten()
            .flatten()
            .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
            .filter_map(|e| e.file_name().into_string().ok())
            .collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Kills what is left in the group `name` and removes it everywhere. A group that is not there is success.
    ///
    /// # Errors
    /// When it is still not empty after `patience`.
    pub fn remove(&self, name: &str, patience: Duration) -> io::Result<()> {
        let until = Instant::now() + patience;
        for h in &self.hierarchies {
            let dir = self.dir(h, name);
            let mut pause = Duration::from_micros(100);
            loop {
                match fs::remove_dir(&dir) {
                    Ok(()) => break,
                    Err(e) if e.kind() == io::ErrorKind::NotFound => break,
                    Err(e) if Instant::now() >= until => return Err(named(&dir, e)),
                    Err(_) => kill_all(h.version, &dir),
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(20));
            }
        }
        Ok(())
    }

    /// Removes this instance's own folders if they hold no group.
    pub fn remove_instance(&self) {
        for h in &self.hierarchies {
            let parent = h.root.join(PARENT);
            // Both fail, harmlessly, while anything is inside.
            let _ = fs::remove_dir(parent.join(&self.instance));
            let _ = fs::remove_dir(parent);
        }
    }

    fn dir(&self, h: &Hierarchy, name: &str) -> PathBuf {
        h.root.join(PARENT).join(&self.instance).join(name)
    }
}

fn named(path: &Path, e: io::Error) -> io::Error {
    io::Error::new(e.kind(), format!("{}: {e}", path.display()))
}

fn make_dir(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(named(path, e)),
        _ => Ok(()),
    }
}

fn put(path: PathBuf, value: &str) -> io::Result<()> {
    fs::write(&path, value).map_err(|e| named(&path, e))
}

fn hand_on(dir: &Path, controllers: &[Controller]) -> io::Result<()> {
    let file = dir.join("cgroup.subtree_control");
    let has = fs::read_to_string(&file).map_err(|e| named(&file, e))?;
    for c in controllers {
        let name = match c {
            Controller::Memory => "memory",
            Controller::Cpu => "cpu",
            Controller::Pids => "pids",
            Controller::CpuAccounting => continue,
        };
        if !has.split_whitespace().any(|n| n == name) {
            put(file.clone(), &format!("+{name}"))?;
        }
    }
    Ok(())
}

fn limit(version: Version, controller: Controller, dir: &Path, limits: &Limits) -> io::Result<()> {
    let quota = CPU_PERIOD_US * u64::from(limits.cpu_percent) / 100;
    match (version, controller) {
        (Version::V1, Controller::Memory) => put(dir.join("memory.limit_in_bytes"), &limits.memory_bytes.to_string()),
        (Version::V2, Controller::Memory) => {
            put(dir.join("memory.max"), &limits.memory_bytes.to_string())?;
            // Absent where swap accounting is off; then there is nothing to limit.
            match put(dir.join("memory.swap.max"), "0") {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                other => other?,
            }
            put(dir.join("memory.oom.group"), "1")
        }
        (Version::V1, Controller::Cpu) => {
            put(dir.join("cpu.cfs_period_us"), &CPU_PERIOD_US.to_string())?;
            put(dir.join("cpu.cfs_quota_us"), &quota.to_string())
        }
        (Version::V2, Controller::Cpu) => put(dir.join("cpu.max"), &format!("{quota} {CPU_PERIOD_US}")),
        (_, Controller::Pids) => put(dir.join("pids.max"), &limits.pids.to_string()),
        (_, Controller::CpuAccounting) => Ok(()),
    }
}

fn kill_all(version: Version, dir: &Path) {
    if version == Version::V2 && fs::write(dir.join("cgroup.kill"), "1").is_ok() {
        return;
    }
    let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    for pid in text.lines().filter_map(|l| l.trim().parse().ok()).filter_map(Pid::from_raw) {
        // It may have ended meanwhile; the caller looks again.
        let _ = kill_process(pid, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { memory_bytes: 1 << 30, cpu_percent: 150, pids: 128 };

    fn read(path: PathBuf) -> String {
        fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }

    #[test]
    fn the_unified_hierarchy_gets_controllers_handed_down_and_all_limits() {
        let t = tempfile::tempdir().expect("temp dir");
        let root = t.path().join("cg");
        // What the kernel would make by itself when a folder appears.
        for d in ["", "mainbrella", "mainbrella/i"] {
            fs::create_dir_all(root.join(d)).expect("mkdir");
            fs::write(root.join(d).join("cgroup.subtree_control"), "").expect("write");
        }
        fs::write(root.join("cgroup.controllers"), "cpuset cpu io memory hugetlb pids\n").expect("write");
        let g = Cgroups::from_mount_table("30 23 0:26 / /cg rw,nosuid shared:9 - cgroup2 cgroup2 rw\n", t.path(), "i");
        assert!(g.has(Controller::Memory) && g.has(Controller::Cpu) && g.has(Controller::Pids));
        g.create("k", &LIMITS).expect("create");
        let dir = root.join("mainbrella/i/k");
        assert_eq!(read(dir.join("memory.max")), "1073741824");
        assert_eq!(read(dir.join("cpu.max")), "150000 100000");
        assert_eq!(read(dir.join("pids.max")), "128");
        assert_eq!(read(dir.join("memory.oom.group")), "1");
        assert!(read(root.join("mainbrella/i/cgroup.subtree_control")).starts_with('+'));
        assert_eq!(g.join_files("k"), vec![dir.join("cgroup.procs")]);
        assert!(g.shows_membership("0::/mainbrella/i/k\n", "k", Controller::Cpu));
        assert!(!g.shows_membership("0::/mainbrella/i/other\n", "k", Controller::Cpu));
        fs::write(dir.join("cpu.stat"), "usage_usec 42\nuser_usec 1\n").expect("write");
        fs::write(dir.join("memory.current"), "4096\n").expect("write");
        assert_eq!(g.usage("k"), Usage { memory_bytes: Some(4096), cpu_us: Some(42), pids: None });
        assert_eq!(g.list(), ["k"]);
    }

    #[test]
    fn separate_hierarchies_get_each_its_own_limit() {
        let t = tempfile::tempdir().expect("temp dir");
        let table = "36 33 0:31 / /c/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
                     37 33 0:32 / /c/memory rw - cgroup cgroup rw,memory\n\
                     38 33 0:33 / /c/pids rw - cgroup cgroup rw,pids\n\
                     39 33 0:34 / /c/unified rw - cgroup2 cgroup2 rw\n";
        for d in ["cpu,cpuacct", "memory", "pids", "unified"] {
            fs::create_dir_all(t.path().join("c").join(d)).expect("mkdir");
        }
        fs::write(t.path().join("c/unified/cgroup.controllers"), "hugetlb\n").expect("write");
        let g = Cgroups::from_mount_table(table, t.path(), "i");
        g.create("k", &LIMITS).expect("create");
        let at = |d: &str, f: &str| read(t.path().join("c").join(d).join("mainbrella/i/k").join(f));
        assert_eq!(at("memory", "memory.limit_in_bytes"), "1073741824");
        assert_eq!(at("cpu,cpuacct", "cpu.cfs_quota_us"), "150000");
        assert_eq!(at("pids", "pids.max"), "128");
        assert_eq!(g.join_files("k").len(), 3, "nothing is made where no controller of ours lives");
        assert!(g.shows_membership("4:cpu,cpuacct:/mainbrella/i/k\n0::/\n", "k", Controller::Cpu));
        assert!(!g.shows_membership("4:cpu,cpuacct:/mainbrella/i/k\n0::/\n", "k", Controller::Memory));
    }

    #[test]
    fn a_host_without_controllers_is_not_an_error() {
        let g = Cgroups::from_mount_table("1 2 0:1 / /proc rw - proc proc rw\n", Path::new("/"), "i");
        assert!(!g.has(Controller::Memory));
        g.create("k", &LIMITS).expect("nothing to do");
        g.remove("k", Duration::ZERO).expect("nothing to remove");
    }
}
