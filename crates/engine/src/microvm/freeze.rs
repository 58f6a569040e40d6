//! Frozen templates: one template in one size, captured once at the point where its agent answers.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mainbrella_types::{Accelerator, SizeClass, SizeSpec, TemplateName};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::time::Instant;

use super::boot::{self, BootFiles, ColdOrder, QUICK, blocking, cold, make_disk};
use super::command_line::{GuestDisk, Start, VmPlan, command_line, guest_disk, kernel_arguments};
use super::content::{self, Origin, StartCommand};
use super::folder::Places;
use super::sealed_memory::{SealedMemory, save_sparse};
use super::vmm::{Host, chain};
use super::{startup, tsc};
use crate::error::DriverError;

/// Longest cold boot to an answering agent. Two seconds on an idle host; a boot that hangs is cut off and repeated.
const BOOT_PATIENCE: Duration = Duration::from_secs(60);
/// Boots tried before giving up.
const BOOT_ATTEMPTS: u32 = 3;
/// How far the counter's rate may be from the one a template was frozen with.
const TSC_TOLERANCE_PER_MILLE: u32 = 5;
/// How often the rate is measured at most, 60 ms each.
const TSC_ATTEMPTS: u32 = 50;

/// Everything that shapes a template's memory. A change in any of it makes another key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KeyInputs {
    /// Version of what is kept and how.
    pub form: u32,
    /// QEMU's version text, packaging included.
    pub qemu: String,
    /// QEMU's arguments, cold and restored.
    pub arguments: Vec<Vec<String>>,
    /// The processor, when the guest sees it (KVM); else empty.
    pub processor: String,
    /// Writable disk, MiB.
    pub disk_mib: u32,
    /// Template name.
    pub template: String,
    /// Digest of the kernel.
    pub kernel: String,
    /// Digest of the initramfs.
    pub initramfs: String,
    /// Digest of the root image.
    pub root: String,
    /// Digest of the template, if it is more than a root image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
}

/// The root image, beside what was frozen with it.
const ROOT: &str = "root.erofs";

/// Its memory.
const MEMORY: &str = "memory";

/// The current [`KeyInputs::form`].
const FORM: u32 = 1;

impl KeyInputs {
    /// The inputs of `template` in `size`.
    #[must_use]
    pub fn new(
        qemu: &str,
        accelerator: Accelerator,
        (sandbox, network): (bool, bool),
        processor: &str,
        template: &TemplateName,
        (size, disk): (SizeSpec, GuestDisk),
        files: &BootFiles,
    ) -> Self {
        let plan = |start| VmPlan {
            name: "mainbrella".to_owned(),
            accelerator,
            memory_mib: size.memory_mib,
            vcpus: size.vcpus,
            start,
            sandbox,
            network,
        };
        // The counter's rate is measured and never twice the same; the manifest holds it, with a tolerance.
        let cold =
            Start::Cold { kernel_arguments: kernel_arguments((accelerator == Accelerator::Tcg).then_some(0), disk) };
        Self {
            form: FORM,
            qemu: qemu.to_owned(),
            arguments: vec![command_line(&plan(cold)), command_line(&plan(Start::Restore { layers: 0 }))],
            processor: if accelerator == Accelerator::Kvm { processor.to_owned() } else { String::new() },
            disk_mib: size.disk_mib,
            template: template.to_string(),
            kernel: files.kernel_digest.clone(),
            initramfs: files.initramfs_digest.clone(),
            root: files.root_digest.clone(),
            // What is on its disk comes with the disk where that is mounted later.
            content: files.content.as_ref().filter(|_| disk == GuestDisk::AtBoot).map(|c| c.digest.clone()),
        }
    }

    /// When its guest mounts the data disk.
    #[must_use]
    pub fn disk(&self) -> GuestDisk {
        let mut words = self.arguments.iter().flatten();
        if words.any(|word| guest_disk(word) == GuestDisk::Later) { GuestDisk::Later } else { GuestDisk::AtBoot }
    }

    /// The key: 32 hexadecimal digits.
    #[must_use]
    pub fn key(&self) -> String {
        let text = serde_json::to_vec(self).unwrap_or_default();
        hex::encode(&Sha256::digest(&text)[..16])
    }
}

/// What is written beside a frozen template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    inputs: KeyInputs,
    size: String,
    tsc_khz: Option<u32>,
    memory_bytes: u64,
    memory_kept_bytes: u64,
    device_bytes: u64,
    device_digest: String,
    boot_ms: u64,
    boots: u32,
}

