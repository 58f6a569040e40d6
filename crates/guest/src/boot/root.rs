//! Mounts, and the step from the initramfs to the machine's own root.

use std::ffi::CStr;
use std::path::Path;

use rustix::mount::{MountFlags, mount, mount_move};

use super::{BootError, Step, grow, say};

const NEW_ROOT: &CStr = c"/newroot";
/// Where the template's image is mounted.
pub(super) const LOWER: &str = "/lower";

fn make_dir(path: &str) -> Result<(), BootError> {
    match std::fs::create_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(error).step(path),
        _ => Ok(()),
    }
}

fn mount_at(source: &str, target: &str, kind: &str, flags: MountFlags, data: &CStr) -> Result<(), BootError> {
    make_dir(target)?;
    mount(source, target, kind, flags, Some(data)).step(format!("mount {target}"))
}

const QUIET: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// What even the modules need.
pub(super) fn mount_early() -> Result<(), BootError> {
    mount_at("proc", "/proc", "proc", QUIET, c"")?;
    mount_at("sysfs", "/sys", "sysfs", QUIET, c"")?;
    mount_at("devtmpfs", "/dev", "devtmpfs", MountFlags::NOSUID, c"mode=0755")
}

fn name(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Mounts the template's image.
pub(super) fn mount_lower(lower: &Path) -> Result<(), BootError> {
    mount_at(&name(lower), LOWER, "erofs", MountFlags::RDONLY, c"")
}

/// What processes of the user are kept in; goes along with `/sys`.
pub(super) fn mount_cgroups() -> Result<(), BootError> {
    mount_at("cgroup2", "/sys/fs/cgroup", "cgroup2", QUIET, c"nsdelegate")
}

/// Builds the root from the template's image and `upper` (memory, when there is none) and makes it ours.
pub(super) fn switch(upper: Option<&Path>) -> Result<(), BootError> {
    match upper {
        Some(upper) => {
            let options = c"noinit_itable,errors=remount-ro";
            mount_at(&name(upper), "/upper", "ext4", MountFlags::NOATIME, options)?;
            match grow::to_device(upper, Path::new("/upper")) {
                Ok(None) => {}
                Ok(Some(bytes)) => say(&format!("the disk's file system has {} MiB now", bytes >> 20)),
                // It is as large as it was, and as good.
                Err(error) => say(&format!("the disk's file system did not grow: {error}")),
            }
        }
        None => mount_at("tmpfs", "/upper", "tmpfs", MountFlags::NOATIME, c"mode=0755,size=50%")?,
    }
    make_dir("/upper/upper")?;
    make_dir("/upper/work")?;
    // Directories of the image may be renamed like any other.
    let data = c"lowerdir=/lower,upperdir=/upper/upper,workdir=/upper/work,redirect_dir=on,metacopy=off";
    mount_at("overlay", "/newroot", "overlay", MountFlags::NOATIME, data)?;
    for dir in ["/proc", "/sys", "/dev"] {
        let target = format!("/newroot{dir}");
        make_dir(&target)?;
        mount_move(dir, target.as_str()).step(format!("move {dir}"))?;
    }
    // The initramfs is memory: what it held is not needed again. The program that runs keeps its own pages.
    let _ = std::fs::remove_dir_all("/modules");
    let _ = std::fs::remove_file("/init");
    rustix::process::chdir(NEW_ROOT).step("chdir to the root")?;
    mount_move(c".", c"/").step("move the root")?;
    rustix::process::chroot(c".").step("chroot")?;
    rustix::process::chdir(c"/").step("chdir")
}

/// What processes expect of a root.
pub(super) fn mount_late() -> Result<(), BootError> {
    let shared = MountFlags::NOSUID | MountFlags::NODEV;
    mount_at(
        "devpts",
        "/dev/pts",
        "devpts",
        MountFlags::NOSUID | MountFlags::NOEXEC,
        c"mode=0620,gid=5,ptmxmode=0666",
    )?;
    mount_at("tmpfs", "/dev/shm", "tmpfs", shared, c"mode=1777")?;
    mount_at("tmpfs", "/run", "tmpfs", shared, c"mode=0755,size=20%")?;
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        let _ = std::os::unix::fs::symlink(target, link);
    }
    Ok(())
}
