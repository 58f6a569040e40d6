//! Files of a machine: streams in both directions, memory flat on this side whatever the size. One file a verb, or a
//! few that are alike; nothing a guest says is believed before it is checked.

pub(crate) mod change;
pub(crate) mod list;
mod read;
mod relay;
mod tree;
mod upload;
mod verbs;
pub(crate) mod watch;
mod write;

use std::time::Duration;

use mainbrella_guest_protocol::GuestError;
use mainbrella_types::{ErrorCode, limits};
use tokio::sync::OwnedSemaphorePermit;

use crate::error::EngineError;
use crate::machine::command::reason;
use crate::machine::gate::Pass;
use crate::machine::link::silent;

pub use change::Removed;
pub use list::{DirEntry, DirPage, FileKind, PathStat};
pub use read::FileReader;
pub use tree::TreeWritten;
pub use watch::{FileEvent, FileEventKind, FileEvents};
pub use write::WriteOptions;

/// Longest pause between two steps of a transfer, and longest time of one small operation.
pub(crate) const FILE_DEADLINE: Duration = Duration::from_secs(30);
/// How long a caller may take nothing of what it reads: shorter than others wait for a place.
const READER_DEADLINE: Duration = Duration::from_secs(25);
/// Chunks on their way between the two sides of one transfer.
const CHUNKS_IN_FLIGHT: usize = 4;

/// What is held while a file operation runs: its place among the four, and the machine's attention.
pub(crate) struct Hold {
    pub(crate) _place: OwnedSemaphorePermit,
    pub(crate) _pass: Pass,
}

/// Metadata of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStat {
    /// Bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last modification, seconds since the epoch.
    pub mtime_s: i64,
}

/// Checks a guest path.
///
/// # Errors
/// When it is not absolute, too long, or holds a NUL.
pub fn check_path(path: &[u8]) -> Result<(), EngineError> {
    let component_too_long = path.split(|b| *b == b'/').any(|c| c.len() > limits::PATH_COMPONENT_MAX);
    if path.first() != Some(&b'/') || path.contains(&0) {
        return Err(EngineError::new(ErrorCode::InvalidRequest, "path must be absolute and without NUL"));
    }
    if path.len() > limits::PATH_MAX || component_too_long {
        return Err(EngineError::new(
            ErrorCode::InvalidRequest,
            "path must be at most 4095 bytes, each name in it at most 255",
        ));
    }
    Ok(())
}

/// Checks the path of something that is to be changed: it cannot be the root.
///
/// # Errors
/// As [`check_path`], and for the root however it is spelled. (What only links make the root, the guest refuses.)
pub fn check_mutable(path: &[u8]) -> Result<(), EngineError> {
    check_path(path)?;
    let last = path.split(|b| *b == b'/').rfind(|p| !p.is_empty() && *p != b".");
    if last.is_none_or(|name| name == b"..") {
        return Err(not_the_root());
    }
    Ok(())
}

fn not_the_root() -> EngineError {
    EngineError::new(ErrorCode::InvalidRequest, "the path must name something below the root, and not end with ..")
}

fn too_slow() -> EngineError {
    EngineError::new(ErrorCode::DeadlineExceeded, "the machine made no progress with the file for 30 seconds")
}

