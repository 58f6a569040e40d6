//! What a machine may reach: policies, and the one evaluator that decides.
//!
//! Three policies. `off`: nothing, for ever. `open`: the public internet; never a private, local or otherwise reserved
//! address ([`reserved`]). `allow-list`: only what its rules name. Rules name hosts or address blocks; reserved addresses
//! are reached by no rule at all, whatever a name resolves to.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::sync::LazyLock;

use ipnet::IpNet;

use crate::limits::{EGRESS_RULES_MAX, HOST_NAME_MAX};

/// What a machine may reach.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum EgressPolicy {
    /// Nothing. Cannot be loosened for the rest of the generation.
    #[default]
    Off,
    /// Public addresses.
    Open,
    /// What a rule names.
    AllowList(AllowList),
}

impl EgressPolicy {
    /// The wire name.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Open => "open",
            Self::AllowList(_) => "allow-list",
        }
    }

    /// Whether the machine can reach anything at all.
    #[must_use]
    pub fn leads_out(&self) -> bool {
        *self != Self::Off
    }

    /// Whether a machine under this policy may be put under `next`.
    #[must_use]
    pub fn may_become(&self, next: &Self) -> bool {
        *self != Self::Off || *next == Self::Off
    }
}

/// One line of text that [`FromStr`] reads: `off`, `open`, `allow-list RULE…`, `allow-list dry-run RULE…`.
impl fmt::Display for EgressPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())?;
        let Self::AllowList(list) = self else { return Ok(()) };
        if list.dry_run {
            f.write_str(" dry-run")?;
        }
        list.rules.iter().try_for_each(|rule| write!(f, " {rule}"))
    }
}

impl FromStr for EgressPolicy {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let mut words = text.split(' ');
        match (words.next(), words.clone().next()) {
            (Some("off"), None) => Ok(Self::Off),
            (Some("open"), None) => Ok(Self::Open),
            (Some("allow-list"), first) => {
                let dry_run = first == Some("dry-run");
                let rules = words.skip(usize::from(dry_run)).map(str::parse).collect::<Result<_, _>>()?;
                Ok(Self::AllowList(AllowList::new(rules, dry_run)?))
            }
            _ => Err(RuleError::Form(printable(text))),
        }
    }
}

/// Rules; a target is allowed when any of them matches.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct AllowList {
    rules: Vec<EgressRule>,
    /// Lets everything public pass, and records what would have been denied.
    pub dry_run: bool,
}

impl AllowList {
    /// A list of at most [`EGRESS_RULES_MAX`] rules.
    ///
    /// # Errors
    /// When there are more.
    pub fn new(rules: Vec<EgressRule>, dry_run: bool) -> Result<Self, RuleError> {
        if rules.len() > EGRESS_RULES_MAX {
            return Err(RuleError::TooMany);
        }
        Ok(Self { rules, dry_run })
    }

    /// The rules, in the order they were given.
    #[must_use]
    pub fn rules(&self) -> &[EgressRule] {
        &self.rules
    }

    /// Whether any rule could allow `name` on some port: what a name server may answer for.
    #[must_use]
    pub fn may_resolve(&self, name: &HostName) -> bool {
        self.dry_run || self.rules.iter().any(|r| matches!(&r.what, Destination::Name(p) if p.matches(name)))
    }
}

/// One rule: a destination, and perhaps ports.
///
/// As text: `example.org`, `*.example.org`, `example.org:443`, `192.0.2.0/24`, `192.0.2.7:5432`, `[2001:db8::]/32:443`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EgressRule {
    /// Where to.
    pub what: Destination,
    /// Which port. `None`: for names, 80 and 443; for addresses, every port.
    pub port: Option<u16>,
}

/// Where a rule leads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Destination {
    /// Hosts by name.
    Name(NamePattern),
    /// Hosts by address.
    Block(IpNet),
}

/// A host name, or `*.` and one: the latter matches every name below it, at any depth, and not the name itself.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NamePattern {
    below: bool,
    name: HostName,
}

