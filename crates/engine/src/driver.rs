//! What the engine asks of whatever makes machines: a VMM, a container runtime, a fake.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use futures::future::BoxFuture;
use mainbrella_net::{EgressLog, Explanation, SeatSecrets};
use mainbrella_types::{
    DriverReport, EgressPolicy, GenerationKey, SizeClass, SnapshotKey, SnapshotKind, Target, TemplateName,
};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::error::DriverError;
use crate::machine::Language;

/// One byte stream to the guest agent, as raw as the driver has it; the link preamble and HTTP/2 come on top.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin + 'static {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> ByteStream for T {}
/// A boxed [`ByteStream`].
pub type GuestStream = Box<dyn ByteStream>;

/// What to launch.
#[derive(Clone, Debug)]
pub struct LaunchOrder {
    /// Names every resource made for it.
    pub key: GenerationKey,
    /// The template it starts from.
    pub template: TemplateName,
    /// Its size.
    pub size: SizeClass,
    /// What it may reach. A driver that cannot enforce it refuses.
    pub egress: EgressOrder,
    /// What it starts from instead of the template: a snapshot of a machine of that template and size.
    pub snapshot: Option<SnapshotKey>,
    /// Of a snapshot only the disk, whatever else was saved: its files come back in a machine that was just started.
    pub disk_only: bool,
}

/// What a machine may reach, and where its denials go.
#[derive(Clone, Debug, Default)]
pub struct EgressOrder {
    /// What it may reach.
    pub policy: EgressPolicy,
    /// Takes every denial.
    pub log: Arc<EgressLog>,
    /// What the gateway adds to requests; may be replaced while the machine runs.
    pub secrets: Arc<SeatSecrets>,
}

/// With a log that nobody else reads.
impl From<EgressPolicy> for EgressOrder {
    fn from(policy: EgressPolicy) -> Self {
        Self { policy, ..Self::default() }
    }
}

/// How the process that carried a machine ended, as far as can be known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExitReport {
    /// The guest shut down, rebooted or panicked.
    Guest(String),
    /// The VMM ended by itself or was killed from outside.
    Vmm(String),
    /// The host ran out of disk; the machine was stopped before it could corrupt anything.
    HostFull,
}

impl fmt::Display for ExitReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Guest(why) | Self::Vmm(why) => f.write_str(why),
            Self::HostFull => f.write_str("the host has no disk space left"),
        }
    }
}

/// What was found of a machine after a restart of the service.
pub enum Adoption {
    /// It runs; here it is.
    Running(Box<dyn Instance>),
    /// It is paused, whole, and waits for [`Driver::resume`].
    Paused,
    /// Something of it is left, but it does not run.
    Dead(ExitReport),
    /// Nothing of it is on this host.
    Absent,
}

/// What was kept of a machine that is paused now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PauseReceipt {
    /// Bytes of its memory that are not its template's.
    pub memory_bytes: u64,
    /// Bytes of its devices' state.
    pub device_bytes: u64,
    /// How long its guest stood still before it was safe to end its VMM, ms.
    pub still_ms: u64,
}

/// A machine to make as a copy of another one that runs.
#[derive(Clone, Debug)]
pub struct ForkOrder {
    /// Names every resource made for it.
    pub key: GenerationKey,
    /// What it may reach.
    pub egress: EgressOrder,
}

/// What became of a fork whose source goes on.
pub struct Forked {
    /// The children, in the order they were asked for: each runs, or nothing of it is left.
    pub children: Vec<Result<Box<dyn Instance>, DriverError>>,
    /// Bytes of memory that they do not share with their template.
    pub memory_bytes: u64,
    /// Bytes of the devices' state.
    pub device_bytes: u64,
    /// How long the source stood still, ms.
    pub still_ms: u64,
}

/// What is to be saved of a running machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SaveOrder {
    /// Names everything that is kept.
    pub snapshot: SnapshotKey,
    /// Whether memory is saved beside the disk.
    pub kind: SnapshotKind,
}

