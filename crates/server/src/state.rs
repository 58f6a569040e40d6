//! What every verb can reach.

use std::collections::{HashMap, HashSet};
use std::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use mainbrella_builder::Builds;
use mainbrella_engine::Engine;
use mainbrella_engine::clock::Clock;
use mainbrella_store::Store;
use mainbrella_types::{Millis, SnapshotKey, TemplateName};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::auth::Authenticator;
use crate::config::ServerConfig;
use crate::convert::Traits;
use crate::directory::Directory;
use crate::layers::HostRule;
use crate::previews::Previews;
use crate::signed::UrlSigner;
use crate::vault::Vault;

/// The parts of a running service. Clones share them.
#[derive(Clone)]
pub struct AppState(Arc<Parts>);

/// See [`AppState`].
pub struct Parts {
    /// The configuration.
    pub config: ServerConfig,
    /// Machines of this host.
    pub engine: Engine,
    /// Durable state.
    pub store: Store,
    /// Keys and rates.
    pub auth: Authenticator,
    /// Living machines by slot.
    pub directory: Directory,
    /// Host names a request may come in under.
    pub host_rule: HostRule,
    /// Places for requests in progress.
    pub places: Arc<Semaphore>,
    /// Places for creations in progress.
    pub creations: Arc<Semaphore>,
    /// Templates seen a moment ago.
    pub templates: SeenTemplates,
    /// Makes and checks signed URLs.
    pub signer: UrlSigner,
    /// Seals the secrets of machines.
    pub vault: Vault,
    /// Which tokens lead to which ports.
    pub previews: Previews,
    /// Saves in progress.
    pub saves: SavesUnderWay,
    /// Builds of templates; there once the machines were taken over.
    pub builds: OnceLock<Builds>,
    /// Cancelled when the service begins to end: what would go on for ever ends then.
    pub closing: CancellationToken,
    clock: Arc<dyn Clock>,
}

/// How long a template that was seen is believed to be there.
const SEEN_FOR: Duration = Duration::from_secs(5);

/// What names of templates mean, so that not every create reads their manifests.
#[derive(Debug, Default)]
pub struct SeenTemplates(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    /// Moves with every change, so that what was read before one is not remembered.
    changes: u64,
    names: Option<(Instant, Names)>,
}

/// A template, or a tag, and the template it means.
type Names = HashMap<TemplateName, TemplateName>;

impl SeenTemplates {
    /// What a name meant a moment ago.
    pub(crate) fn meaning(&self, name: &TemplateName) -> Option<TemplateName> {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.names.as_ref().filter(|(at, _)| at.elapsed() < SEEN_FOR)?.1.get(name).cloned()
    }

    /// How often something has changed: asked before looking.
    pub(crate) fn changes(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).changes
    }

    /// Notes which there were after `changes`.
    pub(crate) fn remember(&self, changes: u64, names: Names) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.changes == changes {
            seen.names = Some((Instant::now(), names));
        }
    }

    /// Something has changed.
    pub(crate) fn forget(&self) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.changes += 1;
        seen.names = None;
    }
}

/// Snapshots that are being saved by this process: their intents are not left over.
#[derive(Clone, Debug, Default)]
pub struct SavesUnderWay(Arc<Mutex<HashSet<SnapshotKey>>>);

/// A save in progress, until it is dropped.
pub(crate) struct Saving {
    saves: SavesUnderWay,
    key: SnapshotKey,
}

impl SavesUnderWay {
    pub(crate) fn begin(&self, key: SnapshotKey) -> Saving {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(key);
        Saving { saves: self.clone(), key }
    }

    /// All of them.
    pub(crate) fn all(&self) -> HashSet<SnapshotKey> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn has(&self, key: &SnapshotKey) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(key)
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        self.saves.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
    }
}

impl AppState {
    /// Puts the parts together.
    #[must_use]
    pub fn new(config: ServerConfig, engine: Engine, store: Store, clock: Arc<dyn Clock>) -> Self {
        Self(Arc::new(Parts {
            auth: Authenticator::new(store.clone(), &config),
            directory: Directory::new(engine.clone()),
            host_rule: HostRule::new(config.listen, &config.allowed_hosts),
            places: Arc::new(Semaphore::new(config.max_requests as usize)),
            creations: Arc::new(Semaphore::new(config.max_creating as usize)),
            templates: SeenTemplates::default(),
            signer: UrlSigner::new(&config.data_dir),
            vault: Vault::new(&config.data_dir),
            previews: Previews::new(&config, engine.clone(), Arc::clone(&clock)),
            saves: SavesUnderWay::default(),
            builds: OnceLock::new(),
            closing: CancellationToken::new(),
            config,
            engine,
            store,
            clock,
        }))
    }
}

impl AppState {
    /// A way back to the parts that does not keep them.
    pub(crate) fn downgrade(&self) -> Weak<Parts> {
        Arc::downgrade(&self.0)
    }

    /// See [`Self::downgrade`].
    pub(crate) fn from_parts(parts: Arc<Parts>) -> Self {
        Self(parts)
    }

    /// The clock.
    pub(crate) fn clock(&self) -> Arc<dyn Clock> {
        Arc::clone(&self.clock)
    }
}

impl Deref for AppState {
    type Target = Parts;
    fn deref(&self) -> &Parts {
        &self.0
    }
}

impl Parts {
    /// What the driver gives every machine, as it is now: a trial of the accelerator may end after the start.
    pub(crate) fn traits(&self) -> Traits {
        Traits::of(&self.engine.report(), self.previews.public().is_some())
    }

    /// Lets long replies end when `stop` says so.
    pub fn closes_with(&self, stop: &CancellationToken) {
        let (stop, closing) = (stop.clone(), self.closing.clone());
        tokio::spawn(async move {
            stop.cancelled().await;
            closing.cancel();
        });
    }

    /// The time.
    #[must_use]
    pub fn now(&self) -> Millis {
        self.clock.now()
    }
}
