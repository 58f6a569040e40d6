//! The walls themselves, in the order in which they have to be built. One thread, no allocation limits, no async.

use std::ffi::{CString, OsStr};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope,
};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change, unmount};
use rustix::process::{Resource, Rlimit, chdir, pivot_root, setrlimit};
use rustix::thread::UnshareFlags;

use super::launcher::{Stage, StageError};
use super::spec::JailSpec;

/// Open files a VMM may have.
const OPEN_FILES_MAX: u64 = 1024;

/// Namespaces that must be left before the fork: user, and the one that makes the child the first process of its own.
pub(super) fn unshare_outer(spec: &JailSpec) -> Result<(), StageError> {
    if spec.walls.user_namespace {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        leave(UnshareFlags::NEWUSER).stage("user namespace")?;
        fs::write("/proc/self/setgroups", "deny").stage("user namespace")?;
        fs::write("/proc/self/uid_map", format!("{uid} {uid} 1")).stage("user namespace")?;
        fs::write("/proc/self/gid_map", format!("{gid} {gid} 1")).stage("user namespace")?;
    }
    if spec.walls.pid_namespace {
        leave(UnshareFlags::NEWPID).stage("pid namespace")?;
    }
    if spec.walls.network_namespace {
        leave(UnshareFlags::NEWNET).stage("network namespace")?;
    }
    if spec.walls.ipc_uts_namespaces {
        leave(UnshareFlags::NEWIPC | UnshareFlags::NEWUTS).stage("ipc and uts namespaces")?;
    }
    Ok(())
}

fn leave(flags: UnshareFlags) -> rustix::io::Result<()> {
    // SAFETY: this process has one thread and no descriptors shared with another; none of the flags unshares those.
    unsafe { rustix::thread::unshare_unsafe(flags) }
}

/// Everything else, in the child.
pub(super) fn build_inner(spec: &JailSpec) -> Result<(), StageError> {
    if spec.walls.ipc_uts_namespaces {
        rustix::system::sethostname(b"vmm").stage("ipc and uts namespaces")?;
    }
    if spec.walls.mount_namespace {
        leave(UnshareFlags::NEWNS).stage("mount namespace")?;
        mount_tree(spec).stage("mount namespace")?;
    }
    limits(spec).stage("resource limits")?;
    identity(spec)?;
    if spec.walls.landlock {
        landlock_rules(spec).stage("landlock")?;
    }
    Ok(())
}

fn mount_tree(spec: &JailSpec) -> io::Result<()> {
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let top = &spec.scratch;
    let quiet = MountFlags::NOSUID | MountFlags::NODEV;
    mount("none", top, "tmpfs", quiet, Some(c"mode=0755,size=64k,nr_inodes=128"))?;
    for path in &spec.read_only {
        let target = within(top, path);
        let Ok(kind) = fs::symlink_metadata(path).map(|m| m.file_type()) else { continue };
        if kind.is_symlink() && !fs::metadata(path).is_ok_and(|m| m.is_file()) {
            // `/lib64 → usr/lib64` and the like: the folder it names is bound itself.
            std::os::unix::fs::symlink(fs::read_link(path)?, &target)?;
            continue;
        }
        make_target(&target, kind.is_dir())?;
        mount_bind(path, &target)?;
        set_attributes(&target, libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV)?;
    }
    let dev = top.join("dev");
    fs::create_dir(&dev)?;
    mount("none", &dev, "tmpfs", MountFlags::NOSUID | MountFlags::NOEXEC, Some(c"mode=0755,size=16k,nr_inodes=32"))?;
    for path in &spec.devices {
        let target = within(top, path);
        // A node of its own, so that the jail's user may open it whatever the mode of the host's node is. Where making
        // nodes is not allowed (user namespaces, containers), the host's.
        if spec.uid.is_none() || make_node(path, &target).is_err() {
            make_target(&target, false)?;
            mount_bind(path, &target)?;
            set_attributes(&target, libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC)?;
        }
    }
    set_attributes(&dev, libc::MOUNT_ATTR_RDONLY)?;
    if spec.walls.pid_namespace {
        let target = top.join("proc");
        fs::create_dir(&target)?;
        let flags = quiet | MountFlags::NOEXEC;
        // Only processes; where the kernel does not know the option, or a user namespace may not, the whole of it.
        if mount("proc", &target, "proc", flags, Some(c"subset=pid,hidepid=invisible")).is_err() {
            mount("proc", &target, "proc", flags, None)?;
        }
    }
    chdir(top)?;
    pivot_root(".", ".")?;
    unmount(".", UnmountFlags::DETACH)?;
    chdir("/")?;
    set_attributes(Path::new("/"), libc::MOUNT_ATTR_RDONLY)
}

fn within(top: &Path, path: &Path) -> PathBuf {
    top.join(path.strip_prefix("/").unwrap_or(path))
}

