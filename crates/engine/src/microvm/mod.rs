//! The microVM driver: QEMU's `microvm` machine, restored from frozen templates.
//!
//! A machine is one QEMU process in a jail ([`crate::jail`]) with one folder and one control group, all under the machine's
//! key. A *waiting* VMM has the same things under a key of its own until a machine takes it over by renaming its folder.

pub mod accelerator;
mod block;
pub mod boot;
mod capture;
mod collect;
pub mod command_line;
mod content;
pub mod delta;
mod disks;
mod flatten;
pub mod folder;
mod fork;
pub mod freeze;
pub mod images;
pub mod instance;
mod launch;
mod merged;
pub mod network;
pub mod pagemap;
mod pause;
mod paused;
pub mod pool;
pub mod process;
pub mod qcow2;
pub mod qmp;
mod save;
mod saved;
pub mod sealed_memory;
pub mod seats;
mod startup;
pub mod tsc;
pub mod uids;
pub mod vmm;

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use mainbrella_types::{
    Accelerator, DriverReport, GenerationKey, Isolation, SizeClass, SnapshotKey, SnapshotKind, TemplateName,
};
use sha2::{Digest, Sha256};

pub use accelerator::{AcceleratorChoice, Verdict};
pub use boot::BootFiles;
pub(crate) use collect::tree_bytes;
pub use content::{StartCommand, TemplateContent};
pub use images::{Images, StoredImages};
pub use startup::OUTPUT as START_OUTPUT;

use crate::cgroup::Cgroups;
use crate::driver::{
    Adoption, DiskUse, Driver, EgressOrder, ForkOrder, Forked, Instance, LaunchOrder, PauseReceipt, SaveOrder, Saving,
    TemplateInfo,
};
use crate::error::DriverError;
use crate::jail;
use boot::blocking;
use command_line::GuestDisk;
use disks::Disks;
use folder::Places;
use freeze::Frozen;
use instance::{Machine, MicroVmInstance};
use launch::Found;
use network::{Network, NetworkChoice};
use pool::Pool;
use seats::{Seat, Seats};
use uids::UidRange;
use vmm::{Host, chain};

/// How the driver is set up.
#[derive(Clone, Debug)]
pub struct MicroVmConfig {
    /// The data directory.
    pub data_dir: PathBuf,
    /// The binary that becomes the launcher when its first argument is [`jail::LAUNCH_ARGUMENT`]: the service itself.
    pub launcher: PathBuf,
    /// QEMU's binary.
    pub qemu: PathBuf,
    /// Accelerator.
    pub accelerator: AcceleratorChoice,
    /// Waiting VMMs kept for each template size in use; 0: none.
    pub waiting: usize,
    /// User ids for VMMs (root only): the first, and how many; also the most machines at once, waiting ones included.
    /// `None`: a range that no other service on this host has.
    pub uids: Option<(u32, u32)>,
    /// How machines get a network.
    pub network: NetworkChoice,
    /// After how long without use a template's memory and waiting VMMs are let go.
    pub cool_after: Duration,
    /// How long a machine that stopped because the host's disk is full is tried again before it is given up.
    pub full_patience: Duration,
}

impl MicroVmConfig {
    /// The defaults for `data_dir`, with this very binary as launcher.
    #[must_use]
    pub fn new(data_dir: PathBuf) -> Self {
        Self {
            data_dir,
            launcher: "/proc/self/exe".into(),
            qemu: "/usr/bin/qemu-system-x86_64".into(),
            accelerator: AcceleratorChoice::Auto,
            waiting: 1,
            uids: None,
            network: NetworkChoice::Auto,
            cool_after: Duration::from_secs(600),
            full_patience: Duration::from_secs(120),
        }
    }
}

/// A frozen template once it is ready; locked while it is made.
type FrozenSlot = Arc<tokio::sync::Mutex<Option<Arc<Frozen>>>>;

