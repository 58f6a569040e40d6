//! Starting and ending as the program does.

use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use mainbrella_engine::SystemClock;
use mainbrella_engine::fake::FakeDriver;
use mainbrella_server::auth::admin_key::{self, AdminKey};
use mainbrella_server::serve::Ending;
use mainbrella_server::start::{StartError, prepare, run_with};
use tempfile::TempDir;

fn free_port() -> std::net::SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

#[tokio::test]
async fn a_service_starts_serves_ends_and_starts_again_with_the_same_key() {
    let dir = TempDir::new().unwrap();
    let data = dir.path().join("deep/data");
    let mut config = crate::common::config(&data);
    config.listen = free_port();
    let driver = FakeDriver::default();
    let mut keys = Vec::new();
    for made in [AdminKey::Made, AdminKey::Present] {
        let ground = prepare(&config, &SystemClock).await.unwrap();
        assert_eq!(ground.admin_key, made);
        assert_eq!(std::fs::metadata(&data).unwrap().permissions().mode() & 0o777, 0o700);
        let ending = Ending::default();
        let service = run_with(config.clone(), ground, Arc::new(driver.clone()), Arc::new(SystemClock), ending.clone());
        let service = tokio::spawn(service);
        let key = std::fs::read_to_string(admin_key::path(&data)).unwrap().trim().to_owned();
        let request = Request::builder()
            .uri("/v1/capabilities")
            .header("host", "localhost")
            .header("authorization", format!("Bearer {key}"))
            .body(Bytes::new())
            .unwrap();
        assert_eq!(crate::common::send(config.listen, request).await.status, 200);
        keys.push(key);

        // A second one on this directory, or on this address, is told so in one sentence.
        let mut second = config.clone();
        second.listen = free_port();
        let e = prepare(&second, &SystemClock).await.err().unwrap();
        assert!(matches!(e, StartError::AlreadyRunning(_)), "{e}");
        assert!(e.to_string().starts_with("another service is using"), "{e}");
        let elsewhere = crate::common::config(&dir.path().join("other"));
        let mut busy = elsewhere.clone();
        busy.listen = config.listen;
        let e = prepare(&busy, &SystemClock).await.err().unwrap();
        assert!(matches!(e, StartError::PortBusy(_)), "{e}");
        assert!(!e.to_string().contains('\n') && e.to_string().contains("--listen"), "{e}");

        ending.stop.cancel();
        tokio::time::timeout(Duration::from_secs(10), service).await.unwrap().unwrap().unwrap();
    }
    assert_eq!(keys[0], keys[1]);
}

#[tokio::test]
async fn a_directory_that_cannot_be_used_is_told_in_one_sentence() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let e = prepare(&crate::common::config(&file), &SystemClock).await.err().unwrap();
    assert!(matches!(e, StartError::DataDir { .. }), "{e}");
    let mut config = crate::common::config(&dir.path().join("data"));
    config.database = Some(mainbrella_server::config::DatabaseUrl("sqlite:/proc/none/x.sqlite".into()));
    config.listen = free_port();
    let e = prepare(&config, &SystemClock).await.err().unwrap();
    assert!(matches!(e, StartError::Store(_)), "{e}");
    assert!(!e.to_string().contains('\n'), "{e}");
}
