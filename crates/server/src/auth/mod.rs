//! Who is asking, and what they may do.
//!
//! A verb takes a [`Permit`] or an [`AdminPermit`] as an argument, so that it cannot be reached without one.
//! A permit also counts the request against the rate of its key, and tells when its key is revoked, so that
//! long streams end then.

pub mod admin_key;
pub mod token;

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use axum::extract::FromRequestParts;
use governor::clock::{Clock as _, DefaultClock};
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use http::header::AUTHORIZATION;
use http::request::Parts;
use mainbrella_store::{ApiKey, KeyRole, Store};
use mainbrella_types::{ErrorCode, Millis, ProjectId};
use subtle::ConstantTimeEq as _;
use tokio_util::sync::CancellationToken;

use crate::config::ServerConfig;
use crate::error::{ApiError, ApiResult};
use crate::layers::RequestInfo;
use crate::state::AppState;
use token::Token;

/// How long a verified key is believed without asking the store. A revocation in this process counts at
/// once; one by another process sharing the database counts within this time.
const BELIEVE: Duration = Duration::from_secs(5);
/// Most keys remembered as verified.
const REMEMBERED_MAX: usize = 4096;
/// How often a key is looked up again when others are being revoked meanwhile.
const LOOK_UPS_MAX: usize = 8;

/// A caller who may use the machines of `project`.
#[derive(Clone, Debug)]
pub struct Permit {
    /// Whose machines.
    pub project: ProjectId,
    /// What else.
    pub role: KeyRole,
    /// Public id of the key.
    pub key_id: String,
    revoked: Arc<CancellationToken>,
}

impl Permit {
    /// Resolves when the key is revoked.
    pub async fn revoked(&self) {
        self.revoked.cancelled().await;
    }

    /// Runs `work` to its end, or until the key is revoked.
    ///
    /// # Errors
    /// What `work` fails with; `unauthenticated` when the key is revoked meanwhile.
    pub async fn while_valid<T>(&self, work: impl Future<Output = ApiResult<T>>) -> ApiResult<T> {
        tokio::select! {
            biased;
            () = self.revoked() => Err(unauthenticated("The API key was revoked.")),
            done = work => done,
        }
    }
}

/// A caller who may also manage the keys of their project.
#[derive(Clone, Debug)]
pub struct AdminPermit(pub Permit);

struct Verified {
    hash: [u8; 32],
    permit: Permit,
    until: Instant,
}

#[derive(Default)]
struct Memory {
    verified: HashMap<String, Verified>,
    /// One cancellation a key for as long as anybody holds it, across re-verification.
    revocations: HashMap<String, Weak<CancellationToken>>,
}

/// Verifies keys and counts requests.
pub struct Authenticator {
    store: Store,
    memory: Mutex<Memory>,
    /// Moves with every revocation, so that a verification that began before one is not remembered.
    epoch: AtomicU64,
    by_key: DefaultKeyedRateLimiter<String>,
    failures: DefaultKeyedRateLimiter<IpAddr>,
    clock: DefaultClock,
}

fn at_least_one(n: u32) -> NonZeroU32 {
    NonZeroU32::new(n).unwrap_or(NonZeroU32::MIN)
}

fn unauthenticated(message: &'static str) -> ApiError {
    ApiError::new(ErrorCode::Unauthenticated, message)
}

impl Authenticator {
    /// With the rates of `config`.
    #[must_use]
    pub fn new(store: Store, config: &ServerConfig) -> Self {
        let rate = Quota::per_second(at_least_one(config.rate_per_second)).allow_burst(at_least_one(config.rate_burst));
        Self {
            store,
            memory: Mutex::default(),
            epoch: AtomicU64::new(0),
            by_key: RateLimiter::keyed(rate),
            failures: RateLimiter::keyed(Quota::per_minute(at_least_one(config.auth_failures_per_minute))),
            clock: DefaultClock::default(),
        }
    }

    /// Forgets a key that was revoked and ends what it has open.
    pub fn revoked(&self, id: &str) {
        self.epoch.fetch_add(1, Ordering::SeqCst);
        let mut memory = self.memory();
        memory.verified.remove(id);
        if let Some(token) = memory.revocations.remove(id).and_then(|weak| weak.upgrade()) {
            token.cancel();
        }
    }

    /// Lets go of what is not needed any more.
    pub fn tidy(&self) {
        self.by_key.retain_recent();
        self.failures.retain_recent();
        let now = Instant::now();
        let mut memory = self.memory();
        memory.verified.retain(|_, v| v.until > now);
        memory.revocations.retain(|_, weak| weak.strong_count() > 0);
    }

    fn memory(&self) -> std::sync::MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who sent these headers. Counts a failure against `peer`, a success against the key.
    ///
    /// # Errors
    /// `unauthenticated`, `rate_limited`, or what befell the store.
    pub async fn authenticate(&self, parts: &Parts, peer: Option<IpAddr>, now: Millis) -> ApiResult<Permit> {
        let mut values = parts.headers.get_all(AUTHORIZATION).iter();
        let (Some(value), None) = (values.next(), values.next()) else {
            return Err(self.failed(peer, "This call needs an API key."));
        };
        let text = value.to_str().unwrap_or_default();
        let token = match text.split_once(' ') {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("bearer") => Token::parse(rest.trim()),
            _ => None,
        };
        let Some(token) = token else {
            return Err(self.failed(peer, "The API key is not of the form mb_<id>_<secret>."));
        };
        let permit = match self.remembered(&token) {
            Some(permit) => permit,
            None => {
                let hash = token.hash();
                let same = |key: &ApiKey| bool::from(key.secret_hash.ct_eq(&hash));
                let found = self.look_up(token.id(), same, now).await?;
                found.ok_or_else(|| self.failed(peer, "The API key is not valid."))?
            }
        };
        self.count(permit)
    }

