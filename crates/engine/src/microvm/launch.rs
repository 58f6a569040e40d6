//! Making and removing machines.

use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mainbrella_types::{Accelerator, GenerationKey, SizeClass, TemplateName};
use serde_json::json;
use tokio::sync::mpsc;

use super::accelerator::{self, Verdict};
use super::boot::{self, QUICK, blocking};
use super::command_line::GuestDisk;
use super::content::Origin;
use super::freeze::{FreezeOrder, Frozen, KeptOrder, KeyInputs, find, find_kept, freeze};
use super::instance::{Fullness, Machine, guest_reason};
use super::network::refused;
use super::pause::forget_vmm;
use super::pool::{Disk, Prepared, awaken, load, prepare};
use super::qmp::{Event, Qmp};
use super::vmm::{Vmm, chain, control};
use super::{Inner, folder, paused};
use crate::driver::{EgressOrder, ExitReport, LaunchOrder};
use crate::error::DriverError;

/// Longest wait for a killed VMM to be gone.
const KILL_PATIENCE: Duration = Duration::from_secs(15);

/// What was found of a machine.
pub(super) enum Found {
    Running(Arc<Machine>),
    Paused,
    Dead(ExitReport),
    Absent,
}

impl Inner {
    /// The frozen template, made if it is not there; once, however many ask.
    pub(super) async fn frozen(
        self: &Arc<Self>,
        template: &TemplateName,
        class: SizeClass,
    ) -> Result<Arc<Frozen>, DriverError> {
        let files = self.boot_files(template).await?;
        self.frozen_of(&files, template, class, GuestDisk::AtBoot).await
    }

    /// The same of given files.
    pub(super) async fn frozen_of(
        self: &Arc<Self>,
        files: &boot::BootFiles,
        template: &TemplateName,
        class: SizeClass,
        disk: GuestDisk,
    ) -> Result<Arc<Frozen>, DriverError> {
        let verdict = self.verdict(files).await?;
        let inputs = self.key_inputs(verdict.accelerator, template, (class, disk), files);
        let slot = self.frozen_slot(inputs.key());
        // Held while it is made: everyone else who wants it waits here.
        let mut slot = slot.lock().await;
        if let Some(ready) = slot.as_ref() {
            return Ok(ready.clone());
        }
        let ready = match find(&self.places, (template, class), files, &inputs).await {
            Some(ready) => ready,
            None => {
                tracing::info!(%template, size = %class, "freezing a template; this takes some seconds, once");
                let origin = match disk {
                    GuestDisk::AtBoot => self.origin(files, template, class).await?,
                    GuestDisk::Later => Origin::Root,
                };
                let order = FreezeOrder {
                    host: &self.host,
                    places: &self.places,
                    accelerator: verdict.accelerator,
                    class,
                    files,
                    inputs: inputs.clone(),
                    origin: Arc::new(origin),
                };
                freeze(&order).await?;
                find(&self.places, (template, class), files, &inputs).await.ok_or(DriverError::Stage {
                    stage: "freezing the template",
                    detail: "what was frozen is not whole".to_owned(),
                })?
            }
        };
        let ready = Arc::new(ready);
        *slot = Some(ready.clone());
        Ok(ready)
    }

    /// What shapes the memory of `template` in `class` on this host.
    pub(super) fn key_inputs(
        &self,
        accelerator: Accelerator,
        template: &TemplateName,
        (class, disk): (SizeClass, GuestDisk),
        files: &boot::BootFiles,
    ) -> KeyInputs {
        let walls = (self.host.jail.sandbox(), self.host.network.has_cards());
        KeyInputs::new(&self.qemu_version, accelerator, walls, &self.processor, template, (class.spec(), disk), files)
    }

    fn frozen_slot(&self, key: String) -> super::FrozenSlot {
        super::held(&self.frozen).entry(key).or_default().clone()
    }

