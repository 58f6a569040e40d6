//! What every verb can reach.

use std::collections::HashSet;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

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
    /// Cancelled when the service begins to end: what would go on for ever ends then.
    pub closing: CancellationToken,
    clock: Arc<dyn Clock>,
}

/// How long a template that was seen is believed to be there.
const SEEN_FOR: Duration = Duration::from_secs(5);

/// Names of templates, so that not every create reads their manifests.
#[derive(Debug, Default)]
pub struct SeenTemplates(Mutex<Option<(Instant, HashSet<TemplateName>)>>);

impl SeenTemplates {
    /// Whether a template was there a moment ago.
    pub(crate) fn is_fresh(&self, name: &TemplateName) -> bool {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.as_ref().is_some_and(|(at, names)| at.elapsed() < SEEN_FOR && names.contains(name))
    }

    /// Notes which there are now.
    pub(crate) fn remember(&self, names: impl Iterator<Item = TemplateName>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), names.collect()));
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
            closing: CancellationToken::new(),
            config,
            engine,
            store,
            clock,
        }))
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
