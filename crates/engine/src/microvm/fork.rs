//! Fork: copies of a running machine.
//!
//! While the source stands still, its devices' state and its own pages are copied, and a fresh overlay is put on top of its
//! disk; what was its overlay goes to [`super::disks`], where source and children read it. Then the source goes on, and
//! each child is made like any other machine, but from that. Nothing of the copy of memory outlives the call. A save
//! ([`super::save`]) is the same without children, and is kept.
//!
//! A disk has at most [`LAYERS_MAX`] former overlays: a machine that has as many is neither forked nor saved before they are put together
//! ([`super::flatten`]).
//!
//! The fresh overlay is `disk.next.qcow2` beside `layers.next.json` until QEMU writes to it; then both get their names. QEMU
//! alone knows on which side of that moment a service died: the disk's uppermost node is named after the layer below it.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::StreamExt;
use mainbrella_types::{GenerationKey, SizeSpec, SnapshotKind};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::boot::{self, QUICK, blocking};
use super::capture::{self, pass};
use super::command_line::LAYERS_MAX;
use super::delta::Delta;
use super::folder::{self, OVERLAY};
use super::freeze::Frozen;
use super::instance::Machine;
use super::launch::hand_over;
use super::pause::{fill, guest_bytes, ms_since};
use super::pool::{Disk, awaken, prepare};
use super::qmp::Qmp;
use super::vmm::{chain, make_overlay};
use super::{Inner, disks, flatten};
use crate::driver::{EgressOrder, ForkOrder};
use crate::error::DriverError;

/// Most children at once.
const CHILDREN_MAX: usize = 64;
/// How many of them are made at a time.
const AT_ONCE: usize = 8;
/// The overlay that is being put on top.
const NEXT: &str = "disk.next.qcow2";

/// Name of the copy of the devices' state.
pub(super) const DEVICE: &str = "device";
/// Name of the copy of memory.
pub(super) const MEMORY: &str = "memory";

/// What machines start from that are not fresh.
pub(super) struct Legacy {
    /// The devices' state, a file.
    pub(super) device: PathBuf,
    /// The pages of memory that are not the template's. `None`: there are none.
    pub(super) memory: Option<Arc<Delta>>,
    /// Former overlays of the disk.
    pub(super) layers: Vec<String>,
    /// What is below them, if not the template's own.
    pub(super) base: Option<PathBuf>,
}

/// What was copied of a machine.
pub(super) struct Copied {
    /// Its disk as it was, the machine's last overlay uppermost.
    pub(super) layers: Vec<String>,
    /// What is below, if not the template's own.
    pub(super) base: Option<PathBuf>,
    /// Its memory, beside the file [`DEVICE`].
    pub(super) memory: Option<Delta>,
    pub(super) still_ms: u64,
}

/// What became of a fork.
pub(super) struct Made {
    pub(super) children: Vec<Result<Arc<Machine>, DriverError>>,
    pub(super) memory_bytes: u64,
    pub(super) device_bytes: u64,
    pub(super) still_ms: u64,
}

fn stage(detail: String) -> DriverError {
    DriverError::Stage { stage: "forking the machine", detail }
}

/// Name of the node above the layer `id`; QEMU takes at most 31 characters, and its file's is one longer.
fn node(id: &str) -> String {
    format!("d{}", id.get(3..).unwrap_or(id))
}

/// The uppermost node of the machine's disk.
async fn top(qmp: &Qmp) -> Result<String, DriverError> {
    Ok(flatten::top(qmp).await?.0)
}

