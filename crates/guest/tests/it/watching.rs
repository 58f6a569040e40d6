//! What happens in a directory is told, whole and in order, or it is told that something was missed.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use crate::support::in_process;
use mainbrella_guest_protocol::host::WatchStream;
use mainbrella_guest_protocol::{GuestClient, GuestError, pb};
use pb::watch_event::Kind;

/// An event as it reads: `kind path` or `kind path > path`, below the watched directory.
type Told = Vec<String>;

async fn watch(client: &GuestClient, path: &Path, recursive: bool) -> WatchStream {
    let request = pb::WatchTreeRequest { path: path.as_os_str().as_bytes().to_vec(), recursive, ..Default::default() };
    let mut stream = client.streams().watch_tree(request).await.unwrap();
    let first = stream.message::<pb::WatchEvents>().await.unwrap().unwrap();
    assert!(first.view().events.is_empty(), "the first message says that it is ready");
    stream
}

fn say(root: &Path, event: &pb::WatchEvent) -> String {
    let below = |path: &[u8]| {
        let path = Path::new(std::ffi::OsStr::from_bytes(path)).strip_prefix(root).unwrap();
        path.to_string_lossy().into_owned()
    };
    let kind = match event.kind.as_known().unwrap() {
        Kind::KIND_CREATED => "created",
        Kind::KIND_MODIFIED => "modified",
        Kind::KIND_REMOVED => "removed",
        Kind::KIND_RENAMED => return format!("renamed {} > {}", below(&event.path), below(&event.new_path)),
        Kind::KIND_ATTRIBUTES => "attributes",
        Kind::KIND_OVERFLOW => "overflow",
        Kind::KIND_ENDED => "ended",
        Kind::KIND_UNSPECIFIED => panic!("an event without a kind"),
    };
    format!("{kind} {}", below(&event.path))
}

/// Everything told until `last` is.
async fn until(stream: &mut WatchStream, root: &Path, last: &str) -> Told {
    let mut told = Told::new();
    let all = async {
        while let Some(message) = stream.message::<pb::WatchEvents>().await.unwrap() {
            for event in &message.to_owned_message().events {
                told.push(say(root, event));
                if told.last().is_some_and(|t| t == last) {
                    return;
                }
            }
        }
        panic!("the watch ended before {last}");
    };
    if tokio::time::timeout(Duration::from_secs(20), all).await.is_err() {
        panic!("{last} was not told; told: {:?}", &told[..told.len().min(50)]);
    }
    told
}

