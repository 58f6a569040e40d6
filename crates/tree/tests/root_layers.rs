//! Trees made of layers, as root: what comes out is what the layers say, and nothing outside is touched.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

use mainbrella_tree::{Laid, LayerLimits, Layers, TreeError, index};
use proptest::prelude::*;
use tar::EntryType;
use tempfile::TempDir;

const LIMITS: LayerLimits = LayerLimits { entries: 10_000, bytes: 10_000_000 };
/// Permission to bind low ports, effective, as a file holds it.
const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

struct Archive(tar::Builder<Vec<u8>>);

#[derive(Clone)]
struct Node<'a> {
    kind: EntryType,
    mode: u32,
    owner: (u64, u64),
    mtime: u64,
    content: &'a [u8],
    link: &'a str,
    attributes: &'a [(&'a str, &'a [u8])],
}

const FILE: Node<'static> =
    Node { kind: EntryType::Regular, mode: 0o644, owner: (0, 0), mtime: 1000, content: b"", link: "", attributes: &[] };
const DIR: Node<'static> = Node { kind: EntryType::Directory, mode: 0o755, ..FILE };

impl Archive {
    fn new() -> Self {
        Self(tar::Builder::new(Vec::new()))
    }

    /// Names are written as they are: the library would refuse what is to be tried.
    fn add(mut self, path: &str, node: &Node<'_>) -> Self {
        if !node.attributes.is_empty() {
            let names: Vec<String> = node.attributes.iter().map(|(n, _)| format!("SCHILY.xattr.{n}")).collect();
            let all = names.iter().map(String::as_str).zip(node.attributes.iter().map(|(_, v)| *v));
            self.0.append_pax_extensions(all).unwrap();
        }
        let mut header = tar::Header::new_ustar();
        header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
        header.as_old_mut().linkname[..node.link.len()].copy_from_slice(node.link.as_bytes());
        header.set_entry_type(node.kind);
        header.set_mode(node.mode);
        header.set_uid(node.owner.0);
        header.set_gid(node.owner.1);
        header.set_mtime(node.mtime);
        header.set_size(node.content.len() as u64);
        if matches!(node.kind, EntryType::Char | EntryType::Block) {
            header.set_device_major(1).unwrap();
            header.set_device_minor(3).unwrap();
        }
        header.set_cksum();
        self.0.append(&header, node.content).unwrap();
        self
    }

    fn file(self, path: &str, content: &str) -> Self {
        self.add(path, &Node { content: content.as_bytes(), ..FILE })
    }

    fn dir(self, path: &str) -> Self {
        self.add(path, &DIR)
    }

    fn link(self, path: &str, link: &str) -> Self {
        self.add(path, &Node { kind: EntryType::Symlink, mode: 0o777, link, ..FILE })
    }

    fn hard(self, path: &str, link: &str) -> Self {
        self.add(path, &Node { kind: EntryType::Link, link, ..FILE })
    }

    fn bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

fn lay_with(root: &Path, layers: &[Vec<u8>], limits: LayerLimits) -> Result<Laid, TreeError> {
    assert!(rustix::process::geteuid().is_root(), "this tier needs root");
    let mut tree = Layers::new(OwnedFd::from(fs::File::open(root).unwrap()), limits);
    for layer in layers {
        tree.apply(&mut layer.as_slice())?;
    }
    Ok(tree.done())
}

/// A root inside a directory that nothing may change.
struct Ground {
    outer: TempDir,
    root: PathBuf,
}

impl Ground {
    fn new() -> Self {
        let outer = tempfile::tempdir().unwrap();
        let root = outer.path().join("root");
        fs::create_dir(&root).unwrap();
        fs::write(outer.path().join("secret"), "untouched").unwrap();
        Self { outer, root }
    }

