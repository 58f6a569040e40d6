//! Who a process runs as: names and numbers, looked up in the machine's own `/etc/passwd` and `/etc/group`. They are a
//! stranger's text; what cannot be read in them is not there.

use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use mainbrella_guest_protocol::limits::{PATH_MAX, USER_MAX};

/// Largest passwd or group file that is read, bytes.
const FILE_MAX: u64 = 1024 * 1024;
/// Supplementary groups a process gets at most; further ones are left out.
const GROUPS_MAX: usize = 256;
/// Longest name, bytes.
const NAME_MAX: usize = 32;

/// A user as the system knows one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// All of its groups, the first one too.
    pub(crate) groups: Vec<u32>,
    /// Its name, where it has one.
    pub(crate) name: Option<String>,
    /// Absolute.
    pub(crate) home: String,
}

/// Why nobody can be it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unknown {
    /// "user" or "group".
    pub(crate) stage: &'static str,
    pub(crate) errno: i32,
}

/// Whether `text` can be a `USER[:GROUP]`.
pub(crate) fn is_user(text: &str) -> bool {
    let (user, group) = text.split_once(':').map_or((text, None), |(user, group)| (user, Some(group)));
    text.len() <= USER_MAX && is_name(user) && group.is_none_or(is_name)
}

fn is_name(text: &str) -> bool {
    (1..=NAME_MAX).contains(&text.len())
        && !text.starts_with('-')
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
}

/// A user or group number. The largest one means "as it is" to the system calls, and is nobody's.
fn number(text: &[u8]) -> Option<u32> {
    let digits = !text.is_empty() && text.len() <= 10 && text.iter().all(u8::is_ascii_digit);
    let number = std::str::from_utf8(text).ok().filter(|_| digits)?.parse().ok()?;
    (number != u32::MAX).then_some(number)
}

/// Looks `text` (`USER[:GROUP]`) up in the files below `etc`. Blocks.
///
/// # Errors
/// When there is no such user or group, or a file cannot be read.
pub(crate) fn resolve(text: &str, etc: &Path) -> Result<Identity, Unknown> {
    let file = |name: &str, stage| {
        read(&etc.join(name)).map_err(|e| Unknown { stage, errno: e.raw_os_error().unwrap_or(libc::EIO) })
    };
    let none = |stage| Unknown { stage, errno: libc::ENOENT };
    if !is_user(text) {
        return Err(none("user"));
    }
    let (user, group) = text.split_once(':').map_or((text, None), |(user, group)| (user, Some(group)));
    let mut found = find_user(user, &file("passwd", "user")?).ok_or_else(|| none("user"))?;
    match group {
        Some(group) => {
            found.gid = find_group(group, &file("group", "group")?).ok_or_else(|| none("group"))?;
            found.groups = vec![found.gid];
        }
        None => {
            found.groups = vec![found.gid];
            if let Some(name) = &found.name {
                let more = groups_of(name, &file("group", "group")?);
                let first = found.gid;
                found.groups.extend(more.into_iter().filter(|gid| *gid != first).take(GROUPS_MAX - 1));
            }
        }
    }
    Ok(found)
}

/// A regular file of at most [`FILE_MAX`]; nothing where there is none. Whatever else lies there is not waited for.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = match std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(Vec::new()),
        other => other?,
    };
    let refused = |errno| Err(io::Error::from_raw_os_error(errno));
    if !file.metadata()?.is_file() {
        return refused(libc::EINVAL);
    }
    let mut text = Vec::new();
    file.take(FILE_MAX + 1).read_to_end(&mut text)?;
    if text.len() as u64 > FILE_MAX { refused(libc::EFBIG) } else { Ok(text) }
}

/// The lines of a file that have at least `N` parts.
fn entries<const N: usize>(file: &[u8]) -> impl Iterator<Item = [&[u8]; N]> {
    file.split(|b| *b == b'\n').filter_map(|line| {
        let mut parts = line.split(|b| *b == b':');
        let mut entry = [&b""[..]; N];
        for place in &mut entry {
            *place = parts.next()?;
        }
        Some(entry)
    })
}