pub(crate) struct Inner {
    host: Arc<Host>,
    places: Places,
    images: Arc<dyn Images>,
    qemu_version: String,
    processor: String,
    choice: AcceleratorChoice,
    verdict: tokio::sync::Mutex<Verdict>,
    /// The verdict again, for [`Driver::report`], which may not wait.
    told: Mutex<Verdict>,
    frozen: Mutex<HashMap<String, FrozenSlot>>,
    machines: Mutex<HashMap<GenerationKey, Arc<Machine>>>,
    /// Seats of machines that were found and not adopted yet.
    reserved: Mutex<HashMap<GenerationKey, Seat>>,
    locks: Mutex<HashMap<GenerationKey, Arc<tokio::sync::Mutex<()>>>>,
    guards: Mutex<HashMap<SnapshotKey, Arc<SnapshotGuard>>>,
    pool: Arc<Pool>,
    disks: Disks,
    /// Digests of what snapshots are made of.
    known: saved::Known,
    /// Machines whose disks are being flattened.
    flattening: Mutex<HashSet<GenerationKey>>,
    /// Why the data directory's file system cannot keep paused machines. `None`: it can.
    keeps_nothing: Option<String>,
    cool_after: Duration,
    full_patience: Duration,
    sweeper: Mutex<Option<tokio::task::AbortHandle>>,
    /// Held as long as this driver makes machines.
    _uids: Option<UidRange>,
}

/// Keeps a snapshot while it is used.
#[derive(Default)]
struct SnapshotGuard {
    /// Shared by all who use it; whoever removes it has it alone.
    used: tokio::sync::RwLock<()>,
    /// Held while it is looked over: the next one finds the digests that this one has worked out.
    looked: tokio::sync::Mutex<()>,
}

fn held<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    fn machines(&self) -> MutexGuard<'_, HashMap<GenerationKey, Arc<Machine>>> {
        held(&self.machines)
    }

    fn reserved(&self) -> MutexGuard<'_, HashMap<GenerationKey, Seat>> {
        held(&self.reserved)
    }

    fn current(&self) -> Verdict {
        held(&self.told).clone()
    }

    fn publish(&self, verdict: &Verdict) {
        tracing::info!(accelerator = verdict.accelerator.as_str(), reason = verdict.reason, "accelerator");
        *held(&self.told) = verdict.clone();
    }

    /// The lock under which everything that concerns this machine is done.
    fn lock(&self, key: &GenerationKey) -> Arc<tokio::sync::Mutex<()>> {
        held(&self.locks).entry(*key).or_default().clone()
    }

    /// Lets go of a lock nobody else holds.
    fn forget_lock(&self, key: &GenerationKey) {
        let mut locks = held(&self.locks);
        if locks.get(key).is_some_and(|l| Arc::strong_count(l) <= 2) {
            locks.remove(key);
        }
    }

    /// What is held while a snapshot is used, or removed.
    fn guard(&self, snapshot: &SnapshotKey) -> Arc<SnapshotGuard> {
        held(&self.guards).entry(*snapshot).or_default().clone()
    }

    /// Lets go of a guard nobody else has.
    fn forget_guard(&self, snapshot: &SnapshotKey) {
        let mut guards = held(&self.guards);
        if guards.get(snapshot).is_some_and(|g| Arc::strong_count(g) <= 2) {
            guards.remove(snapshot);
        }
    }

    async fn sweep(&self) {
        self.pool.cool(&self.host, self.cool_after).await;
        let slots: Vec<_> = held(&self.frozen).values().cloned().collect();
        for slot in slots {
            // A slot whose template is being frozen is busy, not idle.
            if let Ok(ready) = slot.try_lock()
                && let Some(ready) = ready.as_ref()
            {
                ready.cool(self.cool_after).await;
            }
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The next driver in this process must find the control channels free.
        for machine in held(&self.machines).values() {
            machine.let_be();
        }
        if let Some(sweeper) = held(&self.sweeper).take() {
            sweeper.abort();
        }
    }
}

