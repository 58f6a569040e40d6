//! Snapshots: a machine is saved, goes on, and others start from what was saved.
//!
//! Saving is a fork without children ([`super::fork`]) whose copy is kept. What is copied while the machine stands still is
//! brought to disk and read for its digests while it goes on; then the folder gets its name, and the snapshot exists.
//!
//! A disk alone cannot be put under the memory of a frozen template: that memory knows the file system of the template's
//! own disk. There is a second frozen template for this, captured before its guest mounted any
//! ([`GuestDisk::Later`]); all saved workspaces of a template and size start from it.

use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::Arc;

use mainbrella_types::{GenerationKey, SnapshotKey};

use super::boot::{BootFiles, blocking};
use super::command_line::GuestDisk;
use super::delta::Delta;
use super::fork::Legacy;
use super::freeze::Frozen;
use super::instance::Machine;
use super::saved::{self, Subject};
use super::vmm::chain;
use super::{Inner, folder};
use crate::driver::{LaunchOrder, SaveOrder, SaveReceipt, Saving};
use crate::error::DriverError;

/// Who holds a snapshot's disks.
pub(super) fn holder(snapshot: &SnapshotKey) -> GenerationKey {
    GenerationKey::new(snapshot.0)
}

fn io(e: std::io::Error) -> DriverError {
    DriverError::io("keeping a snapshot", e)
}

impl Inner {
    /// Saves a machine; it goes on.
    pub(super) async fn save(self: &Arc<Self>, key: &GenerationKey, order: &SaveOrder) -> Result<Saving, DriverError> {
        let lock = self.lock(key);
        let _held = lock.lock().await;
        let (machine, qmp) = self.capturable(key).await?;
        let record = &machine.vmm.record;
        let (Some(template), Some(size)) = (record.template(), record.size()) else {
            return Err(DriverError::Stage {
                stage: "saving",
                detail: "its record names no template or size".to_owned(),
            });
        };
        if self.places.snapshot(&order.snapshot).exists() {
            return Err(DriverError::Stage { stage: "saving", detail: "a snapshot of this key exists".to_owned() });
        }
        let frozen = self.frozen_kept((&record.frozen, &record.making), &template, size).await?;
        let half = self.places.tmp.join(format!("save-{}", order.snapshot));
        let copied = {
            let _still = machine.hold_still();
            self.copy(&machine, &qmp, size.spec(), (&half, order.kind)).await?
        };
        // From here on the machine may end: what it leaves is the snapshot's, too.
        self.disks.hold(holder(&order.snapshot), &copied.layers);
        let receipt = SaveReceipt {
            memory_bytes: copied.memory.as_ref().map_or(0, Delta::bytes),
            disk_bytes: copied.layers.last().map_or(0, |id| self.disks.bytes(id)),
            still_ms: copied.still_ms,
        };
        let linked = {
            let (half, frozen, base) = (half.clone(), frozen.clone(), copied.base.clone());
            blocking(move || link(&half, &frozen, base))
        };
        let linked = linked.await;
        let (inner, order, machine) = (self.clone(), *order, machine.clone());
        let kept = tokio::spawn(async move {
            let done = match linked {
                Ok(()) => inner.keep_saved(&order, &machine, &frozen, &half, copied.layers, copied.memory).await,
                Err(e) => Err(e),
            };
            if let Err(e) = done {
                inner.drop_saved(&order.snapshot, half).await;
                return Err(e);
            }
            Ok(receipt)
        });
        let ended = |e: tokio::task::JoinError| DriverError::Stage { stage: "saving", detail: e.to_string() };
        Ok(Saving { durable: Box::pin(async move { kept.await.map_err(ended)? }) })
    }

    async fn keep_saved(
        self: &Arc<Self>,
        order: &SaveOrder,
        machine: &Arc<Machine>,
        frozen: &Arc<Frozen>,
        half: &std::path::Path,
        layers: Vec<String>,
        memory: Option<Delta>,
    ) -> Result<(), DriverError> {
        let (inner, order, machine, frozen, half) =
            (self.clone(), *order, machine.clone(), frozen.clone(), half.to_owned());
        blocking(move || {
            let r = &machine.vmm.record;
            let subject = Subject {
                kind: order.kind,
                template: &r.template,
                size: &r.size,
                root: &frozen.root_digest,
                frozen: &r.frozen,
                making: &r.making,
            };
            let to = inner.places.snapshot(&order.snapshot);
            saved::publish(&half, &to, (&layers, memory.as_ref()), &subject, (&inner.disks, &inner.known))
        })
        .await
    }

