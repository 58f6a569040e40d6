//! The guest kernel: Debian's cloud kernel, fetched and verified by apt, taken apart, never installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::apt::Apt;
use super::error::ImageError;
use super::mirror::Mirror;
use super::modules::{Library, WANTED};
use super::progress::{Event, Progress};
use super::shelf::{self, Bench};
use super::tool::Tool;
use super::unpack;

/// The release guests are made of.
pub(super) const SUITE: &str = "trixie";
/// Stands for the newest kernel.
const METAPACKAGE: &str = "linux-image-cloud-amd64";
/// Form of the kernel directory; a change makes it anew.
const FORM: u32 = 1;
const UNPACK: Duration = Duration::from_secs(5 * 60);
/// File of the module list inside `modules/`.
pub(super) const ORDER: &str = "order";

/// A kernel on this host, with the modules a machine needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestKernel {
    /// Its release, e.g. `6.12.48+deb13-cloud-amd64`.
    pub version: String,
    /// Version of the Debian package it came from.
    pub package_version: String,
    /// The uncompressed ELF file; boots by PVH.
    pub vmlinux: PathBuf,
    /// Directory of the unpacked modules (`*.ko`) and of `order`: their file names, one a line, in load order.
    pub modules: PathBuf,
    /// `sha256:` and the digest over kernel and modules.
    pub digest: String,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    form: u32,
    wanted: String,
    version: String,
    package: String,
    package_version: String,
    digest: String,
    vmlinux_bytes: u64,
    modules: Vec<String>,
    created_ms: i64,
}

/// Says which modules are wanted; another list makes another directory.
fn wanted() -> String {
    let words = WANTED.iter().map(|(name, required)| format!("{name}{}", if *required { "!" } else { "" }));
    words.collect::<Vec<_>>().join(" ")
}

/// The kernel in `data` that was made last, if it is whole and made as we make them now.
pub(super) fn present(data: &Path) -> Option<GuestKernel> {
    let dirs = fs::read_dir(data.join("guest")).ok()?;
    let mut newest: Option<(i64, GuestKernel)> = None;
    for dir in dirs.flatten().map(|entry| entry.path()) {
        let Some(manifest) = shelf::read_json::<Manifest>(&dir.join("manifest.json")) else { continue };
        let vmlinux = dir.join("vmlinux");
        let whole = manifest.form == FORM
            && manifest.wanted == wanted()
            && fs::metadata(&vmlinux).is_ok_and(|m| m.len() == manifest.vmlinux_bytes);
        if whole && newest.as_ref().is_none_or(|(at, _)| manifest.created_ms > *at) {
            let modules = dir.join("modules");
            let Manifest { version, package_version, digest, .. } = manifest;
            newest = Some((manifest.created_ms, GuestKernel { version, package_version, vmlinux, modules, digest }));
        }
    }
    newest.map(|(_, kernel)| kernel)
}