#[tokio::test]
async fn what_happens_in_one_directory_is_told_in_order() {
    let client = in_process().await;
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir(at("sub")).unwrap();
    let mut stream = watch(&client, dir.path(), false).await;
    fs::write(at("a"), "1").unwrap();
    for _ in 0..100 {
        fs::write(at("a"), "12").unwrap();
    }
    fs::set_permissions(at("a"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    fs::rename(at("a"), at("b \n\"")).unwrap();
    fs::write(at("sub/inner"), "").unwrap();
    fs::remove_file(at("b \n\"")).unwrap();
    let told = until(&mut stream, dir.path(), "removed b \n\"").await;
    let expected = ["created a", "modified a", "attributes a", "renamed a > b \n\"", "removed b \n\""];
    assert_eq!(told, expected, "one level, and a hundred writes are one change");
}

#[tokio::test]
async fn new_and_moved_directories_are_watched_too() {
    let client = in_process().await;
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let at = |name: &str| dir.path().join(name);
    fs::create_dir_all(at("old/deep")).unwrap();
    let mut stream = watch(&client, dir.path(), true).await;
    fs::write(at("old/deep/f"), "").unwrap();
    assert_eq!(until(&mut stream, dir.path(), "created old/deep/f").await.len(), 1);
    // Made all at once: what is in it before it is watched is told all the same, and only once.
    fs::create_dir_all(at("n/e/w")).unwrap();
    for n in 0..50 {
        fs::write(at(&format!("n/e/w/{n}")), "").unwrap();
    }
    fs::write(at("mark1"), "").unwrap();
    let mut told = until(&mut stream, dir.path(), "created mark1").await;
    // The mark may be told before the last of a directory that is being looked through.
    fs::write(at("n/e/w/end"), "").unwrap();
    told.extend(until(&mut stream, dir.path(), "created n/e/w/end").await);
    let mut created: Vec<_> = told.into_iter().filter(|t| t.starts_with("created n")).collect();
    let all = created.len();
    created.sort();
    created.dedup();
    assert_eq!((created.len(), all), (54, 54));
    // A renamed directory is known under its new name, at every depth.
    fs::rename(at("n"), at("m")).unwrap();
    fs::write(at("m/e/w/again"), "").unwrap();
    let told = until(&mut stream, dir.path(), "created m/e/w/again").await;
    assert_eq!(told, ["renamed n > m", "created m/e/w/again"]);
    // Moved out: removed, and what happens there is not ours. Moved in: created, with what is in it.
    fs::rename(at("m"), other.path().join("m")).unwrap();
    fs::write(other.path().join("m/e/unseen"), "").unwrap();
    assert_eq!(until(&mut stream, dir.path(), "removed m").await, ["removed m"]);
    fs::rename(other.path().join("m"), at("back")).unwrap();
    let told = until(&mut stream, dir.path(), "created back/e/w/end").await;
    assert!(told.contains(&"created back".to_owned()) && told.contains(&"created back/e".to_owned()), "{told:?}");
    assert!(!told.iter().any(|t| t.contains("m/e")), "{told:?}");
    fs::write(at("back/e/w/last"), "").unwrap();
    until(&mut stream, dir.path(), "created back/e/w/last").await;
    fs::remove_dir_all(at("back")).unwrap();
    assert!(until(&mut stream, dir.path(), "removed back").await.contains(&"removed back/e/w/last".to_owned()));
    // The root itself goes: that is told, and is the end.
    fs::remove_dir_all(dir.path()).unwrap();
    until(&mut stream, dir.path(), "ended ").await;
    assert!(stream.message::<pb::WatchEvents>().await.unwrap().is_none());
}

#[tokio::test]
async fn a_queue_that_runs_over_is_told_and_the_watch_goes_on() {
    let client = in_process().await;
    let dir = tempfile::tempdir().unwrap();
    let mut stream = watch(&client, dir.path(), true).await;
    // The agent shares this thread: nothing is read meanwhile. The kernel queues 16,384.
    for n in 0..9_000 {
        let path = dir.path().join(n.to_string());
        fs::write(&path, "").unwrap();
        fs::remove_file(&path).unwrap();
    }
    fs::create_dir(dir.path().join("missed")).unwrap();
    let told = until(&mut stream, dir.path(), "overflow ").await;
    assert!(told.len() > 16_000, "{}", told.len());
    fs::write(dir.path().join("missed/f"), "").unwrap();
    until(&mut stream, dir.path(), "created missed/f").await;
}

#[tokio::test]
async fn only_directories_are_watched_and_not_without_end() {
    let client = in_process().await;
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("f"), "").unwrap();
    for (name, errno) in [("f", 20), ("none", 2)] {
        let path = dir.path().join(name).as_os_str().as_bytes().to_vec();
        let request = pb::WatchTreeRequest { path, ..Default::default() };
        let mut stream = client.streams().watch_tree(request).await;
        let error = match &mut stream {
            Ok(stream) => stream.message::<pb::WatchEvents>().await.map(|_| ()).unwrap_err(),
            Err(error) => error.clone(),
        };
        assert_eq!(GuestError::from_connect(&error).errno, errno);
    }
    let mut open = Vec::new();
    for _ in 0..32 {
        open.push(watch(&client, dir.path(), false).await);
    }
    let request = pb::WatchTreeRequest { path: dir.path().as_os_str().as_bytes().to_vec(), ..Default::default() };
    let refused = match client.streams().watch_tree(request).await {
        Ok(mut stream) => stream.message::<pb::WatchEvents>().await.map(|_| ()),
        Err(error) => Err(error),
    };
    assert_eq!(GuestError::from_connect(&refused.unwrap_err()).stage, "watches");
    open.truncate(10);
    tokio::time::sleep(Duration::from_millis(200)).await;
    watch(&client, dir.path(), false).await;
}