/// A frozen template that is ready.
#[derive(Debug)]
pub struct Frozen {
    /// Its key.
    pub key: String,
    /// The template.
    pub template: TemplateName,
    /// The size.
    pub class: SizeClass,
    /// Which making of this key it is: one that was damaged is made again, with other memory. What a machine keeps when it
    /// is paused fits no other.
    pub making: String,
    /// Digest of the root image.
    pub root_digest: String,
    /// What runs in it since before it was captured.
    pub(super) start: Option<StartCommand>,
    root: PathBuf,
    dir: PathBuf,
    memory: tokio::sync::Mutex<Option<(Arc<SealedMemory>, Instant)>>,
}

impl Frozen {
    fn new(
        key: String,
        (template, class): (TemplateName, SizeClass),
        making: String,
        (root, root_digest): (PathBuf, String),
        dir: PathBuf,
    ) -> Self {
        let memory = tokio::sync::Mutex::new(None);
        Self { key, template, class, making, root_digest, start: None, root, dir, memory }
    }

    /// Its sealed memory, loaded if it is not.
    ///
    /// # Errors
    /// When it cannot be read or memory is short.
    pub async fn memory(&self) -> Result<Arc<SealedMemory>, DriverError> {
        let mut held = self.memory.lock().await;
        if let Some((memory, used)) = held.as_mut() {
            *used = Instant::now();
            return Ok(memory.clone());
        }
        let (path, bytes) = (self.memory_file(), u64::from(self.class.spec().memory_mib) << 20);
        let load =
            move || SealedMemory::load(&path, bytes).map_err(|e| DriverError::io("loading a template's memory", e));
        let memory = Arc::new(blocking(load).await?);
        *held = Some((memory.clone(), Instant::now()));
        Ok(memory)
    }

    /// Lets its memory go if it was not used for `idle`. Machines that use it keep it.
    pub async fn cool(&self, idle: Duration) -> bool {
        let mut held = self.memory.lock().await;
        if held.as_ref().is_some_and(|(_, used)| used.elapsed() >= idle) {
            *held = None;
        }
        held.is_none()
    }

    /// The file of its memory.
    pub(super) fn memory_file(&self) -> PathBuf {
        self.dir.join(MEMORY)
    }

    /// Its folder: `memory`, `device`, `disk.raw`.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The root image.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The disk below those of its machines.
    #[must_use]
    pub fn base(&self) -> PathBuf {
        self.dir.join("disk.raw")
    }

    /// Opens root image and base disk, read-only.
    ///
    /// # Errors
    /// When one is missing.
    pub fn open_disks(&self) -> Result<(File, File), DriverError> {
        let root = File::open(&self.root).map_err(|e| DriverError::io("opening the root image", e))?;
        let data = File::open(self.base()).map_err(|e| DriverError::io("opening the base disk", e))?;
        Ok((root, data))
    }

    /// The device state.
    #[must_use]
    pub fn device(&self) -> PathBuf {
        self.dir.join("device")
    }

    /// Opens the device state.
    ///
    /// # Errors
    /// When it is missing.
    pub fn open_device(&self) -> Result<File, DriverError> {
        File::open(self.device()).map_err(|e| DriverError::io("opening the device state", e))
    }
}

/// What to freeze.
pub(super) struct FreezeOrder<'a> {
    pub(super) host: &'a Arc<Host>,
    pub(super) places: &'a Places,
    pub(super) accelerator: Accelerator,
    pub(super) class: SizeClass,
    pub(super) files: &'a BootFiles,
    pub(super) inputs: KeyInputs,
    pub(super) origin: Arc<Origin>,
}

/// The frozen template of this key if it is whole.
pub(super) async fn find(
    places: &Places,
    (template, class): (&TemplateName, SizeClass),
    files: &BootFiles,
    inputs: &KeyInputs,
) -> Option<Frozen> {
    let key = inputs.key();
    let dir = places.frozen.join(&key);
    let (expected, at) = (inputs.clone(), dir.clone());
    let whole = blocking(move || Ok(verify(&at, &expected, class))).await.ok()?;
    match whole {
        Ok(making) => {
            keep_root(&files.root, &dir);
            // The name that stays, whatever becomes of the one it was found under.
            let kept = dir.join(ROOT);
            let root = if kept.is_file() { kept } else { files.root.clone() };
            let root = (root, files.root_digest.clone());
            let mut frozen = Frozen::new(key, (template.clone(), class), making, root, dir);
            // A guest that mounts its disk later has nothing to start.
            frozen.start = files.content.as_ref().filter(|_| inputs.content.is_some()).and_then(|c| c.start.clone());
            Some(frozen)
        }
        Err(why) => {
            if dir.exists() {
                tracing::warn!(%template, size = %class, why, "a frozen template is not usable and is made again");
            }
            None
        }
    }
}