/// The driver.
pub struct MicroVm {
    inner: Arc<Inner>,
}

impl MicroVm {
    /// Probes the host, removes what a former service left waiting or half made, and remembers whose the rest is.
    ///
    /// # Errors
    /// When QEMU is missing or starts in no jail at all, or the data directory cannot be used.
    pub async fn open(config: MicroVmConfig, images: Arc<dyn Images>) -> Result<Arc<Self>, DriverError> {
        let places = Places::open(&config.data_dir).map_err(|e| DriverError::io("preparing the data directory", e))?;
        let qemu_version = qemu_version(&config.qemu).await?;
        let instance = hex::encode(
            &Sha256::digest(std::os::unix::ffi::OsStrExt::as_bytes(
                std::path::absolute(&config.data_dir).unwrap_or_else(|_| config.data_dir.clone()).as_os_str(),
            ))[..6],
        );
        let cgroups = Cgroups::discover(&instance).map_err(|e| DriverError::io("reading the mount table", e))?;
        let root = rustix::process::geteuid().is_root();
        let taken = match config.uids {
            None if root => Some(
                UidRange::take(&config.data_dir)
                    .map_err(|e| DriverError::io("taking a range of user ids for machines", e))?,
            ),
            _ => None,
        };
        let (uid_base, uid_count) = match (&taken, config.uids) {
            (Some(range), _) => (range.base, uids::COUNT),
            (None, Some(given)) => given,
            // Without root no machine has a user id of its own.
            (None, None) => (0, 0),
        };
        let probe = {
            let (launcher, qemu, scratch, cgroups) =
                (config.launcher.clone(), config.qemu.clone(), places.scratch.clone(), cgroups.clone());
            // The last of the range, which is taken last.
            let uid = root.then(|| uid_base + uid_count.saturating_sub(1));
            blocking(move || {
                let ground =
                    jail::Ground { launcher: &launcher, qemu: &qemu, scratch: &scratch, cgroups: &cgroups, uid };
                jail::probe(&ground).map_err(|e| DriverError::Stage { stage: "probing the jail", detail: chain(&e) })
            })
            .await?
        };
        for (wall, why) in probe.missing() {
            tracing::warn!(wall, why, "a wall of the jail is missing");
        }
        let network = {
            let (choice, data_dir, walls) = (config.network, config.data_dir.clone(), probe.walls().network_namespace);
            blocking(move || Ok(Network::open(&choice, &data_dir, walls))).await?
        };
        for (what, why) in network.missing() {
            tracing::warn!(what, why, "machines go without");
        }
        let host = Arc::new(Host {
            launcher: config.launcher,
            qemu: config.qemu,
            cgroups,
            jail: probe,
            seats: Seats::new(uid_base, uid_count),
            network,
            scratch: places.scratch.clone(),
        });
        let reserved = clean_up(&host, &places).await?;
        let keeps_nothing = {
            let tmp = places.tmp.clone();
            blocking(move || Ok(pause::probe(&tmp).err().map(|e| e.to_string()))).await?
        };
        if let Some(why) = &keeps_nothing {
            tracing::warn!(why, "machines cannot be paused or forked in this data directory");
        }
        let disks = {
            let places = places.clone();
            blocking(move || {
                let opened = Disks::open(&places.disks, &places.machines, &places.snapshots);
                opened.map_err(|e| DriverError::io("looking for unused disks", e))
            })
            .await?
        };
        let first = {
            let images = images.clone();
            blocking(move || {
                let built = images.list()?;
                let files = built.into_iter().filter_map(|(name, _, _)| images.boot_files(&name).ok());
                // Whose root image stands by itself.
                Ok(files.into_iter().find(|files| files.content.is_none()))
            })
            .await?
        };
        let ground = accelerator::Ground { host: &host, places: &places, qemu_version: &qemu_version, files: first };
        let verdict = accelerator::decide(config.accelerator, &ground).await?;
        let inner = Arc::new(Inner {
            pool: Arc::new(Pool::new(config.waiting, places.waiting.clone())),
            disks,
            known: saved::Known::default(),
            keeps_nothing,
            host,
            places,
            images,
            qemu_version,
            processor: processor(),
            choice: config.accelerator,
            told: Mutex::new(verdict.clone()),
            verdict: tokio::sync::Mutex::new(verdict.clone()),
            frozen: Mutex::default(),
            machines: Mutex::default(),
            reserved: Mutex::new(reserved),
            locks: Mutex::default(),
            guards: Mutex::default(),
            cool_after: config.cool_after,
            full_patience: config.full_patience,
            flattening: Mutex::default(),
            sweeper: Mutex::default(),
            _uids: taken,
        });
        inner.publish(&verdict);
        // With an accelerator that is still to be found out, what is frozen for it is not known.
        if !verdict.open {
            let (inner, accelerator) = (inner.clone(), verdict.accelerator);
            let collected = blocking(move || {
                inner.collect_frozen(accelerator);
                Ok(())
            });
            collected.await?;
        }
        let weak = Arc::downgrade(&inner);
        let pause = (config.cool_after / 4).clamp(Duration::from_millis(100), Duration::from_secs(60));
        let sweeper = tokio::spawn(async move {
            loop {
                tokio::time::sleep(pause).await;
                let Some(inner) = weak.upgrade() else { return };
                inner.sweep().await;
            }
        });
        *held(&inner.sweeper) = Some(sweeper.abort_handle());
        Ok(Arc::new(Self { inner }))
    }

