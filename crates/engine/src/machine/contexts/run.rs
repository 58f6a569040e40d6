//! A run of code, as whoever asked for it holds it.

use std::time::Duration;

use mainbrella_types::ErrorCode;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::registry::{Life, dead};
use super::wire::{CellSaid, Death, Order};
use super::{CodeEvent, Contexts};
use crate::error::EngineError;
use crate::machine::MachineHandle;

/// How long a cell at its time limit may take to be interrupted before the bridge kills its kernel.
pub(super) const KILL_GRACE: Duration = Duration::from_secs(5);
/// How long after that its end must be said, before the bridge counts as silent.
const REPORT_GRACE: Duration = Duration::from_secs(25);

/// Code that runs in a context. Dropping it before its last event interrupts the code.
pub struct CodeRun {
    machine: MachineHandle,
    context: String,
    cell: String,
    said: mpsc::UnboundedReceiver<CellSaid>,
    deadline: Instant,
    finished: bool,
}

impl CodeRun {
    pub(super) fn new(
        machine: MachineHandle,
        context: String,
        cell: String,
        said: mpsc::UnboundedReceiver<CellSaid>,
        timeout_ms: u64,
    ) -> Self {
        let limit = Duration::from_millis(timeout_ms) + KILL_GRACE + REPORT_GRACE;
        Self { machine, context, cell, said, deadline: Instant::now() + limit, finished: false }
    }

    /// It never ran: nothing is to be interrupted.
    pub(super) fn never_ran(&mut self) {
        self.finished = true;
    }

    /// The next event; `None` after [`CodeEvent::Done`] or an error.
    ///
    /// # Errors
    /// `context_dead` when the kernel ended meanwhile; else the machine or its guest is gone. It is the last thing said.
    pub async fn next(&mut self) -> Option<Result<CodeEvent, EngineError>> {
        if self.finished {
            return None;
        }
        let machine = self.machine.clone();
        let contexts = machine.shared.contexts.clone();
        let next = machine.unless_gone(self.hear(&contexts)).await;
        self.finished = !matches!(&next, Ok(event) if !matches!(event, CodeEvent::Done(_)));
        Some(next)
    }

    async fn hear(&mut self, contexts: &Contexts) -> Result<CodeEvent, EngineError> {
        let said = tokio::select! {
            said = self.said.recv() => said,
            () = tokio::time::sleep_until(self.deadline) => {
                if let Some(bridge) = contexts.bridge() {
                    bridge.give_up("the end of a cell was not said in time");
                }
                return Err(dead(Death::Unseen));
            }
        };
        match said {
            Some(CellSaid::Event(event)) => Ok(event),
            Some(CellSaid::Died) => match contexts.life(&self.context) {
                // A machine that died took the kernel with it, which is the smaller news.
                Ok(Life::Dead(Death::Unseen)) | Err(_) => {
                    let _ = tokio::time::timeout(Duration::from_millis(500), contexts.over.cancelled()).await;
                    Err(dead(Death::Unseen))
                }
                Ok(Life::Dead(how)) => Err(dead(how)),
                Ok(_) => Err(dead(Death::Unseen)),
            },
            None => Err(EngineError::new(ErrorCode::ShuttingDown, "the service is going down")),
        }
    }
}

impl Drop for CodeRun {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        let Some(bridge) = self.machine.shared.contexts.bridge() else { return };
        let (context, cell) = (self.context.clone(), self.cell.clone());
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                let _ = bridge.call(&Order::Interrupt { id: &context, cell: Some(&cell) }).await;
            });
        }
    }
}
