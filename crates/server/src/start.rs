//! From a configuration and a driver to a running service, and to its end.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mainbrella_engine::{Clock, Driver, DriverError, Engine, EngineConfig, EngineError};
use mainbrella_preview::{Tls, TlsError};
use mainbrella_store::{Store, StoreError};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::auth::admin_key::{self, AdminKey, AdminKeyError};
use crate::config::{ConfigErrors, ServerConfig};
use crate::error::chain;
use crate::journal::StoreJournal;
use crate::lock::{DataDirLock, LockError};
use crate::serve::{Ending, serve};
use crate::state::AppState;
use crate::vault::Vault;
use crate::{reconcile, verbs};

/// Why the service did not start. Each says in one sentence what to do.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration has mistakes.
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// The data directory cannot be made or written.
    #[error("the data directory {} cannot be used: {source}; choose another with --data-dir, or correct its permissions", .path.display())]
    DataDir {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Another service has the data directory.
    #[error("another service is using {}; stop it first, or choose another --data-dir", .0.display())]
    AlreadyRunning(PathBuf),
    /// The port is taken.
    #[error("{0} is taken by another program; stop it, or choose another address with --listen")]
    PortBusy(SocketAddr),
    /// The address cannot be listened on.
    #[error("{address} cannot be listened on: {source}; choose another address with --{flag}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What it is set with.
        flag: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The port of the previews is taken.
    #[error("{0}, for previews, is taken by another program; choose another address with --preview-listen, or `off`")]
    PreviewPortBusy(SocketAddr),
    /// The certificate of the previews cannot be used.
    #[error("{}; correct --preview-tls-cert and --preview-tls-key", chain(.0))]
    Tls(#[from] TlsError),
    /// The database cannot be opened.
    #[error("{}", chain(.0))]
    Store(#[from] StoreError),
    /// The first key cannot be made.
    #[error("{}", chain(.0))]
    AdminKey(#[from] AdminKeyError),
    /// The driver cannot work on this host.
    #[error("{}; `mainbrella doctor` says what is missing", chain(.0))]
    Driver(#[from] DriverError),
    /// There is no agent to put into guests.
    #[error("the guest agent {} is missing; put it there, or name it with --guest-agent", .0.display())]
    NoAgent(PathBuf),
    /// What was running before could not be looked at.
    #[error("{0}")]
    Recover(String),
    /// The system refused something else.
    #[error("{0}: {1}")]
    System(&'static str, #[source] io::Error),
}

/// A data directory that this process holds, and what is in it.
pub struct Ground {
    /// Kept until the end.
    _lock: DataDirLock,
    /// The listener; connections wait until the service is ready.
    listener: TcpListener,
    /// The same for previews, with TLS where it is asked for.
    previews: Option<(TcpListener, Option<Tls>)>,
    /// Durable state.
    pub store: Store,
    /// What was done about the first key.
    pub admin_key: AdminKey,
}

/// Takes the data directory, the address and the database, in the order in which each can fail fast.
///
/// # Errors
/// What is in the way.
pub async fn prepare(config: &ServerConfig, clock: &dyn Clock) -> Result<Ground, StartError> {
    let path = &config.data_dir;
    make_data_dir(path).map_err(|source| StartError::DataDir { path: path.clone(), source })?;
    let lock = DataDirLock::take(path).map_err(|e| match e {
        LockError::Held => StartError::AlreadyRunning(path.clone()),
        LockError::Io(source) => StartError::DataDir { path: path.clone(), source },
    })?;
    let listener = TcpListener::bind(config.listen).await.map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => StartError::PortBusy(config.listen),
        _ => StartError::Listen { address: config.listen, flag: "listen", source },
    })?;
    let previews = match config.preview_listen {
        Some(address) => Some(listen_for_previews(config, address).await?),
        None => None,
    };
    let store = match &config.database {
        Some(url) => Store::open(&url.0, clock.now()).await?,
        None => Store::open_sqlite(&path.join("mainbrella.sqlite"), clock.now()).await?,
    };
    let admin_key = admin_key::ensure(&store, path, clock.now()).await?;
    Ok(Ground { _lock: lock, listener, previews, store, admin_key })
}

async fn listen_for_previews(
    config: &ServerConfig,
    address: SocketAddr,
) -> Result<(TcpListener, Option<Tls>), StartError> {
    let tls = config.preview_tls.as_ref().map(|(certificates, key)| Tls::load(certificates, key)).transpose()?;
    let listener = TcpListener::bind(address).await.map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => StartError::PreviewPortBusy(address),
        _ => StartError::Listen { address, flag: "preview-listen", source },
    })?;
    Ok((listener, tls))
}

fn make_data_dir(path: &Path) -> io::Result<()> {
    match std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
        Err(e) => return Err(e),
    }
    let mode = std::fs::metadata(path)?.permissions().mode();
    if mode & 0o022 != 0 {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode & 0o7755))?;
    }
    Ok(())
}

