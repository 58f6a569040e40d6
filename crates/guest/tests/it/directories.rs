//! Directories, names, modes, and what is removed.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use crate::support::in_process;
use connectrpc::ConnectError;
use mainbrella_guest_protocol::{GuestClient, GuestError, pb};
use pb::file_stat::Type;

fn bytes(path: &Path) -> Vec<u8> {
    path.as_os_str().as_bytes().to_vec()
}

fn errno_of(result: Result<impl std::fmt::Debug, ConnectError>) -> (i32, String) {
    let error = GuestError::from_connect(&result.unwrap_err());
    (error.errno, error.stage)
}

async fn list(
    client: &GuestClient,
    path: &Path,
    offset: u64,
    limit: u32,
) -> Result<(Vec<pb::DirEntry>, bool), ConnectError> {
    let request = pb::ListDirRequest { path: bytes(path), offset, limit, ..Default::default() };
    let mut stream = client.streams().list_dir(request).await?;
    let (mut all, mut more) = (Vec::new(), false);
    while let Some(page) = stream.message::<pb::ListDirPage>().await? {
        let page = page.to_owned_message();
        all.extend(page.entries);
        more = page.more;
    }
    Ok((all, more))
}

async fn make(client: &GuestClient, path: &Path, recursive: bool, mode: u32) -> Result<pb::FileStat, ConnectError> {
    let request = pb::MakeDirRequest { path: bytes(path), recursive, mode, ..Default::default() };
    Ok(client.rpc().make_dir(request).await?.into_owned())
}

async fn rename(client: &GuestClient, source: &Path, destination: &Path) -> Result<pb::FileStat, ConnectError> {
    let request = pb::RenameRequest {
        source: bytes(source),
        destination: bytes(destination),
        deadline_ms: 20_000,
        ..Default::default()
    };
    Ok(client.rpc().rename(request).await?.into_owned())
}

async fn remove(
    client: &GuestClient,
    path: &[u8],
    recursive: bool,
    deadline_ms: u64,
) -> Result<pb::RemoveResponse, ConnectError> {
    let request = pb::RemoveRequest { path: path.to_vec(), recursive, deadline_ms, ..Default::default() };
    Ok(client.rpc().remove(request).await?.into_owned())
}

#[tokio::test]
async fn pages_are_sorted_by_bytes_and_make_up_the_whole() {
    let client = in_process().await;
    let dir = tempfile::tempdir().unwrap();
    let mut names: Vec<Vec<u8>> = (0..9990).map(|n| format!("f{n}").into_bytes()).collect();
    names.extend(
        [&b"\xff\xfe"[..], b"re\"port", b"a\nb", b"x\\", "é".as_bytes(), b"-n", b" ", b"Z", b"...", &[b'n'; 255]]
            .map(<[u8]>::to_vec),
    );
    for name in &names {
        fs::write(dir.path().join(OsStr::from_bytes(name)), "").unwrap();
    }
    names.sort();
    for limit in [1000, 333] {
        let mut seen = Vec::new();
        loop {
            let (page, more) = list(&client, dir.path(), seen.len() as u64, limit).await.unwrap();
            assert!(page.len() <= limit as usize && (page.len() == limit as usize || !more));
            seen.extend(page.into_iter().map(|e| e.name));
            if !more {
                break;
            }
        }
        assert!(seen == names, "pages of {limit}");
    }
    assert!(list(&client, dir.path(), 10_000, 10).await.unwrap().0.is_empty());
    assert!(list(&client, dir.path(), 1_000_000, 10).await.unwrap().0.is_empty());
    assert_eq!(errno_of(list(&client, dir.path(), 0, 0).await), (0, "page".into()));
    assert_eq!(errno_of(list(&client, dir.path(), 0, 1001).await), (0, "page".into()));
    assert_eq!(errno_of(list(&client, dir.path(), 1_000_001, 1).await), (0, "page".into()));
    assert_eq!(errno_of(list(&client, &dir.path().join("f1"), 0, 1).await), (20, "open".into()));
    assert_eq!(errno_of(list(&client, &dir.path().join("none"), 0, 1).await), (2, "open".into()));
}

