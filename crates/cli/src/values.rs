//! Values on the command line: durations, labels, names of machines and hosts, places of files.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use mainbrella_client::api;
use mainbrella_types::{CreatedAt, MachineId, SnapshotKey};

/// A duration: `90`, `90s`, `500ms`, `5m`, `2h`, `1d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let bad = || "write a whole number and ms, s, m, h or d, e.g. 90s or 5m".to_owned();
        let digits = s.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = s.split_at(digits);
        let factor: u64 = match unit {
            "ms" => 1,
            "" | "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(bad()),
        };
        let n: u64 = number.parse().map_err(|_| bad())?;
        n.checked_mul(factor).map(|ms| Self(Duration::from_millis(ms))).ok_or_else(bad)
    }
}

impl Span {
    /// Whole seconds, upwards.
    pub fn seconds(self) -> u64 {
        self.0.as_secs() + u64::from(self.0.subsec_nanos() > 0)
    }

    /// Milliseconds.
    pub fn millis(self) -> u64 {
        u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX)
    }
}

/// What becomes of a machine that nobody uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum OnIdle {
    Stop,
    Pause,
}

impl From<OnIdle> for api::OnIdle {
    fn from(on_idle: OnIdle) -> Self {
        match on_idle {
            OnIdle::Stop => Self::Stop,
            OnIdle::Pause => Self::Pause,
        }
    }
}

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Switch {
    On,
    Off,
}

impl Switch {
    /// Whether it is on.
    pub fn is_on(self) -> bool {
        self == Self::On
    }
}

/// `NAME=VALUE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair(pub String, pub String);

impl FromStr for Pair {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s.split_once('=') {
            Some((name, value)) if !name.is_empty() => Ok(Self(name.to_owned(), value.to_owned())),
            _ => Err("write NAME=VALUE".to_owned()),
        }
    }
}

/// A machine: its slot, and which generation of it when that was said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineArg {
    /// The slot.
    pub id: String,
    /// The generation; `None`: the newest.
    pub created_at: Option<String>,
}

impl FromStr for MachineArg {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let bad = || "write ID or ID@CREATED_AT as `mainbrella list` shows them".to_owned();
        let (id, created_at) = match s.split_once('@') {
            Some((id, at)) => (id, Some(at.parse::<CreatedAt>().map_err(|_| bad())?.to_string())),
            None => (s, None),
        };
        let id = id.parse::<MachineId>().map_err(|_| bad())?;
        Ok(Self { id: id.to_string(), created_at })
    }
}

/// A host, and a port: 443 unless it says another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPort {
    /// A name or an address.
    pub host: String,
    /// From 1.
    pub port: u16,
}

impl FromStr for HostPort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || "write HOST or HOST:PORT, an IPv6 address as [ADDRESS] or [ADDRESS]:PORT".to_owned();
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, rest) = rest.split_once(']').ok_or_else(bad)?;
                let port = if rest.is_empty() { None } else { Some(rest.strip_prefix(':').ok_or_else(bad)?) };
                (host, port)
            }
            None if text.matches(':').count() > 1 => (text, None),
            None => text.split_once(':').map_or((text, None), |(h, p)| (h, Some(p))),
        };
        let port = port.map_or(Ok(443), str::parse::<u16>).ok().filter(|p| *p > 0).ok_or_else(bad)?;
        if host.is_empty() { Err(bad()) } else { Ok(Self { host: host.to_owned(), port }) }
    }
}

/// Whose files are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A machine's.
    Machine(MachineArg),
    /// A snapshot's, by its id.
    Snapshot(String),
}

/// In front of the id of a snapshot, where there could be a machine as well.
const SNAPSHOT: &str = "snapshot:";

impl FromStr for Source {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s.strip_prefix(SNAPSHOT) {
            None => s.parse().map(Self::Machine),
            Some(id) => {
                let bad = |_| "write snapshot:ID as `mainbrella snapshots list` shows it".to_owned();
                id.parse::<SnapshotKey>().map(|key| Self::Snapshot(key.to_string())).map_err(bad)
            }
        }
    }
}

/// One end of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// Standard input or output.
    Stdio,
    /// A file here.
    Local(PathBuf),
    /// A file in a machine.
    Remote(MachineArg, String),
    /// A file in a snapshot.
    Saved(String, String),
}

