//! The root image of a template out of an image of a container: its layers → a tree → erofs.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use mainbrella_oci::{Access, Image, OciError, Source, Watch};
use mainbrella_types::TemplateName;
use rustix::fs::{Mode, OFlags};

use super::error::ImageError;
use super::furnish;
use super::progress::{Event, Progress};
use super::rootfs::{self, FORM, ImageNote, Manifest, STAGE, TREE_DIR, TemplateImage};
use super::shelf::{self, Bench};
use super::{recipe, tool};

/// Form of what is made of an image; a change makes another digest.
const MADE: &[u8] = b"image 2";
/// Largest list of packages that is read from an image, bytes.
const STATUS_MAX: u64 = 32 * 1024 * 1024;
/// Longest removal of a tree.
const REMOVAL: Duration = Duration::from_secs(3600);

/// Tells a build's progress what the fetching of an image says.
struct Told<'a>(&'a dyn Progress);

impl Watch for Told<'_> {
    fn step(&self, text: &str) {
        self.0.event(Event::Step(text));
    }

    fn fraction(&self, part: f32) {
        self.0.event(Event::Fraction(part));
    }

    fn cancelled(&self) -> bool {
        self.0.cancelled()
    }
}

impl From<OciError> for ImageError {
    fn from(e: OciError) -> Self {
        match e {
            OciError::Cancelled => Self::Cancelled,
            OciError::Io { what, source } => Self::io(what, source),
            OciError::Layer { ref source, .. }
                if source.errno.is_some_and(|e| matches!(e, rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT)) =>
            {
                Self::DiskFull
            }
            other => Self::Image(other),
        }
    }
}

/// Makes the image of template `name` and puts it on the shelf.
pub(super) fn build(
    bench: &Bench,
    data: &Path,
    name: &TemplateName,
    source: &Source,
    access: &Access,
    progress: &dyn Progress,
) -> Result<TemplateImage, ImageError> {
    if recipe::named(name.as_str()).is_ok() {
        return Err(ImageError::NameTaken(name.to_string()));
    }
    if super::ImageStore::open(data)?.has_versions(name.as_str()) {
        return Err(ImageError::NameTaken(name.to_string()));
    }
    if name.label().is_some() {
        return Err(ImageError::Labelled(name.to_string()));
    }
    tool::find("mkfs.erofs", "erofs-utils")?;
    if !rootfs::is_root() {
        return Err(ImageError::NotRoot);
    }
    let work = bench.workspace()?;
    let result = build_in(bench, data, work.path(), name, source, access, progress);
    // It may be deeper than what removes directories elsewhere can go.
    clear(&work.path().join(STAGE))?;
    result
}

/// Removes the tree of a build, however deep it is.
pub(super) fn clear(stage: &Path) -> Result<(), ImageError> {
    let dir = match File::open(stage) {
        Ok(dir) => dir,
        Err(e) if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => return Ok(()),
        Err(e) => return Err(ImageError::io("opening the tree of a build", e)),
    };
    match mainbrella_tree::remove(dir.as_fd(), TREE_DIR.as_bytes(), true, Instant::now() + REMOVAL) {
        Err(e) if e.errno != Some(rustix::io::Errno::NOENT) => Err(ImageError::io(
            "removing the tree of a build",
            e.errno.map_or_else(|| std::io::Error::other(e.text), Into::into),
        )),
        _ => Ok(()),
    }
}

fn build_in(
    bench: &Bench,
    data: &Path,
    work: &Path,
    name: &TemplateName,
    source: &Source,
    access: &Access,
    progress: &dyn Progress,
) -> Result<TemplateImage, ImageError> {
    let io = |what: &'static str| move |e: std::io::Error| ImageError::io(what, e);
    let (stage, layers, made) = (work.join(STAGE), work.join("layers"), work.join("made"));
    let tree = stage.join(TREE_DIR);
    for dir in [&stage, &tree, &layers, &made] {
        fs::create_dir(dir).map_err(io("making a directory for the build"))?;
    }
    // An image need not say what its root is like; whatever the umask here is, everybody may look into it then.
    fs::set_permissions(&tree, fs::Permissions::from_mode(0o755)).map_err(io("making a directory for the build"))?;
    let told = Told(progress);
    let image = source.fetch(&layers, access, &told)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = |path: &Path| -> Result<OwnedFd, ImageError> {
        rustix::fs::open(path, flags, Mode::empty()).map_err(|e| ImageError::io("opening the tree", e.into()))
    };
    let laid = image.lay(open(&tree)?, &told)?;
    fs::remove_dir_all(&layers).map_err(io("removing what was fetched"))?;
    for (count, what) in [
        (laid.skipped, "entries of kinds that cannot be made were left out"),
        (laid.attributes_dropped, "attributes were left out"),
    ] {
        if count > 0 {
            progress.event(Event::Line(&format!("{count} {what}")));
        }
    }

    progress.event(Event::Step("Preparing the file system"));
    let root = open(&tree)?;
    furnish::furnish(&root, &image.config).map_err(|e| match e.kind() {
        std::io::ErrorKind::InvalidData => ImageError::malformed(e.to_string()),
        _ => ImageError::io("preparing the file system", e),
    })?;
    if !furnish::has_shell(&root) {
        progress.event(Event::Line(
            "the image has no /bin/sh: its machines run programs, and no commands given as one line",
        ));
    }
    let status = furnish::read(&root, "var/lib/dpkg/status", STATUS_MAX).unwrap_or_default();
    let packages = rootfs::installed(&String::from_utf8_lossy(&status));
    let digest = format!("sha256:{}", shelf::digest_of([MADE, image.digest.to_string().as_bytes()]));

    progress.event(Event::Step("Packing the image"));
    let epoch = laid.newest.max(0).to_string();
    let rootfs = rootfs::pack(bench, &stage, &made, &digest, &epoch, progress)?;
    let Image { name: from, digest: image_digest, config, .. } = image;
    let manifest = Manifest {
        form: FORM,
        name: name.to_string(),
        description: format!("made of {from}"),
        digest: format!("sha256:{}", shelf::digest_file(&rootfs).map_err(io("reading the image"))?),
        bytes: fs::metadata(&rootfs).map_err(io("reading the image"))?.len(),
        recipe_digest: digest,
        suite: String::new(),
        created_ms: shelf::now_ms(),
        packages,
        image: Some(ImageNote { name: from, digest: image_digest.to_string(), config }),
    };
    shelf::write_json(&made.join("manifest.json"), &manifest)?;
    bench.publish(&made, &rootfs::place(data, name))?;
    rootfs::present(data, name).ok_or_else(|| ImageError::malformed("the image was not found after it was made"))
}
