//! What was saved, read without a machine of the caller's, through the whole service.

use std::time::Duration;

use mainbrella_client::api::{SaveSnapshot, Snapshot, SnapshotKind, UpdateSnapshot};
use mainbrella_client::{Download, FilesOf};
use mainbrella_tests::{Machine, Service, host};
use mainbrella_types::ErrorCode;
use sha2::{Digest as _, Sha256};

use crate::code;

/// Longer than what reads a snapshot is kept after its last use, which is a minute.
const PATIENCE: Duration = Duration::from_secs(150);

async fn save(m: &Machine, kind: SnapshotKind) -> Snapshot {
    let body = SaveSnapshot { name: "saved".to_owned(), kind, stop: false, ttl_seconds: None };
    m.client.save(&m.name, &body, &uuid::Uuid::new_v4().to_string()).await.unwrap_or_else(|e| panic!("save: {e:?}"))
}

async fn whole(mut download: Download) -> Vec<u8> {
    let mut all = Vec::new();
    while let Some(piece) = download.chunk().await.expect("it does not break off") {
        all.extend_from_slice(&piece);
    }
    all
}

fn hex(data: &[u8]) -> String {
    hex::encode(Sha256::digest(data))
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_snapshots_are_read_without_a_machine_and_what_reads_them_goes_by_itself() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    m.text("mkdir -p /workspace/deep && cd /workspace && head -c 5000000 /dev/urandom >deep/data && ln -s deep/data link && chmod 640 deep/data").await;
    let digest = m.text("sha256sum /workspace/deep/data").await.split(' ').next().expect("a digest").to_owned();
    // Memory has what the disk has not seen yet: a save brings it there.
    m.text("echo late >/workspace/late").await;
    let (files, full) = (save(&m, SnapshotKind::Workspace).await, save(&m, SnapshotKind::Full).await);
    m.text("rm -r /workspace/deep; echo changed >/workspace/late").await;
    m.stop().await;
    assert_eq!(service.vmms().len(), 0);
    let client = service.client().clone();
    for saved in [&files, &full] {
        let of = FilesOf::Snapshot(&saved.id);
        let listed =
            client.list_files(of, "/workspace", 0, 100).await.unwrap_or_else(|e| panic!("{e:?}: {}", service.log()));
        let names: Vec<&str> = listed.entries.iter().map(|e| e.name.as_str()).filter(|n| *n != "lost+found").collect();
        assert_eq!(names, ["deep", "late", "link"]);
        let stat = client.stat_file(of, "/workspace/link", true).await.expect("there");
        assert_eq!((stat.size, stat.mode.as_str()), (5_000_000, "0640"));
        let content = whole(client.read_file(of, "/workspace/link", None, None).await.expect("opened")).await;
        assert_eq!(hex(&content), digest);
        let late = client.read_file(of, "/workspace/late", None, None).await.expect("opened");
        assert_eq!(whole(late).await, b"late\n");
        let tree = whole(client.download_tree(of, "/workspace").await.expect("opened")).await;
        let at =
            tree.windows(4096).step_by(512).position(|part| part == &content[..4096]).expect("it is in the archive");
        assert_eq!(hex(&tree[at * 512..][..content.len()]), digest);
        assert!(whole(client.export_workspace(of).await.expect("opened")).await.starts_with(&[0x1f, 0x8b]));
        assert_eq!(code(client.stat_file(of, "/none", false).await), ErrorCode::FileNotFound);
        service.look();
    }
    // One for each of the two, however many calls; they are no machines of anybody's.
    let first = service.keys();
    assert_eq!((first.len(), service.vmms().len()), (2, 2));
    let again = (0..4).map(|_| client.list_files(FilesOf::Snapshot(&files.id), "/", 0, 10));
    assert!(futures::future::join_all(again).await.into_iter().all(|page| page.is_ok()));
    assert_eq!(service.keys(), first);
    assert!(service.list().await.iter().all(|machine| machine.state.is_final()));
    // What is changed in a snapshot's record changes nothing; its end ends what reads it.
    let archived = UpdateSnapshot { name: None, archived: Some(true) };
    client.update_snapshot(&full.id, &archived).await.expect("changed");
    client.delete_snapshot(&full.id).await.expect("deleted");
    assert_eq!(service.vmms().len(), 1);
    assert_eq!(code(client.list_files(FilesOf::Snapshot(&full.id), "/", 0, 10).await), ErrorCode::NotFound);
    // A service that was killed leaves one to the next, which knows of none.
    service.crash().await;
    assert_eq!((service.keys().len(), service.vmms().len()), (0, 0), "{}", service.log());
    let client = service.client().clone();
    let of = FilesOf::Snapshot(&files.id);
    let content = whole(client.read_file(of, "/workspace/deep/data", None, None).await.expect("opened")).await;
    assert_eq!(hex(&content), digest);
    service.look();
    assert_eq!(service.vmms().len(), 1);
    host::until("nobody reads it any more", PATIENCE, async || service.keys().is_empty()).await;
    // Nothing of what was saved was touched, and a machine starts from it.
    let back = client.restore(&files.id, &Default::default(), "back").await.expect("restored");
    let back = service.attach((&back.machine).into());
    assert_eq!(
        back.text("sha256sum /workspace/deep/data; cat /workspace/late").await,
        format!("{digest}  /workspace/deep/data\nlate\n")
    );
    client.read_file(of, "/workspace/late", None, None).await.expect("opened");
    service.look();
    client.delete_snapshot(&files.id).await.expect("deleted");
    service.finish().await;
}
