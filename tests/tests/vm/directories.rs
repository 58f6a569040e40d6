//! Directories by the rules of the contract, and what happens in them.

use std::time::{Duration, Instant};

use mainbrella_client::api::{
    ChangeMode, FileEntry, FileEventType, FileType, MakeDirectory, MoveFile, RemoveFile, RemoveResult,
};
use mainbrella_client::{ClientError, Watch};
use mainbrella_tests::{Machine, Service, host};
use mainbrella_types::ErrorCode;
use rustix::process::Signal;

use crate::code;

async fn all(m: &Machine, path: &str, limit: u32) -> Vec<FileEntry> {
    let (mut entries, mut offset) = (Vec::new(), 0);
    loop {
        let page = m.client.list_files(&m.name, path, offset, limit).await.expect("list");
        assert!(page.entries.len() <= limit as usize);
        entries.extend(page.entries);
        match page.next_offset {
            Some(next) => offset = next,
            None => return entries,
        }
    }
}

async fn mkdir(m: &Machine, path: &str, recursive: bool) -> Result<FileEntry, ClientError> {
    m.client.make_directory(&m.name, &MakeDirectory { path: path.into(), recursive, mode: None }).await
}

async fn rename(m: &Machine, source: &str, destination: &str) -> Result<FileEntry, ClientError> {
    m.client.move_file(&m.name, &MoveFile { source: source.into(), destination: destination.into() }).await
}

async fn chmod(m: &Machine, path: &str, mode: &str) -> Result<FileEntry, ClientError> {
    m.client.change_mode(&m.name, &ChangeMode { path: path.into(), mode: mode.into() }).await
}

