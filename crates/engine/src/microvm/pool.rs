//! Waiting VMMs: started, in their jail, restored and stopped. A create takes one and is spared QEMU's own start.
//!
//! Under software emulation the guest's first answers are slow because QEMU has to translate its code first, so a waiting
//! VMM has already answered and run a command that does nothing, and what its template started has answered its probe; with
//! fresh entropy of its own, and frozen and stopped again afterwards. It knows nothing of any machine, is handed out once and never comes back.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mainbrella_guest_protocol::proto::mainbrella::guest::v1 as pb;
use mainbrella_types::Accelerator;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::boot::{self, QUICK, blocking};
use super::command_line::Start;
use super::freeze::Frozen;
use super::qmp::{Event, Qmp, QmpError};
use super::startup;
use super::vmm::{Host, Names, Vmm, VmmOrder, chain, control, log_text, start};
use crate::error::DriverError;

/// Longest time for loading device state.
const RESTORE_PATIENCE: Duration = Duration::from_secs(30);
/// How long `close` waits for VMMs that are just being started.
const CLOSE_PATIENCE: Duration = Duration::from_secs(10);
/// Longest time for the first answers of a waiting VMM.
const WARM_PATIENCE: Duration = Duration::from_secs(30);

/// A VMM that waits for device state.
pub struct Prepared {
    pub(super) folder: PathBuf,
    pub(super) group: String,
    pub(super) vmm: Vmm,
    pub(super) qmp: Qmp,
    pub(super) events: mpsc::Receiver<Event>,
    /// Whether it is restored already and only has to go on.
    pub(super) restored: bool,
}

/// The disk of a VMM to start. As it is by default: empty.
#[derive(Default)]
pub(super) struct Disk {
    /// See [`VmmOrder::overlay`].
    pub(super) overlay: Option<PathBuf>,
    /// See [`VmmOrder::layers`].
    pub(super) layers: Vec<File>,
    /// What is below all of it, if not the template's own base disk.
    pub(super) base: Option<File>,
}

/// Starts a VMM for machines of `frozen` up to the point where only device state is missing. On failure its folder
/// and group may be left; the caller removes them.
pub(super) async fn prepare(
    host: &Arc<Host>,
    accelerator: Accelerator,
    frozen: &Arc<Frozen>,
    (folder, group): (PathBuf, String),
    disk: Disk,
) -> Result<Prepared, DriverError> {
    let memory = frozen.memory().await?;
    let vmm = {
        let (host, frozen, folder, group) = (host.clone(), frozen.clone(), folder.clone(), group.clone());
        blocking(move || {
            let (root, data) = frozen.open_disks()?;
            let data = disk.base.unwrap_or(data);
            start(
                &host,
                &VmmOrder {
                    folder,
                    group,
                    accelerator,
                    size: frozen.class.spec(),
                    start: Start::Restore { layers: disk.layers.len() },
                    memory: memory.as_fd(),
                    root: root.as_fd(),
                    data: data.as_fd(),
                    kernel: None,
                    overlay: disk.overlay,
                    layers: disk.layers,
                    names: Names {
                        frozen: frozen.key.clone(),
                        making: frozen.making.clone(),
                        template: frozen.template.to_string(),
                        size: frozen.class.to_string(),
                    },
                },
            )
        })
        .await?
    };
    // QEMU reads its arguments meanwhile; its guest does not run yet.
    let (opened, seated) = tokio::join!(control(&folder, vmm.log.as_ref()), host.network.prepare(vmm.record.pid));
    let ((qmp, events), ()) = (opened?, seated?);
    let capabilities = json!({"capabilities": [
        {"capability": "x-ignore-shared", "state": true},
        {"capability": "events", "state": true},
    ]});
    qmp.call("migrate-set-capabilities", capabilities, QUICK).await.map_err(|e| failed(&e, &vmm))?;
    Ok(Prepared { folder, group, vmm, qmp, events, restored: false })
}

fn failed(e: &QmpError, vmm: &Vmm) -> DriverError {
    let said = vmm.log.as_ref().map_or_else(String::new, log_text);
    DriverError::Stage { stage: "restoring the machine", detail: format!("{}; QEMU: {said}", chain(e)) }
}

