//! Ways out that are none.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mainbrella_net::namespace::Namespace;
use mainbrella_net::{NetError, Seat, SeatOrder};
use mainbrella_types::{DenyRule, EgressPolicy, HostName};

use crate::ground::*;

/// A raw IPv4 socket's worth of trouble: sends `packet` (from its IP header on) out of the guest.
fn send_raw(guest: &Guest, packet: &[u8], to: Ipv4Addr) {
    use socket2::{Domain, Protocol, Socket, Type};
    guest
        .inside
        .run(|| {
            let raw =
                Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(255))).map_err(|e| NetError::Io("raw", e))?;
            raw.set_header_included_v4(true).map_err(|e| NetError::Io("raw", e))?;
            // A packet its own kernel cannot route goes nowhere: just as well.
            let _ = raw.send_to(packet, &SocketAddr::from((to, 0)).into());
            Ok(())
        })
        .expect("the namespace");
}

/// An IPv4 packet; the kernel fills in the checksum of the header.
fn ip(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, fragment: u16, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(20 + payload.len()).expect("short");
    let mut packet = vec![0x45, 0];
    packet.extend(length.to_be_bytes());
    packet.extend(7u16.to_be_bytes());
    packet.extend(fragment.to_be_bytes());
    packet.extend([64, protocol, 0, 0]);
    packet.extend(from.octets());
    packet.extend(to.octets());
    packet.extend(payload);
    packet
}

fn udp(port: u16, text: &[u8]) -> Vec<u8> {
    let mut bytes = 4000u16.to_be_bytes().to_vec();
    bytes.extend(port.to_be_bytes());
    bytes.extend(u16::try_from(8 + text.len()).expect("short").to_be_bytes());
    bytes.extend([0, 0]);
    bytes.extend(text);
    bytes
}

/// Counts every packet that reaches a namespace by its link, whatever it is.
struct Listener(Arc<Mutex<Vec<Vec<u8>>>>);

impl Listener {
    fn on(ns: &Namespace, link: &str) -> Self {
        use socket2::{Domain, Protocol, Socket, Type};
        use std::mem::MaybeUninit;
        let seen: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
        let socket = ns
            .run(|| {
                let all = (libc::ETH_P_ALL as u16).to_be();
                let made = || {
                    let socket = Socket::new(Domain::PACKET, Type::DGRAM, Some(Protocol::from(i32::from(all))))?;
                    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
                    Ok::<_, io::Error>(socket)
                };
                made().map_err(|e| NetError::Io("a packet socket", e))
            })
            .expect(link);
        let kept = Arc::downgrade(&seen);
        std::thread::spawn(move || {
            let mut buffer = [MaybeUninit::<u8>::uninit(); 2048];
            while let Some(kept) = kept.upgrade() {
                if let Ok(n) = socket.recv(&mut buffer) {
                    // SAFETY: the kernel wrote the first `n` bytes.
                    let bytes = buffer[..n].iter().map(|b| unsafe { b.assume_init() }).collect();
                    kept.lock().expect("no panic").push(bytes);
                }
            }
        });
        Self(seen)
    }

    /// Whether any packet held `mark`.
    fn saw(&self, mark: &[u8]) -> bool {
        std::thread::sleep(Duration::from_millis(300));
        self.0.lock().expect("no panic").iter().any(|p| p.windows(mark.len()).any(|w| w == mark))
    }
}

#[test]
fn raw_fragmented_and_forged_packets_do_not_leave() {
    let ground = Ground::new();
    let (one, two) = (ground.guest(), ground.guest());
    ground.run(|uplink| async move {
        let other = two.guest_order(&uplink);
        let _other = Seat::attach(other, EgressPolicy::Open).await.expect("attached");
        let own: Ipv4Addr = "172.31.255.2".parse().expect("an address");
        let public: Ipv4Addr = PUBLIC.parse().expect("an address");
        let neighbour: Ipv4Addr = "10.201.0.6".parse().expect("an address");
        let mut seat = Seat::attach(one.guest_order(&uplink), list(&["good.example"], false)).await.expect("attached");
        for policy in ["allow-list", "open", "off"] {
            let wan = Listener::on(&one.world, "lan");
            let inner = Listener::on(&two.inside, "eth0");
            let mark = format!("MARK-{policy}-").into_bytes();
            let with = |n: u8| [mark.clone(), vec![n]].concat();
            let mut packets = vec![
                // From an address that is not its own; to the neighbour, by both of its names; in pieces; odd protocols.
                (ip("172.31.255.9".parse().expect("an address"), public, 17, 0, &udp(53, &with(1))), public),
                (ip(public, public, 17, 0, &udp(53, &with(2))), public),
                (ip(own, neighbour, 17, 0, &udp(53, &with(3))), neighbour),
                (ip(own, neighbour, 17, 0x2000, &udp(53, &with(4))), neighbour),
                (ip(own, neighbour, 17, 0x2001, &with(5)), neighbour),
                (
                    ip(own, METADATA.parse().expect("an address"), 47, 0, &with(6)),
                    METADATA.parse().expect("an address"),
                ),
                (ip(own, PRIVATE.parse().expect("an address"), 132, 0, &with(7)), PRIVATE.parse().expect("an address")),
            ];
            if policy != "open" {
                packets.push((ip(own, public, 17, 0, &udp(443, &with(8))), public));
                packets.push((ip(own, public, 17, 0x2000, &udp(53, &with(9))), public));
                packets.push((ip(own, public, 1, 0, &[&[8, 0, 0, 0, 0, 1, 0, 1][..], &with(10)].concat()), public));
                packets.push((ip(own, public, 50, 0, &with(11)), public));
            }
            if policy == "open" {
                seat.change(EgressPolicy::Open).await.expect("changed");
            } else if policy == "off" {
                seat.change(EgressPolicy::Off).await.expect("changed");
            }
            for (packet, to) in &packets {
                send_raw(&one, packet, *to);
            }
            assert!(!wan.saw(&mark), "{policy}: a packet left");
            assert!(!inner.saw(&mark), "{policy}: a packet reached the neighbour");
        }
        // And what may leave does: the listener sees it.
        let wan = Listener::on(&two.world, "lan");
        send_raw(&two, &ip(own, public, 17, 0, &udp(4000, b"MARK-fine")), public);
        assert!(wan.saw(b"MARK-fine"), "the listener works");
    });
}

