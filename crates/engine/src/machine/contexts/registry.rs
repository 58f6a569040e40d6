//! What is known of a machine's contexts, and who waits for what their cells say.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mainbrella_types::{ErrorCode, Millis, limits};
use tokio::sync::{OwnedMutexGuard, mpsc};
use tokio_util::sync::CancellationToken;

use super::channel::Bridge;
use super::wire::{Allowance, CellSaid, Death, Described};
use super::{CodeEvent, ContextInfo, ContextOrder, ContextState, Language};
use crate::error::EngineError;
use crate::machine::gate::Pass;

/// The contexts of one machine.
pub(crate) struct Contexts {
    inside: Mutex<Inside>,
    /// Held by whoever looks for a bridge or starts one.
    pub(super) setup: tokio::sync::Mutex<()>,
    /// Whether what an earlier service left in the machine is known.
    looked: AtomicBool,
    /// Cancelled when nobody is to work for this machine any more: it is gone, or the service ends.
    pub(crate) over: CancellationToken,
}

#[derive(Default)]
struct Inside {
    bridge: Option<Arc<Bridge>>,
    entries: BTreeMap<String, Entry>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    Starting,
    Lives,
    Dead(Death),
}

struct Entry {
    language: Language,
    created_at: Millis,
    cwd: Option<String>,
    env: BTreeMap<String, String>,
    life: Life,
    /// Whether the bridge that runs now knows it.
    at_home: bool,
    cell: Option<Cell>,
    /// Whose turn it is to run code here.
    turn: Arc<tokio::sync::Mutex<()>>,
    waiting: usize,
}

/// Code that runs. The machine is in use, and it is nobody else's turn, until it is dropped.
pub(super) struct Cell {
    pub(super) id: String,
    /// `None`: whoever asked for it is gone.
    pub(super) said: Option<mpsc::UnboundedSender<CellSaid>>,
    pub(super) allowance: Allowance,
    pub(super) _turn: OwnedMutexGuard<()>,
    pub(super) _pass: Option<Pass>,
}

/// A place in the queue of a context.
pub(super) struct Waiting<'a> {
    contexts: &'a Contexts,
    id: String,
    pub(super) turn: Arc<tokio::sync::Mutex<()>>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(entry) = self.contexts.lock().entries.get_mut(&self.id) {
            entry.waiting = entry.waiting.saturating_sub(1);
        }
    }
}

pub(super) fn unknown() -> EngineError {
    EngineError::new(ErrorCode::NotFound, "there is no such context in this machine")
}

pub(super) fn in_progress() -> EngineError {
    EngineError::new(ErrorCode::InProgress, "the context is being started, restarted or closed")
}

pub(super) fn dead(how: Death) -> EngineError {
    let message = match how {
        Death::Signal(n) => format!("the context's kernel was ended by signal {n}"),
        Death::Code(n) => format!("the context's kernel exited with code {n}"),
        Death::Unseen => "the context's kernel has ended".to_owned(),
    };
    EngineError::new(ErrorCode::ContextDead, message)
}