/// Lets a restored machine run.
pub(super) async fn awaken(p: &Prepared) -> Result<(), DriverError> {
    p.qmp.call("cont", json!({}), QUICK).await.map_err(|e| failed(&e, &p.vmm))?;
    Ok(())
}

/// Loads device state. QEMU takes it once. Whatever code it translated before is thrown away with it, so memory may be
/// written from outside until then.
pub(super) async fn load(p: &mut Prepared, device: &File) -> Result<(), DriverError> {
    let vmm = &p.vmm;
    let fail = |e: QmpError| failed(&e, vmm);
    p.qmp.call_with("getfd", json!({"fdname": "state"}), Some(device.as_fd()), QUICK).await.map_err(fail)?;
    p.qmp.call("migrate-incoming", json!({"uri": "fd:state"}), QUICK).await.map_err(fail)?;
    let events = &mut p.events;
    let loaded = async {
        while let Some(event) = events.recv().await {
            if event.name == "MIGRATION" {
                match event.data["status"].as_str() {
                    Some("completed") => return Ok(()),
                    Some("failed") => return Err(QmpError::Protocol("a failed restore")),
                    _ => {}
                }
            }
        }
        Err(QmpError::Closed)
    };
    tokio::time::timeout(RESTORE_PATIENCE, loaded)
        .await
        .map_err(|_| failed(&QmpError::TimedOut("migrate-incoming"), vmm))?
        .map_err(|e| failed(&e, vmm))?;
    p.restored = true;
    Ok(())
}

/// Lets a prepared VMM answer once and stops it again.
async fn warm_up(p: &mut Prepared, frozen: &Frozen) -> Result<(), DriverError> {
    load(p, &frozen.open_device()?).await?;
    awaken(p).await?;
    let until = Instant::now() + WARM_PATIENCE;
    let stage = |detail: String| DriverError::Stage { stage: "warming a waiting VMM", detail };
    let client = boot::attach(&p.folder, &p.vmm, until).await.map_err(stage)?;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let mut entropy = vec![0u8; 64];
    getrandom::fill(&mut entropy).map_err(|e| stage(format!("no random bytes: {e}")))?;
    let request = pb::ConfigureRequest {
        clock_realtime_ns: i64::try_from(now.as_nanos()).unwrap_or(0),
        entropy,
        // The machine's own follow; these are for the way they are written.
        hostname: "waiting".to_owned(),
        machine_id: p.group.clone(),
        ..Default::default()
    };
    client.rpc().configure(request).await.map_err(|e| stage(format!("{e}")))?;
    for argv in [&["/bin/sh", "-lc", "true"][..], &["true"]] {
        boot::warm(&client, argv).await;
    }
    if let Some(start) = &frozen.start {
        startup::exercise(&client, start).await;
    }
    boot::rest(&client, &p.qmp, false).await
}

struct Shelf {
    frozen: Arc<Frozen>,
    waiting: Vec<Prepared>,
    filling: bool,
    used: Instant,
}

/// The waiting VMMs of a service, by frozen template.
pub(super) struct Pool {
    target: usize,
    parent: PathBuf,
    shelves: Mutex<HashMap<String, Shelf>>,
    closed: std::sync::atomic::AtomicBool,
    fills: TaskTracker,
}

impl Pool {
    pub(super) fn new(target: usize, parent: PathBuf) -> Self {
        Self { target, parent, shelves: Mutex::new(HashMap::new()), closed: false.into(), fills: TaskTracker::new() }
    }

    fn shelves(&self) -> std::sync::MutexGuard<'_, HashMap<String, Shelf>> {
        self.shelves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_closed(&self) -> bool {
        self.closed.load(std::sync::atomic::Ordering::Acquire)
    }

    /// A waiting VMM of this template that is alive. Dead ones are removed on the way.
    pub(super) async fn take(&self, host: &Arc<Host>, key: &str) -> Option<Prepared> {
        loop {
            let p = {
                let mut shelves = self.shelves();
                let shelf = shelves.get_mut(key)?;
                shelf.used = Instant::now();
                shelf.waiting.pop()?
            };
            if !p.vmm.process.ended() {
                return Some(p);
            }
            discard(host, p).await;
        }
    }

