//! A cold boot to an answering agent: how templates are frozen and how KVM is tried.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mainbrella_guest_protocol::host::{GuestClient, LinkOptions, connect};
use mainbrella_guest_protocol::proto::mainbrella::guest::v1 as pb;
use mainbrella_types::{Accelerator, SizeSpec};
use serde_json::json;
use tokio::process::Command;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::command_line::{CONSOLE_BYTES, Start};
use super::content::TemplateContent;
use super::folder::AGENT_SOCKET;
use super::qmp::{Event, Qmp};
use super::sealed_memory::{anonymous, sealed_copy};
use super::vmm::{Host, Vmm, VmmOrder, chain, control, log_text, plain, printable, start};
use super::{folder, vmm};
use crate::error::DriverError;

/// Time-out of one call to QEMU that does no work.
pub(super) const QUICK: Duration = Duration::from_secs(10);
/// How long an agent has to see its host go.
pub(super) const SETTLE: Duration = Duration::from_millis(20);
/// Longest time for a warm-up command.
const WARM_PATIENCE: Duration = Duration::from_secs(20);

/// The files a machine is booted from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootFiles {
    /// Uncompressed kernel (ELF).
    pub kernel: PathBuf,
    /// Its digest.
    pub kernel_digest: String,
    /// Initramfs.
    pub initramfs: PathBuf,
    /// Its digest; covers the agent.
    pub initramfs_digest: String,
    /// Root image of the template (erofs).
    pub root: PathBuf,
    /// Its digest.
    pub root_digest: String,
    /// What a template that was built is made of. Its root image is then where this lies, and empty here until that is looked up.
    pub content: Option<TemplateContent>,
}

/// A machine that was booted cold.
pub(super) struct Booted {
    pub(super) folder: PathBuf,
    pub(super) group: String,
    pub(super) vmm: Vmm,
    pub(super) qmp: Qmp,
    pub(super) events: mpsc::Receiver<Event>,
    pub(super) memory: Arc<File>,
    pub(super) client: GuestClient,
}

/// What to boot.
pub(super) struct ColdOrder<'a> {
    pub(super) host: &'a Arc<Host>,
    /// Parent of the folder made for it; what is left there is removed at the next start of the service.
    pub(super) parent: &'a Path,
    pub(super) accelerator: Accelerator,
    pub(super) size: SizeSpec,
    pub(super) files: &'a BootFiles,
    /// The data disk: an ext4 image, written to.
    pub(super) disk: &'a Path,
    pub(super) kernel_arguments: String,
    /// Longest time to the agent's first answer.
    pub(super) patience: Duration,
}

/// Boots. On failure nothing is left.
pub(super) async fn cold(order: &ColdOrder<'_>) -> Result<Booted, DriverError> {
    let group = uuid::Uuid::now_v7().simple().to_string();
    let folder = order.parent.join(&group);
    let outcome = boot(order, &folder, &group).await;
    if outcome.is_err() {
        remove(order.host, &folder, &group).await;
    }
    outcome
}

