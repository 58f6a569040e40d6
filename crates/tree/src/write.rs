//! A tar stream of entries that somebody names one by one.

use crate::header::{self, BLOCK, Header, Kind, padding};

/// What all entries have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Meta {
    /// Permissions, with the bits for set-user-id and the like.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// When it was changed, seconds since 1970.
    pub mtime: i64,
}

/// Appends to a tar stream. Content of files is appended by whoever writes one: exactly as many bytes as were announced, then
/// [`Self::pad`].
#[derive(Debug, Default)]
pub struct Archive {
    out: Vec<u8>,
}

impl Archive {
    fn entry(&mut self, kind: Kind, path: &str, link: &str, size: u64, meta: Meta) {
        let Meta { mode, uid, gid, mtime } = meta;
        let (path, link) = (path.as_bytes().to_vec(), link.as_bytes().to_vec());
        header::write(&mut self.out, &Header { kind, path, link, mode, uid, gid, size, mtime });
    }

    /// A directory.
    pub fn directory(&mut self, path: &str, meta: Meta) {
        self.entry(Kind::Directory, &format!("{path}/"), "", 0, meta);
    }

    /// A symbolic link.
    pub fn link(&mut self, path: &str, target: &str, meta: Meta) {
        self.entry(Kind::Symlink, path, target, 0, meta);
    }

    /// The beginning of a file of `size` bytes.
    pub fn file(&mut self, path: &str, size: u64, meta: Meta) {
        self.entry(Kind::File, path, "", size, meta);
    }

    /// Content.
    pub fn content(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    /// The end of a file of `size` bytes.
    pub fn pad(&mut self, size: u64) {
        self.out.resize(self.out.len() + padding(size), 0);
    }

    /// The end mark.
    pub fn end(&mut self) {
        self.out.resize(self.out.len() + 2 * BLOCK, 0);
    }

    /// What was appended since the last call.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.out)
    }

    /// Bytes that were not taken yet.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.out.len()
    }
}
