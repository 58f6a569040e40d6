//! An empty qcow2 overlay, written directly: four clusters, of which a few hundred bytes are not zero.
//!
//! The backing file is not named inside; the command line names it. Format: version 3, 64 KiB clusters, 16-bit
//! reference counts, no extension.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const CLUSTER: u64 = 64 * 1024;
/// What one L1 entry maps: a table of 8192 entries of one cluster each.
const L1_REACH: u64 = CLUSTER / 8 * CLUSTER;
const HEADER_LENGTH: u32 = 104;

/// Writes an empty overlay of a disk of `disk_bytes` into `file`, which must be empty.
///
/// # Errors
/// When the file cannot be written, or the disk is larger than 4 TiB.
pub fn write_empty(file: &File, disk_bytes: u64) -> io::Result<()> {
    let l1_entries = u32::try_from(disk_bytes.div_ceil(L1_REACH)).ok().filter(|n| u64::from(*n) * 8 <= CLUSTER);
    let l1_entries = l1_entries.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the disk is too large"))?;
    let mut h = Vec::with_capacity(HEADER_LENGTH as usize);
    h.extend_from_slice(b"QFI\xfb");
    h.extend_from_slice(&3u32.to_be_bytes());
    h.extend_from_slice(&0u64.to_be_bytes()); // backing file name: none
    h.extend_from_slice(&0u32.to_be_bytes());
    h.extend_from_slice(&16u32.to_be_bytes()); // cluster bits
    h.extend_from_slice(&disk_bytes.to_be_bytes());
    h.extend_from_slice(&0u32.to_be_bytes()); // no encryption
    h.extend_from_slice(&l1_entries.to_be_bytes());
    h.extend_from_slice(&(3 * CLUSTER).to_be_bytes()); // L1 table
    h.extend_from_slice(&CLUSTER.to_be_bytes()); // reference count table
    h.extend_from_slice(&1u32.to_be_bytes()); // its clusters
    h.extend_from_slice(&[0; 4 + 8]); // no snapshots
    h.extend_from_slice(&[0; 3 * 8]); // no features
    h.extend_from_slice(&4u32.to_be_bytes()); // 16-bit reference counts
    h.extend_from_slice(&HEADER_LENGTH.to_be_bytes());
    file.write_all_at(&h, 0)?;
    file.write_all_at(&(2 * CLUSTER).to_be_bytes(), CLUSTER)?;
    file.write_all_at(&[0, 1, 0, 1, 0, 1, 0, 1], 2 * CLUSTER)?;
    file.set_len(4 * CLUSTER)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn an_empty_overlay_is_small_and_has_the_size_asked_for() {
        let t = tempfile::NamedTempFile::new().expect("temp file");
        write_empty(t.as_file(), 32 << 30).expect("write");
        let bytes = std::fs::read(t.path()).expect("read");
        assert_eq!(&bytes[..8], b"QFI\xfb\0\0\0\x03");
        assert_eq!(bytes[24..32], (32u64 << 30).to_be_bytes());
        assert_eq!(bytes[36..40], 64u32.to_be_bytes(), "one L1 entry for each 512 MiB");
        assert!(t.as_file().metadata().expect("stat").blocks() * 512 <= 64 * 1024, "sparse");
        assert!(write_empty(t.as_file(), 1 << 50).is_err());
    }
}
