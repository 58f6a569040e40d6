//! One VMM process: from an order to a process in its jail with an open control channel.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mainbrella_types::{Accelerator, SizeSpec};
use tokio::sync::mpsc;

use super::command_line::{Start, TRANSLATION_CACHE_MIB, VmPlan, command_line, descriptors};
use super::folder::{self, AGENT_SOCKET, OVERLAY, QMP_SOCKET, RECORD_VERSION, Record};
use super::network::Network;
use super::process::Process;
use super::qmp::{Event, Qmp};
use super::seats::{Seat, Seats};
use super::{qcow2, sealed_memory};
use crate::cgroup::{Cgroups, Limits};
use crate::error::DriverError;
use crate::jail::{self, JailSpec, Probe};

/// Memory a VMM may use beyond the guest's and the translator's cache, MiB: QEMU's own heap and stacks (30 measured),
/// disk metadata caches, and room for the buffers of 64 disk requests of a hostile guest (1 MiB each).
const OVERHEAD_MIB: u64 = 128;
/// Processor time beyond its virtual processors, percent of one: the main loop and disk workers.
const CPU_EXTRA_PERCENT: u32 = 50;
/// Tasks: virtual processors, main loop, call_rcu, and QEMU's pool of at most 64 disk workers, twice over.
const TASKS_MAX: u32 = 160;
/// Bytes of QEMU's own messages kept; the first ones say why a start failed.
const LOG_BYTES: u64 = 32 * 1024;
/// Longest wait for QEMU's greeting on a busy host.
const GREETING_PATIENCE: Duration = Duration::from_secs(20);

/// What every start on this host has in common.
pub struct Host {
    /// The binary that becomes the launcher.
    pub launcher: PathBuf,
    /// QEMU.
    pub qemu: PathBuf,
    /// Control groups.
    pub cgroups: Cgroups,
    /// What the probe of the jail found.
    pub jail: Probe,
    /// Seats.
    pub seats: Arc<Seats>,
    /// Networks.
    pub network: Network,
    /// Empty folder for the jail's root.
    pub scratch: PathBuf,
}

/// What to start.
pub struct VmmOrder<'a> {
    /// Folder, made by this start.
    pub folder: PathBuf,
    /// Name of the control group.
    pub group: String,
    /// Accelerator.
    pub accelerator: Accelerator,
    /// Size.
    pub size: SizeSpec,
    /// How it comes to life.
    pub start: Start,
    /// Guest memory.
    pub memory: BorrowedFd<'a>,
    /// Root image.
    pub root: BorrowedFd<'a>,
    /// Data disk (writable when cold, else read-only).
    pub data: BorrowedFd<'a>,
    /// Kernel and initramfs (cold only).
    pub kernel: Option<(BorrowedFd<'a>, BorrowedFd<'a>)>,
    /// The overlay of a machine that had one before, in the same file system; it gets a second name in the folder.
    pub overlay: Option<PathBuf>,
    /// Former overlays below it, the oldest first.
    pub layers: Vec<File>,
    /// For the record.
    pub names: Names,
}

/// What a VMM starts from.
#[derive(Clone, Debug, Default)]
pub struct Names {
    /// Key of the frozen template.
    pub frozen: String,
    /// Which making of it: [`super::freeze::Frozen::making`].
    pub making: String,
    /// The template.
    pub template: String,
    /// The size.
    pub size: String,
}

/// A VMM that runs.
#[derive(Debug)]
pub struct Vmm {
    /// Its process.
    pub process: Process,
    /// Its messages.
    pub log: Option<File>,
    /// Its record.
    pub record: Record,
    /// Its seat, when it has an own user id.
    pub seat: Option<Seat>,
}