    /// How many wait for this template.
    pub(super) fn count(&self, key: &str) -> usize {
        self.shelves().get(key).map_or(0, |s| s.waiting.len())
    }

    /// Fills the shelf of `frozen` in the background.
    pub(super) fn refill(self: &Arc<Self>, host: &Arc<Host>, accelerator: Accelerator, frozen: &Arc<Frozen>) {
        if self.target == 0 || self.is_closed() {
            return;
        }
        {
            let mut shelves = self.shelves();
            let shelf = shelves.entry(frozen.key.clone()).or_insert_with(|| Shelf {
                frozen: frozen.clone(),
                waiting: Vec::new(),
                filling: false,
                used: Instant::now(),
            });
            shelf.used = Instant::now();
            if shelf.filling || shelf.waiting.len() >= self.target {
                return;
            }
            shelf.filling = true;
        }
        let (pool, host, frozen) = (self.clone(), host.clone(), frozen.clone());
        self.fills.spawn(async move {
            pool.fill(&host, accelerator, &frozen).await;
            if let Some(shelf) = pool.shelves().get_mut(&frozen.key) {
                shelf.filling = false;
            }
        });
    }

    async fn fill(&self, host: &Arc<Host>, accelerator: Accelerator, frozen: &Arc<Frozen>) {
        while !self.is_closed() && self.count(&frozen.key) < self.target {
            let group = uuid::Uuid::now_v7().simple().to_string();
            let folder = self.parent.join(&group);
            let own = (folder.clone(), group.clone());
            match prepare(host, accelerator, frozen, own, Disk::default()).await {
                Ok(p) if self.is_closed() => {
                    discard(host, p).await;
                    return;
                }
                Ok(mut p) => {
                    if let Err(e) = warm_up(&mut p, frozen).await {
                        tracing::warn!(error = %chain(&e), "a waiting VMM could not be warmed; the next create starts its own");
                        discard(host, p).await;
                        return;
                    }
                    let mut spare = Some(p);
                    if !self.is_closed()
                        && let Some(shelf) = self.shelves().get_mut(&frozen.key)
                    {
                        shelf.waiting.extend(spare.take());
                    }
                    if let Some(p) = spare {
                        discard(host, p).await;
                        return;
                    }
                }
                Err(e) => {
                    tracing::warn!(error = %chain(&e), "a waiting VMM could not be started; the next create starts its own");
                    boot::remove(host, &folder, &group).await;
                    return;
                }
            }
        }
    }

    /// Lets go of what was not used for `idle`.
    pub(super) async fn cool(&self, host: &Arc<Host>, idle: Duration) {
        let cold: Vec<Shelf> = {
            let mut shelves = self.shelves();
            let keys: Vec<String> = shelves
                .iter()
                .filter(|(_, s)| s.used.elapsed() >= idle && !s.filling)
                .map(|(k, _)| k.clone())
                .collect();
            keys.iter().filter_map(|k| shelves.remove(k)).collect()
        };
        for shelf in cold {
            tracing::debug!(template = %shelf.frozen.template, size = %shelf.frozen.class, "waiting VMMs of an unused template are let go");
            for p in shelf.waiting {
                discard(host, p).await;
            }
        }
    }

    /// Ends every waiting VMM and starts no more.
    pub(super) async fn close(&self, host: &Arc<Host>) {
        self.closed.store(true, std::sync::atomic::Ordering::Release);
        // A fill under way sees the flag and removes its own.
        self.fills.close();
        if tokio::time::timeout(CLOSE_PATIENCE, self.fills.wait()).await.is_err() {
            tracing::warn!("a waiting VMM is still being started; it is removed at the next start");
        }
        let all: Vec<Shelf> = self.shelves().drain().map(|(_, s)| s).collect();
        for p in all.into_iter().flat_map(|s| s.waiting) {
            discard(host, p).await;
        }
    }
}

/// Ends a waiting VMM and removes it.
pub(super) async fn discard(host: &Arc<Host>, p: Prepared) {
    let Prepared { folder, group, vmm, qmp, events, .. } = p;
    drop((qmp, events));
    if let Err(e) = vmm.process.end(QUICK).await {
        tracing::warn!(error = %e, "a waiting VMM does not end");
    }
    boot::remove(host, &folder, &group).await;
}