impl NamePattern {
    /// Whether `name` is meant.
    #[must_use]
    pub fn matches(&self, name: &HostName) -> bool {
        if !self.below {
            return self.name == *name;
        }
        name.0.strip_suffix(self.name.0.as_str()).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
    }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.below { "*." } else { "" }, self.name)
    }
}

/// A host name in its one form: lower case, ASCII (IDNA's `xn--` where needed), without the final dot.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostName(String);

impl HostName {
    /// Its text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for HostName {
    type Err = RuleError;

    /// Accepts letters, digits, `-` and `_` in labels of 1 to 63 bytes, at least one of which is not a number: what looks
    /// like an address is not a name.
    fn from_str(text: &str) -> Result<Self, RuleError> {
        let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
        let fine = |label: &str| {
            (1..=63).contains(&label.len())
                && !label.starts_with('-')
                && !label.ends_with('-')
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        };
        let last = name.rsplit('.').next().unwrap_or("");
        let numeric = last.bytes().all(|b| b.is_ascii_digit()) || last.starts_with("0x");
        if name.len() > HOST_NAME_MAX || numeric || !name.split('.').all(fine) {
            return Err(RuleError::Name(printable(text)));
        }
        Ok(Self(name))
    }
}

/// Why a rule is not one. Safe to show.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleError {
    /// Not a host name.
    #[error("{0} is not a host name (letters, digits, hyphens and dots; write other scripts in their xn-- form)")]
    Name(String),
    /// Neither name nor address block.
    #[error(
        "{0} is neither a host name, nor *.NAME, nor an address or block such as 192.0.2.0/24, with or without :PORT"
    )]
    Form(String),
    /// A port out of range.
    #[error("{0} has no valid port: 1 to 65535")]
    Port(String),
    /// A block that holds or lies in addresses no machine may reach.
    #[error("{0} covers addresses that no machine may reach (private, local, or reserved)")]
    Reserved(String),
    /// Too many.
    #[error("a policy has at most {EGRESS_RULES_MAX} rules")]
    TooMany,
}

fn printable(text: &str) -> String {
    text.chars().take(80).map(|c| if c.is_control() { '?' } else { c }).collect()
}

impl FromStr for EgressRule {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let form = || RuleError::Form(printable(text));
        let port = |p: &str| match p.parse::<u16>() {
            Ok(n) if n > 0 && p.bytes().all(|b| b.is_ascii_digit()) => Ok(n),
            _ => Err(RuleError::Port(printable(text))),
        };
        if let Some(rest) = text.strip_prefix('[') {
            // [v6] or [v6]/N, then perhaps :PORT.
            let (address, rest) = rest.split_once(']').ok_or_else(form)?;
            let (length, rest) = match rest.strip_prefix('/') {
                Some(r) => r.split_once(':').map_or((Some(r), None), |(l, p)| (Some(l), Some(p))),
                None => (None, if rest.is_empty() { None } else { Some(rest.strip_prefix(':').ok_or_else(form)?) }),
            };
            let address: Ipv6Addr = address.parse().map_err(|_| form())?;
            let length = length.map_or(Ok(128), str::parse::<u8>).map_err(|_| form())?;
            let block = IpNet::new(address.into(), length).map_err(|_| form())?;
            return Ok(Self { what: Destination::Block(unreserved(block, text)?), port: rest.map(port).transpose()? });
        }
        if let Some(block) = block(text) {
            return Ok(Self { what: Destination::Block(unreserved(block, text)?), port: None });
        }
        let (host, tail) = text.split_once(':').map_or((text, None), |(h, p)| (h, Some(p)));
        let port = tail.map(port).transpose()?;
        if let Some(block) = block(host) {
            return Ok(Self { what: Destination::Block(unreserved(block, text)?), port });
        }
        let (below, name) = host.strip_prefix("*.").map_or((false, host), |n| (true, n));
        if name.is_empty() || name.contains(['*', '/', '[', ']']) {
            return Err(form());
        }
        Ok(Self { what: Destination::Name(NamePattern { below, name: name.parse()? }), port })
    }
}

fn block(text: &str) -> Option<IpNet> {
    text.parse::<IpNet>().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from)).map(|n| n.trunc())
}

