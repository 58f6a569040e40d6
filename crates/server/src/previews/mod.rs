//! The previews of this host's machines: which token leads where, as long as it does.
//!
//! Everything here is made from the store's rows and from living machines; a restart makes it anew. A route is cut when
//! its time is over, when it is revoked, and when its machine begins to end, whichever comes first.

mod secret;

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use mainbrella_engine::clock::Clock;
use mainbrella_engine::{Engine, MachineHandle, PortError};
use mainbrella_preview::{Dial, DialFault, Ingress, Io, NoRoute, Public, Route, Routes, Token};
use mainbrella_store::{PreviewRecord, Store};
use mainbrella_types::{ErrorCode, MachineState, Millis};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use tokio::sync::watch;

use crate::config::ServerConfig;
use crate::error::ApiResult;
use secret::Minter;

/// Longest sleep until the end of a preview is looked at again; the wall clock may be set meanwhile.
const LOOK_MAX: Duration = Duration::from_secs(30);
/// Ended previews that are still told apart from those that never were.
const ENDED_MAX: usize = 10_000;

/// See the module. Clones share it.
#[derive(Clone)]
pub struct Previews(Arc<Inner>);

struct Inner {
    engine: Engine,
    clock: Arc<dyn Clock>,
    minter: Minter,
    /// How the ingress is called from outside; unset while there is none.
    public: OnceLock<Public>,
    tables: Mutex<Tables>,
}

#[derive(Default)]
struct Tables {
    /// By the first bytes of the hash: what is compared after that is compared in constant time.
    by_hash: HashMap<[u8; 8], Vec<Arc<Entry>>>,
    by_id: HashMap<String, Arc<Entry>>,
    /// Hashes of ended ones, oldest first, and the same for looking them up.
    ended: VecDeque<[u8; 32]>,
    over: HashSet<[u8; 32]>,
}

struct Entry {
    hash: [u8; 32],
    route: Arc<Route>,
    expires: watch::Sender<Millis>,
}

fn head(hash: &[u8; 32]) -> [u8; 8] {
    let mut head = [0; 8];
    head.copy_from_slice(&hash[..8]);
    head
}

/// What is kept of a token.
pub(crate) fn hash_of(token: &Token) -> [u8; 32] {
    Sha256::digest(token.expose().as_bytes()).into()
}

impl Previews {
    pub(crate) fn new(config: &ServerConfig, engine: Engine, clock: Arc<dyn Clock>) -> Self {
        Self(Arc::new(Inner {
            engine,
            clock,
            minter: Minter::new(&config.data_dir),
            public: OnceLock::new(),
            tables: Mutex::default(),
        }))
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.0.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on there is an ingress at `address`, called as `config` says. Gives what serves it.
    #[must_use]
    pub fn open(&self, config: &ServerConfig, address: SocketAddr) -> Ingress {
        let https = config.preview_public_https.unwrap_or(config.preview_tls.is_some());
        let public = Public {
            https,
            domain: config.preview_domain.clone(),
            port: config.preview_public_port.unwrap_or(address.port()),
            behind_proxy: config.preview_public_https.is_some() || config.preview_public_port.is_some(),
        };
        let public = self.0.public.get_or_init(|| public).clone();
        Ingress::new(public, Arc::new(self.clone()), Arc::new(self.clone()))
    }

    /// How the ingress is called; `None`: there is none, and nothing new is issued.
    pub(crate) fn public(&self) -> Option<&Public> {
        self.0.public.get()
    }

    /// The token of a preview, which only this service can work out.
    pub(crate) fn token(&self, id: &str) -> ApiResult<Token> {
        self.0.minter.token(id)
    }

    /// Lets a preview lead to its machine, until it ends. One that does already goes on.
    pub(crate) fn admit(&self, record: &PreviewRecord, handle: &MachineHandle) {
        let entry = {
            let mut tables = self.tables();
            if !record.is_active(self.0.clock.now()) || tables.by_id.contains_key(&record.id) {
                return;
            }
            let entry = Arc::new(Entry {
                hash: record.token_hash,
                route: Route::new(record.id.clone(), record.machine, record.port),
                expires: watch::Sender::new(record.expires_at),
            });
            tables.by_hash.entry(head(&entry.hash)).or_default().push(Arc::clone(&entry));
            tables.by_id.insert(record.id.clone(), Arc::clone(&entry));
            entry
        };
        let (previews, gone) = (self.clone(), handle.gone());
        tokio::spawn(async move {
            tokio::select! {
                () = gone.cancelled() => {}
                () = entry.route.cut.cancelled() => {}
                () = previews.expiry(&entry) => {}
            }
            previews.end(&entry.route.id);
        });
    }

    async fn expiry(&self, entry: &Entry) {
        let mut expires = entry.expires.subscribe();
        loop {
            let left = self.0.clock.now().until(*expires.borrow_and_update());
            if left == 0 {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(left).min(LOOK_MAX)) => {}
                _ = expires.changed() => {}
            }
        }
    }