/// Runs a service over `driver` until `ending`.
///
/// Machines stay alive when it ends; the next service takes them over.
///
/// # Errors
/// When what was running before cannot be looked at.
pub async fn run_with(
    config: ServerConfig,
    ground: Ground,
    driver: Arc<dyn Driver>,
    clock: Arc<dyn Clock>,
    ending: Ending,
) -> Result<(), StartError> {
    let Ground { _lock, listener, previews, store, admin_key } = ground;
    let journal = Arc::new(StoreJournal::new(store.clone(), config.host_name.clone(), Vault::new(&config.data_dir)));
    let limits = EngineConfig {
        machines_max: config.max_machines as usize,
        jobs_dir: Some(config.data_dir.join("jobs")),
        ..EngineConfig::default()
    };
    let engine = Engine::new(driver, journal, clock.clone(), limits);
    let state = AppState::new(config, engine, store, clock);
    let recovered = reconcile::recover(&state).await.map_err(|e| StartError::Recover(told(&e)))?;
    let report = state.engine.report();
    let address = listener.local_addr().map_err(|e| StartError::System("the listener has no address", e))?;
    tracing::info!(
        %address,
        version = env!("CARGO_PKG_VERSION"),
        data = %state.config.data_dir.display(),
        driver = report.driver,
        vmm = report.vmm,
        isolation = report.isolation.as_str(),
        reason = report.accelerator_reason,
        adopted = recovered.adopted,
        completed = recovered.completed,
        failed = recovered.failed,
        ended = recovered.ended,
        removed = recovered.removed,
        "serving"
    );
    if admin_key == AdminKey::Made {
        tracing::info!(file = %admin_key::path(&state.config.data_dir).display(), "the first API key was made");
    }

    state.closes_with(&ending.stop);
    let reconciler = tokio::spawn(reconcile::run(state.clone(), ending.stop.clone()));
    let ingress = match previews {
        Some((listener, tls)) => {
            let address = listener.local_addr().map_err(|e| StartError::System("the listener has no address", e))?;
            let ingress = state.previews.open(&state.config, address);
            let max = state.config.preview_max_connections as usize;
            tracing::info!(%address, domain = state.config.preview_domain, tls = tls.is_some(), active = state.previews.active(), "serving previews");
            Some(tokio::spawn(mainbrella_preview::serve(listener, ingress, tls, max, ending.stop.clone())))
        }
        None => None,
    };
    let app = verbs::router(state.clone());
    let (connections, grace) = (state.config.max_connections as usize, state.config.shutdown_grace);
    if !serve(listener, app, connections, grace, ending.clone()).await {
        tracing::warn!("requests still in progress were broken off");
    }
    ending.stop.cancel();
    let _ = reconciler.await;
    if let Some(ingress) = ingress {
        let _ = ingress.await;
    }
    if let Some(builds) = state.builds.get() {
        builds.close().await;
    }
    state.engine.shutdown().await;
    state.store.close().await;
    tracing::info!("ended; machines keep running");
    Ok(())
}

/// The public sentence and the internal context: this error goes to the operator.
fn told(e: &EngineError) -> String {
    match e.internal() {
        Some(internal) => format!("{}: {internal}", e.message()),
        None => e.message().to_owned(),
    }
}

/// Turns SIGTERM and SIGINT into an ending: the first asks to finish, the second to stop at once.
///
/// # Errors
/// When the signals cannot be listened for.
pub fn on_signals() -> Result<Ending, StartError> {
    let failed = |e| StartError::System("signals cannot be listened for", e);
    let mut term = signal(SignalKind::terminate()).map_err(failed)?;
    let mut int = signal(SignalKind::interrupt()).map_err(failed)?;
    let ending = Ending::default();
    let told = ending.clone();
    tokio::spawn(async move {
        for step in [&told.stop, &told.abort] {
            tokio::select! {
                _ = term.recv() => {}
                _ = int.recv() => {}
            }
            tracing::info!("asked to end");
            step.cancel();
        }
    });
    Ok(ending)
}
