//! Files of a machine. One file a verb, as everywhere; what several share is here and in `content`.

pub(crate) mod chmod;
pub(crate) mod content;
mod gzip;
pub(crate) mod list;
pub(crate) mod mkdir;
pub(crate) mod move_file;
pub(crate) mod read;
pub(crate) mod read_tree;
pub(crate) mod read_workspace;
pub(crate) mod remove;
pub(crate) mod signed;
pub(crate) mod stat;
pub(crate) mod url;
pub(crate) mod watch;
pub(crate) mod write;
pub(crate) mod write_tree;
pub(crate) mod write_workspace;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mainbrella_api::{FileEntry, FileType};
use mainbrella_engine::{FileKind, PathStat};

use crate::error::{ApiError, ApiResult};
use crate::extract::Query;

/// Reads permission bits.
fn mode_bits(text: &str) -> ApiResult<u32> {
    let octal = (1..=5).contains(&text.len()) && text.bytes().all(|b| (b'0'..=b'7').contains(&b));
    let bits = u32::from_str_radix(text, 8).ok().filter(|m| octal && *m <= 0o7777);
    bits.ok_or_else(|| ApiError::invalid("mode must be octal permission bits such as 0644."))
}

/// The `path` that every verb of files takes.
fn path_of(query: &mut Query) -> ApiResult<String> {
    query.take("path").ok_or_else(|| ApiError::invalid("path must be given."))
}

/// What an agent works in, and what is exported and imported.
const WORKSPACE: &[u8] = b"/workspace";

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// An entry as callers see it. `path` is how it was, or could be, asked for.
fn entry(path: String, name: &[u8], stat: PathStat) -> FileEntry {
    FileEntry {
        name: lossy(name),
        path,
        name_base64: std::str::from_utf8(name).is_err().then(|| STANDARD.encode(name)),
        r#type: match stat.kind {
            FileKind::File => FileType::File,
            FileKind::Directory => FileType::Directory,
            FileKind::Symlink => FileType::Symlink,
            FileKind::Other => FileType::Other,
        },
        size: stat.stat.size,
        mode: format!("{:04o}", stat.stat.mode & 0o7777),
        uid: stat.stat.uid,
        gid: stat.stat.gid,
        mtime: stat.stat.mtime_s,
        symlink_target: stat.symlink_target.as_deref().map(lossy),
    }
}

/// The entry at a path that was asked for.
fn entry_at(path: String, stat: PathStat) -> FileEntry {
    let name = path.rsplit('/').find(|p| !p.is_empty()).unwrap_or("/").to_owned();
    entry(path, name.as_bytes(), stat)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainbrella_engine::FileStat;

    fn stat(kind: FileKind, target: Option<&[u8]>) -> PathStat {
        let stat = FileStat { size: 3, mode: 0o1644, uid: 1, gid: 2, mtime_s: -1 };
        PathStat { kind, stat, symlink_target: target.map(<[u8]>::to_vec) }
    }

    #[test]
    fn a_name_that_is_not_utf8_is_reported_and_not_hidden() {
        let e = entry("/d/\u{fffd}x".into(), b"\xffx", stat(FileKind::Symlink, Some(b"a\xfe")));
        assert_eq!((e.name.as_str(), e.name_base64.as_deref()), ("\u{fffd}x", Some("/3g=")));
        assert_eq!((e.symlink_target.as_deref(), e.mode.as_str(), e.mtime), (Some("a\u{fffd}"), "1644", -1));
        assert_eq!(entry("/d/é".into(), "é".as_bytes(), stat(FileKind::File, None)).name_base64, None);
    }

    #[test]
    fn a_path_knows_its_name() {
        for (path, name) in [("/", "/"), ("/a", "a"), ("/a/b c/", "b c"), ("//", "/")] {
            assert_eq!(entry_at(path.into(), stat(FileKind::Directory, None)).name, name);
        }
    }
}