impl Inner {
    /// Forks `source`. On failure there are no children, and the source goes on.
    pub(super) async fn fork(
        self: &Arc<Self>,
        source: &GenerationKey,
        orders: &[ForkOrder],
    ) -> Result<Made, DriverError> {
        if orders.is_empty() || orders.len() > CHILDREN_MAX {
            return Err(DriverError::Unsupported(format!("a fork makes 1 to {CHILDREN_MAX} machines")));
        }
        // A key that is the source's own, or comes twice, would wait for itself.
        let keys: HashSet<_> = orders.iter().map(|o| o.key).chain([*source]).collect();
        if keys.len() <= orders.len() {
            return Err(stage("a key is used once".to_owned()));
        }
        let lock = self.lock(source);
        let _held = lock.lock().await;
        let (machine, qmp) = self.capturable(source).await?;
        let record = &machine.vmm.record;
        let (Some(template), Some(size)) = (record.template(), record.size()) else {
            return Err(stage("its record names no template or size".to_owned()));
        };
        let frozen = self.frozen_kept((&record.frozen, &record.making), &template, size).await?;
        let folder = self.places.tmp.join(format!("fork-{}", uuid::Uuid::now_v7().simple()));
        let copied = {
            let _still = machine.hold_still();
            self.copy(&machine, &qmp, size.spec(), (&folder, SnapshotKind::Full)).await?
        };
        let device = folder.join(DEVICE);
        let device_bytes = fs::metadata(&device).map_err(|e| DriverError::io("measuring a copy", e))?.len();
        let memory_bytes = copied.memory.as_ref().map_or(0, Delta::bytes);
        let memory = copied.memory.map(Arc::new);
        let legacy = Arc::new(Legacy { device, memory, layers: copied.layers, base: copied.base });
        let mut making = Vec::new();
        for order in orders {
            let (inner, order, legacy, frozen) = (self.clone(), order.clone(), legacy.clone(), frozen.clone());
            making.push(super::detached(async move { inner.child(order.key, &order.egress, &legacy, &frozen).await }));
        }
        let children = futures::stream::iter(making).buffered(AT_ONCE).collect().await;
        if let Err(e) = blocking(move || folder::remove(&folder).map_err(|e| DriverError::io("removing", e))).await {
            tracing::warn!(error = %chain(&e), "the copy of a machine is left and will be removed at the next start");
        }
        Ok(Made { children, memory_bytes, device_bytes, still_ms: copied.still_ms })
    }

    /// Puts a fresh overlay on a machine's disk, and copies its memory into the new folder `copy` if that is wanted. The
    /// machine goes on in any case; on failure the folder is gone.
    pub(super) async fn copy(
        self: &Arc<Self>,
        machine: &Arc<Machine>,
        qmp: &Qmp,
        size: SizeSpec,
        (copy, kind): (&Path, SnapshotKind),
    ) -> Result<Copied, DriverError> {
        let io = |e| DriverError::io("preparing a copy", e);
        let id = uuid::Uuid::now_v7().simple().to_string();
        let (inner, place, uid) = (self.clone(), machine.folder.clone(), machine.vmm.record.uid);
        let (disk, of, source, bytes) = (id.clone(), machine.key, machine.clone(), guest_bytes(machine)?);
        let to = copy.to_owned();
        let files = blocking(move || {
            let mut layers = disks::read(&place).map_err(io)?;
            if layers.len() >= LAYERS_MAX {
                return Err(DriverError::Exhausted(format!(
                    "the machine's disk has been through {LAYERS_MAX} forks and saves and is not put together yet"
                )));
            }
            layers.push(disk.clone());
            fs::create_dir(&to).map_err(io)?;
            // Write-only, as QEMU opens it.
            let device = || File::options().write(true).create_new(true).open(to.join(DEVICE)).map_err(io);
            let memory = || capture::room(&source.vmm.process, bytes, &to.join(MEMORY));
            let files = if kind == SnapshotKind::Full { Some((device()?, memory()?)) } else { None };
            inner.disks.add(&disk, &place.join(OVERLAY)).map_err(io)?;
            inner.disks.hold(of, std::slice::from_ref(&disk));
            disks::write_next(&place, &layers).map_err(io)?;
            let overlay = make_overlay(&place, NEXT, size, uid).map_err(io)?;
            Ok((layers, overlay, files))
        });
        let (layers, overlay, files) = match files.await {
            Ok(files) => files,
            Err(e) => {
                self.settle(machine, qmp).await;
                self.forget_copy(copy, &id, &machine.folder);
                return Err(e);
            }
        };
        let upper = node(&id);
        let outcome = match self.add_overlay(qmp, &overlay, &upper).await {
            Ok(()) => self.still(machine, qmp, &upper, files).await,
            Err(e) => Err(e),
        };
        self.settle(machine, qmp).await;
        match outcome {
            Ok((memory, still_ms)) => Ok(Copied { layers, base: folder::base(&machine.folder), memory, still_ms }),
            Err(e) => {
                for name in [upper.clone(), format!("{upper}f")] {
                    // Refused where it was not made, or is in use.
                    let _ = qmp.call("blockdev-del", json!({"node-name": name}), QUICK).await;
                }
                self.forget_copy(copy, &id, &machine.folder);
                Err(e)
            }
        }
    }

