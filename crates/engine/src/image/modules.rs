//! Picks kernel modules with all they need, in the order in which they must be loaded.
//!
//! A kernel package has no `modules.dep` (that is made when it is installed), so what a module needs is
//! read from the module itself.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::elf::Elf;
use super::error::ImageError;
use super::unpack;

/// Modules a machine needs, in order. `true`: it cannot work without. A module built into the kernel is fine.
pub(super) const WANTED: &[(&str, bool)] = &[
    ("virtio", true),
    ("virtio_ring", true),
    ("virtio_mmio", true),
    ("virtio_console", true),
    ("virtio_blk", true),
    ("crc32c_intel", false),
    ("libcrc32c", false),
    ("erofs", true),
    ("overlay", true),
    ("ext4", true),
    ("virtio_net", true),
    ("virtio_rng", false),
    ("af_packet", false),
    ("fuse", false),
    ("tun", false),
];

/// Deepest chain of needs that is followed.
const DEPTH_MAX: usize = 16;

/// A module ready to be loaded.
#[derive(Debug)]
pub(super) struct Module {
    /// File name, e.g. `virtio-rng.ko`.
    pub(super) file: String,
    pub(super) bytes: Vec<u8>,
}

/// The modules of one kernel, as its package has them.
pub(super) struct Library {
    files: BTreeMap<String, PathBuf>,
    builtin: BTreeSet<String>,
}

/// `kernel/drivers/virtio-rng.ko.xz` → (`virtio_rng`, `virtio-rng.ko`).
fn module_name(path: &Path) -> Option<(String, String)> {
    let file = path.file_name()?.to_str()?;
    let stem = [".ko", ".ko.xz", ".ko.zst", ".ko.gz"].iter().find_map(|end| file.strip_suffix(end))?;
    Some((stem.replace('-', "_"), format!("{stem}.ko")))
}

impl Library {
    /// Looks through `dir`, the `lib/modules/VERSION` of a kernel.
    pub(super) fn open(dir: &Path) -> Result<Self, ImageError> {
        let io = |e| ImageError::io("reading the kernel's modules", e);
        let list = std::fs::read_to_string(dir.join("modules.builtin")).map_err(io)?;
        let builtin = list.lines().filter_map(|l| module_name(Path::new(l))).map(|(name, _)| name).collect();
        let mut files = BTreeMap::new();
        let mut folders = vec![dir.join("kernel")];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).map_err(io)? {
                let entry = entry.map_err(io)?;
                if entry.file_type().map_err(io)?.is_dir() {
                    folders.push(entry.path());
                } else if let Some((name, _)) = module_name(&entry.path()) {
                    files.insert(name, entry.path());
                }
            }
        }
        Ok(Self { files, builtin })
    }

    /// `wanted` and all they need, each after what it needs.
    pub(super) fn pick(&self, wanted: &[(&str, bool)]) -> Result<Vec<Module>, ImageError> {
        let mut picked = Picked::default();
        for (name, required) in wanted {
            self.add(name, *required, 0, &mut picked)?;
        }
        Ok(picked.order)
    }

    fn add(&self, name: &str, required: bool, depth: usize, picked: &mut Picked) -> Result<(), ImageError> {
        let name = name.replace('-', "_");
        if picked.seen.contains(&name) {
            return Ok(());
        }
        picked.seen.insert(name.clone());
        let Some(path) = self.files.get(&name) else {
            if self.builtin.contains(&name) || !required {
                return Ok(());
            }
            return Err(ImageError::malformed(format!("the kernel package has no module {name}")));
        };
        if depth > DEPTH_MAX {
            return Err(ImageError::malformed(format!("kernel module {name} needs too long a chain of others")));
        }
        let packed = std::fs::read(path).map_err(|e| ImageError::io(format!("reading kernel module {name}"), e))?;
        let bytes = unpack::module(&name, packed)?;
        for (need, required) in needs(&bytes) {
            self.add(&need, required, depth + 1, picked)?;
        }
        let file = module_name(path).map_or_else(|| format!("{name}.ko"), |(_, file)| file);
        picked.order.push(Module { file, bytes });
        Ok(())
    }
}