fn unreserved(block: IpNet, text: &str) -> Result<IpNet, RuleError> {
    let refused = RESERVED_BLOCKS.iter().any(|(_, r)| r.contains(&block) || block.contains(r));
    if refused { Err(RuleError::Reserved(printable(text))) } else { Ok(block.trunc()) }
}

impl fmt::Display for EgressRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.what {
            Destination::Name(p) => write!(f, "{p}")?,
            Destination::Block(IpNet::V6(n)) => write!(f, "[{}]/{}", n.addr(), n.prefix_len())?,
            Destination::Block(n) => write!(f, "{n}")?,
        }
        self.port.map_or(Ok(()), |p| write!(f, ":{p}"))
    }
}

/// Blocks no machine may reach, each with what it is, in CIDR form.
pub const RESERVED: &[(&str, &str)] = &[
    ("this network", "0.0.0.0/8"),
    ("private", "10.0.0.0/8"),
    ("carrier-grade NAT", "100.64.0.0/10"),
    ("loopback", "127.0.0.0/8"),
    ("link-local and metadata", "169.254.0.0/16"),
    ("a cloud's host services", "168.63.129.16/32"),
    ("private", "172.16.0.0/12"),
    ("protocol assignments", "192.0.0.0/24"),
    ("6to4 relays", "192.88.99.0/24"),
    ("private", "192.168.0.0/16"),
    ("benchmarking", "198.18.0.0/15"),
    ("multicast", "224.0.0.0/4"),
    ("reserved and broadcast", "240.0.0.0/4"),
    ("unspecified, loopback and IPv4-compatible", "::/96"),
    ("IPv4-mapped", "::ffff:0:0/96"),
    ("IPv4 translation", "64:ff9b::/96"),
    ("local IPv4 translation", "64:ff9b:1::/48"),
    ("discard-only", "100::/64"),
    ("Teredo", "2001::/32"),
    ("benchmarking", "2001:2::/48"),
    ("6to4", "2002::/16"),
    ("unique local", "fc00::/7"),
    ("link-local", "fe80::/10"),
    ("site-local", "fec0::/10"),
    ("multicast", "ff00::/8"),
];

static RESERVED_BLOCKS: LazyLock<Vec<(&'static str, IpNet)>> =
    LazyLock::new(|| RESERVED.iter().filter_map(|(kind, block)| Some((*kind, block.parse().ok()?))).collect());

/// What kind of address this is, when no machine may reach it.
#[must_use]
pub fn reserved(address: IpAddr) -> Option<&'static str> {
    RESERVED_BLOCKS.iter().find(|(_, block)| block.contains(&address)).map(|(kind, _)| *kind)
}

/// What a decision is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target<'a> {
    /// A host that was asked for by name.
    Name(&'a HostName),
    /// A host that was asked for by address.
    Address(IpAddr),
}

/// May it, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Yes. The rule that says so, if it takes one.
    Allowed(Option<EgressRule>),
    /// Only because nothing is enforced yet (`dry_run`).
    WouldDeny(Denial),
    /// No.
    Denied(Denial),
}

impl Decision {
    /// Whether the connection is made.
    #[must_use]
    pub const fn lets_pass(&self) -> bool {
        !matches!(self, Self::Denied(_))
    }
}

/// Why not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denial {
    /// The machine has no network.
    #[error("the machine has no network")]
    Off,
    /// No machine may reach such an address.
    #[error("{address} is {kind}: no machine may reach it")]
    Reserved {
        /// The address.
        address: IpAddr,
        /// What kind it is.
        kind: &'static str,
    },
    /// No rule names it.
    #[error("no rule of the allow-list matches")]
    NoRule,
    /// Rules name the host, and not this port.
    #[error("the allow-list names the host, but not port {0}")]
    Port(u16),
}

