//! The secret of a preview, as it stands in a host name or a path.

use std::fmt;

/// Letters of base32 as host names have them.
const LETTERS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
/// Bytes of a token: 160 bits.
const BYTES: usize = 20;
/// Letters of a token.
const LENGTH: usize = BYTES * 8 / 5;

/// A token. Never shown by `Debug`, never logged.
#[derive(Clone, PartialEq, Eq)]
pub struct Token([u8; LENGTH]);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

impl Token {
    /// A token of these random bytes.
    #[must_use]
    pub fn of(bytes: &[u8; BYTES]) -> Self {
        let mut text = [0; LENGTH];
        for (group, letters) in bytes.chunks(5).zip(text.chunks_mut(8)) {
            let bits = group.iter().fold(0u64, |bits, byte| bits << 8 | u64::from(*byte));
            for (at, letter) in letters.iter_mut().enumerate() {
                *letter = LETTERS[(bits >> (35 - 5 * at) & 31) as usize];
            }
        }
        Self(text)
    }

    /// The token of this text; `None` when it cannot be one. Host names have no case.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut lower: [u8; LENGTH] = text.as_bytes().try_into().ok()?;
        lower.make_ascii_lowercase();
        lower.iter().all(|b| LETTERS.contains(b)).then_some(Self(lower))
    }

    /// Its text. A secret.
    #[must_use]
    pub fn expose(&self) -> &str {
        // Made of ASCII letters in both constructors.
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn tokens_are_host_labels_and_come_back_in_any_case(bytes in any::<[u8; BYTES]>()) {
            let token = Token::of(&bytes);
            let text = token.expose().to_owned();
            prop_assert!(text.len() == 32 && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit()));
            prop_assert_eq!(Token::parse(&text.to_uppercase()), Some(token.clone()));
            let debug = format!("{token:?}");
            prop_assert!(!debug.contains(&text));
        }

        #[test]
        fn different_bytes_are_different_tokens(a in any::<[u8; BYTES]>(), b in any::<[u8; BYTES]>()) {
            prop_assert_eq!(a == b, Token::of(&a) == Token::of(&b));
        }

        #[test]
        fn nothing_else_is_a_token(text in "\\PC{0,40}") {
            if let Some(token) = Token::parse(&text) {
                prop_assert_eq!(token.expose(), text.to_lowercase());
            }
        }
    }

    #[test]
    fn known_texts() {
        assert_eq!(Token::of(&[0; BYTES]).expose(), "a".repeat(32));
        assert_eq!(Token::of(&[255; BYTES]).expose(), "7".repeat(32));
        for bad in ["", "a", &"a".repeat(31), &"a".repeat(33), &format!("{}1", "a".repeat(31)), &"é".repeat(16)] {
            assert_eq!(Token::parse(bad), None);
        }
    }
}
