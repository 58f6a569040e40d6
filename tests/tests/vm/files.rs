//! Files of any name and size.

use std::time::Duration;

use bytes::Bytes;
use mainbrella_tests::{Machine, Service, host};
use mainbrella_types::ErrorCode;
use rustix::process::Signal;
use sha2::{Digest, Sha256};

use crate::code;

#[tokio::test(flavor = "multi_thread")]
async fn odd_names_are_names_like_any_other() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    let long = "n".repeat(255);
    let names =
        ["re\"port", "a\nb", "x\\", "é", long.as_str(), "-rf", " ", "a b&c=d?e#f%41+;$(id)`id`'", "\u{1F980}", "..."];
    for name in names {
        let data = format!("data of {name}");
        m.write(&format!("/tmp/odd/{name}"), data.clone()).await.unwrap_or_else(|e| panic!("{name:?}: {e:?}"));
        assert_eq!(m.read(&format!("/tmp/odd/{name}")).await.expect("read"), data.as_bytes(), "{name:?}");
        let seen = m.run(&Machine::argv_order(&["cat", "--", &format!("/tmp/odd/{name}")])).await.expect("cat");
        assert_eq!(seen.stdout, data.as_bytes(), "{name:?}: the machine sees the same name");
    }
    let listed = m.sh("ls -A --zero /tmp/odd").await;
    assert_eq!(listed.stdout.split(|b| *b == 0).filter(|n| !n.is_empty()).count(), names.len());

    let out = m.sh("cd /tmp/odd && f=$(printf 'bad\\377\\n.') && echo x > \"${f%.}\" && ls --zero | tail -z -n +1 | grep -zc bad").await;
    assert_eq!(out.text(), "1\n", "{}", out.error());
    let raw = format!(
        "{}/v1/machines/{}/files/content?createdAt={}&path=/tmp/odd/bad%FF%0A",
        service.url(),
        m.name.id,
        m.name.created_at
    );
    let answer = reqwest::Client::new().get(raw).bearer_auth(service.admin_key()).send().await.expect("send");
    assert_eq!(answer.status(), 400, "a path is UTF-8");
    assert!(answer.text().await.expect("body").contains("invalid_request"));

    assert_eq!(code(m.write(&format!("/tmp/{}", "n".repeat(256)), "x").await), ErrorCode::InvalidRequest);
    assert_eq!(code(m.write("relative", "x").await), ErrorCode::InvalidRequest);
    assert_eq!(code(m.write("/tmp/a\0b", "x").await), ErrorCode::InvalidRequest);
    assert_eq!(code(m.read("/tmp/none").await), ErrorCode::FileNotFound);
    assert_eq!(code(m.read("/tmp").await), ErrorCode::FileError);
    assert_eq!(code(m.write("/tmp", "x").await), ErrorCode::FileError);
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_plain_file_is_refused_at_once() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    m.text(
        "cd /srv; mkfifo fifo; ln -s loop loop; ln -s a b; ln -s b a; ln -s /nowhere dangling; ln -s fifo to-fifo; \
        python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"/srv/socket\")'",
    )
    .await;
    let begin = std::time::Instant::now();
    for path in ["/srv/fifo", "/srv/to-fifo", "/srv/socket", "/dev/null", "/dev/zero", "/dev/vda", "/dev/tty"] {
        let refusal = m.read(path).await.expect_err(path);
        assert_eq!(refusal.code(), Some(ErrorCode::FileError), "{path}: {refusal:?}");
        assert!(
            path == "/srv/socket" || path == "/dev/tty" || refusal.to_string().contains("regular files"),
            "{refusal}"
        );
        assert_eq!(code(m.write(path, "x").await), ErrorCode::FileError, "{path}");
    }
    for path in ["/srv/loop", "/srv/a", "/srv", "/", "/srv/..", "/srv/.", "/srv/", "/etc/passwd/x", "/etc/passwd/x/y"] {
        assert_eq!(code(m.read(path).await), ErrorCode::FileError, "{path}");
        assert_eq!(code(m.write(path, "x").await), ErrorCode::FileError, "{path}");
    }
    // A file that can be opened and not read.
    assert_eq!(code(m.read("/proc/self/mem").await), ErrorCode::FileError);
    assert_eq!(code(m.read("/srv/dangling").await), ErrorCode::FileNotFound);
    // Kernels let nobody make files there; nobody waits for it.
    for path in ["/proc/new", "/proc/self/mem", "/sys/new", "/sys/kernel/uevent_seqnum"] {
        assert!(m.write(path, "x").await.is_err(), "{path}");
    }
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    assert_eq!(m.text("ls -A /srv /dev | grep -c mainbrella || true").await, "0\n", "nothing half-made is left");
    // A path with dots in it is what the machine makes of it.
    m.write("/srv/../srv/./dots", "x").await.expect("write");
    assert_eq!(m.read("/srv/dots").await.expect("read"), b"x");

    let options = mainbrella_client::WriteOptions { exclusive: true, ..Default::default() };
    let exclusive = async |path: &'static str| {
        let bytes = futures::stream::once(async { Ok::<_, std::io::Error>(Bytes::from_static(b"new")) });
        m.client.write_file(&m.name, path, &options, mainbrella_client::Upload { bytes, length: Some(3) }).await
    };
    exclusive("/srv/first").await.expect("a new file");
    for path in ["/srv/first", "/srv/dangling", "/srv/fifo", "/srv/loop", "/srv"] {
        assert_eq!(code(exclusive(path).await), ErrorCode::FileExists, "{path}");
    }
    assert_eq!(m.read("/srv/first").await.expect("read"), b"new");
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_every_size_arrive_whole() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    for size in [0usize, 1, 65_535, 65_537, 1024 * 1024] {
        let data: Vec<u8> = (0..size).map(|i| (i * 31 % 251) as u8).collect();
        assert_eq!(m.write("/tmp/f", data.clone()).await.expect("write"), size as u64);
        assert!(m.read("/tmp/f").await.expect("read") == data, "{size} bytes");
        assert_eq!(m.text("stat -c '%s %a' /tmp/f").await, format!("{size} 644\n"));
    }
    // A file of /proc does not know its length.
    assert!(m.read("/proc/version").await.expect("read").starts_with(b"Linux version 6.12"));
    let huge = m.text("truncate -s 3G /tmp/sparse; stat -c %s /tmp/sparse").await;
    assert_eq!(huge, "3221225472\n");
    let mut part =
        service.client().read_file(&m.name, "/tmp/sparse", Some(3_000_000_000), Some(10)).await.expect("open");
    assert_eq!(part.size, Some(3_221_225_472));
    assert_eq!(part.chunk().await.expect("chunk").expect("some"), vec![0u8; 10]);
    assert!(part.chunk().await.expect("the end").is_none(), "no more than was asked for");

    // A large one passes through without staying.
    let length = 200 * 1024 * 1024u64;
    let piece = |at: u64| Bytes::from(vec![(at >> 20) as u8; 256 * 1024]);
    m.write_stream("/root/warm", 8 << 20, piece).await.expect("warm up");
    m.read("/root/warm").await.expect("warm up");
    let pid = service.pid();
    let before = host::status_kib(pid, "VmRSS");
    std::fs::write(format!("/proc/{pid}/clear_refs"), "5").expect("reset the peak");
    let begin = std::time::Instant::now();
    assert_eq!(m.write_stream("/root/big", length, piece).await.expect("write"), length);
    let up = begin.elapsed();
    let mut digest = Sha256::new();
    let mut download = service.client().read_file(&m.name, "/root/big", None, None).await.expect("open");
    let (begin, mut got) = (std::time::Instant::now(), 0u64);
    while let Some(bytes) = download.chunk().await.expect("chunk") {
        got += bytes.len() as u64;
        digest.update(&bytes);
    }
    eprintln!("200 MiB: up {up:?}, down {:?}", begin.elapsed());
    let mut expected = Sha256::new();
    (0..length / (256 * 1024)).for_each(|i| expected.update(piece(i * 256 * 1024)));
    assert_eq!((got, digest.finalize()), (length, expected.finalize()));
    let grown = host::status_kib(pid, "VmHWM").saturating_sub(before);
    assert!(grown <= 16 * 1024, "the service grew by {grown} KiB");
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gibibyte_passes_through_both_ways_without_staying() {
    const GIB: u64 = 1 << 30;
    let mut service = Service::start().await;
    let m = service.machine().await;
    let piece = |at: u64| Bytes::from(vec![(at >> 22) as u8 | 1; 256 * 1024]);
    m.write_stream("/root/big", 8 << 20, piece).await.expect("warm up");
    m.read("/root/big").await.expect("warm up");
    m.text("truncate -s 1G /root/sparse").await;
    let pid = service.pid();
    let before = host::status_kib(pid, "VmRSS");
    std::fs::write(format!("/proc/{pid}/clear_refs"), "5").expect("reset the peak");
    let begin = std::time::Instant::now();
    assert_eq!(m.write_stream("/root/big", GIB, piece).await.expect("write"), GIB);
    let (up, begin) = (begin.elapsed(), std::time::Instant::now());
    let mut download = service.client().read_file(&m.name, "/root/sparse", None, None).await.expect("open");
    let mut got = 0u64;
    while let Some(bytes) = download.chunk().await.expect("chunk") {
        assert!(bytes.iter().all(|b| *b == 0));
        got += bytes.len() as u64;
    }
    eprintln!("1 GiB: up {up:?}, down {:?}", begin.elapsed());
    assert_eq!(got, GIB);
    let grown = host::status_kib(pid, "VmHWM").saturating_sub(before);
    assert!(grown <= 16 * 1024, "the service grew by {grown} KiB");
    // What arrived is what was sent: its size, and a look at its end and at places between.
    let look = "import os\nf = open('/root/big', 'rb')\nprint(os.fstat(f.fileno()).st_size)\n\
        for at in (0, (1 << 22) - 1, 1 << 22, 777 << 20, (1 << 30) - 1):\n  f.seek(at); print(f.read(1)[0] == (at >> 22) & 255 | 1)";
    let seen = m.run(&Machine::argv_order(&["python3", "-c", look])).await.expect("run");
    assert_eq!(seen.text(), "1073741824\nTrue\nTrue\nTrue\nTrue\nTrue\n", "{}", seen.error());
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_was_cut_off_changes_nothing() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    m.write("/srv/f", "before").await.expect("write");

    // The caller goes away.
    let slow = |m: &Machine| {
        let m = m.clone();
        tokio::spawn(async move {
            m.write_stream("/srv/f", 64 << 20, |_| {
                std::thread::sleep(Duration::from_millis(5));
                Bytes::from(vec![7u8; 64 * 1024])
            })
            .await
        })
    };
    let upload = slow(&m);
    tokio::time::sleep(Duration::from_millis(500)).await;
    upload.abort();
    let _ = upload.await;
    assert_eq!(m.read("/srv/f").await.expect("read"), b"before");

    // The service goes away.
    let upload = slow(&m);
    tokio::time::sleep(Duration::from_millis(500)).await;
    service.crash().await;
    assert!(upload.await.expect("joined").is_err());
    assert_eq!(m.read("/srv/f").await.expect("read"), b"before");
    host::until("no half of it is left", Duration::from_secs(15), async || m.text("ls -A /srv").await == "f\n").await;

    // The machine goes away.
    let upload = slow(&m);
    tokio::time::sleep(Duration::from_millis(500)).await;
    let begin = std::time::Instant::now();
    host::signal(service.only_vmm(), Signal::KILL);
    let error = upload.await.expect("joined").expect_err("cannot succeed");
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?} {error:?}", begin.elapsed());
    service.finish().await;
}
