//! What is put right from time to time, without anybody asking.

use std::time::Duration;

use mainbrella_engine::{EngineError, MachineHandle, RecoveryReport};
use tokio_util::sync::CancellationToken;

use crate::error::chain;
use crate::state::AppState;

const INTERVAL: Duration = Duration::from_secs(60);
/// Calls of the store's sweep in one round; each is bounded itself.
const SWEEPS_MAX: usize = 100;

/// After a start: takes over the machines of this host.
///
/// # Errors
/// When records or host cannot be read; nothing was removed then.
pub async fn recover(state: &AppState) -> Result<RecoveryReport, EngineError> {
    let report = state.engine.recover().await?;
    match state.store.living(&state.config.host_name).await {
        Ok(living) => {
            for handle in living.iter().filter_map(|record| state.directory.handle_of(record)) {
                resume_previews(state, &handle).await;
            }
        }
        // Looks then go to the store first; nothing is lost.
        Err(e) => tracing::warn!(error = chain(&e), "the living machines could not be read again"),
    }
    Ok(report)
}

/// Lets the previews of a machine that was taken over lead to it again.
async fn resume_previews(state: &AppState, handle: &MachineHandle) {
    match state.store.active_previews(&handle.record().key, state.now()).await {
        Ok(active) => active.iter().for_each(|preview| state.previews.admit(preview, handle)),
        Err(e) => tracing::warn!(error = chain(&e), "the previews of a machine could not be read; they lead nowhere"),
    }
}

/// Removes what has expired, now and every minute, until `stop`.
pub async fn run(state: AppState, stop: CancellationToken) {
    let mut timer = tokio::time::interval(INTERVAL);
    timer.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            _ = timer.tick() => round(&state).await,
        }
    }
}

async fn round(state: &AppState) {
    state.auth.tidy();
    state.directory.tidy();
    state.engine.tidy_jobs();
    sweep(state).await;
    sweep_jobs(state).await;
}

/// Removes jobs of machines whose records are gone.
async fn sweep_jobs(state: &AppState) {
    let kept = match state.engine.kept_jobs().await {
        Ok(kept) => kept,
        Err(e) => {
            tracing::warn!(internal = e.internal().unwrap_or_default(), "the kept jobs could not be listed");
            return;
        }
    };
    for key in kept {
        match state.store.machine_by_key(&key).await {
            Ok(Some(_)) => {}
            Ok(None) => state.engine.forget_jobs(key).await,
            Err(e) => {
                tracing::warn!(error = chain(&e), "expired jobs could not be looked up; trying again in a minute");
                return;
            }
        }
    }
}

async fn sweep(state: &AppState) {
    for _ in 0..SWEEPS_MAX {
        match state.store.sweep(state.now()).await {
            Ok(swept) if swept.more => tokio::task::yield_now().await,
            Ok(_) => return,
            Err(e) => {
                tracing::warn!(error = chain(&e), "expired records could not be removed; trying again in a minute");
                return;
            }
        }
    }
}