/// Starts a VMM. Blocks for some milliseconds. On failure the folder and group may be left; the caller removes them.
///
/// # Errors
/// When a resource cannot be made or a wall of the jail cannot be built.
pub fn start(host: &Host, order: &VmmOrder<'_>) -> Result<Vmm, DriverError> {
    let io = |what: &str| {
        let what = what.to_owned();
        move |e: io::Error| DriverError::io(what, e)
    };
    fs::create_dir(&order.folder).map_err(io("making the machine's folder"))?;
    let seat = if host.jail.own_uid() {
        let Some(seat) = host.seats.take() else {
            return Err(DriverError::Exhausted("every user id for machines on this host is taken".to_owned()));
        };
        Some(seat)
    } else {
        None
    };
    let uid = seat.as_ref().map(Seat::uid);
    let agent = folder::listen(&order.folder, AGENT_SOCKET).map_err(io("making the agent socket"))?;
    let qmp = folder::listen(&order.folder, QMP_SOCKET).map_err(io("making the control socket"))?;
    let log = sealed_memory::bounded_log(LOG_BYTES).map_err(io("making the log"))?;
    let overlay = match order.start {
        Start::Cold { .. } => None,
        Start::Restore { .. } => Some(
            match &order.overlay {
                None => make_overlay(&order.folder, OVERLAY, order.size, uid),
                Some(path) => link_overlay(path, &order.folder, uid),
            }
            .map_err(io("making the disk overlay"))?,
        ),
    };
    if host.jail.grouped() {
        host.cgroups.create(&order.group, &limits(&order.size)).map_err(io("making the control group"))?;
    }

    let plan = VmPlan {
        name: format!("mainbrella-{}", order.group),
        accelerator: order.accelerator,
        memory_mib: order.size.memory_mib,
        vcpus: order.size.vcpus,
        start: order.start.clone(),
        sandbox: host.jail.sandbox(),
        network: host.network.has_cards(),
    };
    let mut passed: Vec<BorrowedFd<'_>> =
        vec![log.as_fd(), log.as_fd(), order.memory, agent.as_fd(), qmp.as_fd(), order.root, order.data];
    if let Some((kernel, initrd)) = order.kernel {
        passed.extend([kernel, initrd]);
    }
    if let Some(overlay) = &overlay {
        passed.push(overlay.as_fd());
    }
    passed.extend(order.layers.iter().map(AsFd::as_fd));
    let spec = jail_spec(
        host,
        order.accelerator,
        command_line(&plan),
        &order.group,
        uid,
        file_size_max(&order.size),
        descriptors(&order.start),
    );
    let Names { frozen, making, template, size } = order.names.clone();
    let record = |pid, start_time| Record {
        version: RECORD_VERSION,
        group: order.group.clone(),
        uid,
        pid,
        start_time,
        frozen,
        making,
        template,
        size,
    };
    let mut written = None;
    let started = jail::start(&host.launcher, &spec, &passed, |s| {
        let r = record(s.pid, s.start_time);
        folder::write_record(&order.folder, &r)?;
        written = Some(r);
        Ok(())
    })
    .map_err(|e| DriverError::Stage { stage: "starting the VMM in its jail", detail: chain(&e) })?;
    let process = Process::open(started.pid, started.start_time).map_err(|e| DriverError::Stage {
        stage: "starting the VMM",
        detail: format!("it ended at once ({e}): {}", log_text(&log)),
    })?;
    let Some(record) = written else {
        return Err(DriverError::Stage { stage: "starting the VMM", detail: "it was not recorded".to_owned() });
    };
    Ok(Vmm { process, log: Some(log), record, seat })
}

/// The jail of a VMM on this host.
pub(crate) fn jail_spec(
    host: &Host,
    accelerator: Accelerator,
    argv: Vec<String>,
    group: &str,
    uid: Option<u32>,
    file_size_max: u64,
    descriptors: Vec<i32>,
) -> JailSpec {
    let mut devices: Vec<PathBuf> = ["/dev/null", "/dev/zero", "/dev/urandom"].map(PathBuf::from).to_vec();
    let mut groups = Vec::new();
    if accelerator == Accelerator::Kvm {
        devices.push("/dev/kvm".into());
        groups.extend(fs::metadata("/dev/kvm").map(|m| std::os::unix::fs::MetadataExt::gid(&m)).ok());
    }
    JailSpec {
        program: host.qemu.clone(),
        argv,
        walls: host.jail.walls(),
        uid,
        groups,
        cgroup_join: if host.jail.grouped() { host.cgroups.join_files(group) } else { Vec::new() },
        scratch: host.scratch.clone(),
        read_only: read_only(&host.qemu),
        devices,
        file_size_max,
        tap: host.network.has_cards().then_some(super::command_line::fd::TAP),
        descriptors,
    }
}

