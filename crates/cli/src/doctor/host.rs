//! The host: processor, memory, programs, accelerator.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::Check;
use crate::output::size;

const HOST: &str = "Host";
const ACCELERATOR: &str = "Accelerator";
/// Memory below which not even one small machine is comfortable.
const MEMORY_LITTLE: u64 = 1024 * 1024 * 1024;

/// Programs: name, Debian package, what it is for, whether nothing works without it.
const PROGRAMS: &[(&str, &str, &str, bool)] = &[
    ("qemu-system-x86_64", "qemu-system-x86", "runs the machines", true),
    ("mkfs.ext4", "e2fsprogs", "makes their disks", true),
    ("mmdebstrap", "mmdebstrap", "builds templates", false),
    ("mkfs.erofs", "erofs-utils", "packs templates", false),
    ("nft", "nftables", "guards the network of machines", false),
];

/// System, processor, memory, programs.
pub fn checks() -> Vec<Check> {
    let mut checks = vec![system(), processor(), memory()];
    checks.extend(PROGRAMS.iter().map(program));
    checks
}

fn system() -> Check {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let field = |name: &str| {
        release.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix('=')).map(|v| v.trim_matches('"').to_owned())
    };
    let name = field("PRETTY_NAME").unwrap_or_else(|| "unknown system".to_owned());
    let uname = rustix::system::uname();
    let detail = format!("{name}, Linux {}", uname.release().to_string_lossy());
    let debian = field("ID").as_deref() == Some("debian") || field("ID_LIKE").is_some_and(|l| l.contains("debian"));
    if debian {
        Check::ok(HOST, "system", detail)
    } else {
        Check::warn(HOST, "system", detail, "Tested on Debian 12 and newer only.")
    }
}

fn processor() -> Check {
    let uname = rustix::system::uname();
    let machine = uname.machine().to_string_lossy().into_owned();
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    if machine == "x86_64" {
        Check::ok(HOST, "processor", format!("x86_64, {count} at hand"))
    } else {
        Check::fail(HOST, "processor", format!("{machine} is not supported"), "Use an x86_64 host.")
    }
}

fn memory() -> Check {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
        Some(line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? * 1024)
    };
    match (field("MemAvailable"), field("MemTotal")) {
        (Some(free), Some(all)) if free < MEMORY_LITTLE => Check::warn(
            HOST,
            "memory",
            format!("{} of {} available", size(free), size(all)),
            "A small machine may use 1 GiB; stop what is not needed.",
        ),
        (Some(free), Some(all)) => Check::ok(HOST, "memory", format!("{} of {} available", size(free), size(all))),
        _ => Check::warn(HOST, "memory", "cannot be read from /proc/meminfo", "Mount /proc."),
    }
}

fn program((name, package, purpose, needed): &(&str, &str, &str, bool)) -> Check {
    let Some(path) = find(name) else {
        let (detail, fix) = (format!("is not installed; it {purpose}"), format!("apt install {package}"));
        return if *needed { Check::fail(HOST, name, detail, fix) } else { Check::warn(HOST, name, detail, fix) };
    };
    let version = if *name == "qemu-system-x86_64" { version(&path) } else { None };
    Check::ok(HOST, name, format!("{}{}", path.display(), version.map(|v| format!(", {v}")).unwrap_or_default()))
}

/// A program by name: along PATH, then where Debian puts those of the administrator.
fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&path).chain(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from));
    dirs.map(|d| d.join(name)).find(|p| rustix::fs::access(p, rustix::fs::Access::EXEC_OK).is_ok() && p.is_file())
}

fn version(qemu: &Path) -> Option<String> {
    let out = Command::new(qemu).arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    Some(text.lines().next()?.trim_start_matches("QEMU emulator ").to_owned())
}

/// What the service decided about KVM, if it could be asked.
#[derive(Clone, Debug)]
pub struct Told {
    /// `kvm` or `tcg`.
    pub accelerator: String,
    /// One sentence.
    pub reason: String,
}

/// Whether KVM can be used, and whether it is.
pub fn accelerator(data_dir: Option<&Path>, told: Option<Told>) -> Vec<Check> {
    const SLOW: &str =
        "Machines work, slower; the jail around QEMU is then their wall. For speed use a host with working KVM.";
    let device = match File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => Check::ok(ACCELERATOR, "/dev/kvm", "opens; that alone proves nothing, a trial boot decides"),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Check::warn(
            ACCELERATOR,
            "/dev/kvm",
            "is not there",
            "Load kvm_intel or kvm_amd, or switch virtualisation on in the firmware or for this virtual host.",
        ),
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Check::warn(
            ACCELERATOR,
            "/dev/kvm",
            "may not be opened by this user",
            "Add the user of the service to the group `kvm`, or run it as root.",
        ),
        Err(_) => Check::warn(ACCELERATOR, "/dev/kvm", "is there but does not open", "Load kvm_intel or kvm_amd."),
    };
    let opens = device.level == super::Level::Ok;
    let use_ = if let Some(told) = told {
        let detail = format!("the service uses {}: {}", told.accelerator, told.reason);
        if told.accelerator == "kvm" {
            Check::ok(ACCELERATOR, "in use", detail)
        } else {
            Check::warn(ACCELERATOR, "in use", detail, SLOW)
        }
    } else if !opens {
        Check::warn(ACCELERATOR, "in use", "software emulation, because KVM cannot be opened", SLOW)
    } else {
        match data_dir.and_then(trial) {
            Some(true) => {
                Check::ok(ACCELERATOR, "in use", "KVM: a trial boot on this boot of the host reached the guest agent")
            }
            Some(false) => Check::warn(
                ACCELERATOR,
                "in use",
                "software emulation: a trial boot with KVM on this boot of the host did not reach the guest agent",
                SLOW,
            ),
            None => {
                Check::ok(ACCELERATOR, "in use", "not decided yet: the service tries KVM with a real boot at its start")
            }
        }
    };
    vec![device, use_]
}

/// The outcome of the last trial boot, when it was made on this boot of the host.
fn trial(data_dir: &Path) -> Option<bool> {
    let text = fs::read(data_dir.join("accelerator.json")).ok()?;
    let trial: serde_json::Value = serde_json::from_slice(&text).ok()?;
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    if trial.get("bootId")?.as_str()? != boot.trim() {
        return None;
    }
    trial.get("works")?.as_bool()
}