fn file_failed(error: connectrpc::ConnectError) -> EngineError {
    let fault = GuestError::from_connect(&error);
    let why = reason(&std::io::Error::from_raw_os_error(fault.errno));
    let failed = |code, message: &str| EngineError::new(code, message).because(fault.to_string());
    match (fault.errno, fault.stage.as_str()) {
        (0, "") => match fault.code {
            connectrpc::ErrorCode::Unimplemented => failed(
                ErrorCode::Unsupported,
                "this machine was made by an earlier version of the service, which could not do this",
            ),
            connectrpc::ErrorCode::DeadlineExceeded => too_slow().because(fault.to_string()),
            _ => silent(&fault.to_string()),
        },
        (_, "not-a-file") => failed(ErrorCode::FileError, "only regular files can be read or written"),
        (0, "root") => not_the_root().because(fault.to_string()),
        (0, "many") => failed(ErrorCode::FileError, "a directory has more entries than one operation takes"),
        (0, "moved") => failed(ErrorCode::FileError, "a directory was moved away meanwhile"),
        (0, "changed") => failed(ErrorCode::FileError, "a file became shorter while it was read"),
        (0, "source-left") => {
            failed(ErrorCode::FileError, "the destination is complete, but not all of the source could be removed")
        }
        (0, stage) => failed(ErrorCode::FileError, &format!("the machine refused the file operation at {stage}")),
        (_, "watches") => failed(ErrorCode::Overloaded, "this machine is watched as often at once as it may"),
        (libc::ETIMEDOUT, "time") => failed(
            ErrorCode::DeadlineExceeded,
            "the move to another file system took longer than 25 seconds and was undone",
        ),
        (libc::ENOENT, _) => failed(ErrorCode::FileNotFound, "no such file or directory in the machine"),
        (libc::EEXIST | libc::ENOTDIR, "parents") => {
            failed(ErrorCode::FileError, "a part of the path above it is no directory in the machine")
        }
        (libc::EEXIST, _) => failed(ErrorCode::FileExists, "there is a file of this name in the machine already"),
        (libc::ENOSPC | libc::EDQUOT, _) => {
            failed(ErrorCode::GuestDiskFull, "the machine's disk is full; nothing was written")
        }
        _ => failed(ErrorCode::FileError, &format!("the machine's file system answered: {why}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_any_name_are_accepted_and_only_malformed_ones_refused() {
        for ok in [&b"/a"[..], b"/", b"/re\"port", b"/a\nb", b"/x\\", "/é".as_bytes(), b"/\xff\xfe", b"/-rf"] {
            assert!(check_path(ok).is_ok(), "{ok:?}");
        }
        let long = [b"/".as_slice(), &[b'x'; 255]].concat();
        assert!(check_path(&long).is_ok());
        let longer = [b"/".as_slice(), &[b'x'; 256]].concat();
        for bad in [&b""[..], b"a", b"./a", b"/a\0b", &longer, &b"/x".repeat(2048)] {
            assert_eq!(check_path(bad).err().map(|e| e.code()), Some(ErrorCode::InvalidRequest));
        }
    }

    #[test]
    fn the_root_cannot_be_changed_however_it_is_spelled() {
        for root in [&b"/"[..], b"//", b"/.", b"/./.", b"/..", b"/tmp/..", b"/tmp/../"] {
            assert_eq!(check_mutable(root).err().map(|e| e.code()), Some(ErrorCode::InvalidRequest), "{root:?}");
        }
        for ok in [&b"/a"[..], b"/a/", b"/a/.", b"/..a", b"/a/../b"] {
            assert!(check_mutable(ok).is_ok(), "{ok:?}");
        }
    }

    #[test]
    fn what_a_guest_refuses_is_said_in_words_of_ours() {
        use connectrpc::ConnectError;
        use mainbrella_guest_protocol::fault;
        let told = |e: ConnectError| {
            let e = file_failed(e);
            assert!(!e.message().contains("secret"), "{}", e.message());
            e.code()
        };
        assert_eq!(told(fault("open", libc::ENOENT, "secret")), ErrorCode::FileNotFound);
        assert_eq!(told(fault("rename", libc::EEXIST, "secret")), ErrorCode::FileExists);
        assert_eq!(told(fault("root", 0, "secret")), ErrorCode::InvalidRequest);
        assert_eq!(told(fault("time", libc::ETIMEDOUT, "secret")), ErrorCode::DeadlineExceeded);
        assert_eq!(told(fault("watches", libc::EMFILE, "secret")), ErrorCode::Overloaded);
        assert_eq!(told(fault("remove", libc::ENOTEMPTY, "secret")), ErrorCode::FileError);
        assert_eq!(told(ConnectError::unimplemented("secret")), ErrorCode::Unsupported);
        assert_eq!(told(ConnectError::deadline_exceeded("secret")), ErrorCode::DeadlineExceeded);
        assert_eq!(told(ConnectError::unavailable("secret")), ErrorCode::GuestUnavailable);
    }
}
