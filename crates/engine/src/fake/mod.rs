//! A driver without machines, for tests: a scripted guest in this process, and faults on demand.
//!
//! It speaks the real guest protocol over an in-memory stream, so everything above the byte stream is the
//! code that runs in production. "Resources on the host" are entries of a table that survive the engine, so
//! a restart can be played by making a new engine over the same driver.

mod contexts;
mod files;
mod guest;
mod job;
mod network;
mod ports;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use mainbrella_guest_protocol::guest_side::{self, GuestService};
use mainbrella_types::{
    DriverReport, EgressPolicy, GenerationKey, Isolation, JailReport, SizeClass, SnapshotKey, SnapshotKind,
    TemplateName,
};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::driver::{
    Adoption, Driver, EgressOrder, ExitReport, ForkOrder, Forked, GuestStream, Instance, LaunchOrder, MachineNetwork,
    PauseReceipt, SaveOrder, SaveReceipt, Saving, TemplateInfo,
};
use crate::error::DriverError;
use crate::machine::Language;
use guest::FakeGuest;
pub use guest::GuestFaults;
use network::FakeNetwork;
pub use ports::{FakePorts, Listener};

/// Faults of the host side. Each counter says how many of the next calls fail.
#[derive(Debug, Default)]
pub struct HostFaults {
    /// Launches that fail and leave nothing.
    pub launch: AtomicU32,
    /// Launches that find the host's disk full.
    pub launch_host_full: AtomicU32,
    /// Removals that fail and leave everything.
    pub destroy: AtomicU32,
    /// Dials that fail.
    pub dial: AtomicU32,
    /// Policies that cannot be put in force.
    pub egress: Arc<AtomicU32>,
    /// Pauses that fail and leave the machine running.
    pub pause: AtomicU32,
    /// Pauses that find the host's disk full.
    pub pause_host_full: AtomicU32,
    /// Resumes that fail and leave the machine paused.
    pub resume: AtomicU32,
    /// Forks that fail as a whole.
    pub fork: AtomicU32,
    /// Children of forks that fail, each for itself.
    pub fork_child: AtomicU32,
    /// Saves that fail and keep nothing.
    pub save: AtomicU32,
    /// Saves that find the host's disk full.
    pub save_host_full: AtomicU32,
    /// How long a save takes when everything is kept already, ms; no counter.
    pub save_lasts_ms: AtomicU32,
    /// Removals of snapshots that fail and leave everything.
    pub forget: AtomicU32,
}

/// Takes one fault from a counter; says whether there was one.
fn strikes(counter: &AtomicU32) -> bool {
    counter.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok()
}

struct FakeMachine {
    service: GuestService,
    /// The scripted guest behind it, unless the driver was given guests of another kind.
    guest: Option<Arc<FakeGuest>>,
    exit: watch::Sender<Option<ExitReport>>,
    link: Mutex<CancellationToken>,
    network: FakeNetwork,
    paused: AtomicBool,
}

impl FakeMachine {
    fn hang_up(&self) {
        self.link.lock().unwrap_or_else(PoisonError::into_inner).cancel();
    }

    fn runs(&self) -> bool {
        !self.paused.load(Ordering::SeqCst) && self.exit.borrow().is_none()
    }
}

/// A failure that was asked for.
fn asked_for(stage: &'static str) -> DriverError {
    DriverError::Stage { stage, detail: "a fault was asked for".into() }
}

/// The driver. Clones share their machines and faults.
#[derive(Clone)]
pub struct FakeDriver {
    machines: Arc<Mutex<HashMap<GenerationKey, Arc<FakeMachine>>>>,
    /// What was saved, by snapshot. `None`: the guests are not scripted ones, and nothing of them can be copied.
    saved: Arc<Mutex<HashMap<SnapshotKey, Option<Arc<FakeGuest>>>>>,
    /// Host faults.
    pub host: Arc<HostFaults>,
    /// Guest faults, shared by all machines.
    pub guest: Arc<GuestFaults>,
    /// What listens in its machines.
    pub ports: FakePorts,
    launch_time: Duration,
    templates: Vec<TemplateName>,
    internet: bool,
    snapshots: bool,
    /// Where machines live: on the runtime that made the driver, so that an engine's own can end without them.
    home: Option<Handle>,
    make_guest: Option<MakeGuest>,
}

/// Makes the guest of one machine.
pub type MakeGuest = Arc<dyn Fn() -> GuestService + Send + Sync>;

impl Default for FakeDriver {
    fn default() -> Self {
        Self::new(Duration::ZERO)
    }
}

