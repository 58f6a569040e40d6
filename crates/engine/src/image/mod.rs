//! Guest images: kernel, initramfs and root file systems, made on this host from Debian packages.
//!
//! Everything here blocks; call it from `spawn_blocking` or a thread of its own. Nothing is installed on
//! the host. Several processes may build at once: one waits for the other. What is half made lies in
//! `tmp/image-*` of the data directory and goes with the build, or at the start of the next one.

mod apt;
mod cpio;
mod elf;
mod error;
mod initramfs;
mod kernel;
mod mirror;
mod modules;
mod progress;
mod shelf;
mod sources;
mod tool;
mod unpack;

pub use error::ImageError;
pub use initramfs::Initramfs;
pub use kernel::GuestKernel;
pub use mirror::Mirror;
pub use progress::{Event, Progress, Silent};

use std::path::{Path, PathBuf};

use shelf::Bench;

const GUEST: &str = "guest";
const TEMPLATES: &str = "templates";

/// The guest images of one data directory.
#[derive(Clone, Debug)]
pub struct ImageStore {
    data: PathBuf,
    mirror: Option<Mirror>,
}

impl ImageStore {
    /// Opens the images of `data_dir`, which is made (for its owner only) when missing.
    ///
    /// # Errors
    /// When the directory cannot be made or found.
    pub fn open(data_dir: &Path) -> Result<Self, ImageError> {
        use std::os::unix::fs::DirBuilderExt;
        let what = || format!("opening the data directory {}", data_dir.display());
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(data_dir)
            .map_err(|e| ImageError::io(what(), e))?;
        let data = std::path::absolute(data_dir).map_err(|e| ImageError::io(what(), e))?;
        Ok(Self { data, mirror: None })
    }

    /// Uses `mirror` in place of the one this host's apt is configured with.
    #[must_use]
    pub fn with_mirror(mut self, mirror: Mirror) -> Self {
        self.mirror = Some(mirror);
        self
    }

    fn mirror(&self, progress: &dyn Progress) -> Result<Mirror, ImageError> {
        match &self.mirror {
            Some(mirror) => Ok(mirror.clone()),
            None => Mirror::of_host(progress),
        }
    }

    /// The guest kernel; fetched the first time (35 MB), at once afterwards.
    ///
    /// # Errors
    /// [`ImageError`] says what to do.
    pub fn kernel(&self, progress: &dyn Progress) -> Result<GuestKernel, ImageError> {
        self.kernel_unless_present(progress, kernel::present)
    }

    /// Fetches the newest guest kernel even when there is one. Templates frozen with the old one are not changed.
    ///
    /// # Errors
    /// [`ImageError`] says what to do.
    pub fn update_kernel(&self, progress: &dyn Progress) -> Result<GuestKernel, ImageError> {
        self.kernel_unless_present(progress, |_| None)
    }

    /// The kernel if it is there already. Touches no network.
    #[must_use]
    pub fn current_kernel(&self) -> Option<GuestKernel> {
        kernel::present(&self.data)
    }

    fn kernel_unless_present(
        &self,
        progress: &dyn Progress,
        present: impl Fn(&Path) -> Option<GuestKernel>,
    ) -> Result<GuestKernel, ImageError> {
        let mut cached = present(&self.data);
        let mut result = cached.take();
        let was_there = result.is_some();
        if result.is_none() {
            let bench = Bench::take(&self.data, GUEST, progress)?;
            // Another build may have made it while this one waited.
            result = present(&self.data);
            if result.is_none() {
                result = Some(kernel::build(&bench, &self.data, &self.mirror(progress)?, progress)?);
            }
        }
        progress.event(Event::Finished { cached: was_there });
        result.ok_or_else(|| ImageError::malformed("no kernel was made"))
    }

    /// The initramfs for `kernel` with the static program at `agent` as its `/init`.
    ///
    /// # Errors
    /// [`ImageError::BadAgent`] when `agent` cannot be a first process; else [`ImageError`] says what to do.
    pub fn initramfs(&self, kernel: &GuestKernel, agent: &Path) -> Result<Initramfs, ImageError> {
        let agent = initramfs::read_agent(agent)?;
        if let Some(found) = initramfs::present(&self.data, kernel, &agent) {
            return Ok(found);
        }
        let bench = Bench::take(&self.data, GUEST, &Silent)?;
        initramfs::build(&bench, &self.data, kernel, &agent)
    }
}
