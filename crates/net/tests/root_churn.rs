//! A thousand seats, with a service that is killed among them, leave nothing.

use std::io::{BufRead as _, BufReader};
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mainbrella_net::namespace::Namespace;
use mainbrella_net::resolve::Host;
use mainbrella_net::{NetError, Seat, Uplink, UplinkConfig, tap};
use mainbrella_types::EgressPolicy;

/// Says to this program that it is the service that will be killed, and where its host's namespace is.
const HOST: &str = "MAINBRELLA_TEST_SEATS_HOST";
const CYCLES: u32 = 1000;

/// What stands for a VMM: a process in a network namespace of its own.
fn vmm() -> Child {
    let mut command = Command::new("sleep");
    command.arg("600").stdin(Stdio::null()).stdout(Stdio::null());
    // SAFETY: one system call, which is allowed between fork and exec.
    unsafe {
        command.pre_exec(|| {
            rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET)?;
            Ok(())
        });
    }
    command.spawn().expect("sleep")
}

/// One machine's seat from its beginning to its end.
async fn cycle(n: u32, uplink: &Arc<Uplink>) {
    let mut vmm = vmm();
    println!("vmm {}", vmm.id());
    let pid = i32::try_from(vmm.id()).expect("a pid");
    let namespace = Namespace::of_process(pid).expect("the namespace");
    let held = namespace.run(|| tap::open().map_err(|e| NetError::Io("tap", e))).expect("a tap");
    Seat::prepare(&namespace).expect("prepared");
    let policy = match n % 3 {
        0 => EgressPolicy::Open,
        1 => "allow-list good.example".parse().expect("a policy"),
        _ => EgressPolicy::Off,
    };
    let order = mainbrella_net::SeatOrder {
        namespace,
        uplink: Some(uplink.clone()),
        outside: Arc::new(Host::default()),
        log: Arc::default(),
        secrets: Arc::default(),
    };
    let mut seat = Seat::attach(order, policy).await.expect("attached");
    if n.is_multiple_of(2) && n % 3 < 2 {
        seat.change(EgressPolicy::Open).await.expect("changed");
    }
    // As a stop does: the VMM first, then what served it.
    vmm.kill().and_then(|()| vmm.wait()).expect("it ends");
    drop(held);
    seat.close().await;
    println!("done {n}");
}

fn cycles(host: &Namespace, range: std::ops::Range<u32>, close: bool) {
    host.run(|| {
        let config = UplinkConfig { instance: "t2".into(), block: "10.202.0.0/16".parse().expect("a block") };
        let uplink = Arc::new(Uplink::open(config)?);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        for n in range {
            runtime.block_on(cycle(n, &uplink));
        }
        drop(runtime);
        if close { uplink.close() } else { Ok(()) }
    })
    .expect("the host's side");
}

/// Network namespaces this process holds open.
fn held() -> usize {
    let open = std::fs::read_dir("/proc/self/fd").expect("/proc").flatten();
    open.filter_map(|f| std::fs::read_link(f.path()).ok()).filter(|l| l.to_string_lossy().starts_with("net:[")).count()
}

fn links(host: &Namespace) -> usize {
    let read = || Ok(std::fs::read_to_string("/proc/thread-self/net/dev").expect("links").matches("mbt2-").count());
    host.run(read).expect("the namespace")
}

#[test]
fn a_thousand_seats_and_a_killed_service_leave_nothing() {
    if let Ok(path) = std::env::var(HOST) {
        cycles(&Namespace::at(Path::new(&path)).expect("the host"), 0..u32::MAX, false);
        return;
    }
    let host = Namespace::new().expect("a namespace");
    // It has the settings of the first one, where a service may be running.
    let off = || std::fs::write("/proc/sys/net/ipv4/ip_forward", "0").map_err(|e| NetError::Io("a setting", e));
    host.run(off).expect("forwarding is off");
    let before = held();
    let here = format!("/proc/{}/fd/{}", std::process::id(), host.fd().as_raw_fd());
    let mut service = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "a_thousand_seats_and_a_killed_service_leave_nothing", "--nocapture", "--test-threads=1"])
        .env(HOST, here)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the service");
    let (mut last, mut made) = (None, 0);
    for line in BufReader::new(service.stdout.take().expect("piped")).lines() {
        let line = line.expect("a line");
        if let Some(pid) = line.strip_prefix("vmm ") {
            (last, made) = (pid.parse::<i32>().ok(), made + 1);
            // In the middle of making a seat.
            if made > CYCLES / 2 {
                std::thread::sleep(Duration::from_millis(4));
                service.kill().expect("killed");
                break;
            }
        }
    }
    service.wait().expect("it ends");
    // Its last machine outlived it; the next service ends it, by its process alone.
    if let Some(vmm) = last.and_then(rustix::process::Pid::from_raw) {
        let _ = rustix::process::kill_process(vmm, rustix::process::Signal::KILL);
    }
    cycles(&host, CYCLES / 2..CYCLES, true);
    let until = Instant::now() + Duration::from_secs(20);
    while links(&host) > 0 {
        assert!(Instant::now() < until, "{} links are left", links(&host));
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(held(), before, "namespaces are held");
    let tables = host.run(|| Ok(Command::new("nft").args(["list", "tables"]).output().expect("nft").stdout));
    assert_eq!(String::from_utf8_lossy(&tables.expect("the namespace")), "", "rules are left");
    let forwarding = host.run(|| Ok(std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").expect("a setting")));
    assert_eq!(forwarding.expect("the namespace").trim(), "0", "forwarding is as it was");
}

#[test]
fn a_block_that_is_full_says_so() {
    let block = "10.203.0.0/29".parse().expect("a block");
    assert_eq!(mainbrella_net::rules::capacity(block), 2);
    assert_eq!(mainbrella_net::rules::pair(block, 1).map(|(host, _)| host), Some(Ipv4Addr::new(10, 203, 0, 5)));
    assert_eq!(mainbrella_net::rules::pair(block, 2), None);
}
