//! Templates that were built from recipes, or captured from a running machine: versions, and the tags that point to them.
//!
//! ```text
//! templates/NAME:vN/manifest.json   one version; never changed
//! templates/.tags.json              which version each tag means, and the highest number each name has had
//! templates/.tags.lock              held while either is changed
//! ```
//!
//! What a version is made of lies with the snapshots: the manifest names one, which is the template's own.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use mainbrella_types::limits::{BUILT_MANIFEST_MAX, TEMPLATE_TAGS_MAX, TEMPLATE_VERSIONS_MAX};
use mainbrella_types::{SizeClass, SnapshotKey, SnapshotKind, TemplateName};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::error::ImageError;
use super::rootfs::{Package, languages};
use super::{ImageStore, TEMPLATES, recipe, rootfs, shelf, text};
use crate::machine::Language;

const FORM: u32 = 1;
const MANIFEST: &str = "manifest.json";
const TAGS: &str = ".tags.json";
const LOCK: &str = ".tags.lock";
/// What is half made begins so.
const HALF: &str = ".half-";

/// What machines of a template are set to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BuiltSettings {
    /// Environment of every command.
    pub env: BTreeMap<String, String>,
    /// Directory commands begin in.
    pub workdir: String,
    /// `USER` or `USER:GROUP`, by name or number; `None`: root.
    pub user: Option<String>,
    /// The words in front of [`Self::cmd`].
    pub entrypoint: Vec<String>,
    /// The words of the start command, or those behind the entry point.
    pub cmd: Vec<String>,
    /// What runs a command that is given as a line.
    pub shell: Vec<String>,
    /// Ports that are listened on: `8080/tcp`.
    pub ports: Vec<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// How to tell that the start command is ready.
    pub probe: Option<BuiltProbe>,
}

impl BuiltSettings {
    /// The command a machine starts with; empty when there is none.
    #[must_use]
    pub fn start(&self) -> Vec<String> {
        self.entrypoint.iter().chain(&self.cmd).cloned().collect()
    }
}

/// A command that succeeds when the start command is ready. Times in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BuiltProbe {
    /// The command.
    pub argv: Vec<String>,
    /// Between the end of one try and the next, once the start period is over.
    pub interval_ms: u64,
    /// Longest time of one try.
    pub timeout_ms: u64,
    /// After the start, how long failures do not count.
    pub start_period_ms: u64,
    /// Between tries in the start period.
    pub start_interval_ms: u64,
    /// Failures in a row that mean it will not be ready; at least one.
    pub retries: u32,
}

/// A version to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NewBuilt {
    /// What it is made of. Belongs to it from when it is published.
    #[serde(with = "text")]
    pub snapshot: SnapshotKey,
    /// Whether memory was captured, too.
    #[serde(with = "text")]
    pub kind: SnapshotKind,
    /// The size it was made in.
    #[serde(with = "text")]
    pub size: SizeClass,
    /// Bytes on disk that it has for itself.
    pub bytes: u64,
    /// The template with a root image of its own that all began with.
    #[serde(with = "text")]
    pub origin: TemplateName,
    /// What it was built on, as the recipe says.
    pub base: String,
    /// Digest of that.
    pub base_digest: String,
    /// The recipe. `None`: it was captured.
    pub recipe: Option<String>,
    /// What it depends on: equal keys mean equal templates as far as can be told.
    pub key: String,
    /// What its machines are set to.
    pub settings: BuiltSettings,
    /// Packages of what it was built on.
    pub packages: Vec<Package>,
}

/// A version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuiltTemplate {
    /// Its name, with the number: `app:v3`.
    pub name: TemplateName,
    /// `sha256:` and a digest of all that it is.
    pub digest: String,
    /// When it was made, milliseconds since 1970.
    pub created_ms: i64,
    /// Tags that mean it, by name.
    pub tags: Vec<TemplateName>,
    /// What it is.
    pub made: NewBuilt,
}

