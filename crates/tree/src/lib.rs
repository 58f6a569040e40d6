//! Trees of files: walked, packed as tar, unpacked, laid out in layers, removed, copied.
//!
//! Used inside machines and on hosts, on names and archives that strangers made. Nothing here follows a link or a
//! `..` out of the tree it was given, enters another mounted file system, recurses on the stack, or holds more in
//! memory than one directory's names. Everything is pulled or pushed in pieces, so that neither side needs a thread.

mod copy;
mod error;
mod header;
mod index;
mod layer;
mod name;
mod pack;
mod remove;
mod unpack;
mod walk;
mod write;

pub use copy::copy;
pub use error::TreeError;
pub use index::{Member, index};
pub use layer::{Laid, LayerLimits, Layers};
pub use name::{Unsafe, safe_parts};
pub use pack::{PackOptions, Packer};
pub use remove::{REMAINING_NAMED_MAX, Removal, remove};
pub use unpack::{Owners, UnpackOptions, Unpacked, Unpacker};
pub use walk::{NAMES_BYTES_MAX, Step, Walk};
pub use write::{Archive, Meta};

/// Longest path in an archive, bytes: what a Linux system call takes, less the final NUL.
pub const PATH_MAX: usize = 4095;
/// Longest name of one component, bytes.
pub const NAME_MAX: usize = 255;