#[derive(Default)]
struct Picked {
    seen: BTreeSet<String>,
    order: Vec<Module>,
}

/// What a module says it needs: `depends` must be there, `softdep=pre:` may be.
fn needs(module: &[u8]) -> Vec<(String, bool)> {
    let info = Elf::parse(module).and_then(|elf| elf.section(".modinfo")).unwrap_or_default();
    let mut found = Vec::new();
    for entry in info.split(|b| *b == 0).filter_map(|e| std::str::from_utf8(e).ok()) {
        if let Some(list) = entry.strip_prefix("depends=") {
            found.extend(list.split(',').filter(|n| !n.is_empty()).map(|n| (n.to_owned(), true)));
        } else if let Some(list) = entry.strip_prefix("softdep=") {
            let words = list.split_whitespace().skip_while(|w| *w != "pre:").skip(1);
            found.extend(words.take_while(|w| *w != "post:").map(|n| (n.to_owned(), false)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::elf::tests::sample;
    use super::*;

    fn library(modules: &[(&str, &str)], builtin: &str) -> (tempfile::TempDir, Library) {
        let dir = tempfile::tempdir().expect("dir");
        std::fs::write(dir.path().join("modules.builtin"), builtin).expect("write");
        for (path, info) in modules {
            let file = dir.path().join("kernel").join(path);
            std::fs::create_dir_all(file.parent().expect("parent")).expect("mkdir");
            let plain = sample(info.replace(';', "\0").as_bytes(), 0);
            let bytes = if path.ends_with(".zst") { zstd::encode_all(&plain[..], 1).expect("zstd") } else { plain };
            std::fs::write(file, bytes).expect("write");
        }
        let library = Library::open(dir.path()).expect("opens");
        (dir, library)
    }

    fn names(picked: &[Module]) -> Vec<&str> {
        picked.iter().map(|m| m.file.as_str()).collect()
    }

    #[test]
    fn what_is_needed_comes_first_and_once() {
        let (_dir, library) = library(
            &[
                ("net/virtio_net.ko.zst", "license=GPL;depends=net_failover,virtio-ring;"),
                ("net/net_failover.ko", "depends=failover;"),
                ("core/failover.ko", "depends=;"),
                ("virtio/virtio-ring.ko", "depends=;"),
                ("fs/erofs.ko", "softdep=pre: crc32c lz4 post: late;depends=lz4;"),
                ("lib/lz4.ko", ""),
                ("lib/late.ko", ""),
            ],
            "kernel/fs/ext4/ext4.ko\n",
        );
        let picked = library
            .pick(&[("virtio_ring", true), ("virtio_net", true), ("ext4", true), ("erofs", true), ("absent", false)])
            .expect("picks");
        assert_eq!(
            names(&picked),
            ["virtio-ring.ko", "failover.ko", "net_failover.ko", "virtio_net.ko", "lz4.ko", "erofs.ko"]
        );
        assert!(picked.iter().all(|m| m.bytes.starts_with(b"\x7fELF")), "unpacked");
    }

    #[test]
    fn a_missing_module_is_named_whether_asked_for_or_needed() {
        let (_dir, library) = library(&[("a.ko", "depends=gone;")], "");
        for (wanted, missing) in [("a", "gone"), ("b", "b")] {
            let e = library.pick(&[(wanted, true)]).expect_err("missing");
            assert!(e.to_string().contains(&format!("no module {missing}")), "{e}");
        }
    }

    #[test]
    fn a_circle_of_needs_ends() {
        let (_dir, library) = library(&[("a.ko", "depends=b;"), ("b.ko", "depends=a;")], "");
        assert_eq!(names(&library.pick(&[("a", true)]).expect("ends")), ["b.ko", "a.ko"]);
    }
}