    /// The very frozen template that a paused machine was made from.
    pub(super) async fn frozen_kept(
        self: &Arc<Self>,
        (key, making): (&str, &str),
        template: &TemplateName,
        class: SizeClass,
    ) -> Result<Arc<Frozen>, DriverError> {
        let slot = self.frozen_slot(key.to_owned());
        let mut slot = slot.lock().await;
        let ready = match slot.as_ref() {
            Some(ready) => ready.clone(),
            None => {
                let (inner, key, template) = (self.clone(), key.to_owned(), template.clone());
                let found = blocking(move || {
                    let accelerator = inner.current().accelerator;
                    let now = inner.files_of(&template).ok();
                    find_kept(&KeptOrder {
                        places: &inner.places,
                        key: &key,
                        template: &template,
                        class,
                        inputs: &|files, disk| inner.key_inputs(accelerator, &template, (class, disk), files),
                        root: now.map(|files| (files.root, files.root_digest)),
                    })
                });
                let found = Arc::new(found.await?);
                *slot = Some(found.clone());
                found
            }
        };
        if ready.making != making {
            return Err(DriverError::Damaged("its frozen template was made again since".to_owned()));
        }
        Ok(ready)
    }

    async fn boot_files(self: &Arc<Self>, template: &TemplateName) -> Result<boot::BootFiles, DriverError> {
        let (inner, template) = (self.clone(), template.clone());
        blocking(move || inner.files_of(&template)).await
    }

    /// The accelerator; tries KVM now if that had to wait for a template.
    pub(super) async fn verdict(&self, files: &boot::BootFiles) -> Result<Verdict, DriverError> {
        let mut verdict = self.verdict.lock().await;
        if verdict.open {
            let ground = accelerator::Ground {
                host: &self.host,
                places: &self.places,
                qemu_version: &self.qemu_version,
                files: Some(files.clone()),
            };
            *verdict = accelerator::decide(self.choice, &ground).await?;
            self.publish(&verdict);
        }
        Ok(verdict.clone())
    }

    /// Makes a machine. On failure nothing is left.
    pub(super) async fn launch(self: &Arc<Self>, order: &LaunchOrder) -> Result<Arc<Machine>, DriverError> {
        let lock = self.lock(&order.key);
        let _held = lock.lock().await;
        let place = self.places.machine(&order.key);
        if place.exists() {
            return Err(DriverError::Stage { stage: "preparing", detail: "a machine of this key exists".to_owned() });
        }
        if let Some(snapshot) = &order.snapshot {
            return self.launch_saved(order, snapshot).await;
        }
        let frozen = self.frozen(&order.template, order.size).await?;
        match self.bring_up(order, &frozen, place).await {
            Ok(machine) => {
                self.pool.refill(&self.host, self.current().accelerator, &frozen);
                Ok(machine)
            }
            Err(e) => {
                if let Err(left) = self.remove(&order.key).await {
                    tracing::error!(machine = %order.key, error = %chain(&left), "a failed launch could not be cleaned up; `destroy` will try again");
                }
                Err(e)
            }
        }
    }

    async fn bring_up(
        &self,
        order: &LaunchOrder,
        frozen: &Arc<Frozen>,
        place: PathBuf,
    ) -> Result<Arc<Machine>, DriverError> {
        let mut prepared = match self.pool.take(&self.host, &frozen.key).await {
            Some(waiting) => hand_over(waiting, place)?,
            None => {
                let own = (place, order.key.to_string());
                prepare(&self.host, self.current().accelerator, frozen, own, Disk::default()).await?
            }
        };
        let device = if prepared.restored { None } else { Some(frozen.open_device()?) };
        let network = self.seat_and_load(&mut prepared, device.as_ref(), &order.egress).await?;
        awaken(&prepared).await?;
        Ok(self.take_up(order.key, prepared, network).await)
    }

