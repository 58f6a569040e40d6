//! Seats on a host of namespaces: a host, a world with public and private addresses behind it, and guests that are not
//! machines but namespaces on the other end of the link. Needs root. Nothing outside these namespaces is touched.

mod escape;
mod ground;

use std::process::Command;
use std::time::Duration;

use ground::*;
use mainbrella_net::{EgressPage, Seat, Verdict};
use mainbrella_types::EgressPolicy;

#[test]
fn a_seat_that_is_off_answers_nothing() {
    let ground = Ground::new();
    let guest = ground.guest();
    ground.run(|uplink| async move {
        let mut seat = Seat::attach(guest.order(&uplink, empty()), EgressPolicy::Off).await.expect("attached");
        for to in [PUBLIC, PRIVATE, METADATA, "203.0.113.1", "172.31.255.1", "198.18.0.1"] {
            for port in [80, 443, 53, 8787, 3128, 2] {
                assert!(guest.get(&format!("{to}:{port}"), b"x").await.is_err(), "{to}:{port}");
            }
        }
        for server in ["172.31.255.1", PUBLIC, "203.0.113.1"] {
            assert_eq!(guest.lookup("example.org.", server).await, None, "{server}");
        }
        assert!(seat.change(EgressPolicy::Open).await.is_err(), "off stays off");
        assert!(guest.get(&format!("{PUBLIC}:80"), b"x").await.is_err());
    });
}

#[test]
fn an_open_seat_reaches_the_public_internet_and_nothing_else() {
    let ground = Ground::new();
    let (one, two) = (ground.guest(), ground.guest());
    ground.run(|uplink| async move {
        let seat = Seat::attach(one.order(&uplink, empty()), EgressPolicy::Open).await.expect("attached");
        let _other = Seat::attach(two.order(&uplink, empty()), EgressPolicy::Open).await.expect("attached");
        serve(&two.inside, &["0.0.0.0:80"]);
        let said = one.get(&format!("{PUBLIC}:80"), b"hi").await;
        assert_eq!(said.as_deref(), Ok("from 203.0.113.1: hi"), "translated to the host's own address");
        // Private, metadata, the host by each of its addresses, its end of the link, the neighbour and its link.
        for to in [
            "10.9.9.9:80", "169.254.169.254:80", "203.0.113.1:8787", "10.201.0.1:8787", "10.201.0.2:80", "10.201.0.5:8787",
            "10.201.0.6:80", "127.0.0.1:8787", "172.31.255.1:8787", "198.18.0.1:80", "224.0.0.1:80", "255.255.255.255:80",
        ] {
            assert!(one.get(to, b"x").await.is_err(), "{to}");
            assert!(one.knock(to).await.is_err(), "{to} looks like an empty reply");
        }
        // A machine that takes another address, its neighbour's, or another card.
        for change in [
            "ip addr add 172.31.255.9/32 dev eth0; ip route change default via 172.31.255.1 src 172.31.255.9",
            "ip addr add 10.201.0.6/32 dev eth0; ip route change default via 172.31.255.1 src 10.201.0.6",
        ] {
            sh(&one.inside, change);
            assert!(one.get(&format!("{PUBLIC}:80"), b"x").await.is_err(), "{change}");
        }
        sh(&one.inside, "ip route change default via 172.31.255.1 src 172.31.255.2");
        assert!(one.get(&format!("{PUBLIC}:80"), b"x").await.is_ok(), "back with its own");
        sh(&one.inside, "ip link set eth0 down; ip link set eth0 address 02:4d:42:00:00:09; ip link set eth0 up; ip route add default via 172.31.255.1");
        assert!(one.get(&format!("{PUBLIC}:80"), b"x").await.is_err(), "another card");
        assert!(two.get(&format!("{PUBLIC}:80"), b"x").await.is_ok(), "the neighbour is not disturbed");
        // No IPv6 at all.
        sh(&two.inside, "ip -6 addr add 2606:2800::2/64 dev eth0 nodad; ip -6 route add default via 2606:2800::1 dev eth0 || true");
        assert!(two.get("[2606:2800::1]:80", b"x").await.is_err());
        drop(seat);
        assert!(one.lookup("example.org.", "172.31.255.1").await.is_none(), "a dropped seat has no name server");
    });
}