/// What QEMU needs of the host's files: itself, its firmware and modules, libraries.
pub(crate) fn read_only(qemu: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        ["/usr", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache"].map(PathBuf::from).to_vec();
    if !qemu.starts_with("/usr") {
        paths.push(qemu.to_owned());
    }
    paths
}

fn limits(size: &SizeSpec) -> Limits {
    // The guest's memory counts twice: a page of the template that was never written is allocated in the shared memory by the
    // first machine that touches it, and charged to that machine beside its own copy.
    let memory = 2 * u64::from(size.memory_mib) + u64::from(TRANSLATION_CACHE_MIB) + OVERHEAD_MIB;
    Limits { memory_bytes: memory << 20, cpu_percent: size.vcpus * 100 + CPU_EXTRA_PERCENT, pids: TASKS_MAX }
}

/// Largest file a VMM may write: its disk, with an eighth and 256 MiB for the image's own tables.
fn file_size_max(size: &SizeSpec) -> u64 {
    let disk = u64::from(size.disk_mib) << 20;
    disk + disk / 8 + (256 << 20)
}

/// Makes an empty overlay `name` in `folder`.
pub(super) fn make_overlay(folder: &Path, name: &str, size: SizeSpec, uid: Option<u32>) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let path = folder.join(name);
    let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(path)?;
    qcow2::write_empty(&file, u64::from(size.disk_mib) << 20)?;
    own(&file, uid)?;
    Ok(file)
}

/// Gives the overlay at `from` a second name in `folder`.
fn link_overlay(from: &Path, folder: &Path, uid: Option<u32>) -> io::Result<File> {
    let path = folder.join(OVERLAY);
    fs::hard_link(from, &path)?;
    let file = File::options().read(true).write(true).open(path)?;
    own(&file, uid)?;
    Ok(file)
}

fn own(file: &File, uid: Option<u32>) -> io::Result<()> {
    // The owner also says whose seat it is, should the record be lost.
    uid.map_or(Ok(()), |uid| std::os::unix::fs::fchown(file, Some(uid), Some(uid)))
}

/// Opens the control channel of the VMM in `folder`.
///
/// # Errors
/// When it does not answer; `log` helps to say why.
pub async fn control(folder: &Path, log: Option<&File>) -> Result<(Qmp, mpsc::Receiver<Event>), DriverError> {
    let stream = folder::connect(folder, QMP_SOCKET)
        .and_then(tokio::net::UnixStream::from_std)
        .map_err(|e| DriverError::io("connecting to the VMM", e))?;
    Qmp::open(stream, GREETING_PATIENCE).await.map_err(|e| DriverError::Stage {
        stage: "starting the VMM",
        detail: format!("{}; it said: {}", chain(&e), log.map_or_else(String::new, log_text)),
    })
}

/// What QEMU wrote, made fit for a log line.
pub fn log_text(log: &File) -> String {
    let mut bytes = vec![0u8; usize::try_from(LOG_BYTES).unwrap_or(0)];
    let n = log.read_at(&mut bytes, 0).unwrap_or(0);
    bytes.truncate(n);
    printable(&bytes)
}

/// Text that came from a guest or a VMM, without control characters, cut.
#[must_use]
pub fn printable(bytes: &[u8]) -> String {
    const KEPT: usize = 2000;
    let text = plain(bytes);
    let skip = text.chars().count().saturating_sub(KEPT);
    text.chars().skip(skip).collect()
}

/// The same, whole.
#[must_use]
pub fn plain(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let text = text.trim_matches('\0').trim();
    text.chars().map(|c| if c.is_control() && c != '\n' { ' ' } else { c }).collect()
}

/// An error with its causes, on one line.
pub fn chain(e: &dyn std::error::Error) -> String {
    let mut text = e.to_string();
    let mut source = e.source();
    while let Some(s) = source {
        text.push_str(": ");
        text.push_str(&s.to_string());
        source = s.source();
    }
    text
}
