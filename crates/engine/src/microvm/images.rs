//! Templates from this host's image store.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};

use mainbrella_types::TemplateName;

use super::boot::BootFiles;
use crate::error::DriverError;
use crate::image::{ImageError, ImageStore};
use crate::machine::Language;

/// Where templates come from. Calls may block.
pub trait Images: Send + Sync + 'static {
    /// The files `template` is booted from. Called on the way of every create: must be quick once it has answered.
    ///
    /// # Errors
    /// `TemplateMissing` when it is not built.
    fn boot_files(&self, template: &TemplateName) -> Result<BootFiles, DriverError>;

    /// Kernel and initramfs, with no root: for a root image that was kept.
    ///
    /// # Errors
    /// When they are not on this host.
    fn base_files(&self) -> Result<BootFiles, DriverError>;

    /// Languages of code contexts whose kernels `template` brings.
    fn languages(&self, template: &TemplateName) -> Vec<Language> {
        let _ = template;
        Vec::new()
    }

    /// Templates that are built: name, digest and size of the root image.
    ///
    /// # Errors
    /// When they cannot be listed.
    fn list(&self) -> Result<Vec<(TemplateName, String, u64)>, DriverError>;
}

/// What tells one state of a file from another without reading it.
type Stamp = (u64, i64, i64, u64);

/// The images of a data directory, with the guest agent that goes into the initramfs.
#[derive(Debug)]
pub struct StoredImages {
    store: ImageStore,
    agent: PathBuf,
    /// Kernel and initramfs stay as they were at first use: agent and service are of one version.
    base: OnceLock<BootFiles>,
    known: Mutex<HashMap<TemplateName, (Stamp, BootFiles)>>,
}

impl StoredImages {
    /// Images of `store`, with the static guest agent at `agent`.
    #[must_use]
    pub fn new(store: ImageStore, agent: PathBuf) -> Self {
        Self { store, agent, base: OnceLock::new(), known: Mutex::default() }
    }

    /// Kernel and initramfs, with an empty root.
    fn base(&self) -> Result<&BootFiles, DriverError> {
        if let Some(base) = self.base.get() {
            return Ok(base);
        }
        let kernel = self.store.current_kernel().ok_or_else(|| {
            DriverError::Unsupported(
                "the guest kernel is not on this host; `mainbrella template build` fetches it".to_owned(),
            )
        })?;
        let initramfs = self.store.initramfs(&kernel, &self.agent).map_err(failed)?;
        let made = BootFiles {
            kernel: kernel.vmlinux,
            kernel_digest: kernel.digest,
            initramfs: initramfs.path,
            initramfs_digest: initramfs.digest,
            root: PathBuf::new(),
            root_digest: String::new(),
        };
        Ok(self.base.get_or_init(|| made))
    }
}

fn failed(e: ImageError) -> DriverError {
    match e {
        ImageError::NotBuilt(name) => DriverError::TemplateMissing(name),
        other => DriverError::Stage { stage: "reading the guest images", detail: other.to_string() },
    }
}

fn stamp(path: &std::path::Path) -> Option<Stamp> {
    fs::metadata(path).ok().map(|m| (m.ino(), m.mtime(), m.mtime_nsec(), m.len()))
}

impl Images for StoredImages {
    fn boot_files(&self, template: &TemplateName) -> Result<BootFiles, DriverError> {
        {
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((then, files)) = known.get(template)
                && stamp(&files.root) == Some(*then)
            {
                return Ok(files.clone());
            }
        }
        let image = self.store.template(template).map_err(failed)?;
        let files = BootFiles { root: image.rootfs, root_digest: image.digest, ..self.base()?.clone() };
        if let Some(now) = stamp(&files.root) {
            self.known.lock().unwrap_or_else(PoisonError::into_inner).insert(template.clone(), (now, files.clone()));
        }
        Ok(files)
    }

    fn base_files(&self) -> Result<BootFiles, DriverError> {
        self.base().cloned()
    }

    fn languages(&self, template: &TemplateName) -> Vec<Language> {
        self.store.template(template).map(|image| image.languages()).unwrap_or_default()
    }

    fn list(&self) -> Result<Vec<(TemplateName, String, u64)>, DriverError> {
        Ok(self.store.templates().into_iter().map(|t| (t.name, t.digest, t.bytes)).collect())
    }
}
