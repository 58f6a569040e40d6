//! What is kept of a paused machine: `paused/` in its folder, beside its disk. It is made under another name and renamed
//! when all of it is on disk, so it is whole or not there.
//!
//! ```text
//! paused/memory          pages that are not the template's, see [`super::delta`]
//! paused/device          devices' state
//! paused/manifest.json   what they are, and of which template
//! ```

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mainbrella_types::{SizeClass, TemplateName};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::capture::kept;
use super::delta::Delta;
use super::folder::{self, OVERLAY};
use super::pagemap::PAGE;
use crate::error::DriverError;

/// The folder.
const PAUSED: &str = "paused";
/// While it is made.
const HALF: &str = "paused.new";
const MEMORY: &str = "memory";
const DEVICE: &str = "device";
const MANIFEST: &str = "manifest.json";
const VERSION: u32 = 1;
const MANIFEST_BYTES_MAX: u64 = 64 * 1024;

/// What is kept, in words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Manifest {
    version: u32,
    /// Key of the frozen template.
    pub(super) frozen: String,
    /// Which making of it.
    pub(super) making: String,
    /// The template.
    pub(super) template: String,
    /// The size.
    pub(super) size: String,
    memory_bytes: u64,
    memory_digest: String,
    device_bytes: u64,
    device_digest: String,
    disk_bytes: u64,
}

impl Manifest {
    /// Template and size.
    pub(super) fn names(&self) -> Result<(TemplateName, SizeClass), DriverError> {
        match (self.template.parse(), self.size.parse()) {
            (Ok(template), Ok(size)) => Ok((template, size)),
            _ => Err(damaged("its manifest names no template or size")),
        }
    }
}

fn damaged(why: &str) -> DriverError {
    DriverError::Damaged(why.to_owned())
}

/// Whether the machine in `place` is paused.
pub(super) fn is_paused(place: &Path) -> bool {
    place.join(PAUSED).is_dir()
}

/// Removes what a pause that was cut off left.
pub(super) fn remove_half(place: &Path) -> io::Result<()> {
    folder::remove(&place.join(HALF))
}

/// What is being kept.
pub(super) struct Half {
    place: PathBuf,
    half: PathBuf,
}

impl Half {
    /// Begins, in the folder of a machine.
    pub(super) fn new(place: &Path) -> io::Result<Self> {
        remove_half(place)?;
        let half = place.join(HALF);
        fs::create_dir(&half)?;
        Ok(Self { place: place.to_owned(), half })
    }

    /// A new file for the devices' state.
    pub(super) fn device(&self) -> io::Result<File> {
        // Write-only, as QEMU opens it.
        File::options().write(true).create_new(true).open(self.half.join(DEVICE))
    }

    /// A new file for memory.
    pub(super) fn memory(&self) -> io::Result<File> {
        File::options().read(true).write(true).create_new(true).open(self.half.join(MEMORY))
    }

    /// Brings everything to disk, the machine's own disk with it, and writes the manifest last. `names`: frozen key, making,
    /// template, size. Returns how many bytes the devices' state has.
    pub(super) fn finish(&self, delta: &Delta, names: [&str; 4], layers: &[PathBuf]) -> Result<u64, DriverError> {
        let io = |what: &'static str| move |e| DriverError::io(what, e);
        let memory_digest = hex::encode(delta.seal().map_err(kept)?);
        delta.file().sync_all().map_err(io("syncing the memory delta"))?;
        let device = fs::read(self.half.join(DEVICE)).map_err(io("reading the devices' state"))?;
        File::open(self.half.join(DEVICE)).and_then(|f| f.sync_all()).map_err(io("syncing the devices' state"))?;
        let disk = File::open(self.place.join(OVERLAY)).map_err(io("opening the disk"))?;
        disk.sync_all().map_err(io("syncing the disk"))?;
        for layer in layers {
            File::open(layer).and_then(|f| f.sync_all()).map_err(io("syncing the disk"))?;
        }
        let [frozen, making, template, size] = names.map(str::to_owned);
        let manifest = Manifest {
            version: VERSION,
            frozen,
            making,
            template,
            size,
            memory_bytes: delta.bytes(),
            memory_digest,
            device_bytes: device.len() as u64,
            device_digest: hex::encode(Sha256::digest(&device)),
            disk_bytes: disk.metadata().map_err(io("measuring the disk"))?.len(),
        };
        let text =
            serde_json::to_vec_pretty(&manifest).map_err(|e| DriverError::io("writing the manifest", e.into()))?;
        let path = self.half.join(MANIFEST);
        fs::write(&path, text).and_then(|()| File::open(path)?.sync_all()).map_err(io("writing the manifest"))?;
        File::open(&self.half).and_then(|f| f.sync_all()).map_err(io("syncing what is kept"))?;
        Ok(manifest.device_bytes)
    }