impl FakeDriver {
    /// A driver whose launches take `launch_time`, with the templates `python` and `node`.
    #[must_use]
    pub fn new(launch_time: Duration) -> Self {
        let templates = ["python", "node"].into_iter().filter_map(|n| n.parse().ok()).collect();
        Self {
            machines: Arc::default(),
            saved: Arc::default(),
            host: Arc::default(),
            guest: Arc::default(),
            ports: FakePorts::default(),
            launch_time,
            templates,
            internet: false,
            snapshots: true,
            home: Handle::try_current().ok(),
            make_guest: None,
        }
    }

    /// A driver that can give machines a way to the internet, and keep them to an allow-list.
    #[must_use]
    pub fn with_internet(mut self) -> Self {
        self.internet = true;
        self
    }

    /// A driver that cannot save machines.
    #[must_use]
    pub fn without_snapshots(mut self) -> Self {
        self.snapshots = false;
        self
    }

    /// The policy in force for a machine. `None`: there is no such machine, or none could be put in force.
    #[must_use]
    pub fn egress(&self, key: &GenerationKey) -> Option<EgressPolicy> {
        self.machines().get(key)?.network.policy()
    }

    /// What the gateway of a machine would add to requests. `None`: there is no such machine.
    #[must_use]
    pub fn secrets(&self, key: &GenerationKey) -> Option<Arc<mainbrella_net::SeatSecrets>> {
        Some(self.machines().get(key)?.network.secrets())
    }

    /// A driver whose machines have other guests than the scripted one.
    #[must_use]
    pub fn with_guests(mut self, make: MakeGuest) -> Self {
        self.make_guest = Some(make);
        self
    }

    fn home(&self) -> Handle {
        self.home.clone().unwrap_or_else(Handle::current)
    }

    fn machines(&self) -> MutexGuard<'_, HashMap<GenerationKey, Arc<FakeMachine>>> {
        self.machines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn saved(&self) -> MutexGuard<'_, HashMap<SnapshotKey, Option<Arc<FakeGuest>>>> {
        self.saved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loses what is kept of a snapshot, as a damaged disk would.
    pub fn damage(&self, snapshot: &SnapshotKey) {
        self.saved().remove(snapshot);
    }

    /// Machines of which anything exists.
    #[must_use]
    pub fn alive(&self) -> usize {
        self.machines().len()
    }

    /// Ends a machine from outside, as a killed VMM would.
    pub fn kill(&self, key: &GenerationKey, report: ExitReport) {
        if let Some(machine) = self.machines().get(key) {
            machine.exit.send_replace(Some(report));
            machine.hang_up();
        }
    }

    /// Breaks the byte stream of a machine that goes on, once.
    pub fn cut(&self, key: &GenerationKey) {
        if let Some(machine) = self.machines().get(key) {
            machine.hang_up();
        }
    }

    /// Leaves something on the host that no record owns.
    pub fn litter(&self, key: GenerationKey) {
        self.put(key);
    }

    /// Whether a machine is paused.
    #[must_use]
    pub fn paused(&self, key: &GenerationKey) -> bool {
        self.machines().get(key).is_some_and(|m| m.paused.load(Ordering::SeqCst))
    }

    fn put(&self, key: GenerationKey) -> Arc<FakeMachine> {
        match &self.make_guest {
            Some(make) => self.put_service(key, make(), None),
            None => {
                let guest = FakeGuest::new(Arc::clone(&self.guest), self.ports.clone(), self.home());
                self.put_guest(key, Arc::new(guest))
            }
        }
    }

    fn put_guest(&self, key: GenerationKey, guest: Arc<FakeGuest>) -> Arc<FakeMachine> {
        let service = guest_side::service(guest::router(Arc::clone(&guest)));
        self.put_service(key, service, Some(guest))
    }

    fn put_service(
        &self,
        key: GenerationKey,
        service: GuestService,
        guest: Option<Arc<FakeGuest>>,
    ) -> Arc<FakeMachine> {
        let network = FakeNetwork::new(Arc::clone(&self.host.egress));
        let (exit, link, paused) = (watch::channel(None).0, Mutex::default(), AtomicBool::new(false));
        let machine = Arc::new(FakeMachine { service, guest, exit, link, network, paused });
        self.machines().insert(key, Arc::clone(&machine));
        machine
    }

    fn instance(&self, machine: Arc<FakeMachine>) -> Box<dyn Instance> {
        Box::new(FakeInstance { machine, host: Arc::clone(&self.host), home: self.home() })
    }

    fn running(&self, key: &GenerationKey) -> Result<Arc<FakeMachine>, DriverError> {
        let machine = self.machines().get(key).cloned().filter(|m| m.runs());
        machine.ok_or(DriverError::WrongState("the machine does not run"))
    }

