//! Images in files.

use std::fs;
use std::path::Path;

use crate::support::{INDEX, MANIFEST, Packed, Tree, blobs, compare, config, descriptor, lay, pack, sample};
use mainbrella_oci::{Access, Digest, Image, OciError, Quiet, Source, Watch};

fn fetch(source: &str, work: &Path) -> Result<Image, OciError> {
    source.parse::<Source>()?.fetch(work, &Access::default(), &Quiet)
}

fn layout(dir: &Path, tree: &Tree, how: &[Packed], named: &[&str]) {
    let blobs = blobs(tree, how);
    fs::create_dir_all(dir.join("blobs/sha256")).unwrap();
    for (digest, bytes) in &blobs.all {
        fs::write(dir.join("blobs/sha256").join(digest.hex()), bytes).unwrap();
    }
    let one = descriptor(MANIFEST, &blobs.manifest);
    let name = |n: &&str| {
        format!("{},\"annotations\":{{\"org.opencontainers.image.ref.name\":\"{n}\"}}}}", one.trim_end_matches('}'))
    };
    let list: Vec<String> = if named.is_empty() { vec![one.clone()] } else { named.iter().map(name).collect() };
    fs::write(dir.join("oci-layout"), "{\"imageLayoutVersion\":\"1.0.0\"}").unwrap();
    let index = format!("{{\"schemaVersion\":2,\"mediaType\":\"{INDEX}\",\"manifests\":[{}]}}", list.join(","));
    fs::write(dir.join("index.json"), index).unwrap();
}

/// What older versions of `docker save` write: a folder a layer, and a link for one that is there already.
fn saved(tree: &Tree, tag: &str) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    let mut put = |path: &str, bytes: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        archive.append_data(&mut header, path, bytes).unwrap();
    };
    let config = config(tree, "amd64");
    let name = format!("{}.json", Digest::of(&config).hex());
    put(&name, &config);
    for (n, layer) in tree.layers.iter().enumerate() {
        put(&format!("layer{n}/layer.tar"), layer);
    }
    let mut paths: Vec<String> = (0..tree.layers.len()).map(|n| format!("\"layer{n}/layer.tar\"")).collect();
    paths[0] = "\"again/layer.tar\"".to_owned();
    let manifest = format!("[{{\"Config\":\"{name}\",\"RepoTags\":[\"{tag}\"],\"Layers\":[{}]}}]", paths.join(","));
    put("manifest.json", manifest.as_bytes());
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Symlink);
    header.set_size(0);
    archive.append_link(&mut header, "again/layer.tar", "../layer0/layer.tar").unwrap();
    archive.into_inner().unwrap()
}

fn tar_of(dir: &Path) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    archive.append_dir_all(".", dir).unwrap();
    archive.into_inner().unwrap()
}

#[test]
fn layouts_and_saved_images_come_out_file_by_file() {
    let tree = sample();
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    layout(&d.join("layout"), &tree, &[Packed::Gzip, Packed::Zstd, Packed::Plain], &[]);
    fs::write(d.join("layout.tar"), tar_of(&d.join("layout"))).unwrap();
    let save = saved(&tree, "app:1");
    fs::write(d.join("save.tar"), &save).unwrap();
    fs::write(d.join("save.tar.gz"), pack(&save, Packed::Gzip)).unwrap();
    fs::write(d.join("save.tar.zst"), pack(&save, Packed::Zstd)).unwrap();
    for name in ["layout", "layout.tar", "save.tar", "save.tar.gz", "save.tar.zst"] {
        let work = tempfile::tempdir().unwrap();
        let image =
            fetch(&format!("local:{}", d.join(name).display()), work.path()).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!((image.layers(), image.config.workdir.as_str()), (3, "/srv"), "{name}");
        assert_eq!(image.config.env, [("A".to_owned(), "1".to_owned())]);
        compare(&image, &work.path().join("root"), &tree);
    }
    let of = |name: &str| fetch(&format!("local:{}", d.join(name).display()), d).unwrap().digest;
    assert_eq!(of("layout"), of("layout.tar"));
}

#[test]
fn one_of_several_images_is_asked_for_by_name() {
    let tree = sample();
    let dir = tempfile::tempdir().unwrap();
    layout(dir.path(), &tree, &[Packed::Plain], &["one", "two"]);
    let path = dir.path().display();
    let e = fetch(&format!("local:{path}"), dir.path()).unwrap_err();
    assert!(e.to_string().contains("one, two"), "{e}");
    assert_eq!(fetch(&format!("local:{path}#two"), dir.path()).unwrap().layers(), 3);
    let save = dir.path().join("save.tar");
    fs::write(&save, saved(&tree, "app:1")).unwrap();
    assert!(fetch(&format!("local:{}#app:1", save.display()), dir.path()).is_ok());
    let e = fetch(&format!("local:{}#app:2", save.display()), dir.path()).unwrap_err();
    assert!(e.to_string().contains("app:1"), "{e}");
}