/// Gives the root image a name beside what was frozen with it: a template that is built again takes its own away, and a
/// paused machine needs the one it had. Where that cannot be done (another file system), it needs the template as it is.
fn keep_root(root: &Path, dir: &Path) {
    match fs::hard_link(root, dir.join(ROOT)) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
            tracing::debug!(error = %e, "the root image is not kept beside its frozen template");
        }
        _ => {}
    }
}

/// What finding a frozen template by its key alone needs.
pub(super) struct KeptOrder<'a> {
    pub(super) places: &'a Places,
    pub(super) key: &'a str,
    pub(super) template: &'a TemplateName,
    pub(super) class: SizeClass,
    /// Makes the inputs that this host would have for these files.
    pub(super) inputs: &'a (dyn Fn(&BootFiles, GuestDisk) -> KeyInputs + Sync),
    /// The root image of the template as it is now, and its digest.
    pub(super) root: Option<(PathBuf, String)>,
}

/// The frozen template that a paused machine was made from. Blocks.
pub(super) fn find_kept(order: &KeptOrder<'_>) -> Result<Frozen, DriverError> {
    let damaged = |why: &str| DriverError::Damaged(format!("its frozen template: {why}"));
    let dir = order.places.frozen.join(order.key);
    let text = fs::read(dir.join("manifest.json")).map_err(|_| damaged("it is not on this host any more"))?;
    let manifest: Manifest = serde_json::from_slice(&text).map_err(|_| damaged("its manifest is damaged"))?;
    let then = manifest.inputs;
    let now = (order.inputs)(
        &BootFiles {
            kernel: PathBuf::new(),
            kernel_digest: then.kernel.clone(),
            initramfs: PathBuf::new(),
            initramfs_digest: then.initramfs.clone(),
            root: PathBuf::new(),
            root_digest: then.root.clone(),
            content: None,
        },
        then.disk(),
    );
    let now = KeyInputs { content: then.content.clone(), ..now };
    if now != then || now.key() != order.key {
        return Err(damaged("this host's QEMU or processor is another one now"));
    }
    let making = verify(&dir, &then, order.class).map_err(damaged)?;
    let kept = dir.join(ROOT);
    let root = match &order.root {
        _ if kept.is_file() => kept,
        Some((now, digest)) if *digest == then.root => now.clone(),
        _ => return Err(damaged("its root image is not on this host any more")),
    };
    let names = (order.template.clone(), order.class);
    Ok(Frozen::new(order.key.to_owned(), names, making, (root, then.root), dir))
}

/// Looks whether all of it is there. Says which making it is.
fn verify(dir: &Path, inputs: &KeyInputs, class: SizeClass) -> Result<String, &'static str> {
    let text = fs::read(dir.join("manifest.json")).map_err(|_| "no manifest")?;
    let m: Manifest = serde_json::from_slice(&text).map_err(|_| "its manifest is damaged")?;
    if m.inputs != *inputs {
        return Err("its manifest belongs to another one");
    }
    let spec = class.spec();
    let len = |f: &str| fs::metadata(dir.join(f)).map(|m| m.len()).ok();
    if len("memory") != Some(u64::from(spec.memory_mib) << 20) || len("memory") != Some(m.memory_bytes) {
        return Err("its memory has the wrong size");
    }
    if len("disk.raw") != Some(u64::from(spec.disk_mib) << 20) {
        return Err("its disk has the wrong size");
    }
    let device = fs::read(dir.join("device")).map_err(|_| "no device state")?;
    if device.len() as u64 != m.device_bytes || hex::encode(Sha256::digest(&device)) != m.device_digest {
        return Err("its device state is damaged");
    }
    if let (Some(then), Some(now)) = (m.tsc_khz, tsc::measure_khz())
        && then.abs_diff(now) > then / 1000 * TSC_TOLERANCE_PER_MILLE
    {
        return Err("this host's clock rate is another one");
    }
    // Two makings never have the same devices' state: it holds times to the nanosecond.
    Ok(hex::encode(&Sha256::digest(&text)[..16]))
}

