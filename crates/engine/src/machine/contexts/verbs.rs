//! What callers do with the contexts of a machine.

use std::collections::BTreeMap;
use std::sync::Arc;

use mainbrella_types::{ErrorCode, Millis};
use tokio::sync::{mpsc, oneshot};

use super::channel::Bridge;
use super::registry::{Cell, Life, dead, in_progress, unknown};
use super::run::CodeRun;
use super::wire::{Allowance, Death, Order, Refusal, RefusalKind};
use super::{CodeOrder, ContextInfo, ContextOrder};
use crate::error::EngineError;
use crate::machine::MachineHandle;
use crate::machine::handle::Shared;

/// Looks for what an earlier service left in an adopted machine, and interrupts code that nobody waits for any more.
/// A guest that does not answer now is asked again at the first use.
pub(crate) fn resume(shared: &Arc<Shared>) {
    shared.contexts.set_looked(false);
    let machine = MachineHandle { shared: Arc::clone(shared) };
    tokio::spawn(async move {
        let over = machine.shared.contexts.over.clone();
        let found = tokio::select! {
            () = over.cancelled() => return,
            found = machine.look() => found,
        };
        if let Err(e) = found {
            tracing::debug!(
                internal = e.internal().unwrap_or(""),
                "code contexts were not looked for: {}",
                e.message()
            );
        }
    });
}

fn refused(refusal: &Refusal) -> EngineError {
    let e = match refusal.kind {
        RefusalKind::Unknown => unknown(),
        RefusalKind::Busy => in_progress(),
        RefusalKind::Dead => dead(Death::Unseen),
        RefusalKind::Cwd => {
            EngineError::new(ErrorCode::CommandNotStarted, "the working directory could not be entered")
        }
        RefusalKind::Failed => EngineError::new(ErrorCode::CommandNotStarted, "the context's kernel did not start"),
    };
    e.because(refusal.why.clone())
}

fn done(answer: Option<Refusal>) -> Result<(), EngineError> {
    answer.map_or(Ok(()), |refusal| Err(refused(&refusal)))
}

impl MachineHandle {
    /// Makes a context and waits until its kernel answers. When the caller stops waiting, it is closed again: nobody
    /// would know its id.
    ///
    /// # Errors
    /// `unsupported` when the template brings no kernel, `overloaded` when the machine holds as many contexts as it may,
    /// `command_not_started` when the working directory cannot be entered or the kernel does not start.
    pub async fn create_context(&self, order: ContextOrder) -> Result<ContextInfo, EngineError> {
        let pass = self.enter().await?;
        let (tell, told) = oneshot::channel();
        let this = self.clone();
        tokio::spawn(async move {
            let _pass = pass;
            let made = this.unless_gone(this.make_context(order)).await;
            if let Err(Ok(unwanted)) = tell.send(made) {
                let _ = this.close_context(&unwanted.id).await;
            }
        });
        told.await.unwrap_or_else(|e| {
            Err(EngineError::new(ErrorCode::Internal, "the start of a context was not followed").because(e.to_string()))
        })
    }

    async fn make_context(&self, order: ContextOrder) -> Result<ContextInfo, EngineError> {
        self.look().await?;
        let contexts = &self.shared.contexts;
        let id = format!("ctx-{}", &uuid::Uuid::new_v4().simple().to_string()[..16]);
        let now = Millis(
            std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .map_or(0, |d| i64::try_from(d.as_millis()).unwrap_or(i64::MAX)),
        );
        contexts.reserve(&id, &order, now)?;
        match self.start_kernel(&id, order.cwd.as_deref(), &order.env, now).await {
            Ok(()) => {
                contexts.settle(&id, Life::Lives, true);
                contexts.info(&id)
            }
            Err(e) => {
                contexts.remove(&id);
                Err(e)
            }
        }
    }

    async fn start_kernel(
        &self,
        id: &str,
        cwd: Option<&str>,
        env: &BTreeMap<String, String>,
        created_at: Millis,
    ) -> Result<(), EngineError> {
        let bridge = self.bridge().await?;
        done(bridge.call(&Order::Start { id, created_ms: created_at.0, cwd, env }).await?)
    }

    /// The bridge of this machine; started if there is none.
    async fn bridge(&self) -> Result<Arc<Bridge>, EngineError> {
        let contexts = &self.shared.contexts;
        let _setup = contexts.setup.lock().await;
        if let Some(bridge) = contexts.bridge() {
            return Ok(bridge);
        }
        let bridge = Bridge::start(&self.link()?, contexts).await?;
        contexts.set_bridge(Arc::clone(&bridge));
        Ok(bridge)
    }

    /// Makes sure that what an earlier service left in the machine is known.
    async fn look(&self) -> Result<(), EngineError> {
        let contexts = &self.shared.contexts;
        if contexts.has_looked() {
            return Ok(());
        }
        let _setup = contexts.setup.lock().await;
        if contexts.has_looked() {
            return Ok(());
        }
        if let Some((bridge, described)) = Bridge::find(&self.link()?, contexts).await? {
            let orphans = contexts.adopt(described);
            contexts.set_bridge(Arc::clone(&bridge));
            for (id, cell) in orphans {
                let bridge = Arc::clone(&bridge);
                tokio::spawn(
                    async move { bridge.call(&Order::Interrupt { id: &id, cell: Some(&cell) }).await.map(drop) },
                );
            }
        }
        contexts.set_looked(true);
        Ok(())
    }

    /// Every context, oldest first.
    ///
    /// # Errors
    /// When the machine does not run, or its guest does not answer after a restart of the service.
    pub async fn contexts(&self) -> Result<Vec<ContextInfo>, EngineError> {
        let _pass = self.enter().await?;
        self.unless_gone(self.look()).await?;
        Ok(self.shared.contexts.list())
    }

