//! What every verb can reach.

use std::ops::Deref;
use std::sync::Arc;

use mainbrella_engine::Engine;
use mainbrella_engine::clock::Clock;
use mainbrella_store::Store;
use mainbrella_types::Millis;
use tokio::sync::Semaphore;

use crate::auth::Authenticator;
use crate::config::ServerConfig;
use crate::convert::Traits;
use crate::directory::Directory;
use crate::layers::HostRule;

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
    clock: Arc<dyn Clock>,
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
        Traits::of(&self.engine.report())
    }

    /// The time.
    #[must_use]
    pub fn now(&self) -> Millis {
        self.clock.now()
    }
}