    /// Ends a preview at once, if it leads anywhere.
    pub(crate) fn end(&self, id: &str) {
        let mut tables = self.tables();
        let Some(entry) = tables.by_id.remove(id) else { return };
        entry.route.cut.cancel();
        let key = head(&entry.hash);
        if let Some(same) = tables.by_hash.get_mut(&key) {
            same.retain(|e| !Arc::ptr_eq(e, &entry));
            if same.is_empty() {
                tables.by_hash.remove(&key);
            }
        }
        if tables.ended.len() >= ENDED_MAX
            && let Some(oldest) = tables.ended.pop_front()
        {
            tables.over.remove(&oldest);
        }
        if tables.over.insert(entry.hash) {
            tables.ended.push_back(entry.hash);
        }
    }

    /// As [`Self::admit`], for one that others may revoke meanwhile: what they wrote before it led anywhere counts.
    pub(crate) async fn admit_unless_ended(
        &self,
        store: &Store,
        record: &PreviewRecord,
        handle: &MachineHandle,
    ) -> ApiResult<()> {
        if let Some(entry) = self.tables().by_id.get(&record.id) {
            entry.expires.send_replace(record.expires_at);
        }
        self.admit(record, handle);
        let kept = store.preview(&record.machine, &record.id).await;
        if !matches!(&kept, Ok(Some(kept)) if kept.is_active(self.0.clock.now())) {
            self.end(&record.id);
        }
        kept?;
        Ok(())
    }

    /// How many lead anywhere.
    pub(crate) fn active(&self) -> usize {
        self.tables().by_id.len()
    }
}

#[async_trait]
impl Routes for Previews {
    async fn find(&self, token: &Token) -> Result<Arc<Route>, NoRoute> {
        let hash = hash_of(token);
        let same = |other: &[u8; 32]| bool::from(other.ct_eq(&hash));
        let tables = self.tables();
        let entry = tables.by_hash.get(&head(&hash)).and_then(|all| all.iter().find(|e| same(&e.hash)));
        match entry {
            Some(entry) if *entry.expires.borrow() > self.0.clock.now() => Ok(Arc::clone(&entry.route)),
            Some(_) => Err(NoRoute::Over),
            None if tables.over.contains(&hash) => Err(NoRoute::Over),
            None => Err(NoRoute::Unknown),
        }
    }
}

/// Whether a machine does not run just now and is not at its end.
fn is_paused(machine: &MachineHandle) -> bool {
    matches!(machine.record().state, MachineState::Pausing | MachineState::Paused | MachineState::Resuming)
}

#[async_trait]
impl Dial for Previews {
    async fn dial(&self, route: &Route) -> Result<Box<dyn Io>, DialFault> {
        let machine = self.0.engine.machine(&route.machine).ok_or(DialFault::MachineOver)?;
        match machine.connect_port(route.port).await {
            Ok(connection) => Ok(Box::new(connection)),
            Err(PortError::NothingListens) => Err(DialFault::NothingListens),
            Err(PortError::Failed(e)) => {
                tracing::debug!(preview = route.id, code = %e.code(), internal = e.internal(), "no connection to a port");
                Err(match e.code() {
                    ErrorCode::Overloaded => DialFault::Busy,
                    ErrorCode::MachineNotRunning if is_paused(&machine) => DialFault::MachinePaused,
                    ErrorCode::MachineNotRunning => DialFault::MachineOver,
                    _ => DialFault::Unreachable,
                })
            }
        }
    }
}
