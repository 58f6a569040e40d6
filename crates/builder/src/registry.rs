//! The builds of a service: kept in files, carried out one after the other.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt as _;
use mainbrella_engine::Clock;
use mainbrella_types::limits::{BUILD_CONTEXT_WAIT_SECONDS, BUILDS_KEPT, BUILDS_WAITING_MAX};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::carry::{Progress, Work};
use crate::context::{self, ContextError, Unpacking};
use crate::failure::{Failure, Halt, Reason};
use crate::ground::{Ground, Version};
use crate::log::{EventKind, Log, LogReader};
use crate::record::{Build, BuildRequest, BuildState};

/// How long builds may take to let go when the service ends.
const CLOSING: Duration = Duration::from_secs(20);

/// What builds are kept to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Builds carried out at once.
    pub at_once: usize,
    /// Versions without a tag that are kept of a family.
    pub keep_versions: usize,
    /// Steps that are cached.
    pub cached_steps: usize,
}

/// Why a call about a build was refused.
#[derive(Debug, thiserror::Error)]
pub enum BuildsError {
    /// There is no such build.
    #[error("there is no build {0}")]
    NotFound(String),
    /// Too many wait.
    #[error("{0} builds wait for their context or their turn already")]
    TooMany(usize),
    /// Its context is not wanted now.
    #[error("build {id} takes no context: it is {}", .state.as_str())]
    NotAwaiting {
        /// The build.
        id: String,
        /// Where it stands.
        state: BuildState,
    },
    /// Its context is being sent by another call.
    #[error("the context of build {0} is being sent by another call")]
    Sending(String),
    /// Its context was not taken.
    #[error(transparent)]
    Context(#[from] ContextError),
    /// The service is going down.
    #[error("the service is going down")]
    Closing,
    /// The disk.
    #[error("the files of a build cannot be written: {0}")]
    Io(#[from] io::Error),
}

struct Entry {
    dir: PathBuf,
    record: Mutex<Build>,
    /// Held while the record is changed on disk.
    writing: tokio::sync::Mutex<()>,
    log: Arc<Log>,
    cancel: CancellationToken,
    /// One call sends the context.
    sending: Arc<Semaphore>,
}

impl Entry {
    fn new(dir: PathBuf, build: Build, log: Arc<Log>) -> Arc<Self> {
        let (writing, cancel, sending) = (tokio::sync::Mutex::default(), CancellationToken::new(), Semaphore::new(1));
        Arc::new(Self { dir, record: Mutex::new(build), writing, log, cancel, sending: Arc::new(sending) })
    }

    fn record(&self) -> MutexGuard<'_, Build> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn build(&self) -> Build {
        self.record().clone()
    }

    /// Changes the record, on disk first. `change` says whether there is anything to change.
    async fn update(&self, change: impl FnOnce(&mut Build) -> bool) -> io::Result<bool> {
        let _writing = self.writing.lock().await;
        let mut next = self.build();
        if !change(&mut next) {
            return Ok(false);
        }
        let (dir, written) = (self.dir.clone(), next.clone());
        tokio::task::spawn_blocking(move || written.write(&dir)).await.map_err(io::Error::other)??;
        *self.record() = next;
        Ok(true)
    }
}

struct Inner {
    dir: PathBuf,
    ground: Arc<dyn Ground>,
    clock: Arc<dyn Clock>,
    limits: Limits,
    builds: Mutex<BTreeMap<String, Arc<Entry>>>,
    turn: Semaphore,
    closing: CancellationToken,
    tasks: tokio_util::task::TaskTracker,
}

/// The builds of a service. Cheap to clone.
#[derive(Clone)]
pub struct Builds {
    inner: Arc<Inner>,
}

impl Builds {
    /// Opens the builds that are kept in `dir`. Those that were cut off become `failed`, and their machines are stopped.
    ///
    /// # Errors
    /// When the folder cannot be made or read.
    pub async fn open(
        dir: &Path,
        ground: Arc<dyn Ground>,
        clock: Arc<dyn Clock>,
        limits: Limits,
    ) -> Result<Self, BuildsError> {
        let at = dir.to_owned();
        let found = tokio::task::spawn_blocking(move || read_all(&at)).await.map_err(io::Error::other)??;
        let builds = found.into_iter().map(|entry| (entry.build().id, entry)).collect();
        let inner = Inner {
            dir: dir.to_owned(),
            ground,
            clock,
            turn: Semaphore::new(limits.at_once.max(1)),
            limits,
            builds: Mutex::new(builds),
            closing: CancellationToken::new(),
            tasks: tokio_util::task::TaskTracker::new(),
        };
        let this = Self { inner: Arc::new(inner) };
        for entry in this.entries() {
            let build = entry.build();
            if !build.state.is_final() {
                if let Err(e) = this.inner.ground.stop_machines(&build.id).await {
                    tracing::warn!(build = build.id, "machines of a build that was cut off remain: {}", e.message());
                }
                this.remove_unfinished(&build).await;
                let failure =
                    Failure::new(Reason::Interrupted, "the service ended while it was under way; build again");
                this.finish(&entry, Err(Halt::Failed(failure))).await;
            } else if !entry.log.is_over() {
                entry.log.append(this.inner.clock.now().0, done(&build));
            }
        }
        this.trim().await;
        Ok(this)
    }

