//! Whole trees, signed URLs, and `cp -r`.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::StreamExt as _;
use mainbrella_client::api::{CreateFileUrl, TreeWritten, UrlMethod};
use mainbrella_client::{Client, ClientError, Download, Upload};
use mainbrella_tests::{Machine, Service, host, program};
use mainbrella_tree::{Owners, PackOptions, Packer, UnpackOptions, Unpacker};
use mainbrella_types::ErrorCode;

use crate::code;

/// Checksums, kinds, modes, times and targets of everything in a tree, however it is named.
const FINGERPRINT: &str = "import hashlib, os, stat, sys
root = os.fsencode(sys.argv[1])
for at, dirs, files in os.walk(root):
    for name in sorted(dirs + files):
        path = os.path.join(at, name)
        s = os.lstat(path)
        data = b''
        if stat.S_ISLNK(s.st_mode): data = os.readlink(path)
        elif stat.S_ISREG(s.st_mode): data = hashlib.sha256(open(path, 'rb').read()).hexdigest().encode()
        mtime = 0 if stat.S_ISLNK(s.st_mode) else int(s.st_mtime)
        links = 1 if stat.S_ISDIR(s.st_mode) else s.st_nlink
        print(os.path.relpath(path, root), oct(s.st_mode), mtime, links, data)
";

/// Makes a tree with links, modes and odd names.
const BUILD: &str = "import os, sys
os.makedirs(sys.argv[1]); os.chdir(sys.argv[1])
for n, name in enumerate([b're\"port', b'a\\nb', b'x\\\\', 'é'.encode(), b'\\xff\\xfe', b'-rf', b' ', b'...', b'n' * 255]):
    os.mkdir(b'd' + name[:250])
    with open(os.path.join(b'd' + name[:250], name), 'wb') as f: f.write(bytes([n]) * (n * 70001))
os.link(b'd-rf/-rf', 'hard'); os.symlink('../outside', 'dangling'); os.symlink('d-rf', 'to-dir')
open('script', 'w').write('x'); os.chmod('script', 0o751); open('empty', 'w').close()
os.makedirs('/'.join(['deep'] * 100)); open('/'.join(['deep'] * 100) + '/f', 'w').write('bottom')
for name in ['script', 'd-rf', 'empty']: os.utime(name, (1, 1000000007))
os.chmod('d ', 0o500)
";

