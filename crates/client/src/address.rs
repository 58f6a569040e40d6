//! Which addresses an API key may be sent to.

use std::net::IpAddr;

use url::{Host, Url};

use crate::error::ClientError;

/// Where a service listens unless told otherwise.
pub const DEFAULT_URL: &str = "http://127.0.0.1:8787";

/// Whether `url` names this machine.
#[must_use]
pub fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Ipv4(a)) => IpAddr::V4(a).is_loopback(),
        Some(Host::Ipv6(a)) => IpAddr::V6(a).is_loopback(),
        Some(Host::Domain(name)) => name.trim_end_matches('.').eq_ignore_ascii_case("localhost"),
        None => false,
    }
}

/// Checks a base URL and gives its path a final slash.
pub(crate) fn parse(text: &str) -> Result<Url, ClientError> {
    let bad = |message: &str, hint: &str| ClientError::Configuration { message: message.into(), hint: hint.into() };
    let form = "Use a form such as https://mainbrella.example or http://127.0.0.1:8787.";
    let mut url = Url::parse(text).map_err(|_| bad("the address of the service is not a URL", form))?;
    if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
        return Err(bad("the address of the service is not an http or https URL", form));
    }
    if !url.username().is_empty() || url.password().is_some() || url.query().is_some() || url.fragment().is_some() {
        return Err(bad("the address of the service must not hold a user, password, query or fragment", form));
    }
    if url.scheme() == "http" && !is_loopback(&url) {
        return Err(bad(
            "the address of the service must begin with https:// unless it names this machine",
            "Plain HTTP would show the API key to the network; put TLS in front of the service, or use a tunnel.",
        ));
    }
    if !url.path().ends_with('/') {
        let path = format!("{}/", url.path());
        url.set_path(&path);
    }
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn https_is_required_unless_the_address_is_this_machine() {
        for ok in [
            "https://mainbrella.example",
            "https://10.0.0.7:8443/team",
            "http://127.0.0.1:8787",
            "http://127.9.9.9",
            "http://LOCALHOST:1",
            "http://[::1]:8787/",
        ] {
            assert!(parse(ok).is_ok(), "{ok}");
        }
        for bad in [
            "",
            "127.0.0.1:8787",
            "http://mainbrella.example",
            "http://10.0.0.7",
            "http://127.0.0.1.evil.example",
            "http://localhost.evil.example",
            "http://0.0.0.0",
            "http://[::2]",
            "ftp://127.0.0.1",
            "https://user:pw@mainbrella.example",
            "https://mainbrella.example/?a=b",
            "https://mainbrella.example/#x",
        ] {
            assert!(matches!(parse(bad), Err(ClientError::Configuration { .. })), "{bad}");
        }
    }

    #[test]
    fn a_path_in_front_of_the_api_is_kept() {
        assert_eq!(parse("https://h/team").expect("valid").join("v1/keys").expect("valid").path(), "/team/v1/keys");
    }
}
