//! Images of containers: named, fetched from registries and archives, verified, and laid out as trees.
//!
//! Everything here is a stranger's: documents are bounded before they are read, nothing is used before its digest was found
//! right, and layers are laid out by [`mainbrella_tree::Layers`], which nothing leads out of. Calls block; they need no async
//! runtime around them and must not be made from within one.

mod archive;
mod digest;
mod document;
mod error;
mod image;
mod reference;
mod registry;
mod source;
mod stream;

pub use digest::Digest;
pub use document::{Health, ImageConfig};
pub use error::OciError;
pub use image::Image;
pub use mainbrella_tree::Laid;
pub use reference::Reference;
pub use registry::{Access, Credentials};
pub use source::Source;
pub use stream::{Quiet, Watch};
