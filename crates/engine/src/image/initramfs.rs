//! The initramfs: the guest agent as `/init` and the kernel modules it loads first.

use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use super::cpio::Archive;
use super::elf::Elf;
use super::error::ImageError;
use super::kernel::{GuestKernel, ORDER};
use super::shelf::{self, Bench};

/// Form of the archive; part of its key.
const FORM: &[u8] = b"initramfs 1";
/// Archives kept beside the present one, for those about to boot with them.
const KEPT: usize = 4;

/// An initramfs on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Initramfs {
    /// The uncompressed archive.
    pub path: PathBuf,
    /// `sha256:` and a digest that covers the agent, the kernel's modules and the form of the archive.
    pub digest: String,
}

/// Where the archive of this agent and kernel is, whether made or not.
fn place(data: &Path, kernel: &GuestKernel, agent: &[u8]) -> Initramfs {
    let digest = shelf::digest_of([FORM, kernel.digest.as_bytes(), agent]);
    let path = data.join("guest").join(format!("initramfs-{}.cpio", &digest[..12]));
    Initramfs { path, digest: format!("sha256:{digest}") }
}

/// Reads the agent and makes sure that it can be the first process of a machine.
pub(super) fn read_agent(path: &Path) -> Result<Vec<u8>, ImageError> {
    let bad = |problem| ImageError::BadAgent { path: path.display().to_string(), problem };
    let bytes = fs::read(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => bad("there is no such file"),
        _ => ImageError::io("reading the guest agent", e),
    })?;
    match Elf::parse(&bytes) {
        Some(elf) if elf.wants_interpreter() => Err(bad("it is not linked statically")),
        Some(elf) if elf.is_whole() => Ok(bytes),
        _ => Err(bad("it is not a whole program for x86-64")),
    }
}

/// The archive if it was made before.
pub(super) fn present(data: &Path, kernel: &GuestKernel, agent: &[u8]) -> Option<Initramfs> {
    Some(place(data, kernel, agent)).filter(|found| found.path.is_file())
}

/// Makes the archive and puts it on the shelf.
pub(super) fn build(bench: &Bench, data: &Path, kernel: &GuestKernel, agent: &[u8]) -> Result<Initramfs, ImageError> {
    let result = place(data, kernel, agent);
    let work = bench.workspace()?;
    let made = work.path().join("initramfs");
    let write = || -> std::io::Result<()> {
        let order = fs::read_to_string(kernel.modules.join(ORDER))?;
        let mut archive = Archive::new(BufWriter::new(fs::File::create(&made)?));
        for dir in ["dev", "modules", "proc", "run", "sys"] {
            archive.directory(dir, 0o755)?;
        }
        archive.device("dev/console", 0o600, 5, 1)?;
        archive.file("init", 0o755, agent)?;
        archive.file("modules/order", 0o644, order.as_bytes())?;
        for file in order.lines() {
            archive.file(&format!("modules/{file}"), 0o644, &fs::read(kernel.modules.join(file))?)?;
        }
        archive.finish()?.flush()
    };
    write().map_err(|e| ImageError::io("writing the initramfs", e))?;
    bench.publish(&made, &result.path)?;
    prune(data, &result.path);
    Ok(result)
}

/// Removes the oldest archives but [`KEPT`]. What cannot be removed is tried again next time.
fn prune(data: &Path, present: &Path) {
    let Ok(entries) = fs::read_dir(data.join("guest")) else { return };
    let mut old: Vec<_> = entries
        .flatten()
        .filter(|e| {
            let name = e.file_name();
            let name = name.to_string_lossy();
            name.starts_with("initramfs-") && name.ends_with(".cpio") && e.path() != present
        })
        .filter_map(|e| Some((e.metadata().ok()?.modified().ok()?, e.path())))
        .collect();
    old.sort();
    for (_, path) in old.iter().rev().skip(KEPT) {
        if let Err(error) = fs::remove_file(path) {
            tracing::warn!(path = %path.display(), %error, "an old initramfs could not be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::elf::tests::sample;
    use super::super::progress::Silent;
    use super::*;

    fn kernel(data: &Path) -> GuestKernel {
        let modules = data.join("guest/1/modules");
        fs::create_dir_all(&modules).expect("mkdir");
        for (name, text) in [("order", "b.ko\na.ko\n"), ("a.ko", "A"), ("b.ko", "B")] {
            fs::write(modules.join(name), text).expect("write");
        }
        GuestKernel {
            version: "1".into(),
            package_version: "1".into(),
            vmlinux: data.join("guest/1/vmlinux"),
            modules,
            digest: "sha256:1".into(),
        }
    }

    #[test]
    fn it_holds_agent_and_modules_and_is_keyed_by_both() {
        let dir = tempfile::tempdir().expect("dir");
        let data = dir.path();
        let mut kernel = kernel(data);
        let agent = sample(b"", 0);
        assert!(present(data, &kernel, &agent).is_none());
        let bench = Bench::take(data, "guest", &Silent).expect("bench");
        let made = build(&bench, data, &kernel, &agent).expect("builds");
        assert_eq!(present(data, &kernel, &agent), Some(made.clone()));
        let bytes = fs::read(&made.path).expect("read");
        let has = |what: &[u8]| bytes.windows(what.len()).any(|w| w == what);
        assert!(has(&agent) && has(b"b.ko\na.ko\n") && has(b"modules/a.ko\0") && has(b"dev/console\0"));
        kernel.digest = "sha256:2".into();
        assert!(present(data, &kernel, &agent).is_none());
    }

    #[test]
    fn old_ones_go_but_not_the_newest() {
        let dir = tempfile::tempdir().expect("dir");
        let data = dir.path();
        let kernel = kernel(data);
        let bench = Bench::take(data, "guest", &Silent).expect("bench");
        let made: Vec<_> =
            (1..=8).map(|n| build(&bench, data, &kernel, &sample(&[n], 0)).expect("builds").path).collect();
        assert_eq!(made.iter().filter(|p| p.exists()).count(), KEPT + 1);
        assert!(made[7].exists());
    }

    #[test]
    fn only_a_static_program_is_taken_as_agent() {
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("agent");
        assert!(matches!(read_agent(&path), Err(ImageError::BadAgent { .. })));
        fs::write(&path, "#!/bin/sh\n").expect("write");
        assert!(matches!(read_agent(&path), Err(ImageError::BadAgent { .. })));
        fs::write(&path, sample(b"", 0)).expect("write");
        assert!(read_agent(&path).is_ok());
        let e = read_agent(Path::new("/bin/sh")).expect_err("dynamic");
        assert!(e.to_string().contains("statically"), "{e}");
    }
}