    /// From now on the machine is paused; also after the death of the host.
    pub(super) fn publish(&self) -> Result<(), DriverError> {
        let to = self.place.join(PAUSED);
        fs::rename(&self.half, &to).map_err(|e| DriverError::io("publishing what is kept", e))?;
        let Err(e) = File::open(&self.place).and_then(|f| f.sync_all()) else { return Ok(()) };
        match fs::rename(&to, &self.half) {
            Ok(()) => Err(DriverError::io("syncing the machine's folder", e)),
            Err(back) => {
                tracing::error!(error = %e, back = %back, "a paused machine may not survive the death of the host");
                Ok(())
            }
        }
    }

    /// Removes it again.
    pub(super) fn abandon(&self) {
        if let Err(error) = folder::remove(&self.half) {
            tracing::warn!(%error, "something of a failed pause is left and will be removed at the next start");
        }
    }
}

/// What is kept, ready to be used.
#[derive(Debug)]
pub(super) struct Kept {
    /// The pages.
    pub(super) delta: Arc<Delta>,
    /// The devices' state, at its beginning.
    pub(super) device: File,
    /// Bytes of guest memory.
    pub(super) guest_bytes: u64,
}

/// The manifest of the paused machine in `place`.
pub(super) fn read_manifest(place: &Path) -> Result<Manifest, DriverError> {
    let path = place.join(PAUSED).join(MANIFEST);
    let io = |e| DriverError::io("reading what was kept", e);
    match fs::metadata(&path) {
        Ok(m) if m.len() <= MANIFEST_BYTES_MAX => {}
        Ok(_) => return Err(damaged("its manifest is too long")),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(damaged("it has no manifest")),
        Err(e) => return Err(io(e)),
    }
    let text = fs::read(&path).map_err(io)?;
    let manifest: Manifest = serde_json::from_slice(&text).map_err(|_| damaged("its manifest cannot be read"))?;
    if manifest.version != VERSION {
        return Err(damaged("its manifest is of another version"));
    }
    Ok(manifest)
}

/// Opens what is kept in `place` and checks all of it.
pub(super) fn open(place: &Path, manifest: &Manifest) -> Result<Kept, DriverError> {
    let io = |e: io::Error| match e.kind() {
        io::ErrorKind::NotFound => damaged("a file of it is missing"),
        _ => DriverError::io("reading what was kept", e),
    };
    let (_, size) = manifest.names()?;
    let at = place.join(PAUSED);
    let bytes = fs::read(at.join(DEVICE)).map_err(io)?;
    if bytes.len() as u64 != manifest.device_bytes || hex::encode(Sha256::digest(&bytes)) != manifest.device_digest {
        return Err(damaged("its devices' state is damaged"));
    }
    if fs::metadata(place.join(OVERLAY)).map_err(io)?.len() < manifest.disk_bytes {
        return Err(damaged("its disk was cut"));
    }
    let file = File::open(at.join(MEMORY)).map_err(io)?;
    let guest_bytes = u64::from(size.spec().memory_mib) << 20;
    let (delta, digest) = Delta::open(file, guest_bytes / PAGE).map_err(kept)?;
    if hex::encode(digest) != manifest.memory_digest || delta.bytes() != manifest.memory_bytes {
        return Err(damaged("its memory is another machine's"));
    }
    Ok(Kept { delta: Arc::new(delta), device: File::open(at.join(DEVICE)).map_err(io)?, guest_bytes })
}