#[test]
fn an_allow_list_is_enforced_by_name_whatever_the_address() {
    let ground = Ground::new();
    let guest = ground.guest();
    ground.run(|uplink| async move {
        let book = Book(vec![
            ("good.example", vec![PUBLIC]),
            ("db.example", vec![PUBLIC]),
            ("rebind.example", vec!["127.0.0.1", METADATA, PRIVATE, "203.0.113.1", "::ffff:10.9.9.9"]),
            ("evil.example", vec![OTHER]),
        ]);
        let policy = list(&["good.example", "db.example:5432", "rebind.example", "93.184.216.0/24:443"], false);
        let mut seat = Seat::attach(guest.order(&uplink, book), policy).await.expect("attached");
        let log = seat.log();
        // By name, on the web's ports and on one that never says a name.
        let good = guest.lookup("good.example.", "172.31.255.1").await.expect("an address");
        let said = guest.get(&format!("{good}:80"), &hello("good.example")).await;
        assert_eq!(said.as_deref(), Ok("from 203.0.113.1: GET / HTTP/1.1"));
        assert!(guest.get(&format!("{good}:443"), &tls_hello("good.example")).await.is_ok());
        let db = guest.lookup("db.example.", "172.31.255.1").await.expect("an address");
        assert!(guest.get(&format!("{db}:5432"), b"startup").await.is_ok());
        assert!(guest.get(&format!("{db}:443"), &tls_hello("db.example")).await.is_err(), "another port of it");
        // By whatever address, if the connection says an allowed name: the host resolves it itself.
        let said = guest.get(&format!("{OTHER}:80"), &hello("good.example")).await;
        assert!(said.is_ok(), "{said:?}");
        // By an allowed address.
        assert!(guest.get(&format!("{PUBLIC}:443"), b"\x01raw").await.is_ok());
        assert_eq!(log.after(0, 99).denied, 1, "{}", reasons(&log.after(0, 99).events));
        // Names that are not allowed, forged names, names and addresses that disagree, names that lead inwards.
        assert_eq!(guest.lookup("evil.example.", "172.31.255.1").await, None);
        let rebind = guest.lookup("rebind.example.", "172.31.255.1").await.expect("an address");
        for (to, say) in [
            (format!("{OTHER}:80"), hello("evil.example")),
            (format!("{OTHER}:443"), tls_hello("evil.example")),
            (format!("{good}:443"), tls_hello("evil.example")),
            (format!("{good}:80"), hello("evil.example")),
            (format!("{good}:80"), b"\x00\x01not http".to_vec()),
            (format!("{good}:22"), b"SSH-2.0-x\r\n".to_vec()),
            (format!("{rebind}:80"), hello("rebind.example")),
            (format!("{PUBLIC}:22"), b"SSH-2.0-x\r\n".to_vec()),
            (format!("{OTHER}:5432"), b"startup".to_vec()),
            (format!("{PRIVATE}:80"), hello("good.example")),
            (format!("{METADATA}:80"), hello("good.example")),
            ("203.0.113.1:8787".to_owned(), hello("good.example")),
            ("172.31.255.1:8787".to_owned(), hello("good.example")),
            ("172.31.255.1:2".to_owned(), hello("good.example")),
            ("198.19.255.254:80".to_owned(), hello("evil.example")),
        ] {
            let before = log.after(0, 999).denied;
            let said = guest.get(&to, &say).await;
            assert!(said.is_err(), "{to}: {said:?}");
            let own = to.starts_with("172.31.255.1");
            assert!(own || log.after(0, 999).denied > before, "{to} left no event");
        }
        // Who waits to be spoken to first learns as clearly that nobody took the connection.
        for to in [&format!("{good}:22"), &format!("{PRIVATE}:22"), "172.31.255.1:8787", "172.31.255.1:2"] {
            assert!(guest.knock(to).await.is_err(), "{to} looks like an empty reply");
        }
        // Other name servers are out of reach, and so is everything that is not TCP.
        assert_eq!(guest.lookup("good.example.", PUBLIC).await, None);
        // The proxy decides the same way.
        let said =
            guest.get("172.31.255.1:3128", b"CONNECT good.example:80 HTTP/1.1\r\n\r\nhi").await.expect("an answer");
        assert!(said.starts_with("HTTP/1.1 200") && said.ends_with("from 203.0.113.1: hi"), "{said}");
        let said =
            guest.get("172.31.255.1:3128", b"GET http://good.example/x HTTP/1.1\r\n\r\n").await.expect("an answer");
        assert_eq!(said, "from 203.0.113.1: GET /x HTTP/1.1");
        for bad in
            ["evil.example:443", "good.example:22", "127.0.0.1:8787", "10.9.9.9:80", "[::1]:80", "rebind.example:80"]
        {
            let said = guest
                .get("172.31.255.1:3128", format!("CONNECT {bad} HTTP/1.1\r\n\r\n").as_bytes())
                .await
                .expect("an answer");
            assert!(said.starts_with("HTTP/1.1 403") || said.starts_with("HTTP/1.1 502"), "{bad}: {said}");
        }
        // Another list, live.
        seat.change(list(&["evil.example"], false)).await.expect("changed");
        assert!(guest.get(&format!("{good}:80"), &hello("good.example")).await.map_or(true, |s| s.is_empty()));
        let evil = guest.lookup("evil.example.", "172.31.255.1").await.expect("an address");
        assert!(guest.get(&format!("{evil}:80"), &hello("evil.example")).await.is_ok());
        // Only watching.
        seat.change(list(&[], true)).await.expect("changed");
        let good = guest.lookup("good.example.", "172.31.255.1").await.expect("an address");
        assert!(guest.get(&format!("{good}:80"), &hello("good.example")).await.is_ok());
        let EgressPage { events, would_deny, .. } = log.after(0, 999);
        assert!(
            would_deny >= 1 && events.last().is_some_and(|e| e.verdict == Verdict::WouldDeny),
            "{}",
            reasons(&events)
        );
        // And off.
        seat.change(EgressPolicy::Off).await.expect("changed");
        assert!(guest.get(&format!("{good}:80"), &hello("good.example")).await.is_err());
    });
}