    /// Puts a VMM under its policy and loads its devices' state, both before its guest runs. No `device`: that is loaded.
    pub(super) async fn seat_and_load(
        &self,
        prepared: &mut Prepared,
        device: Option<&File>,
        egress: &EgressOrder,
    ) -> Result<Option<mainbrella_net::Seat>, DriverError> {
        let seated = self.host.network.attach(prepared.vmm.record.pid, egress);
        let loaded = async {
            match device {
                Some(device) => load(prepared, device).await,
                None => Ok(()),
            }
        };
        match tokio::join!(seated, loaded) {
            (Ok(network), Ok(())) => Ok(network),
            (Ok(Some(network)), Err(e)) => {
                network.close().await;
                Err(e)
            }
            (Err(e), _) | (Ok(None), Err(e)) => Err(e),
        }
    }

    /// Makes a VMM whose guest runs the machine `key`.
    pub(super) async fn take_up(
        &self,
        key: GenerationKey,
        prepared: Prepared,
        network: Option<mainbrella_net::Seat>,
    ) -> Arc<Machine> {
        let Prepared { folder, vmm, qmp, events, .. } = prepared;
        let machine = Machine::watch(key, folder, vmm, qmp, events, self.fullness(false));
        machine.seat_in(network).await;
        self.machines().insert(key, machine.clone());
        machine
    }

    pub(super) fn fullness(&self, now: bool) -> Fullness {
        Fullness { now, patience: self.full_patience }
    }

    /// Finds a machine after a restart.
    pub(super) async fn adopt(&self, key: &GenerationKey, egress: &EgressOrder) -> Result<Found, DriverError> {
        let lock = self.lock(key);
        let _held = lock.lock().await;
        if let Some(machine) = self.machines().get(key) {
            return Ok(Found::Running(machine.clone()));
        }
        let place = self.places.machine(key);
        if !place.exists() {
            return Ok(Found::Absent);
        }
        if paused::is_paused(&place) {
            return Ok(Found::Paused);
        }
        let record = folder::read_record(&place).map_err(|e| DriverError::io("reading a machine's record", e))?;
        let lost = |why: &str| Ok(Found::Dead(ExitReport::Vmm(why.to_owned())));
        let Some(record) = record else { return lost("the service ended before its VMM was started") };
        let Ok(process) = record.process() else { return lost("the VMM ended while the service was away") };
        // Its messages, while it lives: the file is still open in it.
        let log = fs::File::open(format!("/proc/{}/fd/2", record.pid)).ok();
        // Its seat stays reserved until it is either watched or removed: the process may be alive in every case below.
        let mut vmm = Vmm { process, log, record, seat: None };
        let reached = control(&place, vmm.log.as_ref()).await;
        let (qmp, events) = match reached {
            Ok(q) => q,
            Err(e) => return lost(&format!("the VMM does not answer: {e}")),
        };
        let status = qmp.call("query-status", json!({}), QUICK).await;
        let status = status.ok().and_then(|v| v["status"].as_str().map(str::to_owned)).unwrap_or_default();
        match status.as_str() {
            "running" => {}
            "io-error" => {
                vmm.seat = self.reserved().remove(key);
                return Ok(Found::Running(self.take_over(*key, place, vmm, (qmp, events), (true, egress)).await));
            }
            "paused" => {
                if let Err(e) = qmp.call("cont", json!({}), QUICK).await {
                    return lost(&format!("the VMM is stopped and does not go on: {e}"));
                }
            }
            "shutdown" | "guest-panicked" => {
                let console = boot::console(&qmp).await;
                let reason = if status == "shutdown" { "guest-shutdown" } else { "guest-panic" };
                return Ok(Found::Dead(ExitReport::Guest(guest_reason(reason, &console))));
            }
            _ => return lost("the service ended before the machine was restored"),
        }
        vmm.seat = self.reserved().remove(key);
        Ok(Found::Running(self.take_over(*key, place, vmm, (qmp, events), (false, egress)).await))
    }

