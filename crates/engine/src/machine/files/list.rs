//! Listing and looking. What a guest says of its names is checked before it is believed.

use mainbrella_guest_protocol::pb;
use mainbrella_types::limits;
use tokio::time::timeout;

use super::{FILE_DEADLINE, FileStat, Hold, file_failed, too_slow};
use crate::error::EngineError;
use crate::machine::link::{Link, silent};

/// What something in a machine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A device, socket or FIFO.
    Other,
}

/// What is at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathStat {
    /// What it is.
    pub kind: FileKind,
    /// Its metadata.
    pub stat: FileStat,
    /// Where a link leads.
    pub symlink_target: Option<Vec<u8>>,
}

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// Its name: bytes, not always UTF-8.
    pub name: Vec<u8>,
    /// What it is.
    pub stat: PathStat,
}

/// A page of a directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DirPage {
    /// Sorted by the bytes of their names.
    pub entries: Vec<DirEntry>,
    /// Others follow.
    pub more: bool,
}

/// Takes what a guest says is at a path.
pub(super) fn path_stat(stat: pb::FileStat) -> Result<PathStat, &'static str> {
    use pb::file_stat::Type;
    let kind = match stat.r#type.as_known() {
        Some(Type::TYPE_FILE) => FileKind::File,
        Some(Type::TYPE_DIRECTORY) => FileKind::Directory,
        Some(Type::TYPE_SYMLINK) => FileKind::Symlink,
        _ => FileKind::Other,
    };
    let target = stat.symlink_target;
    if target.len() > limits::PATH_MAX || target.contains(&0) {
        return Err("a link to nowhere a link can lead");
    }
    Ok(PathStat {
        kind,
        stat: FileStat {
            size: stat.size,
            mode: stat.mode & 0o7777,
            uid: stat.uid,
            gid: stat.gid,
            mtime_s: stat.mtime_s,
        },
        symlink_target: (kind == FileKind::Symlink).then_some(target),
    })
}

/// Collects a page from what a guest says: never more entries than were asked for, each a name, in order.
#[derive(Debug)]
pub(super) struct Collector {
    page: DirPage,
    most: usize,
}

impl Collector {
    pub(super) fn new(most: usize) -> Self {
        Self { page: DirPage::default(), most }
    }

    pub(super) fn take(&mut self, part: pb::ListDirPage) -> Result<(), &'static str> {
        for entry in part.entries {
            let (name, stat) = (entry.name, entry.stat.into_option().ok_or("an entry without metadata")?);
            if self.page.entries.len() >= self.most {
                return Err("more entries than were asked for");
            }
            let is_name = (1..=limits::PATH_COMPONENT_MAX).contains(&name.len())
                && !name.iter().any(|b| matches!(b, 0 | b'/'))
                && name != b"."
                && name != b"..";
            if !is_name || self.page.entries.last().is_some_and(|last| last.name >= name) {
                return Err("a listing with a name that cannot be there");
            }
            self.page.entries.push(DirEntry { name, stat: path_stat(stat)? });
        }
        self.page.more = part.more;
        Ok(())
    }

    pub(super) fn finish(self) -> DirPage {
        self.page
    }
}

pub(crate) async fn list(
    link: &Link,
    _hold: Hold,
    path: &[u8],
    offset: u64,
    limit: u32,
) -> Result<DirPage, EngineError> {
    let client = link.client().await?;
    let request = pb::ListDirRequest { path: path.to_vec(), offset, limit, ..Default::default() };
    let listed = timeout(FILE_DEADLINE, async {
        let mut stream = client.streams().list_dir(request).await.map_err(file_failed)?;
        let mut collector = Collector::new(limit as usize);
        while let Some(part) = stream.message::<pb::ListDirPage>().await.map_err(file_failed)? {
            collector.take(part.to_owned_message()).map_err(silent)?;
        }
        Ok(collector.finish())
    });
    listed.await.map_err(|_| too_slow())?
}

