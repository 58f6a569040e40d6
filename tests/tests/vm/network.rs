//! Networks of real machines. The world they may or may not reach is a namespace of the test's own.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::os::fd::AsRawFd as _;
use std::process::Command;
use std::time::{Duration, Instant};

use mainbrella_client::api::{EgressOutcome, EgressPolicy};
use mainbrella_net::namespace::Namespace;
use mainbrella_tests::{Machine, Service, Setup, host, machine_body};
use mainbrella_types::ErrorCode;

use crate::code;

/// A namespace behind the host with a server on a public and on a private address, and the names of both.
pub(crate) struct World {
    pub(crate) namespace: Namespace,
    link: String,
    hosts: tempfile::NamedTempFile,
    /// The host has these addresses once: one such world at a time, whoever's test it is.
    _alone: std::fs::File,
}

const GOOD: &str = "203.0.113.41";
const OTHER: &str = "203.0.113.42";
const PRIVATE: &str = "10.254.252.9";
/// The host's own address on the way there.
const HERE: &str = "203.0.113.40";

pub(crate) fn sh(text: &str) {
    let out = Command::new("sh").args(["-ec", text]).output().expect("sh");
    assert!(out.status.success(), "{text}: {}", String::from_utf8_lossy(&out.stderr));
}

impl World {
    pub(crate) fn new() -> Self {
        let lock = std::env::temp_dir().join("mainbrella-test-world.lock");
        let alone = std::fs::File::create(lock).expect("a lock file");
        rustix::fs::flock(&alone, rustix::fs::FlockOperation::LockExclusive).expect("the lock");
        let namespace = Namespace::new().expect("a namespace");
        let link = format!("mbv{}", std::process::id() % 100_000);
        let there = format!("/proc/{}/fd/{}", std::process::id(), namespace.fd().as_raw_fd());
        sh(&format!(
            "ip link add {link} type veth peer name world netns {there}; ip addr add {HERE}/32 dev {link}; \
             ip link set {link} up; for a in {GOOD} {OTHER} {PRIVATE}; do ip route add $a dev {link}; done"
        ));
        let listener = namespace
            .run(|| {
                sh(&format!(
                    "ip link set lo up; ip link set world up; for a in {GOOD} {OTHER} {PRIVATE}; do ip addr add $a/32 dev world; done; \
                     ip route add {HERE} dev world"
                ));
                Ok(TcpListener::bind("0.0.0.0:80").expect("bind"))
            })
            .expect("the namespace");
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                // What it was sent is read first: closing with some of it unread would be a reset.
                let mut asked = BufReader::new(&stream).lines().map_while(Result::ok);
                while asked.next().is_some_and(|line| !line.is_empty()) {}
                let _ = stream.write_all(b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\nworld\n");
            }
        });
        let mut hosts = tempfile::NamedTempFile::new().expect("a file");
        write!(hosts, "127.0.0.1 localhost\n{GOOD} good.example\n{OTHER} other.example\n{PRIVATE} inward.example\n")
            .expect("written");
        Self { namespace, link, hosts, _alone: alone }
    }

    pub(crate) fn setup(&self) -> Setup {
        Setup { hosts: Some(self.hosts.path().to_owned()), ..Setup::default() }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["link", "del", &self.link]).status();
    }
}

/// What a fetch in the machine brings.
pub(crate) async fn fetch(machine: &Machine, url: &str) -> String {
    machine.sh(&format!("curl -sS -m 15 {url} 2>/dev/null || echo none")).await.text()
}

