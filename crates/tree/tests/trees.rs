//! Trees there and back, other programs' archives, archives that mean harm.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use mainbrella_tree::{
    Owners, PackOptions, Packer, Removal, Step, UnpackOptions, Unpacked, Unpacker, Walk, remove, safe_parts,
};
use proptest::prelude::*;
use rustix::fs::CWD;

const PLAIN: UnpackOptions = UnpackOptions { owners: Owners::Unpacker, mode_mask: 0o7777, own_root: true };

fn open(path: &Path) -> OwnedFd {
    fs::File::open(path).unwrap().into()
}

fn pack(path: &Path, options: PackOptions) -> Vec<u8> {
    let mut packer = Packer::open(CWD, path.as_os_str().as_bytes(), options).unwrap();
    let mut all = Vec::new();
    while let Some(piece) = packer.next(10_000).unwrap() {
        assert!(piece.len() < 30_000, "pieces are bounded");
        all.extend(piece);
    }
    all
}

fn unpack(archive: &[u8], root: &Path, piece: usize) -> Result<Unpacked, mainbrella_tree::TreeError> {
    let mut unpacker = Unpacker::new(open(root), PLAIN);
    for piece in archive.chunks(piece) {
        unpacker.push(piece)?;
    }
    unpacker.finish()
}

/// Kind and mode, time, content or target, and the first name of a file that has several.
type Seen = (u32, i64, Vec<u8>, Option<Vec<u8>>);

/// Everything below a directory.
fn snapshot(root: &Path) -> BTreeMap<Vec<u8>, Seen> {
    let mut all = BTreeMap::new();
    let mut first: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
    let mut walk = Walk::new(open(root)).unwrap();
    while let Some(step) = walk.next().unwrap() {
        let Step::Entry(stat) = step else { continue };
        let (path, name) = (walk.path(), walk.name().to_vec());
        let mut content = Vec::new();
        let mut linked = None;
        match stat.st_mode & 0o170_000 {
            0o040_000 => walk.enter().unwrap(),
            0o120_000 => {
                content = rustix::fs::readlinkat(walk.dir(), name.as_slice(), Vec::new()).unwrap().into_bytes()
            }
            0o100_000 => {
                let fd = rustix::fs::openat(walk.dir(), name.as_slice(), rustix::fs::OFlags::RDONLY, 0.into()).unwrap();
                std::io::Read::read_to_end(&mut fs::File::from(fd), &mut content).unwrap();
                if stat.st_nlink > 1 {
                    linked = Some(first.entry(stat.st_ino).or_insert_with(|| path.clone()).clone());
                }
            }
            _ => {}
        }
        all.insert(path, (stat.st_mode, stat.st_mtime, content, linked));
    }
    all
}

