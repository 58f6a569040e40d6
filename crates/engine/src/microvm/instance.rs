//! A machine that runs, seen from the service: the way to its agent, and the eye that notices its end.

use std::fs;
use std::net::Shutdown;
use std::os::unix::net::UnixStream as StdStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use mainbrella_net::Explanation;
use mainbrella_types::{GenerationKey, Target};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::boot::{QUICK, console};
use super::folder::{self, AGENT_SOCKET, CONSOLE_LOG, VMM_LOG};
use super::qmp::{Event, Qmp};
use super::seats::Seat;
use super::vmm::{Vmm, control, log_text};
use super::{Inner, detached};
use crate::driver::{EgressOrder, ExitReport, GuestStream, Instance, MachineNetwork};
use crate::error::DriverError;

/// Pause between tries.
const FULL_PAUSE: Duration = Duration::from_secs(3);
/// How long the socket of the agent may be busy with the previous connection.
const DIAL_PATIENCE: Duration = Duration::from_secs(10);
/// How long the kernel may take to tell how a process ended.
const CAUSE_PATIENCE: Duration = Duration::from_millis(100);
/// Longest part of a VMM's own words that is logged, characters.
const REASON_CHARS: usize = 300;

/// A machine that runs (or has just ended).
#[derive(Debug)]
pub struct Machine {
    /// Its key.
    pub key: GenerationKey,
    /// Its folder.
    pub folder: PathBuf,
    /// Its VMM.
    pub vmm: Vmm,
    seat: Mutex<Option<Seat>>,
    network: tokio::sync::Mutex<Option<mainbrella_net::Seat>>,
    exit: watch::Sender<Option<ExitReport>>,
    stream: Mutex<Option<StdStream>>,
    watcher: OnceLock<tokio::task::AbortHandle>,
    /// The control channel, while it is open.
    qmp: Mutex<Option<Arc<Qmp>>>,
    /// Somebody holds it still on purpose; see [`Still`].
    still: AtomicBool,
}

/// While this lives, the watcher does not let a stopped machine go on.
pub(super) struct Still<'a>(&'a AtomicBool);

impl Drop for Still<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// What is known of the host's disk.
#[derive(Clone, Copy, Debug)]
pub struct Fullness {
    /// The machine is stopped for want of space.
    pub now: bool,
    /// How long it is tried again.
    pub patience: Duration,
}

impl Machine {
    /// Takes over a VMM that runs, and watches it from now on.
    #[must_use]
    pub fn watch(
        key: GenerationKey,
        folder: PathBuf,
        mut vmm: Vmm,
        qmp: Qmp,
        events: mpsc::Receiver<Event>,
        full: Fullness,
    ) -> Arc<Self> {
        let seat = Mutex::new(vmm.seat.take());
        let machine = Arc::new(Self {
            key,
            folder,
            vmm,
            seat,
            network: tokio::sync::Mutex::new(None),
            exit: watch::Sender::new(None),
            stream: Mutex::new(None),
            watcher: OnceLock::new(),
            qmp: Mutex::new(Some(Arc::new(qmp))),
            still: AtomicBool::new(false),
        });
        let watcher = tokio::spawn(
            Watch {
                machine: machine.clone(),
                full_since: full.now.then(Instant::now),
                full_patience: full.patience,
                why: None,
            }
            .run(events),
        );
        // Just made, so it is empty.
        let _ = machine.watcher.set(watcher.abort_handle());
        machine
    }

    /// Stops watching: closes control channel and stream, leaves the machine alone. For the end of the driver.
    pub fn let_be(&self) {
        if let Some(watcher) = self.watcher.get() {
            watcher.abort();
        }
        self.set_qmp(None);
        self.hang_up();
    }

    /// The control channel, if it is open.
    pub(super) fn qmp(&self) -> Option<Arc<Qmp>> {
        self.qmp.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_qmp(&self, qmp: Option<Arc<Qmp>>) {
        *self.qmp.lock().unwrap_or_else(PoisonError::into_inner) = qmp;
    }

    /// For as long as it is held, nobody else lets the machine go on.
    pub(super) fn hold_still(&self) -> Still<'_> {
        self.still.store(true, Ordering::Release);
        Still(&self.still)
    }

    /// Says to whoever waits for its end that it is over.
    pub(super) fn over(&self, why: ExitReport) {
        self.exit.send_replace(Some(why));
    }

    /// Takes the seat of its network.
    pub async fn seat_in(&self, network: Option<mainbrella_net::Seat>) {
        *self.network.lock().await = network;
    }

