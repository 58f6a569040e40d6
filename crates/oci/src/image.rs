//! An image that is on this host.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use mainbrella_tree::{Laid, LayerLimits, Layers};
use mainbrella_types::limits::{IMAGE_ENTRIES_MAX, IMAGE_UNPACKED_MAX};

use crate::digest::Digest;
use crate::document::ImageConfig;
use crate::error::OciError;
use crate::stream::{Hashed, Watch, unpacked};

/// What headers and padding of a layer may come to on top of its files.
const OVERHEAD_MAX: u64 = 8 * 1024 * 1024 * 1024;

/// Where a layer lies.
#[derive(Debug, Clone)]
pub(crate) struct Layer {
    pub(crate) file: PathBuf,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// What it hashes to when unpacked.
    pub(crate) content: Digest,
}

/// An image that is on this host, its documents verified.
#[derive(Debug)]
pub struct Image {
    /// What it is called where it came from, for people.
    pub name: String,
    /// Digest of its manifest, or of its configuration where there is no manifest. Equal digests mean equal images.
    pub digest: Digest,
    /// How it is run.
    pub config: ImageConfig,
    pub(crate) layers: Vec<Layer>,
}

impl Image {
    /// How many layers it has.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Lays all its layers out in `root`, an empty directory, and finds out whether they are what the image says.
    ///
    /// # Errors
    /// When a layer is damaged, over a limit, or holds what cannot be. The tree is then of no use.
    pub fn lay(&self, root: OwnedFd, watch: &dyn Watch) -> Result<Laid, OciError> {
        let limits = LayerLimits { entries: IMAGE_ENTRIES_MAX, bytes: IMAGE_UNPACKED_MAX };
        let mut tree = Layers::new(root, limits);
        let total = self.layers.iter().map(|l| l.bytes).sum::<u64>().max(1);
        let mut before = 0;
        for (n, layer) in self.layers.iter().enumerate() {
            watch.step(&format!("Unpacking layer {} of {}", n + 1, self.layers.len()));
            #[allow(clippy::cast_precision_loss)]
            watch.fraction(before as f32 / total as f32);
            before += layer.bytes;
            let mut file = File::open(&layer.file).map_err(OciError::io("opening a layer"))?;
            file.seek(SeekFrom::Start(layer.offset)).map_err(OciError::io("reading a layer"))?;
            let plain = unpacked(file.take(layer.bytes)).map_err(|_| OciError::Digest(format!("layer {}", n + 1)))?;
            let mut plain = Hashed::new(plain, IMAGE_UNPACKED_MAX + OVERHEAD_MAX, watch);
            if let Err(source) = tree.apply(&mut plain) {
                return Err(if watch.cancelled() {
                    OciError::Cancelled
                } else {
                    OciError::Layer { layer: n + 1, source }
                });
            }
            let found = plain.finish().map_err(OciError::io("reading a layer"))?;
            if found != layer.content {
                return Err(OciError::Digest(format!("layer {} when unpacked", n + 1)));
            }
        }
        Ok(tree.done())
    }
}