    /// Freezes `template` in `class` if it is not frozen yet, and gets the first waiting VMMs ready.
    ///
    /// # Errors
    /// When it cannot be booted or captured.
    pub async fn freeze(&self, template: &TemplateName, class: SizeClass) -> Result<(), DriverError> {
        let (inner, template) = (self.inner.clone(), template.clone());
        detached(async move {
            let frozen = inner.frozen(&template, class).await?;
            frozen.memory().await?;
            inner.pool.refill(&inner.host, inner.current().accelerator, &frozen);
            Ok(())
        })
        .await
    }

    /// Walls of the jail that do not stand on this host, each with the reason; for `doctor`.
    #[must_use]
    pub fn missing_walls(&self) -> Vec<(&'static str, String)> {
        let host = &self.inner.host;
        host.jail.missing().iter().chain(host.network.missing()).cloned().collect()
    }

    /// Process id of a machine's VMM, for measurements and tests.
    #[must_use]
    pub fn vmm_pid(&self, key: &GenerationKey) -> Option<i32> {
        self.inner.machines().get(key).map(|m| m.vmm.process.pid())
    }

    /// What a machine's control group is charged for.
    #[must_use]
    pub fn usage(&self, key: &GenerationKey) -> Option<crate::cgroup::Usage> {
        let group = self.inner.machines().get(key).map(|m| m.vmm.record.group.clone())?;
        Some(self.inner.host.cgroups.usage(&group))
    }

    /// How many VMMs wait for `template` in `class`. 0 while it is not frozen.
    pub async fn waiting(&self, template: &TemplateName, class: SizeClass) -> usize {
        self.ready(template, class).await.map_or(0, |f| self.inner.pool.count(&f.key))
    }

    /// What machines of `template` in `class` start from, for measurements. `None` before it was used here.
    pub async fn ready(&self, template: &TemplateName, class: SizeClass) -> Option<Arc<Frozen>> {
        let slots: Vec<_> = held(&self.inner.frozen).values().cloned().collect();
        for slot in slots {
            if let Some(f) = slot.lock().await.as_ref()
                && f.template == *template
                && f.class == class
            {
                return Some(f.clone());
            }
        }
        None
    }
}

/// Runs to its end even if the caller gives up.
async fn detached<T: Send + 'static>(
    work: impl Future<Output = Result<T, DriverError>> + Send + 'static,
) -> Result<T, DriverError> {
    tokio::spawn(work).await.map_err(|e| DriverError::Stage { stage: "a background step", detail: e.to_string() })?
}

