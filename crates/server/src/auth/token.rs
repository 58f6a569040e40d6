//! The text of an API key: `mb_` + 8 hexadecimal digits (public id) + `_` + 43 characters of base64url (256 random bits).

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest as _, Sha256};

/// Length of the public id.
pub const ID_LEN: usize = 8;
const SECRET_LEN: usize = 43;
const LEN: usize = 3 + ID_LEN + 1 + SECRET_LEN;

/// A well-formed key. Its text does not show in `Debug` output.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token(mb_{}_…)", self.id())
    }
}

impl Token {
    /// A new key from the operating system's random source.
    ///
    /// # Errors
    /// When that source fails.
    pub fn generate() -> Result<Self, getrandom::Error> {
        let mut id = [0u8; ID_LEN / 2];
        let mut secret = [0u8; 32];
        getrandom::fill(&mut id)?;
        getrandom::fill(&mut secret)?;
        Ok(Self(format!("mb_{}_{}", hex::encode(id), URL_SAFE_NO_PAD.encode(secret))))
    }

    /// Reads a key; `None` when it is not of the form.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let rest = text.strip_prefix("mb_").filter(|_| text.len() == LEN && text.is_ascii())?;
        let (id, secret) = (rest.get(..ID_LEN)?, rest.get(ID_LEN..)?.strip_prefix('_')?);
        let id_ok = id.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        let secret_ok = secret.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
        (id_ok && secret_ok).then(|| Self(text.to_owned()))
    }

    /// The public id, by which it is found.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.0[3..3 + ID_LEN]
    }

    /// The whole key.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// SHA-256 of the whole key. 256 random bits need no slow hash.
    #[must_use]
    pub fn hash(&self) -> [u8; 32] {
        Sha256::digest(self.0.as_bytes()).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_the_form_and_differ() {
        let (a, b) = (Token::generate().expect("random"), Token::generate().expect("random"));
        assert_ne!(a, b);
        assert_eq!(Token::parse(a.expose()), Some(a.clone()));
        assert_ne!(a.hash(), b.hash());
        assert!(!format!("{a:?}").contains(&a.expose()[12..]));
    }

    #[test]
    fn other_spellings_are_refused() {
        let good = Token::generate().expect("random").expose().to_owned();
        for bad in [
            "",
            "mb_",
            "mb__",
            &good[1..],
            &good[..good.len() - 1],
            &format!("{good}x"),
            &good.replace("mb_", "mc_"),
            &good.to_uppercase(),
            &format!("{}é", &good[..good.len() - 2]),
            &format!("mb_{}+{}", &good[3..11], &good[12..]),
        ] {
            assert_eq!(Token::parse(bad), None, "{bad}");
        }
    }
}
