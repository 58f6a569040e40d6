//! Pause and resume: a machine goes to disk and comes back.
//!
//! Each has one moment at which the machine changes over, and whoever dies at any other leaves it on one side of that. A
//! pause changes over when `paused/` gets its name, while the VMM stands still; a VMM found beside it is ended. A resume
//! makes a new VMM in a folder of its own among the waiting ones, and changes over when the two folders are exchanged, after
//! all is loaded and before the guest runs.
//!
//! A waiting VMM is of no use here: it has answered once, so its memory and disk are not the template's any more, and QEMU
//! takes incoming state only once. The new one is started while what was kept is being checked.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::Arc;

use mainbrella_types::GenerationKey;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use tokio::time::Instant;

use super::boot::{self, blocking};
use super::capture::status;
use super::delta::Delta;
use super::disks;
use super::folder::{self, AGENT_SOCKET, CONSOLE_LOG, OVERLAY, QMP_SOCKET, RECORD, VMM_LOG};
use super::instance::Machine;
use super::paused::{self, Half, Kept};
use super::pool::{Disk, Prepared, awaken, discard, prepare};
use super::qmp::Qmp;
use super::vmm::chain;
use super::{Inner, capture};
use crate::driver::{EgressOrder, ExitReport, PauseReceipt};
use crate::error::DriverError;

/// Bytes of guest memory of a machine.
pub(super) fn guest_bytes(machine: &Machine) -> Result<u64, DriverError> {
    let size = machine
        .vmm
        .record
        .size()
        .ok_or(DriverError::Stage { stage: "capturing the machine", detail: "its record names no size".to_owned() })?;
    Ok(u64::from(size.spec().memory_mib) << 20)
}

/// Milliseconds since `then`.
pub(super) fn ms_since(then: Instant) -> u64 {
    u64::try_from(then.elapsed().as_millis()).unwrap_or(u64::MAX)
}

impl Inner {
    /// A machine that may be captured, with its control channel.
    pub(super) async fn capturable(&self, key: &GenerationKey) -> Result<(Arc<Machine>, Arc<Qmp>), DriverError> {
        if let Some(why) = &self.keeps_nothing {
            return Err(DriverError::Unsupported(format!(
                "the data directory's file system cannot keep machines: {why}"
            )));
        }
        let machine = self.machines().get(key).cloned().filter(|m| !m.vmm.process.ended());
        let machine = machine.ok_or(DriverError::WrongState("the machine does not run"))?;
        if machine.vmm.record.making.is_empty() {
            return Err(DriverError::Unsupported("the machine was made by a release that could not pause".to_owned()));
        }
        let qmp = machine.qmp().ok_or(DriverError::Stage {
            stage: "capturing the machine",
            detail: "its control channel is lost".to_owned(),
        })?;
        capture::running(&qmp).await?;
        self.stop_flattening(&qmp).await?;
        self.settle_disk(key, &qmp, &machine.folder).await?;
        self.settle_layers(key, &qmp, &machine.folder).await?;
        Ok((machine, qmp))
    }

    /// Pauses a machine. On failure it runs on.
    pub(super) async fn pause(self: &Arc<Self>, key: &GenerationKey) -> Result<PauseReceipt, DriverError> {
        let lock = self.lock(key);
        let _held = lock.lock().await;
        let (machine, qmp) = self.capturable(key).await?;
        let still = machine.hold_still();
        let half = Half::new(&machine.folder).map_err(|e| DriverError::io("keeping the machine", e))?;
        let half = Arc::new(half);
        let receipt = match self.keep(&machine, &qmp, &half).await {
            Ok(receipt) => receipt,
            Err(e) => {
                half.abandon();
                capture::go_on(&machine, &qmp).await;
                return Err(e);
            }
        };
        drop((qmp, still));
        machine.let_be();
        if let Err(e) = self.end_vmm(key).await {
            // It stands still for ever and has nothing that anybody needs but its seat.
            tracing::error!(machine = %key, error = %chain(&e), "the VMM of a paused machine does not end; `destroy` and `resume` will try again");
            self.reserved().extend(machine.take_seat().map(|seat| (*key, seat)));
        }
        self.machines().remove(key);
        machine.leave_network().await;
        machine.release_seat();
        machine.over(ExitReport::Vmm("the machine was paused".to_owned()));
        Ok(receipt)
    }

