//! Images made by hand, and what must come out of them.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use mainbrella_oci::{Digest, Image, Laid, OciError, Quiet};
use tar::EntryType;

/// Kind, permissions, owner and group, digest of content or target, and attributes.
pub type Seen = (u32, u32, u32, u32, String, Vec<(String, Vec<u8>)>);

/// Permission to bind low ports, as a file holds it.
pub const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

#[derive(Clone, Copy, PartialEq)]
pub enum Packed {
    Plain,
    Gzip,
    Zstd,
}

/// One layer, and with the ones before it the tree it makes.
#[derive(Default)]
pub struct Tree {
    pub want: BTreeMap<String, Seen>,
    pub layers: Vec<Vec<u8>>,
}

pub struct Layer<'a> {
    tree: &'a mut Tree,
    archive: tar::Builder<Vec<u8>>,
}

fn hex(bytes: &[u8]) -> String {
    Digest::of(bytes).hex()
}

impl Tree {
    pub fn layer(&mut self) -> Layer<'_> {
        Layer { tree: self, archive: tar::Builder::new(Vec::new()) }
    }
}

impl Layer<'_> {
    fn put(&mut self, path: &str, kind: EntryType, mode: u32, owner: (u32, u32), content: &[u8], link: &str) {
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(owner.0.into());
        header.set_gid(owner.1.into());
        header.set_mtime(1_700_000_000);
        header.set_size(content.len() as u64);
        if link.is_empty() {
            self.archive.append_data(&mut header, path, content).unwrap();
        } else {
            self.archive.append_link(&mut header, path, link).unwrap();
        }
    }

    pub fn dir(mut self, path: &str, mode: u32) -> Self {
        self.put(&format!("{path}/"), EntryType::Directory, mode, (0, 0), b"", "");
        self.tree.want.insert(path.to_owned(), (0o040_000, mode, 0, 0, String::new(), vec![]));
        self
    }

    pub fn file(
        mut self,
        path: &str,
        mode: u32,
        owner: (u32, u32),
        content: &[u8],
        attributes: &[(&str, &[u8])],
    ) -> Self {
        if !attributes.is_empty() {
            let names: Vec<String> = attributes.iter().map(|(n, _)| format!("SCHILY.xattr.{n}")).collect();
            self.archive
                .append_pax_extensions(names.iter().map(String::as_str).zip(attributes.iter().map(|a| a.1)))
                .unwrap();
        }
        self.put(path, EntryType::Regular, mode, owner, content, "");
        let mut kept: Vec<_> = attributes.iter().map(|(n, v)| ((*n).to_owned(), v.to_vec())).collect();
        kept.sort();
        self.tree.want.insert(path.to_owned(), (0o100_000, mode, owner.0, owner.1, hex(content), kept));
        self
    }

    pub fn link(mut self, path: &str, target: &str) -> Self {
        self.put(path, EntryType::Symlink, 0o777, (0, 0), b"", target);
        self.tree.want.insert(path.to_owned(), (0o120_000, 0o777, 0, 0, hex(target.as_bytes()), vec![]));
        self
    }

    pub fn hard(mut self, path: &str, target: &str) -> Self {
        self.put(path, EntryType::Link, 0o644, (0, 0), b"", target);
        let same = self.tree.want[target].clone();
        self.tree.want.insert(path.to_owned(), same);
        self
    }

    pub fn gone(mut self, path: &str) -> Self {
        let (dir, name) = path.rsplit_once('/').unwrap();
        self.put(&format!("{dir}/.wh.{name}"), EntryType::Regular, 0o644, (0, 0), b"", "");
        self.tree.want.retain(|p, _| p != path && !p.starts_with(&format!("{path}/")));
        self
    }

    pub fn end(self) {
        let bytes = self.archive.into_inner().unwrap();
        self.tree.layers.push(bytes);
    }
}

/// An image of three layers with everything an image may have.
pub fn sample() -> Tree {
    let mut tree = Tree::default();
    let mut layer = tree.layer().dir("bin", 0o755).dir("srv", 0o2775).dir("srv/old", 0o700);
    for n in 0..200u32 {
        let content: Vec<u8> = (0..n * 97).map(|i| (i.wrapping_mul(n + 7) >> 3) as u8).collect();
        layer = layer.file(&format!("srv/f{n}"), 0o600 + n % 64, (n, 1000 + n), &content, &[]);
    }
    layer.file("bin/su", 0o4755, (0, 12), b"su", &[]).file("srv/old/x", 0o644, (0, 0), b"x", &[]).end();
    let long = format!("srv/{}", "n".repeat(150));
    tree.layer()
        .gone("srv/f3")
        .gone("srv/old")
        .file("bin/ping", 0o755, (0, 0), b"ping", &[("security.capability", &CAPABILITY), ("user.note", b"kept")])
        .link("usr", "/srv")
        .file(&long, 0o640, (70_000, 70_001), b"a long name", &[])
        .hard("bin/ping6", "bin/ping")
        .end();
    tree.layer().file("srv/f5", 0o644, (5, 5), b"replaced", &[]).file("srv/f6", 0o644, (0, 0), b"", &[]).end();
    tree
}