/// What was saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SaveReceipt {
    /// Bytes of memory that are not the template's. 0 where memory was not saved.
    pub memory_bytes: u64,
    /// Bytes on disk that the machine had written since it was made, saved or forked before.
    pub disk_bytes: u64,
    /// How long the machine stood still, ms.
    pub still_ms: u64,
}

/// A save whose machine goes on already.
pub struct Saving {
    /// Resolves when all of it is on disk, and outlives the machine and the death of the host; or to why nothing of it is
    /// kept. It is carried out whether or not anybody waits.
    pub durable: BoxFuture<'static, Result<SaveReceipt, DriverError>>,
}

/// A machine that runs.
#[async_trait]
pub trait Instance: Send + Sync {
    /// Opens the byte stream to the guest agent. At most one is open at a time; a new one replaces the old.
    async fn dial(&self) -> Result<GuestStream, DriverError>;
    /// Resolves when the machine has ended by itself. May be called again and then answers at once.
    async fn exited(&self) -> ExitReport;
    /// Its network, where the driver has any say in it.
    fn network(&self) -> Option<&dyn MachineNetwork> {
        None
    }
}

/// The network of a machine that runs.
#[async_trait]
pub trait MachineNetwork: Send + Sync {
    /// Puts the machine under another policy; connections made under the former one end. On failure it reaches nothing
    /// until this succeeds.
    async fn set_egress(&self, order: &EgressOrder) -> Result<(), DriverError>;
    /// Says what would become of a connection under the policy in force, and why.
    async fn explain(&self, target: &Target<'_>, port: u16) -> Explanation;
}

/// Makes machines and removes them.
///
/// Every resource is named by its [`GenerationKey`], so that [`Driver::inventory`] after a crash says
/// whose each one is and [`Driver::destroy`] needs no memory of what was made.
#[async_trait]
pub trait Driver: Send + Sync {
    /// What this driver can do on this host, from probes.
    fn report(&self) -> DriverReport;

    /// Names of the templates that are ready to be launched (in any size).
    async fn templates(&self) -> Result<Vec<TemplateInfo>, DriverError>;

    /// Makes and starts a machine; returns once its VMM runs. May first freeze the template in this
    /// size, once, however many callers wait. On failure nothing is left behind.
    async fn launch(&self, order: &LaunchOrder) -> Result<Box<dyn Instance>, DriverError>;

    /// Finds a machine made before a restart, and puts it under the policy that is on record. When that fails it reaches
    /// nothing.
    async fn adopt(&self, key: &GenerationKey, egress: &EgressOrder) -> Result<Adoption, DriverError>;

    /// Keeps all of a running machine on disk and ends its VMM. Whoever calls has quiesced the guest and closed the link.
    /// When it fails, the machine runs on as it was (quiesced), and nothing is kept. When it succeeds, instances of the
    /// machine are over: [`Instance::exited`] of each resolves. To its end even if the caller gives up.
    async fn pause(&self, key: &GenerationKey) -> Result<PauseReceipt, DriverError> {
        let _ = key;
        Err(DriverError::Unsupported("this driver cannot pause machines".to_owned()))
    }

    /// Brings a paused machine back, quiesced as it was. What was kept is let go once it runs; when it fails, the machine is
    /// paused as before.
    async fn resume(&self, key: &GenerationKey, egress: &EgressOrder) -> Result<Box<dyn Instance>, DriverError> {
        let _ = (key, egress);
        Err(DriverError::Unsupported("this driver cannot resume machines".to_owned()))
    }

    /// Waits, for a bounded time, until a running machine can be copied; it goes on meanwhile. For what has to be made ready before
    /// [`Self::fork`].
    async fn ready_to_fork(&self, source: &GenerationKey) -> Result<(), DriverError> {
        let _ = source;
        Ok(())
    }

    /// Makes copies of a running machine, which stands still only as long as it takes to copy what is its own. Whoever calls
    /// has quiesced the guest and closed the link, and configures source and children afterwards. `Err`: there are no
    /// children, and the source goes on.
    async fn fork(&self, source: &GenerationKey, children: &[ForkOrder]) -> Result<Forked, DriverError> {
        let _ = (source, children);
        Err(DriverError::Unsupported("this driver cannot fork machines".to_owned()))
    }

