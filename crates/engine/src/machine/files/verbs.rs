//! What a machine's handle can do with files. Each call but a watch takes one of the four places.

use std::sync::Arc;

use bytes::Bytes;
use futures::stream::BoxStream;
use mainbrella_types::{ErrorCode, limits};

use super::{
    DirPage, FileEvents, FileReader, PathStat, Removed, TreeWritten, WriteOptions, change, check_mutable, check_path,
    list, read, tree, watch, write,
};
use crate::error::EngineError;
use crate::machine::handle::MachineHandle;

fn check_mode(mode: u32) -> Result<(), EngineError> {
    if mode > 0o7777 {
        return Err(EngineError::new(ErrorCode::InvalidRequest, "mode must be permission bits, at most 07777"));
    }
    Ok(())
}

impl MachineHandle {
    /// Opens a file for reading, from `offset` for at most `length` bytes.
    ///
    /// # Errors
    /// When the path is malformed, the guest refuses, or the machine does not run.
    pub async fn read_file(&self, path: &[u8], offset: u64, length: Option<u64>) -> Result<FileReader, EngineError> {
        check_path(path)?;
        let hold = self.file_place().await?;
        let link = self.link()?;
        self.unless_gone(read::read(&link, hold, path, offset, length)).await
    }

    /// Writes a file whole: it is replaced at the end, or not at all. Returns its size, bytes.
    ///
    /// # Errors
    /// When the path is malformed, the body breaks off, the guest refuses or its disk is full.
    pub async fn write_file(
        &self,
        path: &[u8],
        options: WriteOptions,
        body: BoxStream<'static, std::io::Result<Bytes>>,
    ) -> Result<u64, EngineError> {
        check_path(path)?;
        let hold = self.file_place().await?;
        let link = self.link()?;
        self.unless_gone(write::write(&link, hold, path, options, body)).await
    }

    /// Entries `offset` to `offset + limit` of a directory, sorted by the bytes of their names. A link to a directory is
    /// followed; links in it are told as links.
    ///
    /// # Errors
    /// When the path, offset or limit is malformed, or it is no directory.
    pub async fn list_dir(&self, path: &[u8], offset: u64, limit: u32) -> Result<DirPage, EngineError> {
        check_path(path)?;
        if !(1..=limits::LIST_LIMIT_MAX).contains(&limit) || offset > limits::LIST_OFFSET_MAX {
            return Err(EngineError::new(
                ErrorCode::InvalidRequest,
                "limit must be 1 to 1000, and offset at most 1000000",
            ));
        }
        let hold = self.file_place().await?;
        let link = self.link()?;
        self.unless_gone(list::list(&link, hold, path, offset, limit)).await
    }

    /// What is at a path: the link itself, or with `follow_symlinks` where it leads.
    ///
    /// # Errors
    /// When nothing is there.
    pub async fn stat_path(&self, path: &[u8], follow_symlinks: bool) -> Result<PathStat, EngineError> {
        check_path(path)?;
        let hold = self.file_place().await?;
        let link = self.link()?;
        self.unless_gone(list::stat(&link, hold, path, follow_symlinks)).await
    }

    /// Makes a directory with this mode; with `recursive` those above it too, and one that is there is fine.
    ///
    /// # Errors
    /// `file_exists` when something is there; when the path is the root.
    pub async fn make_dir(&self, path: &[u8], recursive: bool, mode: u32) -> Result<PathStat, EngineError> {
        check_mutable(path)?;
        check_mode(mode)?;
        let hold = self.file_place().await?;
        let link = self.link()?;
        self.unless_gone(change::make_dir(&link, hold, path, recursive, mode)).await
    }

    /// Moves an entry to a name that is free, a link as the link it is. Between file systems it is copied, and removed
    /// once the copy is complete.
    ///
    /// # Errors
    /// `file_exists` when the name is taken; when either path is the root.
    pub async fn rename(&self, source: &[u8], destination: &[u8]) -> Result<PathStat, EngineError> {
        check_mutable(source)?;
        check_mutable(destination)?;
        let hold = self.file_place().await?;
        let link = self.link()?;
        self.unless_gone(change::rename(&link, hold, source, destination)).await
    }

    /// FileEvents permission bits, of what a link leads to.
    ///
    /// # Errors
    /// When nothing is there; when the path is the root.
    pub async fn chmod(&self, path: &[u8], mode: u32) -> Result<PathStat, EngineError> {
        check_mutable(path)?;
        check_mode(mode)?;
        let hold = self.file_place().await?;
        let link = self.link()?;
        self.unless_gone(change::chmod(&link, hold, path, mode)).await
    }

    /// Removes a file, an empty directory or a link itself; with `recursive` a tree, as far as that goes.
    ///
    /// # Errors
    /// When nothing could be begun. A tree that is partly removed is a result that says what is left.
    pub async fn remove(&self, path: &[u8], recursive: bool) -> Result<Removed, EngineError> {
        check_mutable(path)?;
        let hold = self.file_place().await?;
        let link = self.link()?;
        self.unless_gone(change::remove(&link, hold, path, recursive)).await
    }

    /// A tree as a tar stream; a link at `path` is followed. An error ends the stream before its end mark.
    ///
    /// # Errors
    /// When nothing is there, or it is neither file nor directory.
    pub async fn pack_tree(&self, path: &[u8]) -> Result<BoxStream<'static, Result<Bytes, EngineError>>, EngineError> {
        check_path(path)?;
        let hold = self.file_place().await?;
        let link = self.link()?;
        self.unless_gone(tree::pack(&link, hold, path)).await
    }

    /// Unpacks a tar stream below `path`, which is made when it is missing. Files are replaced, links never written
    /// through, and nothing outside of `path` is touched. What is made belongs to the template's user, or with `keep_owners`
    /// to the numbers the archive names.
    ///
    /// # Errors
    /// When the archive is malformed or leads out; what was unpacked before stays.
    pub async fn unpack_tree(
        &self,
        path: &[u8],
        body: BoxStream<'static, std::io::Result<Bytes>>,
        keep_owners: bool,
    ) -> Result<TreeWritten, EngineError> {
        check_path(path)?;
        let hold = self.file_place().await?;
        let link = self.link()?;
        self.unless_gone(tree::unpack(&link, hold, path, body, keep_owners)).await
    }

    /// Watches a directory, or with `recursive` everything below it on the same file system. Once this returns,
    /// everything is told. A watch is no use of the machine: it does not keep it from being idle.
    ///
    /// # Errors
    /// When it is no directory, or too many are watched at once.
    pub async fn watch_dir(&self, path: &[u8], recursive: bool) -> Result<FileEvents, EngineError> {
        check_path(path)?;
        drop(self.enter().await?);
        let seat = Arc::clone(&self.shared.watches).try_acquire_owned().map_err(|_| {
            EngineError::new(ErrorCode::Overloaded, "this machine is watched as often at once as it may")
        })?;
        let link = self.link()?;
        let (this, gone) = (self.clone(), self.shared.gone.clone());
        let begun = watch::watch(link, seat, path.to_vec(), recursive, gone, move || this.over());
        self.unless_gone(begun).await
    }
}
