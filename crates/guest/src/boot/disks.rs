//! Disks, told apart by what the host wrote on them, never by the order they appear in.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The device with this virtio serial, when it is there.
pub(super) fn find(serial: &str) -> io::Result<Option<PathBuf>> {
    find_in(Path::new("/sys/block"), serial)
}

/// The device with this virtio serial, when it comes.
pub(super) fn wait_for(serial: &str, most: Duration) -> io::Result<PathBuf> {
    super::wait_for(most, || find(serial))
}

fn find_in(block: &Path, serial: &str) -> io::Result<Option<PathBuf>> {
    for entry in std::fs::read_dir(block)? {
        let entry = entry?;
        let Ok(found) = std::fs::read_to_string(entry.path().join("serial")) else { continue };
        if found.trim_end_matches(['\n', '\0']) == serial {
            return Ok(Some(Path::new("/dev").join(entry.file_name())));
        }
    }
    Ok(None)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_serial_decides() {
        let block = tempfile::tempdir().unwrap();
        for (name, serial) in [("vda", "data"), ("vdb", "root\n"), ("loop0", "")] {
            std::fs::create_dir(block.path().join(name)).unwrap();
            if !serial.is_empty() {
                std::fs::write(block.path().join(name).join("serial"), serial).unwrap();
            }
        }
        assert_eq!(find_in(block.path(), "root").unwrap(), Some("/dev/vdb".into()));
        assert_eq!(find_in(block.path(), "data").unwrap(), Some("/dev/vda".into()));
        assert_eq!(find_in(block.path(), "other").unwrap(), None);
    }
}
