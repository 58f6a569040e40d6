//! Patterns of paths: those of `COPY` and those of `.dockerignore`.

use mainbrella_types::limits::IGNORE_PATTERNS_MAX;

use crate::error::{Fault, RecipeError, shown};

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    Byte(u8),
    /// One byte but `/`.
    One,
    /// Any but `/`.
    Star,
    /// Anything.
    Deep,
    /// Past the next token, or into it.
    Fork,
    /// Anything that ends in `/`.
    Folders,
    /// One byte of these, or none of these.
    Class(bool, Vec<(u8, u8)>),
}

/// A pattern of a whole path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pattern(Vec<Token>);

fn class(bytes: &[u8]) -> Option<(Token, usize)> {
    let mut at = 1;
    let negated = matches!(bytes.get(at), Some(b'^'));
    at += usize::from(negated);
    let mut ranges = Vec::new();
    let one = |at: &mut usize| -> Option<u8> {
        let b = *bytes.get(*at)?;
        *at += 1;
        match b {
            b'\\' => {
                let b = *bytes.get(*at)?;
                *at += 1;
                Some(b)
            }
            b'-' => None,
            _ => Some(b),
        }
    };
    while *bytes.get(at)? != b']' {
        let low = one(&mut at)?;
        let high = match bytes.get(at) {
            Some(b'-') => {
                at += 1;
                if bytes.get(at) == Some(&b']') {
                    return None;
                }
                one(&mut at)?
            }
            _ => low,
        };
        ranges.push((low, high));
    }
    (!ranges.is_empty()).then_some((Token::Class(negated, ranges), at + 1))
}

impl Pattern {
    /// Reads a pattern; with `deep`, `**` goes through folders. `None` when it is malformed.
    pub(crate) fn new(text: &str, deep: bool) -> Option<Self> {
        let bytes = text.as_bytes();
        let mut tokens = Vec::new();
        let mut at = 0;
        while let Some(b) = bytes.get(at) {
            let (token, length) = match b {
                b'*' => {
                    let stars = bytes[at..].iter().take_while(|b| **b == b'*').count();
                    match (deep && stars > 1, bytes.get(at + stars)) {
                        (true, Some(b'/')) => {
                            tokens.push(Token::Fork);
                            (Token::Folders, stars + 1)
                        }
                        (true, _) => (Token::Deep, stars),
                        (false, _) => (Token::Star, stars),
                    }
                }
                b'?' => (Token::One, 1),
                b'[' => class(&bytes[at..])?,
                b'\\' => (Token::Byte(*bytes.get(at + 1)?), 2),
                _ => (Token::Byte(*b), 1),
            };
            tokens.push(token);
            at += length;
        }
        Some(Self(tokens))
    }

    /// Whether all of `path` is what the pattern says. Takes time in proportion to both lengths, whatever they hold.
    pub(crate) fn matches(&self, path: &str) -> bool {
        let end = self.0.len();
        // `now[i]`: the first `i` tokens can have matched what was read.
        let mut now = vec![false; end + 1];
        now[0] = true;
        self.skip(&mut now);
        for byte in path.bytes() {
            let mut next = vec![false; end + 1];
            for (i, token) in self.0.iter().enumerate().filter(|(i, _)| now[*i]) {
                let (stays, passes) = match token {
                    Token::Byte(b) => (false, *b == byte),
                    Token::One => (false, byte != b'/'),
                    Token::Star => (byte != b'/', false),
                    Token::Deep => (true, false),
                    Token::Fork => (false, false),
                    Token::Folders => (true, byte == b'/'),
                    Token::Class(negated, ranges) => {
                        let inside = ranges.iter().any(|(low, high)| (*low..=*high).contains(&byte));
                        (false, byte != b'/' && inside != *negated)
                    }
                };
                next[i] |= stays;
                next[i + 1] |= passes;
            }
            self.skip(&mut next);
            now = next;
        }
        now[end]
    }

    /// Tokens that can match nothing are passed over.
    fn skip(&self, states: &mut [bool]) {
        for (i, token) in self.0.iter().enumerate() {
            match token {
                Token::Star | Token::Deep => states[i + 1] |= states[i],
                Token::Fork => {
                    states[i + 1] |= states[i];
                    states[i + 2] |= states[i];
                }
                _ => {}
            }
        }
    }
}

/// The patterns of a `.dockerignore`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Ignore(Vec<(bool, Pattern)>);

