//! What the image a machine is made of says of its commands. Read once, at boot: what a user does to the file later changes
//! nothing.

use std::collections::HashMap;
use std::ffi::CString;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use mainbrella_guest_protocol::limits::{ENV_BYTES_MAX, PATH_MAX, USER_MAX};

use crate::jobs::check_env;
use crate::users::is_user;

/// Where an image has it: a directory, then `NAME=VALUE` as often as need be, each ended by a NUL.
const FILE: &str = "etc/mainbrella/commands";
/// Where an image has the user of its commands: `USER[:GROUP]`.
const USER_FILE: &str = "etc/mainbrella/user";

/// Environment, directory and user that commands have when nobody says otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Defaults {
    /// Below what the host sets for all commands and what comes with each.
    pub env: HashMap<String, String>,
    /// Where commands begin, if it is there.
    pub cwd: Option<CString>,
    /// Who they run as, and whom files belong to that a host writes; `None`: root.
    pub user: Option<String>,
}

impl Defaults {
    /// What the image below `root` says; nothing when it says nothing that can be used.
    #[must_use]
    pub fn of(root: &Path) -> Self {
        let most = (ENV_BYTES_MAX + PATH_MAX + 2) as u64;
        let mut read = text_of(&root.join(FILE), most).map_or_else(Self::default, |text| Self::parse(&text));
        let user = text_of(&root.join(USER_FILE), USER_MAX as u64 + 1);
        read.user = user.map(|text| text.trim_end_matches('\n').to_owned()).filter(|user| is_user(user));
        read
    }

    fn parse(text: &str) -> Self {
        let mut parts = text.split_terminator('\0');
        let cwd = parts.next().filter(|dir| dir.starts_with('/') && dir.len() <= PATH_MAX);
        let env: HashMap<String, String> = parts
            .filter_map(|one| one.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        let env = if check_env(env.iter()).is_ok() { env } else { HashMap::new() };
        Self { env, cwd: cwd.and_then(|dir| CString::new(dir).ok()), user: None }
    }
}

/// A regular file of at most `most` bytes of text. Whatever else lies there is not waited for.
fn text_of(path: &Path, most: u64) -> Option<String> {
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
    let file = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    let mut text = String::new();
    let fits = file.metadata().is_ok_and(|m| m.is_file() && m.len() <= most);
    (fits && file.take(most).read_to_string(&mut text).is_ok()).then_some(text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_image_may_say_where_and_with_what_commands_run() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(Defaults::of(root.path()), Defaults::default());
        let file = root.path().join(FILE);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, "/srv/app\0A=1\0B=x=y\nz\0").unwrap();
        let read = Defaults::of(root.path());
        assert_eq!(read.cwd.as_deref(), Some(c"/srv/app"));
        assert_eq!(read.env, [("A", "1"), ("B", "x=y\nz")].map(|(k, v)| (k.to_owned(), v.to_owned())).into());
        std::fs::write(&file, "\0A=1\0").unwrap();
        assert_eq!((Defaults::of(root.path()).cwd, Defaults::of(root.path()).env.len()), (None, 1));
        std::fs::write(&file, "x".repeat(1 << 20)).unwrap();
        assert_eq!(Defaults::of(root.path()), Defaults::default());
        std::fs::remove_file(&file).unwrap();
        let name = CString::new(file.to_str().unwrap()).unwrap();
        // SAFETY: the path is a C string that outlives the call.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        assert_eq!(Defaults::of(root.path()), Defaults::default(), "one that nobody writes to is not waited for");
    }

    #[test]
    fn an_image_may_say_who_commands_run_as() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join(USER_FILE);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        for (text, user) in [
            ("app", Some("app")),
            ("1000:node\n", Some("1000:node")),
            ("", None),
            ("a b", None),
            ("app\nroot", None),
            (":0", None),
            (&"x".repeat(67), None),
        ] {
            std::fs::write(&file, text).unwrap();
            assert_eq!(Defaults::of(root.path()).user.as_deref(), user, "{text:?}");
        }
        std::fs::write(&file, b"\xff").unwrap();
        assert_eq!(Defaults::of(root.path()).user, None);
        std::fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", &file).unwrap();
        assert_eq!(Defaults::of(root.path()).user, None, "a link is no answer");
    }
}