pub fn pack(bytes: &[u8], how: Packed) -> Vec<u8> {
    match how {
        Packed::Plain => bytes.to_vec(),
        Packed::Gzip => {
            let mut w = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            w.write_all(bytes).unwrap();
            w.finish().unwrap()
        }
        Packed::Zstd => zstd::encode_all(bytes, 1).unwrap(),
    }
}

/// The documents and blobs of an image, by digest.
pub struct Blobs {
    pub manifest: Vec<u8>,
    pub config: Vec<u8>,
    pub all: BTreeMap<Digest, Vec<u8>>,
}

pub fn descriptor(kind: &str, bytes: &[u8]) -> String {
    format!("{{\"mediaType\":\"{kind}\",\"digest\":\"{}\",\"size\":{}}}", Digest::of(bytes), bytes.len())
}

pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";

pub fn config(tree: &Tree, arch: &str) -> Vec<u8> {
    let ids: Vec<String> = tree.layers.iter().map(|l| format!("\"{}\"", Digest::of(l))).collect();
    format!(
        "{{\"os\":\"linux\",\"architecture\":\"{arch}\",\"config\":{{\"Env\":[\"A=1\"],\"Cmd\":[\"/bin/su\"],\"WorkingDir\":\"/srv\"}},\
         \"rootfs\":{{\"type\":\"layers\",\"diff_ids\":[{}]}}}}",
        ids.join(",")
    )
    .into_bytes()
}

pub fn blobs(tree: &Tree, how: &[Packed]) -> Blobs {
    let config = config(tree, "amd64");
    let mut all = BTreeMap::from([(Digest::of(&config), config.clone())]);
    let mut layers = Vec::new();
    for (n, layer) in tree.layers.iter().enumerate() {
        let packed = pack(layer, how[n % how.len()]);
        let kind = match how[n % how.len()] {
            Packed::Plain => "application/vnd.oci.image.layer.v1.tar",
            Packed::Gzip => "application/vnd.oci.image.layer.v1.tar+gzip",
            Packed::Zstd => "application/vnd.oci.image.layer.v1.tar+zstd",
        };
        layers.push(descriptor(kind, &packed));
        all.insert(Digest::of(&packed), packed);
    }
    let manifest = format!(
        "{{\"schemaVersion\":2,\"mediaType\":\"{MANIFEST}\",\"config\":{},\"layers\":[{}]}}",
        descriptor("application/vnd.oci.image.config.v1+json", &config),
        layers.join(",")
    )
    .into_bytes();
    all.insert(Digest::of(&manifest), manifest.clone());
    Blobs { manifest, config, all }
}

/// Everything below `root`, as [`Tree::want`] has it.
pub fn seen(root: &Path) -> BTreeMap<String, Seen> {
    let mut out = BTreeMap::new();
    let mut left = vec![root.to_owned()];
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let stat = path.symlink_metadata().unwrap();
            let content = if stat.is_dir() {
                left.push(path.clone());
                String::new()
            } else if stat.is_symlink() {
                hex(fs::read_link(&path).unwrap().to_str().unwrap().as_bytes())
            } else {
                hex(&fs::read(&path).unwrap())
            };
            let mut attributes = Vec::new();
            for name in ["security.capability", "user.note"] {
                let mut value = vec![0; 1000];
                if let Ok(n) = rustix::fs::lgetxattr(&path, name, &mut value[..]) {
                    attributes.push((name.to_owned(), value[..n].to_vec()));
                }
            }
            let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
            out.insert(
                name,
                (stat.mode() & 0o170_000, stat.mode() & 0o7777, stat.uid(), stat.gid(), content, attributes),
            );
        }
    }
    out
}

pub fn lay(image: &Image, root: &Path) -> Result<Laid, OciError> {
    assert!(rustix::process::geteuid().is_root(), "this tier needs root");
    fs::create_dir(root).unwrap();
    image.lay(OwnedFd::from(fs::File::open(root).unwrap()), &Quiet)
}

/// Lays the image out and compares every file of it.
pub fn compare(image: &Image, root: &Path, tree: &Tree) {
    lay(image, root).unwrap();
    let found = seen(root);
    for (path, want) in &tree.want {
        assert_eq!(found.get(path), Some(want), "{path}");
    }
    assert_eq!(found.len(), tree.want.len(), "nothing more");
}