#[test]
fn damage_is_found_before_anything_is_used() {
    let tree = sample();
    let fresh = || {
        let dir = tempfile::tempdir().unwrap();
        layout(dir.path(), &tree, &[Packed::Gzip], &[]);
        dir
    };
    let blobs = blobs(&tree, &[Packed::Gzip]);
    for digest in blobs.all.keys() {
        let dir = fresh();
        let path = dir.path().join("blobs/sha256").join(digest.hex());
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&path, &bytes).unwrap();
        let e = fetch(&format!("local:{}", dir.path().display()), dir.path()).unwrap_err();
        assert!(matches!(e, OciError::Digest(_)), "{e}");
        fs::write(&path, &bytes[..middle]).unwrap();
        assert!(fetch(&format!("local:{}", dir.path().display()), dir.path()).is_err());
        fs::remove_file(&path).unwrap();
        let e = fetch(&format!("local:{}", dir.path().display()), dir.path()).unwrap_err();
        assert!(matches!(e, OciError::Malformed(_)), "{e}");
    }
    // Saved images have no digests of layers but those in the configuration.
    let dir = tempfile::tempdir().unwrap();
    let mut save = saved(&tree, "app:1");
    let at = save.windows(8).position(|w| w == b"replaced").unwrap();
    save[at] ^= 1;
    fs::write(dir.path().join("s.tar"), &save).unwrap();
    let image = fetch(&format!("local:{}", dir.path().join("s.tar").display()), dir.path()).unwrap();
    assert!(matches!(lay(&image, &dir.path().join("root")), Err(OciError::Digest(_))));
}

#[test]
fn what_is_no_image_is_said_to_be_none() {
    let dir = tempfile::tempdir().unwrap();
    let source = |name: &str| format!("local:{}", dir.path().join(name).display());
    let malformed = |name: &str| match fetch(&source(name), dir.path()) {
        Err(OciError::Malformed(_)) => {}
        other => panic!("{name}: {other:?}"),
    };
    fs::create_dir(dir.path().join("empty")).unwrap();
    malformed("empty");
    fs::write(dir.path().join("text"), "not an archive at all\n".repeat(100)).unwrap();
    malformed("text");
    fs::write(dir.path().join("cut.tar.gz"), &pack(&saved(&sample(), "a:1"), Packed::Gzip)[..500]).unwrap();
    malformed("cut.tar.gz");
    rustix::fs::mkfifoat(rustix::fs::CWD, dir.path().join("fifo"), 0o600.into()).unwrap();
    malformed("fifo");
    assert!(matches!(fetch(&source("none"), dir.path()), Err(OciError::Io { .. })));
    assert!("local:".parse::<Source>().is_err() && "local:x#".parse::<Source>().is_err());
    let arm = tempfile::tempdir().unwrap();
    let mut archive = tar::Builder::new(Vec::new());
    for (name, bytes) in [
        ("c.json", config(&sample(), "arm64")),
        ("manifest.json", b"[{\"Config\":\"c.json\",\"Layers\":[\"../../etc/passwd\"]}]".to_vec()),
    ] {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        archive.append_data(&mut header, name, bytes.as_slice()).unwrap();
    }
    fs::write(arm.path().join("a.tar"), archive.into_inner().unwrap()).unwrap();
    let e = fetch(&format!("local:{}", arm.path().join("a.tar").display()), arm.path()).unwrap_err();
    assert!(matches!(&e, OciError::Platform(p) if p == "linux/arm64"), "{e}");
}

#[test]
fn unpacking_stops_when_it_is_told_to() {
    struct Stop;
    impl Watch for Stop {
        fn cancelled(&self) -> bool {
            true
        }
    }
    let dir = tempfile::tempdir().unwrap();
    layout(&dir.path().join("l"), &sample(), &[Packed::Gzip], &[]);
    let source: Source = format!("local:{}", dir.path().join("l").display()).parse().unwrap();
    let e = source.fetch(dir.path(), &Access::default(), &Stop).unwrap_err();
    assert!(matches!(e, OciError::Cancelled), "{e}");
    let image = source.fetch(dir.path(), &Access::default(), &Quiet).unwrap();
    fs::create_dir(dir.path().join("root")).unwrap();
    let root = fs::File::open(dir.path().join("root")).unwrap().into();
    assert!(matches!(image.lay(root, &Stop), Err(OciError::Cancelled)));
}
