//! The fake driver pauses, resumes and forks as a real one does.

use std::sync::atomic::Ordering;

use mainbrella_engine::driver::{Adoption, Driver, ForkOrder, Instance, LaunchOrder};
use mainbrella_engine::fake::FakeDriver;
use mainbrella_engine::{DriverError, EgressOrder};
use mainbrella_guest_protocol::host::{GuestClient, LinkOptions, connect};
use mainbrella_guest_protocol::proto::mainbrella::guest::v1 as pb;
use mainbrella_types::{EgressPolicy, GenerationKey, SizeClass};

fn key() -> GenerationKey {
    GenerationKey::new(uuid::Uuid::now_v7())
}

async fn launched(driver: &FakeDriver) -> (GenerationKey, Box<dyn Instance>) {
    let key = key();
    let template = "python".parse().expect("valid");
    let order = LaunchOrder {
        key,
        template,
        size: SizeClass::Small,
        egress: EgressOrder::default(),
        snapshot: None,
        disk_only: false,
    };
    (key, driver.launch(&order).await.expect("launch"))
}

async fn client(instance: &dyn Instance) -> GuestClient {
    connect(instance.dial().await.expect("dial"), LinkOptions::default()).await.expect("link")
}

async fn make(guest: &GuestClient, path: &str) {
    let request = pb::MakeDirRequest { path: path.as_bytes().to_vec(), ..Default::default() };
    guest.rpc().make_dir(request).await.expect("made");
}

async fn has(guest: &GuestClient, path: &str) -> bool {
    guest.rpc().stat_file(pb::StatFileRequest { path: path.as_bytes().to_vec(), ..Default::default() }).await.is_ok()
}

#[tokio::test]
async fn a_guest_keeps_its_state_while_it_is_paused() {
    let driver = FakeDriver::default();
    let (key, machine) = launched(&driver).await;
    make(&client(&*machine).await, "/kept").await;
    driver.pause(&key).await.expect("pause");
    machine.exited().await;
    assert!(driver.paused(&key) && machine.dial().await.is_err());
    assert!(matches!(driver.adopt(&key, &EgressOrder::default()).await.expect("adopt"), Adoption::Paused));
    assert!(matches!(driver.pause(&key).await, Err(DriverError::WrongState(_))));
    let back = driver.resume(&key, &EgressOrder::default()).await.expect("resume");
    assert!(has(&client(&*back).await, "/kept").await && !driver.paused(&key));
    assert!(matches!(driver.resume(&key, &EgressOrder::default()).await.err(), Some(DriverError::WrongState(_))));
    driver.pause(&key).await.expect("again");
    driver.destroy(&key).await.expect("a paused one is destroyed");
    assert_eq!(driver.alive(), 0);
}

#[tokio::test]
async fn what_fails_changes_nothing() {
    let driver = FakeDriver::default();
    let (key, machine) = launched(&driver).await;
    driver.host.pause.store(1, Ordering::SeqCst);
    driver.host.pause_host_full.store(1, Ordering::SeqCst);
    assert!(matches!(driver.pause(&key).await, Err(DriverError::HostFull)));
    assert!(matches!(driver.pause(&key).await, Err(DriverError::Stage { .. })));
    assert!(!driver.paused(&key));
    make(&client(&*machine).await, "/kept").await;
    driver.pause(&key).await.expect("pause");
    driver.host.resume.store(1, Ordering::SeqCst);
    let (off, open) = (EgressOrder::default(), EgressOrder::from(EgressPolicy::Open));
    assert!(matches!(driver.resume(&key, &off).await.err(), Some(DriverError::Stage { .. })));
    assert!(matches!(driver.resume(&key, &open).await.err(), Some(DriverError::Unsupported(_))));
    driver.host.egress.store(1, Ordering::SeqCst);
    assert!(driver.resume(&key, &off).await.is_err());
    assert!(driver.paused(&key));
    let back = driver.resume(&key, &off).await.expect("resume");
    assert!(has(&client(&*back).await, "/kept").await);
}

#[tokio::test]
async fn children_begin_as_their_source_is_and_go_on_by_themselves() {
    let driver = FakeDriver::default();
    let (source, machine) = launched(&driver).await;
    make(&client(&*machine).await, "/before").await;
    let orders = [(); 3].map(|()| ForkOrder { key: key(), egress: EgressOrder::default() });
    driver.host.fork.store(1, Ordering::SeqCst);
    assert!(driver.fork(&source, &orders).await.is_err());
    assert_eq!(driver.alive(), 1);
    driver.host.fork_child.store(1, Ordering::SeqCst);
    let forked = driver.fork(&source, &orders).await.expect("fork");
    assert!(forked.children[0].is_err());
    assert_eq!(driver.alive(), 3, "the source and two children");
    let (one, two) = (forked.children[1].as_ref().expect("one"), forked.children[2].as_ref().expect("two"));
    let (source_guest, one, two) = (client(&*machine).await, client(&**one).await, client(&**two).await);
    make(&one, "/one").await;
    make(&source_guest, "/source").await;
    for (guest, expected) in [(&source_guest, [false, true]), (&one, [true, false]), (&two, [false, false])] {
        assert!(has(guest, "/before").await);
        assert_eq!([has(guest, "/one").await, has(guest, "/source").await], expected);
    }
    driver.destroy(&source).await.expect("destroy");
    assert!(has(&two, "/before").await);
    assert!(matches!(driver.fork(&source, &orders).await.err(), Some(DriverError::WrongState(_))));
}
