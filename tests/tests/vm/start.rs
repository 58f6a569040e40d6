//! A service that cannot start says why, in one sentence.

use std::process::{Command, Output};

use mainbrella_tests::{Service, program};

fn serve(data: &std::path::Path, listen: &str) -> Output {
    let mut command = Command::new(program());
    for (name, _) in std::env::vars_os().filter(|(n, _)| n.as_encoded_bytes().starts_with(b"MAINBRELLA_")) {
        command.env_remove(name);
    }
    command.arg("--data-dir").arg(data).args(["serve", "--listen", listen]).output().expect("run")
}

fn assert_plain(out: &Output, word: &str) {
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success());
    assert!(out.stdout.is_empty());
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines.len() <= 2 && text.contains(word), "one sentence and a hint: {text}");
    assert!(lines[0].starts_with("error: "), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_service_says_what_is_in_its_way() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    let data = service.data().to_owned();
    let out = tokio::task::spawn_blocking(move || serve(&data, "127.0.0.1:0")).await.expect("joined");
    assert_plain(&out, "another service is using");
    let elsewhere = tempfile::tempdir().expect("temp dir");
    let (path, address) = (elsewhere.path().to_owned(), service.url().replace("http://", ""));
    let out = tokio::task::spawn_blocking(move || serve(&path, &address)).await.expect("joined");
    assert_plain(&out, "is taken by another program");
    let file = elsewhere.path().join("file");
    std::fs::write(&file, "").expect("file");
    let out = tokio::task::spawn_blocking(move || serve(&file, "127.0.0.1:0")).await.expect("joined");
    assert_plain(&out, "data directory");
    assert_eq!(m.text("echo undisturbed").await, "undisturbed\n");
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_kept_from_others_and_strangers_are_kept_out() {
    use std::os::unix::fs::PermissionsExt;
    let mut service = Service::start().await;
    let m = service.machine().await;
    let mode = |p: std::path::PathBuf| std::fs::metadata(p).expect("there").permissions().mode() & 0o777;
    assert_eq!(mode(service.data().join("keys/admin.key")), 0o600);
    assert_eq!(mode(service.data().join("keys")), 0o700);
    let stranger = service.client_for("mb_00000000_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA");
    let answer = stranger.machine(&m.name.id, None).await;
    assert_eq!(crate::code(answer), mainbrella_types::ErrorCode::Unauthenticated);
    let secret = service.admin_key();
    let log = service.log();
    assert!(!log.contains(&secret) && !log.contains(secret.rsplit('_').next().expect("secret")), "no key in the log");
    let body = mainbrella_client::api::CreateKey { name: "second".into(), role: mainbrella_client::api::KeyRole::User };
    let made = service.client().create_key(&body).await.expect("key");
    let user = service.client_for(&made.secret);
    assert_eq!(user.machine(&m.name.id, None).await.expect("get").created_at, m.name.created_at);
    assert_eq!(crate::code(user.keys().await), mainbrella_types::ErrorCode::Forbidden);
    service.crash().await;
    service.client_for(&made.secret).machine(&m.name.id, None).await.expect("keys are kept");
    service.client().revoke_key(&made.id).await.expect("revoke");
    assert_eq!(crate::code(user.machine(&m.name.id, None).await), mainbrella_types::ErrorCode::Unauthenticated);
    service.finish().await;
}
