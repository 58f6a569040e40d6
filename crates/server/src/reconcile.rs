//! What is put right from time to time, without anybody asking.

use std::collections::HashSet;
use std::time::Duration;

use mainbrella_engine::{EngineError, MachineHandle, RecoveryReport};
use mainbrella_store::StoreError;
use mainbrella_types::{MachineState, SnapshotKey};
use tokio_util::sync::CancellationToken;

use crate::builds;
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
    tidy_snapshots(state, true).await;
    builds::open(state).await?;
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
    expire_snapshots(state).await;
    tidy_snapshots(state, false).await;
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

async fn expire_snapshots(state: &AppState) {
    loop {
        match state.store.expire_snapshots(state.now()).await {
            Ok(0) => return,
            Ok(ended) => tracing::info!(ended, "snapshots have expired"),
            Err(e) => {
                tracing::warn!(error = chain(&e), "expired snapshots could not be ended; trying again in a minute");
                return;
            }
        }
    }
}

/// Takes back the intents of saves that nobody carries out any more, and removes from the host what no snapshot on record names.
/// What was acknowledged is never removed here; with `look`, it is said where it is missing.
async fn tidy_snapshots(state: &AppState, look: bool) {
    // The host first: a save is on record before anything of it is on the host.
    let (whole, remains) = match (state.engine.snapshots().await, state.engine.snapshot_remains().await) {
        (Ok(whole), Ok(remains)) => (whole, remains),
        (Err(e), _) | (_, Err(e)) => {
            tracing::warn!(
                internal = e.internal().unwrap_or_default(),
                "the snapshots of this host could not be listed"
            );
            return;
        }
    };
    let rows = match state.store.snapshots_of_host(&state.config.host_name).await {
        Ok(rows) => rows,
        Err(e) => {
            tracing::warn!(error = chain(&e), "the records of snapshots could not be read; trying again in a minute");
            return;
        }
    };
    for row in &rows {
        if !row.saved && !state.saves.has(&row.key) {
            take_back_save(state, row.key).await;
        } else if look && row.saved && !whole.contains(&row.key) {
            tracing::error!(snapshot = %row.key, "a snapshot on record is not on this host; its restores will fail");
        }
    }
    // Templates and builds have snapshots of their own. Each was under way until it was on their lists, so what is on the host and
    // not under way now is on them, or nobody's.
    let under_way = state.saves.all();
    let kept = match builds::kept_snapshots(state).await {
        Ok(kept) => kept,
        Err(e) => {
            tracing::warn!(
                internal = e.internal().unwrap_or_default(),
                "the snapshots of templates are not known; none is removed"
            );
            return;
        }
    };
    let mut named: HashSet<SnapshotKey> = rows.iter().map(|row| row.key).collect();
    named.extend(kept);
    for key in remains.into_iter().filter(|key| !named.contains(key) && !under_way.contains(key)) {
        forget_snapshot(state, key).await;
    }
}

/// Takes back a save that did not become whole, and removes what is on the host of it. One that was acknowledged stays.
pub(crate) async fn take_back_save(state: &AppState, key: SnapshotKey) {
    match state.store.abandon_save(&key).await {
        Ok(true) => forget_snapshot(state, key).await,
        // Acknowledged, or taken back before: then what is left of it is found by name.
        Ok(false) => {}
        Err(e) => tracing::warn!(snapshot = %key, error = chain(&e), "a save could not be taken back; trying again"),
    }
}

/// Removes from the host what is left of a snapshot that is not on record any more. What cannot be removed now is tried again every
/// minute, and that of which a machine is just being made, when it has been.
pub(crate) async fn forget_snapshot(state: &AppState, key: SnapshotKey) {
    match is_needed(state, &key).await {
        Ok(false) => {}
        Ok(true) => return,
        Err(e) => {
            tracing::warn!(snapshot = %key, error = chain(&e), "whether a snapshot is needed is not known; trying again");
            return;
        }
    }
    if let Err(e) = state.engine.forget_snapshot(key).await {
        let internal = e.internal().unwrap_or_default();
        tracing::warn!(snapshot = %key, internal, "a snapshot could not be removed from the host; trying again");
    }
}

/// Whether a machine is being made from a snapshot.
async fn is_needed(state: &AppState, key: &SnapshotKey) -> Result<bool, StoreError> {
    let living = state.store.living(&state.config.host_name).await?;
    Ok(living.iter().any(|m| m.state == MachineState::Creating && m.restored_from.as_ref() == Some(key)))
}
