//! Listing one level, a page at a time, in the order of the names' bytes.

use std::os::fd::{AsFd, OwnedFd};

use connectrpc::ConnectError;
use mainbrella_guest_protocol::limits::{LIST_ENTRIES_MAX, LIST_OFFSET_MAX, PAGE_BYTES};
use mainbrella_guest_protocol::{fault, pb};
use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use rustix::io::Errno;

use super::{failed, path_of, stat_in};
use crate::service::blocking;

/// Names held beyond those that are asked for, before the ones that sort last are dropped.
const SPARE_NAMES: usize = 4096;

/// Entries `offset` to `offset + limit` of a directory, in messages of bounded size.
pub(crate) async fn list(request: pb::ListDirRequest) -> Result<Vec<pb::ListDirPage>, ConnectError> {
    if !(1..=LIST_ENTRIES_MAX).contains(&request.limit) || request.offset > LIST_OFFSET_MAX {
        return Err(fault("page", 0, "page: at most 1000 entries, from at most 1000000"));
    }
    blocking(move || {
        let path = path_of(&request.path)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(&path, flags, Mode::empty()).map_err(failed("open"))?;
        let (offset, limit) = (request.offset as usize, request.limit as usize);
        let (names, more) = first_names(&dir, offset + limit)?;
        pages(&dir, names.into_iter().skip(offset), more)
    })
    .await
}

type Name = Box<[u8]>;

/// The `most` names that sort first, and whether there are others.
fn first_names(dir: &OwnedFd, most: usize) -> Result<(Vec<Name>, bool), ConnectError> {
    let mut names: Vec<Name> = Vec::new();
    let mut more = false;
    for entry in Dir::read_from(dir).map_err(failed("list"))? {
        let entry = entry.map_err(failed("list"))?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(name.into());
        }
        if names.len() >= most + most / 2 + SPARE_NAMES {
            names.select_nth_unstable(most);
            names.truncate(most);
            more = true;
        }
    }
    names.sort_unstable();
    more |= names.len() > most;
    names.truncate(most);
    Ok((names, more))
}

fn pages(dir: &OwnedFd, names: impl Iterator<Item = Name>, more: bool) -> Result<Vec<pb::ListDirPage>, ConnectError> {
    let mut pages = Vec::new();
    let mut page = pb::ListDirPage::default();
    let mut bytes = 0;
    for name in names {
        let stat = match stat_in(dir.as_fd(), &name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            // Gone since it was seen: the page is one shorter.
            Err(Errno::NOENT) => continue,
            Err(errno) => return Err(failed("stat")(errno)),
        };
        bytes += name.len() + stat.symlink_target.len() + 64;
        let entry = pb::DirEntry { name: name.into(), stat: stat.into(), ..Default::default() };
        page.entries.push(entry);
        if bytes >= PAGE_BYTES {
            pages.push(std::mem::take(&mut page));
            bytes = 0;
        }
    }
    page.more = more;
    pages.push(page);
    Ok(pages)
}
