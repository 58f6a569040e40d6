//! What a running machine is beside its template and its disk, copied while it stands still: its devices' state and the
//! pages of memory that are its own.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use serde_json::json;

use super::boot::{QUICK, SETTLE, alone};
use super::delta::{Delta, DeltaError};
use super::instance::Machine;
use super::pagemap::{PAGE, VmmMemory};
use super::process::Process;
use super::qmp::{Qmp, QmpError};
use super::sealed_memory::anonymous;
use super::vmm::chain;
use crate::error::DriverError;

/// Longest time for saving the devices' state, caches of the disk included.
const SAVE_PATIENCE: Duration = Duration::from_secs(60);
/// Room beside what a machine has before it stands still, bytes: it runs on until then.
const ROOM_MORE: u64 = 16 << 20;

fn stage(e: &QmpError) -> DriverError {
    DriverError::Stage { stage: "capturing the machine", detail: chain(e) }
}

/// What QEMU says of a machine's state. `None`: it does not say.
pub(super) async fn status(qmp: &Qmp) -> Option<String> {
    let status = qmp.call("query-status", json!({}), QUICK).await.ok()?;
    status["status"].as_str().map(str::to_owned)
}

/// That the machine runs, or why it cannot be captured.
pub(super) async fn running(qmp: &Qmp) -> Result<(), DriverError> {
    match status(qmp).await.as_deref() {
        Some("running") => Ok(()),
        Some("io-error") => Err(DriverError::HostFull),
        _ => Err(DriverError::WrongState("the machine does not run")),
    }
}

/// Waits until the guest has seen its host go.
pub(super) async fn unlinked(machine: &Machine, qmp: &Qmp) -> Result<(), DriverError> {
    machine.hang_up();
    tokio::time::timeout(QUICK, alone(qmp)).await.map_err(|_| DriverError::Stage {
        stage: "closing the link",
        detail: "QEMU still sees a client".to_owned(),
    })??;
    tokio::time::sleep(SETTLE).await;
    Ok(())
}

/// Stops the guest's processors and waits for its disks.
pub(super) async fn stop(qmp: &Qmp) -> Result<(), DriverError> {
    qmp.call("stop", json!({}), QUICK).await.map_err(|e| stage(&e)).map(drop)
}

/// Saves the devices' state of a stopped machine into `file`. `last`: it will not go on with its disk, which is made whole.
pub(super) async fn device(qmp: &Qmp, file: &File, last: bool) -> Result<(), DriverError> {
    let set = pass(qmp, file).await?;
    let to = json!({"filename": format!("/dev/fdset/{set}"), "live": last});
    let saved = qmp.call("xen-save-devices-state", to, SAVE_PATIENCE).await.map_err(|e| stage(&e));
    // It goes with the channel at the latest.
    let _ = qmp.call("remove-fd", json!({"fdset-id": set}), QUICK).await;
    saved.map(drop)
}

/// Hands a file over. Returns the number of the set that has it.
pub(super) async fn pass(qmp: &Qmp, file: &File) -> Result<u64, DriverError> {
    let added = qmp.call_with("add-fd", json!({}), Some(file.as_fd()), QUICK).await.map_err(|e| stage(&e))?;
    added["fdset-id"].as_u64().ok_or_else(|| stage(&QmpError::Protocol("no number of a descriptor")))
}

/// The guest memory of a VMM. Blocks.
pub(super) fn memory(process: &Process, guest_bytes: u64) -> Result<VmmMemory, DriverError> {
    let memory = VmmMemory::open(process.pid(), guest_bytes);
    // Only now: while the handle says that it lives, its number was its own.
    if process.ended() {
        return Err(DriverError::Stage { stage: "reaching the guest's memory", detail: "the VMM ended".to_owned() });
    }
    memory.map_err(|e| DriverError::io("reaching the guest's memory", e))
}

/// A file for a copy of a running machine's own pages, with room for about as many as it has now: in memory where there is
/// plenty of it, else at `path`. Making room is most of the work of a copy, and nobody stands still for it here. Blocks.
pub(super) fn room(process: &Process, guest_bytes: u64, path: &Path) -> Result<File, DriverError> {
    let io = |e| DriverError::io("making room for the guest's memory", e);
    let pages = memory(process, guest_bytes)?.own_pages().map_err(io)?;
    let now = pages.iter().map(|run| run.pages * PAGE + 8).sum::<u64>();
    let wanted = (now + now / 8 + ROOM_MORE).min(guest_bytes + ROOM_MORE);
    if wanted <= available_memory() / 4
        && let Ok(file) = anonymous("copied-memory", wanted)
        && rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, wanted).is_ok()
    {
        return Ok(file);
    }
    File::options().read(true).write(true).create_new(true).open(path).map_err(io)
}

/// Bytes of memory that the host can give without swapping, as the kernel estimates it.
fn available_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse::<u64>().map_or(0, |kib| kib * 1024)
}

/// Copies the pages that are the machine's own into `file`. Blocks.
pub(super) fn own_memory(memory: &VmmMemory, guest_bytes: u64, file: File) -> Result<Delta, DriverError> {
    let runs = memory.own_pages().map_err(|e| DriverError::io("finding the guest's own pages", e))?;
    Delta::copy(file, memory, guest_bytes / PAGE, runs).map_err(kept)
}

/// What becomes of a failure with a delta.
pub(super) fn kept(e: DeltaError) -> DriverError {
    match e {
        DeltaError::Damaged(_) => DriverError::Damaged(e.to_string()),
        DeltaError::Io(e) => DriverError::io("keeping the guest's memory", e),
    }
}

/// Lets a stopped machine go on.
pub(super) async fn go_on(machine: &Machine, qmp: &Qmp) {
    let mut outcome = Ok(());
    for pause in [0, 50, 500, 2000] {
        tokio::time::sleep(Duration::from_millis(pause)).await;
        outcome = qmp.call("cont", json!({}), QUICK).await.map(drop);
        if outcome.is_ok() || machine.vmm.process.ended() {
            return;
        }
    }
    if let Err(e) = outcome {
        tracing::error!(machine = %machine.key, error = %chain(&e), "a machine that could not be captured does not go on");
    }
}