    fn child(&self, source: &FakeMachine, order: &ForkOrder) -> Result<Box<dyn Instance>, DriverError> {
        if strikes(&self.host.fork_child) {
            return Err(asked_for("fork"));
        }
        if self.machines().contains_key(&order.key) {
            return Err(DriverError::Stage { stage: "preparing", detail: "a machine of this key exists".to_owned() });
        }
        let machine = match &source.guest {
            Some(guest) => self.put_guest(order.key, Arc::new(guest.forked())),
            None => self.put(order.key),
        };
        if let Err(e) = machine.network.enforce(&order.egress) {
            self.machines().remove(&order.key);
            return Err(e);
        }
        Ok(self.instance(machine))
    }
}

struct FakeInstance {
    machine: Arc<FakeMachine>,
    host: Arc<HostFaults>,
    home: Handle,
}

#[async_trait]
impl Instance for FakeInstance {
    async fn dial(&self) -> Result<GuestStream, DriverError> {
        if strikes(&self.host.dial) {
            return Err(asked_for("dial"));
        }
        if !self.machine.runs() {
            return Err(DriverError::WrongState("the machine does not run"));
        }
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        let token = CancellationToken::new();
        // A new stream replaces the old one, as a port does.
        std::mem::replace(&mut *self.machine.link.lock().unwrap_or_else(PoisonError::into_inner), token.clone())
            .cancel();
        let service = self.machine.service.clone();
        self.home.spawn(async move {
            tokio::select! {
                _ = guest_side::serve(theirs, service) => {}
                () = token.cancelled() => {}
            }
        });
        Ok(Box::new(ours))
    }

    async fn exited(&self) -> ExitReport {
        let mut exit = self.machine.exit.subscribe();
        let report = exit.wait_for(Option::is_some).await.ok().and_then(|r| r.clone());
        report.unwrap_or_else(|| ExitReport::Vmm("it was removed".into()))
    }

    fn network(&self) -> Option<&dyn MachineNetwork> {
        Some(&self.machine.network)
    }
}

#[async_trait]
impl Driver for FakeDriver {
    fn report(&self) -> DriverReport {
        DriverReport {
            driver: "fake",
            accelerator: None,
            accelerator_reason: "the fake driver runs nothing".into(),
            isolation: Isolation::SharedKernel,
            jail: JailReport::default(),
            vmm: "none".into(),
            internet: self.internet,
            allow_list: self.internet,
            internet_off: true,
            memory_snapshot: self.snapshots,
            fork: self.snapshots,
        }
    }

    async fn templates(&self) -> Result<Vec<TemplateInfo>, DriverError> {
        Ok(self
            .templates
            .iter()
            .map(|name| TemplateInfo {
                tags: Vec::new(),
                name: name.clone(),
                digest: "sha256:00".into(),
                image_bytes: 0,
                frozen: vec![SizeClass::Small],
                languages: if name.as_str() == "python" { vec![Language::Python] } else { Vec::new() },
            })
            .collect())
    }

    async fn launch(&self, order: &LaunchOrder) -> Result<Box<dyn Instance>, DriverError> {
        if strikes(&self.host.launch_host_full) {
            return Err(DriverError::HostFull);
        }
        // Versions of templates are kept by others; here every one is there.
        if !self.templates.contains(&order.template) && order.template.version().is_none() {
            return Err(DriverError::TemplateMissing(order.template.to_string()));
        }
        self.report().enforces(&order.egress.policy).map_err(|why| DriverError::Unsupported(why.to_owned()))?;
        if !self.launch_time.is_zero() {
            tokio::time::sleep(self.launch_time).await;
        }
        if strikes(&self.host.launch) {
            return Err(asked_for("launch"));
        }
        let machine = match &order.snapshot {
            None => self.put(order.key),
            Some(snapshot) => {
                let kept = self.saved().get(snapshot).cloned();
                match kept.ok_or_else(|| DriverError::Damaged("the snapshot is not on this host".to_owned()))? {
                    // What is copied is what has a memory of its own; that it is a disk's or a machine's makes no difference here.
                    Some(guest) => self.put_guest(order.key, Arc::new(guest.forked())),
                    None => self.put(order.key),
                }
            }
        };
        if let Err(e) = machine.network.enforce(&order.egress) {
            self.machines().remove(&order.key);
            return Err(e);
        }
        Ok(self.instance(machine))
    }