impl BuiltTemplate {
    /// Languages of code contexts whose kernels are in it.
    #[must_use]
    pub fn languages(&self) -> Vec<Language> {
        languages(&self.made.packages)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    /// Tells it from the manifest of a root image.
    built_form: u32,
    name: String,
    created_ms: i64,
    digest: String,
    made: NewBuilt,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Tags {
    /// Tag → version.
    tags: BTreeMap<String, String>,
    /// Name → highest number it has had.
    last: BTreeMap<String, u32>,
}

impl ImageStore {
    fn shelf_dir(&self) -> PathBuf {
        self.data.join(TEMPLATES)
    }

    /// Held while versions or tags are changed. Blocks for as long as somebody else changes any.
    fn lock_tags(&self) -> Result<File, ImageError> {
        let dir = self.shelf_dir();
        let open = || {
            fs::create_dir_all(&dir)?;
            let lock = File::options().create(true).truncate(false).write(true).open(dir.join(LOCK))?;
            loop {
                match flock(&lock, FlockOperation::LockExclusive) {
                    Err(rustix::io::Errno::INTR) => {}
                    done => return done.map(|()| lock).map_err(io::Error::from),
                }
            }
        };
        open().map_err(|e| ImageError::io("locking the templates", e))
    }

    fn read_tags(&self) -> Result<Tags, ImageError> {
        match fs::read(self.shelf_dir().join(TAGS)) {
            Ok(text) => serde_json::from_slice(&text).map_err(|_| ImageError::malformed("the list of tags is damaged")),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Tags::default()),
            Err(e) => Err(ImageError::io("reading the list of tags", e)),
        }
    }

    fn write_tags(&self, tags: &Tags) -> Result<(), ImageError> {
        shelf::replace_json(&self.shelf_dir().join(TAGS), tags)
    }

    /// Version numbers of a name, in no order.
    fn versions_of(&self, family: &str) -> Vec<TemplateName> {
        let Ok(entries) = fs::read_dir(self.shelf_dir()) else { return Vec::new() };
        let names = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse::<TemplateName>().ok());
        names.filter(|name| name.family() == family && name.version().is_some()).collect()
    }

    /// Whether a name is that of templates with versions.
    pub(super) fn has_versions(&self, family: &str) -> bool {
        !self.versions_of(family).is_empty()
    }

    /// The version `name`, with those of `tags` that mean it.
    fn version(&self, name: &TemplateName, tags: &Tags) -> Option<BuiltTemplate> {
        name.version()?;
        let path = rootfs::place(&self.data, name).join(MANIFEST);
        if fs::metadata(&path).ok()?.len() > BUILT_MANIFEST_MAX {
            return None;
        }
        let m: Manifest = shelf::read_json(&path)?;
        if m.built_form != FORM || m.name != name.as_str() {
            return None;
        }
        let mine = tags.tags.iter().filter(|(_, version)| **version == m.name);
        let tags = mine.filter_map(|(tag, _)| tag.parse().ok()).collect();
        Some(BuiltTemplate { name: name.clone(), digest: m.digest, created_ms: m.created_ms, tags, made: m.made })
    }

