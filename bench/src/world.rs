//! What a group of rows stands on: drivers and services of its own, and the way to be rid of them again.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use mainbrella_client::MachineRef;
use mainbrella_client::api::Machine as ApiMachine;
use mainbrella_engine::driver::{Driver as _, Instance, LaunchOrder};
use mainbrella_engine::image::ImageStore;
use mainbrella_engine::microvm::network::NetworkChoice;
use mainbrella_engine::microvm::{AcceleratorChoice, MicroVm, MicroVmConfig, StoredImages};
use mainbrella_tests::{Machine, Service, Setup, bin_dir, host, link_images, machine_body, program};
use mainbrella_types::{EgressPolicy, GenerationKey, SizeClass, TemplateName};
use tempfile::TempDir;

use crate::Fault;

/// The size of machines unless a group says otherwise.
pub const SIZE: SizeClass = SizeClass::Micro;
/// Longest wait for a waiting VMM.
const POOL_PATIENCE: Duration = Duration::from_secs(60);

/// How many samples, and how large things are.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Creates of each kind.
    pub creates: usize,
    /// Warm commands of each kind.
    pub commands: usize,
    /// Machines whose memory is looked at.
    pub idle: usize,
    /// Machines alive while others are made.
    pub alive: usize,
    /// Creates on the empty and on the full host.
    pub crowded: usize,
    /// Bytes of the file.
    pub file: u64,
    /// Transfers of it in each direction and way.
    pub transfers: usize,
    /// Records of the service with many.
    pub records: usize,
    /// Windows of one second in which requests are counted.
    pub windows: usize,
    /// Pauses and forks of each kind.
    pub snapshots: usize,
}

impl Scale {
    /// What the figures of the README are made with.
    pub const FULL: Self = Self {
        creates: 100,
        commands: 200,
        idle: 8,
        alive: 200,
        crowded: 20,
        file: 1 << 30,
        transfers: 2,
        records: 10_000,
        windows: 10,
        snapshots: 10,
    };
    /// A look that takes a minute or two.
    pub const QUICK: Self = Self {
        creates: 5,
        commands: 10,
        idle: 3,
        alive: 10,
        crowded: 3,
        file: 64 << 20,
        transfers: 1,
        records: 1_000,
        windows: 2,
        snapshots: 2,
    };
}

/// What a group needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Need {
    /// A driver without waiting VMMs.
    Driver,
    /// A driver with one waiting VMM.
    WarmDriver,
    /// The same, whose machines have no network card.
    WarmPlainDriver,
    /// A service without waiting VMMs.
    Service,
    /// A service with one waiting VMM.
    WarmService,
    /// A service whose store holds ten records.
    FewRecords,
    /// A service whose store holds [`Scale::records`].
    ManyRecords,
}

/// A driver in a data directory of its own.
pub struct Rig {
    /// The driver.
    pub driver: Arc<MicroVm>,
    /// Its data directory, gone with it.
    pub dir: TempDir,
}

/// A machine of a [`Rig`].
pub struct Launched {
    /// Its key.
    pub key: GenerationKey,
    /// The way to its agent.
    pub instance: Box<dyn Instance>,
}

impl Rig {
    async fn open(waiting: usize, network: NetworkChoice) -> Result<Self, Fault> {
        let dir = tempfile::Builder::new().prefix("mb-bench-").tempdir()?;
        link_images(dir.path());
        let images = Arc::new(StoredImages::new(ImageStore::open(dir.path())?, bin_dir().join("mainbrella-guest")));
        let config = MicroVmConfig {
            launcher: program(),
            accelerator: AcceleratorChoice::Auto,
            waiting,
            network,
            ..MicroVmConfig::new(dir.path().to_owned())
        };
        let driver = MicroVm::open(config, images).await?;
        let rig = Self { driver, dir };
        rig.driver.freeze(&template(), SIZE).await?;
        Ok(rig)
    }

    /// Launches a machine.
    pub async fn launch(&self) -> Result<Launched, Fault> {
        self.launch_with(EgressPolicy::Off).await
    }

    /// Launches a machine that may reach what `policy` says.
    pub async fn launch_with(&self, policy: EgressPolicy) -> Result<Launched, Fault> {
        self.launch_sized(SIZE, policy).await
    }

    /// Launches a machine of another size.
    pub async fn launch_sized(&self, size: SizeClass, policy: EgressPolicy) -> Result<Launched, Fault> {
        let key = GenerationKey::new(uuid::Uuid::now_v7());
        let order =
            LaunchOrder { key, template: template(), size, egress: policy.into(), snapshot: None, disk_only: false };
        Ok(Launched { key, instance: self.driver.launch(&order).await? })
    }

