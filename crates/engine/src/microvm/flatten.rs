//! Flattening: a disk with many former overlays below it is put together, while its machine runs.
//!
//! QEMU copies what the layers hold into the machine's own overlay, at a bounded rate, and then takes them out of the chain. The
//! machine reads the same before, during and after, and its writes go on. Cut off at any point the disk is whole: what was copied
//! lies in the overlay above the same bytes. Only when QEMU has nothing between the overlay and the template is the list of layers
//! emptied; a list that still names them is no harm, because all of them that counts is above them by then.
//!
//! A fork or a pause breaks it off, and it begins anew afterwards. A disk that has as many layers as can be is not forked before it
//! is flat; who wants that waits, for a bounded time.

use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use mainbrella_types::GenerationKey;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::boot::{QUICK, blocking};
use super::command_line::LAYERS_MAX;
use super::instance::Machine;
use super::qmp::Qmp;
use super::vmm::chain;
use super::{Inner, disks, held};
use crate::error::DriverError;

/// A disk with more layers is flattened.
const LAYERS_CALM: usize = 4;
const JOB: &str = "flatten";
/// How fast what is below is copied, bytes a second, unless somebody waits for it.
const RATE: u64 = 32 << 20;
/// Time between two looks at how far it is.
const LOOK: Duration = Duration::from_millis(250);
/// Longest wait of a fork for a disk that has as many layers as can be.
const WAIT_MOST: Duration = Duration::from_secs(90);
/// How often it is begun again where it fails.
const TRIES: u32 = 3;
/// The template's node.
pub(super) const BASE: &str = "base";

fn stage(detail: String) -> DriverError {
    DriverError::Stage { stage: "flattening the machine's disk", detail }
}

async fn ask(qmp: &Qmp, command: &'static str, arguments: Value) -> Result<Value, DriverError> {
    qmp.call(command, arguments, QUICK).await.map_err(|e| stage(chain(&e)))
}

/// Whether QEMU is at it.
async fn runs(qmp: &Qmp) -> Result<bool, DriverError> {
    let jobs = ask(qmp, "query-block-jobs", json!({})).await?;
    Ok(jobs.as_array().is_some_and(|jobs| jobs.iter().any(|job| job["device"] == JOB)))
}

/// The uppermost node of the machine's disk, and how many there are below it. Only while nothing is copied.
pub(super) async fn top(qmp: &Qmp) -> Result<(String, u64), DriverError> {
    let blocks = ask(qmp, "query-block", json!({})).await?;
    let writable = |disk: &&Value| disk["node-name"].as_str().is_some_and(|name| name != "root");
    let disk = blocks.as_array().into_iter().flatten().map(|block| &block["inserted"]).find(writable);
    let read = |disk: &Value| Some((disk["node-name"].as_str()?.to_owned(), disk["backing_file_depth"].as_u64()?));
    disk.and_then(read).ok_or_else(|| stage("QEMU has no disk".to_owned()))
}

async fn begin(qmp: &Qmp, rate: u64) -> Result<(), DriverError> {
    let (node, _) = top(qmp).await?;
    // The name is written into the overlay and never read: who opens it says what is below it.
    let order = json!({"job-id": JOB, "device": node, "base-node": BASE, "backing-file": BASE, "speed": rate});
    ask(qmp, "block-stream", order).await.map(drop)
}

/// Has QEMU let go of disks that are in nobody's chain, so that their space comes back when nobody else reads them.
async fn let_go(qmp: &Qmp) -> Result<(), DriverError> {
    let nodes = ask(qmp, "query-named-block-nodes", json!({"flat": true})).await?;
    let mut left: Vec<&Value> = nodes.as_array().into_iter().flatten().collect();
    // One that is used by another is refused, so the uppermost goes first; those in use stay.
    for _ in 0..2 * (LAYERS_MAX + 2) {
        let mut refused = Vec::new();
        for node in &left {
            let Some(name) = node["node-name"].as_str().filter(|name| !name.starts_with('#')) else { continue };
            if ask(qmp, "blockdev-del", json!({"node-name": name})).await.is_err() {
                refused.push(*node);
            } else if node["drv"] == "file"
                && let Some(set) =
                    node["file"].as_str().and_then(|f| f.strip_prefix("/dev/fdset/")?.parse::<u64>().ok())
            {
                // Refused where it went with the node.
                let _ = ask(qmp, "remove-fd", json!({"fdset-id": set})).await;
            }
        }
        if refused.len() == left.len() {
            break;
        }
        left = refused;
    }
    Ok(())
}

