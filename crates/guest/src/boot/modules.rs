//! Kernel modules of the initramfs.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use super::say;

/// Loads what `order` names, one path a line, in that order. A module that cannot be loaded is said on the console and
/// the rest is tried: what it was needed for fails by name later.
pub(super) fn load(dir: &Path) -> io::Result<()> {
    for path in listed(dir, &std::fs::read_to_string(dir.join("order"))?) {
        if let Err(error) = load_one(&path)
            && error.raw_os_error() != Some(libc::EEXIST)
        {
            say(&format!("module {}: {error}", path.display()));
        }
    }
    Ok(())
}

/// Paths in `order`: absolute, or seen from `dir`. Empty lines and comments are passed over.
fn listed(dir: &Path, order: &str) -> Vec<PathBuf> {
    order
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| dir.join(line))
        .collect()
}

fn load_one(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    // SAFETY: the parameters are a C string that outlives the call.
    match unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_list_may_hold_names_and_paths() {
        let order = "# order matters\nvirtio.ko\n\n  /modules/erofs.ko  \n";
        let paths = listed(Path::new("/modules"), order);
        assert_eq!(paths, [Path::new("/modules/virtio.ko"), Path::new("/modules/erofs.ko")]);
    }
}