impl Contexts {
    /// None yet. `gone` is cancelled when the machine can be used no more.
    pub(crate) fn new(gone: &CancellationToken) -> Self {
        Self {
            inside: Mutex::default(),
            setup: tokio::sync::Mutex::default(),
            looked: AtomicBool::new(true),
            over: gone.child_token(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        // Nothing panics while holding it; a poisoned lock still holds whole values.
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether what an earlier service left is known.
    pub(super) fn has_looked(&self) -> bool {
        self.looked.load(Ordering::SeqCst)
    }

    pub(super) fn set_looked(&self, looked: bool) {
        self.looked.store(looked, Ordering::SeqCst);
    }

    /// The bridge that runs.
    pub(super) fn bridge(&self) -> Option<Arc<Bridge>> {
        self.lock().bridge.clone().filter(|b| !b.has_ended())
    }

    pub(super) fn set_bridge(&self, bridge: Arc<Bridge>) {
        self.lock().bridge = Some(bridge);
    }

    /// Takes over what a bridge of an earlier service holds. Cells that still run are nobody's: whoever waited for
    /// them lost the connection with that service. Returns them as (context, cell), to be interrupted.
    pub(super) fn adopt(&self, described: Vec<Described>) -> Vec<(String, String)> {
        let mut inside = self.lock();
        let mut orphans = Vec::new();
        for d in described {
            let turn = Arc::new(tokio::sync::Mutex::new(()));
            let cell = d.cell.and_then(|id| {
                orphans.push((d.id.clone(), id.clone()));
                let guard = Arc::clone(&turn).try_lock_owned().ok()?;
                Some(Cell { id, said: None, allowance: Allowance::default(), _turn: guard, _pass: None })
            });
            // One that an earlier service was starting is of no use to anybody who knows it.
            let life = if d.dead || d.starting { Life::Dead(Death::Unseen) } else { Life::Lives };
            let entry = Entry {
                language: Language::Python,
                created_at: d.created_at,
                cwd: Some(d.cwd),
                env: d.env,
                life,
                at_home: true,
                cell,
                turn,
                waiting: 0,
            };
            inside.entries.insert(d.id, entry);
        }
        orphans
    }

    /// Makes a place for a context that is being started.
    pub(super) fn reserve(&self, id: &str, order: &ContextOrder, now: Millis) -> Result<(), EngineError> {
        let mut inside = self.lock();
        if inside.entries.len() >= limits::CONTEXTS_MAX {
            let max = limits::CONTEXTS_MAX;
            let message = format!("the machine already holds {max} contexts; close one first");
            return Err(EngineError::new(ErrorCode::Overloaded, message));
        }
        let entry = Entry {
            language: order.language,
            created_at: now,
            cwd: order.cwd.clone(),
            env: order.env.clone(),
            life: Life::Starting,
            at_home: false,
            cell: None,
            turn: Arc::default(),
            waiting: 0,
        };
        inside.entries.insert(id.to_owned(), entry);
        Ok(())
    }

    /// Begins a start, restart or close: nobody else may begin one.
    ///
    /// Returns whether the bridge that runs knows the context, and what it was made from.
    #[allow(clippy::type_complexity)]
    pub(super) fn begin(
        &self,
        id: &str,
    ) -> Result<(bool, Life, Option<String>, BTreeMap<String, String>, Millis), EngineError> {
        let mut inside = self.lock();
        let entry = inside.entries.get_mut(id).ok_or_else(unknown)?;
        if entry.life == Life::Starting {
            return Err(in_progress());
        }
        let before = std::mem::replace(&mut entry.life, Life::Starting);
        Ok((entry.at_home, before, entry.cwd.clone(), entry.env.clone(), entry.created_at))
    }

    /// Ends what [`Self::begin`] or [`Self::reserve`] began.
    pub(super) fn settle(&self, id: &str, life: Life, at_home: bool) {
        if let Some(entry) = self.lock().entries.get_mut(id) {
            entry.life = life;
            entry.at_home = at_home;
        }
    }

    pub(super) fn remove(&self, id: &str) {
        self.lock().entries.remove(id);
    }

    /// A context as callers see it.
    pub(super) fn info(&self, id: &str) -> Result<ContextInfo, EngineError> {
        self.lock().entries.get_key_value(id).map(seen).ok_or_else(unknown)
    }

    /// All of them, oldest first.
    pub(super) fn list(&self) -> Vec<ContextInfo> {
        let mut list: Vec<_> = self.lock().entries.iter().map(seen).collect();
        list.sort_by(|a, b| a.created_at.cmp(&b.created_at).then_with(|| a.id.cmp(&b.id)));
        list
    }

    /// How its kernel is.
    pub(super) fn life(&self, id: &str) -> Result<Life, EngineError> {
        self.lock().entries.get(id).map(|e| e.life).ok_or_else(unknown)
    }

    /// Takes a place in the queue of a context.
    pub(super) fn queue(&self, id: &str) -> Result<Waiting<'_>, EngineError> {
        let mut inside = self.lock();
        let entry = inside.entries.get_mut(id).ok_or_else(unknown)?;
        // The one whose turn it is does not wait.
        if entry.waiting > limits::CODE_QUEUE_MAX {
            return Err(EngineError::new(ErrorCode::Overloaded, "too many runs wait for this context"));
        }
        entry.waiting += 1;
        Ok(Waiting { contexts: self, id: id.to_owned(), turn: Arc::clone(&entry.turn) })
    }

    /// Notes a cell that is about to run.
    pub(super) fn place(&self, id: &str, cell: Cell) -> Result<(), EngineError> {
        let mut inside = self.lock();
        let entry = inside.entries.get_mut(id).ok_or_else(unknown)?;
        match entry.life {
            Life::Starting => Err(in_progress()),
            Life::Dead(how) => Err(dead(how)),
            Life::Lives => {
                entry.cell = Some(cell);
                Ok(())
            }
        }
    }

    /// Forgets a cell that never ran.
    pub(super) fn displace(&self, id: &str, cell: &str) {
        let gone = self.lock().entries.get_mut(id).and_then(|e| e.cell.take_if(|c| c.id == cell));
        drop(gone);
    }

    /// A kernel ended by itself. Its cell, if one ran, is ended by what is said of the cell.
    pub(super) fn died(&self, id: &str, how: Death) {
        let mut inside = self.lock();
        if let Some(entry) = inside.entries.get_mut(id)
            && entry.life == Life::Lives
        {
            entry.life = Life::Dead(how);
        }
    }

    /// Hands on what a cell said.
    ///
    /// # Errors
    /// When it is more than a cell may say.
    pub(super) fn heard(&self, id: &str, cell: &str, said: CellSaid) -> Result<(), &'static str> {
        let mut inside = self.lock();
        // What a cell says after its end, or in a context that was closed, is nobody's.
        let Some(entry) = inside.entries.get_mut(id) else { return Ok(()) };
        let Some(running) = entry.cell.as_mut().filter(|c| c.id == cell) else { return Ok(()) };
        let last = match &said {
            CellSaid::Event(event) => {
                running.allowance.take(event)?;
                matches!(event, CodeEvent::Done(_))
            }
            CellSaid::Died => true,
        };
        if matches!(said, CellSaid::Died) && entry.life == Life::Lives {
            entry.life = Life::Dead(Death::Unseen);
        }
        if let Some(to) = &running.said {
            // What is in there is within the allowance. Without a receiver it is dropped.
            let _ = to.send(said);
        }
        let ended = last.then(|| entry.cell.take());
        drop(inside);
        // Gate and turn are let go of outside the lock.
        drop(ended);
        Ok(())
    }

    /// A bridge has ended, and all kernels with it.
    pub(super) fn bridge_ended(&self, bridge: &Arc<Bridge>) {
        let mut ended = Vec::new();
        let mut inside = self.lock();
        if inside.bridge.as_ref().is_none_or(|b| Arc::ptr_eq(b, bridge)) {
            inside.bridge = None;
            for entry in inside.entries.values_mut() {
                entry.at_home = false;
                if entry.life == Life::Lives {
                    entry.life = Life::Dead(Death::Unseen);
                }
                ended.extend(entry.cell.take());
            }
        }
        drop(inside);
        for cell in ended {
            if let Some(to) = &cell.said {
                let _ = to.send(CellSaid::Died);
            }
        }
    }
}

fn seen((id, entry): (&String, &Entry)) -> ContextInfo {
    let state = match entry.life {
        Life::Starting => ContextState::Starting,
        Life::Dead(_) => ContextState::Dead,
        Life::Lives if entry.cell.is_some() => ContextState::Busy,
        Life::Lives => ContextState::Idle,
    };
    ContextInfo { id: id.clone(), language: entry.language, state, created_at: entry.created_at }
}
