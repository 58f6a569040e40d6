//! Files. Contents and trees travel as raw bodies, never inside JSON.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A file was written whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FileWritten {
    /// Bytes written.
    pub size: u64,
}

/// What something in a machine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum FileType {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A device, socket or FIFO.
    Other,
}

/// Something in a machine's file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FileEntry {
    /// Its name. Bytes that are not UTF-8 are shown as U+FFFD; `nameBase64` then has the bytes.
    pub name: String,
    /// Its absolute path, as the request named it.
    pub path: String,
    /// The bytes of the name, base64, when it is not UTF-8; else `null`.
    pub name_base64: Option<String>,
    /// What it is.
    pub r#type: FileType,
    /// Size, bytes.
    pub size: u64,
    /// Permission bits, octal, e.g. `0644`.
    pub mode: String,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last modification, whole seconds since the Unix epoch.
    pub mtime: i64,
    /// Where a link leads; `null` for anything else. Bytes that are not UTF-8 are shown as U+FFFD.
    pub symlink_target: Option<String>,
}

/// A page of a directory: one level, sorted by the bytes of the names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FileList {
    /// The entries.
    pub entries: Vec<FileEntry>,
    /// The `offset` of the next page; `null` on the last one.
    pub next_offset: Option<u64>,
}

/// Makes a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MakeDirectory {
    /// Absolute path; not the root.
    pub path: String,
    /// Make missing directories above it, and be content when it is there.
    #[serde(default)]
    pub recursive: bool,
    /// Permission bits, octal. Default `0755`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
}

/// Moves something to a name that is free.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MoveFile {
    /// Absolute path of what is moved, a link as the link it is; not the root.
    pub source: String,
    /// Absolute path it gets; nothing may be there.
    pub destination: String,
}

/// Changes permission bits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ChangeMode {
    /// Absolute path, not the root; a link is followed.
    pub path: String,
    /// Permission bits, octal, e.g. `0640`.
    pub mode: String,
}

/// Removes something.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RemoveFile {
    /// Absolute path, not the root; a link is removed itself.
    pub path: String,
    /// Remove a directory with everything in it.
    #[serde(default)]
    pub recursive: bool,
}

/// What a removal did. A tree that could be removed only in part is a result, not an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RemoveResult {
    /// Entries that are gone.
    pub removed: u64,
    /// Paths of what is left, at most 100.
    pub remaining: Vec<String>,
    /// How many are known to be left; 0 when everything is gone.
    pub remaining_count: u64,
    /// Why, in a few words; `null` when nothing is left.
    pub reason: Option<String>,
}

/// A tree was unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TreeWritten {
    /// Files, directories and links that were made.
    pub entries: u64,
    /// Bytes of file content.
    pub bytes: u64,
    /// Entries that were left out: devices and FIFOs.
    pub skipped: u64,
}

/// What a signed URL is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub enum UrlMethod {
    /// Read the file.
    #[serde(rename = "GET")]
    Get,
    /// Write it.
    #[serde(rename = "PUT")]
    Put,
}

impl UrlMethod {
    /// The method as HTTP names it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Put => "PUT",
        }
    }
}

/// Asks for a URL that reads or writes one file without an API key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CreateFileUrl {
    /// Absolute path in the machine.
    pub path: String,
    /// What it is for.
    pub method: UrlMethod,
    /// How long it can be used, seconds. Default 900.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 10, maximum = 3600)]
    pub expires_in_seconds: Option<u64>,
    /// With `PUT`: most bytes that may be written. Default 5 GiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<u64>,
}

/// A signed URL. Whoever has it can use it: it is a secret.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FileUrl {
    /// The URL.
    pub url: String,
    /// When it ends, RFC 3339. It also ends with the machine and with the API key that asked for it.
    pub expires_at: String,
    /// The method to use it with.
    pub method: UrlMethod,
}

impl std::fmt::Debug for FileUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileUrl")
            .field("expires_at", &self.expires_at)
            .field("method", &self.method)
            .finish_non_exhaustive()
    }
}

/// What is told of a watched directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum FileEventType {
    /// The first event: from now on everything is told.
    Ready,
    /// Something is there that was not.
    Created,
    /// The content of a file changed; many changes in a row may be told once.
    Modified,
    /// Something is gone, or was moved out.
    Removed,
    /// It has another name: `newPath`.
    Renamed,
    /// Its mode, owner or times changed.
    Attributes,
    /// Changes at or below `path` may have been missed: look again.
    Overflow,
    /// The watched directory is gone; the last event.
    Ended,
    /// The watch failed; the last event. `code`, `message` and `hint` say why.
    Error,
    /// One that this build does not know.
    #[serde(other)]
    Unknown,
}

/// One event of a watch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FileEvent {
    /// What happened.
    pub r#type: FileEventType,
    /// Where. Bytes that are not UTF-8 are shown as U+FFFD.
    #[serde(default)]
    pub path: String,
    /// With `renamed`: the new path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new_path: Option<String>,
    /// With `error`: a stable name for programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// With `error`: one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// With `error`: what to do next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}