    fn lay(&self, layers: &[Vec<u8>]) -> Result<Laid, TreeError> {
        let laid = lay_with(&self.root, layers, LIMITS);
        let around: BTreeSet<_> = fs::read_dir(self.outer.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(around, ["root", "secret"].map(Into::into).into());
        assert_eq!(fs::read_to_string(self.outer.path().join("secret")).unwrap(), "untouched");
        assert_eq!(fs::metadata(self.outer.path().join("secret")).unwrap().nlink(), 1);
        laid
    }

    fn text(&self, path: &str) -> String {
        fs::read_to_string(self.root.join(path)).unwrap()
    }

    fn has(&self, path: &str) -> bool {
        self.root.join(path).symlink_metadata().is_ok()
    }
}

fn attribute(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = vec![0; 4096];
    let n = rustix::fs::lgetxattr(path, name, &mut value[..]).ok()?;
    value.truncate(n);
    Some(value)
}

#[test]
fn owners_permissions_times_attributes_devices_and_links_are_kept() {
    let ground = Ground::new();
    let attributes: &[(&str, &[u8])] =
        &[("security.capability", &CAPABILITY), ("user.note", b"a=b\n\0c"), ("trusted.overlay.opaque", b"y")];
    let layer = Archive::new()
        .add("./", &Node { mode: 0o751, mtime: 77, ..DIR })
        .add("bin/", &Node { mode: 0o2711, owner: (3, 4), mtime: 5, attributes: &[("user.dir", b"1")], ..DIR })
        .add("bin/su", &Node { mode: 0o4755, owner: (70_000, 12), mtime: 42, content: b"#!", attributes, ..FILE })
        .hard("bin/again", "bin/su")
        .add("bin/sh", &Node { kind: EntryType::Symlink, owner: (9, 8), mtime: 7, link: "su", ..FILE })
        .add("null", &Node { kind: EntryType::Char, mode: 0o666, ..FILE })
        .add("block", &Node { kind: EntryType::Block, mode: 0o600, ..FILE })
        .add("pipe", &Node { kind: EntryType::Fifo, mode: 0o622, ..FILE })
        .bytes();
    let laid = ground.lay(&[layer]).unwrap();
    assert_eq!((laid.bytes, laid.attributes_dropped), (2, 1));
    let stat = |path: &str| ground.root.join(path).symlink_metadata().unwrap();
    let own = |path: &str| (stat(path).mode() & 0o7777, stat(path).uid(), stat(path).gid(), stat(path).mtime());
    assert_eq!(own(""), (0o751, 0, 0, 77));
    assert_eq!(own("bin"), (0o2711, 3, 4, 5));
    assert_eq!(own("bin/su"), (0o4755, 70_000, 12, 42));
    assert_eq!(stat("bin/again").ino(), stat("bin/su").ino());
    assert_eq!((own("bin/sh").1, own("bin/sh").2, own("bin/sh").3), (9, 8, 7));
    let su = ground.root.join("bin/su");
    assert_eq!(attribute(&su, "security.capability").as_deref(), Some(&CAPABILITY[..]));
    assert_eq!(attribute(&su, "user.note").as_deref(), Some(&b"a=b\n\0c"[..]));
    assert_eq!(attribute(&su, "trusted.overlay.opaque"), None);
    assert_eq!(attribute(&ground.root.join("bin"), "user.dir").as_deref(), Some(&b"1"[..]));
    if laid.skipped == 0 {
        assert!(stat("null").file_type().is_char_device() && stat("null").rdev() == rustix::fs::makedev(1, 3));
        assert!(stat("block").file_type().is_block_device());
        assert_eq!(own("null").0, 0o666);
    }
    assert!(stat("pipe").file_type().is_fifo());
}

#[test]
fn whiteouts_are_about_what_is_below_in_whatever_order_they_come() {
    let ground = Ground::new();
    let below = || Archive::new().file("a", "1").dir("d").file("d/x", "1").file("d/s/y", "1").file("e/z", "1").bytes();
    // The marks come before, between and after what the layer itself has.
    let above = Archive::new()
        .file(".wh.a", "")
        .file("d/new", "2")
        .file("d/s/kept", "2")
        .file("d/.wh..wh..opq", "")
        .file("d/late", "2")
        .file("e", "now a file")
        .file(".wh.nothing", "")
        .file("no/such/.wh.x", "")
        .file(".wh..wh.plnk", "")
        .bytes();
    let laid = ground.lay(&[below(), above]).unwrap();
    assert_eq!((laid.whiteouts, laid.skipped), (4, 1));
    assert!(!ground.has("a") && !ground.has("d/x") && !ground.has("d/s/y") && !ground.has("no"));
    for own in ["d/new", "d/s/kept", "d/late"] {
        assert_eq!(ground.text(own), "2");
    }
    assert_eq!(ground.text("e"), "now a file");
    // What a layer has itself stays though it says that what is below is gone.
    let ground = Ground::new();
    let above = Archive::new().file("a", "2").file(".wh.a", "").dir("d").file("d/x", "2").file(".wh.d", "").bytes();
    ground.lay(&[below(), above]).unwrap();
    assert_eq!((ground.text("a"), ground.text("d/x"), ground.has("d/s")), ("2".into(), "2".into(), false));
    // A hard link to what is below is an entry of the layer; what it leads to is not.
    let ground = Ground::new();
    let above = Archive::new().hard("d/b", "d/x").file("d/.wh..wh..opq", "").bytes();
    ground.lay(&[below(), above]).unwrap();
    assert_eq!((ground.text("d/b"), ground.has("d/x")), ("1".into(), false));
}

#[test]
fn links_lead_as_from_the_root_of_the_tree() {
    let ground = Ground::new();
    let below =
        Archive::new().dir("usr/lib").link("lib", "usr/lib").link("abs", "/usr").link("up", "../../../usr").bytes();
    let above =
        Archive::new().file("lib/one", "1").file("abs/two", "2").file("up/three", "3").hard("four", "abs/two").bytes();
    let third = Archive::new().file("lib/.wh.one", "").dir("abs").file("abs/own", "4").bytes();
    ground.lay(&[below, above, third]).unwrap();
    assert!(!ground.has("usr/lib/one"));
    assert_eq!(
        (ground.text("usr/two"), ground.text("usr/three"), ground.text("four")),
        ("2".into(), "3".into(), "2".into())
    );
    // A directory takes the place of a link.
    assert_eq!(ground.text("abs/own"), "4");
    assert!(!ground.has("usr/own"));
}

#[test]
fn layers_that_mean_harm_reach_nothing_outside() {
    let secret = |g: &Ground| g.outer.path().join("secret").to_str().unwrap().to_owned();
    type Make = fn(&str) -> Vec<Vec<u8>>;
    let refused: [(&str, Make); 12] = [
        ("up in a name", |_| vec![Archive::new().file("../secret", "x").bytes()]),
        ("up in the middle", |_| vec![Archive::new().file("a/../../secret", "x").bytes()]),
        ("up in a hard link", |_| vec![Archive::new().hard("a", "../secret").bytes()]),
        ("hard link to what is not in the tree", |s| vec![Archive::new().hard("a", &s[..s.len().min(90)]).bytes()]),
        ("hard link through a link", |_| vec![Archive::new().link("o", "../").hard("a", "o/secret").bytes()]),
        ("whiteout of up", |_| vec![Archive::new().file(".wh...", "").bytes()]),
        ("whiteout of itself", |_| vec![Archive::new().file(".wh..", "").bytes()]),
        ("whiteout of nothing", |_| vec![Archive::new().file("d/.wh.", "").bytes()]),
        ("through a circle", |_| vec![Archive::new().link("a", "b").link("b", "a").file("a/x", "").bytes()]),
        ("through a file", |_| vec![Archive::new().file("a", "").file("a/x", "").bytes()]),
        ("through nowhere", |_| vec![Archive::new().link("a", "none").file("a/x/y", "").bytes()]),
        ("hard link to a directory", |_| vec![Archive::new().dir("a").hard("b", "a").bytes()]),
    ];
    for (what, make) in refused {
        let ground = Ground::new();
        let e = ground.lay(&make(&secret(&ground))).expect_err(what);
        assert!(e.errno.is_none(), "{what}: {e}");
    }
    // These are nothing special; they only may not lead out.
    let ground = Ground::new();
    let layers = [
        Archive::new().link("o", "../../..").link("s", "../secret").link("p", "/proc/self/root").bytes(),
        Archive::new().file("o/x", "1").file("s", "2").file("/abs", "3").bytes(),
        Archive::new().file("o/.wh.x", "").file("o/.wh.secret", "").bytes(),
    ];
    ground.lay(&layers).unwrap();
    assert_eq!((ground.text("s"), ground.text("abs"), ground.has("x")), ("2".into(), "3".into(), false));
    let e = Ground::new().lay(&[Archive::new().link("p", "/proc/self/root").file("p/x", "").bytes()]).unwrap_err();
    assert!(e.errno.is_none(), "{e}");
}

#[test]
fn what_is_too_much_or_cut_off_is_refused() {
    let many = (0..50).fold(Archive::new(), |a, n| a.file(&format!("f{n}"), "x")).bytes();
    let dir = tempfile::tempdir().unwrap();
    let e = lay_with(dir.path(), std::slice::from_ref(&many), LayerLimits { entries: 20, ..LIMITS }).unwrap_err();
    assert!(e.text.contains("too many"), "{e}");
    // Over all layers together.
    let e = lay_with(dir.path(), &[many.clone(), many.clone()], LayerLimits { entries: 70, ..LIMITS }).unwrap_err();
    assert!(e.text.contains("too many"), "{e}");
    let big = Archive::new().add("big", &Node { content: &[7; 5000], ..FILE }).bytes();
    let e = lay_with(dir.path(), std::slice::from_ref(&big), LayerLimits { bytes: 4999, ..LIMITS }).unwrap_err();
    assert!(e.text.contains("too large"), "{e}");
    for cut in [1, 511, 513, 2000] {
        assert!(lay_with(dir.path(), &[big[..cut].to_vec()], LIMITS).is_err(), "{cut}");
    }
    // What it says of its size is not believed before it is there.
    let mut lie = big[..512].to_vec();
    let mut header = tar::Header::from_byte_slice(&lie).clone();
    header.set_size(9_000_000);
    header.set_cksum();
    lie.copy_from_slice(header.as_bytes());
    let e = lay_with(dir.path(), &[lie], LIMITS).unwrap_err();
    assert!(e.text.contains("ends within"), "{e}");
    // No end mark: other programs take that, too.
    lay_with(dir.path(), &[big[..512 + 5120].to_vec()], LIMITS).unwrap();
}

#[test]
fn deep_trees_take_neither_stack_nor_descriptors() {
    // Each layer goes on where a link leads to: there are more levels than a process may have descriptors.
    let ground = Ground::new();
    let deep = ["d"; 44].join("/");
    let mut layers = vec![Archive::new().dir("d").link("l0", "d").bytes()];
    for n in 1..36 {
        let before = format!("l{}/{deep}", n - 1);
        layers.push(Archive::new().file(&format!("{before}/f"), "x").link(&format!("l{n}"), &before).bytes());
    }
    let laid = ground.lay(&layers).unwrap();
    assert_eq!(laid.bytes, 35);
    ground.lay(&[Archive::new().file(".wh.d", "").bytes()]).unwrap();
    assert!(!ground.has("d") && ground.has("l35"));
}

#[test]
fn the_files_of_an_archive_are_found_where_they_lie() {
    let archive = Archive::new()
        .dir("d")
        .file("./d/a", "first")
        .link("l", "d/a")
        .file("b", "second")
        .file("../out", "no")
        .bytes();
    let found = index(&mut std::io::Cursor::new(&archive), 10).unwrap();
    let of = |path: &str| found.iter().find(|m| m.path == path).unwrap();
    assert_eq!(found.len(), 3);
    for (path, want) in [("d/a", "first"), ("b", "second")] {
        let at = usize::try_from(of(path).offset).unwrap();
        assert_eq!(&archive[at..at + usize::try_from(of(path).bytes).unwrap()], want.as_bytes());
    }
    assert_eq!(of("l").link.as_deref(), Some("d/a"));
    assert!(index(&mut std::io::Cursor::new(&archive), 2).is_err());
    assert!(index(&mut std::io::Cursor::new(&archive[..600]), 10).is_err() || archive[..600].len() > 512);
    assert!(index(&mut std::io::Cursor::new(b"not an archive".repeat(100)), 10).is_err());
}

/// What a layer does, for trees without links.
#[derive(Debug, Clone)]
enum Op {
    File(Vec<u8>, u8, u16),
    Dir(Vec<u8>, u16),
    Whiteout(Vec<u8>),
    Opaque(Vec<u8>),
}

fn name(parts: &[u8]) -> String {
    parts.iter().map(|p| char::from(b'a' + p).to_string()).collect::<Vec<_>>().join("/")
}

/// Directory or content, and permissions.
type Model = BTreeMap<String, (Option<u8>, u16)>;

fn below<'a>(tree: &'a Model, path: &'a str) -> impl Iterator<Item = String> + 'a {
    tree.keys().filter(move |p| path.is_empty() || p.strip_prefix(path).is_some_and(|r| r.starts_with('/'))).cloned()
}

/// Applies a layer as the specification says: first what is gone, then what is there.
fn model(tree: &mut Model, ops: &[Op]) -> bool {
    let mut own = BTreeSet::new();
    let hide = |tree: &mut Model, path: &str, own: &BTreeSet<String>| {
        let gone: Vec<String> = below(tree, path).filter(|p| !own.contains(p)).collect();
        for p in gone.iter().rev() {
            if below(tree, p).next().is_none() {
                tree.remove(p);
            }
        }
    };
    for op in ops {
        match op {
            Op::File(parts, ..) | Op::Dir(parts, _) => {
                for n in 1..parts.len() {
                    let above = name(&parts[..n]);
                    match tree.get(&above) {
                        Some((Some(_), _)) => return false,
                        Some(_) => {}
                        None => {
                            own.insert(above.clone());
                            tree.insert(above, (None, 0o755));
                        }
                    }
                }
                let path = name(parts);
                own.insert(path.clone());
                let (content, mode) = match op {
                    Op::File(_, content, mode) => (Some(*content), *mode),
                    Op::Dir(_, mode) => (None, *mode),
                    _ => unreachable!("only these two"),
                };
                if content.is_some() {
                    for gone in below(tree, &path).collect::<Vec<_>>() {
                        tree.remove(&gone);
                    }
                }
                tree.insert(path, (content, mode));
            }
            Op::Whiteout(parts) => {
                let path = name(parts);
                hide(tree, &path, &own);
                if !own.contains(&path) && below(tree, &path).next().is_none() {
                    tree.remove(&path);
                }
            }
            Op::Opaque(parts) => hide(tree, &name(parts), &own),
        }
    }
    true
}

fn archive(ops: &[Op]) -> Vec<u8> {
    let mark = |parts: &[u8], mark: &str| {
        let above = name(&parts[..parts.len() - usize::from(mark.is_empty())]);
        let last = if mark.is_empty() { format!(".wh.{}", name(&parts[parts.len() - 1..])) } else { mark.to_owned() };
        if above.is_empty() { last } else { format!("{above}/{last}") }
    };
    let one = |a: Archive, op: &Op| match op {
        Op::File(p, content, mode) => a.add(&name(p), &Node { mode: (*mode).into(), content: &[*content], ..FILE }),
        Op::Dir(p, mode) => a.add(&format!("{}/", name(p)), &Node { mode: (*mode).into(), ..DIR }),
        Op::Whiteout(p) => a.file(&mark(p, ""), ""),
        Op::Opaque(p) => a.file(&mark(p, ".wh..wh..opq"), ""),
    };
    ops.iter().fold(Archive::new(), one).bytes()
}

fn seen(root: &Path) -> Model {
    let mut out = Model::new();
    let mut left = vec![root.to_owned()];
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let entry = entry.unwrap();
            let stat = entry.path().symlink_metadata().unwrap();
            let content = if stat.is_dir() {
                left.push(entry.path());
                None
            } else {
                Some(fs::read(entry.path()).unwrap()[0])
            };
            let path = entry.path().strip_prefix(root).unwrap().to_str().unwrap().to_owned();
            out.insert(path, (content, u16::try_from(stat.mode() & 0o7777).unwrap()));
        }
    }
    out
}

