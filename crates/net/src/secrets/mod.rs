//! Secrets that stay outside the guest. For a host that has one, the gateway ends the machine's TLS itself, under an authority
//! that only this machine trusts, adds the credential to each request, and speaks TLS anew with the host.

mod authority;
mod relay;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderName, HeaderValue};
use mainbrella_types::{HostName, Placement, SecretSpec, SecretValue};
use rustls::ServerConfig;

pub use authority::{Authority, AuthorityError, SUBJECT_HASH};
pub(crate) use relay::relay;

/// A secret with its value.
#[derive(Clone, Debug)]
pub struct Secret {
    /// What is known of it.
    pub spec: SecretSpec,
    /// The value.
    pub value: SecretValue,
}

/// What is added to a request.
#[derive(Clone)]
pub(crate) struct Credential {
    pub(crate) header: HeaderName,
    pub(crate) value: HeaderValue,
}

impl Credential {
    /// `None`: it cannot be sent, which the types of its parts rule out.
    fn of(secret: &Secret) -> Option<Self> {
        let (header, text) = match &secret.spec.placement {
            Placement::Header(name) => {
                (HeaderName::from_bytes(name.as_bytes()).ok()?, secret.value.reveal().to_owned())
            }
            Placement::Basic(username) => {
                let both = STANDARD.encode(format!("{username}:{}", secret.value.reveal()));
                (http::header::AUTHORIZATION, format!("Basic {both}"))
            }
        };
        let mut value = HeaderValue::try_from(text).ok()?;
        // Neither shown in a log nor kept in a table of headers.
        value.set_sensitive(true);
        Some(Self { header, value })
    }
}

type Place = (HostName, u16);

#[derive(Default)]
struct Table {
    authority: Option<Arc<Authority>>,
    credentials: HashMap<Place, Vec<Credential>>,
    /// Certificates made so far.
    certificates: HashMap<HostName, Arc<ServerConfig>>,
}

/// The secrets of one machine, as its gateway sees them. Replaced while the gateway runs; connections that exist use what is
/// there at their next request.
#[derive(Default)]
pub struct SeatSecrets(RwLock<Table>);

impl fmt::Debug for SeatSecrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SeatSecrets").finish_non_exhaustive()
    }
}

impl SeatSecrets {
    /// Puts these in place of those before.
    pub fn replace(&self, authority: Arc<Authority>, secrets: &[Secret]) {
        let mut credentials: HashMap<Place, Vec<Credential>> = HashMap::new();
        for secret in secrets {
            if let Some(credential) = Credential::of(secret) {
                let place = (secret.spec.host.clone(), secret.spec.port);
                credentials.entry(place).or_default().push(credential);
            }
        }
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let same = table.authority.as_ref().is_some_and(|a| a.key() == authority.key());
        if !same {
            table.certificates.clear();
        }
        table.credentials = credentials;
        table.authority = Some(authority);
    }

    /// Adds nothing any more. Connections that exist go on without.
    pub fn clear(&self) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).credentials.clear();
    }

    /// The certificate of the authority under which the gateway shows itself, as PEM; none without secrets.
    #[must_use]
    pub fn certificate(&self) -> Option<String> {
        self.read(|t| t.authority.as_ref().filter(|_| !t.credentials.is_empty()).map(|a| a.pem().to_owned()))
    }

    /// Whether requests to this place get a credential.
    #[must_use]
    pub fn cover(&self, host: &HostName, port: u16) -> bool {
        self.read(|t| t.credentials.contains_key(&(host.clone(), port)))
    }

    /// Whether requests to this host, on any port, do.
    #[must_use]
    pub fn name(&self, host: &HostName) -> bool {
        self.read(|t| t.credentials.keys().any(|(h, _)| h == host))
    }

    /// What is added to a request now.
    pub(crate) fn credentials(&self, host: &HostName, port: u16) -> Vec<Credential> {
        self.read(|t| t.credentials.get(&(host.clone(), port)).cloned().unwrap_or_default())
    }

    /// How the gateway shows itself as `host`; made when it is first needed. `None`: it has no authority, or the certificate
    /// could not be made.
    pub(crate) fn server(&self, host: &HostName) -> Option<Arc<ServerConfig>> {
        if let Some(known) = self.read(|t| t.certificates.get(host).cloned()) {
            return Some(known);
        }
        let authority = self.read(|t| t.authority.clone())?;
        let made = authority.server(host).inspect_err(|e| tracing::error!(%host, error = %e, "no certificate")).ok()?;
        let made = Arc::new(made);
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        // Hosts a machine has no secret for get no certificate, so there are few.
        table.certificates.insert(host.clone(), made.clone());
        Some(made)
    }

    fn read<T>(&self, look: impl FnOnce(&Table) -> T) -> T {
        look(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(placement: Placement, value: &str) -> Secret {
        let host = "api.example".parse().expect("a name");
        let spec = SecretSpec { name: "s".parse().expect("a name"), host, port: 443, placement };
        Secret { spec, value: SecretValue::new(value.into()).expect("a value") }
    }

    #[test]
    fn a_value_becomes_the_header_that_was_asked_for_and_is_never_shown() {
        let plain = Credential::of(&secret(Placement::header("X-Key").expect("fine"), "k3y")).expect("fits");
        assert_eq!((plain.header.as_str(), plain.value.as_bytes()), ("x-key", &b"k3y"[..]));
        assert!(plain.value.is_sensitive() && !format!("{:?}", plain.value).contains("k3y"));
        let basic = Credential::of(&secret(Placement::basic("Aladdin").expect("fine"), "open sesame")).expect("fits");
        assert_eq!(basic.value.as_bytes(), b"Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
    }

    #[test]
    fn only_the_place_itself_is_covered_and_what_is_replaced_is_gone() {
        let table = SeatSecrets::default();
        let host: HostName = "api.example".parse().expect("a name");
        assert!(!table.name(&host) && table.server(&host).is_none());
        let authority = Arc::new(Authority::generate().expect("made"));
        table.replace(authority.clone(), &[secret(Placement::header("authorization").expect("fine"), "x")]);
        assert!(table.cover(&host, 443) && table.name(&host) && !table.cover(&host, 8443));
        assert!(!table.name(&"www.api.example".parse().expect("a name")));
        let first = table.server(&host).expect("made");
        assert!(Arc::ptr_eq(&first, &table.server(&host).expect("kept")));
        table.replace(authority, &[]);
        assert!(!table.cover(&host, 443) && table.credentials(&host, 443).is_empty());
        table.replace(Arc::new(Authority::generate().expect("made")), &[]);
        assert!(!Arc::ptr_eq(&first, &table.server(&host).expect("made anew")));
    }
}