    /// Saves a running machine under the key of a snapshot; it goes on. Whoever calls has quiesced the guest and closed the
    /// link, and configures the guest afterwards. `Err`: nothing of it is kept.
    async fn save(&self, key: &GenerationKey, order: &SaveOrder) -> Result<Saving, DriverError> {
        let _ = (key, order);
        Err(DriverError::Unsupported("this driver cannot save machines".to_owned()))
    }

    /// Every snapshot of which anything is on this host, whole or not.
    async fn snapshots(&self) -> Result<Vec<SnapshotKey>, DriverError> {
        Ok(Vec::new())
    }

    /// Removes a snapshot. Machines that were started from it go on. Idempotent.
    async fn forget(&self, snapshot: &SnapshotKey) -> Result<(), DriverError> {
        let _ = snapshot;
        Ok(())
    }

    /// Makes a template ready in a size, so that nobody who creates a machine of it waits for that.
    async fn prepare(&self, template: &TemplateName, size: SizeClass) -> Result<(), DriverError> {
        let _ = (template, size);
        Ok(())
    }

    /// The snapshot whose jobs machines of `template` have from the start. `None`: they have none.
    async fn inherited(&self, template: &TemplateName) -> Result<Option<SnapshotKey>, DriverError> {
        let _ = template;
        Ok(None)
    }

    /// Makes the snapshot `to` of all that `from` is made of, checked. `Err`: there is no `to`.
    async fn duplicate(&self, from: &SnapshotKey, to: &SnapshotKey) -> Result<(), DriverError> {
        let _ = (from, to);
        Err(DriverError::Unsupported("this driver cannot save machines".to_owned()))
    }

    /// What everything it keeps takes on disk. Looks at every file.
    async fn disk_use(&self) -> Result<Vec<DiskUse>, DriverError> {
        Ok(Vec::new())
    }

    /// Every machine of which anything exists on this host, whole or not.
    async fn inventory(&self) -> Result<Vec<GenerationKey>, DriverError>;

    /// Ends a machine, paused ones too, and removes all of it. Idempotent; when it returns `Ok`, nothing is left.
    async fn destroy(&self, key: &GenerationKey) -> Result<(), DriverError>;

    /// Lets go of what is held only for speed (waiting VMMs) before the service ends.
    async fn shutdown(&self);
}

/// A part of what a driver keeps on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DiskPart {
    /// Root images of templates.
    Templates,
    /// Templates captured in a size.
    Frozen,
    /// Disks that machines and snapshots share.
    Disks,
    /// What snapshots have for themselves.
    Snapshots,
    /// What machines have for themselves.
    Machines,
    /// Waiting VMMs.
    Waiting,
    /// Logs of jobs.
    Jobs,
    /// Half-made things.
    Temporary,
}

impl DiskPart {
    /// Its wire name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Templates => "templates",
            Self::Frozen => "frozen",
            Self::Disks => "disks",
            Self::Snapshots => "snapshots",
            Self::Machines => "machines",
            Self::Waiting => "waiting",
            Self::Jobs => "jobs",
            Self::Temporary => "temporary",
        }
    }
}

/// What a part takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskUse {
    /// Which.
    pub part: DiskPart,
    /// Things in it.
    pub items: u64,
    /// Bytes on disk that no part before it has counted.
    pub bytes: u64,
}

/// A template as a driver sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateInfo {
    /// Its name.
    pub name: TemplateName,
    /// Digest of its root image, `sha256:…`.
    pub digest: String,
    /// Bytes of its root image.
    pub image_bytes: u64,
    /// Sizes that are already frozen.
    pub frozen: Vec<SizeClass>,
    /// Languages of code contexts whose kernels it brings.
    pub languages: Vec<Language>,
    /// Tags that mean it.
    pub tags: Vec<TemplateName>,
}
