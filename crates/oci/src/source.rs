//! Where an image comes from.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::archive;
use crate::error::OciError;
use crate::image::Image;
use crate::reference::Reference;
use crate::registry::{self, Access};
use crate::stream::Watch;

/// Where an image comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A registry.
    Registry(Reference),
    /// A file or directory: what `docker save` writes, or an OCI layout, as a directory or in a tar archive. The second part
    /// says which of several images, by its name or digest.
    Local(PathBuf, Option<String>),
}

impl Source {
    /// Fetches the image. What is downloaded goes to `work`, an empty directory that must stay until the image is laid out.
    ///
    /// # Errors
    /// [`OciError`] says what to do.
    pub fn fetch(&self, work: &Path, access: &Access, watch: &dyn Watch) -> Result<Image, OciError> {
        match self {
            Self::Registry(reference) => registry::fetch(reference, work, access, watch),
            Self::Local(path, which) => archive::open(path, which.as_deref(), work, watch),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Registry(reference) => reference.fmt(f),
            Self::Local(path, None) => write!(f, "local:{}", path.display()),
            Self::Local(path, Some(which)) => write!(f, "local:{}#{which}", path.display()),
        }
    }
}

impl FromStr for Source {
    type Err = OciError;

    /// `REGISTRY/NAME[:TAG][@DIGEST]`, or `local:PATH[#IMAGE]` for a file or directory of this host.
    fn from_str(text: &str) -> Result<Self, OciError> {
        let Some(rest) = text.strip_prefix("local:") else { return Ok(Self::Registry(text.parse()?)) };
        let (path, which) = rest.split_once('#').map_or((rest, None), |(path, which)| (path, Some(which)));
        if path.is_empty() || which == Some("") {
            return Err(OciError::Name {
                name: crate::error::shown(text),
                problem: "write local:PATH, or local:PATH#IMAGE",
            });
        }
        Ok(Self::Local(path.into(), which.map(str::to_owned)))
    }
}
