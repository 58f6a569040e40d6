//! What the tests stand on: built programs, and images that are made once.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

fn variable(name: &str) -> PathBuf {
    let value =
        std::env::var_os(name).unwrap_or_else(|| panic!("{name} is not set: run these tests through tests/all"));
    PathBuf::from(value)
}

/// The folder with the programs under test.
///
/// # Panics
/// When `MAINBRELLA_TEST_BIN_DIR` is not set.
#[must_use]
pub fn bin_dir() -> PathBuf {
    variable("MAINBRELLA_TEST_BIN_DIR")
}

/// The `mainbrella` program.
///
/// # Panics
/// When it is not there.
#[must_use]
pub fn program() -> PathBuf {
    let path = bin_dir().join("mainbrella");
    assert!(path.is_file(), "{} is missing: run these tests through tests/all", path.display());
    path
}

/// The data directory whose images are shared.
///
/// # Panics
/// When `MAINBRELLA_TEST_DATA` is not set or holds no frozen template.
#[must_use]
pub fn base_dir() -> PathBuf {
    let base = variable("MAINBRELLA_TEST_DATA");
    assert!(base.join("frozen").is_dir(), "{} holds no frozen template: run through tests/all", base.display());
    base
}

/// Gives `data` the kernel, templates and frozen sizes of the base: folders of its own, files shared. Files are links,
/// hard ones where the file system is the same; services replace such files and never write into them.
///
/// # Panics
/// When a link cannot be made.
pub fn link_images(data: &Path) {
    for dir in ["guest", "templates", "frozen"] {
        link_tree(&base_dir().join(dir), &data.join(dir)).unwrap_or_else(|e| panic!("linking {dir}: {e}"));
    }
    // The verdict on the accelerator: the trial is not repeated for every service.
    let verdict = base_dir().join("accelerator.json");
    if verdict.exists() {
        fs::copy(verdict, data.join("accelerator.json")).expect("copying the verdict");
    }
}

fn link_tree(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    fs::set_permissions(to, fs::metadata(from)?.permissions())?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            link_tree(&path, &target)?;
        } else if entry.file_name() == ".lock" {
            fs::File::create(target)?;
        } else if let Err(e) = fs::hard_link(&path, &target) {
            if e.kind() != io::ErrorKind::CrossesDevices {
                return Err(e);
            }
            symlink(&path, &target)?;
        }
    }
    Ok(())
}
