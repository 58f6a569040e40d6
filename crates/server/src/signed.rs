//! Signed URLs: what one of them grants, sealed so that only this service can have made it.
//!
//! The token is the grant as JSON and an HMAC-SHA-256 over it, both in base64url. The key is in `keys/file-urls.key`,
//! made when the first URL is; removing the file ends every URL.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use mainbrella_api::UrlMethod;
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::error::{ApiError, ApiResult};

/// Longest token that is looked at: a path of 4095 bytes, each escaped in JSON, in base64.
const TOKEN_MAX: usize = 40_000;
/// What is signed begins with this, so that a signature for one purpose is none for another.
const PURPOSE: &[u8] = b"mainbrella file url 1\0";
const KEY_LEN: usize = 32;

/// What a URL grants.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Grant {
    /// Public id of the API key that asked for it.
    #[serde(rename = "k")]
    pub(crate) key_id: String,
    /// The slot.
    #[serde(rename = "m")]
    pub(crate) machine: String,
    /// The generation.
    #[serde(rename = "c")]
    pub(crate) created_at: String,
    /// What may be done.
    #[serde(rename = "v")]
    pub(crate) method: UrlMethod,
    /// With which file.
    #[serde(rename = "f")]
    pub(crate) path: String,
    /// Until when, Unix milliseconds.
    #[serde(rename = "e")]
    pub(crate) expires_ms: i64,
    /// Most bytes that may be written.
    #[serde(rename = "b", default, skip_serializing_if = "Option::is_none")]
    pub(crate) max_bytes: Option<u64>,
}

/// A key that seals, in a file of its own; made when it is first needed.
pub(crate) struct SealKey {
    file: PathBuf,
    key: Mutex<Option<[u8; KEY_LEN]>>,
}

impl SealKey {
    /// The key in `file`.
    pub(crate) fn new(file: PathBuf) -> Self {
        Self { file, key: Mutex::new(None) }
    }

    /// The key itself.
    pub(crate) fn bytes(&self) -> ApiResult<[u8; KEY_LEN]> {
        let mut known = self.key.lock().unwrap_or_else(PoisonError::into_inner);
        match *known {
            Some(key) => Ok(key),
            None => {
                let failed = |e: io::Error| ApiError::internal(format!("{}: {e}", self.file.display()));
                Ok(*known.insert(load(&self.file).map_err(failed)?))
            }
        }
    }

    /// A seal for `purpose`: one for another purpose is another.
    pub(crate) fn mac(&self, purpose: &[u8]) -> ApiResult<Hmac<Sha256>> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.bytes()?).map_err(|e| ApiError::internal(e.to_string()))?;
        mac.update(purpose);
        Ok(mac)
    }
}

/// Makes and checks tokens.
pub struct UrlSigner {
    key: SealKey,
}

impl UrlSigner {
    /// With the key in this data directory.
    pub(crate) fn new(data_dir: &Path) -> Self {
        Self { key: SealKey::new(data_dir.join("keys").join("file-urls.key")) }
    }

    /// Seals a grant.
    pub(crate) fn sign(&self, grant: &Grant) -> ApiResult<String> {
        let text = serde_json::to_vec(grant).map_err(|e| ApiError::internal(e.to_string()))?;
        let mut mac = self.key.mac(PURPOSE)?;
        mac.update(&text);
        let seal = mac.finalize().into_bytes();
        Ok(format!("{}.{}", URL_SAFE_NO_PAD.encode(text), URL_SAFE_NO_PAD.encode(seal)))
    }

    /// The grant of a token; `None` when this service did not make it.
    pub(crate) fn open(&self, token: &str) -> ApiResult<Option<Grant>> {
        let parts = token.split_once('.').filter(|_| token.len() <= TOKEN_MAX);
        let decoded = parts
            .and_then(|(text, seal)| Some((URL_SAFE_NO_PAD.decode(text).ok()?, URL_SAFE_NO_PAD.decode(seal).ok()?)));
        let Some((text, seal)) = decoded else { return Ok(None) };
        let mut mac = self.key.mac(PURPOSE)?;
        mac.update(&text);
        Ok(mac.verify_slice(&seal).ok().and_then(|()| serde_json::from_slice(&text).ok()))
    }
}

/// Reads the key, or makes it: whole or not at all, 0600 from its first moment.
fn load(file: &Path) -> io::Result<[u8; KEY_LEN]> {
    let mut key = [0u8; KEY_LEN];
    match File::open(file) {
        Ok(mut there) => {
            there.read_exact(&mut key)?;
            there.set_permissions(std::fs::Permissions::from_mode(0o600))?;
            return Ok(key);
        }
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        Err(_) => {}
    }
    let folder = file.parent().unwrap_or(Path::new("."));
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    getrandom::fill(&mut key).map_err(|e| io::Error::other(e.to_string()))?;
    let half = file.with_extension("key.new");
    match std::fs::remove_file(&half) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let mut out = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&half)?;
    out.write_all(&key)?;
    out.sync_all()?;
    std::fs::rename(&half, file)?;
    File::open(folder)?.sync_all()?;
    Ok(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn grant(path: &str) -> Grant {
        Grant {
            key_id: "01234567".into(),
            machine: "m".into(),
            created_at: "2026-10-08T12:00:00.000Z".into(),
            method: UrlMethod::Put,
            path: path.into(),
            expires_ms: 5,
            max_bytes: Some(7),
        }
    }

    fn opened(signer: &UrlSigner, token: &str) -> Option<Grant> {
        signer.open(token).expect("a key")
    }

    #[test]
    fn a_token_is_opened_by_who_made_it_and_stays_valid_over_a_restart() {
        let dir = tempfile::tempdir().expect("temp dir");
        let signer = UrlSigner::new(dir.path());
        let worst = "\u{1}".repeat(4095);
        for path in ["/a b/\u{e9}\n\"", worst.as_str()] {
            let token = signer.sign(&grant(path)).expect("signed");
            assert!(token.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.')));
            assert!(opened(&signer, &token) == Some(grant(path)));
            assert!(opened(&UrlSigner::new(dir.path()), &token) == Some(grant(path)));
        }
        let mode = |p: &str| std::fs::metadata(dir.path().join(p)).expect("there").permissions().mode() & 0o777;
        assert_eq!((mode("keys"), mode("keys/file-urls.key")), (0o700, 0o600));
        let other = tempfile::tempdir().expect("temp dir");
        let token = signer.sign(&grant("/a")).expect("signed");
        assert!(opened(&UrlSigner::new(other.path()), &token).is_none());
        std::fs::write(dir.path().join("keys/file-urls.key"), "short").expect("write");
        assert!(UrlSigner::new(dir.path()).sign(&grant("/a")).is_err(), "half a key is not used");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn no_change_of_a_token_goes_unnoticed(at in any::<prop::sample::Index>(), byte in prop_oneof![any::<u8>(), Just(b'.'), Just(b'A')],
            cut in any::<bool>(), garbage in "\\PC{0,60}") {
            let dir = tempfile::tempdir().expect("temp dir");
            let signer = UrlSigner::new(dir.path());
            let token = signer.sign(&grant("/a")).expect("signed");
            let mut bytes = token.clone().into_bytes();
            let at = at.index(bytes.len());
            if cut { bytes.truncate(at) } else { bytes[at] = byte }
            let changed = String::from_utf8_lossy(&bytes).into_owned();
            if changed != token {
                prop_assert!(opened(&signer, &changed).is_none());
            }
            prop_assert!(opened(&signer, &garbage).is_none());
        }
    }
}
