//! Images in files: what `docker save` writes, and OCI layouts, as directories and in archives, packed or not.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use mainbrella_tree::{Member, index, safe_parts};
use mainbrella_types::limits::{IMAGE_DOCUMENT_MAX, IMAGE_LAYERS_MAX, IMAGE_UNPACKED_MAX};
use serde::Deserialize;

use crate::digest::Digest;
use crate::document::{Descriptor, Document, choose, config, document};
use crate::error::{OciError, shown};
use crate::image::{Image, Layer};
use crate::stream::{Hashed, Watch, unpacked};

/// Files an archive of an image may hold.
const MEMBERS_MAX: usize = 100_000;
/// Links and indexes that lead to others, this far.
const DEPTH_MAX: usize = 4;
/// What an index calls its images.
const NAMES: [&str; 2] = ["io.containerd.image.name", "org.opencontainers.image.ref.name"];

/// Files by name.
enum Shelf {
    Directory(PathBuf),
    Archive(PathBuf, BTreeMap<String, Member>),
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

/// Opens the image in `path`. An archive that is packed is unpacked into `work` first.
pub(crate) fn open(path: &Path, which: Option<&str>, work: &Path, watch: &dyn Watch) -> Result<Image, OciError> {
    watch.step("Reading the archive of the image");
    let shelf = Shelf::open(path, work, watch)?;
    let name = path.display().to_string();
    if shelf.find("index.json")?.is_some() {
        layout(&shelf, name, which, watch)
    } else if shelf.find("manifest.json")?.is_some() {
        saved(&shelf, name, which)
    } else {
        Err(OciError::malformed(format!("{name} holds neither what `docker save` writes nor an OCI layout")))
    }
}

impl Shelf {
    fn open(path: &Path, work: &Path, watch: &dyn Watch) -> Result<Self, OciError> {
        let what = || format!("opening {}", path.display());
        let stat = fs::metadata(path).map_err(OciError::io(what()))?;
        if stat.is_dir() {
            return Ok(Self::Directory(path.to_owned()));
        }
        if !stat.is_file() {
            return Err(OciError::malformed(format!("{} is neither a file nor a directory", path.display())));
        }
        let mut file = File::open(path).map_err(OciError::io(what()))?;
        let mut head = [0; 4];
        let n = file.read(&mut head).map_err(OciError::io(what()))?;
        file.seek(SeekFrom::Start(0)).map_err(OciError::io(what()))?;
        let packed = head[..n].starts_with(&[0x1f, 0x8b]) || head[..n].starts_with(&[0x28, 0xb5, 0x2f, 0xfd]);
        let path = if packed {
            let plain = work.join("archive.tar");
            let damaged = |e: io::Error| match e.kind() {
                io::ErrorKind::ConnectionAborted => OciError::Cancelled,
                _ => OciError::malformed(format!("{} cannot be unpacked: {e}", path.display())),
            };
            let from = unpacked(&mut file).map_err(damaged)?;
            let mut to = File::create(&plain).map_err(OciError::io("making a file for the archive"))?;
            io::copy(&mut Hashed::new(from, IMAGE_UNPACKED_MAX, watch), &mut to).map_err(damaged)?;
            plain
        } else {
            path.to_owned()
        };
        let mut file = File::open(&path).map_err(OciError::io(what()))?;
        let members = index(&mut file, MEMBERS_MAX)
            .map_err(|e| OciError::malformed(format!("the archive of the image is damaged: {}", e.text)))?;
        // As with any archive, what comes later counts.
        Ok(Self::Archive(path, members.into_iter().map(|m| (m.path.clone(), m)).collect()))
    }

