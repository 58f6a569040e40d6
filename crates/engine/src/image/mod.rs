//! Guest images: kernel, initramfs and root file systems, made on this host from Debian packages.
//!
//! Everything here blocks; call it from `spawn_blocking` or a thread of its own. Nothing is installed on
//! the host. Several processes may build at once: one waits for the other. What is half made lies in
//! `tmp/image-*` of the data directory and goes with the build, or at the start of the next one.

mod apt;
mod built;
mod cpio;
mod elf;
mod error;
mod furnish;
mod import;
mod initramfs;
mod kernel;
mod mirror;
mod modules;
mod progress;
mod recipe;
mod rootfs;
mod shelf;
mod sources;
mod steps;
mod text;
mod tool;
mod unpack;

pub use built::{BuiltProbe, BuiltSettings, BuiltTemplate, NewBuilt};
pub use error::ImageError;
pub use initramfs::Initramfs;
pub use kernel::GuestKernel;
pub use mirror::Mirror;
pub use progress::{Event, Progress, Silent};
pub use recipe::Recipe;
pub use rootfs::{ImageNote, Package, TemplateImage};
pub use steps::CachedStep;

/// Images of containers that templates can be made of.
pub use mainbrella_oci as oci;

use std::path::{Path, PathBuf};

use mainbrella_types::TemplateName;
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
        let mut result = present(&self.data);
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

    /// The recipes that can be built.
    ///
    /// # Errors
    /// When a recipe breaks a rule.
    pub fn recipes(&self) -> Result<Vec<Recipe>, ImageError> {
        recipe::all()
    }

    /// Makes the root image of template `name` if it is missing, if its recipe has changed, or if `force` is set.
    /// An older image stays in use until the new one takes its place, whole.
    ///
    /// # Errors
    /// [`ImageError::UnknownRecipe`] for an unknown name; else [`ImageError`] says what to do.
    pub fn build_template(
        &self,
        name: &str,
        force: bool,
        progress: &dyn Progress,
    ) -> Result<TemplateImage, ImageError> {
        let recipe = recipe::named(name)?;
        let asked = self.fresh(&recipe);
        if let Some(image) = asked.clone().filter(|_| !force) {
            progress.event(Event::Finished { cached: true });
            return Ok(image);
        }
        let bench = Bench::take(&self.data, TEMPLATES, progress)?;
        // Another build may have made it while this one waited; that counts even when forced.
        let image = match self.fresh(&recipe).filter(|now| asked.as_ref() != Some(now)) {
            Some(image) => image,
            None => rootfs::build(&bench, &self.data, &recipe, &self.mirror(progress)?, progress)?,
        };
        progress.event(Event::Finished { cached: false });
        Ok(image)
    }

    fn fresh(&self, recipe: &Recipe) -> Option<TemplateImage> {
        rootfs::present(&self.data, &recipe.name).filter(|image| image.recipe_digest == recipe.digest)
    }

    /// Makes the root image of template `name` out of an image of a container. An older one stays in use until the new one takes
    /// its place, whole.
    ///
    /// # Errors
    /// [`ImageError`] says what to do.
    pub fn import_template(
        &self,
        name: &TemplateName,
        source: &oci::Source,
        access: &oci::Access,
        progress: &dyn Progress,
    ) -> Result<TemplateImage, ImageError> {
        let bench = Bench::take(&self.data, TEMPLATES, progress)?;
        let image = import::build(&bench, &self.data, name, source, access, progress)?;
        progress.event(Event::Finished { cached: false });
        Ok(image)
    }

    /// The image of template `name`.
    ///
    /// # Errors
    /// [`ImageError::NotBuilt`] when there is none, or none that is whole.
    pub fn template(&self, name: &TemplateName) -> Result<TemplateImage, ImageError> {
        rootfs::present(&self.data, name).ok_or_else(|| ImageError::NotBuilt(name.to_string()))
    }

    /// Every image on this host, by name.
    #[must_use]
    pub fn templates(&self) -> Vec<TemplateImage> {
        rootfs::list(&self.data)
    }

    /// Removes the image of template `name`; `false` when there was none. Whoever has it open keeps it until then.
    ///
    /// # Errors
    /// [`ImageError`] says what to do.
    pub fn remove_template(&self, name: &TemplateName, progress: &dyn Progress) -> Result<bool, ImageError> {
        Bench::take(&self.data, TEMPLATES, progress)?.discard(&rootfs::place(&self.data, name))
    }

    /// Removes what builds that died have left in `tmp`, unless somebody is building. For the start of a service,
    /// which must leave `tmp/image-*` alone otherwise.
    ///
    /// # Errors
    /// [`ImageError`] says what to do.
    pub fn sweep(&self) -> Result<(), ImageError> {
        for shelf in [GUEST, TEMPLATES] {
            if let Some(bench) = Bench::try_take(&self.data, shelf)? {
                bench.clear()?;
            }
        }
        Ok(())
    }
}
