//! Files, by their bytes.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use crate::support::in_process;
use connectrpc::{ConnectError, ErrorCode};
use mainbrella_guest_protocol::{GuestClient, GuestError, pb};

fn bytes(path: &Path) -> Vec<u8> {
    path.as_os_str().as_bytes().to_vec()
}

async fn read(client: &GuestClient, path: &[u8]) -> Result<(pb::FileStat, Vec<u8>), ConnectError> {
    read_part(client, path, 0, 0).await
}

async fn read_part(
    client: &GuestClient,
    path: &[u8],
    offset: u64,
    length: u64,
) -> Result<(pb::FileStat, Vec<u8>), ConnectError> {
    let request = pb::ReadFileRequest { path: path.to_vec(), offset, length, ..Default::default() };
    let mut stream = client.streams().read_file(request).await?;
    let first = stream.message().await?.expect("a first chunk").to_owned_message();
    let (stat, mut data) = (first.stat.into_option().expect("says what it is"), first.data);
    while let Some(chunk) = stream.message().await? {
        data.extend(&chunk.to_owned_message().data);
    }
    Ok((stat, data))
}

fn start(path: &[u8]) -> pb::WriteFileStart {
    pb::WriteFileStart { path: path.to_vec(), ..Default::default() }
}

async fn write(client: &GuestClient, start: pb::WriteFileStart, data: &[u8]) -> Result<u64, ConnectError> {
    let mut messages = vec![pb::WriteFileRequest { start: buffa::MessageField::some(start), ..Default::default() }];
    messages
        .extend(data.chunks(64 * 1024).map(|data| pb::WriteFileRequest { data: data.to_vec(), ..Default::default() }));
    messages.push(pb::WriteFileRequest { finish: true, ..Default::default() });
    Ok(client.streams().write_file(futures::stream::iter(messages)).await?.into_owned().size)
}

fn fault_of(result: Result<impl std::fmt::Debug, ConnectError>) -> (ErrorCode, i32, String) {
    let error = GuestError::from_connect(&result.unwrap_err());
    (error.code, error.errno, error.stage)
}

#[tokio::test]
async fn content_comes_back_whatever_the_name() {
    let client = in_process().await;
    let dir = tempfile::tempdir().unwrap();
    let long = vec![b'n'; 255];
    for name in [&b"re\"port"[..], b"a\nb", b"x\\", "é".as_bytes(), b"\xff\xfe", b"-n", b" ", &long] {
        let path = bytes(&dir.path().join(OsStr::from_bytes(name)));
        let data: Vec<u8> = (0..300_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        assert_eq!(write(&client, start(&path), &data).await.unwrap(), 300_000);
        let (stat, back) = read(&client, &path).await.unwrap();
        assert!(back == data);
        assert_eq!((stat.size, stat.mode), (300_000, 0o644));
        let (_, part) = read_part(&client, &path, 100_000, 70_000).await.unwrap();
        assert!(part == data[100_000..170_000]);
    }
    let names = std::fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(names, 8, "no temporary file is left");
}

#[tokio::test]
async fn what_is_no_file_is_refused_and_holds_nobody() {
    let client = in_process().await;
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::from(0o600), 0).unwrap();
    let cases = [
        (dir.path().to_owned(), (ErrorCode::FailedPrecondition, 21, "open".to_owned())),
        (fifo, (ErrorCode::FailedPrecondition, 6, "not-a-file".to_owned())),
        ("/dev/zero".into(), (ErrorCode::FailedPrecondition, 6, "not-a-file".to_owned())),
    ];
    for (path, expected) in cases {
        let path = bytes(&path);
        let ended = tokio::time::timeout(Duration::from_secs(5), read(&client, &path)).await.unwrap();
        assert_eq!(fault_of(ended), expected);
        let ended = tokio::time::timeout(Duration::from_secs(5), write(&client, start(&path), b"x")).await.unwrap();
        assert_eq!(fault_of(ended), expected);
    }
    assert_eq!(fault_of(read(&client, b"/no/such").await), (ErrorCode::NotFound, 2, "open".into()));
    assert_eq!(fault_of(read(&client, b"relative").await), (ErrorCode::InvalidArgument, 0, "path".into()));
    assert_eq!(fault_of(read(&client, b"/a\0b").await), (ErrorCode::InvalidArgument, 0, "path".into()));
    let long = [dir.path().as_os_str().as_bytes(), b"/", &[b'n'; 256]].concat();
    assert_eq!(fault_of(write(&client, start(&long), b"").await).1, 36);
    assert_eq!(fault_of(write(&client, start(b"/dev/full/x"), b"").await).1, 20);
}

#[tokio::test]
async fn a_file_whose_size_says_zero_is_read() {
    let client = in_process().await;
    let (stat, data) = read(&client, b"/proc/self/status").await.unwrap();
    assert_eq!(stat.size, 0);
    assert!(data.starts_with(b"Name:"));
    let (_, empty) = read_part(&client, b"/etc/passwd", 1 << 40, 10).await.unwrap();
    assert!(empty.is_empty());
}

