//! Keys of steps: what a step's result depends on, in one digest.

use sha2::{Digest, Sha256};

/// Form of the keys; a change makes every step be done anew.
const FORM: &[u8] = b"recipe 1";

/// A digest of parts that cannot be taken for other parts.
pub(crate) struct Key(Sha256);

impl Key {
    /// Begins with what came before.
    pub(crate) fn after(previous: &str) -> Self {
        let mut key = Self(Sha256::new());
        key.part(FORM);
        key.part(previous.as_bytes());
        key
    }

    pub(crate) fn part(&mut self, bytes: &[u8]) {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    /// Any number of parts, their number among them.
    pub(crate) fn list<'a>(&mut self, parts: impl IntoIterator<Item = &'a str>) {
        let mut count = 0u64;
        for part in parts {
            self.part(part.as_bytes());
            count += 1;
        }
        self.0.update(count.to_le_bytes());
    }

    pub(crate) fn finish(self) -> String {
        hex::encode(self.0.finalize())
    }
}
