//! What a machine of a template is set to.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use crate::error::{Fault, shown};
use crate::health::Probe;

/// What is carried by a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// A port that something in the machine listens on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Port {
    /// Its number, from 1.
    pub number: u16,
    /// What it carries.
    pub protocol: Protocol,
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let protocol = if self.protocol == Protocol::Tcp { "tcp" } else { "udp" };
        write!(f, "{}/{protocol}", self.number)
    }
}

impl FromStr for Port {
    type Err = Fault;

    /// `8080`, `8080/tcp`, `53/udp`.
    fn from_str(text: &str) -> Result<Self, Fault> {
        let bad =
            || Fault::Value(format!("`{}` is no port; give a number from 1 to 65535, and /tcp or /udp", shown(text)));
        let (number, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
        let protocol = match protocol.to_ascii_lowercase().as_str() {
            "tcp" => Protocol::Tcp,
            "udp" => Protocol::Udp,
            _ => return Err(bad()),
        };
        let digits = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
        let number = number.parse().ok().filter(|n| digits && *n > 0).ok_or_else(bad)?;
        Ok(Self { number, protocol })
    }
}

/// Most ports of one recipe that a range may stand for.
const RANGE_MAX: u16 = 1024;

/// One word of `EXPOSE`: a port, or a range of them.
pub(crate) fn ports(text: &str) -> Result<Vec<Port>, Fault> {
    let (numbers, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    let Some((low, high)) = numbers.split_once('-') else { return Ok(vec![text.parse()?]) };
    let one = |number: &str| format!("{number}/{protocol}").parse::<Port>();
    let (low, high) = (one(low)?, one(high)?);
    if high.number < low.number || high.number - low.number >= RANGE_MAX {
        return Err(Fault::Value(format!("`{}` is no range of at most {RANGE_MAX} ports", shown(text))));
    }
    Ok((low.number..=high.number).map(|number| Port { number, protocol: low.protocol }).collect())
}

/// What a machine of a template is set to, besides what is on its disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Environment of every command.
    pub env: BTreeMap<String, String>,
    /// Directory commands begin in: absolute.
    pub workdir: String,
    /// `USER` or `USER:GROUP`, by name or number; `None`: root.
    pub user: Option<String>,
    /// The words in front of [`Self::cmd`].
    pub entrypoint: Vec<String>,
    /// The words of the start command, or those behind the entry point.
    pub cmd: Vec<String>,
    /// What runs a command that is given as a line.
    pub shell: Vec<String>,
    /// Ports that are listened on.
    pub ports: BTreeSet<Port>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// How to tell that the start command is ready.
    pub probe: Option<Probe>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            env: BTreeMap::new(),
            workdir: "/".to_owned(),
            user: None,
            entrypoint: Vec::new(),
            cmd: Vec::new(),
            shell: ["/bin/sh", "-c"].map(str::to_owned).to_vec(),
            ports: BTreeSet::new(),
            labels: BTreeMap::new(),
            probe: None,
        }
    }
}

impl Settings {
    /// The command a machine starts with; empty when there is none.
    #[must_use]
    pub fn start(&self) -> Vec<String> {
        self.entrypoint.iter().chain(&self.cmd).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_and_ranges_of_them_are_read() {
        assert_eq!("80".parse::<Port>().expect("a port").to_string(), "80/tcp");
        assert_eq!(ports("53/UDP").expect("a port")[0].to_string(), "53/udp");
        assert_eq!(ports("8000-8002/tcp").expect("a range").len(), 3);
        for bad in ["", "0", "65536", "+80", "80/x", "a", "9-8", "1-2000", "-5", "5-"] {
            assert!(ports(bad).is_err(), "{bad}");
        }
    }
}
