//! The service as it runs in production: over the microVM driver, ended by signals.

use std::path::PathBuf;
use std::sync::Arc;

use mainbrella_engine::image::ImageStore;
use mainbrella_engine::microvm::{AcceleratorChoice, MicroVm, MicroVmConfig, StoredImages};
use mainbrella_engine::{Driver, DriverError, SystemClock};

use crate::config::{Accel, ServerConfig};
use crate::error::chain;
use crate::start::{self, StartError};

/// Name of the guest agent beside this program.
const AGENT: &str = "mainbrella-guest";

/// Serves until SIGTERM or SIGINT; machines stay alive. A second signal breaks off what is still in progress.
///
/// The log must have been set up: see [`crate::logging::init`].
///
/// # Errors
/// Why the service did not start, in one sentence.
pub async fn run(config: ServerConfig) -> Result<(), StartError> {
    raise_file_limit();
    let ending = start::on_signals()?;
    let clock = Arc::new(SystemClock);
    let ground = start::prepare(&config, clock.as_ref()).await?;
    let driver = open_driver(&config).await?;
    start::run_with(config, ground, driver, clock, ending).await
}

/// As many open files as the system lets this process have: connections, machines and jobs each hold some. VMMs get a
/// limit of their own.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum
        && let Err(e) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })
    {
        tracing::warn!(error = %e, "the limit of open files could not be raised");
    }
}

async fn open_driver(config: &ServerConfig) -> Result<Arc<dyn Driver>, StartError> {
    let (data_dir, agent) = (config.data_dir.clone(), agent(config)?);
    let opened = tokio::task::spawn_blocking(move || {
        let images = ImageStore::open(&data_dir)?;
        images.sweep()?;
        Ok(StoredImages::new(images, agent))
    });
    let images = opened.await.map_err(|e| StartError::System("opening the images", std::io::Error::other(e)))?;
    let images = images.map_err(|e: mainbrella_engine::image::ImageError| DriverError::Stage {
        stage: "opening the images",
        detail: chain(&e),
    })?;
    let mut setup = MicroVmConfig::new(config.data_dir.clone());
    setup.qemu.clone_from(&config.qemu);
    setup.waiting = config.pool_size as usize;
    setup.network.clone_from(&config.machine_network);
    setup.accelerator = match config.accel {
        Accel::Auto => AcceleratorChoice::Auto,
        Accel::Kvm => AcceleratorChoice::Kvm,
        Accel::Tcg => AcceleratorChoice::Tcg,
    };
    Ok(MicroVm::open(setup, Arc::new(images)).await?)
}

/// The agent that is put into guests.
fn agent(config: &ServerConfig) -> Result<PathBuf, StartError> {
    let agent = match &config.guest_agent {
        Some(path) => path.clone(),
        None => {
            let program =
                std::env::current_exe().map_err(|e| StartError::System("this program's own path is not known", e))?;
            program.with_file_name(AGENT)
        }
    };
    if agent.is_file() { Ok(agent) } else { Err(StartError::NoAgent(agent)) }
}