/// Fetches the newest kernel and puts it on the shelf.
pub(super) fn build(
    bench: &Bench,
    data: &Path,
    mirror: &Mirror,
    progress: &dyn Progress,
) -> Result<GuestKernel, ImageError> {
    let work = bench.workspace()?;
    let io = |what: &'static str| move |e: std::io::Error| ImageError::io(what, e);

    progress.event(Event::Step("Reading the Debian package lists"));
    let lists = work.path().join("apt");
    let apt = Apt::update(&lists, mirror, SUITE, progress)?;
    let (package, package_version) = apt.resolve(METAPACKAGE, "linux-image-", progress)?;

    progress.event(Event::Step("Downloading the guest kernel"));
    let deb = apt.download(&package, &package_version, &work.path().join("deb"), progress)?;

    progress.event(Event::Step("Unpacking the guest kernel"));
    let tree = work.path().join("tree");
    Tool::new("dpkg-deb", "dpkg", UNPACK)?.arg("-x").arg(&deb).arg(&tree).run(progress)?;
    let (version, vmlinuz) = boot_image(&tree)?;
    let packed = fs::read(vmlinuz).map_err(io("reading the boot image"))?;
    let kernel = unpack::vmlinux(&packed)?;
    let library = ["usr/lib/modules", "lib/modules"].map(|d| tree.join(d).join(&version));
    let library = library
        .iter()
        .find(|d| d.is_dir())
        .ok_or_else(|| ImageError::malformed("the kernel package has no modules"))?;
    let modules = Library::open(library)?.pick(WANTED)?;

    let made = work.path().join("made");
    fs::create_dir_all(made.join("modules")).map_err(io("making the kernel's directory"))?;
    fs::write(made.join("vmlinux"), &kernel).map_err(io("writing the kernel"))?;
    let mut order = String::new();
    for module in &modules {
        fs::write(made.join("modules").join(&module.file), &module.bytes).map_err(io("writing a kernel module"))?;
        order.push_str(&module.file);
        order.push('\n');
    }
    fs::write(made.join("modules").join(ORDER), &order).map_err(io("writing the module list"))?;
    let parts = modules.iter().flat_map(|m| [m.file.as_bytes(), &m.bytes[..]]);
    let digest = format!("sha256:{}", shelf::digest_of([&kernel[..]].into_iter().chain(parts)));
    let manifest = Manifest {
        form: FORM,
        wanted: wanted(),
        version: version.clone(),
        package,
        package_version: package_version.clone(),
        digest: digest.clone(),
        vmlinux_bytes: kernel.len() as u64,
        modules: modules.into_iter().map(|m| m.file).collect(),
        created_ms: shelf::now_ms(),
    };
    shelf::write_json(&made.join("manifest.json"), &manifest)?;
    let place = data.join("guest").join(&version);
    bench.publish(&made, &place)?;
    Ok(GuestKernel { version, package_version, vmlinux: place.join("vmlinux"), modules: place.join("modules"), digest })
}

/// The kernel's release and boot image in an unpacked package.
fn boot_image(tree: &Path) -> Result<(String, PathBuf), ImageError> {
    let entries = fs::read_dir(tree.join("boot")).map_err(|e| ImageError::io("reading the kernel package", e))?;
    let found = entries.flatten().find_map(|entry| {
        let version = entry.file_name().to_str()?.strip_prefix("vmlinuz-")?.to_owned();
        let plain = version.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-._~".contains(&b));
        (plain && !version.starts_with('.')).then(|| (version, entry.path()))
    });
    found.ok_or_else(|| ImageError::malformed("the kernel package has no boot image"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(data: &Path, version: &str, change: impl FnOnce(&mut Manifest)) {
        let dir = data.join("guest").join(version);
        fs::create_dir_all(&dir).expect("mkdir");
        fs::write(dir.join("vmlinux"), "kernel").expect("write");
        let mut manifest = Manifest {
            form: FORM,
            wanted: wanted(),
            version: version.into(),
            package: "linux-image".into(),
            package_version: "1".into(),
            digest: "sha256:0".into(),
            vmlinux_bytes: 6,
            modules: vec![],
            created_ms: 1,
        };
        change(&mut manifest);
        shelf::write_json(&dir.join("manifest.json"), &manifest).expect("write");
    }

    #[test]
    fn the_kernel_made_last_is_taken_if_it_is_whole_and_of_our_making() {
        let dir = tempfile::tempdir().expect("dir");
        let data = dir.path();
        assert!(present(data).is_none());
        put(data, "9-cut", |m| m.vmlinux_bytes = 7);
        put(data, "9-form", |m| m.form += 1);
        put(data, "9-wanted", |m| m.wanted.push('x'));
        assert!(present(data).is_none());
        put(data, "2", |m| m.created_ms = 20);
        put(data, "10", |m| m.created_ms = 10);
        assert_eq!(present(data).expect("there").version, "2");
    }
}
