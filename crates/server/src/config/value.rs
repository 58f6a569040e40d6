//! What each value may look like.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use mainbrella_engine::microvm::network::NetworkChoice;
use mainbrella_types::machine::check_idle;

use super::DatabaseUrl;

/// What executes guest instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Accel {
    /// KVM where a trial boot has succeeded, else emulation.
    #[default]
    Auto,
    /// KVM or nothing.
    Kvm,
    /// Emulation.
    Tcg,
}

/// Form of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

type Parsed<T> = Result<T, String>;

pub(super) fn accel(s: &str) -> Parsed<Accel> {
    match s {
        "auto" => Ok(Accel::Auto),
        "kvm" => Ok(Accel::Kvm),
        "tcg" => Ok(Accel::Tcg),
        _ => Err("must be auto, kvm or tcg".into()),
    }
}

pub(super) fn machine_network(s: &str) -> Parsed<NetworkChoice> {
    let bad = || "must be auto, off, or a private IPv4 block from /12 to /30 such as 10.99.0.0/16".to_owned();
    match s {
        "auto" => Ok(NetworkChoice::Auto),
        "off" => Ok(NetworkChoice::Off),
        _ => {
            let block: ipnet::Ipv4Net = s.parse().map_err(|_| bad())?;
            let inside = ipnet::Ipv4Net::from(mainbrella_types::egress::GUEST_ADDRESS);
            let fine = block == block.trunc()
                && block.network().is_private()
                && block.broadcast().is_private()
                && (12..=30).contains(&block.prefix_len())
                && !block.contains(&inside);
            if fine { Ok(NetworkChoice::Block(block)) } else { Err(bad()) }
        }
    }
}

pub(super) fn log_format(s: &str) -> Parsed<LogFormat> {
    match s {
        "text" => Ok(LogFormat::Text),
        "json" => Ok(LogFormat::Json),
        _ => Err("must be text or json".into()),
    }
}

pub(super) fn log_filter(s: &str) -> Parsed<String> {
    tracing_subscriber::EnvFilter::try_new(s)
        .map(|_| s.to_owned())
        .map_err(|_| "must be a level, or a list such as info,mainbrella_engine=debug".into())
}

pub(super) fn idle_timeout(s: &str) -> Parsed<Option<Duration>> {
    let seconds: u64 = s.parse().map_err(|_| "must be a whole number of seconds".to_owned())?;
    if seconds == 0 {
        return Ok(None);
    }
    check_idle(seconds.saturating_mul(1000)).map_err(|e| format!("must be 0 or {}", e.expected))?;
    Ok(Some(Duration::from_secs(seconds)))
}

pub(super) fn absolute_path(s: &str) -> Parsed<Option<PathBuf>> {
    match s {
        "" => Ok(None),
        s if s.starts_with('/') => Ok(Some(s.into())),
        _ => Err("must be an absolute path".into()),
    }
}

pub(super) fn database(s: &str) -> Parsed<Option<DatabaseUrl>> {
    if s.is_empty() {
        return Ok(None);
    }
    let known = ["postgres://", "postgresql://", "sqlite:"];
    if known.iter().any(|k| s.len() > k.len() && s.starts_with(k)) {
        Ok(Some(DatabaseUrl(s.to_owned())))
    } else {
        Err("must be postgres://… or sqlite:FILE".into())
    }
}

pub(super) fn host_name(s: &str) -> Parsed<String> {
    let ok = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    if (1..=63).contains(&s.len()) && s.bytes().all(ok) {
        Ok(s.to_owned())
    } else {
        Err("must be 1 to 63 of a-z, 0-9, '-' and '.'".into())
    }
}

pub(super) fn host_names(s: &str) -> Parsed<Vec<String>> {
    let names: Vec<String> =
        s.split(',').map(str::trim).filter(|n| !n.is_empty()).map(str::to_ascii_lowercase).collect();
    let ok = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b':' | b'[' | b']');
    match names.iter().find(|n| n.len() > 253 || !n.bytes().all(ok)) {
        Some(bad) => Err(format!("{bad:?} is not a host name")),
        None if names.len() > 64 => Err("must be at most 64 names".into()),
        None => Ok(names),
    }
}

/// Where previews are served: by default beside the API, for this machine only.
pub(super) fn preview_listen(s: &str, listen: SocketAddr) -> Parsed<Option<SocketAddr>> {
    match s {
        "off" => Ok(None),
        "" => {
            // Any free port where the API has any, too.
            let port = if listen.port() == 0 { Some(0) } else { listen.port().checked_add(1) };
            let port = port.ok_or("must be given, because there is no port after that of listen")?;
            Ok(Some(SocketAddr::from(([127, 0, 0, 1], port))))
        }
        s => s.parse().map(Some).map_err(|_| "must be an address and a port such as 127.0.0.1:8788, or off".into()),
    }
}

pub(super) fn domain(s: &str) -> Parsed<String> {
    let name = s.to_ascii_lowercase();
    let label = |l: &str| {
        (1..=63).contains(&l.len())
            && l.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
            && !l.starts_with('-')
            && !l.ends_with('-')
    };
    // With a token and a dot before it, the name must still be one.
    let fits = name.len() <= 253 - 33 && name.split('.').all(label);
    let is_address = name.split('.').next_back().is_some_and(|l| l.bytes().all(|b| b.is_ascii_digit()));
    if fits && !is_address {
        Ok(name)
    } else {
        Err("must be a host name such as localhost or previews.example.com".into())
    }
}

pub(super) fn scheme(s: &str) -> Parsed<Option<bool>> {
    match s {
        "" => Ok(None),
        "http" => Ok(Some(false)),
        "https" => Ok(Some(true)),
        _ => Err("must be http or https".into()),
    }
}

pub(super) fn port(s: &str) -> Parsed<Option<u16>> {
    match s {
        "" => Ok(None),
        s => s.parse().ok().filter(|p| *p > 0).map(Some).ok_or("must be a whole number from 1 to 65535".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn previews_are_served_beside_the_api_unless_told_otherwise() {
        let beside = |s: &str, listen: &str| {
            preview_listen(s, listen.parse().expect("an address")).map(|a| a.map(|a| a.to_string()))
        };
        assert_eq!(beside("", "127.0.0.1:8787"), Ok(Some("127.0.0.1:8788".into())));
        assert_eq!(beside("", "0.0.0.0:9000"), Ok(Some("127.0.0.1:9001".into())), "never open to others by default");
        assert_eq!(beside("", "127.0.0.1:0"), Ok(Some("127.0.0.1:0".into())));
        assert_eq!(
            (beside("off", "127.0.0.1:1"), beside("[::1]:5", "127.0.0.1:1")),
            (Ok(None), Ok(Some("[::1]:5".into())))
        );
        assert!(beside("", "127.0.0.1:65535").is_err() && beside("localhost:1", "127.0.0.1:1").is_err());
    }

    #[test]
    fn domains_are_host_names_with_room_for_a_token() {
        assert_eq!(domain("Previews.Example.COM"), Ok("previews.example.com".into()));
        for bad in ["", ".", "a..b", "-a", "a b", "127.0.0.1", "a:80", "http://a", &format!("{}.com", "a.".repeat(120))]
        {
            assert!(domain(bad).is_err(), "{bad}");
        }
    }
}