/// Removes what belongs to nobody; takes the seats of what does.
async fn clean_up(host: &Arc<Host>, places: &Places) -> Result<HashMap<GenerationKey, Seat>, DriverError> {
    let io = |what: &'static str| move |e| DriverError::io(what, e);
    for key in folder::keys(&places.waiting).map_err(io("listing waiting VMMs"))? {
        boot::remove(host, &places.waiting.join(key.to_string()), &key.to_string()).await;
    }
    let (host, places) = (host.clone(), places.clone());
    blocking(move || {
        for entry in std::fs::read_dir(&places.tmp).map_err(io("listing half-made things"))?.flatten() {
            if entry
                .file_name()
                .to_str()
                .is_some_and(|n| ["freeze-", "fork-", "save-", "forget-"].iter().any(|p| n.starts_with(p)))
            {
                let path = entry.path();
                // Left from a freeze, trial, fork, save or removal that was cut off; if it stays, the next freeze clears its own.
                let _ = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
            }
        }
        let mut reserved = HashMap::new();
        let mut groups = Vec::new();
        for key in folder::keys(&places.machines).map_err(io("listing machines"))? {
            let place = places.machine(&key);
            paused::remove_half(&place).map_err(io("removing half of what was kept"))?;
            if paused::is_paused(&place) {
                // Its group, if there is one, is nobody's.
                match pause::settle(&place) {
                    Ok(()) => continue,
                    Err(error) => {
                        tracing::error!(machine = %key, %error, "what is left of the VMM of a paused machine stays")
                    }
                }
            }
            let record = folder::read_record(&place).map_err(io("reading a machine's record"))?;
            groups.push(key.to_string());
            let uid = match record {
                Some(r) => {
                    groups.push(r.group);
                    r.uid
                }
                None => {
                    std::fs::metadata(place.join(folder::OVERLAY)).ok().map(|m| std::os::unix::fs::MetadataExt::uid(&m))
                }
            };
            if let Some(seat) = uid.and_then(|u| host.seats.retake(u)) {
                reserved.insert(key, seat);
            }
        }
        for group in host.cgroups.list() {
            if !groups.contains(&group) {
                tracing::info!(group, "removing a control group that belongs to no machine");
                if let Err(e) = host.cgroups.remove(&group, Duration::from_secs(10)) {
                    tracing::warn!(group, error = %e, "it could not be removed");
                }
            }
        }
        Ok(reserved)
    })
    .await
}

async fn qemu_version(qemu: &std::path::Path) -> Result<String, DriverError> {
    let out = tokio::process::Command::new(qemu)
        .arg("--version")
        .env_clear()
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true)
        .output();
    let out = tokio::time::timeout(Duration::from_secs(20), out)
        .await
        .map_err(|_| DriverError::Stage { stage: "asking QEMU for its version", detail: "no answer".to_owned() })?
        .map_err(|e| DriverError::io(format!("running {} (Debian package qemu-system-x86)", qemu.display()), e))?;
    let text = String::from_utf8_lossy(&out.stdout);
    text.lines()
        .next()
        .and_then(|l| l.strip_prefix("QEMU emulator version "))
        .map(|v| v.trim().to_owned())
        .ok_or_else(|| DriverError::Stage { stage: "asking QEMU for its version", detail: vmm::printable(&out.stdout) })
}

/// What of the host's processor a guest sees through KVM.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = |name: &str| text.lines().find(|l| l.starts_with(name)).unwrap_or("").to_owned();
    ["model name", "stepping", "microcode", "flags"].map(line).join("\n")
}

