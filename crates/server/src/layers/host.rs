//! Which host names a request may come in under.
//!
//! A page in somebody's browser can make its own name resolve to a loopback address and then talk to whatever
//! listens there. The API key already stands in the way; this keeps such a page from reaching the service at
//! all. Bound to a loopback address, the service answers to loopback names and the configured ones; bound to
//! another, to the configured ones, or to any when none are configured.

use std::net::{IpAddr, SocketAddr};

use http::{HeaderMap, Uri, header, uri::Authority};
use mainbrella_types::ErrorCode;

use crate::error::{ApiError, ApiResult};

/// The rule for one listener.
#[derive(Clone, Debug)]
pub struct HostRule {
    loopback: bool,
    names: Vec<String>,
}

impl HostRule {
    /// The rule for a service bound to `listen` with these configured names (lower case).
    #[must_use]
    pub fn new(listen: SocketAddr, names: &[String]) -> Self {
        Self { loopback: listen.ip().is_loopback(), names: names.to_vec() }
    }

    /// Whether a request may come in.
    ///
    /// # Errors
    /// `forbidden` under a foreign name, `invalid_request` under none.
    pub fn check(&self, headers: &HeaderMap, uri: &Uri) -> ApiResult<()> {
        // Two of them name two services: who reads the other one is told something else.
        let mut hosts = headers.get_all(header::HOST).iter();
        let (host, more) = (hosts.next(), hosts.next().is_some());
        let from_header = || host.and_then(|v| v.to_str().ok()?.parse::<Authority>().ok());
        if more {
            return Err(ApiError::invalid("The request has more than one Host header."));
        }
        if !self.loopback && self.names.is_empty() {
            return Ok(());
        }
        let Some(authority) = uri.authority().cloned().or_else(from_header) else {
            return Err(ApiError::invalid("The request has no valid Host header."));
        };
        let host = authority.host().trim_end_matches('.').to_ascii_lowercase();
        if self.names.contains(&host) || (self.loopback && is_loopback(&host)) {
            return Ok(());
        }
        Err(ApiError::new(ErrorCode::Forbidden, "The service is not known under this host name.")
            .hint("Use a loopback address, or add the name to `allowed-hosts` of the service."))
    }
}

fn is_loopback(host: &str) -> bool {
    let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    bare == "localhost" || bare.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn answer(rule: &HostRule, host: Option<&str>) -> Option<ErrorCode> {
        let mut headers = HeaderMap::new();
        if let Some(h) = host {
            headers.insert(header::HOST, h.parse().expect("a header value"));
        }
        rule.check(&headers, &Uri::from_static("/v1/machines")).err().map(|e| e.code())
    }

    #[test]
    fn a_loopback_service_answers_to_loopback_and_configured_names_only() {
        let rule = HostRule::new(([127, 0, 0, 1], 8787).into(), &["box.example".to_owned()]);
        for ok in [
            "localhost",
            "localhost:8787",
            "127.0.0.1:8787",
            "127.1.2.3",
            "[::1]:8787",
            "LOCALHOST",
            "box.example:80",
            "localhost.",
        ] {
            assert_eq!(answer(&rule, Some(ok)), None, "{ok}");
        }
        for bad in ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", "0.0.0.0"] {
            assert_eq!(answer(&rule, Some(bad)), Some(ErrorCode::Forbidden), "{bad}");
        }
        assert_eq!(answer(&rule, None), Some(ErrorCode::InvalidRequest));
        assert_eq!(answer(&rule, Some("a b")), Some(ErrorCode::InvalidRequest));
        for rule in [rule, HostRule::new(([0, 0, 0, 0], 80).into(), &[])] {
            let mut headers = HeaderMap::new();
            headers.append(header::HOST, HeaderValue::from_static("127.0.0.1"));
            headers.append(header::HOST, HeaderValue::from_static("evil.example"));
            let answer = rule.check(&headers, &Uri::from_static("/v1/machines"));
            assert_eq!(answer.err().map(|e| e.code()), Some(ErrorCode::InvalidRequest), "two names");
        }
    }

    #[test]
    fn another_address_answers_to_any_name_until_names_are_configured() {
        let any = HostRule::new(([0, 0, 0, 0], 80).into(), &[]);
        assert_eq!(answer(&any, Some("whatever")), None);
        let some = HostRule::new(([0, 0, 0, 0], 80).into(), &["a.example".to_owned()]);
        assert_eq!(answer(&some, Some("a.example")), None);
        assert_eq!(answer(&some, Some("localhost")), Some(ErrorCode::Forbidden));
    }
}
