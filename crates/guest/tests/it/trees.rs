//! Trees as tar over the link. What tar itself must do is tested in `mainbrella-tree`.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::time::Duration;

use crate::support::in_process;
use connectrpc::ConnectError;
use mainbrella_guest_protocol::{GuestClient, GuestError, pb};

async fn pack(client: &GuestClient, path: &Path) -> Result<Vec<u8>, ConnectError> {
    let request = pb::PackTreeRequest { path: path.as_os_str().as_bytes().to_vec(), ..Default::default() };
    let mut stream = client.streams().pack_tree(request).await?;
    let mut all = Vec::new();
    while let Some(chunk) = stream.message::<pb::TreeChunk>().await? {
        assert!(chunk.view().data.len() <= 128 * 1024);
        all.extend_from_slice(chunk.view().data);
    }
    Ok(all)
}

fn messages(path: &Path, archive: &[u8], finish: bool) -> Vec<pb::UnpackTreeRequest> {
    let start = pb::UnpackTreeStart { path: path.as_os_str().as_bytes().to_vec(), ..Default::default() };
    let mut all = vec![pb::UnpackTreeRequest { start: start.into(), ..Default::default() }];
    let data = |data: &[u8]| pb::UnpackTreeRequest { data: data.to_vec(), ..Default::default() };
    all.extend(archive.chunks(60_000).map(data));
    if finish {
        all.push(pb::UnpackTreeRequest { finish: true, ..Default::default() });
    }
    all
}

async fn unpack(client: &GuestClient, path: &Path, archive: &[u8]) -> Result<pb::UnpackTreeResponse, ConnectError> {
    let messages = futures::stream::iter(messages(path, archive, true));
    Ok(client.streams().unpack_tree(messages).await?.into_owned())
}

#[tokio::test]
async fn a_tree_goes_out_and_comes_back() {
    let client = in_process().await;
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("from");
    fs::create_dir_all(from.join("sub")).unwrap();
    let big: Vec<u8> = (0..3_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    fs::write(from.join("sub/big"), &big).unwrap();
    symlink("big", from.join("sub/link")).unwrap();
    fs::set_permissions(from.join("sub"), fs::Permissions::from_mode(0o710)).unwrap();
    symlink("from", dir.path().join("alias")).unwrap();
    let archive = pack(&client, &dir.path().join("alias")).await.unwrap();
    let to = dir.path().join("made/for/it");
    let done = unpack(&client, &to, &archive).await.unwrap();
    assert_eq!((done.entries, done.bytes, done.skipped), (4, 3_000_000, 0));
    assert!(fs::read(to.join("sub/big")).unwrap() == big);
    assert_eq!(fs::read_link(to.join("sub/link")).unwrap(), Path::new("big"));
    assert_eq!(fs::metadata(to.join("sub")).unwrap().permissions().mode() & 0o7777, 0o710);
}

#[tokio::test]
async fn what_is_broken_or_means_harm_is_refused() {
    let client = in_process().await;
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("f"), vec![1; 100_000]).unwrap();
    let archive = pack(&client, &dir.path().join("f")).await.unwrap();
    let to = dir.path().join("to");
    let stage = |r: Result<pb::UnpackTreeResponse, ConnectError>| GuestError::from_connect(&r.unwrap_err()).stage;
    assert_eq!(stage(unpack(&client, &to, &archive[..90_000]).await), "archive");
    assert_eq!(fs::read_dir(&to).unwrap().count(), 0, "no half of a file");
    assert_eq!(stage(unpack(&client, &to, &[7; 1024]).await), "archive");
    assert_eq!(stage(unpack(&client, &dir.path().join("f"), &archive).await), "open");
    // The caller goes away in the middle.
    let half = futures::stream::iter(messages(&to, &archive[..90_000], false));
    let never = futures::StreamExt::chain(half, futures::stream::pending());
    assert!(tokio::time::timeout(Duration::from_millis(300), client.streams().unpack_tree(never)).await.is_err());
    for _ in 0..100 {
        if fs::read_dir(&to).unwrap().count() == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(fs::read_dir(&to).unwrap().count(), 0);
    let half = futures::stream::iter(messages(&to, &archive, false));
    let ended = client.streams().unpack_tree(half).await.map(|_| ()).unwrap_err();
    assert_eq!(ended.code, connectrpc::ErrorCode::Aborted, "without the last message it is not whole");
    for (path, errno) in [("/no/such", 2), ("/dev/null", 0)] {
        let error = GuestError::from_connect(&pack(&client, Path::new(path)).await.unwrap_err());
        assert_eq!(error.errno, errno, "{error}");
    }
}
