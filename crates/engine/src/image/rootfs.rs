//! The root image of a template: Debian packages → a tree → erofs.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use mainbrella_types::TemplateName;
use serde::{Deserialize, Serialize};

use super::apt::Apt;
use super::error::ImageError;
use super::kernel::SUITE;
use super::mirror::{self, Mirror};
use super::progress::{Event, Progress};
use super::recipe::{FINISH, Recipe};
use super::shelf::{self, Bench};
use super::tool::{self, Tool};
use crate::machine::Language;

/// Form of the manifest.
pub(super) const FORM: u32 = 1;
const BOOTSTRAP: Duration = Duration::from_secs(60 * 60);
const TREE: Duration = Duration::from_secs(10 * 60);
const PACK: Duration = Duration::from_secs(20 * 60);
/// Compression of the image; see `guest-image/README.md` for the measurement behind it.
const COMPRESSION: &str = "-zlz4hc";
/// Where the tree is made, inside the workspace; everything in it is named relative to it.
pub(super) const STAGE: &str = "stage";
/// The tree, inside [`STAGE`].
pub(super) const TREE_DIR: &str = "root";

/// What packages installed in the build and later leave out.
const DPKG: &str = "path-exclude=/usr/share/doc/*\npath-include=/usr/share/doc/*/copyright\npath-exclude=/usr/share/man/*\n\
    path-exclude=/usr/share/info/*\npath-exclude=/usr/share/locale/*\npath-exclude=/usr/share/lintian/*\n";
const POLICY: &str = "#!/bin/sh\n# No service is started or stopped by installing a package.\nexit 101\n";
/// What every login shell reads first, and so every command given as text. Debian's own starts three programs, each of which
/// costs tens of milliseconds under software emulation; this one starts none and does the same.
const PROFILE: &str = r#"# /etc/profile: read by login shells of the Bourne family. It starts no program: that would be paid by every command.
if [ -O / ]; then
  PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
else
  PATH="/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games"
fi
export PATH
if [ "${PS1-}" ]; then
  if [ "${BASH-}" ] && [ "$BASH" != "/bin/sh" ]; then
    [ ! -f /etc/bash.bashrc ] || . /etc/bash.bashrc
  elif [ -O / ]; then
    PS1='# '
  else
    PS1='$ '
  fi