    /// Watches a machine that was found, and serves its network again.
    async fn take_over(
        &self,
        key: GenerationKey,
        place: PathBuf,
        vmm: Vmm,
        (qmp, events): (Qmp, mpsc::Receiver<Event>),
        (full, egress): (bool, &EgressOrder),
    ) -> Arc<Machine> {
        if let Err(e) = self.settle_disk(&key, &qmp, &place).await {
            tracing::error!(machine = %key, error = %chain(&e), "the disk of a forked machine is not in order; it cannot be paused or forked");
        }
        let pid = vmm.record.pid;
        let machine = Machine::watch(key, place, vmm, qmp, events, self.fullness(full));
        match self.host.network.attach(pid, egress).await {
            Ok(network) => machine.seat_in(network).await,
            // It fails closed: what served it is gone, and nothing takes its place.
            Err(e) => {
                tracing::error!(machine = %key, error = %chain(&e), "a machine that was found has lost its network")
            }
        }
        self.machines().insert(key, machine.clone());
        machine
    }

    /// Puts a machine under another policy; also one that lost its network when it was found.
    pub(super) async fn set_egress(&self, machine: &Machine, egress: &EgressOrder) -> Result<(), DriverError> {
        let mut network = machine.network().await;
        if let Some(seat) = network.as_mut() {
            return seat.change(egress.policy.clone()).await.map_err(|e| refused("changing the machine's network", &e));
        }
        *network = self.host.network.attach(machine.vmm.record.pid, egress).await?;
        Ok(())
    }

    /// Removes a machine and all that carries its name.
    pub(super) async fn destroy(&self, key: &GenerationKey) -> Result<(), DriverError> {
        let lock = self.lock(key);
        let held = lock.lock().await;
        let done = self.remove(key).await;
        drop(held);
        if done.is_ok() {
            self.forget_lock(key);
        }
        done
    }

    pub(super) async fn remove(&self, key: &GenerationKey) -> Result<(), DriverError> {
        self.end_vmm(key).await?;
        let place = self.places.machine(key);
        blocking(move || folder::remove(&place).map_err(|e| DriverError::io("removing the machine's folder", e)))
            .await?;
        let machine = self.machines().remove(key);
        if let Some(machine) = machine {
            machine.leave_network().await;
            machine.release_seat();
        }
        self.reserved().remove(key);
        self.disks.release(key);
        Ok(())
    }

    /// Ends a machine's VMM and removes what is the VMM's: its control group, and its files in the machine's folder.
    pub(super) async fn end_vmm(&self, key: &GenerationKey) -> Result<(), DriverError> {
        let place = self.places.machine(key);
        let record = folder::read_record(&place).map_err(|e| DriverError::io("reading a machine's record", e))?;
        let machine = self.machines().get(key).cloned();
        let io = |what: &'static str| move |e| DriverError::io(what, e);
        if let Some(machine) = &machine {
            machine.hang_up();
            machine.vmm.process.end(KILL_PATIENCE).await.map_err(io("ending the VMM"))?;
        } else if let Some(process) = record.as_ref().and_then(|r| r.process().ok()) {
            process.end(KILL_PATIENCE).await.map_err(io("ending the VMM"))?;
        }
        let mut groups = vec![key.to_string()];
        groups.extend(record.map(|r| r.group).filter(|g| *g != groups[0] && g.parse::<GenerationKey>().is_ok()));
        let host = self.host.clone();
        blocking(move || {
            for group in groups {
                host.cgroups.remove(&group, KILL_PATIENCE).map_err(io("removing the control group"))?;
            }
            forget_vmm(&place).map_err(io("removing the files of a VMM"))
        })
        .await
    }
}

/// Gives a waiting VMM its machine's name: from one moment to the next its folder is the machine's.
pub(super) fn hand_over(mut waiting: Prepared, place: PathBuf) -> Result<Prepared, DriverError> {
    fs::rename(&waiting.folder, &place).map_err(|e| DriverError::io("handing over a waiting VMM", e))?;
    waiting.folder = place;
    Ok(waiting)
}