    /// Removes the version that a build which was cut off had made: it was never ready, and nobody was told of it.
    async fn remove_unfinished(&self, build: &Build) {
        let Some(started) = build.started_ms else { return };
        let versions = match self.inner.ground.versions(&build.request.name).await {
            Ok(versions) => versions,
            Err(e) => {
                tracing::warn!(build = build.id, "what a build that was cut off made is not known: {}", e.message());
                return;
            }
        };
        // What another build was answered with meanwhile is named by that build, which is as young and still remembered.
        let told: HashSet<String> = self.entries().iter().filter_map(|entry| entry.build().template).collect();
        let mine = |v: &Version| {
            v.created_ms >= started && v.of_recipe && v.tags.is_empty() && !told.contains(&v.name.to_string())
        };
        for version in versions.into_iter().filter(mine) {
            if let Err(e) = self.inner.ground.remove(&version.name).await {
                tracing::warn!(version = %version.name, "what a build that was cut off made remains: {}", e.message());
            }
        }
    }

    fn builds(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Entry>>> {
        self.inner.builds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn entries(&self) -> Vec<Arc<Entry>> {
        self.builds().values().cloned().collect()
    }

    fn entry(&self, id: &str) -> Result<Arc<Entry>, BuildsError> {
        self.builds().get(id).cloned().ok_or_else(|| BuildsError::NotFound(id.chars().take(64).collect()))
    }

    /// Notes a build. It waits for its context.
    ///
    /// # Errors
    /// When too many wait, or it cannot be written.
    pub async fn create(&self, request: BuildRequest) -> Result<Build, BuildsError> {
        if self.inner.closing.is_cancelled() {
            return Err(BuildsError::Closing);
        }
        let id = uuid::Uuid::now_v7().simple().to_string();
        let build = Build {
            id: id.clone(),
            request,
            state: BuildState::AwaitingContext,
            failure: None,
            steps: 0,
            steps_done: 0,
            steps_cached: 0,
            template: None,
            created_ms: self.inner.clock.now().0,
            started_ms: None,
            ended_ms: None,
        };
        let waiting = || self.builds().values().filter(|e| !e.record().state.is_final()).count();
        if waiting() >= BUILDS_WAITING_MAX {
            return Err(BuildsError::TooMany(BUILDS_WAITING_MAX));
        }
        let (dir, first) = (self.inner.dir.join(&id), build.clone());
        let made = tokio::task::spawn_blocking(move || {
            fs::create_dir(&dir)?;
            first.write(&dir)?;
            let log = Log::open(&dir)?;
            io::Result::Ok(Entry::new(dir, first, log))
        });
        let entry = made.await.map_err(io::Error::other)??;
        self.builds().insert(id, Arc::clone(&entry));
        let this = self.clone();
        self.inner.tasks.spawn(async move { this.expire(&entry).await });
        self.trim().await;
        Ok(build)
    }

    /// Gives up a build whose context does not come.
    async fn expire(&self, entry: &Arc<Entry>) {
        loop {
            tokio::select! {
                () = entry.cancel.cancelled() => return,
                () = self.inner.closing.cancelled() => return,
                () = tokio::time::sleep(Duration::from_secs(BUILD_CONTEXT_WAIT_SECONDS)) => {}
            }
            if entry.record().state != BuildState::AwaitingContext {
                return;
            }
            // One that is being sent has limits of its own.
            if let Ok(_sending) = entry.sending.clone().try_acquire_owned() {
                let minutes = BUILD_CONTEXT_WAIT_SECONDS / 60;
                let failure =
                    Failure::new(Reason::Context, format!("its context was not sent within {minutes} minutes"));
                self.finish(entry, Err(Halt::Failed(failure))).await;
                return;
            }
        }
    }

    /// Begins to take the context of a build.
    ///
    /// # Errors
    /// When it takes none now.
    pub async fn begin_context(&self, id: &str) -> Result<ContextUpload, BuildsError> {
        let entry = self.entry(id)?;
        let sending = Arc::clone(&entry.sending).try_acquire_owned();
        let state = entry.record().state;
        if state != BuildState::AwaitingContext || self.inner.closing.is_cancelled() {
            return Err(BuildsError::NotAwaiting { id: id.to_owned(), state });
        }
        let sending = sending.map_err(|_| BuildsError::Sending(id.to_owned()))?;
        let dir = entry.dir.clone();
        let begun = tokio::task::spawn_blocking(move || Unpacking::begin(&dir)).await.map_err(io::Error::other)??;
        Ok(ContextUpload { builds: self.clone(), entry, unpacking: Some(begun), _sending: sending })
    }

    /// Builds, the newest first.
    #[must_use]
    pub fn list(&self) -> Vec<Build> {
        self.builds().values().rev().map(|entry| entry.build()).collect()
    }

    /// A build.
    ///
    /// # Errors
    /// When there is none of that id.
    pub fn get(&self, id: &str) -> Result<Build, BuildsError> {
        Ok(self.entry(id)?.build())
    }

    /// Reads the log of a build after event `after`.
    ///
    /// # Errors
    /// When there is no such build.
    pub fn events(&self, id: &str, after: u64) -> Result<LogReader, BuildsError> {
        Ok(self.entry(id)?.log.read(after))
    }

    /// Cancels a build; one that is over stays as it is. One that is carried out ends in a moment.
    ///
    /// # Errors
    /// When there is no such build.
    pub async fn cancel(&self, id: &str) -> Result<Build, BuildsError> {
        let entry = self.entry(id)?;
        entry.cancel.cancel();
        if entry.record().state == BuildState::AwaitingContext {
            self.finish(&entry, Err(Halt::Cancelled)).await;
        }
        Ok(entry.build())
    }

    /// Ends what is carried out, for the end of the service.
    pub async fn close(&self) {
        self.inner.closing.cancel();
        self.inner.tasks.close();
        if tokio::time::timeout(CLOSING, self.inner.tasks.wait()).await.is_err() {
            tracing::warn!("a build was still under way; the next start cleans up after it");
        }
    }

    /// Waits for its turn and carries a build out.
    async fn carry(&self, entry: Arc<Entry>) {
        let turn = tokio::select! {
            biased;
            () = self.inner.closing.cancelled() => Err(()),
            () = entry.cancel.cancelled() => Err(()),
            turn = self.inner.turn.acquire() => turn.map_err(drop),
        };
        let id = entry.build().id;
        let result = match turn {
            Ok(_turn) => {
                let started = self.inner.clock.now().0;
                let begun = entry.update(|build| {
                    (build.state, build.started_ms) = (BuildState::Running, Some(started));
                    true
                });
                match begun.await {
                    Ok(_) => self.run(&entry).await,
                    Err(e) => Err(Halt::Failed(Failure::internal(e))),
                }
            }
            Err(()) => Err(Halt::Cancelled),
        };
        // What the service's end broke off nobody cancelled.
        let result = match result {
            Err(Halt::Cancelled) if !entry.cancel.is_cancelled() || self.inner.closing.is_cancelled() => {
                Err(Halt::Failed(Failure::new(
                    Reason::Interrupted,
                    "the service ended while it was under way; build again",
                )))
            }
            other => other,
        };
        tracing::info!(build = id, ok = result.is_ok(), "a build is over");
        self.finish(&entry, result).await;
    }

    async fn run(&self, entry: &Arc<Entry>) -> Result<String, Halt> {
        let request = entry.build().request;
        let told = Arc::clone(entry);
        let cancel = entry.cancel.child_token();
        let closing = self.inner.closing.clone();
        let work = Work {
            id: entry.build().id,
            dir: entry.dir.clone(),
            deadline: Instant::now() + Duration::from_secs(request.timeout_seconds),
            request,
            ground: Arc::clone(&self.inner.ground),
            clock: Arc::clone(&self.inner.clock),
            log: Arc::clone(&entry.log),
            cancel: cancel.clone(),
            keep_versions: self.inner.limits.keep_versions,
            cached_steps: self.inner.limits.cached_steps,
            progress: Box::new(move |p: Progress| {
                let mut build = told.record();
                (build.steps, build.steps_done, build.steps_cached) = (p.steps, p.done, p.cached);
            }),
        };
        let stopper = tokio::spawn(async move {
            closing.cancelled().await;
            cancel.cancel();
        });
        let carried = AssertUnwindSafe(work.carry_out()).catch_unwind().await;
        stopper.abort();
        match carried {
            Ok(result) => result.map(|version| version.to_string()),
            Err(_) => {
                // It did not come to stop its machine.
                if let Err(e) = self.inner.ground.stop_machines(&work.id).await {
                    tracing::warn!(build = work.id, "machines of a build remain: {}", e.message());
                }
                Err(Halt::Failed(Failure::internal("a build ended abnormally")))
            }
        }
    }

    /// Notes how a build ended; its context goes. Only the first end counts.
    async fn finish(&self, entry: &Arc<Entry>, result: Result<String, Halt>) {
        let dir = entry.dir.clone();
        if let Ok(Err(e)) = tokio::task::spawn_blocking(move || context::remove(&dir)).await {
            tracing::warn!(error = %e, "the context of a build was not removed");
        }
        let now = self.inner.clock.now().0;
        let change = |build: &mut Build| {
            if build.state.is_final() {
                return false;
            }
            build.ended_ms = Some(now);
            match &result {
                Ok(version) => (build.state, build.template) = (BuildState::Succeeded, Some(version.clone())),
                Err(Halt::Cancelled) => build.state = BuildState::Cancelled,
                Err(Halt::Failed(failure)) => {
                    (build.state, build.failure) = (BuildState::Failed, Some(failure.clone()));
                }
            }
            true
        };
        let changed = match entry.update(change).await {
            Ok(changed) => changed,
            Err(e) => {
                tracing::error!(error = %e, "the end of a build could not be written; after a restart it counts as cut off");
                change(&mut entry.record())
            }
        };
        if changed {
            entry.cancel.cancel();
            entry.log.append(now, done(&entry.build()));
        }
    }

    /// Lets go of the oldest builds, beyond what is kept.
    async fn trim(&self) {
        let over: Vec<_> = {
            let mut builds = self.builds();
            let more = builds.len().saturating_sub(BUILDS_KEPT);
            let final_ones = builds.iter().filter(|(_, e)| e.record().state.is_final());
            let ids: Vec<_> = final_ones.map(|(id, _)| id.clone()).take(more).collect();
            ids.iter().filter_map(|id| builds.remove(id)).collect()
        };
        for entry in over {
            let dir = entry.dir.clone();
            let removed = tokio::task::spawn_blocking(move || {
                context::remove(&dir)?;
                fs::remove_dir_all(&dir)
            });
            if let Ok(Err(e)) = removed.await {
                tracing::warn!(error = %e, "an old build was not removed");
            }
        }
    }
}

fn done(build: &Build) -> EventKind {
    EventKind::Done { state: build.state, template: build.template.clone(), failure: build.failure.clone() }
}

/// What is kept, the oldest first. What never became a build is removed. Blocks.
fn read_all(dir: &Path) -> io::Result<Vec<Arc<Entry>>> {
    use std::os::unix::fs::DirBuilderExt as _;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        match Build::read(&path).and_then(|build| Ok((build, Log::open(&path)?))) {
            Ok((build, log)) if path.file_name().is_some_and(|name| *name == *build.id) => {
                found.push(Entry::new(path, build, log));
            }
            Ok(_) => tracing::warn!(path = %path.display(), "a build is not in its own folder; it is left alone"),
            // Its record was never whole: nobody was told of it.
            Err(e) if e.kind() == io::ErrorKind::NotFound && path.is_dir() => fs::remove_dir_all(&path)?,
            Err(e) => tracing::warn!(path = %path.display(), error = %e, "a build cannot be read; it is left alone"),
        }
    }
    Ok(found)
}

/// The context of a build on its way in. When it is dropped before its end, the build waits for another.
pub struct ContextUpload {
    builds: Builds,
    entry: Arc<Entry>,
    unpacking: Option<Unpacking>,
    _sending: tokio::sync::OwnedSemaphorePermit,
}

impl ContextUpload {
    /// Takes the next bytes of the archive.
    ///
    /// # Errors
    /// When it is no archive, leads out, is too large, or the build is over.
    pub async fn push(&mut self, data: Bytes) -> Result<(), BuildsError> {
        self.still_wanted()?;
        self.unpack(move |mut unpacking| {
            unpacking.push(&data)?;
            Ok((Some(unpacking), ()))
        })
        .await
    }