#[tokio::test]
async fn a_listing_tells_links_as_links_and_long_targets_fit() {
    let client = in_process().await;
    let dir = tempfile::tempdir().unwrap();
    let far = format!("/{}", "t".repeat(4000));
    for n in 0..300 {
        symlink(&far, dir.path().join(format!("{n:0200}"))).unwrap();
    }
    symlink(dir.path(), dir.path().join("self")).unwrap();
    let (page, more) = list(&client, &dir.path().join("self"), 0, 1000).await.unwrap();
    assert_eq!((page.len(), more), (301, false));
    for entry in page {
        let stat = entry.stat.into_option().unwrap();
        assert_eq!(stat.r#type, Type::TYPE_SYMLINK);
        assert!(stat.symlink_target == far.as_bytes() || entry.name == b"self");
    }
}

#[tokio::test]
async fn directories_are_made_with_exactly_their_mode() {
    let client = in_process().await;
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let stat = make(&client, &at("a"), false, 0o1777).await.unwrap();
    assert_eq!((stat.r#type.as_known(), stat.mode), (Some(Type::TYPE_DIRECTORY), 0o1777));
    assert_eq!(errno_of(make(&client, &at("a"), false, 0o755).await), (17, "mkdir".into()));
    assert_eq!(make(&client, &at("a"), true, 0o700).await.unwrap().mode, 0o1777, "what is there stays as it is");
    assert_eq!(errno_of(make(&client, &at("b/c"), false, 0o755).await), (2, "open".into()));
    assert_eq!(make(&client, &at("b/c/d"), true, 0o750).await.unwrap().mode, 0o750);
    fs::write(at("f"), "").unwrap();
    assert_eq!(errno_of(make(&client, &at("f"), true, 0o755).await), (17, "mkdir".into()));
    assert_eq!(errno_of(make(&client, &at("f/x"), true, 0o755).await), (17, "parents".into()), "a file is in the way");
    assert_eq!(errno_of(make(&client, &at("x"), false, 0o10000).await), (0, "mode".into()));
}

#[tokio::test]
async fn nothing_is_ever_overwritten_by_a_move() {
    let client = in_process().await;
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("a"), "a").unwrap();
    fs::write(at("b"), "b").unwrap();
    fs::create_dir(at("d")).unwrap();
    symlink("nowhere", at("l")).unwrap();
    for taken in ["b", "d", "l"] {
        assert_eq!(errno_of(rename(&client, &at("a"), &at(taken)).await), (17, "rename".into()), "{taken}");
    }
    assert_eq!(fs::read(at("b")).unwrap(), b"b");
    assert_eq!(rename(&client, &at("a"), &at("d/a")).await.unwrap().size, 1);
    assert_eq!(rename(&client, &at("l"), &at("d/l")).await.unwrap().symlink_target, b"nowhere");
    assert_eq!(errno_of(rename(&client, &at("a"), &at("c")).await), (2, "rename".into()));
    assert_eq!(errno_of(rename(&client, &at("d"), &at("d/in")).await), (22, "rename".into()));
    // To another file system and back, as a copy; links and modes travel along.
    let other = tempfile::tempdir_in("/dev/shm").unwrap();
    fs::set_permissions(at("d/a"), fs::Permissions::from_mode(0o640)).unwrap();
    fs::hard_link(at("d/a"), at("d/same")).unwrap();
    rename(&client, &at("d"), &other.path().join("moved")).await.unwrap();
    assert!(!at("d").exists());
    let moved = other.path().join("moved");
    assert_eq!(fs::metadata(moved.join("same")).unwrap().permissions().mode() & 0o7777, 0o640);
    assert_eq!(fs::read_link(moved.join("l")).unwrap(), Path::new("nowhere"));
    fs::create_dir(at("taken")).unwrap();
    assert_eq!(errno_of(rename(&client, &moved, &at("taken")).await).0, 17);
    assert!(moved.join("a").exists() && fs::read_dir(at("taken")).unwrap().next().is_none());
    let late = pb::RenameRequest { source: bytes(&moved), destination: bytes(&at("late")), ..Default::default() };
    assert_eq!(errno_of(client.rpc().rename(late).await.map(|_| ())), (110, "time".into()));
    assert!(moved.join("a").exists() && !at("late").exists());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "no half of a copy is left");
}

#[tokio::test]
async fn modes_change_through_a_link() {
    let client = in_process().await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("f");
    fs::write(&file, "").unwrap();
    symlink("f", dir.path().join("l")).unwrap();
    let chmod = |path: &[u8], mode| pb::ChmodRequest { path: path.to_vec(), mode, ..Default::default() };
    let stat = client.rpc().chmod(chmod(&bytes(&dir.path().join("l")), 0o4711)).await.unwrap().into_owned();
    assert_eq!((stat.mode, stat.r#type.as_known()), (0o4711, Some(Type::TYPE_FILE)));
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o7777, 0o4711);
    assert_eq!(errno_of(client.rpc().chmod(chmod(b"/", 0o755)).await.map(|_| ())), (0, "root".into()));
    assert_eq!(errno_of(client.rpc().chmod(chmod(&bytes(&file), 0o10000)).await.map(|_| ())), (0, "mode".into()));
}

#[tokio::test]
async fn the_root_is_refused_however_it_is_spelled() {
    let client = in_process().await;
    let dir = tempfile::tempdir().unwrap();
    let inner = [dir.path().as_os_str().as_bytes(), b"/.."].concat();
    for root in [&b"/"[..], b"//", b"/.", b"/./", b"/..", b"/tmp/..", &inner] {
        assert_eq!(errno_of(remove(&client, root, true, 10_000).await), (0, "root".into()), "{root:?}");
        let path = Path::new(OsStr::from_bytes(root));
        assert_eq!(errno_of(rename(&client, path, &dir.path().join("x")).await), (0, "root".into()));
        assert_eq!(errno_of(make(&client, path, false, 0o755).await), (0, "root".into()));
    }
    assert!(dir.path().exists());
}

#[tokio::test]
async fn removing_says_what_is_left() {
    let client = in_process().await;
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    fs::create_dir_all(tree.join("sub")).unwrap();
    for n in 0..300 {
        fs::write(tree.join(format!("sub/{n}")), "").unwrap();
    }
    symlink("/etc", tree.join("link")).unwrap();
    assert_eq!(errno_of(remove(&client, &bytes(&tree), false, 10_000).await), (39, "remove".into()));
    let late = remove(&client, &[bytes(&tree), b"/".to_vec()].concat(), true, 0).await.unwrap();
    assert!(late.timed_out && late.remaining_count == 3 && late.removed == 0);
    assert_eq!(late.remaining, [bytes(&tree.join("link")), bytes(&tree.join("sub")), bytes(&tree)]);
    let done = remove(&client, &bytes(&tree), true, 10_000).await.unwrap();
    assert_eq!((done.removed, done.remaining_count, done.remaining.len()), (303, 0, 0));
    assert!(Path::new("/etc/passwd").exists());
    assert_eq!(errno_of(remove(&client, &bytes(&tree), true, 10_000).await), (2, "remove".into()));
}