    /// The seat of its network, if it has one.
    pub(super) async fn network(&self) -> tokio::sync::MutexGuard<'_, Option<mainbrella_net::Seat>> {
        self.network.lock().await
    }

    /// Ends what serves its network. The rest ends with its process.
    pub async fn leave_network(&self) {
        let network = self.network.lock().await.take();
        if let Some(network) = network {
            network.close().await;
        }
    }

    /// Gives its seat back. Only when its process is gone.
    pub fn release_seat(&self) {
        drop(self.seat.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// Lets somebody else give its seat back.
    pub(super) fn take_seat(&self) -> Option<Seat> {
        self.seat.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Closes the open stream to the agent, if any.
    pub fn hang_up(&self) {
        if let Some(old) = self.stream.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // Its other side may be gone already.
            let _ = old.shutdown(Shutdown::Both);
        }
    }
}

/// What a caller holds of a [`Machine`].
pub struct MicroVmInstance {
    machine: Arc<Machine>,
    driver: Weak<Inner>,
}

impl MicroVmInstance {
    pub(super) fn new(machine: Arc<Machine>, driver: &Arc<Inner>) -> Self {
        Self { machine, driver: Arc::downgrade(driver) }
    }
}

#[async_trait]
impl MachineNetwork for MicroVmInstance {
    async fn set_egress(&self, order: &EgressOrder) -> Result<(), DriverError> {
        let Some(driver) = self.driver.upgrade() else {
            return Err(DriverError::Unsupported("the service is going down".to_owned()));
        };
        let (machine, order) = (self.machine.clone(), order.clone());
        // To its end even if the caller gives up: half a change must not be left.
        detached(async move { driver.set_egress(&machine, &order).await }).await
    }

    async fn explain(&self, target: &Target<'_>, port: u16) -> Explanation {
        let view = self.machine.network().await.as_ref().map(mainbrella_net::Seat::view);
        match view {
            Some(view) => view.explain(target, port).await,
            None => Explanation::closed(),
        }
    }
}

#[async_trait]
impl Instance for MicroVmInstance {
    async fn dial(&self) -> Result<GuestStream, DriverError> {
        let machine = &self.machine;
        machine.hang_up();
        let until = Instant::now() + DIAL_PATIENCE;
        let mut pause = Duration::from_micros(200);
        let stream = loop {
            match folder::connect(&machine.folder, AGENT_SOCKET) {
                Ok(stream) => break stream,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock && Instant::now() < until => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_millis(20));
                }
                Err(e) => return Err(DriverError::io("connecting to the agent port", e)),
            }
        };
        let io = |e| DriverError::io("connecting to the agent port", e);
        let held = stream.try_clone().map_err(io)?;
        let previous = machine.stream.lock().unwrap_or_else(PoisonError::into_inner).replace(held);
        if let Some(previous) = previous {
            // Two callers dialled at once: the later one wins.
            let _ = previous.shutdown(Shutdown::Both);
        }
        Ok(Box::new(tokio::net::UnixStream::from_std(stream).map_err(io)?))
    }

    async fn exited(&self) -> ExitReport {
        let mut exit = self.machine.exit.subscribe();
        match exit.wait_for(Option::is_some).await {
            Ok(report) => report.clone().unwrap_or_else(unknown),
            Err(_) => unknown(),
        }
    }

    fn network(&self) -> Option<&dyn MachineNetwork> {
        Some(self)
    }
}

fn unknown() -> ExitReport {
    ExitReport::Vmm("the machine is not watched any more".to_owned())
}

struct Watch {
    machine: Arc<Machine>,
    full_since: Option<Instant>,
    full_patience: Duration,
    why: Option<ExitReport>,
}

impl Watch {
    async fn run(mut self, mut events: mpsc::Receiver<Event>) {
        let machine = self.machine.clone();
        let ended = machine.vmm.process.wait();
        tokio::pin!(ended);
        let mut open = true;
        let mut next_try = Instant::now() + FULL_PAUSE;
        loop {
            tokio::select! {
                waited = &mut ended => {
                    if let Err(e) = waited {
                        tracing::error!(machine = %machine.key, error = %e, "the end of a VMM cannot be waited for");
                    }
                    break;
                }
                event = events.recv(), if open => match event {
                    Some(event) => self.take(event).await,
                    None => {
                        open = false;
                        machine.set_qmp(None);
                        // It may be ending right now. If it is not, somebody or something closed the channel: open it again.
                        tokio::time::sleep(Duration::from_millis(200)).await;
                        if !machine.vmm.process.ended() {
                            match control(&machine.folder, None).await {
                                Ok((qmp, again)) => {
                                    machine.set_qmp(Some(Arc::new(qmp)));
                                    (events, open) = (again, true);
                                }
                                Err(e) => tracing::warn!(machine = %machine.key, error = %e, "the control channel is lost; the process is still watched"),
                            }
                        }
                    }
                },
                () = tokio::time::sleep_until(next_try), if self.full_since.is_some() => {
                    next_try = Instant::now() + FULL_PAUSE;
                    self.go_on().await;
                }
            }
            if self.why.is_some() {
                // Its guest is over, or it cannot go on: what is left is a stopped VMM for `destroy` to remove.
                break;
            }
        }
        let report = match self.why.take() {
            Some(why) => why,
            None => self.ended_by_itself().await,
        };
        // Its actor says whether that was asked for.
        tracing::debug!(machine = %machine.key, reason = %report, "a VMM is over");
        machine.exit.send_replace(Some(report));
    }