    /// Puts the disk's files in order; whatever happened, QEMU knows what is on top.
    async fn settle(&self, machine: &Machine, qmp: &Qmp) {
        if let Err(e) = self.settle_disk(&machine.key, qmp, &machine.folder).await {
            tracing::error!(machine = %machine.key, error = %chain(&e), "the disk of a forked machine is not in order; it cannot be paused or forked");
        }
    }

    /// Removes what a fork prepared and did not use. The disk stays if the source uses it after all.
    fn forget_copy(&self, copy: &Path, id: &str, place: &Path) {
        if let Err(error) = folder::remove(copy) {
            tracing::warn!(%error, "the copy of a machine is left and will be removed at the next start");
        }
        match disks::read(place) {
            Ok(layers) if layers.iter().all(|l| l != id) && !place.join(NEXT).exists() => self.disks.withdraw(id),
            _ => {}
        }
    }

    /// Gives QEMU the fresh overlay, not yet on top of anything.
    async fn add_overlay(&self, qmp: &Qmp, overlay: &File, upper: &str) -> Result<(), DriverError> {
        let set = pass(qmp, overlay).await?;
        // The file by itself: what it belongs to may become read-only in the next fork, and it cannot be opened again.
        let file = json!({
            "driver": "file", "node-name": format!("{upper}f"), "filename": format!("/dev/fdset/{set}"),
            "discard": "unmap",
        });
        let format = json!({
            "driver": "qcow2", "node-name": upper, "file": format!("{upper}f"), "backing": Value::Null,
            "discard": "unmap",
        });
        for node in [file, format] {
            qmp.call("blockdev-add", node, QUICK).await.map_err(|e| stage(chain(&e)))?;
        }
        Ok(())
    }

    /// What is done while the source stands still. `files`: for the devices' state and for memory, where they are copied.
    async fn still(
        self: &Arc<Self>,
        machine: &Arc<Machine>,
        qmp: &Qmp,
        upper: &str,
        files: Option<(File, File)>,
    ) -> Result<(Option<Delta>, u64), DriverError> {
        let bytes = guest_bytes(machine)?;
        let below = top(qmp).await?;
        capture::unlinked(machine, qmp).await?;
        let since = Instant::now();
        let work = async {
            capture::stop(qmp).await?;
            let delta = match files {
                None => None,
                Some((device, memory)) => {
                    capture::device(qmp, &device, false).await?;
                    let of = machine.clone();
                    let copied = blocking(move || {
                        let from = capture::memory(&of.vmm.process, bytes)?;
                        capture::own_memory(&from, bytes, memory)
                    });
                    Some(copied.await?)
                }
            };
            let on_top = json!({"node": below, "overlay": upper});
            qmp.call("blockdev-snapshot", on_top, QUICK).await.map_err(|e| stage(chain(&e)))?;
            Ok(delta)
        };
        let outcome = work.await;
        capture::go_on(machine, qmp).await;
        Ok((outcome?, ms_since(since)))
    }

    /// Makes one child. On failure nothing of it is left.
    async fn child(
        self: &Arc<Self>,
        key: GenerationKey,
        egress: &EgressOrder,
        legacy: &Legacy,
        frozen: &Arc<Frozen>,
    ) -> Result<Arc<Machine>, DriverError> {
        let lock = self.lock(&key);
        let _held = lock.lock().await;
        self.descend(key, egress, legacy, frozen).await
    }