async fn lines(m: &Machine, path: &str) -> Vec<String> {
    m.write("/tmp/fingerprint.py", FINGERPRINT).await.expect("write");
    let out = m.text(&format!("python3 /tmp/fingerprint.py {path}")).await;
    let mut lines: Vec<String> = out.lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

async fn whole(mut download: Download) -> Result<Vec<u8>, ClientError> {
    let mut all = Vec::new();
    while let Some(bytes) = download.chunk().await? {
        all.extend_from_slice(&bytes);
    }
    Ok(all)
}

async fn upload(m: &Machine, path: &str, archive: Vec<u8>) -> Result<TreeWritten, ClientError> {
    let bytes = futures::stream::iter(
        archive.chunks(100_000).map(|c| Ok::<_, io::Error>(Bytes::copy_from_slice(c))).collect::<Vec<_>>(),
    );
    m.client.upload_tree(&m.name, path, Upload { bytes, length: None }).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tree_comes_back_the_same_here_and_in_another_machine() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    m.write("/tmp/build.py", BUILD).await.expect("write");
    m.text("python3 /tmp/build.py /srv/tree && ln -s tree /srv/alias").await;
    let before = lines(&m, "/srv/tree").await;
    assert!(before.len() > 120, "{}", before.len());
    let archive = whole(m.client.download_tree(&m.name, "/srv/alias").await.expect("download")).await.expect("whole");
    // Through a file system of the host and back into another place of the machine.
    let here = tempfile::tempdir().expect("temp dir");
    let options = UnpackOptions { owners: Owners::Unpacker, mode_mask: 0o7777, own_root: true };
    let mut unpacker = Unpacker::new(std::fs::File::open(here.path()).expect("open").into(), options);
    unpacker.push(&archive).expect("unpacked");
    unpacker.finish().expect("whole");
    let mut packer = Packer::open(rustix::fs::CWD, here.path().as_os_str().as_encoded_bytes(), PackOptions::default())
        .expect("packer");
    let mut again = Vec::new();
    while let Some(piece) = packer.next(1 << 20).expect("packed") {
        again.extend(piece);
    }
    let done = upload(&m, "/srv/made/for/it", again).await.expect("upload");
    assert_eq!((done.entries, done.skipped), (before.len() as u64 + 1, 0));
    assert_eq!(lines(&m, "/srv/made/for/it").await, before);
    // The machine's own tar makes and reads the same.
    let tarred = m.client.read_file(&m.name, "/srv/t.tar", None, None);
    m.text("cd /srv/tree && tar -cf /srv/t.tar .").await;
    upload(&m, "/srv/theirs", whole(tarred.await.expect("open")).await.expect("read")).await.expect("upload");
    assert_eq!(lines(&m, "/srv/theirs").await, before);
    m.write("/srv/ours.tar", archive).await.expect("write");
    m.text("mkdir /srv/ours && tar --warning=no-unknown-keyword -xpf /srv/ours.tar -C /srv/ours").await;
    assert_eq!(lines(&m, "/srv/ours").await, before);
    // A single file, and what is not there.
    assert!(
        whole(m.client.download_tree(&m.name, "/srv/tree/script").await.expect("download"))
            .await
            .expect("whole")
            .starts_with(b"script\0")
    );
    assert_eq!(code(m.client.download_tree(&m.name, "/srv/none").await.map(drop)), ErrorCode::FileNotFound);
    assert_eq!(code(upload(&m, "/srv/tree/script", again_of(b"x")).await), ErrorCode::FileError);
    service.finish().await;
}

/// An archive of one file.
fn again_of(data: &[u8]) -> Vec<u8> {
    let here = tempfile::tempdir().expect("temp dir");
    std::fs::write(here.path().join("f"), data).expect("write");
    let path = here.path().join("f");
    let mut packer =
        Packer::open(rustix::fs::CWD, path.as_os_str().as_encoded_bytes(), PackOptions::default()).expect("packer");
    let mut all = Vec::new();
    while let Some(piece) = packer.next(1 << 20).expect("packed") {
        all.extend(piece);
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn archives_that_mean_harm_or_are_cut_stay_inside() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    m.text("mkdir -p /srv/box && ln -s /etc /srv/box/out && ln -s .. /srv/box/up").await;
    m.write(
        "/tmp/evil.py",
        "import io, sys, tarfile
def archive(*entries):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode='w') as t:
        for name, kind, link in entries:
            i = tarfile.TarInfo(name); i.type = kind; i.linkname = link
            data = b'evil' if kind == tarfile.REGTYPE else b''
            i.size = len(data); t.addfile(i, io.BytesIO(data))
    return out.getvalue()
F, L, H = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
open('/tmp/0', 'wb').write(archive(('../escaped', F, '')))
open('/tmp/1', 'wb').write(archive(('out/escaped', F, '')))
open('/tmp/2', 'wb').write(archive(('up/escaped', F, '')))
open('/tmp/3', 'wb').write(archive(('l', L, '/srv'), ('l/escaped', F, '')))
open('/tmp/4', 'wb').write(archive(('h', H, '../../etc/passwd')))
open('/tmp/5', 'wb').write(archive(('/etc/inside', F, ''), ('out', F, '')))
",
    )
    .await
    .expect("write");
    m.text("python3 /tmp/evil.py").await;
    for n in 0..5 {
        let archive = m.read(&format!("/tmp/{n}")).await.expect("read");
        assert_eq!(code(upload(&m, "/srv/box", archive).await), ErrorCode::InvalidRequest, "{n}");
    }
    upload(&m, "/srv/box", m.read("/tmp/5").await.expect("read"))
        .await
        .expect("names at the root are names in the tree");
    assert_eq!(
        m.text("find / -xdev -name 'escaped*' -o -xdev -name inside | sort; cat /srv/box/out").await,
        "/srv/box/etc/inside\nevil"
    );
    // Cut at the source: an error, and no half of a file.
    let archive = again_of(&vec![7; 500_000]);
    assert_eq!(code(upload(&m, "/srv/cut", archive[..300_000].to_vec()).await), ErrorCode::InvalidRequest);
    assert_eq!(m.text("ls -A /srv/cut").await, "");
    let body = futures::stream::iter([Ok(Bytes::from(archive[..300_000].to_vec()))]).chain(futures::stream::pending());
    let machine = m.clone();
    let lost = tokio::spawn(async move {
        machine.client.upload_tree(&machine.name, "/srv/cut", Upload { bytes: body, length: None }).await
    });
    tokio::time::sleep(Duration::from_millis(700)).await;
    lost.abort();
    host::until("no half of a file", Duration::from_secs(15), async || m.text("ls -A /srv/cut").await.is_empty()).await;
    // A full disk is said.
    m.text("mount -t tmpfs -o size=1m none /mnt").await;
    assert_eq!(code(upload(&m, "/mnt", again_of(&vec![7; 3_000_000])).await), ErrorCode::GuestDiskFull);
    assert_eq!(m.text("ls -A /mnt; umount /mnt").await, "");
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_mebibytes_of_tree_pass_through_without_staying() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    m.text("mkdir /root/tree && cd /root/tree && head -c 8388608 /dev/urandom > seed && for n in $(seq 25); do cp seed $n; done && mkdir small && cd small && for n in $(seq 500); do echo $n > $n; done").await;
    // Warm up, then measure.
    whole(m.client.download_tree(&m.name, "/root/tree/small").await.expect("download")).await.expect("whole");
    let pid = service.pid();
    let before = host::status_kib(pid, "VmRSS");
    std::fs::write(format!("/proc/{pid}/clear_refs"), "5").expect("reset the peak");
    let begin = Instant::now();
    let mut download = m.client.download_tree(&m.name, "/root/tree").await.expect("download");
    let file = tempfile::NamedTempFile::new().expect("temp file");
    let mut total = 0;
    {
        let mut out = io::BufWriter::new(file.as_file());
        while let Some(bytes) = download.chunk().await.expect("chunk") {
            total += bytes.len() as u64;
            io::Write::write_all(&mut out, &bytes).expect("write");
        }
        io::Write::flush(&mut out).expect("flush");
    }
    let down = begin.elapsed();
    assert!(total > 26 * 8_388_608, "{total}");
    m.text("rm -rf /root/again").await;
    let begin = Instant::now();
    let bytes = tokio_util::io::ReaderStream::with_capacity(
        tokio::fs::File::open(file.path()).await.expect("open"),
        256 * 1024,
    );
    let done = m.client.upload_tree(&m.name, "/root/again", Upload { bytes, length: None }).await.expect("upload");
    eprintln!("{total} bytes of tree: down {down:?}, up {:?}", begin.elapsed());
    assert_eq!(done.entries, 528);
    let grown = host::status_kib(pid, "VmHWM").saturating_sub(before);
    assert!(grown <= 16 * 1024, "the service grew by {grown} KiB");
    assert_eq!(m.text("cd /root && diff -r tree again && echo same").await, "same\n");
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signed_url_goes_up_and_down_and_ends_with_what_it_hangs_on() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    let http = reqwest::Client::new();
    let make = async |client: &Client, path: &str, method, seconds| {
        let body = CreateFileUrl { path: path.into(), method, expires_in_seconds: Some(seconds), max_bytes: None };
        client.create_file_url(&m.name, &body).await.expect("a URL").url
    };
    let data: Vec<u8> = (0..3_000_000u32).map(|i| (i % 251) as u8).collect();
    let up = make(service.client(), "/srv/signed/\u{e9} \"x\"", UrlMethod::Put, 600).await;
    let answer = http.put(&up).body(data.clone()).send().await.expect("send");
    assert_eq!((answer.status().as_u16(), answer.text().await.expect("body")), (200, "{\"size\":3000000}".to_owned()));
    let down = make(service.client(), "/srv/signed/\u{e9} \"x\"", UrlMethod::Get, 600).await;
    assert!(http.get(&down).send().await.expect("send").bytes().await.expect("body") == data);
    // The key that asked for it is revoked; time passes; a letter is changed; another method is used.
    let key = service
        .client()
        .create_key(&mainbrella_client::api::CreateKey {
            name: "ci".into(),
            role: mainbrella_client::api::KeyRole::User,
        })
        .await
        .expect("key");
    let by_key = make(&service.client_for(&key.secret), "/etc/hostname", UrlMethod::Get, 600).await;
    let soon = make(service.client(), "/etc/hostname", UrlMethod::Get, 10).await;
    let status = async |url: &str| http.get(url).send().await.expect("send").status().as_u16();
    assert_eq!((status(&by_key).await, status(&soon).await), (200, 200));
    service.client().revoke_key(&key.id).await.expect("revoke");
    assert_eq!(status(&by_key).await, 401);
    assert_eq!(status(&up).await, 401);
    let mut changed = down.clone();
    let last = if changed.pop() == Some('A') { 'B' } else { 'A' };
    changed.insert(changed.rfind('.').expect("a seal") + 1, last);
    assert_eq!(status(&changed).await, 401);
    tokio::time::sleep(Duration::from_secs(11)).await;
    assert_eq!(status(&soon).await, 401);
    // A restart does not end it; the end of the machine does, also when another is in the slot.
    service.crash().await;
    assert_eq!(status(&down).await, 200);
    let mut body = mainbrella_tests::machine_body();
    body.slot = Some(m.name.id.clone());
    m.stop().await;
    assert_eq!(status(&down).await, 409);
    let other = service.create(&body).await.expect("another");
    other.write("/srv/signed/\u{e9} \"x\"", "not for you").await.expect("write");
    let answer = http.get(&down).send().await.expect("send");
    assert_eq!(answer.status(), 409);
    assert!(answer.text().await.expect("body").contains("generation_mismatch"));
    let token = down.rsplit('/').next().expect("a token").to_owned();
    assert!(!service.log().contains(&token[..40]), "no token in the log");
    service.finish().await;
}

fn cli(url: &str, data: &Path, arguments: &[&str]) -> std::process::Output {
    let mut command = Command::new(program());
    for (name, _) in std::env::vars_os().filter(|(n, _)| n.as_encoded_bytes().starts_with(b"MAINBRELLA_")) {
        command.env_remove(name);
    }
    command.env("MAINBRELLA_API_URL", url).arg("--data-dir").arg(data).args(arguments).stdin(Stdio::null());
    command.output().expect("run")
}

#[tokio::test(flavor = "multi_thread")]
async fn cp_r_goes_both_ways_and_ls_and_watch_tell() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    let (url, data) = (service.url(), service.data().to_owned());
    let run = move |arguments: Vec<String>| {
        let (url, data) = (url.clone(), data.clone());
        tokio::task::spawn_blocking(move || {
            let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
            cli(&url, &data, &words)
        })
    };
    let ok = async |words: &[&str]| {
        let out = run(words.iter().map(|w| (*w).to_owned()).collect()).await.expect("joined");
        assert!(out.status.success(), "{words:?}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    m.write("/tmp/build.py", BUILD).await.expect("write");
    m.text("python3 /tmp/build.py /srv/tree").await;
    let before = lines(&m, "/srv/tree").await;
    let here = tempfile::tempdir().expect("temp dir");
    let place = here.path().to_str().expect("UTF-8").to_owned();
    let id = m.name.id.as_str();
    // Into a directory that is there it keeps its name; otherwise it takes the new one.
    ok(&["cp", "-r", &format!("{id}:/srv/tree"), &place]).await;
    ok(&["cp", "-r", &format!("{id}:/srv/tree/"), &format!("{place}/copy")]).await;
    assert!(here.path().join("tree/script").is_file() && here.path().join("copy/script").is_file());
    assert_eq!(std::fs::metadata(here.path().join("tree/script")).expect("there").permissions().mode() & 0o7777, 0o751);
    assert_eq!(std::fs::read_dir(here.path()).expect("listed").count(), 2, "nothing half-made is left");
    ok(&["cp", "-r", &format!("{place}/tree"), &format!("{id}:/srv/back/")]).await;
    ok(&["cp", "-r", &format!("{place}/copy"), &format!("{id}:/srv/exact")]).await;
    assert_eq!(lines(&m, "/srv/back/tree").await, before);
    assert_eq!(lines(&m, "/srv/exact").await, before);
    // A second time over the first; a file with -r is a file.
    ok(&["cp", "-r", &format!("{place}/copy"), &format!("{id}:/srv/exact")]).await;
    assert_eq!(lines(&m, "/srv/exact").await, before);
    ok(&["cp", "-r", &format!("{place}/tree/script"), &format!("{id}:/srv/alone")]).await;
    ok(&["cp", "-r", &format!("{id}:/srv/alone"), &format!("{place}/alone")]).await;
    assert_eq!(std::fs::read(here.path().join("alone")).expect("there"), b"x");
    let out = run(vec!["cp".into(), "-r".into(), "-n".into(), format!("{id}:/srv/tree"), place.clone()])
        .await
        .expect("joined");
    assert_eq!(out.status.code(), Some(6), "{}", String::from_utf8_lossy(&out.stderr));
    // Listing.
    let names = ok(&["ls", &format!("{id}:/srv/tree")]).await;
    assert!(
        names.contains("script\n")
            && names.contains("to-dir@\n")
            && names.contains("a\\nb")
            && names.contains("d-rf/\n"),
        "{names}"
    );
    let long = ok(&["ls", "-l", "-d", &format!("{id}:/srv/tree/script")]).await;
    assert!(long.contains("- 0751") && long.contains("1 B") && long.contains("2001-09-09T01:46:47Z"), "{long}");
    // Watching, as a program would.
    let watcher = run(vec!["--json".into(), "watch".into(), format!("{id}:/srv/back")]);
    tokio::time::sleep(Duration::from_secs(2)).await;
    m.text("touch /srv/back/new && rm -r /srv/back").await;
    let out = tokio::time::timeout(Duration::from_secs(30), watcher).await.expect("it ends").expect("joined");
    let told = String::from_utf8_lossy(&out.stdout);
    assert!(
        out.status.success()
            && told.contains(r#"{"type":"created","path":"/srv/back/new"}"#)
            && told.trim_end().ends_with(r#"{"type":"ended","path":"/srv/back"}"#),
        "{told}"
    );
    service.finish().await;
}