    async fn take(&mut self, event: Event) {
        match event.name.as_str() {
            "SHUTDOWN" if event.data["guest"] == Value::Bool(true) => {
                let console = match self.machine.qmp() {
                    Some(qmp) => console(&qmp).await,
                    None => String::new(),
                };
                // Its folder goes with `destroy`; a log that cannot be written is no reason to hide the end.
                let _ = fs::write(self.machine.folder.join(CONSOLE_LOG), &console);
                self.why = Some(ExitReport::Guest(guest_reason(event.data["reason"].as_str().unwrap_or(""), &console)));
            }
            "GUEST_PANICKED" => self.why = Some(ExitReport::Guest("the guest's kernel panicked".to_owned())),
            "BLOCK_IO_ERROR" if event.data["nospace"] == Value::Bool(true) && self.full_since.is_none() => {
                tracing::warn!(machine = %self.machine.key, "the host has no disk space left; the machine is stopped until there is");
                self.full_since = Some(Instant::now());
            }
            _ => {}
        }
    }

    /// Lets a machine that stopped for want of space try again. It stops by itself if there is still none.
    async fn go_on(&mut self) {
        let (Some(since), Some(qmp)) = (self.full_since, self.machine.qmp()) else { return };
        if self.machine.still.load(Ordering::Acquire) {
            return;
        }
        let status = match qmp.call("query-status", json!({}), QUICK).await {
            Ok(v) => v["status"].as_str().unwrap_or("").to_owned(),
            Err(_) => return,
        };
        if status == "running" {
            self.full_since = None;
            tracing::info!(machine = %self.machine.key, "a machine that stopped for want of disk space goes on");
        } else if since.elapsed() > self.full_patience {
            self.why = Some(ExitReport::HostFull);
        } else if let Err(e) = qmp.call("cont", json!({}), QUICK).await {
            tracing::debug!(machine = %self.machine.key, error = %e, "a stopped machine does not go on");
        }
    }

    /// What is told of a VMM that ended without a reason of the guest's. What it wrote itself goes to the log alone.
    async fn ended_by_itself(&self) -> ExitReport {
        let vmm = &self.machine.vmm;
        let said = vmm.log.as_ref().map(log_text).unwrap_or_default();
        if let Some(last) = said.lines().rev().find(|l| !l.trim().is_empty()) {
            let _ = fs::write(self.machine.folder.join(VMM_LOG), &said);
            let last: String = last.chars().take(REASON_CHARS).collect();
            tracing::info!(machine = %self.machine.key, last, "a VMM ended and left words");
        }
        // The kernel knows when the process has been buried, a moment after its end.
        let mut cause = vmm.process.cause();
        let until = Instant::now() + CAUSE_PATIENCE;
        while cause.is_none() && Instant::now() < until {
            tokio::time::sleep(CAUSE_PATIENCE / 20).await;
            cause = vmm.process.cause();
        }
        ExitReport::Vmm(match cause {
            Some(cause) => format!("the VMM ended: {cause}"),
            None => "the VMM was killed or failed".to_owned(),
        })
    }
}

/// Why a guest is over, in one sentence without anything the guest wrote.
pub(super) fn guest_reason(reason: &str, console: &str) -> String {
    match reason {
        _ if console.contains("Kernel panic - not syncing") => "the guest's kernel panicked",
        "guest-reset" => "the guest rebooted",
        "guest-panic" => "the guest's kernel panicked",
        _ => "the guest shut down",
    }
    .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guests_end_is_told_without_its_words() {
        assert_eq!(guest_reason("guest-shutdown", "bye <script>"), "the guest shut down");
        assert_eq!(guest_reason("guest-reset", ""), "the guest rebooted");
        assert_eq!(guest_reason("guest-reset", "\n[1.0] Kernel panic - not syncing: x"), "the guest's kernel panicked");
    }
}