impl EgressPolicy {
    /// Decides on a connection to `target`. For a name this says whether it may be resolved and tried; each address it
    /// resolves to must then pass [`reserved`] as well.
    #[must_use]
    pub fn decide(&self, target: &Target<'_>, port: u16) -> Decision {
        if let Target::Address(address) = target
            && let Some(kind) = reserved(*address)
        {
            let off = *self == Self::Off;
            return Decision::Denied(if off { Denial::Off } else { Denial::Reserved { address: *address, kind } });
        }
        let list = match self {
            Self::Off => return Decision::Denied(Denial::Off),
            Self::Open => return Decision::Allowed(None),
            Self::AllowList(list) => list,
        };
        let mut denial = Denial::NoRule;
        for rule in &list.rules {
            let (hit, standard) = match (&rule.what, target) {
                (Destination::Name(p), Target::Name(n)) => (p.matches(n), matches!(port, 80 | 443)),
                (Destination::Block(b), Target::Address(a)) => (b.contains(a), true),
                _ => (false, false),
            };
            if hit {
                if rule.port.map_or(standard, |p| p == port) {
                    return Decision::Allowed(Some(rule.clone()));
                }
                denial = Denial::Port(port);
            }
        }
        if list.dry_run { Decision::WouldDeny(denial) } else { Decision::Denied(denial) }
    }
}

/// The address of an IPv4 host inside the IPv6 forms that carry one.
#[must_use]
pub fn unmapped(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(address, IpAddr::V4),
        IpAddr::V4(_) => address,
    }
}

