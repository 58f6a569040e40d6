//! Which files a machine is booted from: the images of the data directory, and the agent beside this program.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use mainbrella_engine::image::{ImageError, ImageStore, Initramfs};
use mainbrella_engine::microvm::{BootFiles, Images};
use mainbrella_engine::{DriverError, Language};
use mainbrella_types::TemplateName;

use crate::error::chain;

/// See the module.
pub(crate) struct HostImages {
    store: ImageStore,
    agent: PathBuf,
    /// The initramfs of this agent and the kernel of that digest: the agent is read and hashed once.
    initramfs: Mutex<Option<(String, Initramfs)>>,
}

impl HostImages {
    pub(crate) fn new(store: ImageStore, agent: PathBuf) -> Self {
        Self { store, agent, initramfs: Mutex::default() }
    }
}

fn failed(e: &ImageError) -> DriverError {
    if matches!(e, ImageError::DiskFull) {
        return DriverError::HostFull;
    }
    DriverError::Stage { stage: "reading the guest image", detail: chain(e) }
}

impl Images for HostImages {
    fn boot_files(&self, template: &TemplateName) -> Result<BootFiles, DriverError> {
        let image = self.store.template(template).map_err(|e| match e {
            ImageError::NotBuilt(name) => DriverError::TemplateMissing(name),
            other => failed(&other),
        })?;
        Ok(BootFiles { root: image.rootfs, root_digest: image.digest, ..self.base_files()? })
    }

    fn base_files(&self) -> Result<BootFiles, DriverError> {
        let kernel = self.store.current_kernel().ok_or_else(|| {
            DriverError::Unsupported(
                "the guest kernel is missing on this host; `mainbrella template build` fetches it".into(),
            )
        })?;
        let mut known = self.initramfs.lock().unwrap_or_else(PoisonError::into_inner);
        let initramfs = match known.as_ref().filter(|(digest, made)| *digest == kernel.digest && made.path.is_file()) {
            Some((_, made)) => made.clone(),
            None => {
                let made = self.store.initramfs(&kernel, &self.agent).map_err(|e| failed(&e))?;
                *known = Some((kernel.digest.clone(), made.clone()));
                made
            }
        };
        Ok(BootFiles {
            kernel: kernel.vmlinux,
            kernel_digest: kernel.digest,
            initramfs: initramfs.path,
            initramfs_digest: initramfs.digest,
            root: std::path::PathBuf::new(),
            root_digest: String::new(),
        })
    }

    fn languages(&self, template: &TemplateName) -> Vec<Language> {
        self.store.template(template).map(|image| image.languages()).unwrap_or_default()
    }

    fn list(&self) -> Result<Vec<(TemplateName, String, u64)>, DriverError> {
        Ok(self.store.templates().into_iter().map(|t| (t.name, t.digest, t.bytes)).collect())
    }
}