async fn boot(order: &ColdOrder<'_>, folder: &Path, group: &str) -> Result<Booted, DriverError> {
    let io = |what: &'static str| move |e| DriverError::io(what, e);
    let until = Instant::now() + order.patience;
    let memory = Arc::new(
        anonymous("guest-memory", u64::from(order.size.memory_mib) << 20).map_err(io("reserving guest memory"))?,
    );
    let vmm = {
        let (host, memory, files) = (order.host.clone(), memory.clone(), order.files.clone());
        let (folder, group, disk) = (folder.to_owned(), group.to_owned(), order.disk.to_owned());
        let (accelerator, size, kernel_arguments) = (order.accelerator, order.size, order.kernel_arguments.clone());
        blocking(move || {
            // As anonymous files: the jailed VMM may open them whatever the modes of the originals are.
            let kernel = sealed_copy("kernel", &files.kernel).map_err(io("reading the guest kernel"))?;
            let initrd = sealed_copy("initramfs", &files.initramfs).map_err(io("reading the initramfs"))?;
            let root = File::open(&files.root).map_err(io("opening the root image"))?;
            let data = File::options().read(true).write(true).open(disk).map_err(io("opening the data disk"))?;
            start(
                &host,
                &VmmOrder {
                    folder,
                    group,
                    accelerator,
                    size,
                    start: Start::Cold { kernel_arguments },
                    memory: memory.as_fd(),
                    root: root.as_fd(),
                    data: data.as_fd(),
                    kernel: Some((kernel.as_fd(), initrd.as_fd())),
                    overlay: None,
                    layers: Vec::new(),
                    names: Default::default(),
                },
            )
        })
        .await?
    };
    let (qmp, events) = control(folder, vmm.log.as_ref()).await?;
    let client = match attach(folder, &vmm, until).await {
        Ok(client) => client,
        Err(seen) => {
            let said = vmm.log.as_ref().map_or_else(String::new, log_text);
            return Err(DriverError::Stage {
                stage: "booting the guest to its agent",
                detail: format!("{seen}; console: {}; QEMU: {said}", printable(console(&qmp).await.as_bytes())),
            });
        }
    };
    Ok(Booted { folder: folder.to_owned(), group: group.to_owned(), vmm, qmp, events, memory, client })
}

/// Waits for the agent's first answer.
pub(super) async fn attach(folder: &Path, vmm: &Vmm, until: Instant) -> Result<GuestClient, String> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err("the agent did not answer in time".to_owned());
        }
        if vmm.process.ended() {
            return Err("the VMM ended".to_owned());
        }
        let stream = folder::connect(folder, AGENT_SOCKET).and_then(tokio::net::UnixStream::from_std);
        let stream = match stream {
            Ok(s) => s,
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                tokio::time::sleep(Duration::from_millis(1)).await;
                continue;
            }
            Err(e) => return Err(e.to_string()),
        };
        let options = LinkOptions { deadline: left, call_timeout: left };
        let client = connect(stream, options).await.map_err(|e| chain(&e))?;
        let hello =
            pb::HelloRequest { protocol_version: mainbrella_guest_protocol::PROTOCOL_VERSION, ..Default::default() };
        return match client.rpc().hello(hello).await {
            Ok(_) => Ok(client),
            Err(e) => Err(format!("{e}")),
        };
    }
}

/// What is kept of the guest's console.
pub(super) async fn console(qmp: &Qmp) -> String {
    let arguments = json!({"device": "console", "size": CONSOLE_BYTES});
    match qmp.call("ringbuf-read", arguments, QUICK).await {
        Ok(v) => plain(v.as_str().unwrap_or("").as_bytes()),
        Err(e) => format!("(not readable: {e})"),
    }
}

/// Brings a guest to rest: user processes frozen, host gone, virtual processors stopped. `whole`: file systems are written
/// out and the guest has time to become idle, as for a capture.
pub(super) async fn rest(client: &GuestClient, qmp: &Qmp, whole: bool) -> Result<(), DriverError> {
    let stage = |e: super::qmp::QmpError| DriverError::Stage { stage: "bringing the guest to rest", detail: chain(&e) };
    let request = pb::QuiesceRequest { freeze: true, sync: whole, ..Default::default() };
    client
        .rpc()
        .quiesce(request)
        .await
        .map_err(|e| DriverError::Stage { stage: "bringing the guest to rest", detail: format!("{e}") })?;
    client.close();
    tokio::time::timeout(QUICK, alone(qmp)).await.map_err(|_| DriverError::Stage {
        stage: "closing the link",
        detail: "QEMU still sees a client".to_owned(),
    })??;
    tokio::time::sleep(if whole { Duration::from_millis(150) } else { SETTLE }).await;
    qmp.call("stop", json!({}), QUICK).await.map_err(stage)?;
    Ok(())
}

