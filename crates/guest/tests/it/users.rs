//! Commands of a user, and what belongs to one. Only root can make others of itself.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use mainbrella_guest_protocol::{GuestClient, pb};

use crate::support::{in_process, in_process_of, run, sh};

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn owner(path: &Path) -> (u32, u32) {
    let stat = path.symlink_metadata().unwrap();
    (stat.uid(), stat.gid())
}

fn open_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    dir
}

fn of(user: &str, request: pb::StartJobRequest) -> pb::StartJobRequest {
    pb::StartJobRequest { user: user.into(), ..request }
}

#[tokio::test]
async fn a_command_is_wholly_the_users() {
    if !is_root() {
        return;
    }
    let client = in_process().await;
    let who =
        "grep -E '^(Uid|Gid|Groups|CapEff|CapPrm):' /proc/self/status | tr -s '\\t ' ' '; echo $HOME $USER.$LOGNAME";
    let told = run(&client, of("12345:54321", sh("number", who))).await;
    let none = "CapPrm: 0000000000000000\nCapEff: 0000000000000000";
    let all = |id: u32| [id; 4].map(|id| id.to_string()).join(" ");
    let text = format!("Uid: {}\nGid: {}\nGroups: 54321 \n{none}\n/ .\n", all(12345), all(54321));
    assert_eq!(told.text(), text);
    let nobody =
        run(&client, of("nobody", sh("named", "id -u; id -un; echo $USER $LOGNAME; exec 2>&1; cat /etc/shadow"))).await;
    let text = nobody.text();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!((lines[0], lines[1], lines[2]), ("65534", "nobody", "nobody nobody"));
    assert!(lines[3].ends_with("Permission denied"), "{text}");
    // What the request says stands above what the user has.
    let mut own = of("nobody", sh("env", "echo $HOME $USER"));
    own.env = [("HOME", "/tmp"), ("USER", "me")].map(|(k, v)| (k.to_owned(), v.to_owned())).into_iter().collect();
    assert_eq!(run(&client, own).await.text(), "/tmp me\n");
    // Programs open their outputs again.
    let again = sh("again", "echo out >/dev/stdout; echo err >/dev/stderr; cat /dev/stdin");
    let again = run(&client, of("12345", pb::StartJobRequest { stdin: b"in".to_vec(), ..again })).await;
    assert_eq!((again.text().as_str(), again.stderr.as_slice()), ("out\nin", &b"err\n"[..]));
    // Its place is entered as the user.
    let closed = tempfile::tempdir().unwrap();
    std::fs::set_permissions(closed.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let mut request = of("12345", sh("closed", "true"));
    request.cwd = closed.path().as_os_str().as_bytes().to_vec();
    assert_eq!(run(&client, request).await.not_started, Some((libc::EACCES, "cwd".into())));
}

#[tokio::test]
async fn a_terminal_is_the_users() {
    if !is_root() {
        return;
    }
    let client = in_process().await;
    let size = pb::PtySize { cols: 80, rows: 24, ..Default::default() };
    let request = sh("tty", "stat -Lc %u /dev/stdin; echo again >$(tty); id -u");
    let request = of("12345", pb::StartJobRequest { pty: size.into(), ..request });
    assert_eq!(run(&client, request).await.text(), "12345\r\nagain\r\n12345\r\n");
}

#[tokio::test]
async fn who_is_not_there_runs_nothing() {
    let client = in_process().await;
    let started = |id: &str, user: &str| run(&client, of(user, sh(id, "true")));
    for (id, user, stage) in [("a", "no-such-user", "user"), ("b", "0:no-such-group", "group")] {
        assert_eq!(started(id, user).await.not_started, Some((libc::ENOENT, stage.into())));
    }
    for bad in ["a b", ":", "a:b:c", "-x", "4:"] {
        let error = client.streams().run_job(of(bad, sh("bad", "true"))).await.map(|_| ()).unwrap_err();
        assert_eq!(error.code, connectrpc::ErrorCode::InvalidArgument, "{bad}");
    }
    let default = in_process_of("no-such-user").await;
    assert_eq!(run(&default, sh("a", "true")).await.not_started, Some((libc::ENOENT, "user".into())));
    // One who names another user is not kept from it.
    if is_root() {
        assert_eq!(run(&default, of("0", sh("b", "id -u"))).await.text(), "0\n");
    } else {
        assert_eq!(started("c", "0").await.not_started, Some((libc::EPERM, "user".into())));
    }
}

#[tokio::test]
async fn output_may_go_to_a_file() {
    let client = in_process().await;
    let dir = open_dir();
    let file = dir.path().join("log");
    let to = |id: &str, path: &Path, script: &str| pb::StartJobRequest {
        output_file: path.as_os_str().as_bytes().to_vec(),
        ..sh(id, script)
    };
    let told = run(&client, to("one", &file, "echo out; echo err >&2; exit 3")).await;
    assert_eq!((told.code(), told.stdout.len(), told.stderr.len(), told.gaps.len()), (Some(3), 0, 0, 0));
    let with_input = pb::StartJobRequest { stdin: b"in\n".to_vec(), ..to("two", &file, "cat") };
    assert_eq!(run(&client, with_input).await.code(), Some(0));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "out\nerr\nin\n", "appended, in order");
    // What is no file of content is refused and not waited for.
    let fifo = dir.path().join("fifo");
    let name = std::ffi::CString::new(fifo.as_os_str().as_bytes()).unwrap();
    // SAFETY: the path is a C string that outlives the call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    std::os::unix::fs::symlink(&file, dir.path().join("link")).unwrap();
    for (id, path, errno) in [
        ("fifo", fifo.as_path(), libc::ENXIO),
        ("null", Path::new("/dev/null"), libc::EINVAL),
        ("link", &dir.path().join("link"), libc::ELOOP),
        ("dir", dir.path(), libc::EISDIR),
        ("none", &dir.path().join("no/such"), libc::ENOENT),
    ] {
        let told = run(&client, to(id, path, "echo lost")).await;
        assert_eq!(told.not_started, Some((errno, "output".into())), "{id}");
    }
    let bad = client.streams().run_job(to("bad", Path::new("log"), "true")).await.map(|_| ()).unwrap_err();
    assert_eq!(bad.code, connectrpc::ErrorCode::InvalidArgument);
    if is_root() {
        let own = dir.path().join("own");
        assert_eq!(run(&client, of("12345:7", to("own", &own, "id -u"))).await.code(), Some(0));
        assert_eq!((owner(&own), std::fs::read_to_string(&own).unwrap().as_str()), ((12345, 7), "12345\n"));
        // One that is there keeps its owner.
        run(&client, of("12345:7", to("there", &file, "echo more"))).await;
        assert_eq!(owner(&file), (0, 0));
    }
}

