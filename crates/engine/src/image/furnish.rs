//! What a machine needs of its root that an image of a container need not have. The tree is a stranger's: every name is
//! resolved with the tree as its root, and nothing is written through a link.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use mainbrella_oci::ImageConfig;
use mainbrella_types::machine::check_user;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, fchmod, fstat, mkdirat, openat, openat2, statat};
use rustix::io::Errno;

/// Directories that must be there, with the permissions of those that are made. A machine mounts over the first ones: these
/// must be directories themselves, not links to one.
const DIRECTORIES: [(&str, u32, bool); 9] = [
    ("proc", 0o555, true),
    ("sys", 0o555, true),
    ("dev", 0o755, true),
    ("run", 0o755, false),
    ("tmp", 0o1777, false),
    ("etc", 0o755, false),
    ("var", 0o755, false),
    ("root", 0o700, false),
    ("workspace", 0o755, false),
];
const HOSTS: &[u8] = b"127.0.0.1\tlocalhost machine\n::1\tlocalhost ip6-localhost ip6-loopback\n";
/// Where the agent looks for what commands have by default.
const OWN: &str = "mainbrella";
const COMMANDS: &str = "commands";
/// Where it looks for who they run as.
const USER: &str = "user";
const PROFILE_MAX: u64 = 1024 * 1024;
const PLACE: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
const WITHIN: ResolveFlags = ResolveFlags::IN_ROOT.union(ResolveFlags::NO_MAGICLINKS).union(ResolveFlags::NO_XDEV);

/// Makes the tree below `root` one that a machine can start from, whose commands have what `config` says.
pub(super) fn furnish(root: &OwnedFd, config: &ImageConfig) -> io::Result<()> {
    for (name, mode, itself) in DIRECTORIES {
        directory(root, root, name, mode, itself)?;
    }
    let etc = openat2(root, "etc", PLACE, Mode::empty(), WITHIN)?;
    // Names of the machine and its network are written when it is known which machine it is.
    for (name, text) in
        [("resolv.conf", b"".as_slice()), ("machine-id", b""), ("hostname", b"machine\n"), ("hosts", HOSTS)]
    {
        put(&etc, name, text, 0o644)?;
    }
    take_away(&etc, OWN)?;
    let own = directory(root, &etc, OWN, 0o755, true)?;
    put(&own, COMMANDS, &commands(config), 0o644)?;
    if let Some(user) = user(config)? {
        put(&own, USER, format!("{user}\n").as_bytes(), 0o644)?;
    }
    match config.env.iter().rev().find(|(name, _)| name == "PATH") {
        Some((_, path)) => keep_path(root, &etc, path),
        None => Ok(()),
    }
}

/// As the agent reads it: the directory, then the variables, each ended by a NUL.
fn commands(config: &ImageConfig) -> Vec<u8> {
    let cwd = Some(config.workdir.as_str()).filter(|dir| dir.starts_with('/') && *dir != "/").unwrap_or_default();
    let mut out = format!("{cwd}\0");
    for (name, value) in &config.env {
        out.push_str(&format!("{name}={value}\0"));
    }
    out.into_bytes()
}

/// Who commands run as; `None`: root, as without it.
///
/// # Errors
/// When it can be nobody: running as root instead would be more than the image asked for.
fn user(config: &ImageConfig) -> io::Result<Option<&str>> {
    // Some builders write the group's place and no group.
    let user = config.user.strip_suffix(':').unwrap_or(&config.user);
    if matches!(user, "" | "root" | "0" | "root:root" | "0:0") {
        return Ok(None);
    }
    check_user(user).map_err(|_| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            "the USER of the image is no USER or USER:GROUP of letters, digits, `_`, `.` and `-`; build the image with one that is",
        )
    })?;
    Ok(Some(user))
}

/// Login shells begin with a search path of their own: the image's is set again after that.
fn keep_path(root: &OwnedFd, etc: &OwnedFd, path: &str) -> io::Result<()> {
    let Some(mut profile) = read(root, "etc/profile", PROFILE_MAX) else { return Ok(()) };
    let line = format!("export PATH='{}'\n", path.replace('\'', "'\\''"));
    let asks = profile.windows(9).any(|w| w == b"profile.d");
    if asks {
        let dir = directory(root, etc, "profile.d", 0o755, false)?;
        return put(&dir, "zz-image-path.sh", line.as_bytes(), 0o644);
    }
    profile.push(b'\n');
    profile.extend_from_slice(line.as_bytes());
    put(etc, "profile", &profile, 0o644)
}