    /// File, start and size of what is called `name`.
    fn find(&self, name: &str) -> Result<Option<(PathBuf, u64, u64)>, OciError> {
        let unsafe_name = || OciError::malformed(format!("the image names a file `{}`", shown(name)));
        let parts = safe_parts(name.as_bytes()).map_err(|_| unsafe_name())?;
        let name = String::from_utf8_lossy(&parts.join(&b'/')).into_owned();
        match self {
            Self::Directory(dir) => {
                let path = dir.join(&name);
                match fs::metadata(&path) {
                    Ok(stat) if stat.is_file() => Ok(Some((path, 0, stat.len()))),
                    Ok(_) => Err(unsafe_name()),
                    Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
                    Err(e) => Err(OciError::Io { what: format!("reading {}", path.display()), source: e }),
                }
            }
            Self::Archive(path, members) => {
                let mut at = name;
                for _ in 0..DEPTH_MAX {
                    let Some(member) = members.get(&at) else { return Ok(None) };
                    let Some(link) = &member.link else { return Ok(Some((path.clone(), member.offset, member.bytes))) };
                    // Layers that are the same are written once, and links to that.
                    at = target(&at, link, members).ok_or_else(unsafe_name)?;
                }
                Err(unsafe_name())
            }
        }
    }

    fn need(&self, name: &str) -> Result<(PathBuf, u64, u64), OciError> {
        self.find(name)?.ok_or_else(|| OciError::malformed(format!("the image lacks its file `{}`", shown(name))))
    }

    fn document(&self, name: &str) -> Result<Vec<u8>, OciError> {
        let (path, offset, bytes) = self.need(name)?;
        if bytes > IMAGE_DOCUMENT_MAX {
            return Err(OciError::Limit { what: "bytes of a document of an image", max: IMAGE_DOCUMENT_MAX });
        }
        let mut out = Vec::new();
        region(&path, offset, bytes)?.read_to_end(&mut out).map_err(OciError::io("reading the image"))?;
        Ok(out)
    }

