//! Streams that are counted, bounded, hashed, unpacked and can be told to stop.

use std::io::{self, BufReader, Read};

use sha2::{Digest as _, Sha256};

use crate::digest::Digest;

/// Who fetches an image is told, and can stop it.
pub trait Watch: Send + Sync {
    /// What is done now, in a few words.
    fn step(&self, text: &str) {
        let _ = text;
    }
    /// How far that is, 0 to 1.
    fn fraction(&self, part: f32) {
        let _ = part;
    }
    /// Asked often; `true` stops it.
    fn cancelled(&self) -> bool {
        false
    }
}

/// Says nothing and goes on.
#[derive(Debug, Clone, Copy, Default)]
pub struct Quiet;

impl Watch for Quiet {}

/// A reader whose bytes are hashed and bounded.
pub(crate) struct Hashed<'a, R> {
    inner: R,
    hash: Sha256,
    left: u64,
    watch: &'a dyn Watch,
}

impl<'a, R: Read> Hashed<'a, R> {
    /// Reads `inner`; more than `most` bytes of it are an error.
    pub(crate) fn new(inner: R, most: u64, watch: &'a dyn Watch) -> Self {
        Self { inner, hash: Sha256::new(), left: most, watch }
    }

    /// Reads what is left, and says what all of it hashes to.
    pub(crate) fn finish(mut self) -> io::Result<Digest> {
        io::copy(&mut self, &mut io::sink())?;
        Ok(Digest::from_hash(self.hash))
    }
}

impl<R: Read> Read for Hashed<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.watch.cancelled() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let n = self.inner.read(buffer)?;
        self.left = self.left.checked_sub(n as u64).ok_or_else(|| io::Error::other("it is larger than it may be"))?;
        self.hash.update(&buffer[..n]);
        Ok(n)
    }
}

/// What a layer is packed with: told by its first bytes, whatever it is called.
pub(crate) fn unpacked<'a, R: Read + 'a>(packed: R) -> io::Result<Box<dyn Read + 'a>> {
    use std::io::BufRead;
    let mut packed = BufReader::with_capacity(256 * 1024, packed);
    let head = packed.fill_buf()?;
    if head.starts_with(&[0x1f, 0x8b]) {
        return Ok(Box::new(flate2::bufread::MultiGzDecoder::new(packed)));
    }
    if head.starts_with(&[0x28, 0xb5, 0x2f, 0xfd])
        || (head.len() >= 4 && head[1..4] == [0x2a, 0x4d, 0x18] && head[0] & 0xf0 == 0x50)
    {
        return Ok(Box::new(zstd::Decoder::with_buffer(packed)?));
    }
    Ok(Box::new(packed))
}