fn make_node(path: &Path, target: &Path) -> io::Result<()> {
    use nix::sys::stat::{Mode, SFlag, mknod};
    use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
    let device = fs::metadata(path)?;
    if !device.file_type().is_char_device() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    mknod(target, SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), device.rdev())?;
    let open = || {
        fs::set_permissions(target, fs::Permissions::from_mode(0o666))?;
        // A device controller may forbid what making it did not.
        fs::File::open(target).map(drop)
    };
    open().inspect_err(|_| {
        let _ = fs::remove_file(target);
    })
}

fn make_target(target: &Path, dir: bool) -> io::Result<()> {
    if dir {
        return fs::create_dir_all(target);
    }
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::File::create(target).map(drop)
}

/// Adds attributes to a mount, and only adds: inside a user namespace inherited ones may not be dropped.
fn set_attributes(target: &Path, attributes: u64) -> io::Result<()> {
    let path = CString::new(target.as_os_str().as_bytes())?;
    // SAFETY: zero is a valid value of every field.
    let mut attr: libc::mount_attr = unsafe { std::mem::zeroed() };
    attr.attr_set = attributes;
    // SAFETY: path and attr are valid for the call, and the size is that of attr.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            path.as_ptr(),
            0,
            &raw const attr,
            size_of::<libc::mount_attr>(),
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn limits(spec: &JailSpec) -> io::Result<()> {
    let fixed = |n: u64| Rlimit { current: Some(n), maximum: Some(n) };
    setrlimit(Resource::Core, fixed(0))?;
    setrlimit(Resource::Nofile, fixed(OPEN_FILES_MAX))?;
    setrlimit(Resource::Fsize, fixed(spec.file_size_max))?;
    Ok(())
}

/// Own uid, no capabilities of any kind, and no way to get any back.
fn identity(spec: &JailSpec) -> Result<(), StageError> {
    for cap in caps::all() {
        // Not permitted without CAP_SETPCAP; then the set is useless anyway under no_new_privs, and the probe reports it.
        let _ = caps::drop(None, caps::CapSet::Bounding, cap);
    }
    let _ = caps::clear(None, caps::CapSet::Ambient);
    if let Some(uid) = spec.uid {
        let (user, group) = (nix::unistd::Uid::from_raw(uid), nix::unistd::Gid::from_raw(uid));
        let groups: Vec<_> = spec.groups.iter().copied().map(nix::unistd::Gid::from_raw).collect();
        nix::unistd::setgroups(&groups).stage("own uid")?;
        nix::unistd::setresgid(group, group, group).stage("own uid")?;
        nix::unistd::setresuid(user, user, user).stage("own uid")?;
    }
    for set in [caps::CapSet::Effective, caps::CapSet::Permitted, caps::CapSet::Inheritable] {
        caps::clear(None, set).map_err(|e| io::Error::other(e.to_string())).stage("capabilities")?;
    }
    rustix::thread::set_no_new_privs(true).stage("no new privileges")
}

fn landlock_rules(spec: &JailSpec) -> io::Result<()> {
    let other = |e: landlock::RulesetError| io::Error::other(e.to_string());
    let abi = ABI::V6;
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))
        .map_err(other)?
        .handle_access(AccessNet::BindTcp | AccessNet::ConnectTcp)
        .map_err(other)?
        .scope(Scope::AbstractUnixSocket | Scope::Signal)
        .map_err(other)?
        .create()
        .map_err(other)?;
    let mut allow = |path: &Path, access: landlock::BitFlags<AccessFs>| -> io::Result<()> {
        let Ok(fd) = PathFd::new(path) else { return Ok(()) };
        let access = if path.is_dir() { access } else { access & AccessFs::from_file(abi) };
        // The ruleset is moved in and out of the builder.
        let done = (&mut rules).add_rule(PathBeneath::new(fd, access)).map(drop);
        done.map_err(other)
    };
    for path in &spec.read_only {
        allow(path, read | AccessFs::Execute)?;
    }
    allow(Path::new("/proc"), read)?;
    for path in &spec.devices {
        allow(path, AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev)?;
    }
    let status = rules.restrict_self().map_err(other)?;
    if status.ruleset == RulesetStatus::NotEnforced {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "this kernel does not enforce Landlock"));
    }
    Ok(())
}

/// Becomes the program. Returns only on failure.
pub(super) fn exec(spec: &JailSpec) -> StageError {
    let text = |s: &OsStr| CString::new(s.as_bytes()).map_err(io::Error::from);
    let all = || -> io::Result<(CString, Vec<CString>)> {
        let argv = spec.argv.iter().map(|a| text(OsStr::new(a))).collect::<io::Result<Vec<_>>>()?;
        Ok((text(spec.program.as_os_str())?, argv))
    };
    let cause = match all() {
        Err(e) => e,
        Ok((program, argv)) => {
            let env = [c"LC_ALL=C", c"HOME=/", c"PATH=/usr/bin"];
            match nix::unistd::execve(&program, &argv, &env) {
                Ok(never) => match never {},
                Err(e) => e.into(),
            }
        }
    };
    StageError { stage: "starting the program", cause }
}
