//! What a machine has before its first `Configure`: a console, a loopback, names.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use rustix::net::{AddressFamily, SocketType, socket};
use rustix::process::{Resource, Rlimit, setrlimit};

use super::{network, say};
use crate::{Defaults, users};

/// Makes the console our output and nothing our input.
pub(super) fn use_console() {
    let null = OpenOptions::new().read(true).open("/dev/null");
    let console = OpenOptions::new().write(true).open("/dev/console").or_else(|_| {
        // Without a console what we say goes nowhere; the machine still works.
        OpenOptions::new().write(true).open("/dev/null")
    });
    if let Ok(null) = null {
        let _ = rustix::stdio::dup2_stdin(null);
    }
    if let Ok(console) = console {
        let _ = rustix::stdio::dup2_stdout(&console);
        let _ = rustix::stdio::dup2_stderr(&console);
    }
}

/// Sets up what can be set up; what cannot is said on the console, and the machine goes on without.
pub(super) fn prepare(defaults: &Defaults) {
    let tell = |what: &str, result: io::Result<()>| {
        if let Err(error) = result {
            say(&format!("{what}: {error}"));
        }
    };
    tell("hostname", rustix::system::sethostname(b"mainbrella").map_err(io::Error::from));
    tell("loopback", loopback_up());
    tell("network", network::prepare());
    tell("/run/mainbrella", crate::reseed::prepare(Path::new(crate::reseed::SEATS)));
    let owner = defaults.user.as_deref().and_then(|user| users::resolve(user, Path::new("/etc")).ok());
    tell("/workspace", workspace(Path::new("/workspace"), owner.map(|who| (who.uid, who.gid))));
    tell("/etc/hosts", write_missing(Path::new("/etc/hosts"), "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost\n"));
    tell("/etc/resolv.conf", write_missing(Path::new("/etc/resolv.conf"), "# Written by the machine's network.\n"));
    // The agent is the last to go when memory ends; its children are put back to normal as they start.
    tell("oom_score_adj", std::fs::write("/proc/self/oom_score_adj", "-1000"));
    // Without it a machine short of memory reads its programs from disk again and again for minutes before anything is ended.
    tell("memory pressure", write_present(Path::new("/sys/kernel/mm/lru_gen/min_ttl_ms"), "1000"));
    let files = Rlimit { current: Some(65_536), maximum: Some(1_048_576) };
    tell("file limit", setrlimit(Resource::Nofile, files).map_err(io::Error::from));
}

/// Makes the workspace where there is none. One that is root's and that nothing was put in becomes `owner`'s.
fn workspace(path: &Path, owner: Option<(u32, u32)>) -> io::Result<()> {
    match std::fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
        Ok(()) => std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))?,
    }
    let Some((uid, gid)) = owner else { return Ok(()) };
    let stat = path.symlink_metadata()?;
    if stat.is_dir() && (stat.uid(), stat.gid()) == (0, 0) && std::fs::read_dir(path)?.next().is_none() {
        std::os::unix::fs::lchown(path, Some(uid), Some(gid))?;
    }
    Ok(())
}

/// Writes a file that is not there. A symbolic link that leads nowhere counts as there: somebody wanted it so.
fn write_missing(path: &Path, text: &str) -> io::Result<()> {
    if path.symlink_metadata().is_ok() {
        return Ok(());
    }
    std::fs::write(path, text)
}

/// Writes a setting that this kernel may not have.
fn write_present(path: &Path, value: &str) -> io::Result<()> {
    match std::fs::write(path, value) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn loopback_up() -> io::Result<()> {
    let socket: OwnedFd = socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    network::up(&socket, "lo")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_workspace_of_roots_becomes_the_users() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("workspace");
        let owner = || (path.metadata().unwrap().uid(), path.metadata().unwrap().gid());
        workspace(&path, None).unwrap();
        assert_eq!(owner(), (0, 0));
        std::fs::write(path.join("file"), "").unwrap();
        workspace(&path, Some((1000, 1001))).unwrap();
        assert_eq!(owner(), (0, 0), "somebody has put something there");
        std::fs::remove_file(path.join("file")).unwrap();
        workspace(&path, Some((1000, 1001))).unwrap();
        assert_eq!(owner(), (1000, 1001));
        workspace(&path, Some((5, 5))).unwrap();
        assert_eq!(owner(), (1000, 1001), "it has an owner");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o7777, 0o755);
    }

    #[test]
    fn what_is_there_stays_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let hosts = dir.path().join("hosts");
        write_missing(&hosts, "new").unwrap();
        write_missing(&hosts, "other").unwrap();
        assert_eq!(std::fs::read_to_string(&hosts).unwrap(), "new");
        let link = dir.path().join("resolv.conf");
        std::os::unix::fs::symlink(dir.path().join("later"), &link).unwrap();
        write_missing(&link, "x").unwrap();
        assert!(!dir.path().join("later").exists());
    }
}