/// By name, and where nobody has that name by number: a number need not be anybody's.
fn find_user(user: &str, passwd: &[u8]) -> Option<Identity> {
    let all = || {
        entries::<6>(passwd).filter_map(|[name, _, uid, gid, _, home]| Some((name, number(uid)?, number(gid)?, home)))
    };
    let wanted = number(user.as_bytes());
    let entry = all()
        .find(|(name, ..)| *name == user.as_bytes())
        .or_else(|| all().find(|(_, uid, ..)| wanted.is_some_and(|wanted| *uid == wanted)));
    let of_nobody = |uid: u32| if uid == 0 { "/root" } else { "/" };
    match entry {
        Some((name, uid, gid, home)) => {
            let text = |bytes| std::str::from_utf8(bytes).ok();
            let home = text(home).filter(|h| h.starts_with('/') && h.len() <= PATH_MAX && !h.contains('\0'));
            let name = text(name).filter(|name| is_name(name)).map(str::to_owned);
            Some(Identity {
                uid,
                gid,
                groups: Vec::new(),
                name,
                home: home.unwrap_or_else(|| of_nobody(uid)).to_owned(),
            })
        }
        None => {
            let uid = wanted.or_else(|| (user == "root").then_some(0))?;
            let name = (user == "root").then(|| user.to_owned());
            Some(Identity { uid, gid: 0, groups: Vec::new(), name, home: of_nobody(uid).to_owned() })
        }
    }
}

fn find_group(group: &str, file: &[u8]) -> Option<u32> {
    let named = entries::<3>(file).filter(|[name, ..]| *name == group.as_bytes()).find_map(|[_, _, gid]| number(gid));
    named.or_else(|| number(group.as_bytes())).or_else(|| (group == "root").then_some(0))
}