impl Place {
    /// `-`, `ID:/path`, `ID@CREATED_AT:/path`, `snapshot:ID:/path`, or else a local path; `./` in front makes anything local.
    pub fn parse(text: &OsStr) -> Result<Self, String> {
        if text == "-" {
            return Ok(Self::Stdio);
        }
        let bytes = text.as_bytes();
        let split = bytes.windows(2).position(|w| w == b":/");
        if let Some(at) = split
            && let Some(source) = std::str::from_utf8(&bytes[..at]).ok().and_then(|m| m.parse().ok())
        {
            let path = std::str::from_utf8(&bytes[at + 1..])
                .map_err(|_| "the path in the machine must be UTF-8".to_owned())?;
            return Ok(match source {
                Source::Machine(machine) => Self::Remote(machine, path.to_owned()),
                Source::Snapshot(id) => Self::Saved(id, path.to_owned()),
            });
        }
        let named = text.to_str().filter(|t| t.starts_with(SNAPSHOT));
        if named.is_some() && !PathBuf::from(text).exists() {
            return Err("write snapshot:ID:/path, with the id as `mainbrella snapshots list` shows it".to_owned());
        }
        if let Some(machine) =
            text.to_str().and_then(|t| t.split_once(':')).filter(|(m, _)| m.parse::<MachineArg>().is_ok())
            && !PathBuf::from(text).exists()
        {
            return Err(format!("the path in the machine must be absolute: {}:/{}", machine.0, machine.1));
        }
        Ok(Self::Local(PathBuf::from(OsString::from(text))))
    }
}

/// Permission bits, octal.
pub fn mode(s: &str) -> Result<u32, String> {
    match u32::from_str_radix(s, 8) {
        Ok(bits) if bits <= 0o7777 => Ok(bits),
        _ => Err("write permission bits in octal, e.g. 0644".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStringExt as _;

    #[test]
    fn durations_have_units() {
        let ms = |s: &str| s.parse::<Span>().ok().map(|d| d.0.as_millis());
        assert_eq!(
            ["90", "90s", "500ms", "5m", "2h", "1d"].map(ms),
            [Some(90_000), Some(90_000), Some(500), Some(300_000), Some(7_200_000), Some(86_400_000)]
        );
        for bad in ["", "s", "-1", "1.5s", "1 s", "5M", "99999999999999999999", "18446744073709551615d"] {
            assert_eq!(ms(bad), None, "{bad}");
        }
        assert_eq!(Span(Duration::from_millis(1500)).seconds(), 2);
    }

    #[test]
    fn machines_are_slots_or_generations() {
        let m = "m-1@2026-10-08T14:00:00+02:00".parse::<MachineArg>().expect("valid");
        assert_eq!(m.created_at.as_deref(), Some("2026-10-08T12:00:00.000Z"));
        assert_eq!("a".parse::<MachineArg>().expect("valid").created_at, None);
        for bad in ["", "A", "a/b", "a@", "a@yesterday", "@2026-10-08T12:00:00Z", "../x"] {
            assert!(bad.parse::<MachineArg>().is_err(), "{bad}");
        }
    }

    #[test]
    fn hosts_and_ports_are_told_apart() {
        let at = |text: &str| text.parse::<HostPort>().ok().map(|h| (h.host, h.port));
        assert_eq!(at("example.org"), Some(("example.org".into(), 443)));
        assert_eq!(at("example.org:22"), Some(("example.org".into(), 22)));
        assert_eq!(at("192.0.2.1:80"), Some(("192.0.2.1".into(), 80)));
        assert_eq!(at("[2001:db8::1]:80"), Some(("2001:db8::1".into(), 80)));
        assert_eq!(at("[2001:db8::1]"), Some(("2001:db8::1".into(), 443)));
        assert_eq!(at("2001:db8::1"), Some(("2001:db8::1".into(), 443)));
        for bad in ["", ":80", "a:0", "a:99999", "a:b", "[::1", "[::1]80"] {
            assert_eq!(at(bad), None, "{bad}");
        }
    }

    #[test]
    fn places_are_told_apart() {
        let at = |s: &str| Place::parse(OsStr::new(s));
        assert_eq!(at("-"), Ok(Place::Stdio));
        let machine = MachineArg { id: "m-1".into(), created_at: Some("2026-10-08T12:00:00.000Z".into()) };
        assert_eq!(at("m-1@2026-10-08T12:00:00.000Z:/a:/b"), Ok(Place::Remote(machine, "/a:/b".into())));
        assert!(matches!(at("m-1:/x\ny"), Ok(Place::Remote(_, p)) if p == "/x\ny"));
        let id = "s-0123456789abcdef0123456789abcdef";
        assert_eq!(at(&format!("snapshot:{id}:/a")), Ok(Place::Saved(id.into(), "/a".into())));
        assert!(matches!(at(&format!("{id}:/a")), Ok(Place::Remote(..))), "a machine may be called so");
        assert!(at("snapshot:other:/a").is_err() && at(&format!("snapshot:{id}")).is_err());
        for local in ["./m-1:/x", "A:/x", "dir/m:/x", "plain", "/etc/passwd", "./-"] {
            assert_eq!(at(local), Ok(Place::Local(local.into())), "{local}");
        }
        assert!(at("m-1:relative").is_err());
        assert!(Place::parse(&OsString::from_vec(b"m-1:/\xff".to_vec())).is_err());
        assert!(matches!(Place::parse(&OsString::from_vec(b"\xff".to_vec())), Ok(Place::Local(_))));
    }
}
