//! What builds stand on, as the service provides it.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use mainbrella_engine::EngineError;
use mainbrella_engine::image::Package;
use mainbrella_recipe::Settings;
use mainbrella_types::{EgressPolicy, SizeClass, SnapshotKey, TemplateName};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// What a template is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BaseKind {
    /// A root image: a shipped template, or one that was imported.
    Image,
    /// A disk that a build made, in the size it was built in.
    Built {
        /// The snapshot of its disk.
        snapshot: SnapshotKey,
        /// The size it was built in.
        size: SizeClass,
    },
    /// A machine with its memory: nothing can be built on it.
    Full,
}

/// A template a recipe may begin with.
#[derive(Clone, Debug)]
pub struct BaseTemplate {
    /// Its name; of a tag the version it points to.
    pub name: TemplateName,
    /// What it is made of.
    pub kind: BaseKind,
    /// Digest of all that its machines are.
    pub digest: String,
    /// What its machines are set to.
    pub settings: Settings,
    /// The template whose root image is at the bottom of it.
    pub origin: TemplateName,
    /// Packages that are known to be in it.
    pub packages: Vec<Package>,
}

/// A step that is cached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedStep {
    /// The machine as it was after it.
    pub snapshot: SnapshotKey,
    /// Bytes it has for itself on the host.
    pub bytes: u64,
    /// When it was made or used last, milliseconds since 1970.
    pub used_ms: i64,
}

/// A version to be.
#[derive(Debug)]
pub struct NewVersion {
    /// The machine as it is at the end.
    pub snapshot: SnapshotKey,
    /// Its size.
    pub size: SizeClass,
    /// Bytes it has for itself on the host.
    pub bytes: u64,
    /// The template whose root image is at the bottom of it.
    pub origin: TemplateName,
    /// What `FROM` says.
    pub base: String,
    /// Digest of that.
    pub base_digest: String,
    /// Text of the recipe.
    pub recipe: String,
    /// All that it depends on, in 64 hexadecimal digits.
    pub key: String,
    /// What its machines are set to.
    pub settings: Settings,
    /// Packages of the base.
    pub packages: Vec<Package>,
    /// Keeps the snapshot from being taken for a leftover until the version is there.
    pub held: Save,
}

/// A version that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// Its name: `app:v3`.
    pub name: TemplateName,
    /// See [`NewVersion::key`].
    pub key: String,
    /// The size it was built in.
    pub size: SizeClass,
    /// Tags that point to it.
    pub tags: Vec<TemplateName>,
    /// When it was made, milliseconds since 1970.
    pub created_ms: i64,
    /// Whether it was built of a recipe.
    pub of_recipe: bool,
}

/// A machine to build in.
#[derive(Clone, Debug)]
pub struct MachineOrder {
    /// The build it is for.
    pub build: String,
    /// The template it starts from, or which the snapshot is of.
    pub template: TemplateName,
    /// Its size.
    pub size: SizeClass,
    /// The snapshot it starts from.
    pub snapshot: Option<SnapshotKey>,
    /// What it may reach.
    pub egress: EgressPolicy,
    /// The longest it may live, milliseconds.
    pub ttl_ms: u64,
}

/// A snapshot's key that is kept free until this is dropped: nobody takes what is there of it for a leftover meanwhile.
pub struct Save {
    /// The key.
    pub key: SnapshotKey,
    _guard: Box<dyn Send + Sync>,
}

impl std::fmt::Debug for Save {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Save").field("key", &self.key).finish_non_exhaustive()
    }
}

impl Save {
    /// `guard` is dropped with it.
    pub fn new(key: SnapshotKey, guard: impl Send + Sync + 'static) -> Self {
        Self { key, _guard: Box::new(guard) }
    }
}

