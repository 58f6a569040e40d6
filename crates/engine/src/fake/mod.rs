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
use mainbrella_types::{DriverReport, EgressPolicy, GenerationKey, Isolation, JailReport, SizeClass, TemplateName};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::driver::{
    Adoption, Driver, EgressOrder, ExitReport, GuestStream, Instance, LaunchOrder, MachineNetwork, PauseReceipt,
    TemplateInfo,
};
use crate::error::DriverError;
use crate::machine::Language;
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
    /// Pauses that fail; the machine runs on.
    pub pause: AtomicU32,
    /// Returns from a pause that fail; the machine stays paused.
    pub resume: AtomicU32,
}

/// Takes one fault from a counter; says whether there was one.
fn strikes(counter: &AtomicU32) -> bool {
    counter.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok()
}

struct FakeMachine {
    service: GuestService,
    exit: watch::Sender<Option<ExitReport>>,
    link: Mutex<CancellationToken>,
    network: FakeNetwork,
    /// Nothing of it runs; its guest is as it was.
    paused: AtomicBool,
}

impl FakeMachine {
    fn cut(&self) {
        self.link.lock().unwrap_or_else(PoisonError::into_inner).cancel();
    }
}

/// The driver. Clones share their machines and faults.
#[derive(Clone)]
pub struct FakeDriver {
    machines: Arc<Mutex<HashMap<GenerationKey, Arc<FakeMachine>>>>,
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
            host: Arc::default(),
            guest: Arc::default(),
            ports: FakePorts::default(),
            launch_time,
            templates,
            internet: false,
            snapshots: false,
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

    /// A driver that can pause machines and bring them back.
    #[must_use]
    pub fn with_snapshots(mut self) -> Self {
        self.snapshots = true;
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

    /// Machines of which anything exists.
    #[must_use]
    pub fn alive(&self) -> usize {
        self.machines().len()
    }

    /// Ends a machine from outside, as a killed VMM would.
    pub fn kill(&self, key: &GenerationKey, report: ExitReport) {
        if let Some(machine) = self.machines().get(key) {
            machine.exit.send_replace(Some(report));
            machine.link.lock().unwrap_or_else(PoisonError::into_inner).cancel();
        }
    }

    /// Breaks the byte stream of a machine that goes on, once.
    pub fn cut(&self, key: &GenerationKey) {
        if let Some(machine) = self.machines().get(key) {
            machine.link.lock().unwrap_or_else(PoisonError::into_inner).cancel();
        }
    }

    /// Leaves something on the host that no record owns.
    pub fn litter(&self, key: GenerationKey) {
        self.put(key);
    }

    fn put(&self, key: GenerationKey) -> Arc<FakeMachine> {
        let service = match &self.make_guest {
            Some(make) => make(),
            None => guest_side::service(guest::router(Arc::clone(&self.guest), self.ports.clone(), self.home())),
        };
        let network = FakeNetwork::new(Arc::clone(&self.host.egress));
        let machine = Arc::new(FakeMachine {
            service,
            exit: watch::channel(None).0,
            link: Mutex::default(),
            network,
            paused: AtomicBool::new(false),
        });
        self.machines().insert(key, Arc::clone(&machine));
        machine
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
            return Err(DriverError::Stage { stage: "dial", detail: "a fault was asked for".into() });
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
            fork: false,
        }
    }

    async fn templates(&self) -> Result<Vec<TemplateInfo>, DriverError> {
        Ok(self
            .templates
            .iter()
            .map(|name| TemplateInfo {
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
        if !self.templates.contains(&order.template) {
            return Err(DriverError::TemplateMissing(order.template.to_string()));
        }
        self.report().enforces(&order.egress.policy).map_err(|why| DriverError::Unsupported(why.to_owned()))?;
        if !self.launch_time.is_zero() {
            tokio::time::sleep(self.launch_time).await;
        }
        if strikes(&self.host.launch) {
            return Err(DriverError::Stage { stage: "launch", detail: "a fault was asked for".into() });
        }
        let machine = self.put(order.key);
        if let Err(e) = machine.network.enforce(&order.egress) {
            self.machines().remove(&order.key);
            return Err(e);
        }
        Ok(Box::new(FakeInstance { machine, host: Arc::clone(&self.host), home: self.home() }))
    }

    async fn adopt(&self, key: &GenerationKey, egress: &EgressOrder) -> Result<Adoption, DriverError> {
        let Some(machine) = self.machines().get(key).cloned() else { return Ok(Adoption::Absent) };
        let report = machine.exit.borrow().clone();
        Ok(match report {
            Some(report) => Adoption::Dead(report),
            None if machine.paused.load(Ordering::SeqCst) => Adoption::Paused,
            None => {
                // It fails closed.
                let _ = machine.network.enforce(egress);
                Adoption::Running(Box::new(FakeInstance { machine, host: Arc::clone(&self.host), home: self.home() }))
            }
        })
    }

    async fn inventory(&self) -> Result<Vec<GenerationKey>, DriverError> {
        Ok(self.machines().keys().copied().collect())
    }

    async fn destroy(&self, key: &GenerationKey) -> Result<(), DriverError> {
        if strikes(&self.host.destroy) {
            return Err(DriverError::Stage { stage: "destroy", detail: "a fault was asked for".into() });
        }
        if let Some(machine) = self.machines().remove(key) {
            machine.link.lock().unwrap_or_else(PoisonError::into_inner).cancel();
        }
        Ok(())
    }

    async fn pause(&self, key: &GenerationKey) -> Result<PauseReceipt, DriverError> {
        if strikes(&self.host.pause) {
            return Err(DriverError::HostFull);
        }
        let machine = self.machines().get(key).cloned().ok_or(DriverError::Unsupported("no such machine".into()))?;
        machine.paused.store(true, Ordering::SeqCst);
        machine.cut();
        Ok(PauseReceipt::default())
    }

    async fn resume(&self, key: &GenerationKey, egress: &EgressOrder) -> Result<Box<dyn Instance>, DriverError> {
        if strikes(&self.host.resume) {
            return Err(DriverError::HostFull);
        }
        let machine = self.machines().get(key).cloned().ok_or(DriverError::Unsupported("no such machine".into()))?;
        machine.network.enforce(egress)?;
        machine.paused.store(false, Ordering::SeqCst);
        Ok(Box::new(FakeInstance { machine, host: Arc::clone(&self.host), home: self.home() }))
    }

    async fn shutdown(&self) {}
}
