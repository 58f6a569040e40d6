//! What must be kept and never read by others: sealed with a key of the service, each thing for its own purpose.
//!
//! XChaCha20-Poly1305 with a random nonce before the sealed bytes. The key is in `keys/secrets.key`, made when something is
//! first sealed; removing the file makes everything sealed unreadable.

use std::path::Path;

use chacha20poly1305::aead::{Aead as _, KeyInit as _, Payload};
use chacha20poly1305::{XChaCha20Poly1305, XNonce};
use hmac::Mac as _;
use mainbrella_engine::{Authority, KeptSecrets, Secret};
use mainbrella_store::{SecretRecord, Store};
use mainbrella_types::secret::SecretError;
use mainbrella_types::{GenerationKey, SecretValue};

use crate::error::{ApiError, ApiResult};
use crate::signed::SealKey;

const NONCE_LEN: usize = 24;

/// Seals and opens.
pub struct Vault(SealKey);

impl Vault {
    /// With the key in this data directory.
    #[must_use]
    pub fn new(data_dir: &Path) -> Self {
        Self(SealKey::new(data_dir.join("keys").join("secrets.key")))
    }

    fn cipher(&self) -> ApiResult<XChaCha20Poly1305> {
        XChaCha20Poly1305::new_from_slice(&self.0.bytes()?).map_err(|e| ApiError::internal(e.to_string()))
    }

    /// Seals `bytes` so that they open for the same `purpose` only.
    fn seal(&self, purpose: &str, bytes: &[u8]) -> ApiResult<Vec<u8>> {
        let mut nonce = [0u8; NONCE_LEN];
        getrandom::fill(&mut nonce).map_err(|e| ApiError::internal(e.to_string()))?;
        let payload = Payload { msg: bytes, aad: purpose.as_bytes() };
        let sealed = self.cipher()?.encrypt(&XNonce::from(nonce), payload);
        let sealed = sealed.map_err(|e| ApiError::internal(e.to_string()))?;
        Ok([nonce.as_slice(), &sealed].concat())
    }

    /// What was sealed for `purpose`.
    fn open(&self, purpose: &str, sealed: &[u8]) -> ApiResult<Vec<u8>> {
        let unreadable = || {
            ApiError::internal(format!("what was sealed for {purpose} does not open")).hint(
                "The service's key for secrets is another one now: remove the machine's secrets and put them again.",
            )
        };
        let (nonce, sealed) = sealed.split_at_checked(NONCE_LEN).ok_or_else(unreadable)?;
        let nonce: [u8; NONCE_LEN] = nonce.try_into().map_err(|_| unreadable())?;
        let payload = Payload { msg: sealed, aad: purpose.as_bytes() };
        self.cipher()?.decrypt(&XNonce::from(nonce), payload).map_err(|_| unreadable())
    }

    /// Seals the value of a machine's secret.
    pub(crate) fn seal_value(&self, machine: &GenerationKey, name: &str, value: &SecretValue) -> ApiResult<Vec<u8>> {
        self.seal(&value_of(machine, name), value.reveal().as_bytes())
    }

    /// The value of a machine's secret.
    pub(crate) fn value(&self, machine: &GenerationKey, record: &SecretRecord) -> ApiResult<SecretValue> {
        let bytes = self.open(&value_of(machine, record.spec.name.as_str()), &record.sealed)?;
        let value = String::from_utf8(bytes).map_err(|_| SecretError::Value).and_then(SecretValue::new);
        value.map_err(|e| ApiError::internal(e.to_string()))
    }

    /// What stands for a value where two are compared that must not be kept: it tells nothing to who has not the key.
    pub(crate) fn stand_in(&self, value: &str) -> ApiResult<String> {
        let mut mac = self.0.mac(b"mainbrella secret stand-in 1\0")?;
        mac.update(value.as_bytes());
        Ok(hex::encode(mac.finalize().into_bytes()))
    }

    /// A new authority for a machine, sealed.
    pub(crate) fn new_authority(&self, machine: &GenerationKey) -> ApiResult<Vec<u8>> {
        let authority = Authority::generate().map_err(|e| ApiError::internal(e.to_string()))?;
        self.seal(&authority_of(machine), authority.key())
    }

    /// The secrets of a machine that are on record. `None`: it has none.
    pub(crate) async fn kept(&self, store: &Store, machine: &GenerationKey) -> ApiResult<Option<KeptSecrets>> {
        let Some(sealed) = store.authority(machine).await? else { return Ok(None) };
        let key = self.open(&authority_of(machine), &sealed)?;
        let authority = Authority::from_key(&key).map_err(|e| ApiError::internal(e.to_string()))?;
        let mut secrets = Vec::new();
        for record in store.secrets(machine).await? {
            let value = self.value(machine, &record)?;
            secrets.push(Secret { spec: record.spec, value });
        }
        Ok(Some(KeptSecrets { authority, secrets }))
    }
}

fn value_of(machine: &GenerationKey, name: &str) -> String {
    format!("mainbrella secret 1 {machine} {name}")
}

fn authority_of(machine: &GenerationKey) -> String {
    format!("mainbrella authority 1 {machine}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_opens_for_its_purpose_with_the_same_key_and_not_otherwise() {
        let dir = tempfile::tempdir().expect("temp dir");
        let vault = Vault::new(dir.path());
        let sealed = vault.seal("a", b"hush").expect("sealed");
        assert!(!sealed.windows(4).any(|w| w == b"hush"));
        assert_ne!(sealed, vault.seal("a", b"hush").expect("sealed"), "no two are alike");
        assert_eq!(Vault::new(dir.path()).open("a", &sealed).expect("the key is kept"), b"hush");
        assert!(vault.open("b", &sealed).is_err());
        for at in [0, NONCE_LEN, sealed.len() - 1] {
            let mut bent = sealed.clone();
            bent[at] ^= 1;
            assert!(vault.open("a", &bent).is_err(), "{at}");
        }
        assert!(vault.open("a", &sealed[..NONCE_LEN - 1]).is_err());
        let other = tempfile::tempdir().expect("temp dir");
        assert!(Vault::new(other.path()).open("a", &sealed).is_err());
    }
}