    /// The permit of a key that vouches for a signed URL, as long as it is valid. Counts as a request of that key.
    ///
    /// # Errors
    /// `unauthenticated` when it is not valid any more, `rate_limited`, or what befell the store.
    pub(crate) async fn permit_of(&self, key_id: &str, peer: Option<IpAddr>, now: Millis) -> ApiResult<Permit> {
        let known = self.memory().verified.get(key_id).filter(|v| v.until > Instant::now()).map(|v| v.permit.clone());
        let permit = match known {
            Some(permit) => permit,
            None => {
                let found = self.look_up(key_id, |_| true, now).await?;
                found.ok_or_else(|| {
                    self.failed(peer, "The API key that the signed URL was made with is not valid any more.")
                })?
            }
        };
        self.count(permit)
    }

    fn count(&self, permit: Permit) -> ApiResult<Permit> {
        if let Err(until) = self.by_key.check_key(&permit.key_id) {
            let wait = until.wait_time_from(self.clock.now());
            return Err(ApiError::new(ErrorCode::RateLimited, "This key sends more requests than its rate allows.")
                .retry_after(wait.as_secs() + 1));
        }
        Ok(permit)
    }

    pub(crate) fn failed(&self, peer: Option<IpAddr>, message: &'static str) -> ApiError {
        let limited = peer.and_then(|ip| self.failures.check_key(&network_of(ip)).err());
        match limited {
            Some(until) => {
                let wait = until.wait_time_from(self.clock.now());
                ApiError::new(ErrorCode::RateLimited, "Too many failed authentications from this address.")
                    .hint("Correct the API key, and wait as long as `Retry-After` says.")
                    .retry_after(wait.as_secs() + 1)
            }
            None => unauthenticated(message),
        }
    }

    fn remembered(&self, token: &Token) -> Option<Permit> {
        let memory = self.memory();
        let known = memory.verified.get(token.id())?;
        let same = bool::from(known.hash.ct_eq(&token.hash()));
        (same && known.until > Instant::now()).then(|| known.permit.clone())
    }

    async fn look_up(&self, id: &str, is_meant: impl Fn(&ApiKey) -> bool, now: Millis) -> ApiResult<Option<Permit>> {
        // A revocation while the store was asked makes the answer doubtful: ask again.
        for _ in 0..LOOK_UPS_MAX {
            let epoch = self.epoch.load(Ordering::SeqCst);
            let Some(key) = self.store.key_by_prefix(id).await? else { return Ok(None) };
            if !is_meant(&key) || key.revoked_at.is_some() {
                return Ok(None);
            }
            if let Err(e) = self.store.touch_key(&key, now).await {
                tracing::warn!(key = key.id, error = crate::error::chain(&e), "the last use of a key was not noted");
            }
            if let Some(permit) = self.remember(key, epoch) {
                return Ok(Some(permit));
            }
        }
        Err(ApiError::new(ErrorCode::Overloaded, "The key could not be verified while others were being revoked."))
    }

    /// `None` when a key was revoked since `epoch` was read.
    fn remember(&self, key: ApiKey, epoch: u64) -> Option<Permit> {
        let mut memory = self.memory();
        // Read under the lock that `revoked` takes after moving it.
        if self.epoch.load(Ordering::SeqCst) != epoch {
            return None;
        }
        let known = memory.revocations.get(&key.id).and_then(Weak::upgrade);
        let revoked = known.unwrap_or_else(|| {
            let fresh = Arc::new(CancellationToken::new());
            memory.revocations.insert(key.id.clone(), Arc::downgrade(&fresh));
            fresh
        });
        let permit = Permit { project: key.project, role: key.role, key_id: key.id.clone(), revoked };
        if memory.verified.len() >= REMEMBERED_MAX {
            memory.verified.clear();
        }
        let until = Instant::now() + BELIEVE;
        memory.verified.insert(key.id, Verified { hash: key.secret_hash, permit: permit.clone(), until });
        Some(permit)
    }
}

/// The network that one caller is likely to have to itself: an IPv4 address, or an IPv6 /64.
fn network_of(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64)),
        v4 => v4,
    }
}

impl FromRequestParts<AppState> for Permit {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let info = parts.extensions.get::<Arc<RequestInfo>>().cloned();
        let peer = info.as_ref().and_then(|i| i.peer).map(|a| a.ip());
        let permit = state.auth.authenticate(parts, peer, state.now()).await?;
        if let Some(info) = info {
            info.set_key(&permit.key_id);
        }
        Ok(permit)
    }
}

impl FromRequestParts<AppState> for AdminPermit {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let permit = Permit::from_request_parts(parts, state).await?;
        match permit.role {
            KeyRole::Admin => Ok(Self(permit)),
            KeyRole::User => Err(ApiError::new(ErrorCode::Forbidden, "This call needs a key with the role admin.")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_household_shares_one_allowance() {
        let ip = |s: &str| s.parse::<IpAddr>().expect("an address");
        assert_eq!(network_of(ip("2001:db8::1")), network_of(ip("2001:db8::ffff:1")));
        assert_ne!(network_of(ip("2001:db8:0:1::1")), network_of(ip("2001:db8::1")));
        assert_eq!(network_of(ip("::ffff:10.0.0.1")), ip("10.0.0.1"));
        assert_ne!(network_of(ip("10.0.0.1")), network_of(ip("10.0.0.2")));
    }
}