    /// Stops the machine and keeps all of it. When this is `Ok` it is paused.
    async fn keep(
        self: &Arc<Self>,
        machine: &Arc<Machine>,
        qmp: &Qmp,
        half: &Arc<Half>,
    ) -> Result<PauseReceipt, DriverError> {
        let io = |e| DriverError::io("keeping the machine", e);
        let bytes = guest_bytes(machine)?;
        let file = half.device().map_err(io)?;
        capture::unlinked(machine, qmp).await?;
        let since = Instant::now();
        capture::stop(qmp).await?;
        capture::device(qmp, &file, true).await?;
        drop(file);
        let (inner, machine, half) = (self.clone(), machine.clone(), half.clone());
        blocking(move || {
            let memory = capture::memory(&machine.vmm.process, bytes)?;
            let delta = capture::own_memory(&memory, bytes, half.memory().map_err(io)?)?;
            let layers: Vec<_> =
                disks::read(&machine.folder).map_err(io)?.iter().map(|id| inner.disks.path(id)).collect();
            let r = &machine.vmm.record;
            let device_bytes = half.finish(&delta, [&r.frozen, &r.making, &r.template, &r.size], &layers)?;
            half.publish()?;
            Ok(PauseReceipt { memory_bytes: delta.bytes(), device_bytes, still_ms: ms_since(since) })
        })
        .await
    }

    /// Brings a paused machine back. On failure it is paused as before.
    pub(super) async fn resume(
        self: &Arc<Self>,
        key: &GenerationKey,
        egress: &EgressOrder,
    ) -> Result<Arc<Machine>, DriverError> {
        let lock = self.lock(key);
        let _held = lock.lock().await;
        let place = self.places.machine(key);
        if self.machines().contains_key(key) {
            return Err(DriverError::WrongState("the machine runs"));
        }
        if !paused::is_paused(&place) {
            return Err(DriverError::WrongState("the machine is not paused"));
        }
        self.end_vmm(key).await?;
        self.reserved().remove(key);
        let (manifest, (below, layers)) = {
            let (place, inner) = (place.clone(), self.clone());
            blocking(move || {
                let layers = disks::read(&place).map_err(|e| DriverError::Damaged(e.to_string()))?;
                Ok((paused::read_manifest(&place)?, (inner.open_below(&place, &layers)?, layers)))
            })
            .await?
        };
        let (template, size) = manifest.names()?;
        let frozen = self.frozen_kept((&manifest.frozen, &manifest.making), &template, size).await?;
        // Two names: after the exchange a clean-up of the folder must not reach for the group.
        let [name, group] = [(); 2].map(|()| uuid::Uuid::now_v7().simple().to_string());
        let folder = self.places.waiting.join(name);
        let disk = Disk { overlay: Some(place.join(OVERLAY)), ..below };
        let checked = {
            let (place, manifest) = (place.clone(), manifest.clone());
            blocking(move || paused::open(&place, &manifest))
        };
        let own = (folder.clone(), group.clone());
        let started = prepare(&self.host, self.current().accelerator, &frozen, own, disk);
        let (mut prepared, kept) = match tokio::join!(started, checked) {
            (Ok(prepared), Ok(kept)) => (prepared, kept),
            (Ok(prepared), Err(e)) => {
                discard(&self.host, prepared).await;
                return Err(e);
            }
            (Err(e), _) => {
                boot::remove(&self.host, &folder, &group).await;
                return Err(e);
            }
        };
        match self.bring_back(&place, &mut prepared, kept, &layers, egress).await {
            Ok(network) => {
                let machine = self.take_up(*key, Prepared { folder: place, ..prepared }, network).await;
                // It holds what the machine was before.
                let removed = blocking(move || folder::remove(&folder).map_err(|e| DriverError::io("removing", e)));
                if let Err(e) = removed.await {
                    tracing::warn!(machine = %key, error = %chain(&e), "what was kept of a machine that runs again is left and will be removed at the next start");
                }
                Ok(machine)
            }
            // Never with what was kept in it.
            Err(e) if paused::is_paused(&prepared.folder) => {
                tracing::error!(machine = %key, error = %chain(&e), "a machine is neither back nor paused as it was");
                Err(e)
            }
            Err(e) => {
                discard(&self.host, prepared).await;
                Err(e)
            }
        }
    }