fn build(root: &Path) {
    let odd = |name: &[u8]| root.join(OsStr::from_bytes(name));
    for (n, name) in [
        &b"re\"port"[..],
        b"a\nb",
        b"x\\",
        "é".as_bytes(),
        b"\xff\xfe",
        b"-rf",
        b" ",
        b"...",
        &[b'n'; 255],
        &[0xfe; 250],
    ]
    .iter()
    .enumerate()
    {
        fs::write(odd(name), vec![n as u8; n * 997]).unwrap();
        let dir = root.join("dir").join(OsStr::from_bytes(name));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(OsStr::from_bytes(name)), name).unwrap();
    }
    fs::write(root.join("empty"), "").unwrap();
    fs::write(root.join("blocks"), vec![7; 1024]).unwrap();
    fs::write(root.join("script"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(root.join("script"), fs::Permissions::from_mode(0o4751)).unwrap();
    fs::create_dir(root.join("closed")).unwrap();
    fs::write(root.join("closed/in"), "in").unwrap();
    symlink("../outside/\u{e9}", root.join("dangling")).unwrap();
    symlink(OsStr::from_bytes(&[b'/', 0xff].repeat(90)), root.join("long-link")).unwrap();
    fs::hard_link(root.join("blocks"), root.join("dir/same")).unwrap();
    fs::hard_link(root.join("blocks"), root.join("zz")).unwrap();
    let old = rustix::fs::Timestamps {
        last_access: rustix::fs::Timespec { tv_sec: -5, tv_nsec: 0 },
        last_modification: rustix::fs::Timespec { tv_sec: 1_000_000_007, tv_nsec: 0 },
    };
    for name in ["script", "closed", "dangling", "dir"] {
        rustix::fs::utimensat(CWD, root.join(name), &old, rustix::fs::AtFlags::SYMLINK_NOFOLLOW).unwrap();
    }
    fs::set_permissions(root.join("closed"), fs::Permissions::from_mode(0o500)).unwrap();
}

#[test]
fn a_tree_comes_back_as_it_was_in_pieces_of_any_size() {
    let from = tempfile::tempdir().unwrap();
    build(from.path());
    let archive = pack(from.path(), PackOptions::default());
    for piece in [1, 511, 512, 513, 100_000] {
        let to = tempfile::tempdir().unwrap();
        let done = unpack(&archive, to.path(), piece).unwrap();
        assert_eq!(snapshot(to.path()), snapshot(from.path()), "pieces of {piece}");
        assert_eq!((done.entries, done.skipped), (snapshot(to.path()).len() as u64 + 1, 0));
        // Over itself: everything is replaced, nothing is written through.
        unpack(&archive, to.path(), piece).unwrap();
        assert_eq!(snapshot(to.path()), snapshot(from.path()));
    }
}

#[test]
fn other_programs_read_ours_and_we_read_theirs() {
    let from = tempfile::tempdir().unwrap();
    build(from.path());
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("ours.tar");
    fs::write(&file, pack(from.path(), PackOptions::default())).unwrap();
    let theirs = tempfile::tempdir().unwrap();
    let status = Command::new("tar")
        .args(["--warning=no-unknown-keyword", "-xpf"])
        .arg(&file)
        .arg("-C")
        .arg(theirs.path())
        .status()
        .unwrap();
    assert!(status.success());
    assert_eq!(snapshot(theirs.path()), snapshot(from.path()), "GNU tar reads ours");
    let script = "import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter='tar')";
    let theirs = tempfile::tempdir().unwrap();
    let status = Command::new("python3").args(["-c", script]).arg(&file).arg(theirs.path()).status().unwrap();
    assert!(status.success());
    let names = |s: BTreeMap<Vec<u8>, _>| s.into_keys().collect::<Vec<_>>();
    assert_eq!(names(snapshot(theirs.path())), names(snapshot(from.path())), "Python reads ours");
    for format in ["gnu", "pax", "oldgnu"] {
        let out = Command::new("tar")
            .arg(format!("--format={format}"))
            .args(["-c", "-C"])
            .arg(from.path())
            .arg(".")
            .output()
            .unwrap();
        assert!(out.status.success());
        let to = tempfile::tempdir().unwrap();
        unpack(&out.stdout, to.path(), 4096).unwrap();
        assert_eq!(snapshot(to.path()), snapshot(from.path()), "{format}");
    }
    let sparse = files.path().join("sparse");
    fs::File::create(&sparse).unwrap().set_len(1 << 20).unwrap();
    for format in ["gnu", "pax"] {
        let out = Command::new("tar")
            .arg(format!("--format={format}"))
            .args(["-S", "-c", "-C"])
            .arg(files.path())
            .arg("sparse")
            .output()
            .unwrap();
        let error = unpack(&out.stdout, theirs.path(), 4096).unwrap_err();
        assert!(error.text.contains("holes"), "{error}");
    }
}

#[test]
fn a_tree_of_two_thousand_levels_is_packed_unpacked_and_removed() {
    let from = tempfile::tempdir().unwrap();
    let deep = ["d"; 1900].join("/");
    fs::create_dir_all(from.path().join(&deep)).unwrap();
    fs::write(from.path().join(&deep).join("f"), "bottom").unwrap();
    let before = fs::read_dir("/proc/self/fd").unwrap().count();
    let archive = pack(from.path(), PackOptions::default());
    let to = tempfile::tempdir().unwrap();
    unpack(&archive, to.path(), 100_000).unwrap();
    assert_eq!(fs::read(to.path().join(&deep).join("f")).unwrap(), b"bottom");
    let done = remove(open(to.path()).as_fd(), b"d", true, Instant::now() + Duration::from_secs(60)).unwrap();
    assert_eq!(done, Removal { removed: 1901, ..Removal::default() });
    assert!(fs::read_dir("/proc/self/fd").unwrap().count() <= before + 1);
}

#[test]
fn what_an_archive_cannot_hold_is_left_out_or_refused() {
    let from = tempfile::tempdir().unwrap();
    let fifo = from.path().join("fifo");
    rustix::fs::mknodat(CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    fs::write(from.path().join("f"), "x").unwrap();
    let to = tempfile::tempdir().unwrap();
    assert_eq!(unpack(&pack(from.path(), PackOptions::default()), to.path(), 512).unwrap().entries, 2);
    let strict = PackOptions { strict: true, ..PackOptions::default() };
    let mut packer = Packer::open(CWD, from.path().as_os_str().as_bytes(), strict).unwrap();
    assert!(std::iter::repeat_with(|| packer.next(1 << 20)).find_map(Result::err).is_some());
    assert_eq!(Packer::open(CWD, fifo.as_os_str().as_bytes(), PackOptions::default()).unwrap_err().stage, "not-a-file");
    let out = Command::new("tar").args(["-c", "-C"]).arg(from.path()).arg(".").output().unwrap();
    assert_eq!(unpack(&out.stdout, to.path(), 512).unwrap().skipped, 1);
    // A single file goes under its own name.
    let one = tempfile::tempdir().unwrap();
    unpack(&pack(&from.path().join("f"), PackOptions::default()), one.path(), 512).unwrap();
    assert_eq!(fs::read(one.path().join("f")).unwrap(), b"x");
}

#[test]
fn a_cut_archive_is_an_error_and_leaves_no_half_file() {
    let from = tempfile::tempdir().unwrap();
    fs::write(from.path().join("a"), vec![1; 5000]).unwrap();
    let archive = pack(from.path(), PackOptions::default());
    for cut in (0..archive.len() - 1024).step_by(100) {
        let to = tempfile::tempdir().unwrap();
        assert!(unpack(&archive[..cut], to.path(), 333).is_err(), "cut at {cut}");
        if let Ok(meta) = fs::metadata(to.path().join("a")) {
            assert_eq!(meta.len(), 5000, "cut at {cut}");
        }
    }
}

#[test]
fn removing_takes_links_themselves_and_says_what_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let soon = || Instant::now() + Duration::from_secs(60);
    let root = open(dir.path());
    fs::create_dir_all(dir.path().join("keep/sub")).unwrap();
    fs::write(dir.path().join("keep/f"), "x").unwrap();
    fs::create_dir(dir.path().join("t")).unwrap();
    symlink("../keep", dir.path().join("t/link")).unwrap();
    symlink("keep", dir.path().join("link")).unwrap();
    assert_eq!(remove(root.as_fd(), b"link", true, soon()).unwrap().removed, 1);
    assert_eq!(remove(root.as_fd(), b"t", true, soon()).unwrap().removed, 2);
    assert!(dir.path().join("keep/sub").is_dir() && dir.path().join("keep/f").is_file());
    assert_eq!(remove(root.as_fd(), b"keep", false, soon()).unwrap_err().errno, Some(rustix::io::Errno::NOTEMPTY));
    assert_eq!(remove(root.as_fd(), b"none", true, soon()).unwrap_err().errno, Some(rustix::io::Errno::NOENT));
    // Out of time: nothing is gone, all that is known of is told.
    let late = remove(root.as_fd(), b"keep", true, Instant::now()).unwrap();
    assert!(late.timed_out && late.removed == 0);
    assert_eq!(late.remaining, [&b"f"[..], b"sub", b""]);
    for n in 0..250 {
        fs::write(dir.path().join(format!("keep/sub/{n:03}")), "").unwrap();
    }
    let late = remove(root.as_fd(), b"keep", true, Instant::now()).unwrap();
    assert_eq!((late.remaining.len() as u64, late.remaining_count), (3, 3), "what was not entered is not counted");
    assert_eq!(remove(root.as_fd(), b"keep", true, soon()).unwrap().removed, 253);
}

#[test]
fn a_copy_appears_whole_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let soon = || Instant::now() + Duration::from_secs(60);
    fs::create_dir_all(dir.path().join("from")).unwrap();
    build(&dir.path().join("from"));
    std::os::unix::fs::chown(dir.path().join("from/empty"), Some(12), Some(34)).unwrap();
    let root = open(dir.path());
    mainbrella_tree::copy((root.as_fd(), b"from"), (root.as_fd(), b"to"), soon()).unwrap();
    assert_eq!(snapshot(&dir.path().join("to")), snapshot(&dir.path().join("from")));
    assert_eq!(fs::metadata(dir.path().join("to/empty")).unwrap().uid(), 12);
    mainbrella_tree::copy((root.as_fd(), b"from/dangling"), (root.as_fd(), b"l"), soon()).unwrap();
    assert!(dir.path().join("l").is_symlink());
    let exists = mainbrella_tree::copy((root.as_fd(), b"from"), (root.as_fd(), b"l"), soon()).unwrap_err();
    assert_eq!(exists.errno, Some(rustix::io::Errno::EXIST));
    let late = mainbrella_tree::copy((root.as_fd(), b"from"), (root.as_fd(), b"late"), Instant::now()).unwrap_err();
    assert_eq!(late.errno, Some(rustix::io::Errno::TIMEDOUT));
    let mut names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["from", "l", "to"], "nothing half-made is left");
}