#[tokio::test]
async fn a_replaced_file_keeps_its_mode_and_owner() {
    let client = in_process().await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("script");
    std::fs::write(&path, "old").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o4750)).unwrap();
    std::os::unix::fs::chown(&path, Some(12), Some(34)).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o4750)).unwrap();
    write(&client, start(&bytes(&path)), b"new").await.unwrap();
    let meta = path.metadata().unwrap();
    assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), (12, 34, 0o4750));
    write(&client, pb::WriteFileStart { mode: 0o600, ..start(&bytes(&path)) }, b"newer").await.unwrap();
    assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o600);
    assert_eq!(std::fs::read(&path).unwrap(), b"newer");
}

#[tokio::test]
async fn a_link_is_written_through() {
    let client = in_process().await;
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("sub")).unwrap();
    let target = dir.path().join("sub/target");
    std::fs::write(&target, "old").unwrap();
    std::os::unix::fs::symlink("sub/target", dir.path().join("link")).unwrap();
    std::os::unix::fs::symlink("link", dir.path().join("again")).unwrap();
    write(&client, start(&bytes(&dir.path().join("again"))), b"new").await.unwrap();
    assert_eq!(std::fs::read(&target).unwrap(), b"new");
    assert!(dir.path().join("again").is_symlink() && dir.path().join("link").is_symlink());
    std::os::unix::fs::symlink("circle", dir.path().join("circle")).unwrap();
    let circle = bytes(&dir.path().join("circle"));
    assert_eq!(fault_of(write(&client, start(&circle), b"").await), (ErrorCode::FailedPrecondition, 40, "open".into()));
    let request = pb::StatFileRequest { path: bytes(&dir.path().join("link")), ..Default::default() };
    let stat = client.rpc().stat_file(request.clone()).await.unwrap().into_owned();
    assert_eq!(stat.r#type, pb::file_stat::Type::TYPE_SYMLINK);
    assert_eq!(stat.symlink_target, b"sub/target");
    let request = pb::StatFileRequest { follow_symlinks: true, ..request };
    assert_eq!(client.rpc().stat_file(request).await.unwrap().into_owned().size, 3);
}

#[tokio::test]
async fn parents_and_exclusiveness_are_as_asked() {
    let client = in_process().await;
    let dir = tempfile::tempdir().unwrap();
    let path = bytes(&dir.path().join("a/b/c"));
    assert_eq!(fault_of(write(&client, start(&path), b"1").await), (ErrorCode::NotFound, 2, "open".into()));
    let with = pb::WriteFileStart { create_parents: true, exclusive: true, ..start(&path) };
    write(&client, with.clone(), b"1").await.unwrap();
    assert_eq!(fault_of(write(&client, with, b"2").await), (ErrorCode::AlreadyExists, 17, "open".into()));
    assert_eq!(std::fs::read(dir.path().join("a/b/c")).unwrap(), b"1");
}

#[tokio::test]
async fn half_a_file_replaces_nothing() {
    let client = in_process().await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("whole");
    std::fs::write(&path, "whole").unwrap();
    let begin = || pb::WriteFileRequest {
        start: buffa::MessageField::some(start(&bytes(&path))),
        data: vec![b'h'; 1000],
        ..Default::default()
    };
    // The stream ends properly, without the last message.
    let ended = client.streams().write_file(futures::stream::iter([begin()])).await;
    assert_eq!(ended.map(|_| ()).unwrap_err().code, ErrorCode::Aborted);
    // The caller goes away in the middle.
    let never = futures::StreamExt::chain(futures::stream::iter([begin()]), futures::stream::pending());
    let call = client.streams().write_file(never);
    assert!(tokio::time::timeout(Duration::from_millis(200), call).await.is_err());
    for _ in 0..100 {
        if std::fs::read_dir(dir.path()).unwrap().count() == 1 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "the temporary file is gone");
    assert_eq!(std::fs::read(&path).unwrap(), b"whole");
}

#[tokio::test]
async fn a_slow_reader_and_the_rest() {
    let client = in_process().await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("big");
    std::fs::File::create(&path).unwrap().set_len(50_000_000).unwrap();
    let request = || pb::ReadFileRequest { path: bytes(&path), ..Default::default() };
    let mut slow = client.streams().read_file(request()).await.unwrap();
    slow.message().await.unwrap();
    // A reader that stands still holds up nobody else.
    let (_, data) = read(&client, &bytes(&path)).await.unwrap();
    assert_eq!(data.len(), 50_000_000);
    let mut rest = 0;
    while let Some(chunk) = slow.message().await.unwrap() {
        rest += chunk.to_owned_message().data.len();
    }
    assert_eq!(rest, 50_000_000);
}