    /// Loads what was kept into a VMM and lets it run as the machine in `place`. On failure the machine is as it was, and the
    /// VMM in its own folder.
    async fn bring_back(
        &self,
        place: &Path,
        prepared: &mut Prepared,
        kept: Kept,
        layers: &[String],
        egress: &EgressOrder,
    ) -> Result<Option<mainbrella_net::Seat>, DriverError> {
        fill(prepared, kept.delta, kept.guest_bytes).await?;
        let network = self.seat_and_load(prepared, Some(&kept.device), egress).await?;
        match (change_over(place, prepared, layers).await, network) {
            (Ok(()), network) => Ok(network),
            (Err(e), None) => Err(e),
            (Err(e), Some(network)) => {
                network.close().await;
                Err(e)
            }
        }
    }
}

/// Makes the folder of a VMM that is loaded the machine's, and lets it run.
async fn change_over(place: &Path, prepared: &Prepared, layers: &[String]) -> Result<(), DriverError> {
    let io = |e| DriverError::io("making the machine's folder its new VMM's", e);
    let (to, from, layers) = (place.to_owned(), prepared.folder.clone(), layers.to_vec());
    let exchanged = blocking(move || {
        disks::write(&from, &layers).map_err(io)?;
        folder::link_base(folder::base(&to).as_deref(), &from).map_err(io)?;
        exchange(&from, &to).map_err(io)?;
        // Before its disk changes, or what is kept could be found again after the death of the host, beside a newer disk.
        sync_parents(&from, &to).map_err(io)
    });
    let Err(e) = (match exchanged.await {
        Ok(()) => awaken(prepared).await,
        Err(e) => Err(e),
    }) else {
        return Ok(());
    };
    if !paused::is_paused(&prepared.folder) {
        return Err(e);
    }
    // Once it has run, its disk is not the one that was kept.
    match status(&prepared.qmp).await.as_deref() {
        Some("running") => return Ok(()),
        Some(_) => {}
        None => return Err(e),
    }
    let (to, from) = (place.to_owned(), prepared.folder.clone());
    blocking(move || {
        exchange(&from, &to).map_err(io)?;
        if let Err(error) = sync_parents(&from, &to) {
            tracing::warn!(%error, "a paused machine may not survive the death of the host");
        }
        Ok(())
    })
    .await?;
    Err(e)
}

/// Writes a machine's own pages into the memory of a VMM whose devices' state is not loaded yet. What is not written stays
/// shared with the template.
pub(super) async fn fill(prepared: &Prepared, delta: Arc<Delta>, guest_bytes: u64) -> Result<(), DriverError> {
    let process = prepared.vmm.record.process().map_err(|e| DriverError::io("reaching the VMM", e))?;
    blocking(move || {
        let memory = capture::memory(&process, guest_bytes)?;
        delta.apply(&memory).map_err(capture::kept)
    })
    .await
}

/// Exchanges two folders, in one moment.
fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    Ok(renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)?)
}

fn sync_parents(a: &Path, b: &Path) -> io::Result<()> {
    [a, b].iter().filter_map(|folder| folder.parent()).try_for_each(|parent| File::open(parent)?.sync_all())
}

/// Whether the file system of `tmp` can do what pause, resume and fork need of it.
pub(super) fn probe(tmp: &Path) -> io::Result<()> {
    let trial = tempfile::Builder::new().prefix("fork-trial-").tempdir_in(tmp)?;
    let [a, b] = ["a", "b"].map(|name| trial.path().join(name));
    fs::create_dir(&a)?;
    fs::create_dir(&b)?;
    File::create(a.join(OVERLAY))?;
    fs::hard_link(a.join(OVERLAY), b.join("link"))?;
    exchange(&a, &b)
}

/// Puts the folder of a paused machine in order after a restart: no VMM, none of its files. Blocks.
pub(super) fn settle(place: &Path) -> io::Result<()> {
    if let Some(process) = folder::read_record(place)?.and_then(|r| r.process().ok()) {
        process.kill()?;
        let until = std::time::Instant::now() + boot::QUICK;
        while !process.ended() {
            if std::time::Instant::now() > until {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "the VMM of a paused machine does not end"));
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
    forget_vmm(place)
}

/// Removes what a VMM that is gone left in its machine's folder, which stays.
pub(super) fn forget_vmm(place: &Path) -> io::Result<()> {
    for name in [RECORD, AGENT_SOCKET, QMP_SOCKET, CONSOLE_LOG, VMM_LOG] {
        match fs::remove_file(place.join(name)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    Ok(())
}