async fn with(service: &mut Service, egress: Option<EgressPolicy>) -> Machine {
    let mut body = machine_body();
    body.egress = egress;
    service.create(&body).await.unwrap_or_else(|e| panic!("create: {e:?}; log: {}", service.log()))
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_reach_what_their_policies_say_through_kills_and_changes() {
    let world = World::new();
    let mut service = Service::with(world.setup()).await;
    let networking = service.client().capabilities().await.expect("capabilities").networking;
    assert!(networking.internet && networking.egress_allow_list && networking.egress_change, "{networking:?}");
    let open = with(&mut service, None).await;
    let off = with(&mut service, Some(EgressPolicy::off())).await;
    let listed = with(&mut service, Some(EgressPolicy::allow_list(["good.example"]))).await;
    let (good, other) = ("http://good.example/", "http://other.example/");
    for round in 0..2 {
        assert_eq!(fetch(&open, &format!("http://{GOOD}/")).await, "world\n", "{round}");
        assert_eq!(fetch(&off, &format!("http://{GOOD}/")).await, "none\n", "{round}");
        assert_eq!(fetch(&off, good).await, "none\n", "{round}");
        assert_eq!(fetch(&listed, good).await, "world\n", "{round}: by name, resolved by the host");
        assert_eq!(fetch(&listed, other).await, "none\n", "{round}: no rule names it");
        assert_eq!(fetch(&listed, &format!("http://{OTHER}/")).await, "none\n", "{round}: nor its address");
        for machine in [&open, &off, &listed] {
            for inward in [PRIVATE, HERE, "169.254.169.254", "172.31.255.1"] {
                assert_eq!(fetch(machine, &format!("http://{inward}/")).await, "none\n", "{round}: {inward}");
            }
            let api = service.url().replace("127.0.0.1", HERE);
            assert_eq!(fetch(machine, &format!("{api}/healthz")).await, "none\n", "{round}: the service itself");
        }
        if round == 0 {
            service.crash().await;
        }
    }
    // Attached anew: the client of before the restart is as good.
    let attach = |m: &Machine| service.attach(m.name.clone());
    let (open, off, listed) = (attach(&open), attach(&off), attach(&listed));
    let client = service.client().clone();
    // What was denied is told, with the rule, also from before the kill.
    let log = client.egress_log(&listed.name, 0, None).await.expect("a log");
    assert!(log.events.iter().any(|e| e.rule == "no-rule" && e.name.as_deref() == Some("other.example")), "{log:?}");
    assert!(log.events.iter().any(|e| e.rule == "reserved" && e.address.as_deref() == Some(PRIVATE)), "{log:?}");
    let log = client.egress_log(&off.name, 0, None).await.expect("a log");
    assert!(log.events.iter().any(|e| e.rule == "off" && e.address.as_deref() == Some(GOOD)), "{log:?}");
    let log = client.egress_log(&open.name, 0, None).await.expect("a log");
    assert!(log.events.iter().any(|e| e.rule == "reserved" && e.address.as_deref() == Some(PRIVATE)), "{log:?}");
    // Explained as it happens.
    let said = client.explain_egress(&listed.name, "good.example", 80).await.expect("an explanation");
    assert_eq!((said.outcome, said.addresses[0].address.as_str()), (EgressOutcome::Allowed, GOOD));
    let said = client.explain_egress(&listed.name, "other.example", 80).await.expect("an explanation");
    assert_eq!((said.outcome, said.denied_by.as_deref()), (EgressOutcome::Denied, Some("no-rule")));
    let said = client.explain_egress(&open.name, "inward.example", 80).await.expect("an explanation");
    assert_eq!((said.outcome, said.denied_by.as_deref()), (EgressOutcome::Denied, Some("reserved")));
    // Changed while it runs.
    client.set_egress(&open.name, &EgressPolicy::allow_list(["other.example"])).await.expect("changed");
    assert_eq!((fetch(&open, other).await, fetch(&open, good).await), ("world\n".into(), "none\n".into()));
    client.set_egress(&listed.name, &EgressPolicy::open()).await.expect("changed");
    assert_eq!(fetch(&listed, &format!("http://{OTHER}/")).await, "world\n");
    client.set_egress(&listed.name, &EgressPolicy::off()).await.expect("changed");
    assert_eq!(fetch(&listed, &format!("http://{OTHER}/")).await, "none\n");
    for machine in [&listed, &off] {
        let loosened = client.set_egress(&machine.name, &EgressPolicy::open()).await;
        assert_eq!(code(loosened), ErrorCode::EgressLocked);
    }
    service.crash().await;
    let listed = service.attach(listed.name.clone());
    assert_eq!(fetch(&listed, &format!("http://{OTHER}/")).await, "none\n", "still off");
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_serves_a_machine_ends_with_it_however_it_ends() {
    let world = World::new();
    let mut service = Service::with(Setup { pool: 1, ..world.setup() }).await;
    let ours = |service: &Service| {
        let number = std::fs::read_to_string(service.data().join("network-block")).expect("the number of its block");
        let links = format!("mb{}-", number.trim());
        host::links().into_iter().filter(|l| l.starts_with(&links)).count()
    };
    let one = with(&mut service, None).await;
    let two = with(&mut service, None).await;
    assert_eq!((ours(&service), fetch(&two, &format!("http://{GOOD}/")).await), (2, "world\n".into()));
    one.stop().await;
    host::signal(service.only_vmm(), rustix::process::Signal::KILL);
    let until = Instant::now() + Duration::from_secs(20);
    while ours(&service) > 0 {
        assert!(Instant::now() < until, "links are left: {:?}", host::links());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_block_that_is_used_up_says_so_and_serves_whoever_comes_when_one_has_gone() {
    let world = World::new();
    let mut setup = Setup { pool: 2, ..world.setup() };
    // Two machines' worth, whoever else waits or needs none.
    setup.arguments = ["--machine-network", "10.96.77.8/29"].map(str::to_owned).to_vec();
    let mut service = Service::with(setup).await;
    let good = format!("http://{GOOD}/");
    let listed = with(&mut service, Some(EgressPolicy::allow_list(["good.example"]))).await;
    let off = with(&mut service, Some(EgressPolicy::off())).await;
    let one = with(&mut service, None).await;
    let two = with(&mut service, None).await;
    async fn living(service: &Service) -> usize {
        service.list().await.iter().filter(|m| !m.state.is_final()).count()
    }
    async fn full(service: &mut Service) {
        let before = (service.keys(), living(service).await);
        match service.create(&machine_body()).await {
            Err(mainbrella_client::ClientError::Api(failure)) => {
                assert_eq!((failure.status, failure.body.known_code()), (503, Some(ErrorCode::Overloaded)));
                assert!(failure.body.message.contains("2 machines"), "{failure:?}");
                assert!(failure.body.message.contains("machine-network"), "it says what to do: {failure:?}");
            }
            other => panic!("there is no address left: {other:?}"),
        }
        assert_eq!((service.keys(), living(service).await), before, "nothing of it is left");
    }
    for round in 0..2 {
        full(&mut service).await;
        for machine in [&one, &two] {
            let machine = service.attach(machine.name.clone());
            assert_eq!(fetch(&machine, &good).await, "world\n", "{round}: they are left alone");
        }
        if round == 0 {
            service.crash().await;
        }
    }
    let attach = |m: &Machine| service.attach(m.name.clone());
    let (one, two, listed, off) = (attach(&one), attach(&two), attach(&listed), attach(&off));
    let client = service.client().clone();
    // A change that needs one is refused, closes the machine, and can be taken back.
    assert_eq!(code(client.set_egress(&listed.name, &EgressPolicy::open()).await), ErrorCode::Overloaded);
    assert_eq!(fetch(&listed, &good).await, "none\n");
    client.set_egress(&listed.name, &EgressPolicy::allow_list(["good.example"])).await.expect("set again");
    assert_eq!(fetch(&listed, "http://good.example/").await, "world\n");
    // A paused machine has none; it stays paused as long as it can have none.
    client.pause(&one.name).await.expect("paused");
    let third = with(&mut service, None).await;
    assert_eq!(code(client.resume(&one.name).await), ErrorCode::Overloaded);
    assert_eq!(one.record().await.state, mainbrella_client::api::State::Paused);
    assert_eq!(fetch(&third, &good).await, "world\n");
    third.stop().await;
    client.resume(&one.name).await.expect("resumed");
    assert_eq!(fetch(&one, &good).await, "world\n");
    full(&mut service).await;
    // One that is not open any more needs none.
    client.set_egress(&two.name, &EgressPolicy::allow_list(["good.example"])).await.expect("changed");
    let before = service.keys();
    let fourth = with(&mut service, None).await;
    assert_eq!(fetch(&fourth, &good).await, "world\n");
    let fourth = service.vmms().into_iter().find(|(key, _)| !before.contains(key)).expect("it runs").1;
    // As soon as a stop is told, or a VMM is seen to be dead, whoever comes next has its address.
    one.stop().await;
    let next = with(&mut service, None).await;
    assert_eq!(fetch(&next, &good).await, "world\n");
    full(&mut service).await;
    host::signal(fourth, rustix::process::Signal::KILL);
    host::until("the death to be noticed", Duration::from_secs(20), async || living(&service).await == 4).await;
    let last = with(&mut service, None).await;
    assert_eq!(fetch(&last, &good).await, "world\n");
    assert_eq!(fetch(&off, &good).await, "none\n");
    service.finish().await;
}