/// Templates, cached steps, snapshots and machines.
#[async_trait]
pub trait Ground: Send + Sync + 'static {
    /// What machines of this host are called by: a template, or a tag's version. `None`: there is none.
    async fn template(&self, name: &TemplateName) -> Result<Option<BaseTemplate>, EngineError>;

    /// Makes the template `name` of an image of a container. Tells what it does through `tell`.
    async fn import(
        &self,
        name: &TemplateName,
        reference: &str,
        tell: mpsc::Sender<String>,
        cancelled: CancellationToken,
    ) -> Result<(), EngineError>;

    /// The versions of a family.
    async fn versions(&self, family: &TemplateName) -> Result<Vec<Version>, EngineError>;

    /// Makes the next version of a family; no tag points to it yet.
    async fn publish(&self, family: &TemplateName, made: NewVersion) -> Result<TemplateName, EngineError>;

    /// Freezes a version in a size: its start command has been run and its probe has succeeded then.
    async fn prepare(&self, version: &TemplateName, size: SizeClass) -> Result<(), EngineError>;

    /// Lets a tag point to a version.
    async fn tag(&self, version: &TemplateName, tag: &TemplateName) -> Result<(), EngineError>;

    /// Removes a version that no tag points to, with all that is its own.
    async fn remove(&self, version: &TemplateName) -> Result<(), EngineError>;

    /// A cached step; it is used now.
    async fn step(&self, key: &str) -> Result<Option<CachedStep>, EngineError>;

    /// Caches a step, in place of what was cached under its key.
    async fn keep_step(&self, key: &str, step: &CachedStep) -> Result<(), EngineError>;

    /// Lets go of a cached step. Its snapshot is for the caller to remove.
    async fn forget_step(&self, key: &str) -> Result<(), EngineError>;

    /// Every cached step.
    async fn steps(&self) -> Result<Vec<(String, CachedStep)>, EngineError>;

    /// A key for a snapshot that is to be made.
    fn begin_save(&self) -> Save;

    /// Removes a snapshot. What cannot be removed now is found and removed later.
    async fn forget_snapshot(&self, snapshot: SnapshotKey);

    /// Makes a machine for a build; it runs when this returns. When it fails there is none.
    async fn machine(&self, order: MachineOrder) -> Result<Arc<dyn Machine>, EngineError>;

    /// Ends every machine that was made for a build, after a restart.
    async fn stop_machines(&self, build: &str) -> Result<(), EngineError>;
}

/// Where a command wrote something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Output {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// A command to run.
#[derive(Clone, Debug)]
pub struct RunOrder {
    /// The command.
    pub argv: Vec<String>,
    /// Its environment.
    pub env: BTreeMap<String, String>,
    /// Where it runs.
    pub workdir: String,
    /// As whom; `None`: root.
    pub user: Option<String>,
    /// The longest it may run, milliseconds.
    pub timeout_ms: u64,
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEnd {
    /// It exited with this code.
    Exited(i32),
    /// This signal ended it.
    Signalled(i32),
    /// Its time was over.
    TimedOut,
}

/// What is at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeKind {
    /// A directory.
    Directory,
    /// Something else.
    Other,
}

/// See [`NodeKind`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// What it is, links followed.
    pub kind: NodeKind,
}

/// A machine that something is built in. It is hostile: whatever it says is bounded and checked by whoever takes it.
#[async_trait]
pub trait Machine: Send + Sync {
    /// Runs a command to its end. What it writes goes to `output` as it comes; when nobody takes it, the command waits.
    async fn run(&self, order: RunOrder, output: mpsc::Sender<(Output, Bytes)>) -> Result<RunEnd, EngineError>;

    /// What is at a path, links followed; `None`: nothing.
    async fn look(&self, path: &str) -> Result<Option<Node>, EngineError>;

    /// At most `most` bytes of a file; `None`: there is no such file.
    async fn read(&self, path: &str, most: u64) -> Result<Option<Vec<u8>>, EngineError>;

    /// Unpacks a tar stream below a directory that is there, with the owners it names.
    async fn unpack(&self, path: &str, tar: BoxStream<'static, io::Result<Bytes>>) -> Result<(), EngineError>;

    /// Removes a file, if it is there.
    async fn remove(&self, path: &str) -> Result<(), EngineError>;

    /// Saves its disk under a snapshot's key; bytes it has for itself. When it fails nothing is kept.
    async fn save(&self, snapshot: SnapshotKey) -> Result<u64, EngineError>;

    /// Ends it. Idempotent.
    async fn stop(&self) -> Result<(), EngineError>;
}