async fn write(client: &GuestClient, path: &Path) {
    let path = path.as_os_str().as_bytes().to_vec();
    let start = pb::WriteFileStart { path, create_parents: true, ..Default::default() };
    let messages = [
        pb::WriteFileRequest { start: start.into(), ..Default::default() },
        pb::WriteFileRequest { data: b"content".to_vec(), finish: true, ..Default::default() },
    ];
    client.streams().write_file(futures::stream::iter(messages)).await.unwrap();
}

async fn unpack(client: &GuestClient, path: &Path, archive: &[u8], keep_owners: bool) {
    let path = path.as_os_str().as_bytes().to_vec();
    let start = pb::UnpackTreeStart { path, keep_owners, ..Default::default() };
    let messages = [
        pb::UnpackTreeRequest { start: start.into(), ..Default::default() },
        pb::UnpackTreeRequest { data: archive.to_vec(), finish: true, ..Default::default() },
    ];
    client.streams().unpack_tree(futures::stream::iter(messages)).await.unwrap();
}

#[tokio::test]
async fn what_is_written_belongs_to_the_images_user() {
    if !is_root() {
        return;
    }
    let client = in_process_of("12345:54321").await;
    let user = (12345, 54321);
    let dir = tempfile::tempdir().unwrap();
    let at = |path: &str| dir.path().join(path);
    write(&client, &at("made/deep/file")).await;
    for made in ["made", "made/deep", "made/deep/file"] {
        assert_eq!(owner(&at(made)), user, "{made}");
    }
    assert_eq!(owner(dir.path()), (0, 0), "what was there keeps its owner");
    std::fs::write(at("old"), "old").unwrap();
    std::os::unix::fs::lchown(at("old"), Some(7), Some(8)).unwrap();
    write(&client, &at("old")).await;
    assert_eq!(owner(&at("old")), (7, 8));
    let path = at("dirs/inner").as_os_str().as_bytes().to_vec();
    let request = pb::MakeDirRequest { path, recursive: true, mode: 0o750, ..Default::default() };
    client.rpc().make_dir(request).await.unwrap();
    assert_eq!((owner(&at("dirs")), owner(&at("dirs/inner"))), (user, user));

    // A tree with owners of its own.
    let from = at("from");
    std::fs::create_dir_all(from.join("sub")).unwrap();
    std::fs::write(from.join("sub/file"), "x").unwrap();
    std::os::unix::fs::symlink("file", from.join("sub/link")).unwrap();
    for (path, uid) in [("sub", 21), ("sub/file", 22), ("sub/link", 23)] {
        std::os::unix::fs::lchown(from.join(path), Some(uid), Some(uid + 100)).unwrap();
    }
    std::fs::set_permissions(from.join("sub/file"), std::fs::Permissions::from_mode(0o4755)).unwrap();
    let request = pb::PackTreeRequest { path: from.as_os_str().as_bytes().to_vec(), ..Default::default() };
    let mut stream = client.streams().pack_tree(request).await.unwrap();
    let mut archive = Vec::new();
    while let Some(chunk) = stream.message::<pb::TreeChunk>().await.unwrap() {
        archive.extend_from_slice(chunk.view().data);
    }
    unpack(&client, &at("plain/tree"), &archive, false).await;
    for made in ["plain", "plain/tree", "plain/tree/sub", "plain/tree/sub/file", "plain/tree/sub/link"] {
        assert_eq!(owner(&at(made)), user, "{made}");
    }
    std::fs::create_dir_all(at("there/sub")).unwrap();
    unpack(&client, &at("there"), &archive, false).await;
    assert_eq!((owner(&at("there")), owner(&at("there/sub"))), ((0, 0), (0, 0)), "directories that were there");
    assert_eq!(owner(&at("there/sub/file")), user);
    unpack(&client, &at("kept/tree"), &archive, true).await;
    for (path, uid) in [("sub", 21), ("sub/file", 22), ("sub/link", 23)] {
        assert_eq!(owner(&at("kept/tree").join(path)), (uid, uid + 100), "{path}");
    }
    assert_eq!(owner(&at("kept")), (0, 0));
    let mode = at("kept/tree/sub/file").metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o4755);
}