impl Inner {
    /// Has the disk of a machine put together in the background, if it has many layers.
    pub(super) fn flatten_soon(self: &Arc<Self>, machine: &Arc<Machine>) {
        if !held(&self.flattening).insert(machine.key) {
            return;
        }
        let (inner, machine) = (Arc::downgrade(self), machine.clone());
        tokio::spawn(async move {
            if let Err(e) = flatten(&inner, &machine).await {
                tracing::warn!(machine = %machine.key, error = %chain(&e), "the disk of a machine was not flattened; it is tried again after its next fork or pause");
            }
            if let Some(inner) = inner.upgrade() {
                held(&inner.flattening).remove(&machine.key);
            }
        });
    }

    /// Looks how far it is, and begins it where it has to be. Says whether it began it now, or `None` when there is nothing to do.
    async fn look_at_layers(&self, machine: &Arc<Machine>) -> Result<Option<bool>, DriverError> {
        let lock = self.lock(&machine.key);
        let _held = lock.lock().await;
        let same = self.machines().get(&machine.key).is_some_and(|m| Arc::ptr_eq(m, machine));
        let Some(qmp) = machine.qmp().filter(|_| same && !machine.vmm.process.ended()) else { return Ok(None) };
        if runs(&qmp).await? {
            return Ok(Some(false));
        }
        let layers = self.settle_layers(&machine.key, &qmp, &machine.folder).await?;
        if layers.len() <= LAYERS_CALM {
            return Ok(None);
        }
        begin(&qmp, RATE).await?;
        Ok(Some(true))
    }

    /// The layers of a machine for whose disk QEMU has no work under way; none where it has taken them out of the chain.
    pub(super) async fn settle_layers(
        &self,
        key: &GenerationKey,
        qmp: &Qmp,
        place: &Path,
    ) -> Result<Vec<String>, DriverError> {
        let io = |e| DriverError::io("reading the list of a disk's layers", e);
        let of = place.to_owned();
        let layers = blocking(move || disks::read(&of).map_err(io)).await?;
        if layers.is_empty() || top(qmp).await?.1 > 1 {
            return Ok(layers);
        }
        let of = place.to_owned();
        blocking(move || disks::clear(&of).map_err(io)).await?;
        let_go(qmp).await?;
        self.disks.keep_only(key, &[]);
        tracing::info!(machine = %key, layers = layers.len(), "the disk of a machine was flattened");
        Ok(Vec::new())
    }

    /// Breaks it off, if it is under way. The disk is as it was, with some of what is below copied.
    pub(super) async fn stop_flattening(&self, qmp: &Qmp) -> Result<(), DriverError> {
        let until = Instant::now() + QUICK;
        let mut told = false;
        while runs(qmp).await? {
            if !told {
                // Refused where it has just come to its end.
                let _ = ask(qmp, "block-job-cancel", json!({"device": JOB, "force": true})).await;
                told = true;
            }
            if Instant::now() > until {
                return Err(stage("it does not stop".to_owned()));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// Waits until the machine's disk can take one more layer.
    pub(super) async fn ready_to_fork(&self, key: &GenerationKey) -> Result<(), DriverError> {
        let until = Instant::now() + WAIT_MOST;
        let mut begun = 0;
        loop {
            {
                let lock = self.lock(key);
                let _held = lock.lock().await;
                // Whether it runs is the fork's own question.
                let Some(machine) = self.machines().get(key).cloned() else { return Ok(()) };
                let Some(qmp) = machine.qmp() else { return Ok(()) };
                if runs(&qmp).await? {
                    // Somebody waits.
                    let _ = ask(&qmp, "block-job-set-speed", json!({"device": JOB, "speed": 0})).await;
                    let of = machine.folder.clone();
                    let io = |e| DriverError::io("reading the list of a disk's layers", e);
                    if blocking(move || disks::read(&of).map_err(io)).await?.len() < LAYERS_MAX {
                        return Ok(());
                    }
                } else if self.settle_layers(key, &qmp, &machine.folder).await?.len() < LAYERS_MAX {
                    return Ok(());
                } else if begun < TRIES {
                    begun += 1;
                    begin(&qmp, 0).await?;
                }
            }
            if Instant::now() > until {
                return Err(DriverError::Exhausted(
                    "the machine's disk went through many forks and is being put together; try again in a minute"
                        .to_owned(),
                ));
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

async fn flatten(inner: &Weak<Inner>, machine: &Arc<Machine>) -> Result<(), DriverError> {
    let mut begun = 0;
    loop {
        let Some(inner) = inner.upgrade() else { return Ok(()) };
        match inner.look_at_layers(machine).await? {
            None => return Ok(()),
            Some(true) if begun == TRIES => return Err(stage("it ended without being done".to_owned())),
            Some(now) => begun += u32::from(now),
        }
        drop(inner);
        tokio::time::sleep(LOOK).await;
    }
}