/// The directory `name` of `at`, made where there is none. With `itself` a link to one does not count.
fn directory(root: &OwnedFd, at: &OwnedFd, name: &str, mode: u32, itself: bool) -> io::Result<OwnedFd> {
    let real = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    match openat(at, name, real, Mode::empty()) {
        Ok(dir) => return Ok(dir),
        // Links are followed from the root of the tree, which only its own entries are seen from.
        Err(Errno::LOOP | Errno::NOTDIR) if !itself && is_same(root, at)? => {
            if let Ok(dir) =
                openat2(root, name, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty(), WITHIN)
            {
                return Ok(dir);
            }
        }
        Err(_) => {}
    }
    take_away(at, name)?;
    mkdirat(at, name, Mode::from_raw_mode(0o700))?;
    let dir = openat(at, name, real, Mode::empty())?;
    fchmod(&dir, Mode::from_raw_mode(mode))?;
    Ok(dir)
}

fn is_same(a: &OwnedFd, b: &OwnedFd) -> io::Result<bool> {
    let (a, b) = (fstat(a)?, fstat(b)?);
    Ok((a.st_dev, a.st_ino) == (b.st_dev, b.st_ino))
}

/// Removes all of `name`, if it is there.
fn take_away(at: &OwnedFd, name: &str) -> io::Result<()> {
    if statat(at, name, AtFlags::SYMLINK_NOFOLLOW).is_err_and(|e| e == Errno::NOENT) {
        return Ok(());
    }
    let until = Instant::now() + Duration::from_secs(600);
    mainbrella_tree::remove(at.as_fd(), name.as_bytes(), true, until)
        .map(drop)
        .map_err(|e| e.errno.map_or_else(|| io::Error::other(e.text), Into::into))
}

/// Writes a file in place of whatever is there.
fn put(at: &OwnedFd, name: &str, text: &[u8], mode: u32) -> io::Result<()> {
    take_away(at, name)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(openat(at, name, flags, Mode::from_raw_mode(0o600))?);
    file.write_all(text)?;
    Ok(fchmod(&file, Mode::from_raw_mode(mode))?)
}

/// A regular file of the tree, links followed within it; `None` when there is none of at most `most` bytes.
pub(super) fn read(root: &OwnedFd, path: &str, most: u64) -> Option<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    // Opening a device would be talking to one of this host's: it is looked at first.
    let seen = openat2(root, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), WITHIN).ok()?;
    let stat = fstat(&seen).ok()?;
    let size = u64::try_from(stat.st_size).ok()?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || size > most {
        return None;
    }
    let file = File::from(openat2(root, path, flags, Mode::empty(), WITHIN).ok()?);
    let mut out = Vec::new();
    file.take(most).read_to_end(&mut out).ok()?;
    Some(out)
}