async fn remove(m: &Machine, path: &str, recursive: bool) -> Result<RemoveResult, ClientError> {
    m.client.remove_file(&m.name, &RemoveFile { path: path.into(), recursive }).await
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_entries_are_listed_in_order_and_no_name_is_hidden() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    m.text(
        "mkdir -p /srv/many && cd /srv/many && python3 -c \"
import os
for n in range(9990): open('f%d' % n, 'x').close()
for name in [b'\\xff\\xfe', b're\\\"port', b'a\\nb', b'x\\\\\\\\', 'é'.encode(), b'-rf', b' ', b'...', b'n' * 255, b'Z']:
    open(name, 'xb').close()
\"",
    )
    .await;
    let by_thousand = all(&m, "/srv/many", 1000).await;
    let by_others = all(&m, "/srv/many", 777).await;
    assert_eq!(by_thousand.len(), 10_000);
    assert_eq!(by_thousand, by_others);
    let seen = m.sh("LC_ALL=C ls -A --zero /srv/many | head -c 16000000").await;
    let mut names: Vec<&[u8]> = seen.stdout.split(|b| *b == 0).filter(|n| !n.is_empty()).collect();
    names.sort_unstable();
    let told: Vec<Vec<u8>> = by_thousand
        .iter()
        .map(|e| match &e.name_base64 {
            Some(text) => base64::Engine::decode(&base64::engine::general_purpose::STANDARD, text).expect("base64"),
            None => e.name.clone().into_bytes(),
        })
        .collect();
    assert!(told == names, "the machine sees the same names");
    let odd = by_thousand.iter().find(|e| e.name_base64.is_some()).expect("the one that is not UTF-8");
    assert_eq!((odd.name.as_str(), odd.path.as_str()), ("\u{fffd}\u{fffd}", "/srv/many/\u{fffd}\u{fffd}"));
    let begin = Instant::now();
    let done = remove(&m, "/srv/many", true).await.expect("remove");
    eprintln!("10,001 entries removed in {:?}", begin.elapsed());
    assert_eq!((done.removed, done.remaining_count), (10_001, 0));
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn links_names_and_modes_follow_the_contract() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    m.text("mkdir -p /srv/t/real && cd /srv/t && echo data > real/f && ln -s real link && ln -s nowhere dangling && ln -s / root && mkfifo fifo").await;
    // Looking: at the link itself, unless told otherwise. A listing goes through a link to a directory.
    let stat = |path: &'static str, follow| m.client.stat_file(&m.name, path, follow);
    let link = stat("/srv/t/link", false).await.expect("stat");
    assert_eq!((link.r#type, link.symlink_target.as_deref()), (FileType::Symlink, Some("real")));
    assert_eq!(stat("/srv/t/link", true).await.expect("stat").r#type, FileType::Directory);
    assert_eq!(stat("/srv/t/dangling", false).await.expect("stat").r#type, FileType::Symlink);
    assert_eq!(code(stat("/srv/t/dangling", true).await), ErrorCode::FileNotFound);
    assert_eq!(stat("/srv/t/fifo", false).await.expect("stat").r#type, FileType::Other);
    let names: Vec<String> = all(&m, "/srv/t/link", 10).await.into_iter().map(|e| e.path).collect();
    assert_eq!(names, ["/srv/t/link/f"]);
    let file = stat("/srv/t/real/f", false).await.expect("stat");
    let seen = m.text("stat -c '%s %a %u %g %Y' /srv/t/real/f").await;
    assert_eq!(
        seen,
        format!("{} {} {} {} {}\n", file.size, file.mode.trim_start_matches('0'), file.uid, file.gid, file.mtime)
    );
    // Making.
    assert_eq!(mkdir(&m, "/srv/t/new", false).await.expect("mkdir").mode, "0755");
    assert_eq!(code(mkdir(&m, "/srv/t/new", false).await), ErrorCode::FileExists);
    assert_eq!(code(mkdir(&m, "/srv/t/a/b", false).await), ErrorCode::FileNotFound);
    mkdir(&m, "/srv/t/a/b", true).await.expect("mkdir");
    mkdir(&m, "/srv/t/a/b", true).await.expect("there is fine");
    assert_eq!(code(mkdir(&m, "/srv/t/real/f", true).await), ErrorCode::FileExists);
    // Moving never overwrites, takes the link itself, and crosses file systems.
    m.text("cd /srv/t && echo other > g && mkdir empty").await;
    for taken in ["/srv/t/g", "/srv/t/empty", "/srv/t/dangling", "/srv/t/link"] {
        assert_eq!(code(rename(&m, "/srv/t/real/f", taken).await), ErrorCode::FileExists, "{taken}");
    }
    assert_eq!(m.text("cat /srv/t/g /srv/t/real/f").await, "other\ndata\n");
    assert_eq!(rename(&m, "/srv/t/link", "/srv/t/link2").await.expect("move").symlink_target.as_deref(), Some("real"));
    m.text("mkdir -p /mnt/other && mount -t tmpfs none /mnt/other && cd /srv/t && chmod 2750 real && ln real/f real/same && touch -d @1000000007 real/f").await;
    rename(&m, "/srv/t/real", "/mnt/other/moved").await.expect("move to another file system");
    let moved = m.text("cd /mnt/other/moved && stat -c '%a %h %Y' . f same && cat same && test ! -e /srv/t/real && ls -A /mnt/other").await;
    assert!(
        moved.starts_with("2750 ") && moved.contains("\n644 2 1000000007\n644 2 1000000007\ndata\nmoved\n"),
        "{moved}"
    );
    // A directory of the template is moved too, although the overlay cannot rename it.
    rename(&m, "/usr/share/zoneinfo", "/srv/zoneinfo").await.expect("move out of the template");
    assert_eq!(m.text("test ! -e /usr/share/zoneinfo && ls /srv/zoneinfo | head -1 | wc -l").await, "1\n");
    // Modes go through links.
    assert_eq!(chmod(&m, "/srv/t/g", "0640").await.expect("chmod").mode, "0640");
    m.text("ln -s g /srv/t/to-g").await;
    assert_eq!(chmod(&m, "/srv/t/to-g", "4711").await.expect("chmod").r#type, FileType::File);
    assert_eq!(m.text("stat -c %a /srv/t/g").await, "4711\n");
    // Removing takes the link itself, and nothing goes for the root.
    assert_eq!(remove(&m, "/srv/t/root", true).await.expect("remove").removed, 1);
    assert_eq!(code(remove(&m, "/srv/t", false).await), ErrorCode::FileError);
    for root in ["/", "//", "/.", "/..", "/srv/.."] {
        assert_eq!(code(remove(&m, root, true).await), ErrorCode::InvalidRequest, "{root}");
        assert_eq!(code(rename(&m, root, "/srv/x").await), ErrorCode::InvalidRequest);
        assert_eq!(code(chmod(&m, root, "0755").await), ErrorCode::InvalidRequest);
    }
    assert_eq!(remove(&m, "/srv/t", true).await.expect("remove").remaining_count, 0);
    assert_eq!(m.text("test ! -e /srv/t && ls / | grep -c usr").await, "1\n");
    m.text("umount /mnt/other").await;
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removal_that_goes_only_half_way_says_what_is_left() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    m.text("mkdir -p /srv/t/a/b /srv/t/mounted /srv/t/free && cd /srv/t && touch a/b/1 a/b/2 free/x && mount -t tmpfs none mounted && touch mounted/kept").await;
    let done = remove(&m, "/srv/t", true).await.expect("a result");
    assert_eq!(done.remaining, ["/srv/t/mounted", "/srv/t"], "{done:?}");
    assert_eq!((done.removed, done.remaining_count), (6, 2));
    assert_eq!(done.reason.as_deref(), Some("device or resource busy"));
    assert_eq!(m.text("cd /srv/t && find . | sort").await, ".\n./mounted\n./mounted/kept\n");
    m.text("umount /srv/t/mounted").await;
    // A file that may not be removed.
    let can = m.sh("touch /srv/t/immutable && chattr +i /srv/t/immutable").await;
    if can.raw.exit_code == 0 {
        m.text("mkdir -p /srv/t/x && touch /srv/t/x/y").await;
        let done = remove(&m, "/srv/t", true).await.expect("a result");
        assert_eq!(done.remaining, ["/srv/t/immutable", "/srv/t"], "{done:?}");
        assert_eq!((done.removed, done.reason.as_deref()), (3, Some("operation not permitted")));
        assert_eq!(code(remove(&m, "/srv/t/immutable", false).await), ErrorCode::FileError);
        m.text("chattr -i /srv/t/immutable").await;
    } else {
        eprintln!("this machine has no chattr: {}", can.error());
    }
    assert_eq!(remove(&m, "/srv/t", true).await.expect("remove").remaining_count, 0);
    // As deep as it gets, and no link is followed.
    m.text(
        "mkdir -p /srv/keep && touch /srv/keep/f && mkdir /srv/t && cd /srv/t && ln -s /srv/keep l && python3 -c \"
import os
for _ in range(3000): os.mkdir('d'); os.chdir('d')
\"",
    )
    .await;
    assert_eq!(remove(&m, "/srv/t", true).await.expect("remove").removed, 3002);
    assert_eq!(m.text("ls /srv/keep").await, "f\n");
    service.finish().await;
}

async fn until(watch: &mut Watch, kind: FileEventType, path: &str) -> Vec<(FileEventType, String, Option<String>)> {
    let mut seen = Vec::new();
    let wait = async {
        while let Some(event) = watch.next().await.expect("an event") {
            let last = event.r#type == kind && event.path == path;
            seen.push((event.r#type, event.path, event.new_path));
            if last {
                return true;
            }
        }
        false
    };
    let found = tokio::time::timeout(Duration::from_secs(30), wait).await;
    assert!(matches!(found, Ok(true)), "{kind:?} {path} was not told: {seen:?}");
    seen
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watched_tree_tells_renames_and_new_folders_and_ends_with_its_machine() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    m.text("mkdir -p /srv/w/old").await;
    let mut watch = m.client.watch_files(&m.name, "/srv/w", true).await.expect("watch");
    assert_eq!(watch.next().await.expect("an event").expect("ready").r#type, FileEventType::Ready);
    m.text("cd /srv/w && mkdir -p new/deep && echo 1 > new/deep/f && mv new renamed && echo 2 >> renamed/deep/f && mv old/../renamed/deep/f old/g && rm old/g && chmod 700 old").await;
    let seen = until(&mut watch, FileEventType::Attributes, "/srv/w/old").await;
    let has = |kind, path: &str, new: Option<&str>| {
        seen.iter().any(|(k, p, n)| *k == kind && p == path && n.as_deref() == new)
    };
    assert!(has(FileEventType::Created, "/srv/w/new", None), "{seen:?}");
    assert!(has(FileEventType::Renamed, "/srv/w/new", Some("/srv/w/renamed")), "{seen:?}");
    assert!(has(FileEventType::Renamed, "/srv/w/renamed/deep/f", Some("/srv/w/old/g")), "{seen:?}");
    assert!(has(FileEventType::Removed, "/srv/w/old/g", None), "{seen:?}");
    let created = seen.iter().filter(|(k, p, _)| *k == FileEventType::Created && p.ends_with("/deep")).count();
    assert_eq!(created, 1, "{seen:?}");
    // A folder that is made later is watched, and a slow writer is told again and again.
    m.text("mkdir /srv/w/later && sleep 0.3 && for n in 1 2 3; do echo $n >> /srv/w/later/log; sleep 0.2; done").await;
    let seen = until(&mut watch, FileEventType::Modified, "/srv/w/later/log").await;
    assert!(seen.contains(&(FileEventType::Created, "/srv/w/later".into(), None)), "{seen:?}");
    // A flood is told, or told as an overflow; either way the watch goes on.
    m.write(
        "/tmp/flood.py",
        "import os\nos.chdir('/srv/w/later')\nfor n in range(2000):\n    open('x', 'w').close()\n    os.remove('x')\n",
    )
    .await
    .expect("write");
    m.text("python3 /tmp/flood.py && sleep 1 && mkdir /srv/w/after").await;
    let seen = until(&mut watch, FileEventType::Created, "/srv/w/after").await;
    let missed = seen.iter().any(|(k, p, _)| *k == FileEventType::Overflow && p == "/srv/w");
    let told = seen.iter().filter(|(k, p, _)| *k == FileEventType::Removed && p == "/srv/w/later/x").count();
    assert!(missed || told == 2000, "{told} of 2000, and nothing of a gap");
    m.text("touch /srv/w/after/f").await;
    until(&mut watch, FileEventType::Created, "/srv/w/after/f").await;
    m.text("rm -r /srv/w").await;
    until(&mut watch, FileEventType::Ended, "/srv/w").await;
    assert!(watch.next().await.expect("the end").is_none());
    assert_eq!(code(m.client.watch_files(&m.name, "/srv/w", true).await), ErrorCode::FileNotFound);
    // The service is killed and started again: a watch is asked for anew. The machine dies: the watch says so.
    m.text("mkdir /srv/w").await;
    let mut lost = m.client.watch_files(&m.name, "/srv/w", true).await.expect("watch");
    lost.next().await.expect("an event");
    service.crash().await;
    assert!(lost.next().await.is_err(), "a killed service is no proper end");
    let mut watch = service.client().watch_files(&m.name, "/srv/w", true).await.expect("watch");
    watch.next().await.expect("an event");
    let begin = Instant::now();
    host::signal(service.only_vmm(), Signal::KILL);
    let error = loop {
        match watch.next().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("it ended as if all were well"),
            Err(e) => break e,
        }
    };
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
    assert_eq!(error.code(), Some(ErrorCode::MachineNotRunning), "{error:?}");
    service.finish().await;
}
