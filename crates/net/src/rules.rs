//! The packet rules, as text for `nft`. Pure, and the same in every seat: a policy changes which links and listeners there
//! are, never the rules.

use std::fmt::Write as _;
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use mainbrella_types::egress::{GATEWAY_ADDRESS, GUEST_ADDRESS, RESERVED};

use crate::names::BLOCK;
use crate::tap;

/// Name of the link that leads out of a seat under `open`.
pub const OUT: &str = "out";
/// Port of the gateway's listener for redirected connections, in the seat.
pub const GATEWAY_PORT: u16 = 2;
/// Port of the proxy that speaks CONNECT, in the seat.
pub const PROXY_PORT: u16 = 3128;
/// Group under which the kernel logs denied packets, in the namespace that denies them.
pub const LOG_GROUP: u16 = 4242;

/// What the kernel says of a packet that was for an address no machine may reach.
pub const LOG_INWARD: &str = "inward";
/// What the kernel says of a packet that has no way out.
pub const LOG_NOWHERE: &str = "nowhere";

/// First of the user ids whose processes may not use the seat they live in: VMMs run there.
pub const JAILED_UIDS_FROM: u32 = 1_000_000_000;

fn reserved_v4() -> String {
    let blocks: Vec<&str> = RESERVED.iter().map(|(_, b)| *b).filter(|b| !b.contains(':')).collect();
    blocks.join(", ")
}

fn mac(m: [u8; 6]) -> String {
    m.map(|b| format!("{b:02x}")).join(":")
}

/// The rules of a seat.
///
/// What the machine sends is dropped unless it carries the machine's own addresses. Towards the seat itself it reaches name
/// server, gateway and proxy, and nothing else. A connection that does not lead out by way of [`OUT`], or is for an address
/// that stands for a name, is turned to the gateway, which is there unless the policy is `off`. The VMM, should the guest have taken it over, can send nothing. What
/// begins and has no way is told to whoever listens to [`LOG_GROUP`], a bounded number of times a second.
#[must_use]
pub fn seat() -> String {
    let (tap, guest_mac) = (tap::NAME, mac(tap::GUEST_MAC));
    let (reserved, names) = (reserved_v4(), BLOCK);
    format!(
        r#"table netdev link {{
  chain spoof {{
    type filter hook ingress device "{tap}" priority -500; policy drop;
    ether saddr != {guest_mac} drop
    ether type arp arp saddr ip {GUEST_ADDRESS} accept
    ether type ip ip saddr {GUEST_ADDRESS} accept
  }}
}}
table inet seat {{
  set reserved {{ type ipv4_addr; flags interval; auto-merge; elements = {{ {reserved} }} }}
  chain told {{
    type filter hook prerouting priority mangle; policy accept;
    iifname != "{tap}" accept
    ct state != new accept
    ip daddr {GATEWAY_ADDRESS} udp dport 53 accept
    ip daddr {GATEWAY_ADDRESS} tcp dport {{ 53, {PROXY_PORT} }} accept
    ip daddr {GATEWAY_ADDRESS} icmp type echo-request accept
    fib daddr oifname "{OUT}" accept
    limit rate 50/second burst 50 packets log prefix "{LOG_NOWHERE}" group {LOG_GROUP}
  }}
  chain turn {{
    type nat hook prerouting priority dstnat; policy accept;
    iifname "{tap}" ip daddr {GATEWAY_ADDRESS} tcp dport {{ 53, {PROXY_PORT} }} accept
    iifname "{tap}" meta l4proto tcp ip daddr {names} redirect to :{GATEWAY_PORT}
    iifname "{tap}" meta l4proto tcp fib daddr oifname != "{OUT}" redirect to :{GATEWAY_PORT}
  }}
  chain translate {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname "{OUT}" masquerade
  }}
  chain in {{
    type filter hook input priority filter; policy drop;
    ct state established,related accept
    iifname "lo" meta skuid < {JAILED_UIDS_FROM} accept
    iifname "{tap}" ip daddr {GATEWAY_ADDRESS} udp dport 53 accept
    iifname "{tap}" ip daddr {GATEWAY_ADDRESS} tcp dport {{ 53, {PROXY_PORT}, {GATEWAY_PORT} }} ct count over 1024 reject with tcp reset
    iifname "{tap}" ip daddr {GATEWAY_ADDRESS} tcp dport {{ 53, {PROXY_PORT}, {GATEWAY_PORT} }} accept
    iifname "{tap}" ip daddr {GATEWAY_ADDRESS} icmp type echo-request limit rate 20/second accept
    iifname "{tap}" meta l4proto tcp reject with tcp reset
  }}
  chain through {{
    type filter hook forward priority filter; policy drop;
    iifname "{OUT}" oifname "{tap}" ct state established,related accept
    iifname "{tap}" ip daddr @reserved limit rate 50/second burst 50 packets log prefix "{LOG_INWARD}" group {LOG_GROUP}
    iifname "{tap}" ip daddr @reserved reject with icmp type admin-prohibited
    iifname "{tap}" oifname "{OUT}" ip saddr {GUEST_ADDRESS} accept
  }}
  chain out {{
    type filter hook output priority filter; policy drop;
    meta skuid >= {JAILED_UIDS_FROM} drop
    oifname {{ "lo", "{tap}" }} accept
    meta skuid 0 oifname "{OUT}" ct state established,related accept
  }}
}}
"#
    )
}