    /// A document by its digest, which it is then known to have.
    fn verified(&self, wanted: &Descriptor) -> Result<Vec<u8>, OciError> {
        let bytes = self.document(&blob(wanted.digest))?;
        if Digest::of(&bytes) != wanted.digest || bytes.len() as u64 != wanted.size {
            return Err(OciError::Digest("a document of the image".to_owned()));
        }
        Ok(bytes)
    }
}

/// Where a link in an archive leads: from where it is, or, of a hard link, from the top.
fn target(at: &str, link: &str, members: &BTreeMap<String, Member>) -> Option<String> {
    if members.contains_key(link) {
        return Some(link.to_owned());
    }
    let mut parts: Vec<&str> = at.split('/').collect();
    parts.pop();
    for part in link.split('/').filter(|p| !matches!(*p, "" | ".")) {
        if part == ".." {
            parts.pop()?;
        } else {
            parts.push(part);
        }
    }
    Some(parts.join("/"))
}

fn blob(digest: Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

fn region(path: &Path, offset: u64, bytes: u64) -> Result<io::Take<File>, OciError> {
    let mut file = File::open(path).map_err(OciError::io("opening the image"))?;
    file.seek(SeekFrom::Start(offset)).map_err(OciError::io("reading the image"))?;
    Ok(file.take(bytes))
}

fn several(names: &[String]) -> OciError {
    let names: Vec<String> = names.iter().take(10).map(|n| shown(n)).collect();
    let them =
        if names.is_empty() { "name it by its digest".to_owned() } else { format!("it has: {}", names.join(", ")) };
    OciError::malformed(format!(
        "the archive holds several images or not the one asked for; say which with local:PATH#IMAGE ({them})"
    ))
}

fn layout(shelf: &Shelf, name: String, which: Option<&str>, watch: &dyn Watch) -> Result<Image, OciError> {
    let Document::Index(list) = document(&shelf.document("index.json")?)? else {
        return Err(OciError::malformed("the index of the image is none"));
    };
    let called = |d: &Descriptor| {
        let all = d.annotations.iter().flatten();
        all.filter(|(k, _)| NAMES.contains(&k.as_str())).map(|(_, v)| v.clone()).collect::<Vec<_>>()
    };
    let fits = |d: &&Descriptor| which.is_none_or(|w| d.digest.to_string() == w || called(d).iter().any(|n| n == w));
    let found: Vec<Descriptor> = list.iter().filter(fits).cloned().collect();
    let names = || list.iter().flat_map(called).collect::<Vec<_>>();
    let distinct: std::collections::BTreeSet<_> = found.iter().flat_map(called).collect();
    let mut at = match found.as_slice() {
        [] => return Err(several(&names())),
        [one] => one.clone(),
        // The same image for several platforms.
        _ if distinct.len() <= 1 || which.is_some() => choose(&found)?.clone(),
        _ => return Err(several(&names())),
    };
    for _ in 0..DEPTH_MAX {
        match document(&shelf.verified(&at)?)? {
            Document::Index(list) => at = choose(&list)?.clone(),
            Document::Manifest(manifest) => {
                let (settings, contents) = config(&shelf.verified(&manifest.config)?)?;
                if contents.len() != manifest.layers.len() {
                    return Err(OciError::malformed("the image has more or fewer layers than its configuration says"));
                }
                let mut layers = Vec::new();
                for (n, (layer, content)) in manifest.layers.iter().zip(contents).enumerate() {
                    let (file, offset, bytes) = shelf.need(&blob(layer.digest))?;
                    watch.step(&format!("Verifying layer {} of {}", n + 1, manifest.layers.len()));
                    let read = Hashed::new(region(&file, offset, bytes)?, layer.size, watch).finish();
                    let found = read.map_err(|e| match e.kind() {
                        io::ErrorKind::ConnectionAborted => OciError::Cancelled,
                        _ => OciError::Digest(format!("layer {}", n + 1)),
                    })?;
                    if found != layer.digest || bytes != layer.size {
                        return Err(OciError::Digest(format!("layer {}", n + 1)));
                    }
                    layers.push(Layer { file, offset, bytes, content });
                }
                return Ok(Image { name, digest: at.digest, config: settings, layers });
            }
        }
    }
    Err(OciError::malformed("the indexes of the image lead nowhere"))
}

fn saved(shelf: &Shelf, name: String, which: Option<&str>) -> Result<Image, OciError> {
    let list: Vec<Saved> = serde_json::from_slice(&shelf.document("manifest.json")?).map_err(|e| {
        OciError::malformed(format!("the manifest of the image is malformed: {}", shown(&e.to_string())))
    })?;
    let fits = |s: &&Saved| {
        which.is_none_or(|w| {
            s.config.contains(w.trim_start_matches("sha256:")) && w.starts_with("sha256:")
                || s.repo_tags.iter().flatten().any(|t| t == w)
        })
    };
    let found: Vec<&Saved> = list.iter().filter(fits).collect();
    let [one] = found.as_slice() else {
        return Err(several(&list.iter().flat_map(|s| s.repo_tags.clone().unwrap_or_default()).collect::<Vec<_>>()));
    };
    if one.layers.len() > IMAGE_LAYERS_MAX {
        return Err(OciError::Limit { what: "layers of an image", max: IMAGE_LAYERS_MAX as u64 });
    }
    let bytes = shelf.document(&one.config)?;
    let digest = Digest::of(&bytes);
    // The configuration is named after its digest; each layer's is in it.
    let stem = one.config.trim_end_matches(".json").rsplit('/').next().unwrap_or_default();
    if stem.parse::<HexName>().is_ok() && stem != digest.hex() {
        return Err(OciError::Digest("the configuration of the image".to_owned()));
    }
    let (settings, contents) = config(&bytes)?;
    if contents.len() != one.layers.len() {
        return Err(OciError::malformed("the image has more or fewer layers than its configuration says"));
    }
    let mut layers = Vec::new();
    for (layer, content) in one.layers.iter().zip(contents) {
        let (file, offset, bytes) = shelf.need(layer)?;
        layers.push(Layer { file, offset, bytes, content });
    }
    Ok(Image { name, digest, config: settings, layers })
}

/// 64 hexadecimal digits.
struct HexName;

impl std::str::FromStr for HexName {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        if text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit()) { Ok(Self) } else { Err(()) }
    }
}