    /// Removes what a save prepared that failed.
    async fn drop_saved(&self, snapshot: &SnapshotKey, half: PathBuf) {
        // Its name may be there already: then only the last sync failed.
        let place = self.places.snapshot(snapshot);
        let removed = blocking(move || folder::remove(&half).and_then(|()| folder::remove(&place)).map_err(io));
        match removed.await {
            Ok(()) => self.disks.release(&holder(snapshot)),
            Err(e) => {
                tracing::warn!(%snapshot, error = %chain(&e), "a snapshot that could not be kept is left; it will be removed at the next start")
            }
        }
    }

    /// Makes a machine from a snapshot. Its key's lock is held.
    pub(super) async fn launch_saved(
        self: &Arc<Self>,
        order: &LaunchOrder,
        snapshot: &SnapshotKey,
    ) -> Result<Arc<Machine>, DriverError> {
        // Nobody removes it meanwhile; any number of machines are made from it at once.
        let guard = self.guard(snapshot);
        let _used = guard.used.read().await;
        let place = self.places.snapshot(snapshot);
        let (manifest, content) = {
            let _looked = guard.looked.lock().await;
            let (inner, place) = (self.clone(), place.clone());
            blocking(move || {
                let manifest = saved::read_manifest(&place)?;
                let content = saved::check(&place, &manifest, &inner.disks, &inner.known)?;
                Ok((manifest, content))
            })
            .await?
        };
        let (template, size) = manifest.names()?;
        if template != order.template || size != order.size {
            return Err(DriverError::Unsupported(format!("the snapshot is of a machine of {template} in size {size}")));
        }
        // The guest's file systems were brought to disk before either kind was saved.
        let running = content.running.filter(|_| !order.disk_only);
        let frozen = match &running {
            Some(_) => self.frozen_kept((&manifest.frozen, &manifest.making), &template, size).await?,
            None => {
                let kept = place.join(saved::ROOT);
                let (inner, name, digest) = (self.clone(), template.clone(), manifest.root.clone());
                let files = blocking(move || match inner.files_of(&name) {
                    Ok(files) if files.root_digest == digest => Ok(files),
                    _ if kept.is_file() => {
                        Ok(BootFiles { root: kept, root_digest: digest, ..inner.images.base_files()? })
                    }
                    Ok(_) => Err(DriverError::Damaged(
                        "its template was built again since, and what it was is not kept".to_owned(),
                    )),
                    Err(e) => Err(e),
                });
                self.frozen_of(&files.await?, &template, size, GuestDisk::Later).await?
            }
        };
        let (device, memory) = match running {
            Some((device, memory)) => (device, Some(memory)),
            None => (frozen.device(), None),
        };
        let legacy = Legacy { device, memory, layers: content.layers, base: Some(content.base) };
        self.descend(order.key, &order.egress, &legacy, &frozen).await
    }

    /// Removes a snapshot.
    pub(super) async fn forget(self: &Arc<Self>, snapshot: &SnapshotKey) -> Result<(), DriverError> {
        let guard = self.guard(snapshot);
        let alone = guard.used.write().await;
        let (place, gone) = (self.places.snapshot(snapshot), self.places.tmp.join(format!("forget-{snapshot}")));
        blocking(move || {
            match fs::rename(&place, &gone) {
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(e) => return Err(io(e)),
                // From here on it is not there, whatever happens to what it held.
                Ok(()) => place.parent().map_or(Ok(()), |p| File::open(p)?.sync_all()).map_err(io)?,
            }
            folder::remove(&gone).map_err(io)
        })
        .await?;
        self.disks.release(&holder(snapshot));
        drop(alone);
        self.forget_guard(snapshot);
        Ok(())
    }
}

/// Gives all that is in the folder of a snapshot a second name in `half`, a new folder. Blocks.
pub(super) fn link_parts(place: &std::path::Path, half: &std::path::Path) -> std::io::Result<()> {
    folder::remove(half)?;
    fs::create_dir(half)?;
    for entry in fs::read_dir(place)? {
        let entry = entry?;
        fs::hard_link(entry.path(), half.join(entry.file_name()))?;
    }
    Ok(())
}

/// Gives base disk and root image a second name in the folder of a snapshot. Blocks.
fn link(half: &std::path::Path, frozen: &Frozen, base: Option<PathBuf>) -> Result<(), DriverError> {
    folder::link_base(Some(&base.unwrap_or_else(|| frozen.base())), half).map_err(io)?;
    if let Err(e) = fs::hard_link(frozen.root(), half.join(saved::ROOT)) {
        tracing::debug!(error = %e, "the root image is not kept with a snapshot; it needs its template as it is");
    }
    Ok(())
}
