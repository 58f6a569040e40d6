//! Templates from this host's image store.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use mainbrella_types::{SnapshotKind, TemplateName};

use super::boot::BootFiles;
use super::content::{StartCommand, TemplateContent};
use super::vmm::chain;
use crate::error::DriverError;
use crate::image::{BuiltTemplate, ImageError, ImageStore, Initramfs};
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

    /// Tags that mean the version `template`.
    fn tags(&self, template: &TemplateName) -> Vec<TemplateName> {
        let _ = template;
        Vec::new()
    }

    /// Templates that are built: name, digest and size of the root image.
    ///
    /// # Errors
    /// When they cannot be listed.
    fn list(&self) -> Result<Vec<(TemplateName, String, u64)>, DriverError>;
}

/// The images of a data directory, with the guest agent that goes into the initramfs.
pub struct StoredImages {
    store: ImageStore,
    agent: PathBuf,
    /// The initramfs of this agent and the kernel of that digest: the agent is read and hashed once.
    initramfs: Mutex<Option<(String, Initramfs)>>,
}

impl StoredImages {
    /// Images of `store`, with the static guest agent at `agent`.
    #[must_use]
    pub fn new(store: ImageStore, agent: PathBuf) -> Self {
        Self { store, agent, initramfs: Mutex::default() }
    }
}

fn failed(e: ImageError) -> DriverError {
    match e {
        ImageError::NotBuilt(name) => DriverError::TemplateMissing(name),
        ImageError::DiskFull => DriverError::HostFull,
        other => DriverError::Stage { stage: "reading the guest images", detail: chain(&other) },
    }
}

fn content(template: &BuiltTemplate) -> TemplateContent {
    let made = &template.made;
    let argv = made.settings.start();
    let tcp = |port: &String| port.strip_suffix("/tcp").and_then(|n| n.parse().ok());
    let start = (made.kind == SnapshotKind::Workspace && !argv.is_empty()).then(|| StartCommand {
        argv,
        probe: made.settings.probe.clone(),
        ports: made.settings.ports.iter().filter_map(tcp).collect(),
    });
    TemplateContent {
        snapshot: made.snapshot,
        kind: made.kind,
        size: made.size,
        digest: template.digest.clone(),
        start,
    }
}

impl Images for StoredImages {
    fn boot_files(&self, template: &TemplateName) -> Result<BootFiles, DriverError> {
        let base = || self.base_files();
        if template.version().is_some() {
            let built = self.store.built(template).filter(|b| b.name == *template);
            let built = built.ok_or_else(|| DriverError::TemplateMissing(template.to_string()))?;
            return Ok(BootFiles { content: Some(content(&built)), ..base()? });
        }
        let image = self.store.template(template).map_err(failed)?;
        Ok(BootFiles { root: image.rootfs, root_digest: image.digest, ..base()? })
    }

    fn base_files(&self) -> Result<BootFiles, DriverError> {
        let kernel = self.store.current_kernel().ok_or_else(|| {
            DriverError::Unsupported(
                "the guest kernel is not on this host; `mainbrella template build` fetches it".to_owned(),
            )
        })?;
        let mut known = self.initramfs.lock().unwrap_or_else(PoisonError::into_inner);
        let initramfs = match known.as_ref().filter(|(digest, made)| *digest == kernel.digest && made.path.is_file()) {
            Some((_, made)) => made.clone(),
            None => {
                let made = self.store.initramfs(&kernel, &self.agent).map_err(failed)?;
                *known = Some((kernel.digest.clone(), made.clone()));
                made
            }
        };
        Ok(BootFiles {
            kernel: kernel.vmlinux,
            kernel_digest: kernel.digest,
            initramfs: initramfs.path,
            initramfs_digest: initramfs.digest,
            root: PathBuf::new(),
            root_digest: String::new(),
            content: None,
        })
    }

    fn languages(&self, template: &TemplateName) -> Vec<Language> {
        match self.store.built(template) {
            Some(built) => built.languages(),
            None => self.store.template(template).map(|image| image.languages()).unwrap_or_default(),
        }
    }

    fn list(&self) -> Result<Vec<(TemplateName, String, u64)>, DriverError> {
        let whole = self.store.templates().into_iter().map(|t| (t.name, t.digest, t.bytes));
        let built = self.store.built_all().into_iter().map(|t| (t.name, t.digest, t.made.bytes));
        Ok(whole.chain(built).collect())
    }

    fn tags(&self, template: &TemplateName) -> Vec<TemplateName> {
        self.store.built(template).map(|built| built.tags).unwrap_or_default()
    }
}
