//! What a built template is made of: a snapshot that is its own, and what is run when it is frozen.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use mainbrella_types::{SizeClass, SnapshotKey, SnapshotKind, TemplateName};

use super::boot::{BootFiles, blocking};
use super::delta::Delta;
use super::freeze::Frozen;
use super::merged::merge;
use super::pagemap::GuestMemory;
use super::save::{holder, link_parts};
use super::{Inner, folder, saved};
use crate::error::DriverError;
use crate::image::BuiltProbe;

/// What a template that was built, or captured from a machine, is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateContent {
    /// The snapshot.
    pub snapshot: SnapshotKey,
    /// Whether there is memory in it.
    pub kind: SnapshotKind,
    /// The size it was made in.
    pub size: SizeClass,
    /// Digest of the template: covers all of this.
    pub digest: String,
    /// What runs in its machines from the start.
    pub start: Option<StartCommand>,
}

/// A command that is started before a template is captured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartCommand {
    /// The command. Its environment, directory and user are the template's.
    pub argv: Vec<String>,
    /// How to tell that it is ready.
    pub probe: Option<BuiltProbe>,
    /// TCP ports it listens on.
    pub ports: Vec<u16>,
}

/// What a template is frozen from.
pub(super) enum Origin {
    /// Its root image, with an empty disk.
    Root,
    /// A disk; and what is started on it.
    Disk(ContentDisk, Option<StartCommand>),
    /// A machine that ran: nothing is booted.
    Memory {
        disk: ContentDisk,
        device: std::path::PathBuf,
        memory: Arc<Delta>,
        /// What the memory is beside.
        below: Arc<Frozen>,
    },
}

/// The files of a disk.
pub(super) struct ContentDisk {
    base: File,
    layers: Vec<File>,
}

impl Origin {
    /// Writes its disk, if it brings one, as one file of `mib`, in place of what is there. Blocks.
    pub(super) fn write_disk(&self, path: &Path, mib: u32) -> Result<(), DriverError> {
        let (Self::Disk(disk, _) | Self::Memory { disk, .. }) = self else { return Ok(()) };
        let write = || {
            let to = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
            merge(&disk.base, &disk.layers, &to, u64::from(mib) << 20)
        };
        write().map_err(|e| match e.kind() {
            std::io::ErrorKind::InvalidData => DriverError::Damaged(format!("the disk of a template: {e}")),
            _ => DriverError::io("writing the disk of a template", e),
        })
    }
}

/// A memory file, while it is made.
struct MemoryFile(File);

impl GuestMemory for MemoryFile {
    fn read(&self, at: u64, into: &mut [u8]) -> std::io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.0, into, at)
    }

    fn write(&self, at: u64, from: &[u8]) -> std::io::Result<()> {
        std::os::unix::fs::FileExt::write_all_at(&self.0, from, at)
    }
}

/// Writes the memory of a machine, `delta` over that of `below`, into a new file at `path`. Blocks.
pub(super) fn write_memory(below: &Frozen, delta: &Delta, path: &Path) -> Result<(), DriverError> {
    let io = |e| DriverError::io("writing the memory of a template", e);
    let from = File::open(below.memory_file()).map_err(io)?;
    super::sealed_memory::save_sparse(&from, path).map_err(io)?;
    let to = File::options().read(true).write(true).open(path).map_err(io)?;
    delta.apply(&MemoryFile(to)).map_err(super::capture::kept)
}

impl Inner {
    /// What `template` is booted from, found out anew. Blocks.
    pub(super) fn files_of(&self, template: &TemplateName) -> Result<BootFiles, DriverError> {
        let mut files = self.images.boot_files(template)?;
        if let Some(content) = &files.content {
            let place = self.places.snapshot(&content.snapshot);
            files.root_digest = saved::read_manifest(&place)?.root;
            files.root = place.join(saved::ROOT);
        }
        Ok(files)
    }

    /// What a template with these files is frozen from in `class`.
    pub(super) async fn origin(
        self: &Arc<Self>,
        files: &BootFiles,
        template: &TemplateName,
        class: SizeClass,
    ) -> Result<Origin, DriverError> {
        let Some(content) = files.content.clone() else { return Ok(Origin::Root) };
        fits(template, &content, class)?;
        // Nobody removes it meanwhile.
        let guard = self.guard(&content.snapshot);
        let _used = guard.used.read().await;
        let _looked = guard.looked.lock().await;
        let (inner, snapshot) = (self.clone(), content.snapshot);
        let (manifest, parts, disk) = blocking(move || {
            let place = inner.places.snapshot(&snapshot);
            let manifest = saved::read_manifest(&place)?;
            let parts = saved::check(&place, &manifest, &inner.disks, &inner.known)?;
            let open = || {
                let base = File::open(&parts.base)?;
                Ok(ContentDisk { base, layers: inner.disks.open_all(&parts.layers)? })
            };
            let disk = open().map_err(|e| DriverError::io("opening the disk of a template", e))?;
            Ok((manifest, parts, disk))
        })
        .await?;
        match parts.running {
            None => Ok(Origin::Disk(disk, content.start)),
            Some((device, memory)) => {
                let (of, size) = manifest.names()?;
                let below = self.frozen_kept((&manifest.frozen, &manifest.making), &of, size).await?;
                Ok(Origin::Memory { disk, device, memory, below })
            }
        }
    }

    /// Makes the snapshot `to` of all that `from` is made of.
    pub(super) async fn duplicate(self: &Arc<Self>, from: &SnapshotKey, to: &SnapshotKey) -> Result<(), DriverError> {
        let guard = self.guard(from);
        let _used = guard.used.read().await;
        let _looked = guard.looked.lock().await;
        let io = |e| DriverError::io("keeping a snapshot", e);
        let (inner, from, to) = (self.clone(), *from, *to);
        blocking(move || {
            let place = inner.places.snapshot(&from);
            // What is damaged is found before it is kept.
            let manifest = saved::read_manifest(&place)?;
            let parts = saved::check(&place, &manifest, &inner.disks, &inner.known)?;
            let (half, new) = (inner.places.tmp.join(format!("save-{to}")), inner.places.snapshot(&to));
            if new.exists() {
                return Err(DriverError::Stage {
                    stage: "keeping a snapshot",
                    detail: "it is there already".to_owned(),
                });
            }
            inner.disks.hold(holder(&to), &parts.layers);
            let kept = link_parts(&place, &half).and_then(|()| {
                File::open(&half)?.sync_all()?;
                fs::rename(&half, &new)?;
                new.parent().map_or(Ok(()), |parent| File::open(parent)?.sync_all())
            });
            if kept.is_err() {
                match folder::remove(&half).and_then(|()| folder::remove(&new)) {
                    Ok(()) => inner.disks.release(&holder(&to)),
                    Err(error) => {
                        tracing::warn!(%error, "half a snapshot is left; it will be removed at the next start")
                    }
                }
            }
            kept.map_err(io)
        })
        .await
    }
}

/// Refuses sizes that a template cannot be had in.
fn fits(template: &TemplateName, content: &TemplateContent, class: SizeClass) -> Result<(), DriverError> {
    let size = content.size;
    match content.kind {
        SnapshotKind::Full if class != size => Err(DriverError::Unsupported(format!(
            "template {template} was captured from a running machine of size {size} and comes in that size only; ask for size {size}"
        ))),
        SnapshotKind::Workspace if class.spec().disk_mib < size.spec().disk_mib => {
            Err(DriverError::Unsupported(format!(
                "template {template} was built in size {size}; the disk of size {class} is too small for it, ask for {size} or larger"
            )))
        }
        _ => Ok(()),
    }
}