#[test]
fn a_seat_ends_with_its_namespace_and_leaves_nothing() {
    let ground = Ground::new();
    let links = |ground: &Ground| {
        ground
            .host
            .run(|| Ok(std::fs::read_to_string("/proc/thread-self/net/dev").expect("links").matches("mbt1-").count()))
            .expect("the namespace")
    };
    let guests: Vec<Guest> = (0..5).map(|_| ground.guest()).collect();
    ground.run(|uplink| async move {
        for guest in &guests {
            let seat = Seat::attach(guest.order(&uplink, empty()), EgressPolicy::Open).await.expect("attached");
            assert!(guest.get(&format!("{PUBLIC}:80"), b"x").await.is_ok());
            // The service is gone and comes back: the seat is found as it was.
            seat.close().await;
            let seat = Seat::attach(guest.order(&uplink, empty()), EgressPolicy::Open).await.expect("attached again");
            assert!(guest.get(&format!("{PUBLIC}:80"), b"x").await.is_ok());
            seat.close().await;
        }
        drop(guests);
    });
    let until = std::time::Instant::now() + Duration::from_secs(10);
    while links(&ground) > 0 {
        assert!(std::time::Instant::now() < until, "links are left");
        std::thread::sleep(Duration::from_millis(50));
    }
    let rules = ground
        .host
        .run(|| Ok(Command::new("nft").args(["list", "tables"]).output().expect("nft").stdout))
        .expect("the namespace");
    assert_eq!(String::from_utf8_lossy(&rules), "", "no table is left");
    let forwarding = ground
        .host
        .run(|| Ok(std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").expect("a setting")))
        .expect("the namespace");
    assert_eq!(forwarding.trim(), "0", "forwarding is as it was");
    drop(ground.world);
}