/// Freezes. Takes seconds. Whole or not at all.
pub(super) async fn freeze(order: &FreezeOrder<'_>) -> Result<(), DriverError> {
    let key = order.inputs.key();
    let half = order.places.tmp.join(format!("freeze-{key}"));
    super::folder::remove(&half).map_err(|e| DriverError::io("clearing the temporary folder", e))?;
    fs::create_dir(&half).map_err(|e| DriverError::io("making a temporary folder", e))?;
    let outcome = capture(order, &half).await;
    if outcome.is_ok() {
        let (from, to) = (half.clone(), order.places.frozen.join(&key));
        return blocking(move || publish(&from, &to).map_err(|e| DriverError::io("publishing the frozen template", e)))
            .await;
    }
    let _ = super::folder::remove(&half);
    outcome
}

fn publish(from: &Path, to: &Path) -> std::io::Result<()> {
    for name in ["memory", "device", "disk.raw", "manifest.json"] {
        File::open(from.join(name))?.sync_all()?;
    }
    File::open(from)?.sync_all()?;
    // Only ever there when it was found damaged.
    super::folder::remove(to)?;
    fs::rename(from, to)?;
    to.parent().map_or(Ok(()), |p| File::open(p)?.sync_all())
}

async fn capture(order: &FreezeOrder<'_>, half: &Path) -> Result<(), DriverError> {
    if matches!(*order.origin, Origin::Memory { .. }) {
        let (inputs, class, origin, half) = (order.inputs.clone(), order.class, order.origin.clone(), half.to_owned());
        return blocking(move || adopt(inputs, class, &origin, &half)).await;
    }
    let spec = order.class.spec();
    let disk = half.join("disk.raw");
    let tsc_khz = match order.accelerator {
        // On a busy host many a measurement is refused, and a template without one has no good clock.
        Accelerator::Tcg => blocking(|| Ok((0..TSC_ATTEMPTS).find_map(|_| tsc::measure_khz()))).await?,
        Accelerator::Kvm => None,
    };
    let started = Instant::now();
    let mut boots = 0;
    let booted = loop {
        boots += 1;
        let (origin, to) = (order.origin.clone(), disk.clone());
        match &*order.origin {
            Origin::Root => make_disk(&disk, spec.disk_mib).await?,
            _ => blocking(move || origin.write_disk(&to, spec.disk_mib)).await?,
        }
        let attempt = cold(&ColdOrder {
            host: order.host,
            parent: &order.places.waiting,
            accelerator: order.accelerator,
            size: spec,
            files: order.files,
            disk: &disk,
            kernel_arguments: kernel_arguments(tsc_khz, order.inputs.disk()),
            patience: BOOT_PATIENCE,
        })
        .await;
        match attempt {
            Ok(booted) => break booted,
            Err(e) if boots < BOOT_ATTEMPTS => {
                tracing::warn!(boots, error = %chain(&e), "a template did not boot; trying again")
            }
            Err(e) => return Err(e),
        }
    };
    let boot_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    let start = match &*order.origin {
        Origin::Disk(_, start) => start.as_ref(),
        _ => None,
    };
    let outcome = quiet(&booted, half, order.inputs.disk(), start).await;
    let memory = booted.memory.clone();
    boot::end(order.host, booted).await;
    let device_file = outcome?;
    let at = half.to_owned();
    let (inputs, size) = (order.inputs.clone(), order.class.to_string());
    blocking(move || {
        let io = |what: &'static str| move |e| DriverError::io(what, e);
        let kept = save_sparse(&memory, &at.join("memory")).map_err(io("saving the template's memory"))?;
        let device = fs::read(&device_file).map_err(io("reading the device state"))?;
        let memory_bytes = memory.metadata().map_err(io("measuring memory"))?.len();
        let manifest = Manifest {
            inputs,
            size,
            tsc_khz,
            memory_bytes,
            memory_kept_bytes: kept,
            device_bytes: device.len() as u64,
            device_digest: hex::encode(Sha256::digest(&device)),
            boot_ms,
            boots,
        };
        write_manifest(&at, &manifest)
    })
    .await
}