pub(crate) async fn stat(
    link: &Link,
    _hold: Hold,
    path: &[u8],
    follow_symlinks: bool,
) -> Result<PathStat, EngineError> {
    let client = link.client().await?;
    let request = pb::StatFileRequest { path: path.to_vec(), follow_symlinks, ..Default::default() };
    let answer = timeout(FILE_DEADLINE, client.rpc().stat_file(request)).await.map_err(|_| too_slow())?;
    path_stat(answer.map_err(file_failed)?.into_owned()).map_err(silent)
}

/// Any bytes as parts of a listing: what is taken is names, in order, no more than asked for.
#[cfg(any(test, fuzzing))]
pub(crate) fn any_listing(bytes: &[u8]) {
    use buffa::Message as _;
    let mut collector = Collector::new(20);
    for part in bytes.chunks(bytes.len().div_ceil(2).max(1)) {
        let Ok(message) = pb::ListDirPage::decode_from_slice(part) else { break };
        if collector.take(message).is_err() {
            break;
        }
    }
    let page = collector.finish();
    assert!(page.entries.len() <= 20 && page.entries.windows(2).all(|w| w[0].name < w[1].name));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry(name: Vec<u8>, kind: i32, target: Vec<u8>) -> pb::DirEntry {
        let stat = pb::FileStat {
            r#type: buffa::EnumValue::from(kind),
            mode: u32::MAX,
            symlink_target: target,
            ..Default::default()
        };
        pb::DirEntry { name, stat: stat.into(), ..Default::default() }
    }

    fn name() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![
            proptest::collection::vec(prop_oneof![Just(b'.'), Just(b'/'), Just(0u8), Just(b'a'), any::<u8>()], 0..4),
            Just(vec![b'n'; 256])
        ]
    }

    proptest! {
        /// Whatever a guest lists, what is taken is names, in order, no more than asked for.
        #[test]
        fn only_names_in_order_are_taken(most in 0usize..20,
            parts in proptest::collection::vec((proptest::collection::vec((name(), -2i32..9, 0usize..6000), 0..8), any::<bool>()), 0..6)) {
            let mut collector = Collector::new(most);
            for (entries, more) in parts {
                let entries = entries.into_iter().map(|(n, k, t)| entry(n, k, vec![b't'; t])).collect();
                if collector.take(pb::ListDirPage { entries, more, ..Default::default() }).is_err() {
                    break;
                }
            }
            let page = collector.finish();
            prop_assert!(page.entries.len() <= most);
            prop_assert!(page.entries.windows(2).all(|w| w[0].name < w[1].name));
            for e in &page.entries {
                prop_assert!(!e.name.is_empty() && e.name.len() <= 255 && !e.name.contains(&b'/') && e.name != b"..");
                prop_assert!(e.stat.stat.mode <= 0o7777);
                prop_assert!(e.stat.symlink_target.as_ref().is_none_or(|t| t.len() <= limits::PATH_MAX));
                prop_assert_eq!(e.stat.symlink_target.is_some(), e.stat.kind == FileKind::Symlink);
            }
        }

        /// Bytes that are no message, or any message, do no harm either.
        #[test]
        fn any_bytes_can_be_decoded(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            use buffa::Message as _;
            if let Ok(part) = pb::ListDirPage::decode_from_slice(&bytes) {
                let mut collector = Collector::new(5);
                let _ = collector.take(part);
                prop_assert!(collector.finish().entries.len() <= 5);
            }
            if let Ok(stat) = pb::FileStat::decode_from_slice(&bytes) {
                let _ = path_stat(stat);
            }
        }
    }

    #[test]
    fn an_honest_listing_is_taken_whole() {
        let mut collector = Collector::new(3);
        let names = [&b"a"[..], b"b", b"\xff"];
        for n in names {
            collector
                .take(pb::ListDirPage { entries: vec![entry(n.to_vec(), 1, vec![])], more: true, ..Default::default() })
                .expect("taken");
        }
        let page = collector.finish();
        assert!(page.more && page.entries.iter().map(|e| e.name.as_slice()).eq(names));
    }
}
