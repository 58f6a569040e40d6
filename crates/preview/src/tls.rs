//! TLS of the ingress itself, where it has a certificate.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

/// Why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The file holds no certificates.
    #[error("{} holds no PEM certificates that can be read: {detail}", .path.display())]
    Certificate {
        /// The file.
        path: PathBuf,
        /// What was seen.
        detail: String,
    },
    /// The file holds no private key.
    #[error("{} holds no PEM private key that can be read: {detail}", .path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// What was seen.
        detail: String,
    },
    /// They do not belong together, or are of a kind that is not supported.
    #[error("certificate and key of the previews cannot be used together: {0}")]
    Pair(#[from] rustls::Error),
}

/// What TLS connections are accepted with.
#[derive(Clone)]
pub struct Tls(pub(crate) TlsAcceptor);

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls(…)")
    }
}

impl Tls {
    /// Reads a chain of certificates, the server's own first, and its key, both PEM.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn load(certificates: &Path, key: &Path) -> Result<Self, TlsError> {
        let unreadable = |detail: String| TlsError::Certificate { path: certificates.to_owned(), detail };
        let chain = CertificateDer::pem_file_iter(certificates).map_err(|e| unreadable(e.to_string()))?;
        let chain: Vec<_> = chain.collect::<Result<_, _>>().map_err(|e| unreadable(e.to_string()))?;
        if chain.is_empty() {
            return Err(unreadable("there is none in it".to_owned()));
        }
        let key = PrivateKeyDer::from_pem_file(key)
            .map_err(|e| TlsError::Key { path: key.to_owned(), detail: e.to_string() })?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }
}