fi
for i in /etc/profile.d/*.sh; do
  [ ! -r "$i" ] || . "$i"
done
unset i
"#;
const LANGUAGE: &str = "export LANG=C.UTF-8\n";

/// A package in an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
}

/// The root image of a template on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateImage {
    /// Name of the template.
    pub name: TemplateName,
    /// What it is, in one line.
    pub description: String,
    /// `sha256:` and the digest of the image file.
    pub digest: String,
    /// The image: erofs.
    pub rootfs: PathBuf,
    /// Size of the image.
    pub bytes: u64,
    /// Digest of the recipe it was made from; compare with [`Recipe::digest`].
    pub recipe_digest: String,
    /// Every package in it, by name.
    pub packages: Vec<Package>,
    /// When it was made, milliseconds since 1970.
    pub created_ms: i64,
    /// The image of a container it was made of.
    pub image: Option<ImageNote>,
}

/// What a template that was made of an image of a container remembers of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageNote {
    /// What it was called.
    pub name: String,
    /// Its digest.
    pub digest: String,
    /// How it says it is run.
    pub config: mainbrella_oci::ImageConfig,
}

impl TemplateImage {
    /// Languages of code contexts whose kernels are in it.
    #[must_use]
    pub fn languages(&self) -> Vec<Language> {
        languages(&self.packages)
    }
}

/// Languages whose kernels are among `packages`.
pub(super) fn languages(packages: &[Package]) -> Vec<Language> {
    let has = |name: &&str| packages.iter().any(|p| p.name == *name);
    Language::ALL.into_iter().filter(|l| l.packages().iter().all(has)).collect()
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Manifest {
    pub(super) form: u32,
    pub(super) name: String,
    pub(super) description: String,
    pub(super) digest: String,
    pub(super) bytes: u64,
    pub(super) recipe_digest: String,
    pub(super) suite: String,
    pub(super) created_ms: i64,
    pub(super) packages: Vec<Package>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) image: Option<ImageNote>,
}

pub(super) fn place(data: &Path, name: &TemplateName) -> PathBuf {
    data.join("templates").join(name.as_str())
}

/// The image of template `name`, if it is there and whole.
pub(super) fn present(data: &Path, name: &TemplateName) -> Option<TemplateImage> {
    let dir = place(data, name);
    let manifest: Manifest = shelf::read_json(&dir.join("manifest.json"))?;
    let rootfs = dir.join("rootfs.erofs");
    let bytes = fs::metadata(&rootfs).ok()?.len();
    let whole = manifest.form == FORM && manifest.name == name.as_str() && manifest.bytes == bytes;
    let Manifest { description, digest, recipe_digest, packages, created_ms, image, .. } = manifest;
    whole.then(|| TemplateImage {
        name: name.clone(),
        description,
        digest,
        rootfs,
        bytes,
        recipe_digest,
        packages,
        created_ms,
        image,
    })
}

/// Every image that is there, by name.
pub(super) fn list(data: &Path) -> Vec<TemplateImage> {
    let Ok(entries) = fs::read_dir(data.join("templates")) else { return Vec::new() };
    let names = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse::<TemplateName>().ok());
    let mut found: Vec<_> = names.filter_map(|name| present(data, &name)).collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// Whether this process is root of its user namespace.
pub(super) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn may_mount() -> bool {
    caps::has_cap(None, caps::CapSet::Effective, caps::Capability::CAP_SYS_ADMIN).unwrap_or(false)
}

/// mmdebstrap with the rights it needs. Root's mounts must not outlive a killed build: they are made in a namespace. Root
/// without the right to mount makes none; other users get namespaces from mmdebstrap itself.
fn mmdebstrap(bench: &Bench) -> Result<Tool, ImageError> {
    const NAME: &str = "mmdebstrap";
    let tool = match (is_root(), may_mount()) {
        (true, true) => Tool::contained(NAME, NAME, BOOTSTRAP)?.arg("--mode=root"),
        (true, false) => Tool::new(NAME, NAME, BOOTSTRAP)?.arg("--mode=root"),
        (false, _) => Tool::new(NAME, NAME, BOOTSTRAP)?.arg("--mode=unshare"),
    };
    Ok(tool.holding(bench.lock()?))
}

/// `program` with the rights of root over the tree: as it is for root, else inside mmdebstrap's user namespace.
fn as_root(bench: &Bench, program: &'static str, package: &'static str, limit: Duration) -> Result<Tool, ImageError> {
    let tool = if is_root() {
        Tool::new(program, package, limit)?
    } else {
        let path = tool::find(program, package)?;
        Tool::new("mmdebstrap", "mmdebstrap", limit)?.arg("--unshare-helper").arg(path)
    };
    Ok(tool.holding(bench.lock()?))
}

/// mkfs.erofs in the present directory. It asks for the absolute path of the tree, which root of a user namespace may
/// not walk: the directories above are closed to others. There, the present directory is bound to a public name first.
fn packer(bench: &Bench) -> Result<Tool, ImageError> {
    const BOUND: &str = "mount --no-canonicalize --bind . /mnt && cd /mnt && exec \"$@\"";
    if is_root() {
        return as_root(bench, "mkfs.erofs", "erofs-utils", PACK);
    }
    let program = tool::find("mkfs.erofs", "erofs-utils")?;
    Ok(as_root(bench, "sh", "dash", PACK)?.args(["-c", BOUND, "sh"]).arg(program))
}

/// Removes the tree of a build; files in it may belong to other users of a user namespace.
pub(super) fn remove_tree(bench: &Bench, workspace: &Path, progress: &dyn Progress) -> Result<(), ImageError> {
    let stage = workspace.join(STAGE);
    if is_root() || !stage.join(TREE_DIR).exists() {
        return Ok(());
    }
    as_root(bench, "rm", "coreutils", TREE)?.args(["-rf", TREE_DIR]).dir(&stage).run(progress).map(drop)
}

/// Makes the image and puts it on the shelf.
pub(super) fn build(
    bench: &Bench,
    data: &Path,
    recipe: &Recipe,
    mirror: &Mirror,
    progress: &dyn Progress,
) -> Result<TemplateImage, ImageError> {
    // Everything needed is asked for before anything is downloaded.
    tool::find("mmdebstrap", "mmdebstrap")?;
    tool::find("mkfs.erofs", "erofs-utils")?;
    if !is_root() {
        tool::find("newuidmap", "uidmap")?;
    }
    let work = bench.workspace()?;
    let result = build_in(bench, data, work.path(), recipe, mirror, progress);
    if let Err(error) = remove_tree(bench, work.path(), progress) {
        tracing::warn!(%error, "the tree of a build could not be removed");
    }
    result
}

fn build_in(
    bench: &Bench,
    data: &Path,
    work: &Path,
    recipe: &Recipe,
    mirror: &Mirror,
    progress: &dyn Progress,
) -> Result<TemplateImage, ImageError> {
    let io = |what: &'static str| move |e: std::io::Error| ImageError::io(what, e);
    let stage = work.join(STAGE);
    let overlay = stage.join("overlay");
    for dir in [&stage, &overlay, &work.join("apt")] {
        fs::create_dir(dir).map_err(io("making a directory for the build"))?;
    }
    // Root of a user namespace is another user here; the workspace around it is closed to others.
    fs::set_permissions(&stage, fs::Permissions::from_mode(0o777)).map_err(io("opening the build directory"))?;

    progress.event(Event::Step("Reading the Debian package lists"));
    let apt = Apt::update(&work.join("apt"), mirror, SUITE, progress)?;
    let epoch = apt.newest_release()?.to_string();
    let settings = mirror::transport_settings(progress)?;
    lay_over(&overlay, recipe, mirror, &settings).map_err(io("writing the files of the recipe"))?;
    let list = mirror.list(SUITE, mirror::keyring()?, " arch=amd64");
    fs::write(stage.join("mirror.list"), list).map_err(io("writing the package sources"))?;
    fs::write(stage.join("finish.sh"), FINISH).map_err(io("writing the finishing script"))?;

    progress.event(Event::Step("Installing Debian packages"));
    bootstrap(bench, &stage, work, recipe, &settings, &epoch, progress)?;

    progress.event(Event::Step("Preparing the file system"));
    let made = work.join("made");
    fs::create_dir(&made).map_err(io("making a directory for the image"))?;
    // `dev` is skipped: making device nodes needs more than a user namespace gives, and machines have devtmpfs.
    as_root(bench, "mkdir", "coreutils", TREE)?.arg(TREE_DIR).dir(&stage).run(progress)?;
    as_root(bench, "tar", "tar", TREE)?
        .args(["-xpf", "rootfs.tar", "-C", TREE_DIR, "--exclude=./dev/*"])
        .args(["--numeric-owner", "--xattrs", "--xattrs-include=security.capability"])
        .dir(&stage)
        .run(progress)?;
    fs::remove_file(stage.join("rootfs.tar")).map_err(io("removing the package archive"))?;
    as_root(bench, "sh", "dash", TREE)?
        .args(["finish.sh", TREE_DIR, "overlay"])
        .args(&recipe.remove)
        .dir(&stage)
        .run(progress)?;
    let status =
        fs::read_to_string(stage.join(TREE_DIR).join("var/lib/dpkg/status")).map_err(io("reading the package list"))?;
    let packages = installed(&status);

    progress.event(Event::Step("Packing the image"));
    let image = pack(bench, &stage, &made, &recipe.digest, &epoch, progress)?;
    let manifest = Manifest {
        form: FORM,
        name: recipe.name.to_string(),
        description: recipe.description.clone(),
        digest: format!("sha256:{}", shelf::digest_file(&image).map_err(io("reading the image"))?),
        bytes: fs::metadata(&image).map_err(io("reading the image"))?.len(),
        recipe_digest: recipe.digest.clone(),
        suite: SUITE.to_owned(),
        created_ms: shelf::now_ms(),
        packages,
        image: None,
    };
    shelf::write_json(&made.join("manifest.json"), &manifest)?;
    bench.publish(&made, &place(data, &recipe.name))?;
    present(data, &recipe.name).ok_or_else(|| ImageError::malformed("the image was not found after it was made"))
}

/// Packs the tree in `stage` into an image in `made`. No time in it is later than `epoch`, seconds since 1970: the same tree makes
/// the same image. `digest` is of what it was made of.
pub(super) fn pack(
    bench: &Bench,
    stage: &Path,
    made: &Path,
    digest: &str,
    epoch: &str,
    progress: &dyn Progress,
) -> Result<PathBuf, ImageError> {
    let io = |what: &'static str| move |e: std::io::Error| ImageError::io(what, e);
    fs::write(stage.join("rootfs.erofs"), []).map_err(io("making the image file"))?;
    fs::set_permissions(stage.join("rootfs.erofs"), fs::Permissions::from_mode(0o666))
        .map_err(io("making the image file"))?;
    packer(bench)?
        .args(["--quiet", COMPRESSION])
        .arg(format!("-U{}", uuid(digest)))
        .args(["rootfs.erofs", TREE_DIR])
        .env("SOURCE_DATE_EPOCH", epoch)
        .dir(stage)
        .run(progress)?;
    let image = made.join("rootfs.erofs");
    fs::rename(stage.join("rootfs.erofs"), &image).map_err(io("taking the image"))?;
    if !is_erofs(&image) {
        return Err(ImageError::malformed("mkfs.erofs did not write an erofs image"));
    }
    Ok(image)
}

fn bootstrap(
    bench: &Bench,
    stage: &Path,
    work: &Path,
    recipe: &Recipe,
    settings: &[String],
    epoch: &str,
    progress: &dyn Progress,
) -> Result<(), ImageError> {
    let mut tool = mmdebstrap(bench)?
        .args(["--variant=minbase", "--format=tar", "--architectures=amd64", "--components=main"])
        .arg("--aptopt=APT::Install-Recommends \"false\"")
        .arg("--aptopt=Acquire::Languages \"none\"")
        .arg("--aptopt=Acquire::Retries \"3\"")
        .arg("--aptopt=Acquire::http::Timeout \"30\"")
        .args(settings.iter().map(|s| format!("--aptopt={}", s.trim_end_matches(';'))))
        .args(DPKG.lines().map(|l| format!("--dpkgopt={l}")))
        .arg(format!("--include={}", recipe.packages.join(",")))
        // Later installs in the machine shall not ask questions either.
        .arg("--customize-hook=echo 'debconf debconf/frontend select Noninteractive' | chroot \"$1\" debconf-set-selections")
        .env("SOURCE_DATE_EPOCH", epoch);
    if is_root() {
        // Beside the result, not in a /tmp that may be small. Root of a user namespace could not enter here.
        tool = tool.env("TMPDIR", work);
    }
    // What mmdebstrap says when it begins each part, and how far along that is.
    const PARTS: [(&str, f32); 6] = [
        ("running apt-get update", 0.02),
        ("downloading packages", 0.06),
        ("extracting archives", 0.12),
        ("installing essential packages", 0.2),
        ("installing remaining packages", 0.4),
        ("creating tarball", 0.95),
    ];
    tool.args([SUITE, "rootfs.tar", "mirror.list"])
        .dir(stage)
        .run_with(progress, |line| {
            if let Some((_, part)) = PARTS.iter().find(|(text, _)| line.contains(text)) {
                progress.event(Event::Fraction(*part));
            }
        })
        .map(drop)
}

/// Writes the files every image has and those of the recipe.
fn lay_over(overlay: &Path, recipe: &Recipe, mirror: &Mirror, settings: &[String]) -> std::io::Result<()> {
    let file = |path: &str, mode: u32, text: &str| -> std::io::Result<()> {
        let target = overlay.join(path.trim_start_matches('/'));
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(&target, text)?;
        fs::set_permissions(&target, fs::Permissions::from_mode(mode))
    };
    file("/etc/apt/sources.list.d/debian.sources", 0o644, &mirror.guest_sources(SUITE))?;
    file(
        "/etc/apt/apt.conf.d/90machine",
        0o644,
        &format!("Acquire::Languages \"none\";\n{}", mirror::guest_settings(settings)),
    )?;
    file("/etc/dpkg/dpkg.cfg.d/90machine", 0o644, DPKG)?;
    file("/usr/sbin/policy-rc.d", 0o755, POLICY)?;
    file("/etc/environment", 0o644, "LANG=C.UTF-8\n")?;
    file("/etc/profile", 0o644, PROFILE)?;
    file("/etc/profile.d/machine.sh", 0o644, LANGUAGE)?;
    file("/etc/gitconfig", 0o644, "[init]\n\tdefaultBranch = main\n")?;
    for (path, text) in &recipe.files {
        file(path, 0o644, text)?;
    }
    for (path, target) in &recipe.links {
        let link = overlay.join(path.trim_start_matches('/'));
        if let Some(parent) = link.parent() {
            fs::create_dir_all(parent)?;
        }
        symlink(target, link)?;
    }
    open_to_all(overlay)
}

/// Directories get mode 0755 whatever the umask of this process is: they lend it to those of the image.
fn open_to_all(dir: &Path) -> std::io::Result<()> {
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755))?;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            open_to_all(&entry.path())?;
        }
    }
    Ok(())
}

/// The packages a dpkg status file says are installed, by name.
pub(super) fn installed(status: &str) -> Vec<Package> {
    let field = |stanza: &str, name: &str| {
        stanza.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(": ")).map(|v| v.trim().to_owned())
    };
    let package = |stanza: &str| {
        let ok = field(stanza, "Status")? == "install ok installed";
        let (name, version) = (field(stanza, "Package")?, field(stanza, "Version")?);
        ok.then_some(Package { name, version })
    };
    let mut found: Vec<_> = status.split("\n\n").filter_map(package).collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// A UUID made of the start of a `sha256:…` digest: the same recipe makes the same file system identity.
fn uuid(digest: &str) -> String {
    let hex = digest.trim_start_matches("sha256:");
    uuid::Uuid::try_parse(hex.get(..32).unwrap_or_default()).unwrap_or_default().hyphenated().to_string()
}

fn is_erofs(path: &Path) -> bool {
    let mut head = [0; 1028];
    let read = fs::File::open(path).and_then(|mut f| f.read_exact(&mut head));
    read.is_ok() && head[1024..] == 0xE0F5_E1E2_u32.to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::super::recipe;
    use super::*;
    use std::process::Command;

    #[test]
    fn installed_packages_are_listed_without_removed_ones() {
        let status = "Package: b\nStatus: install ok installed\nVersion: 2\nDescription: x\n y\n\n\
                      Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n\n\
                      Package: a\nStatus: install ok installed\nVersion: 1:1-1\n";
        let names: Vec<_> = installed(status).into_iter().map(|p| (p.name, p.version)).collect();
        assert_eq!(names, [("a".into(), "1:1-1".into()), ("b".into(), "2".into())]);
    }

    #[test]
    fn a_file_system_identity_follows_from_the_recipe() {
        let digest = format!("sha256:{}", "0123456789abcdef".repeat(4));
        assert_eq!(uuid(&digest), "01234567-89ab-cdef-0123-456789abcdef");
    }

    /// Runs the real finishing script over a small tree, with the real overlay of a recipe.
    #[test]
    fn the_finishing_script_cleans_lays_over_and_stays_inside() {
        let dir = tempfile::tempdir().expect("dir");
        let root = dir.path().join("root");
        for (path, text) in [
            ("usr/bin/tool", "x"),
            ("usr/share/doc/p/copyright", "free"),
            ("usr/share/doc/p/README", "long"),
            ("usr/share/doc/q/changelog", "long"),
            ("usr/share/man/man1/tool.1", "man"),
            ("usr/lib/python3.13/EXTERNALLY-MANAGED", "no"),
            ("usr/lib/python3.13/os.py", "yes"),
            ("etc/machine-id", "abc"),
            ("etc/apt/sources.list.d/0000mirror.list", "deb x"),
            ("etc/ssh/ssh_host_rsa_key", "secret"),
            ("var/lib/apt/lists/x", "list"),
            ("var/log/dpkg.log", "log"),
            ("dev/null", ""),
        ] {
            let file = root.join(path);
            fs::create_dir_all(file.parent().expect("parent")).expect("mkdir");
            fs::write(file, text).expect("write");
        }
        let recipe = recipe::named("python").expect("recipe");
        let mirror = Mirror { main: "http://m.test/debian".into(), updates: true, security: None };
        let overlay = dir.path().join("overlay");
        fs::create_dir(&overlay).expect("mkdir");
        lay_over(&overlay, &recipe, &mirror, &[]).expect("overlay");
        fs::write(dir.path().join("finish.sh"), FINISH).expect("write");
        let status = Command::new("sh")
            .args(["finish.sh", "root", "overlay"])
            .args(&recipe.remove)
            .current_dir(dir.path())
            .status()
            .expect("runs");
        assert!(status.success());
        let text = |path: &str| fs::read_to_string(root.join(path)).ok();
        for gone in [
            "usr/share/doc/p/README",
            "usr/share/doc/q",
            "usr/share/man/man1",
            "usr/lib/python3.13/EXTERNALLY-MANAGED",
            "etc/apt/sources.list.d/0000mirror.list",
            "etc/ssh/ssh_host_rsa_key",
            "var/lib/apt/lists/x",
            "var/log/dpkg.log",
            "dev/null",
        ] {
            assert!(!root.join(gone).exists(), "{gone}");
        }
        assert_eq!(text("usr/share/doc/p/copyright").as_deref(), Some("free"));
        assert_eq!(text("usr/lib/python3.13/os.py").as_deref(), Some("yes"));
        assert_eq!(text("etc/machine-id").as_deref(), Some(""));
        assert!(text("etc/apt/sources.list.d/debian.sources").is_some_and(|t| t.contains("http://m.test/debian")));
        assert!(text("etc/pip.conf").is_some_and(|t| t.starts_with("[global]\n")));
        assert_eq!(fs::read_link(root.join("usr/local/bin/python")).expect("link"), Path::new("/usr/bin/python3"));
        let mode = |path: &str| fs::metadata(root.join(path)).expect("there").permissions().mode() & 0o7777;
        assert_eq!(
            (mode("workspace"), mode("tmp"), mode("usr/sbin/policy-rc.d"), mode("etc")),
            (0o755, 0o1777, 0o755, 0o755)
        );
        assert!(dir.path().join("overlay").exists() && dir.path().join("finish.sh").exists());
    }

    fn put(data: &Path, name: &str, bytes: u64) {
        let name: TemplateName = name.parse().expect("name");
        let dir = place(data, &name);
        fs::create_dir_all(&dir).expect("mkdir");
        fs::write(dir.join("rootfs.erofs"), "image").expect("write");
        let manifest = Manifest {
            form: FORM,
            name: name.to_string(),
            description: "d".into(),
            digest: "sha256:1".into(),
            bytes,
            recipe_digest: "sha256:2".into(),
            suite: SUITE.into(),
            created_ms: 1,
            packages: vec![],
            image: None,
        };
        shelf::write_json(&dir.join("manifest.json"), &manifest).expect("write");
    }

    #[test]
    fn only_whole_images_are_listed() {
        let dir = tempfile::tempdir().expect("dir");
        put(dir.path(), "b", 5);
        put(dir.path(), "a", 5);
        put(dir.path(), "cut", 6);
        fs::create_dir_all(dir.path().join("templates/Not-A-Name")).expect("mkdir");
        let names: Vec<_> = list(dir.path()).into_iter().map(|t| t.name.to_string()).collect();
        assert_eq!(names, ["a", "b"]);
    }

    #[test]
    fn an_image_is_recognised_by_its_mark() {
        let file = tempfile::NamedTempFile::new().expect("file");
        fs::write(file.path(), vec![0; 4096]).expect("write");
        assert!(!is_erofs(file.path()));
        let mut bytes = vec![0; 4096];
        bytes[1024..1028].copy_from_slice(&[0xe2, 0xe1, 0xf5, 0xe0]);
        fs::write(file.path(), bytes).expect("write");
        assert!(is_erofs(file.path()));
    }
}