/// The address every machine has inside.
pub const GUEST_ADDRESS: Ipv4Addr = Ipv4Addr::new(172, 31, 255, 2);
/// What a machine's route, name server and proxy are inside.
pub const GATEWAY_ADDRESS: Ipv4Addr = Ipv4Addr::new(172, 31, 255, 1);
/// Prefix length of the network inside.
pub const GUEST_PREFIX: u8 = 30;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rule(text: &str) -> EgressRule {
        text.parse().expect(text)
    }
    fn name(text: &str) -> HostName {
        text.parse().expect(text)
    }
    fn list(rules: &[&str]) -> EgressPolicy {
        EgressPolicy::AllowList(AllowList::new(rules.iter().map(|r| rule(r)).collect(), false).expect("few"))
    }
    fn passes(policy: &EgressPolicy, host: &str, port: u16) -> bool {
        match host.parse::<IpAddr>() {
            Ok(a) => policy.decide(&Target::Address(a), port).lets_pass(),
            Err(_) => policy.decide(&Target::Name(&name(host)), port).lets_pass(),
        }
    }

    #[test]
    fn rules_are_read_and_written_the_same() {
        for text in [
            "example.org",
            "*.example.org",
            "example.org:8443",
            "93.184.216.0/24",
            "93.184.216.34/32:5432",
            "[2606:2800::]/32",
            "[2606:2800::1]/128:443",
            "xn--bcher-kva.example",
        ] {
            assert_eq!(rule(text).to_string(), text);
        }
        assert_eq!(rule("93.184.216.34:22").to_string(), "93.184.216.34/32:22");
        assert_eq!(rule("[2606:2800::1]:443").to_string(), "[2606:2800::1]/128:443");
        assert_eq!(rule("EXAMPLE.org.").to_string(), "example.org");
    }

    #[test]
    fn what_is_no_rule_is_refused() {
        for text in [
            "",
            "*",
            "*.",
            "*.*.org",
            "a*.org",
            "http://example.org",
            "example.org/x",
            "example.org:0",
            "example.org:99999",
            "example.org:+80",
            "-a.org",
            "a..org",
            "bücher.example",
            "a b",
            "1.2.3",
            "0x7f.1",
            "[::1",
            "[2606::]x",
            "1.2.3.4/33",
        ] {
            assert!(text.parse::<EgressRule>().is_err(), "{text}");
        }
        let label = "a".repeat(64);
        assert!(format!("{label}.org").parse::<EgressRule>().is_err());
    }

    #[test]
    fn a_rule_cannot_open_what_no_machine_may_reach() {
        for text in [
            "10.0.0.1",
            "0.0.0.0/0",
            "169.254.169.254",
            "192.168.0.0/24",
            "172.0.0.0/8",
            "[::]/0",
            "[fd00::1]",
            "127.0.0.1:80",
            "[::ffff:8.8.8.8]",
        ] {
            assert!(matches!(text.parse::<EgressRule>(), Err(RuleError::Reserved(_))), "{text}");
        }
    }

    #[test]
    fn a_wildcard_is_for_what_lies_below() {
        let p = list(&["*.example.org"]);
        assert!(passes(&p, "a.example.org", 443) && passes(&p, "a.b.example.org", 80));
        assert!(
            !passes(&p, "example.org", 443)
                && !passes(&p, "badexample.org", 443)
                && !passes(&p, "example.org.evil", 443)
        );
    }

    #[test]
    fn names_mean_the_web_and_addresses_mean_every_port_unless_they_say() {
        let p = list(&["example.org", "db.example:5432", "93.184.216.0/24"]);
        assert!(passes(&p, "example.org", 443) && passes(&p, "example.org", 80) && !passes(&p, "example.org", 22));
        assert!(passes(&p, "db.example", 5432) && !passes(&p, "db.example", 443));
        assert!(passes(&p, "93.184.216.34", 22) && !passes(&p, "93.184.217.34", 22));
        assert_eq!(p.decide(&Target::Name(&name("example.org")), 22), Decision::Denied(Denial::Port(22)));
    }

    #[test]
    fn policies_are_read_and_written_the_same() {
        for text in [
            "off",
            "open",
            "allow-list",
            "allow-list dry-run",
            "allow-list example.org *.example.org:8443",
            "allow-list dry-run 93.184.216.0/24",
        ] {
            assert_eq!(text.parse::<EgressPolicy>().expect(text).to_string(), text);
        }
        for text in ["", "off x", "open ", "allow-list  ", "allow-list 10.0.0.1", "ajar"] {
            assert!(text.parse::<EgressPolicy>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn off_stays_off() {
        assert!(!passes(&EgressPolicy::Off, "example.org", 443) && !passes(&EgressPolicy::Off, "8.8.8.8", 53));
        assert!(!EgressPolicy::Off.may_become(&EgressPolicy::Open) && EgressPolicy::Open.may_become(&list(&[])));
    }

    #[test]
    fn a_dry_run_lets_pass_and_says_so_but_never_inwards() {
        let p = EgressPolicy::AllowList(AllowList::new(Vec::new(), true).expect("none"));
        assert_eq!(p.decide(&Target::Name(&name("example.org")), 443), Decision::WouldDeny(Denial::NoRule));
        assert!(!passes(&p, "10.1.2.3", 443));
    }

    #[test]
    fn reserved_blocks_are_well_formed() {
        for (_, block) in RESERVED {
            let net: IpNet = block.parse().expect(block);
            assert_eq!(net, net.trunc(), "{block}");
        }
        assert_eq!(RESERVED_BLOCKS.len(), RESERVED.len());
        assert!(reserved(GUEST_ADDRESS.into()).is_some());
    }

    proptest! {
        /// No policy ever lets a reserved address pass, in any notation.
        #[test]
        fn reserved_addresses_are_out_of_reach(bits in any::<u128>(), v4 in any::<u32>(), port in 1u16.., dry in any::<bool>()) {
            let policies = [EgressPolicy::Open, EgressPolicy::AllowList(AllowList::new(vec![rule("93.184.216.0/24")], dry).expect("few"))];
            for a in [IpAddr::from(Ipv6Addr::from(bits)), IpAddr::from(Ipv4Addr::from(v4)), IpAddr::from(Ipv4Addr::from(v4).to_ipv6_mapped())] {
                if reserved(a).is_some() {
                    for p in &policies { prop_assert!(!p.decide(&Target::Address(a), port).lets_pass()); }
                }
            }
            prop_assert!(reserved(Ipv4Addr::from(v4).to_ipv6_mapped().into()).is_some());
        }

        /// Reading a rule never panics, and what is read is written in a form that is read as the same.
        #[test]
        fn any_text_is_a_rule_or_an_error(text in "\\PC{0,40}") {
            if let Ok(r) = text.parse::<EgressRule>() {
                prop_assert_eq!(r.to_string().parse::<EgressRule>().expect("its own form"), r);
            }
        }
    }
}