/// A header block made by hand: a name and a target as given, whatever they are.
fn block(kind: u8, name: &[u8], link: &[u8], size: usize) -> Vec<u8> {
    let mut b = vec![0u8; 512];
    b[..name.len().min(100)].copy_from_slice(&name[..name.len().min(100)]);
    b[100..107].copy_from_slice(b"0000755");
    b[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
    b[156] = kind;
    b[157..157 + link.len().min(100)].copy_from_slice(&link[..link.len().min(100)]);
    b[257..265].copy_from_slice(b"ustar\x0000");
    b[148..156].copy_from_slice(b"        ");
    let sum: u32 = b.iter().map(|x| u32::from(*x)).sum();
    b[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    b
}

/// A folder with a sentinel and, in it, the root of a tree with a link of its own that leads out.
fn trap() -> (tempfile::TempDir, std::path::PathBuf) {
    let outer = tempfile::tempdir().unwrap();
    fs::write(outer.path().join("sentinel"), "untouched").unwrap();
    fs::create_dir(outer.path().join("victim")).unwrap();
    let root = outer.path().join("root");
    fs::create_dir(&root).unwrap();
    symlink("../victim", root.join("out")).unwrap();
    symlink(outer.path().join("victim"), root.join("abs")).unwrap();
    (outer, root)
}

fn outside(outer: &Path) -> Vec<(Vec<u8>, Seen)> {
    snapshot(outer).into_iter().filter(|(path, _)| path != b"root" && !path.starts_with(b"root/")).collect()
}

#[test]
fn known_ways_out_are_closed() {
    let file = |name: &[u8]| [block(b'0', name, b"", 4), [b"evil".as_slice(), &[0; 508]].concat()].concat();
    let ways = [
        file(b"../sentinel"),
        file(b"a/../../sentinel"),
        file(b"out/f"),
        file(b"abs/f"),
        [block(b'2', b"l", b"..", 0), file(b"l/sentinel")].concat(),
        [block(b'2', b"l", b"out", 0), file(b"l/f")].concat(),
        [block(b'2', b"l", b"/", 0), file(b"l/tmp/mb-evil")].concat(),
        [block(b'2', b"d", b"../victim", 0), block(b'5', b"d", b"", 0)].concat(),
        block(b'1', b"h", b"../sentinel", 0),
        [block(b'2', b"l", b"..", 0), block(b'1', b"h", b"l/sentinel", 0)].concat(),
        block(b'5', b"out/sub", b"", 0),
        block(b'2', b"out/l", b"x", 0),
    ];
    for (n, way) in ways.iter().enumerate() {
        let (outer, root) = trap();
        let before = outside(outer.path());
        let archive = [way.as_slice(), &[0; 1024]].concat();
        assert!(unpack(&archive, &root, 512).is_err(), "way {n}");
        assert_eq!(outside(outer.path()), before, "way {n}");
    }
    // A name that begins at the root means the root of the tree; a link is replaced, not written through.
    let (outer, root) = trap();
    let before = outside(outer.path());
    let archive = [file(b"/etc/passwd"), file(b"out"), vec![0; 1024]].concat();
    unpack(&archive, &root, 512).unwrap();
    assert_eq!(fs::read(root.join("etc/passwd")).unwrap(), b"evil");
    assert!(!root.join("out").is_symlink());
    assert_eq!(outside(outer.path()), before);
    // A link that stays in the tree may be used.
    let archive =
        [block(b'5', b"real", b"", 0), block(b'2', b"alias", b"real", 0), file(b"alias/f"), vec![0; 1024]].concat();
    unpack(&archive, &root, 512).unwrap();
    assert_eq!(fs::read(root.join("real/f")).unwrap(), b"evil");
}

fn any_name() -> impl Strategy<Value = Vec<u8>> {
    let part = prop_oneof![
        Just(&b".."[..]),
        Just(&b"."[..]),
        Just(&b""[..]),
        Just(&b"a"[..]),
        Just(&b"b"[..]),
        Just(&b"out"[..]),
        Just(&b"abs"[..]),
        Just(&b"sentinel"[..]),
        Just(&b"victim"[..]),
        Just(&b"root"[..]),
        Just(&b"\xff"[..])
    ];
    (any::<bool>(), proptest::collection::vec(part, 0..5)).prop_map(|(absolute, parts)| {
        let name = parts.join(&b'/');
        if absolute { [b"/".as_slice(), &name].concat() } else { name }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever an archive names, in whatever order, nothing outside of the tree changes.
    #[test]
    fn nothing_outside_the_tree_is_touched(entries in proptest::collection::vec((0usize..4, any_name(), any_name()), 1..12), piece in 1usize..2000) {
        let (outer, root) = trap();
        let before = outside(outer.path());
        let mut archive = Vec::new();
        for (kind, name, link) in entries {
            let size = if kind == 0 { 4 } else { 0 };
            let mut one = block([b'0', b'1', b'2', b'5'][kind], &name, &link, size);
            if size > 0 {
                one.extend([b"evil".as_slice(), &[0; 508]].concat());
            }
            one.extend([0; 1024]);
            // Each alone, so that one that is refused does not keep the others from trying.
            let _ = unpack(&one, &root, piece);
            archive.extend(&one[..one.len() - 1024]);
        }
        archive.extend([0; 1024]);
        let _ = unpack(&archive, &root, piece);
        prop_assert_eq!(outside(outer.path()), before);
    }

    /// Whatever comes in, in whatever pieces: no panic, and an honest archive that was changed somewhere stays in.
    #[test]
    fn garbage_is_refused_and_stays_inside(garbage in proptest::collection::vec(any::<u8>(), 0..3000),
        hits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6), piece in 1usize..3000) {
        let (outer, root) = trap();
        let before = outside(outer.path());
        let _ = unpack(&garbage, &root, piece);
        let honest = tempfile::tempdir().unwrap();
        fs::create_dir(honest.path().join("d")).unwrap();
        fs::write(honest.path().join("d").join("x".repeat(200)), "data").unwrap();
        fs::write(honest.path().join("y"), vec![3; 700]).unwrap();
        let mut archive = pack(honest.path(), PackOptions::default());
        for (index, byte) in hits {
            let at = index.index(archive.len());
            archive[at] = byte;
        }
        let _ = unpack(&archive, &root, piece);
        prop_assert_eq!(outside(outer.path()), before);
    }

    #[test]
    fn a_safe_name_only_goes_down(name in proptest::collection::vec(prop_oneof![3 => Just(b'.'), 3 => Just(b'/'), 1 => any::<u8>()], 0..300)) {
        if let Ok(parts) = safe_parts(&name) {
            for part in &parts {
                prop_assert!(!part.is_empty() && *part != b"." && *part != b"..");
                prop_assert!(!part.contains(&b'/') && !part.contains(&0) && part.len() <= 255);
            }
            prop_assert!(parts.join(&b'/').len() <= 4095);
        } else {
            let up = name.split(|b| *b == b'/').any(|p| p == b".." || p.len() > 255);
            prop_assert!(up || name.contains(&0) || name.len() > 4095, "refused without a reason");
        }
    }
}