    async fn adopt(&self, key: &GenerationKey, egress: &EgressOrder) -> Result<Adoption, DriverError> {
        let Some(machine) = self.machines().get(key).cloned() else { return Ok(Adoption::Absent) };
        if machine.paused.load(Ordering::SeqCst) {
            return Ok(Adoption::Paused);
        }
        let report = machine.exit.borrow().clone();
        Ok(match report {
            Some(report) => Adoption::Dead(report),
            None => {
                // It fails closed.
                let _ = machine.network.enforce(egress);
                Adoption::Running(self.instance(machine))
            }
        })
    }

    async fn pause(&self, key: &GenerationKey) -> Result<PauseReceipt, DriverError> {
        let machine = self.running(key)?;
        if strikes(&self.host.pause_host_full) {
            return Err(DriverError::HostFull);
        }
        if strikes(&self.host.pause) {
            return Err(asked_for("pause"));
        }
        machine.paused.store(true, Ordering::SeqCst);
        machine.hang_up();
        machine.exit.send_replace(Some(ExitReport::Vmm("the machine was paused".into())));
        Ok(PauseReceipt { memory_bytes: 4096, device_bytes: 1, still_ms: 0 })
    }

    async fn resume(&self, key: &GenerationKey, egress: &EgressOrder) -> Result<Box<dyn Instance>, DriverError> {
        let machine = self.machines().get(key).cloned().filter(|m| m.paused.load(Ordering::SeqCst));
        let machine = machine.ok_or(DriverError::WrongState("the machine is not paused"))?;
        self.report().enforces(&egress.policy).map_err(|why| DriverError::Unsupported(why.to_owned()))?;
        if strikes(&self.host.resume) {
            return Err(asked_for("resume"));
        }
        // The same guest in another process.
        let back = self.put_service(*key, machine.service.clone(), machine.guest.clone());
        if let Err(e) = back.network.enforce(egress) {
            self.machines().insert(*key, machine);
            return Err(e);
        }
        Ok(self.instance(back))
    }

    async fn fork(&self, source: &GenerationKey, children: &[ForkOrder]) -> Result<Forked, DriverError> {
        let machine = self.running(source)?;
        for child in children {
            self.report().enforces(&child.egress.policy).map_err(|why| DriverError::Unsupported(why.to_owned()))?;
        }
        if strikes(&self.host.fork) {
            return Err(asked_for("fork"));
        }
        machine.hang_up();
        let children = children.iter().map(|order| self.child(&machine, order)).collect();
        Ok(Forked { children, memory_bytes: 4096, device_bytes: 1, still_ms: 0 })
    }

    async fn save(&self, key: &GenerationKey, order: &SaveOrder) -> Result<Saving, DriverError> {
        let machine = self.running(key)?;
        if strikes(&self.host.save_host_full) {
            return Err(DriverError::HostFull);
        }
        if strikes(&self.host.save) {
            return Err(asked_for("save"));
        }
        machine.hang_up();
        let guest = machine.guest.as_ref().map(|guest| Arc::new(guest.forked()));
        self.saved().insert(order.snapshot, guest);
        tokio::time::sleep(Duration::from_millis(self.host.save_lasts_ms.load(Ordering::SeqCst).into())).await;
        let memory_bytes = if order.kind == SnapshotKind::Full { 4096 } else { 0 };
        let receipt = SaveReceipt { memory_bytes, disk_bytes: 8192, still_ms: 0 };
        Ok(Saving { durable: Box::pin(std::future::ready(Ok(receipt))) })
    }

    async fn snapshots(&self) -> Result<Vec<SnapshotKey>, DriverError> {
        Ok(self.saved().keys().copied().collect())
    }

    async fn duplicate(&self, from: &SnapshotKey, to: &SnapshotKey) -> Result<(), DriverError> {
        let kept = self.saved().get(from).cloned();
        let kept = kept.ok_or_else(|| DriverError::Damaged("the snapshot is not on this host".to_owned()))?;
        self.saved().insert(*to, kept);
        Ok(())
    }

    async fn forget(&self, snapshot: &SnapshotKey) -> Result<(), DriverError> {
        if strikes(&self.host.forget) {
            return Err(asked_for("forget"));
        }
        self.saved().remove(snapshot);
        Ok(())
    }

    async fn inventory(&self) -> Result<Vec<GenerationKey>, DriverError> {
        Ok(self.machines().keys().copied().collect())
    }

    async fn destroy(&self, key: &GenerationKey) -> Result<(), DriverError> {
        if strikes(&self.host.destroy) {
            return Err(asked_for("destroy"));
        }
        if let Some(machine) = self.machines().remove(key) {
            machine.hang_up();
        }
        Ok(())
    }

    async fn shutdown(&self) {}
}
