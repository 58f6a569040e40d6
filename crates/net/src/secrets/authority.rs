//! The certificate authority of one machine. Its key never leaves the host; the machine trusts its certificate, and nobody
//! else does.

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SerialNumber, date_time_ymd,
};
use rustls::ServerConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use mainbrella_types::HostName;

/// The subject of every authority.
const SUBJECT: &str = "Mainbrella machine authority";
/// What OpenSSL calls that subject in a folder of certificates.
pub const SUBJECT_HASH: &str = "7ebe7a42";
/// From when certificates hold: before any clock a machine may wake up with.
const FROM: (i32, u8, u8) = (2020, 1, 1);
/// Until when.
const UNTIL: (i32, u8, u8) = (2049, 12, 31);

/// Why there is no authority or no certificate of it.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// The key or a certificate could not be made.
    #[error("a certificate could not be made")]
    Certificate(#[from] rcgen::Error),
    /// The TLS library does not take it.
    #[error("the TLS library does not take the certificate")]
    Tls(#[from] rustls::Error),
}

/// See the module.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    key: Vec<u8>,
    pem: String,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

impl Authority {
    /// A new one.
    ///
    /// # Errors
    /// When the library refuses.
    pub fn generate() -> Result<Self, AuthorityError> {
        Self::with(KeyPair::generate()?)
    }

    /// The one with this key, as [`Authority::key`] gave it.
    ///
    /// # Errors
    /// When it is none.
    pub fn from_key(key: &[u8]) -> Result<Self, AuthorityError> {
        Self::with(KeyPair::try_from(key)?)
    }

    fn with(key: KeyPair) -> Result<Self, AuthorityError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, SUBJECT);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.serial_number = Some(SerialNumber::from(1u64));
        (params.not_before, params.not_after) = (day(FROM), day(UNTIL));
        let pem = params.self_signed(&key)?.pem();
        let bytes = key.serialize_der();
        Ok(Self { issuer: Issuer::new(params, key), key: bytes, pem })
    }

    /// Its key, PKCS #8: to be kept sealed.
    #[must_use]
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    /// Its certificate, PEM: for the machine.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// What a server needs to be `host` towards the machine.
    pub(crate) fn server(&self, host: &HostName) -> Result<ServerConfig, AuthorityError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(vec![host.as_str().to_owned()])?;
        params.distinguished_name = DistinguishedName::new();
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        (params.not_before, params.not_after) = (day(FROM), day(UNTIL));
        let certificate: CertificateDer<'static> = params.signed_by(&key, &self.issuer)?.der().clone();
        let private = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![certificate], private)?;
        Ok(config)
    }
}

fn day((year, month, day): (i32, u8, u8)) -> time::OffsetDateTime {
    date_time_ymd(year, month, day)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn an_authority_comes_back_from_its_key() {
        let made = Authority::generate().expect("made");
        let again = Authority::from_key(made.key()).expect("the same");
        assert_eq!(made.key(), again.key());
        assert!(again.pem().starts_with("-----BEGIN CERTIFICATE-----"));
        assert!(Authority::from_key(b"nonsense").is_err());
        assert!(!format!("{made:?}").contains("key"));
    }

    /// The name under which a folder of certificates is searched is worked out by OpenSSL alone.
    #[test]
    fn openssl_finds_the_authority_under_the_name_we_give_it() {
        let mut openssl = Command::new("openssl")
            .args(["x509", "-noout", "-subject_hash"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("openssl is there, as git and curl need it");
        let pem = Authority::generate().expect("made").pem().to_owned();
        openssl.stdin.take().expect("piped").write_all(pem.as_bytes()).expect("written");
        let out = openssl.wait_with_output().expect("ended");
        assert_eq!(String::from_utf8_lossy(&out.stdout).trim(), SUBJECT_HASH);
    }
}