    /// Makes `made` the next version of `family`. No tag means it yet.
    ///
    /// # Errors
    /// [`ImageError`] says what to do.
    pub fn publish_built(&self, family: &TemplateName, made: &NewBuilt) -> Result<BuiltTemplate, ImageError> {
        if family.label().is_some() {
            return Err(ImageError::Labelled(family.to_string()));
        }
        if recipe::named(family.as_str()).is_ok() || rootfs::place(&self.data, family).exists() {
            return Err(ImageError::NameTaken(family.to_string()));
        }
        let _lock = self.lock_tags()?;
        let mut tags = self.read_tags()?;
        let there = self.versions_of(family.as_str());
        if there.len() >= TEMPLATE_VERSIONS_MAX {
            return Err(ImageError::TooMany { what: "versions of a template", max: TEMPLATE_VERSIONS_MAX });
        }
        let before = there.iter().filter_map(TemplateName::version).max().unwrap_or(0);
        let last = tags.last.entry(family.to_string()).or_default();
        *last = before.max(*last) + 1;
        let name = family
            .with_label(&format!("v{last}"))
            .map_err(|_| ImageError::malformed("the number of a version is not a label"))?;
        // A number is used up before anything carries it.
        self.write_tags(&tags)?;
        let described = serde_json::to_vec(made).map_err(|e| ImageError::io("describing a template", e.into()))?;
        let digest = format!("sha256:{}", shelf::digest_of([b"built 1".as_slice(), &described]));
        let manifest = Manifest {
            built_form: FORM,
            name: name.to_string(),
            created_ms: shelf::now_ms(),
            digest,
            made: made.clone(),
        };
        let half = self.shelf_dir().join(format!("{HALF}{}", name.label().unwrap_or_default()));
        self.put_version(&half, &rootfs::place(&self.data, &name), &manifest)
            .map_err(|e| ImageError::io("keeping a template", e))?;
        self.version(&name, &tags).ok_or_else(|| ImageError::malformed("the template was not found after it was made"))
    }

    fn put_version(&self, half: &Path, place: &Path, manifest: &Manifest) -> io::Result<()> {
        match fs::remove_dir_all(half) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        fs::create_dir(half)?;
        let text = serde_json::to_vec_pretty(manifest)?;
        fs::write(half.join(MANIFEST), text)?;
        File::open(half.join(MANIFEST))?.sync_all()?;
        File::open(half)?.sync_all()?;
        fs::rename(half, place)?;
        File::open(self.shelf_dir())?.sync_all()
    }

    /// The version that `name`, a version or a tag, means.
    #[must_use]
    pub fn built(&self, name: &TemplateName) -> Option<BuiltTemplate> {
        let tags = self.read_tags().unwrap_or_default();
        if let Some(version) = self.version(name, &tags) {
            return Some(version);
        }
        let version = tags.tags.get(name.as_str())?.parse().ok()?;
        self.version(&version, &tags)
    }

