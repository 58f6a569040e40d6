//! Which accelerator: KVM only after a real boot with it has reached an answering agent on this boot of the host.
//!
//! A present `/dev/kvm` proves nothing: on some hosts it opens, makes a machine, and the guest never gets past its first
//! instructions.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mainbrella_types::{Accelerator, SizeClass};
use serde::{Deserialize, Serialize};

use super::boot::{self, BootFiles, ColdOrder, cold, make_disk};
use super::command_line::{GuestDisk, kernel_arguments};
use super::folder::Places;
use super::vmm::{Host, chain};
use crate::error::DriverError;

/// Longest trial boot. With working KVM it takes about a second.
const TRIAL_PATIENCE: Duration = Duration::from_secs(20);

/// What the operator asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AcceleratorChoice {
    /// KVM if a trial boot succeeds, else software emulation.
    #[default]
    Auto,
    /// KVM; if it does not work, nothing starts.
    Kvm,
    /// Software emulation.
    Tcg,
}

/// What was decided, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The accelerator.
    pub accelerator: Accelerator,
    /// One sentence.
    pub reason: String,
    /// Whether a trial is still to come (there was nothing to boot yet).
    pub open: bool,
}

/// A remembered trial.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Trial {
    boot_id: String,
    qemu: String,
    kernel: String,
    initramfs: String,
    works: bool,
    detail: String,
}

/// What a trial needs.
pub(super) struct Ground<'a> {
    pub(super) host: &'a Arc<Host>,
    pub(super) places: &'a Places,
    pub(super) qemu_version: &'a str,
    /// Any template; `None`: none is built yet.
    pub(super) files: Option<BootFiles>,
}

/// Decides.
///
/// # Errors
/// When KVM was asked for by name and is not there.
pub(super) async fn decide(choice: AcceleratorChoice, ground: &Ground<'_>) -> Result<Verdict, DriverError> {
    let tcg = |reason: String, open| Verdict { accelerator: Accelerator::Tcg, reason, open };
    match choice {
        AcceleratorChoice::Tcg => return Ok(tcg("software emulation was asked for by name".to_owned(), false)),
        AcceleratorChoice::Kvm => {
            usable().map_err(|why| DriverError::Unsupported(format!("KVM was asked for by name, but {why}")))?;
            let reason = "KVM was asked for by name; no trial boot was made".to_owned();
            return Ok(Verdict { accelerator: Accelerator::Kvm, reason, open: false });
        }
        AcceleratorChoice::Auto => {}
    }
    if let Err(why) = usable() {
        return Ok(tcg(format!("software emulation, because {why}"), false));
    }
    let Some(files) = &ground.files else {
        return Ok(tcg("software emulation until a template is built; then KVM is tried with it".to_owned(), true));
    };
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned();
    let known =
        fs::read(&ground.places.accelerator).ok().and_then(|t| serde_json::from_slice::<Trial>(&t).ok()).filter(|t| {
            t.boot_id == boot_id
                && t.qemu == ground.qemu_version
                && t.kernel == files.kernel_digest
                && t.initramfs == files.initramfs_digest
        });
    let trial = match known {
        Some(t) => t,
        None => {
            let (works, detail) = match attempt(ground, files).await {
                Ok(()) => (true, "a trial boot reached the guest agent".to_owned()),
                Err(e) => (false, chain(&e)),
            };
            let trial = Trial {
                boot_id,
                qemu: ground.qemu_version.to_owned(),
                kernel: files.kernel_digest.clone(),
                initramfs: files.initramfs_digest.clone(),
                works,
                detail,
            };
            remember(&ground.places.accelerator, &trial);
            trial
        }
    };
    tracing::debug!(works = trial.works, detail = trial.detail, "KVM trial");
    Ok(if trial.works {
        Verdict {
            accelerator: Accelerator::Kvm,
            reason: "KVM, because a trial boot with it reached the guest agent".to_owned(),
            open: false,
        }
    } else {
        tcg(
            format!(
                "software emulation, because /dev/kvm opens but a trial boot with it did not reach the guest agent within {} s",
                TRIAL_PATIENCE.as_secs()
            ),
            false,
        )
    })
}

fn usable() -> Result<(), String> {
    match File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Err("there is no /dev/kvm".to_owned()),
        Err(e) => Err(format!("/dev/kvm does not open ({e})")),
    }
}

async fn attempt(ground: &Ground<'_>, files: &BootFiles) -> Result<(), DriverError> {
    let size = SizeClass::Micro.spec();
    let disk = ground.places.tmp.join(format!("freeze-trial-{}.raw", uuid::Uuid::now_v7().simple()));
    let outcome = async {
        make_disk(&disk, size.disk_mib).await?;
        let booted = cold(&ColdOrder {
            host: ground.host,
            parent: &ground.places.waiting,
            accelerator: Accelerator::Kvm,
            size,
            files,
            disk: &disk,
            kernel_arguments: kernel_arguments(None, GuestDisk::AtBoot),
            patience: TRIAL_PATIENCE,
        })
        .await?;
        boot::end(ground.host, booted).await;
        Ok(())
    }
    .await;
    let _ = fs::remove_file(&disk);
    outcome
}

fn remember(path: &Path, trial: &Trial) {
    let write = || -> std::io::Result<()> {
        let half = path.with_extension("json.new");
        fs::write(&half, serde_json::to_vec_pretty(trial)?)?;
        fs::rename(half, path)
    };
    if let Err(e) = write() {
        tracing::warn!(error = %e, "the KVM verdict could not be kept; the trial is repeated at the next start");
    }
}