fn ops() -> impl Strategy<Value = Vec<Vec<Op>>> {
    let path = || proptest::collection::vec(0u8..3, 1..4);
    let op = prop_oneof![
        4 => (path(), any::<u8>(), 0u16..0o7777).prop_map(|(p, c, m)| Op::File(p, c, m)),
        3 => (path(), 0u16..0o7777).prop_map(|(p, m)| Op::Dir(p, m)),
        2 => path().prop_map(Op::Whiteout),
        1 => proptest::collection::vec(0u8..3, 0..3).prop_map(Op::Opaque),
    ];
    proptest::collection::vec(proptest::collection::vec(op, 0..8), 1..5)
}

/// Any entry whatever, links and names that lead up among them.
fn wild() -> impl Strategy<Value = Vec<(u8, String, String)>> {
    let part = prop_oneof![
        Just("a"),
        Just("b"),
        Just(".."),
        Just("."),
        Just("secret"),
        Just("root"),
        Just(".wh.a"),
        Just(".wh..wh..opq"),
        Just("")
    ];
    let path = || proptest::collection::vec(part.clone(), 0..4).prop_map(|p| p.join("/"));
    let target = prop_oneof![
        path().boxed(),
        path().prop_map(|p| format!("/{p}")).boxed(),
        path().prop_map(|p| format!("../../{p}")).boxed()
    ];
    proptest::collection::vec((0u8..6, path(), target), 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn trees_are_what_the_layers_say(layers in ops()) {
        let ground = Ground::new();
        let mut want = Model::new();
        for layer in &layers {
            let fine = model(&mut want, layer);
            let laid = ground.lay(&[archive(layer)]);
            prop_assert_eq!(fine, laid.is_ok(), "{:?}", laid);
            if !fine {
                return Ok(());
            }
            prop_assert_eq!(&seen(&ground.root), &want);
        }
    }

    #[test]
    fn no_entries_whatever_reach_outside(layers in proptest::collection::vec(wild(), 1..4)) {
        let ground = Ground::new();
        symlink("../secret", ground.root.join("b")).unwrap();
        for layer in layers {
            let one = |a: Archive, (kind, path, link): &(u8, String, String)| {
                let kind = [EntryType::Regular, EntryType::Directory, EntryType::Symlink, EntryType::Link, EntryType::Fifo, EntryType::Regular][usize::from(*kind)];
                let content: &[u8] = if kind == EntryType::Regular { b"overwritten" } else { b"" };
                a.add(path, &Node { kind, link, content, ..FILE })
            };
            let _ = ground.lay(&[layer.iter().fold(Archive::new(), one).bytes()]);
        }
    }

    #[test]
    fn bytes_of_any_kind_are_answered(bytes in proptest::collection::vec(any::<u8>(), 0..2000), at in 0usize..4000) {
        let ground = Ground::new();
        let mut archive = Archive::new().add("f", &Node { attributes: &[("user.x", b"1")], content: b"x", ..FILE }).file("g", "y").bytes();
        let at = at.min(archive.len());
        let end = (at + bytes.len() / 50).min(archive.len());
        archive.splice(at..end, bytes.iter().copied().take(end - at));
        let _ = ground.lay(&[archive]);
        let _ = index(&mut std::io::Cursor::new(&bytes), 100);
    }
}

#[test]
fn names_that_are_not_text_are_kept() {
    let ground = Ground::new();
    let mut layer = Archive::new().file("xx", "1").bytes();
    layer[0] = 0xff;
    let mut header = tar::Header::from_byte_slice(&layer[..512]).clone();
    header.set_cksum();
    layer[..512].copy_from_slice(header.as_bytes());
    ground.lay(&[layer]).unwrap();
    assert!(ground.root.join(std::ffi::OsStr::from_bytes(b"\xffx")).exists());
}
