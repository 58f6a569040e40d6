//! Tokens, worked out from the id of their preview and a key of this service: a URL can be told again to whoever repeats
//! its request, without being kept anywhere.

use std::path::Path;

use hmac::Mac as _;
use mainbrella_preview::Token;

use crate::error::{ApiError, ApiResult};
use crate::signed::SealKey;

/// What is sealed begins with this, so that a seal for one purpose is none for another.
const PURPOSE: &[u8] = b"mainbrella preview token 1\0";

/// Makes tokens.
pub(super) struct Minter {
    key: SealKey,
}

impl Minter {
    /// With the key in this data directory, made when the first token is.
    pub(super) fn new(data_dir: &Path) -> Self {
        Self { key: SealKey::new(data_dir.join("keys").join("previews.key")) }
    }

    /// The token of the preview `id`: 160 bits that nobody without the key can tell from random ones.
    pub(super) fn token(&self, id: &str) -> ApiResult<Token> {
        let mut mac = self.key.mac(PURPOSE)?;
        mac.update(id.as_bytes());
        let seal = mac.finalize().into_bytes();
        let bytes = seal.first_chunk::<20>().ok_or_else(|| ApiError::internal("a seal of another length"))?;
        Ok(Token::of(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_the_same_over_a_restart_and_no_other_service_has_it() {
        let (dir, other) = (tempfile::tempdir().expect("temp dir"), tempfile::tempdir().expect("temp dir"));
        let minter = Minter::new(dir.path());
        let token = minter.token("pv-1").expect("made");
        assert_eq!(token, Minter::new(dir.path()).token("pv-1").expect("made"));
        assert_ne!(token, minter.token("pv-2").expect("made"));
        assert_ne!(token, Minter::new(other.path()).token("pv-1").expect("made"));
    }
}