impl Ignore {
    pub(crate) fn new(text: &str) -> Result<Self, RecipeError> {
        let mut patterns = Vec::new();
        for (n, line) in text.trim_start_matches('\u{feff}').lines().enumerate() {
            let malformed = || Fault::Syntax(format!("`{}` in .dockerignore is not a pattern", shown(line))).at(n + 1);
            // Only at the very beginning: a name may begin with a blank and a sharp.
            let mut rest = if line.starts_with('#') { "" } else { line.trim() };
            if rest.is_empty() {
                continue;
            }
            let back = rest.starts_with('!');
            if back {
                rest = rest[1..].trim();
            }
            let plain = clean(rest).ok_or_else(malformed)?;
            // The context itself cannot be left out.
            if plain.is_empty() {
                continue;
            }
            if patterns.len() == IGNORE_PATTERNS_MAX {
                return Err(
                    Fault::Limit { what: "patterns in .dockerignore", max: IGNORE_PATTERNS_MAX as u64 }.at(n + 1)
                );
            }
            patterns.push((back, Pattern::new(&plain, true).ok_or_else(malformed)?));
        }
        Ok(Self(patterns))
    }

    /// Whether `path` is left out: the last pattern that means it, or a folder it is in, decides.
    pub(crate) fn leaves_out(&self, path: &str) -> bool {
        let parents = || path.match_indices('/').map(|(i, _)| &path[..i]).chain([path]);
        self.0.iter().rev().find(|(_, p)| parents().any(|one| p.matches(one))).is_some_and(|(back, _)| !back)
    }

    /// Whether something below a folder that is left out may be taken back in.
    pub(crate) fn takes_back(&self) -> bool {
        self.0.iter().any(|(back, _)| *back)
    }
}

/// A path below the context, without `.`, empty parts and `..`; empty for the context itself, `None` when it goes out of it.
pub(crate) fn clean(path: &str) -> Option<String> {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/').filter(|p| !matches!(*p, "" | ".")) {
        match part {
            ".." => {
                parts.pop()?;
            }
            _ => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hit(pattern: &str, path: &str) -> bool {
        Pattern::new(pattern, true).expect("a pattern").matches(path)
    }

    #[test]
    fn patterns_mean_what_they_mean_elsewhere() {
        for (pattern, path, want) in [
            ("a", "a", true),
            ("a", "a/b", false),
            ("*.go", "x.go", true),
            ("*.go", "d/x.go", false),
            ("**/*.go", "x.go", true),
            ("**/*.go", "d/e/x.go", true),
            ("**/x", "ax", false),
            ("**/x", "a/x", true),
            ("a/**/x", "a/x", true),
            ("a/**/x", "a/b/c/x", true),
            ("a/**/x", "a/bx", false),
            ("a/**/x", "ab/x", false),
            ("a/**", "a/b/c", true),
            ("a/**", "a", false),
            ("**", "a/b", true),
            ("a?c", "abc", true),
            ("a?c", "a/c", false),
            ("[a-c]x", "bx", true),
            ("[^a-c]x", "bx", false),
            ("[^a-c]x", "zx", true),
            ("\\*", "*", true),
            ("\\*", "a", false),
            ("a**b", "a/x/b", true),
            ("*a*a*a*a*b", &"a".repeat(2000), false),
        ] {
            assert_eq!(hit(pattern, path), want, "{pattern} {path}");
        }
        for bad in ["[", "[]", "[a", "[a-]", "\\", "[-a]"] {
            assert!(Pattern::new(bad, true).is_none(), "{bad}");
        }
        assert!(
            !Pattern::new("**/x", false).expect("a pattern").matches("a/b/x"),
            "one level each without the deep form"
        );
    }

    #[test]
    fn the_last_pattern_of_an_ignore_file_decides() {
        let ignore =
            Ignore::new("# note\n\n/node_modules/\n*.log\n!keep.log\ntmp\n!tmp/kept\n./x/../y\n.\n").expect("valid");
        for (path, out) in [
            ("node_modules", true),
            ("node_modules/a/b.js", true),
            ("src/node_modules", false),
            ("a.log", true),
            ("keep.log", false),
            ("d/a.log", false),
            ("tmp/x", true),
            ("tmp/kept", false),
            ("tmp/kept/z", false),
            ("y", true),
            ("x", false),
        ] {
            assert_eq!(ignore.leaves_out(path), out, "{path}");
        }
        assert!(ignore.takes_back() && !Ignore::new("a\n").expect("valid").takes_back());
        assert_eq!(Ignore::new("a\n[\n").expect_err("malformed").line, 2);
        assert!(Ignore::new("../x\n").is_err());
    }
}