    /// Every version, by name and number.
    #[must_use]
    pub fn built_all(&self) -> Vec<BuiltTemplate> {
        let tags = self.read_tags().unwrap_or_default();
        let Ok(entries) = fs::read_dir(self.shelf_dir()) else { return Vec::new() };
        let names = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse::<TemplateName>().ok());
        let mut all: Vec<_> = names.filter_map(|name| self.version(&name, &tags)).collect();
        all.sort_by(|a, b| (a.name.family(), a.name.version()).cmp(&(b.name.family(), b.name.version())));
        all
    }

    /// The template that `name` means: itself, or the version a tag points to. `None`: there is no such template.
    #[must_use]
    pub fn resolve(&self, name: &TemplateName) -> Option<TemplateName> {
        if name.label().is_none() && rootfs::present(&self.data, name).is_some() {
            return Some(name.clone());
        }
        self.built(name).map(|b| b.name)
    }

    /// Lets `tag` mean what `source`, a version or a tag, means now.
    ///
    /// # Errors
    /// [`ImageError::NotBuilt`] when there is no such version; when `tag` is the name of a version or of a template without versions.
    pub fn tag(&self, source: &TemplateName, tag: &TemplateName) -> Result<BuiltTemplate, ImageError> {
        if tag.version().is_some() {
            return Err(ImageError::Numbered(tag.to_string()));
        }
        let family = TemplateName::family(tag);
        let whole = family.parse().is_ok_and(|f: TemplateName| rootfs::place(&self.data, &f).exists());
        if recipe::named(family).is_ok() || whole {
            return Err(ImageError::NameTaken(family.to_owned()));
        }
        let _lock = self.lock_tags()?;
        let meant = self.built(source).ok_or_else(|| ImageError::NotBuilt(source.to_string()))?;
        let mut tags = self.read_tags()?;
        tags.tags.insert(tag.to_string(), meant.name.to_string());
        if tags.tags.len() > TEMPLATE_TAGS_MAX {
            return Err(ImageError::TooMany { what: "tags", max: TEMPLATE_TAGS_MAX });
        }
        self.write_tags(&tags)?;
        self.version(&meant.name, &tags).ok_or_else(|| ImageError::NotBuilt(source.to_string()))
    }

    /// Removes a tag; `false` when there was none. What it meant stays.
    ///
    /// # Errors
    /// When the list cannot be read or written.
    pub fn untag(&self, tag: &TemplateName) -> Result<bool, ImageError> {
        let _lock = self.lock_tags()?;
        let mut tags = self.read_tags()?;
        let was_there = tags.tags.remove(tag.as_str()).is_some();
        if was_there {
            self.write_tags(&tags)?;
        }
        Ok(was_there)
    }

    /// Removes a version and says what it was made of, which is then nobody's. `None`: there was none. Machines made of it go on.
    ///
    /// # Errors
    /// [`ImageError::Tagged`] while a tag means it.
    pub fn remove_built(&self, version: &TemplateName) -> Result<Option<SnapshotKey>, ImageError> {
        let _lock = self.lock_tags()?;
        let tags = self.read_tags()?;
        let Some(there) = self.version(version, &tags) else { return Ok(None) };
        if !there.tags.is_empty() {
            let tags = there.tags.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            return Err(ImageError::Tagged { name: version.to_string(), tags });
        }
        let half = self.shelf_dir().join(format!("{HALF}gone"));
        let gone = || {
            match fs::remove_dir_all(&half) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
            fs::rename(rootfs::place(&self.data, version), &half)?;
            File::open(self.shelf_dir())?.sync_all()?;
            fs::remove_dir_all(&half)
        };
        gone().map_err(|e| ImageError::io("removing a template", e))?;
        Ok(Some(there.made.snapshot))
    }

    /// Snapshots that belong to versions and to steps of builds. An error: not all of them are known.
    ///
    /// # Errors
    /// When a list or a manifest cannot be read.
    pub fn kept_snapshots(&self) -> Result<HashSet<SnapshotKey>, ImageError> {
        let mut kept = self.step_snapshots()?;
        let entries = match fs::read_dir(self.shelf_dir()) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(kept),
            entries => entries.map_err(|e| ImageError::io("listing the templates", e))?,
        };
        for entry in entries {
            let entry = entry.map_err(|e| ImageError::io("listing the templates", e))?;
            let name = entry.file_name();
            let Some(name) = name.to_str().and_then(|n| n.parse::<TemplateName>().ok()) else { continue };
            if name.version().is_none() {
                continue;
            }
            // One that was removed meanwhile keeps nothing.
            match self.version(&name, &Tags::default()) {
                Some(version) => drop(kept.insert(version.made.snapshot)),
                None if entry.path().exists() => {
                    return Err(ImageError::malformed(format!("the manifest of template {name} cannot be read")));
                }
                None => {}
            }
        }
        Ok(kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::CachedStep;

    fn name(text: &str) -> TemplateName {
        text.parse().expect("a name")
    }

    fn key(n: u128) -> SnapshotKey {
        SnapshotKey::new(uuid::Uuid::from_u128(n))
    }

    fn made(n: u128) -> NewBuilt {
        NewBuilt {
            snapshot: key(n),
            kind: SnapshotKind::Workspace,
            size: SizeClass::Small,
            bytes: 7,
            origin: name("python"),
            base: "python".to_owned(),
            base_digest: "sha256:0".to_owned(),
            recipe: Some("FROM python\n".to_owned()),
            key: format!("{n:064x}"),
            settings: BuiltSettings::default(),
            packages: Vec::new(),
        }
    }

    fn store() -> (tempfile::TempDir, ImageStore) {
        let dir = tempfile::tempdir().expect("dir");
        let store = ImageStore::open(dir.path()).expect("store");
        (dir, store)
    }

    #[test]
    fn versions_count_up_and_no_number_is_used_twice() {
        let (_dir, store) = store();
        let app = name("app");
        let one = store.publish_built(&app, &made(1)).expect("first");
        let two = store.publish_built(&app, &made(2)).expect("second");
        assert_eq!((one.name.as_str(), two.name.as_str()), ("app:v1", "app:v2"));
        assert_ne!(one.digest, two.digest);
        assert_eq!(store.remove_built(&two.name).expect("removed"), Some(key(2)));
        assert_eq!(store.remove_built(&two.name).expect("nothing there"), None);
        assert_eq!(store.publish_built(&app, &made(3)).expect("third").name, name("app:v3"));
        assert_eq!(store.built(&one.name).expect("there").made, made(1));
        let all: Vec<_> = store.built_all().into_iter().map(|b| b.name.to_string()).collect();
        assert_eq!(all, ["app:v1", "app:v3"]);
        assert!(matches!(store.publish_built(&name("python"), &made(4)), Err(ImageError::NameTaken(_))));
        assert!(matches!(store.publish_built(&name("app:x"), &made(4)), Err(ImageError::Labelled(_))));
    }

    #[test]
    fn a_tag_moves_and_keeps_what_it_means() {
        let (_dir, store) = store();
        let (app, stable) = (name("app"), name("app:stable"));
        let one = store.publish_built(&app, &made(1)).expect("first").name;
        let two = store.publish_built(&app, &made(2)).expect("second").name;
        assert_eq!(store.resolve(&app), None, "no tag says which is the latest");
        assert_eq!(store.tag(&one, &app).expect("tagged").tags, std::slice::from_ref(&app));
        store.tag(&app, &stable).expect("a tag of what a tag means");
        store.tag(&two, &app).expect("moved");
        assert_eq!((store.resolve(&app), store.resolve(&stable)), (Some(two.clone()), Some(one.clone())));
        assert_eq!(store.resolve(&two), Some(two.clone()));
        assert!(matches!(store.remove_built(&one), Err(ImageError::Tagged { .. })));
        assert!(store.untag(&stable).expect("there") && !store.untag(&stable).expect("gone"));
        assert_eq!(store.remove_built(&one).expect("removed"), Some(key(1)));
        for (from, to) in [("app:v9", "app:x"), ("app:v2", "app:v1"), ("app:v2", "python:x"), ("nothing", "app:x")] {
            assert!(store.tag(&name(from), &name(to)).is_err(), "{from} {to}");
        }
        store.tag(&two, &name("prod")).expect("another name may mean it");
        assert_eq!(store.built(&name("prod")).expect("there").tags, [app, name("prod")]);
    }

    #[test]
    fn what_templates_and_steps_are_made_of_is_kept_and_what_cannot_be_read_is_not_taken_for_nothing() {
        let (dir, store) = store();
        assert!(store.kept_snapshots().expect("read").is_empty());
        store.publish_built(&name("app"), &made(1)).expect("first");
        let step = CachedStep { snapshot: key(2), bytes: 1, used_ms: 5 };
        let digits = format!("{:064x}", 9);
        store.keep_step(&digits, &step).expect("kept");
        assert!(store.keep_step("../x", &step).is_err());
        assert_eq!(store.kept_snapshots().expect("read"), HashSet::from([key(1), key(2)]));
        assert!(store.step(&digits).expect("there").used_ms > 5, "a use is noted");
        assert_eq!(store.steps().len(), 1);
        store.forget_step(&digits).expect("forgotten");
        store.forget_step(&digits).expect("again");
        assert_eq!(store.step(&digits), None);
        assert_eq!(store.kept_snapshots().expect("read"), HashSet::from([key(1)]));
        fs::write(dir.path().join("templates/app:v1/manifest.json"), "{").expect("write");
        assert!(store.kept_snapshots().is_err());
    }

    #[test]
    fn half_a_version_is_none() {
        let (dir, store) = store();
        fs::create_dir_all(dir.path().join("templates/.half-v1")).expect("mkdir");
        fs::create_dir_all(dir.path().join("templates/app:v7")).expect("mkdir");
        assert!(store.built_all().is_empty() && store.templates().is_empty());
        assert_eq!(store.publish_built(&name("app"), &made(1)).expect("made").name, name("app:v8"));
    }
}