/// The rules of the host, for seats under `open`: links named `PREFIX…` may reach public addresses through the host, and
/// neither the host itself, nor each other, nor anything behind it that is not public. Replaces what was loaded before.
///
/// `guard`: forwarding was off on this host before us, so it stays off for everybody else.
#[must_use]
pub fn host(table: &str, prefix: &str, block: Ipv4Net, guard: bool) -> String {
    let reserved = reserved_v4();
    let mut text = format!(
        r#"table inet {table} {{}}
delete table inet {table}
table inet {table} {{
  set reserved {{ type ipv4_addr; flags interval; auto-merge; elements = {{ {reserved} }} }}
  chain out {{
    type filter hook forward priority filter - 10; policy accept;
"#
    );
    let _ = write!(
        text,
        r#"    iifname "{prefix}*" meta nfproto ipv6 drop
    iifname "{prefix}*" ip saddr != {block} drop
    iifname "{prefix}*" fib saddr . iif oif missing drop
    iifname "{prefix}*" oifname "{prefix}*" drop
    iifname "{prefix}*" ip daddr @reserved drop
    iifname "{prefix}*" ct state new,established,related accept
    iifname "{prefix}*" drop
    oifname "{prefix}*" ct state established,related accept
    oifname "{prefix}*" drop
"#
    );
    if guard {
        text.push_str("    jump guard\n");
    }
    text.push_str("  }\n");
    if guard {
        // Links of another service of ours are that one's affair.
        text.push_str("  chain guard {\n    iifname \"mb*\" accept\n    oifname \"mb*\" accept\n    drop\n  }\n");
    }
    let _ = write!(
        text,
        r#"  chain host {{
    type filter hook input priority filter - 10; policy accept;
    iifname "{prefix}*" meta l4proto tcp limit rate 100/second burst 100 packets reject with tcp reset
    iifname "{prefix}*" drop
  }}
  chain translate {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {block} oifname != "{prefix}*" masquerade
  }}
}}
"#
    );
    text
}

/// The two addresses of seat number `index` in `block`: the host's end and the seat's.
#[must_use]
pub fn pair(block: Ipv4Net, index: u32) -> Option<(Ipv4Addr, Ipv4Addr)> {
    let base = u32::from(block.network()).checked_add(index.checked_mul(4)?)?;
    let (host, seat) = (Ipv4Addr::from(base + 1), Ipv4Addr::from(base + 2));
    (block.contains(&host) && block.contains(&Ipv4Addr::from(base + 3))).then_some((host, seat))
}

/// How many seats a block has.
#[must_use]
pub fn capacity(block: Ipv4Net) -> u32 {
    1u32.checked_shl(u32::from(30u8.saturating_sub(block.prefix_len()))).unwrap_or(0)
        * u32::from(block.prefix_len() <= 30)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_block_has_the_documented_number_of_seats() {
        let block: Ipv4Net = "10.201.0.0/16".parse().expect("a block");
        assert_eq!(capacity(block), 16_384);
        assert_eq!(pair(block, 0), Some((Ipv4Addr::new(10, 201, 0, 1), Ipv4Addr::new(10, 201, 0, 2))));
        assert_eq!(pair(block, 16_383), Some((Ipv4Addr::new(10, 201, 255, 253), Ipv4Addr::new(10, 201, 255, 254))));
        assert_eq!(pair(block, 16_384), None);
        assert_eq!(pair(block, u32::MAX), None);
        assert_eq!(capacity("10.0.0.0/31".parse().expect("a block")), 0);
        assert_eq!(capacity("10.0.0.0/30".parse().expect("a block")), 1);
    }

    #[test]
    fn the_rules_hold_every_reserved_block() {
        let (seat, host) = (seat(), host("t", "mb-", "10.201.0.0/16".parse().expect("a block"), true));
        for (_, block) in RESERVED.iter().filter(|(_, b)| !b.contains(':')) {
            assert!(seat.contains(block) && host.contains(block), "{block}");
        }
    }
}
