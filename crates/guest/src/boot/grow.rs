//! A file system that is smaller than its disk: the disk of a template that was made in a smaller size.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Makes a mounted ext4 larger, to this many blocks: `_IOW('f', 16, __u64)`.
const EXT4_IOC_RESIZE_FS: libc::c_ulong = 0x4008_6610;
/// Size of a block device, bytes: `_IOR(0x12, 114, size_t)`.
const BLKGETSIZE64: libc::c_ulong = 0x8008_1272;
/// What is not worth it, bytes.
const LEAST: u64 = 1024 * 1024;
/// Where the superblock begins.
const SUPERBLOCK: u64 = 1024;

/// Makes the ext4 of `device`, mounted at `mounted`, as large as the device is; gives its new size in bytes when it grew.
///
/// # Errors
/// When it cannot be read, or the kernel refuses. It is as it was then.
pub(super) fn to_device(device: &Path, mounted: &Path) -> io::Result<Option<u64>> {
    let device = File::open(device)?;
    let mut bytes = 0u64;
    // SAFETY: the pointer is that of a number of the size the request writes, and outlives the call.
    if unsafe { libc::ioctl(device.as_raw_fd(), BLKGETSIZE64 as _, &raw mut bytes) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut superblock = [0; 1024];
    device.read_exact_at(&mut superblock, SUPERBLOCK)?;
    let Some((blocks, size)) = larger(&superblock, bytes) else { return Ok(None) };
    let mounted = File::open(mounted)?;
    // SAFETY: as above; the request reads.
    if unsafe { libc::ioctl(mounted.as_raw_fd(), EXT4_IOC_RESIZE_FS as _, &raw const blocks) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Some(blocks * size))
}

/// How many blocks, and of which size, the file system of `superblock` should have on a device of `bytes`; `None`: what it
/// has, or it is none that is known.
fn larger(superblock: &[u8; 1024], bytes: u64) -> Option<(u64, u64)> {
    let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| superblock[at + i]));
    let magic = u16::from_le_bytes([superblock[0x38], superblock[0x39]]);
    let shift = word(0x18);
    if magic != 0xef53 || shift > 6 {
        return None;
    }
    let size = 1024u64 << shift;
    // The upper half counts where block numbers have 64 bits.
    let high = if word(0x60) & 0x80 != 0 { word(0x150) } else { 0 };
    let blocks = u64::from(high) << 32 | u64::from(word(0x4));
    let has = blocks.checked_mul(size)?;
    (bytes > has.checked_add(LEAST)?).then_some((bytes / size, size))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn superblock(blocks: u64, shift: u32, wide: bool) -> [u8; 1024] {
        let mut out = [0; 1024];
        let mut put = |at: usize, word: u32| out[at..at + 4].copy_from_slice(&word.to_le_bytes());
        put(0x4, blocks as u32);
        put(0x18, shift);
        put(0x60, if wide { 0x80 } else { 0 });
        put(0x150, (blocks >> 32) as u32);
        out[0x38..0x3a].copy_from_slice(&0xef53u16.to_le_bytes());
        out
    }

    #[test]
    fn it_grows_only_where_the_disk_is_larger_by_something() {
        let at = |bytes| larger(&superblock(1024, 2, true), bytes);
        assert_eq!(at(4 * MIB), None);
        assert_eq!(at(3 * MIB), None, "a disk that lost its end is left alone");
        assert_eq!(at(5 * MIB), None);
        assert_eq!(at(5 * MIB + 1), Some((1280, 4096)));
        assert_eq!(at(16 * MIB + 4095), Some((4096, 4096)), "whole blocks only");
    }

    #[test]
    fn numbers_of_blocks_have_two_halves_where_they_are_said_to() {
        let blocks = 5u64 << 32;
        assert_eq!(larger(&superblock(blocks, 0, true), blocks * 1024), None);
        assert_eq!(larger(&superblock(blocks, 0, true), blocks * 1024 + 2 * MIB), Some((blocks + 2048, 1024)));
        assert_eq!(larger(&superblock(blocks + 7, 0, false), 2 * MIB), Some((2048, 1024)));
    }

    #[test]
    fn what_is_no_such_file_system_is_left_alone() {
        assert_eq!(larger(&[0; 1024], 1 << 40), None);
        assert_eq!(larger(&[0xff; 1024], u64::MAX), None);
        assert_eq!(larger(&superblock(u64::MAX, 6, true), u64::MAX), None, "larger than a number");
        assert_eq!(larger(&superblock(1, 31, true), u64::MAX), None);
    }

    /// As in a machine, with a loop device for the disk.
    #[test]
    fn a_mounted_file_system_grows() {
        let run = |name: &str, args: &[&str]| {
            std::process::Command::new(name).args(args).output().ok().filter(|out| out.status.success())
        };
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("disk");
        let at = dir.path().join("at");
        std::fs::create_dir(&at).unwrap();
        let file = File::create(&image).unwrap();
        file.set_len(64 * MIB).unwrap();
        let (image, mount_point) = (image.to_str().unwrap(), at.to_str().unwrap());
        // The kernel lets nobody else; what is root of a container may be without it.
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap().trim();
        let may = u64::from_str_radix(effective, 16).unwrap();
        const SYS_ADMIN_AND_RESOURCE: u64 = 1 << 21 | 1 << 24;
        if may & SYS_ADMIN_AND_RESOURCE != SYS_ADMIN_AND_RESOURCE
            || run("mkfs.ext4", &["-q", "-F", "-m", "0", image]).is_none()
        {
            return;
        }
        file.set_len(512 * MIB + 5000).unwrap();
        let Some(device) = run("losetup", &["-f", "--show", image]) else { return };
        let device = String::from_utf8(device.stdout).unwrap().trim().to_owned();
        let mounted = run("mount", &["-o", "noinit_itable", &device, mount_point]).is_some();
        let grown = mounted.then(|| {
            let size = || rustix::fs::statvfs(&at).map(|s| s.f_blocks * s.f_frsize).unwrap();
            let before = size();
            let first = to_device(Path::new(&device), &at);
            (before, first, to_device(Path::new(&device), &at), size())
        });
        run("umount", &[mount_point]);
        let sound = run("e2fsck", &["-fn", &device]).is_some();
        run("losetup", &["-d", &device]);
        if let Some((before, first, second, after)) = grown {
            assert_eq!(first.unwrap(), Some(512 * MIB));
            assert_eq!(second.unwrap(), None, "once is enough");
            assert!(before < 64 * MIB && after > 450 * MIB, "{before} {after}");
            assert!(sound);
        }
    }
}
