//! Names of images in registries.

use std::fmt;
use std::str::FromStr;

use crate::digest::Digest;
use crate::error::{OciError, shown};

const NAME_MAX: usize = 255;
const TAG_MAX: usize = 128;

/// `REGISTRY/NAME[:TAG][@DIGEST]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    /// Host, and port where it is not the usual one.
    pub registry: String,
    /// The name within the registry.
    pub repository: String,
    /// The tag: `latest` when neither tag nor digest was given.
    pub tag: Option<String>,
    /// The digest of the manifest; it counts, not the tag, when there is one.
    pub digest: Option<Digest>,
}

impl Reference {
    /// What its manifest is asked for by.
    pub(crate) fn manifest(&self) -> String {
        match (&self.digest, &self.tag) {
            (Some(digest), _) => digest.to_string(),
            (None, tag) => tag.clone().unwrap_or_else(|| "latest".to_owned()),
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        self.digest.as_ref().map_or(Ok(()), |digest| write!(f, "@{digest}"))
    }
}

fn is_host(text: &str) -> bool {
    let (host, port) = match text.strip_prefix('[').and_then(|t| t.split_once(']')) {
        Some((ip, rest)) => {
            if ip.parse::<std::net::Ipv6Addr>().is_err() {
                return false;
            }
            ("v6", if rest.is_empty() { None } else { rest.strip_prefix(':').or(Some("")) })
        }
        None => text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
    };
    let label = |l: &str| {
        (1..=63).contains(&l.len())
            && !l.starts_with('-')
            && !l.ends_with('-')
            && l.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    let digits = |p: &str| p.bytes().all(|b| b.is_ascii_digit()) && p.parse::<u16>().is_ok_and(|p| p > 0);
    host.len() <= 253 && host.split('.').all(label) && port.is_none_or(digits)
}

fn is_repository(text: &str) -> bool {
    let part = |p: &str| {
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let bytes = p.as_bytes();
        bytes.first().is_some_and(|b| plain(*b))
            && bytes.last().is_some_and(|b| plain(*b))
            && bytes.iter().all(|b| plain(*b) || b"._-".contains(b))
            && !p.contains("..")
    };
    text.len() <= NAME_MAX && text.split('/').all(part)
}

impl FromStr for Reference {
    type Err = OciError;

    fn from_str(text: &str) -> Result<Self, OciError> {
        let bad = |problem| OciError::Name { name: shown(text), problem };
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => {
                (rest, Some(digest.parse().map_err(|_| bad("its digest must be sha256: and 64 digits"))?))
            }
            None => (text, None),
        };
        let first = rest.split('/').next().unwrap_or_default();
        if !rest.contains('/') || !(first.contains(['.', ':']) || first == "localhost") {
            return Err(bad("it must begin with the registry, as in registry.example.org/NAME:TAG"));
        }
        let path = &rest[first.len() + 1..];
        let (repository, tag) = path.split_once(':').map_or((path, None), |(path, tag)| (path, Some(tag)));
        if !is_host(first) {
            return Err(bad("its registry is no host name"));
        }
        if !is_repository(repository) {
            return Err(bad("names have small letters, digits and . _ - between slashes"));
        }
        let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
        let is_tag = |t: &str| {
            (1..=TAG_MAX).contains(&t.len())
                && word(t.as_bytes()[0])
                && t.bytes().all(|b| word(b) || b == b'.' || b == b'-')
        };
        if tag.is_some_and(|t| !is_tag(t)) {
            return Err(bad("its tag must be 1 to 128 letters, digits and . _ -"));
        }
        let tag = tag.map(str::to_owned).or_else(|| digest.is_none().then(|| "latest".to_owned()));
        Ok(Self { registry: first.to_ascii_lowercase(), repository: repository.to_owned(), tag, digest })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written_the_same() {
        let digest = format!("sha256:{}", "0a".repeat(32));
        for (text, want) in [
            ("registry.example.org/a/b", "registry.example.org/a/b:latest".to_owned()),
            ("localhost/x:1.0", "localhost/x:1.0".to_owned()),
            ("127.0.0.1:5000/a_b/c-d.e:T_1", "127.0.0.1:5000/a_b/c-d.e:T_1".to_owned()),
            ("[::1]:5000/x:y", "[::1]:5000/x:y".to_owned()),
            (&format!("h.example/x:t@{digest}"), format!("h.example/x:t@{digest}")),
            (&format!("h.example/x@{digest}"), format!("h.example/x@{digest}")),
        ] {
            let read: Reference = text.parse().expect(text);
            assert_eq!(read.to_string(), want);
            assert_eq!(want.parse::<Reference>().expect("its own form"), read);
        }
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for bad in [
            "",
            "python",
            "python:3",
            "library/python",
            "h.example/",
            "h.example/A",
            "h.example/a//b",
            "h.example/../b",
            "h.example/a:",
            "h.example/a:-x",
            "h.example/a@sha256:1",
            "h.example/a@sha512:00",
            "h.example:x/a",
            "h.example:0/a",
            "-h.example/a",
            "h_.example/a",
            "h.example/a b",
            "h.example/a?x=y",
            "h.example/a#",
            "user@h.example/a",
            "[::1/a",
            "h.example/.a",
            "h.example/a/..%2f",
            "[x]:1/a",
        ] {
            assert!(bad.parse::<Reference>().is_err(), "{bad}");
        }
        let long = format!("h.example/{}", "a".repeat(300));
        assert!(long.parse::<Reference>().is_err());
    }
}