/// Brings a booted machine to rest and saves its device state. Memory and disk do not change afterwards.
async fn quiet(
    booted: &boot::Booted,
    half: &Path,
    disk: GuestDisk,
    start: Option<&StartCommand>,
) -> Result<PathBuf, DriverError> {
    let stage = |e: super::qmp::QmpError| DriverError::Stage { stage: "saving the device state", detail: chain(&e) };
    // Without its disk it has no root to run anything in.
    if disk == GuestDisk::AtBoot {
        for argv in [&["/bin/sh", "-lc", "true"][..], &["python3", "-c", "pass"], &["node", "-e", "0"]] {
            boot::warm(&booted.client, argv).await;
        }
    }
    if let Some(start) = start {
        startup::bring_up(&booted.client, start).await?;
    }
    boot::rest(&booted.client, &booted.qmp, true).await?;
    let path = half.join("device");
    let file = File::create(&path).map_err(|e| DriverError::io("making the device state file", e))?;
    let set = json!({"fdset-id": 9});
    booted.qmp.call_with("add-fd", set, Some(file.as_fd()), QUICK).await.map_err(stage)?;
    let to = json!({"filename": "/dev/fdset/9"});
    booted.qmp.call("xen-save-devices-state", to, Duration::from_secs(60)).await.map_err(stage)?;
    Ok(path)
}

/// Makes what was captured of a machine that ran a frozen template: nothing is booted. Blocks.
fn adopt(inputs: KeyInputs, class: SizeClass, origin: &Origin, half: &Path) -> Result<(), DriverError> {
    let io = |what: &'static str| move |e| DriverError::io(what, e);
    let Origin::Memory { device, memory, below, .. } = origin else { return Ok(()) };
    let was = fs::read(below.dir.join("manifest.json")).map_err(io("reading a manifest"))?;
    let was: Manifest =
        serde_json::from_slice(&was).map_err(|_| DriverError::Damaged("a manifest cannot be read".to_owned()))?;
    origin.write_disk(&half.join("disk.raw"), class.spec().disk_mib)?;
    content::write_memory(below, memory, &half.join(MEMORY))?;
    let device = fs::read(device).map_err(io("reading the device state"))?;
    fs::write(half.join("device"), &device).map_err(io("writing the device state"))?;
    write_manifest(
        half,
        &Manifest {
            inputs,
            size: class.to_string(),
            memory_kept_bytes: was.memory_kept_bytes.saturating_add(memory.bytes()),
            device_bytes: device.len() as u64,
            device_digest: hex::encode(Sha256::digest(&device)),
            boot_ms: 0,
            boots: 0,
            ..was
        },
    )
}

fn write_manifest(half: &Path, manifest: &Manifest) -> Result<(), DriverError> {
    let write = || fs::write(half.join("manifest.json"), serde_json::to_vec_pretty(manifest)?);
    write().map_err(|e| DriverError::io("writing the manifest", e))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs() -> KeyInputs {
        let files = BootFiles {
            kernel: "/k".into(),
            kernel_digest: "k".into(),
            initramfs: "/i".into(),
            initramfs_digest: "i".into(),
            root: "/r".into(),
            root_digest: "r".into(),
            content: None,
        };
        let template = "python".parse().expect("valid");
        KeyInputs::new(
            "QEMU 7.2",
            Accelerator::Tcg,
            (true, true),
            "cpu",
            &template,
            (SizeClass::Micro.spec(), GuestDisk::AtBoot),
            &files,
        )
    }

    #[test]
    fn the_key_changes_with_everything_that_shapes_memory_and_with_nothing_else() {
        let base = inputs();
        assert_eq!(base.key(), inputs().key());
        let changes: [fn(&mut KeyInputs); 9] = [
            |i| i.form += 1,
            |i| i.qemu.push('x'),
            |i| i.arguments[0].push("x".into()),
            |i| i.disk_mib += 1,
            |i| i.template.push('x'),
            |i| i.kernel.push('x'),
            |i| i.initramfs.push('x'),
            |i| i.root.push('x'),
            |i| i.content = Some("x".to_owned()),
        ];
        for (n, change) in changes.iter().enumerate() {
            let mut other = base.clone();
            change(&mut other);
            assert_ne!(other.key(), base.key(), "change {n}");
        }
        let text = serde_json::to_string(&base).expect("json");
        assert!(!text.contains("\"/k\""), "paths on this host are no part of it");
        assert!(base.processor.is_empty(), "the host's processor is no part of it under emulation");
    }
}