#[async_trait]
impl Driver for MicroVm {
    fn report(&self) -> DriverReport {
        let verdict = self.inner.current();
        let short = self.inner.qemu_version.split(' ').next().unwrap_or("");
        DriverReport {
            driver: "microvm",
            accelerator: Some(verdict.accelerator),
            accelerator_reason: verdict.reason,
            isolation: match verdict.accelerator {
                Accelerator::Kvm => Isolation::Hardware,
                Accelerator::Tcg => Isolation::Emulated,
            },
            jail: self.inner.host.jail.report(),
            vmm: format!("QEMU {short}"),
            internet: self.inner.host.network.leads_out(),
            allow_list: self.inner.host.network.has_cards(),
            // By the rules of its seat, or because there is no network card at all.
            internet_off: true,
            memory_snapshot: self.inner.keeps_nothing.is_none(),
            fork: self.inner.keeps_nothing.is_none(),
        }
    }

    async fn templates(&self) -> Result<Vec<TemplateInfo>, DriverError> {
        let inner = self.inner.clone();
        let accelerator = inner.current().accelerator;
        blocking(move || {
            let built = inner.images.list()?;
            Ok(built
                .into_iter()
                .map(|(name, digest, image_bytes)| {
                    let files = inner.files_of(&name).ok();
                    let frozen = SizeClass::ALL.into_iter().filter(|class| {
                        files.as_ref().is_some_and(|files| {
                            let inputs = inner.key_inputs(accelerator, &name, (*class, GuestDisk::AtBoot), files);
                            inner.places.frozen.join(inputs.key()).join("manifest.json").is_file()
                        })
                    });
                    let frozen = frozen.collect();
                    let languages = inner.images.languages(&name);
                    let tags = inner.images.tags(&name);
                    TemplateInfo { name, digest, image_bytes, frozen, languages, tags }
                })
                .collect())
        })
        .await
    }

    async fn launch(&self, order: &LaunchOrder) -> Result<Box<dyn Instance>, DriverError> {
        self.report().enforces(&order.egress.policy).map_err(|why| DriverError::Unsupported(why.to_owned()))?;
        let (inner, order) = (self.inner.clone(), order.clone());
        let saved = order.snapshot.is_some();
        let machine = detached(async move { inner.launch(&order).await }).await?;
        if saved {
            self.inner.flatten_soon(&machine);
        }
        Ok(Box::new(MicroVmInstance::new(machine, &self.inner)))
    }

    async fn adopt(&self, key: &GenerationKey, egress: &EgressOrder) -> Result<Adoption, DriverError> {
        Ok(match self.inner.adopt(key, egress).await? {
            Found::Running(machine) => {
                self.inner.flatten_soon(&machine);
                Adoption::Running(Box::new(MicroVmInstance::new(machine, &self.inner)))
            }
            Found::Paused => Adoption::Paused,
            Found::Dead(why) => Adoption::Dead(why),
            Found::Absent => Adoption::Absent,
        })
    }

    async fn pause(&self, key: &GenerationKey) -> Result<PauseReceipt, DriverError> {
        let (inner, key) = (self.inner.clone(), *key);
        detached(async move { inner.pause(&key).await }).await
    }

    async fn resume(&self, key: &GenerationKey, egress: &EgressOrder) -> Result<Box<dyn Instance>, DriverError> {
        self.report().enforces(&egress.policy).map_err(|why| DriverError::Unsupported(why.to_owned()))?;
        let (inner, key, egress) = (self.inner.clone(), *key, egress.clone());
        let machine = detached(async move { inner.resume(&key, &egress).await }).await?;
        self.inner.flatten_soon(&machine);
        Ok(Box::new(MicroVmInstance::new(machine, &self.inner)))
    }

    async fn ready_to_fork(&self, source: &GenerationKey) -> Result<(), DriverError> {
        self.inner.ready_to_fork(source).await
    }