    /// Waits until a VMM waits.
    pub async fn stocked(&self) -> Result<(), Fault> {
        let until = Instant::now() + POOL_PATIENCE;
        while self.driver.waiting(&template(), SIZE).await == 0 {
            if Instant::now() > until {
                return Err("no VMM waits in the driver".into());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    async fn close(self) -> Result<(), Fault> {
        for key in self.driver.inventory().await? {
            self.driver.destroy(&key).await?;
        }
        self.driver.shutdown().await;
        let left: Vec<String> =
            ["machines", "waiting"].iter().flat_map(|d| host::names_in(&self.dir.path().join(d))).collect();
        if left.is_empty() { Ok(()) } else { Err(format!("left over: {left:?}").into()) }
    }
}

/// Everything that runs.
pub struct World {
    /// How much is measured.
    pub scale: Scale,
    rigs: HashMap<Need, Rig>,
    services: HashMap<Need, Service>,
    /// Data directories of services that were filled beforehand.
    folders: Vec<TempDir>,
}

impl World {
    /// An empty one.
    pub fn new(scale: Scale) -> Self {
        Self { scale, rigs: HashMap::new(), services: HashMap::new(), folders: Vec::new() }
    }

    /// Starts what is needed.
    pub async fn prepare(&mut self, needs: &[Need]) -> Result<(), Fault> {
        for need in needs {
            let setup = Setup { own_group: true, ..Setup::default() };
            match need {
                Need::Driver => drop(self.rigs.insert(*need, Rig::open(0, NetworkChoice::Auto).await?)),
                Need::WarmDriver => drop(self.rigs.insert(*need, Rig::open(1, NetworkChoice::Auto).await?)),
                Need::WarmPlainDriver => drop(self.rigs.insert(*need, Rig::open(1, NetworkChoice::Off).await?)),
                Need::Service => drop(self.services.insert(*need, Service::with(setup).await)),
                Need::WarmService => {
                    let service = self.services.entry(*need).or_insert(Service::with(Setup { pool: 1, ..setup }).await);
                    // VMMs wait for sizes that are in use: this one is from now on.
                    let first = create(service).await?;
                    first.client.stop(&first.name).await?;
                    stocked(service, "python").await?;
                }
                Need::FewRecords | Need::ManyRecords => {
                    let count = if *need == Need::FewRecords { 10 } else { self.scale.records };
                    let dir = tempfile::Builder::new().prefix("mb-bench-").tempdir()?;
                    crate::records::fill(dir.path(), count).await?;
                    let data_dir = Some(dir.path().to_owned());
                    self.folders.push(dir);
                    // One key asks for more than a key usually may.
                    let arguments =
                        ["--rate-per-second", "1000000", "--rate-burst", "1000000"].map(str::to_owned).into();
                    self.services.insert(*need, Service::with(Setup { data_dir, arguments, ..setup }).await);
                }
            }
        }
        Ok(())
    }

    /// A driver that was prepared.
    pub fn rig(&self, need: Need) -> Result<&Rig, Fault> {
        self.rigs.get(&need).ok_or_else(|| format!("{need:?} was not prepared").into())
    }

    /// A service that was prepared.
    pub fn service(&self, need: Need) -> Result<&Service, Fault> {
        self.services.get(&need).ok_or_else(|| format!("{need:?} was not prepared").into())
    }

    /// Ends all of it. Gives back what did not end well.
    pub async fn close(&mut self) -> Vec<String> {
        let mut problems = Vec::new();
        for (need, rig) in self.rigs.drain() {
            if let Err(e) = rig.close().await {
                problems.push(format!("{need:?}: {e}"));
            }
        }
        for (need, service) in self.services.drain() {
            // It panics with its reason, after it has killed what was left.
            if std::panic::AssertUnwindSafe(service.finish()).catch_unwind().await.is_err() {
                problems.push(format!("{need:?} did not end well, see above"));
            }
        }
        self.folders.clear();
        problems
    }
}

/// The template every machine here is made of.
///
/// # Panics
/// Never: the name is a valid one.
pub fn template() -> TemplateName {
    "python".parse().expect("a valid name")
}

/// Creates a machine through the API.
pub async fn create(service: &Service) -> Result<Machine, Fault> {
    let made = service.client().create(&machine_body(), None).await?.machine;
    Ok(attach(service, &made))
}

fn attach(service: &Service, made: &ApiMachine) -> Machine {
    service.attach(MachineRef::from(made))
}

/// Waits until the VMM that waits in a service for machines of `template` is ready: it is recorded, and it has stopped using the processor.
pub async fn stocked(service: &Service, template: &str) -> Result<(), Fault> {
    let until = Instant::now() + POOL_PATIENCE;
    let mut before = None;
    loop {
        if Instant::now() > until {
            return Err("no VMM waits in the service".into());
        }
        let now = waiting_vmm(service.data(), template).and_then(|pid| Some((pid, processor_ticks(pid)?)));
        if now.is_some() && now == before {
            return Ok(());
        }
        before = now;
        tokio::time::sleep(Duration::from_millis(120)).await;
    }
}

fn waiting_vmm(data: &Path, template: &str) -> Option<i32> {
    let waiting: PathBuf = data.join("waiting");
    host::names_in(&waiting).into_iter().find_map(|name| {
        let text = fs::read(waiting.join(name).join("vmm.json")).ok()?;
        let record: serde_json::Value = serde_json::from_slice(&text).ok()?;
        let of = record["template"].as_str()?;
        (of.split(':').next() == Some(template)).then(|| record["pid"].as_i64()?.try_into().ok()).flatten()
    })
}

/// Processor time a process has used, in clock ticks.
fn processor_ticks(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// The same in seconds.
pub fn processor_seconds(pid: i32) -> Result<f64, Fault> {
    let ticks = processor_ticks(pid).ok_or("a process is gone")?;
    Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}
