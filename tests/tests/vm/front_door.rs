//! `./run`: what it says before and instead of long work.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use mainbrella_tests::{Service, host, machine_body};

fn run(arguments: &[&str], data: &Path) -> Output {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut command = Command::new(root.join("run"));
    for (name, _) in std::env::vars_os().filter(|(n, _)| n.as_encoded_bytes().starts_with(b"MAINBRELLA_")) {
        command.env_remove(name);
    }
    command.args(arguments).args(["--data-dir".as_ref(), data.as_os_str()]).output().expect("run")
}

/// One sentence, what to do, and no trace of what failed inside.
#[track_caller]
fn assert_plain(out: &Output, words: &[&str]) {
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && out.stdout.is_empty(), "{out:?}");
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines.len() <= 2 && lines[0].starts_with("error: "), "{text}");
    for word in words {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert!(!text.contains("Traceback") && !text.contains("line "), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn mistakes_are_told_before_long_work_in_one_sentence() {
    let service = Service::start().await;
    let taken = service.url().replace("http://", "");
    let made = tempfile::tempdir().expect("temp dir");
    let dir = made.path();
    tokio::task::block_in_place(|| {
        assert_plain(&run(&["up", "--listen", &taken], dir), &["in use", "--listen 127.0.0.1:PORT"]);
        assert_plain(&run(&["up", "--listen", "nonsense"], dir), &["not an address", "127.0.0.1:8787"]);
        assert_plain(&run(&["up", "--listen", "127.0.0.1:99999"], dir), &["not an address"]);
        assert_plain(&run(&["up", "--listen", ""], dir), &["--listen needs"]);
        assert_plain(&run(&["up"], Path::new("/proc/none")), &["cannot be made", "--data-dir"]);
        assert_plain(&run(&["env"], dir), &["no API key", "./run up"]);
        assert_eq!(run(&["nonsense"], dir).status.code(), Some(2));
        let down = run(&["down"], dir);
        assert!(down.status.success(), "{down:?}");
        assert!(!dir.join("bin").exists(), "nothing was built");
    });
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_is_found_again_by_its_folder() {
    let made = tempfile::tempdir().expect("temp dir");
    let dir = made.path();
    std::fs::create_dir(dir.join("keys")).expect("folder");
    std::fs::write(dir.join("keys/admin.key"), "mb_0_x\n").expect("key");
    std::fs::write(dir.join("service.address"), "127.0.0.1:4321\n").expect("address");
    let told = |arguments: &[&str]| {
        let out = run(arguments, dir);
        assert!(out.status.success(), "{out:?}");
        String::from_utf8(out.stdout).expect("text")
    };
    assert!(told(&["env"]).contains("export MAINBRELLA_API_URL=http://127.0.0.1:4321\n"));
    assert!(told(&["env", "--listen", "127.0.0.1:1"]).contains("MAINBRELLA_API_URL=http://127.0.0.1:1\n"));
    // A key that was taken away is not asked for with the words for a first start.
    std::fs::remove_file(dir.join("keys/admin.key")).expect("remove");
    std::fs::write(dir.join("mainbrella.sqlite"), "").expect("database");
    assert_plain(&run(&["env"], dir), &["not in", "put it back"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn down_stops_what_is_being_created_too() {
    let mut service = Service::start().await;
    let data = service.data().to_owned();
    // The front door knows its service by the program in its folder, its process id and its address.
    let bin = data.join("bin");
    std::fs::create_dir(&bin).expect("folder");
    for name in ["mainbrella", "mainbrella-guest"] {
        std::fs::copy(mainbrella_tests::bin_dir().join(name), bin.join(name)).expect("copy");
    }
    service.terminate().await;
    let command = service.command();
    let mut own = Command::new(bin.join("mainbrella"));
    let mut child = own.args(command.get_args()).stderr(Stdio::null()).spawn().expect("spawn");
    std::fs::write(data.join("service.pid"), child.id().to_string()).expect("pid");
    std::fs::write(data.join("service.address"), service.url().replace("http://", "")).expect("address");
    let client = service.client().clone();
    host::until("it answers", Duration::from_secs(60), async || client.health().await.is_ok()).await;

    let made = service.machine().await;
    let creating: Vec<_> = (0..3)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.create(&machine_body(), None).await })
        })
        .collect();
    host::until("they are begun", Duration::from_secs(10), async || service.list().await.len() == 4).await;
    let down = tokio::task::block_in_place(|| run(&["down"], &data));
    assert!(down.status.success(), "{down:?}");
    assert_eq!(String::from_utf8_lossy(&down.stdout), "stopped 4 machines\n");
    for answer in creating {
        // Made and stopped, or stopped before it was made: an answer in any case.
        drop(answer.await.expect("joined"));
    }
    assert!(child.wait().expect("wait").success() && !data.join("service.pid").exists());
    assert!(run(&["down"], &data).status.success(), "there is nothing to do any more");
    service.launch().await;
    for record in service.list().await {
        assert!(record.state.is_final(), "{record:?}");
    }
    assert!(service.attach(made.name).record().await.state.is_final());
    std::fs::remove_dir_all(&bin).expect("remove");
    service.finish().await;
}