    /// One context.
    ///
    /// # Errors
    /// `not_found`, and those of [`Self::contexts`].
    pub async fn context(&self, id: &str) -> Result<ContextInfo, EngineError> {
        let _pass = self.enter().await?;
        self.unless_gone(self.look()).await?;
        self.shared.contexts.info(id)
    }

    /// Ends a context and its kernel. Code that runs there is ended.
    ///
    /// # Errors
    /// `not_found`; `in_progress` while it is being started or closed.
    pub async fn close_context(&self, id: &str) -> Result<(), EngineError> {
        let pass = self.enter().await?;
        self.unless_gone(self.look()).await?;
        let contexts = &self.shared.contexts;
        let (at_home, ..) = contexts.begin(id)?;
        let (this, id) = (self.clone(), id.to_owned());
        // Once begun it is carried out, whether the caller waits or not.
        let task = tokio::spawn(async move {
            let _pass = pass;
            if let Some(bridge) = this.shared.contexts.bridge().filter(|_| at_home) {
                let closed = this.unless_gone(bridge.call(&Order::Close { id: &id })).await;
                if let Ok(Some(refusal)) = &closed
                    && refusal.kind != RefusalKind::Unknown
                {
                    tracing::warn!(id, why = refusal.why, "a context was not closed");
                }
            }
            this.shared.contexts.remove(&id);
        });
        task.await.map_err(|e| {
            EngineError::new(ErrorCode::Internal, "the end of a context was not followed").because(e.to_string())
        })
    }

    /// Gives a context a new kernel: its variables are gone, code that runs there is ended.
    ///
    /// # Errors
    /// `not_found`; `in_progress`; `command_not_started` when the new kernel does not start, and the context is dead then.
    pub async fn restart_context(&self, id: &str) -> Result<ContextInfo, EngineError> {
        let pass = self.enter().await?;
        self.unless_gone(self.look()).await?;
        let (at_home, _, cwd, env, created_at) = self.shared.contexts.begin(id)?;
        let (this, id) = (self.clone(), id.to_owned());
        let task = tokio::spawn(async move {
            let _pass = pass;
            let renewed = this.unless_gone(async {
                if at_home && let Some(bridge) = this.shared.contexts.bridge() {
                    return done(bridge.call(&Order::Restart { id: &id }).await?);
                }
                this.start_kernel(&id, cwd.as_deref(), &env, created_at).await
            });
            let renewed = renewed.await;
            let lives = renewed.is_ok();
            let life = if lives { Life::Lives } else { Life::Dead(Death::Unseen) };
            let at_home = lives || (at_home && this.shared.contexts.bridge().is_some());
            this.shared.contexts.settle(&id, life, at_home);
            renewed.and_then(|()| this.shared.contexts.info(&id))
        });
        task.await.unwrap_or_else(|e| {
            let lost = EngineError::new(ErrorCode::Internal, "the restart of a context was not followed");
            Err(lost.because(e.to_string()))
        })
    }

    /// Interrupts the code that runs in a context, as Ctrl-C does. Nothing happens where none runs.
    ///
    /// # Errors
    /// `not_found`; `context_dead`.
    pub async fn interrupt_context(&self, id: &str) -> Result<ContextInfo, EngineError> {
        let _pass = self.enter().await?;
        self.unless_gone(self.look()).await?;
        let contexts = &self.shared.contexts;
        match contexts.life(id)? {
            Life::Starting => return Err(in_progress()),
            Life::Dead(how) => return Err(dead(how)),
            Life::Lives => {}
        }
        let bridge = contexts.bridge().ok_or_else(|| dead(Death::Unseen))?;
        done(self.unless_gone(bridge.call(&Order::Interrupt { id, cell: None })).await?)?;
        contexts.info(id)
    }

    /// Runs code in a context, when it is its turn there: runs of one context follow each other.
    ///
    /// # Errors
    /// `not_found`; `context_dead`; `in_progress` while it is being restarted; `overloaded` when too many wait.
    pub async fn run_code(&self, id: &str, order: CodeOrder) -> Result<CodeRun, EngineError> {
        let pass = self.enter().await?;
        self.unless_gone(self.look()).await?;
        let contexts = &self.shared.contexts;
        if let Life::Dead(how) = contexts.life(id)? {
            return Err(dead(how));
        }
        let waiting = contexts.queue(id)?;
        let turn = self.unless_gone(async { Ok(Arc::clone(&waiting.turn).lock_owned().await) }).await?;
        drop(waiting);
        let cell = uuid::Uuid::now_v7().simple().to_string();
        let (tell, told) = mpsc::unbounded_channel();
        let entry = Cell {
            id: cell.clone(),
            said: Some(tell),
            allowance: Allowance::default(),
            _turn: turn,
            _pass: Some(pass),
        };
        contexts.place(id, entry)?;
        let Some(bridge) = contexts.bridge() else {
            contexts.displace(id, &cell);
            return Err(dead(Death::Unseen));
        };
        // From here on, whoever loses interest interrupts it.
        let mut run = CodeRun::new(self.clone(), id.to_owned(), cell.clone(), told, order.timeout_ms);
        let begin = Order::Run { id, cell: &cell, code: &order.code, timeout_ms: order.timeout_ms };
        let begun = self.unless_gone(bridge.call(&begin)).await.and_then(done);
        if let Err(e) = begun {
            run.never_ran();
            contexts.displace(id, &cell);
            // Its kernel may have ended in this very moment.
            return Err(match contexts.life(id) {
                Ok(Life::Dead(how)) => dead(how),
                _ => e,
            });
        }
        Ok(run)
    }
}