/// Waits until QEMU sees nobody at the agent port.
pub(super) async fn alone(qmp: &Qmp) -> Result<(), DriverError> {
    // The agent must have seen the host go, or its first moments in every machine are spent on a dead connection.
    loop {
        let list = qmp
            .call("query-chardev", json!({}), QUICK)
            .await
            .map_err(|e| DriverError::Stage { stage: "closing the link", detail: chain(&e) })?;
        let gone = list.as_array().is_some_and(|l| {
            l.iter()
                .any(|c| c["label"] == "agent" && c["filename"].as_str().is_some_and(|f| f.starts_with("disconnected")))
        });
        if gone {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Runs a command so that what it needs is in the guest's page cache. That it is not there is no failure.
pub(super) async fn warm(client: &GuestClient, argv: &[&str]) {
    let request = pb::StartJobRequest {
        job_id: format!("warm-{}", argv[0].rsplit('/').next().unwrap_or("command")),
        argv: argv.iter().map(|a| a.as_bytes().to_vec()).collect(),
        // Nobody of the template's need be there yet.
        user: "0".to_owned(),
        timeout_ms: u64::try_from(WARM_PATIENCE.as_millis()).unwrap_or(0),
        output_limit: 1024,
        forget_when_followed: true,
        ..Default::default()
    };
    let run = async {
        let mut stream = client.streams().run_job(request).await.ok()?;
        while let Ok(Some(_)) = stream.message().await {}
        Some(())
    };
    if tokio::time::timeout(WARM_PATIENCE + QUICK, run).await.is_err() {
        tracing::debug!(command = argv[0], "a warm-up command did not end in time");
    }
}

/// Ends a cold machine and removes its traces.
pub(super) async fn end(host: &Arc<Host>, booted: Booted) {
    booted.client.close();
    drop((booted.qmp, booted.events));
    if let Err(e) = booted.vmm.process.end(Duration::from_secs(10)).await {
        tracing::warn!(error = %e, "a VMM used for a template does not end");
    }
    remove(host, &booted.folder, &booted.group).await;
}

/// Removes a VMM that belongs to no machine: process, group, folder.
pub(super) async fn remove(host: &Arc<Host>, dir: &Path, group: &str) {
    let (host, dir, group) = (host.clone(), dir.to_owned(), group.to_owned());
    let done = blocking(move || {
        if let Ok(Some(record)) = folder::read_record(&dir)
            && let Ok(process) = record.process()
        {
            process.kill().map_err(|e| DriverError::io("ending a VMM", e))?;
            let until = std::time::Instant::now() + QUICK;
            while !process.ended() && std::time::Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        host.cgroups.remove(&group, QUICK).map_err(|e| DriverError::io("removing a control group", e))?;
        folder::remove(&dir).map_err(|e| DriverError::io("removing a folder", e))
    })
    .await;
    if let Err(e) = done {
        tracing::warn!(error = %vmm::chain(&e), "something of a VMM is left and will be removed at the next start");
    }
}

/// Makes a sparse ext4 image. The file system is new, so nothing in it needs to be zeroed.
pub(super) async fn make_disk(path: &Path, mib: u32) -> Result<(), DriverError> {
    let file = File::create(path).map_err(|e| DriverError::io("making the data disk", e))?;
    file.set_len(u64::from(mib) << 20).map_err(|e| DriverError::io("making the data disk", e))?;
    drop(file);
    let mut command = Command::new("mkfs.ext4");
    command
        .args([
            "-q",
            "-F",
            "-m",
            "0",
            "-L",
            "data",
            "-J",
            "size=16",
            "-E",
            "discard,lazy_journal_init=1,root_owner=0:0",
        ])
        .arg(path)
        .env_clear()
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true);
    let out = tokio::time::timeout(Duration::from_secs(120), command.output())
        .await
        .map_err(|_| DriverError::Stage { stage: "making the data disk", detail: "mkfs.ext4 did not end".to_owned() })?
        .map_err(|e| DriverError::io("running mkfs.ext4 (Debian package e2fsprogs)", e))?;
    if out.status.success() {
        return Ok(());
    }
    Err(DriverError::Stage { stage: "making the data disk", detail: printable(&out.stderr) })
}

/// Runs `f` where it may block.
pub(super) async fn blocking<T: Send + 'static>(
    f: impl FnOnce() -> Result<T, DriverError> + Send + 'static,
) -> Result<T, DriverError> {
    tokio::task::spawn_blocking(f)
        .await
        .map_err(|e| DriverError::Stage { stage: "a background step", detail: e.to_string() })?
}