#[test]
fn what_the_rules_deny_is_told_with_its_rule() {
    let ground = Ground::new();
    let guest = ground.guest();
    ground.run(|uplink| async move {
        let order = guest.guest_order(&uplink);
        let log = order.log.clone();
        let mut seat = Seat::attach(order, list(&["good.example"], false)).await.expect("attached");
        let mut seen = 0;
        let mut told = async |rule: DenyRule, address: &str, port: u16| {
            let until = std::time::Instant::now() + Duration::from_secs(3);
            loop {
                let page = log.after(seen, 999);
                let hit = page
                    .events
                    .iter()
                    .find(|e| (e.rule, e.port) == (rule, port) && e.address.is_some_and(|a| a.to_string() == address));
                if let Some(hit) = hit {
                    seen = hit.sequence;
                    return;
                }
                assert!(std::time::Instant::now() < until, "{rule:?} {address}:{port}: {}", reasons(&page.events));
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let lookup = guest.lookup("good.example.", PUBLIC).await;
        assert_eq!(lookup, None);
        told(DenyRule::Protocol, PUBLIC, 53).await;
        assert!(guest.get("172.31.255.1:8787", b"x").await.map_or(true, |s| s.is_empty()));
        told(DenyRule::Reserved, "172.31.255.1", 8787).await;
        seat.change(EgressPolicy::Open).await.expect("changed");
        assert!(guest.get(&format!("{METADATA}:80"), b"x").await.is_err());
        told(DenyRule::Reserved, METADATA, 80).await;
        seat.change(EgressPolicy::Off).await.expect("changed");
        assert!(guest.get(&format!("{PUBLIC}:80"), b"x").await.is_err());
        told(DenyRule::Off, PUBLIC, 80).await;
        assert_eq!(guest.lookup("good.example.", PUBLIC).await, None);
        told(DenyRule::Off, PUBLIC, 53).await;
    });
}

#[test]
fn names_of_addresses_in_any_notation_lead_nowhere() {
    let ground = Ground::new();
    let guest = ground.guest();
    ground.run(|uplink| async move {
        let book = Book(vec![
            ("mapped.example", vec!["::ffff:169.254.169.254", "::ffff:127.0.0.1", "::ffff:203.0.113.1"]),
            ("six.example", vec!["::1", "fe80::1", "fd00::1", "64:ff9b::a00:1", "2002:a00:1::"]),
            ("own.example", vec!["203.0.113.1"]),
        ]);
        let rules = list(&["*.example", "mapped.example:8787", "own.example:8787"], false);
        let order = SeatOrder { outside: Arc::new(book), ..guest.guest_order(&uplink) };
        let log = order.log.clone();
        let _seat = Seat::attach(order, rules).await.expect("attached");
        for (name, port) in [("mapped.example", 80), ("six.example", 80), ("own.example", 80), ("own.example", 8787)] {
            let address = guest.lookup(&format!("{name}."), "172.31.255.1").await.expect("an address");
            let before = log.after(0, 999).denied;
            let said = guest.get(&format!("{address}:{port}"), &hello(name)).await;
            assert!(said.as_deref().map_or(true, str::is_empty), "{name}: {said:?}");
            let page = log.after(0, 999);
            assert!(page.denied > before, "{name}");
            assert_eq!(page.events.last().map(|e| e.rule), Some(DenyRule::Reserved), "{}", reasons(&page.events));
        }
        // An address as a name, in every notation a resolver might take.
        for forged in ["127.0.0.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "[::1]", "[::ffff:127.0.0.1]"] {
            let said = guest.get(&format!("{PUBLIC}:80"), &hello(forged)).await;
            assert!(said.as_deref().map_or(true, str::is_empty), "{forged}: {said:?}");
            let said = guest
                .get("172.31.255.1:3128", format!("CONNECT {forged}:8787 HTTP/1.1\r\n\r\n").as_bytes())
                .await
                .expect("an answer");
            assert!(said.starts_with("HTTP/1.1 40") || said.starts_with("HTTP/1.1 502"), "{forged}: {said}");
        }
    });
}

#[test]
fn dns_carries_nothing_out() {
    let ground = Ground::new();
    let guest = ground.guest();
    ground.run(|uplink| async move {
        let _seat = Seat::attach(guest.guest_order(&uplink), list(&["*.good.example"], false)).await.expect("attached");
        let wan = Listener::on(&guest.world, "lan");
        // Long labels below an allowed name, and below others: answered or refused inside.
        let long = format!("{}.{}.good.example.", "exfil".repeat(12), "b".repeat(63));
        assert!(guest.lookup(&long, "172.31.255.1").await.is_some(), "allowed, and meant for that name only");
        assert_eq!(guest.lookup(&format!("{}.evil.example.", "exfil".repeat(12)), "172.31.255.1").await, None);
        // DNS over TCP to elsewhere, DNS over HTTPS by address and by name.
        for (to, say) in [
            (format!("{PUBLIC}:53"), b"\x00\x05exfil".to_vec()),
            (format!("{PUBLIC}:443"), tls_hello("dns.exfil.example")),
            (format!("{PUBLIC}:853"), tls_hello("dns.exfil.example")),
        ] {
            let said = guest.get(&to, &say).await;
            assert!(said.as_deref().map_or(true, str::is_empty), "{to}: {said:?}");
        }
        assert!(!wan.saw(b"exfil"), "something left");
    });
}

#[test]
fn a_service_that_comes_back_enforces_what_is_on_record_and_nothing_is_open_meanwhile() {
    let ground = Ground::new();
    let (listed, off) = (ground.guest(), ground.guest());
    ground.run(|uplink| async move {
        let book = || Book(vec![("good.example", vec![PUBLIC])]);
        let order = |guest: &Guest| SeatOrder { outside: Arc::new(book()), ..guest.guest_order(&uplink) };
        let one = Seat::attach(order(&listed), list(&["good.example"], false)).await.expect("attached");
        let two = Seat::attach(order(&off), EgressPolicy::Off).await.expect("attached");
        let good = listed.lookup("good.example.", "172.31.255.1").await.expect("an address");
        let fetch = async || listed.get(&format!("{good}:80"), &hello("good.example")).await;
        assert!(fetch().await.is_ok_and(|s| s.starts_with("from")));
        // The service is killed: its sockets are gone, its rules are not.
        drop((one, two));
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(fetch().await.map_or(true, |s| s.is_empty()), "nobody serves it, nothing leads out");
        assert!(off.get(&format!("{PUBLIC}:80"), b"x").await.is_err());
        let _one = Seat::attach(order(&listed), list(&["good.example"], false)).await.expect("attached again");
        let _two = Seat::attach(order(&off), EgressPolicy::Off).await.expect("attached again");
        // The address from before stands for nothing now; the connection says the name itself.
        assert!(fetch().await.is_ok_and(|s| s.starts_with("from")));
        assert!(off.get(&format!("{PUBLIC}:80"), b"x").await.is_err());
        assert!(listed.get(&format!("{OTHER}:443"), &tls_hello("evil.example")).await.map_or(true, |s| s.is_empty()));
    });
}

#[test]
fn a_policy_that_cannot_be_put_in_force_lets_nothing_through() {
    let ground = Ground::new();
    let guest = ground.guest();
    ground.run(|uplink| async move {
        let order = SeatOrder { uplink: None, ..guest.guest_order(&uplink) };
        assert!(Seat::attach(order, EgressPolicy::Open).await.is_err(), "no way out on this host");
        assert!(guest.get(&format!("{PUBLIC}:80"), b"x").await.is_err());
        // Somebody else holds the proxy's place, which an open machine has no use for.
        let held = guest
            .seat
            .run(|| TcpListener::bind("172.31.255.1:3128").map_err(|e| NetError::Io("bind", e)))
            .expect("bound");
        let mut seat = Seat::attach(guest.guest_order(&uplink), EgressPolicy::Open).await.expect("attached");
        assert!(guest.get(&format!("{PUBLIC}:80"), b"x").await.is_ok());
        assert!(seat.change(list(&["good.example"], false)).await.is_err());
        assert!(
            guest.get(&format!("{PUBLIC}:80"), b"x").await.map_or(true, |s| s.is_empty()),
            "what failed fails closed"
        );
        let name: HostName = "good.example".parse().expect("a name");
        let said = seat.view().explain(&mainbrella_types::Target::Name(&name), 443).await;
        assert_eq!(said.outcome, mainbrella_net::Outcome::Denied);
        drop(held);
        seat.change(list(&["good.example"], false)).await.expect("changed");
        assert!(guest.lookup("good.example.", "172.31.255.1").await.is_some());
    });
}