/// Whether commands that are one line can be run.
pub(super) fn has_shell(root: &OwnedFd) -> bool {
    openat2(root, "bin/sh", OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), WITHIN).is_ok()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::Path;

    use super::*;

    fn open(path: &Path) -> OwnedFd {
        File::open(path).expect("open").into()
    }

    fn config() -> ImageConfig {
        let env = [("PATH", "/opt/it's/bin:/bin"), ("A", "x=y")].map(|(k, v)| (k.to_owned(), v.to_owned())).to_vec();
        ImageConfig { env, workdir: "/srv".to_owned(), ..ImageConfig::default() }
    }

    #[test]
    fn an_empty_tree_gets_all_a_machine_needs() {
        let dir = tempfile::tempdir().expect("dir");
        furnish(&open(dir.path()), &config()).expect("furnished");
        for (name, mode, _) in DIRECTORIES {
            let stat = fs::metadata(dir.path().join(name)).expect(name);
            assert!(stat.is_dir() && stat.permissions().mode() & 0o7777 == mode, "{name}");
        }
        assert_eq!(
            fs::read(dir.path().join("etc/mainbrella/commands")).expect("read"),
            b"/srv\0PATH=/opt/it's/bin:/bin\0A=x=y\0"
        );
        assert!(!dir.path().join("etc/profile.d").exists(), "there is no profile that would ask for it");
        assert!(!has_shell(&open(dir.path())));
        // Again, over itself.
        furnish(&open(dir.path()), &config()).expect("furnished");
    }

    #[test]
    fn the_images_user_is_written_where_it_is_not_root() {
        for (user, written) in [
            ("", None),
            ("root", None),
            ("0:0", None),
            ("0:", None),
            ("node", Some("node\n")),
            ("1000:1000", Some("1000:1000\n")),
            ("app:", Some("app\n")),
        ] {
            let dir = tempfile::tempdir().expect("dir");
            let config = ImageConfig { user: user.to_owned(), ..config() };
            furnish(&open(dir.path()), &config).expect("furnished");
            assert_eq!(fs::read_to_string(dir.path().join("etc/mainbrella/user")).ok().as_deref(), written, "{user:?}");
        }
        for bad in ["a b", "$USER", "app:a:b", "x\ny"] {
            let dir = tempfile::tempdir().expect("dir");
            let config = ImageConfig { user: bad.to_owned(), ..config() };
            assert_eq!(furnish(&open(dir.path()), &config).expect_err(bad).kind(), io::ErrorKind::InvalidData);
        }
    }

    #[test]
    fn nothing_is_written_through_links_and_what_is_in_the_way_goes() {
        let outer = tempfile::tempdir().expect("dir");
        let secret = outer.path().join("secret");
        fs::write(&secret, "untouched").expect("write");
        let root = outer.path().join("root");
        fs::create_dir_all(root.join("private/etc")).expect("mkdir");
        symlink("/private/etc", root.join("etc")).expect("link");
        symlink(outer.path(), root.join("proc")).expect("link");
        symlink("/", root.join("dev")).expect("link");
        symlink("nowhere", root.join("tmp")).expect("link");
        fs::write(root.join("workspace"), "a file").expect("write");
        for name in ["resolv.conf", "hosts", "mainbrella"] {
            symlink(&secret, root.join("private/etc").join(name)).expect("link");
        }
        fs::create_dir_all(root.join("private/etc/hostname/deep")).expect("mkdir");
        fs::write(root.join("private/etc/profile"), "for i in /etc/profile.d/*.sh; do . $i; done\n").expect("write");
        symlink(outer.path(), root.join("private/etc/profile.d")).expect("link");
        furnish(&open(&root), &config()).expect("furnished");
        assert_eq!(fs::read_to_string(&secret).expect("read"), "untouched");
        assert_eq!(fs::read_dir(outer.path()).expect("list").count(), 2);
        let is_dir = |p: &str| root.join(p).symlink_metadata().expect(p).is_dir();
        assert!(
            ["proc", "dev", "tmp", "workspace", "private/etc/mainbrella", "private/etc/profile.d"]
                .into_iter()
                .all(is_dir)
        );
        assert_eq!(fs::read(root.join("private/etc/hosts")).expect("read"), HOSTS);
        let path = fs::read_to_string(root.join("private/etc/profile.d/zz-image-path.sh")).expect("read");
        let out =
            std::process::Command::new("sh").arg("-c").arg(format!("{path} echo \"$PATH\"")).output().expect("sh");
        assert_eq!(out.stdout, b"/opt/it's/bin:/bin\n");
    }

    #[test]
    fn a_profile_that_asks_for_no_folder_is_added_to() {
        let dir = tempfile::tempdir().expect("dir");
        fs::create_dir(dir.path().join("etc")).expect("mkdir");
        fs::write(dir.path().join("etc/profile"), "PATH=/x").expect("write");
        furnish(&open(dir.path()), &config()).expect("furnished");
        let text = fs::read_to_string(dir.path().join("etc/profile")).expect("read");
        assert_eq!(text, "PATH=/x\nexport PATH='/opt/it'\\''s/bin:/bin'\n");
        assert_eq!(read(&open(dir.path()), "etc/profile", 5), None, "longer than it may be");
    }
}
