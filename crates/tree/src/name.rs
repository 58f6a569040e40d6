//! Names in archives, made safe.

use crate::{NAME_MAX, PATH_MAX};

/// Why a name in an archive is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unsafe {
    /// It goes up.
    #[error("a name in the archive has `..` in it")]
    Up,
    /// It has a NUL.
    #[error("a name in the archive has a NUL in it")]
    Nul,
    /// It is longer than a path may be.
    #[error("a name in the archive is too long")]
    Long,
}

/// The components of a name in an archive, below the root of the tree: without empty ones and `.`, and never up.
/// A leading `/` means the root of the tree. Empty: the root itself.
///
/// # Errors
/// When the name could lead out of the tree or nowhere.
pub fn safe_parts(name: &[u8]) -> Result<Vec<&[u8]>, Unsafe> {
    if name.contains(&0) {
        return Err(Unsafe::Nul);
    }
    let parts: Vec<&[u8]> = name.split(|b| *b == b'/').filter(|p| !p.is_empty() && *p != b".").collect();
    if parts.contains(&b"..".as_slice()) {
        return Err(Unsafe::Up);
    }
    let length: usize = parts.iter().map(|p| p.len() + 1).sum();
    if length > PATH_MAX || parts.iter().any(|p| p.len() > NAME_MAX) {
        return Err(Unsafe::Long);
    }
    Ok(parts)
}