    async fn fork(&self, source: &GenerationKey, children: &[ForkOrder]) -> Result<Forked, DriverError> {
        for child in children {
            self.report().enforces(&child.egress.policy).map_err(|why| DriverError::Unsupported(why.to_owned()))?;
        }
        let (inner, source, children) = (self.inner.clone(), *source, children.to_vec());
        let made = detached(async move { inner.fork(&source, &children).await });
        let made = made.await;
        let grown = self.inner.machines().get(&source).cloned();
        let children = made.iter().flat_map(|made| made.children.iter().flatten()).cloned();
        for machine in children.chain(grown) {
            self.inner.flatten_soon(&machine);
        }
        let made = made?;
        let instance = |machine| Box::new(MicroVmInstance::new(machine, &self.inner)) as Box<dyn Instance>;
        let children = made.children.into_iter().map(|child| child.map(instance)).collect();
        let (memory_bytes, device_bytes, still_ms) = (made.memory_bytes, made.device_bytes, made.still_ms);
        Ok(Forked { children, memory_bytes, device_bytes, still_ms })
    }

    async fn save(&self, key: &GenerationKey, order: &SaveOrder) -> Result<Saving, DriverError> {
        let (inner, key, order) = (self.inner.clone(), *key, *order);
        let saving = detached(async move { inner.save(&key, &order).await }).await;
        let machine = self.inner.machines().get(&key).cloned();
        if let Some(machine) = machine {
            self.inner.flatten_soon(&machine);
        }
        saving
    }

    async fn snapshots(&self) -> Result<Vec<SnapshotKey>, DriverError> {
        let snapshots = self.inner.places.snapshots.clone();
        blocking(move || folder::snapshots(&snapshots).map_err(|e| DriverError::io("listing snapshots", e))).await
    }

    async fn forget(&self, snapshot: &SnapshotKey) -> Result<(), DriverError> {
        let (inner, snapshot) = (self.inner.clone(), *snapshot);
        detached(async move { inner.forget(&snapshot).await }).await
    }

    async fn disk_use(&self) -> Result<Vec<DiskUse>, DriverError> {
        let inner = self.inner.clone();
        blocking(move || {
            let templates = inner.places.templates();
            collect::disk_use(&inner.places, &templates).map_err(|e| DriverError::io("measuring the data directory", e))
        })
        .await
    }

    async fn prepare(&self, template: &TemplateName, size: SizeClass) -> Result<(), DriverError> {
        self.freeze(template, size).await
    }

    async fn inherited(&self, template: &TemplateName) -> Result<Option<SnapshotKey>, DriverError> {
        let (inner, template) = (self.inner.clone(), template.clone());
        blocking(move || {
            let content = inner.images.boot_files(&template)?.content;
            Ok(content.filter(|c| c.kind == SnapshotKind::Full).map(|c| c.snapshot))
        })
        .await
    }

    async fn duplicate(&self, from: &SnapshotKey, to: &SnapshotKey) -> Result<(), DriverError> {
        let (inner, from, to) = (self.inner.clone(), *from, *to);
        detached(async move { inner.duplicate(&from, &to).await }).await
    }

    async fn inventory(&self) -> Result<Vec<GenerationKey>, DriverError> {
        let machines = self.inner.places.machines.clone();
        blocking(move || folder::keys(&machines).map_err(|e| DriverError::io("listing machines", e))).await
    }

    async fn destroy(&self, key: &GenerationKey) -> Result<(), DriverError> {
        let (inner, key) = (self.inner.clone(), *key);
        detached(async move { inner.destroy(&key).await }).await
    }

    async fn shutdown(&self) {
        if let Some(sweeper) = held(&self.inner.sweeper).take() {
            sweeper.abort();
        }
        self.inner.pool.close(&self.inner.host).await;
        // Only if no machine is left in them.
        self.inner.host.cgroups.remove_instance();
        let host = self.inner.host.clone();
        let left = folder::keys(&self.inner.places.machines).map_or(true, |k| !k.is_empty());
        if !left {
            let closed = blocking(move || {
                host.network.close();
                Ok(())
            });
            // The work itself cannot fail; without it the rules stay until the next start.
            let _ = closed.await;
        }
    }
}