/// Groups that name `user` as a member, each once.
fn groups_of(user: &str, file: &[u8]) -> Vec<u32> {
    let mut found = Vec::new();
    for [_, _, gid, members] in entries::<4>(file) {
        if found.len() < GROUPS_MAX
            && members.split(|b| *b == b',').any(|member| member == user.as_bytes())
            && let Some(gid) = number(gid)
            && !found.contains(&gid)
        {
            found.push(gid);
        }
    }
    found
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn etc(passwd: &[u8], group: &[u8]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("passwd"), passwd).unwrap();
        std::fs::write(dir.path().join("group"), group).unwrap();
        dir
    }

    fn numbers(text: &str, etc: &tempfile::TempDir) -> Result<(u32, u32, Vec<u32>), (&'static str, i32)> {
        resolve(text, etc.path()).map(|i| (i.uid, i.gid, i.groups)).map_err(|e| (e.stage, e.errno))
    }

    const NONE: i32 = libc::ENOENT;

    #[test]
    fn users_are_found_by_name_and_by_number() {
        let etc = etc(
            b"root:x:0:0:root:/root:/bin/sh\napp:x:1000:1001:App,,,:/home/app:/bin/sh\n77:x:9:9::/nine:/bin/sh\n",
            b"root:x:0:\napp:x:1001:\ndocker:x:50:bob,app\nagain:x:50:app\nbob:x:51:apple,bob\nown:x:1001:app\nlast:x:52:app",
        );
        assert_eq!(numbers("app", &etc), Ok((1000, 1001, vec![1001, 50, 52])));
        assert_eq!(numbers("1000", &etc), Ok((1000, 1001, vec![1001, 50, 52])), "whose number it is");
        assert_eq!(numbers("app:bob", &etc), Ok((1000, 51, vec![51])), "a group instead of the user's own");
        assert_eq!(numbers("app:7", &etc), Ok((1000, 7, vec![7])));
        assert_eq!(numbers("5", &etc), Ok((5, 0, vec![0])), "a number is nobody's and still a number");
        assert_eq!(numbers("77", &etc), Ok((9, 9, vec![9])), "a name that looks like a number is a name");
        assert_eq!(numbers("nobody", &etc), Err(("user", NONE)));
        assert_eq!(numbers("app:nobody", &etc), Err(("group", NONE)));
        let app = resolve("1000", etc.path()).unwrap();
        assert_eq!((app.name.as_deref(), app.home.as_str()), (Some("app"), "/home/app"));
        let five = resolve("5", etc.path()).unwrap();
        assert_eq!((five.name, five.home.as_str()), (None, "/"));
    }

    #[test]
    fn root_is_there_without_files() {
        let dir = tempfile::tempdir().unwrap();
        let root = resolve("root:root", dir.path()).unwrap();
        assert_eq!((root.uid, root.gid, root.home.as_str()), (0, 0, "/root"));
        assert_eq!(resolve("app", dir.path()), Err(Unknown { stage: "user", errno: NONE }));
    }

    #[test]
    fn hostile_files_make_nobody_of_another_number() {
        let etc = etc(
            b"minus:x:4294967295:0::/:\nbig:x:4294967296:0::/:\nsign:x:+0:0::/:\nneg:x:-1:0::/:\ngid:x:5:4294967295::/:\n\
              hex:x:0x0:0::/:\nshort:x:0\n:x:3:3::/:\n\xff:x:6:6::relative:\nhome:x:7:7::re\0l:\nnul:x:8:8::/a\0b:/bin/sh\n\
              twice:x:11:11::/:\ntwice:x:0:0::/:\n",
            b"minus:x:4294967295:home\nempty:x::home\n\xfe\xff\nhome:x:7\ngood:x:60:,,home,,\n",
        );
        for none in ["minus", "big", "sign", "neg", "gid", "hex", "short", "4294967295", "4294967296", "99999999999"] {
            assert_eq!(numbers(none, &etc), Err(("user", NONE)), "{none}");
        }
        for bad in ["", ":", "a:", ":0", "a:b:c", "-1", "a b", "a/b", "a\0", "é", "../x", "x".repeat(33).as_str()] {
            assert_eq!(numbers(bad, &etc), Err(("user", NONE)), "{bad:?}");
            assert!(!is_user(bad), "{bad:?}");
        }
        assert!(is_user(&format!("{}:{}", "u".repeat(32), "g".repeat(32))));
        assert_eq!(numbers("6", &etc), Ok((6, 6, vec![6])));
        assert_eq!(resolve("6", etc.path()).unwrap().home, "/", "a home is an absolute path");
        assert_eq!(resolve("6", etc.path()).unwrap().name, None);
        assert_eq!(numbers("home", &etc), Ok((7, 7, vec![7, 60])));
        assert_eq!(resolve("nul", etc.path()).unwrap().home, "/");
        assert_eq!(numbers("twice", &etc), Ok((11, 11, vec![11])), "the first one counts");
        assert_eq!(numbers("6:minus", &etc), Err(("group", NONE)));
    }

    #[test]
    fn files_that_do_not_end_are_not_read() {
        let dir = etc(&vec![b'a'; FILE_MAX as usize + 1], b"");
        assert_eq!(numbers("root", &dir), Err(("user", libc::EFBIG)));
        std::fs::remove_file(dir.path().join("passwd")).unwrap();
        let name = std::ffi::CString::new(dir.path().join("passwd").to_str().unwrap()).unwrap();
        // SAFETY: the path is a C string that outlives the call.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        assert_eq!(numbers("root", &dir), Err(("user", libc::EINVAL)));
        let mut group: Vec<u8> = Vec::new();
        for gid in 100..2000 {
            group.extend(format!("g{gid}:x:{gid}:app\n").bytes());
        }
        let many = etc(b"app:x:1:1::/:/bin/sh\n", &group);
        assert_eq!(numbers("app", &many).unwrap().2.len(), GROUPS_MAX);
    }
}