    /// The archive is over: the build waits for its turn.
    ///
    /// # Errors
    /// When the archive was cut short, or the build is over.
    pub async fn finish(mut self) -> Result<Build, BuildsError> {
        self.still_wanted()?;
        self.unpack(|unpacking| unpacking.finish().map(|()| (None, ()))).await?;
        let queued = self.entry.update(|build| {
            let waits = build.state == BuildState::AwaitingContext;
            if waits {
                build.state = BuildState::Queued;
            }
            waits
        });
        if !queued.await? {
            return Err(self.not_awaiting());
        }
        let (builds, entry) = (self.builds.clone(), Arc::clone(&self.entry));
        let build = entry.build();
        self.builds.inner.tasks.spawn(async move { builds.carry(entry).await });
        Ok(build)
    }

    fn not_awaiting(&self) -> BuildsError {
        let Build { id, state, .. } = self.entry.build();
        BuildsError::NotAwaiting { id, state }
    }

    fn still_wanted(&self) -> Result<(), BuildsError> {
        if self.entry.record().state != BuildState::AwaitingContext { Err(self.not_awaiting()) } else { Ok(()) }
    }

    async fn unpack<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(Unpacking) -> Result<(Option<Unpacking>, T), ContextError> + Send + 'static,
    ) -> Result<T, BuildsError> {
        let Some(unpacking) = self.unpacking.take() else {
            return Err(ContextError::Archive("it was broken off before".to_owned()).into());
        };
        let (unpacking, out) =
            tokio::task::spawn_blocking(move || work(unpacking)).await.map_err(io::Error::other)??;
        self.unpacking = unpacking;
        Ok(out)
    }
}