    /// Makes the machine `key`, whose lock is held, from what another one left. On failure nothing of it is left.
    pub(super) async fn descend(
        &self,
        key: GenerationKey,
        egress: &EgressOrder,
        legacy: &Legacy,
        frozen: &Arc<Frozen>,
    ) -> Result<Arc<Machine>, DriverError> {
        let place = self.places.machine(&key);
        if place.exists() {
            return Err(DriverError::Stage { stage: "preparing", detail: "a machine of this key exists".to_owned() });
        }
        self.disks.hold(key, &legacy.layers);
        let group = uuid::Uuid::now_v7().simple().to_string();
        let folder = self.places.waiting.join(&group);
        match self.raise((key, egress), legacy, frozen, (folder.clone(), group.clone()), place).await {
            Ok(machine) => Ok(machine),
            Err(e) => {
                boot::remove(&self.host, &folder, &group).await;
                if let Err(left) = self.remove(&key).await {
                    tracing::error!(machine = %key, error = %chain(&left), "a machine that could not be made was not cleaned up; `destroy` will try again");
                }
                Err(e)
            }
        }
    }

    async fn raise(
        &self,
        (key, egress): (GenerationKey, &EgressOrder),
        legacy: &Legacy,
        frozen: &Arc<Frozen>,
        own: (PathBuf, String),
        place: PathBuf,
    ) -> Result<Arc<Machine>, DriverError> {
        let io = |e| DriverError::io("making a child", e);
        let layers = self.disks.open_all(&legacy.layers).map_err(io)?;
        let base = legacy.base.as_deref().map(File::open).transpose().map_err(io)?;
        let disk = Disk { overlay: None, layers, base };
        let mut prepared = prepare(&self.host, self.current().accelerator, frozen, own, disk).await?;
        disks::write(&prepared.folder, &legacy.layers).map_err(io)?;
        folder::link_base(legacy.base.as_deref(), &prepared.folder).map_err(io)?;
        if let Some(memory) = &legacy.memory {
            fill(&prepared, memory.clone(), u64::from(frozen.class.spec().memory_mib) << 20).await?;
        }
        let device = File::open(&legacy.device).map_err(io)?;
        let network = self.seat_and_load(&mut prepared, Some(&device), egress).await?;
        let prepared = hand_over(prepared, place)?;
        awaken(&prepared).await?;
        Ok(self.take_up(key, prepared, network).await)
    }
}

impl Inner {
    /// Opens what is below the overlay of the machine in `place`, whose layers are `layers`. Blocks.
    pub(super) fn open_below(&self, place: &Path, layers: &[String]) -> Result<Disk, DriverError> {
        let damaged = |e: io::Error| DriverError::Damaged(format!("a layer of its disk: {e}"));
        let base = folder::base(place).map(File::open).transpose().map_err(damaged)?;
        Ok(Disk { overlay: None, layers: self.disks.open_all(layers).map_err(damaged)?, base })
    }

    /// Finishes what a fork that was cut off began with the disk of a machine, or takes it back, as QEMU has it.
    pub(super) async fn settle_disk(&self, key: &GenerationKey, qmp: &Qmp, place: &Path) -> Result<(), DriverError> {
        let io = |e| DriverError::io("putting the disk's files in order", e);
        let next = place.join(NEXT);
        let named = disks::read_next(place).map_err(io)?;
        if !next.exists() && named.is_none() {
            return Ok(());
        }
        let upper = match &named {
            Some(layers) => layers.last().cloned(),
            None => disks::read(place).map_err(io)?.last().cloned(),
        };
        let done = match &upper {
            Some(id) => top(qmp).await? == node(id),
            None => false,
        };
        let place = place.to_owned();
        let layers = blocking(move || {
            if done {
                if next.exists() {
                    fs::rename(&next, place.join(OVERLAY)).map_err(io)?;
                }
                disks::adopt_next(&place).map_err(io)?;
            } else {
                disks::gone_is_fine(fs::remove_file(&next)).map_err(io)?;
                disks::drop_next(&place).map_err(io)?;
            }
            disks::read(&place).map_err(io)
        })
        .await?;
        self.disks.keep_only(key, &layers);
        Ok(())
    }
}
