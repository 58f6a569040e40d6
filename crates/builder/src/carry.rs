//! One build, from its recipe to its tags.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mainbrella_engine::Clock;
use mainbrella_recipe::{Context, Plan, Recipe, Warning};
use mainbrella_types::limits::RECIPE_BYTES_MAX;
use mainbrella_types::{ErrorCode, SizeClass, SnapshotKey, TemplateName};
use sha2::{Digest, Sha256};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::failure::{Failure, Halt, Reason};
use crate::ground::{BaseKind, BaseTemplate, CachedStep, Ground, Machine, MachineOrder, NewVersion, Version};
use crate::log::{EventKind, Log};
use crate::record::BuildRequest;
use crate::{base, context, run, settings};

/// How much longer than the build its machine may live.
const MACHINE_GRACE: Duration = Duration::from_secs(600);
/// How often the end of a machine is asked for.
const STOP_TRIES: u32 = 5;
const STOP_PAUSE: Duration = Duration::from_millis(500);

/// How far a build is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    pub(crate) steps: u32,
    pub(crate) done: u32,
    pub(crate) cached: u32,
}

/// A build that is carried out.
pub(crate) struct Work {
    pub(crate) id: String,
    pub(crate) dir: PathBuf,
    pub(crate) request: BuildRequest,
    pub(crate) ground: Arc<dyn Ground>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) log: Arc<Log>,
    pub(crate) cancel: CancellationToken,
    pub(crate) deadline: Instant,
    pub(crate) keep_versions: usize,
    pub(crate) cached_steps: usize,
    pub(crate) progress: Box<dyn Fn(Progress) + Send + Sync>,
}

/// What is to be built, once it is known.
struct Known {
    recipe: String,
    base: BaseTemplate,
    size: SizeClass,
    plan: Plan,
    context: Arc<Context>,
    from: String,
}

impl Known {
    /// What a step is cached under: its snapshot fits only machines of one size.
    fn step_key(&self, n: usize) -> String {
        let text = format!("{} {} {}", self.plan.steps[n].key, self.base.origin, self.size);
        hex::encode(Sha256::digest(text.as_bytes()))
    }
}

impl Work {
    pub(crate) fn log(&self, kind: EventKind) {
        self.log.append(self.clock.now().0, kind);
    }

    pub(crate) fn notice(&self, text: impl Into<String>) {
        self.log(EventKind::Notice { text: crate::lines::readable(text.into().as_bytes()) });
    }

    /// How much of its time is left.
    pub(crate) fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    pub(crate) fn too_long(&self) -> Failure {
        let seconds = self.request.timeout_seconds;
        Failure::new(Reason::TimedOut, format!("the build took longer than its {seconds} s; ask for more time"))
    }

    /// Refuses to go on when nobody wants it any more, or its time is over.
    pub(crate) fn go_on(&self) -> Result<(), Halt> {
        if self.cancel.is_cancelled() {
            return Err(Halt::Cancelled);
        }
        if self.left().is_zero() { Err(self.too_long().into()) } else { Ok(()) }
    }

    /// Does what may be broken off, until the build is over.
    pub(crate) async fn unless_over<T>(
        &self,
        grace: Duration,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Halt> {
        tokio::select! {
            biased;
            () = self.cancel.cancelled() => Err(Halt::Cancelled),
            done = work => done.map_err(Halt::Failed),
            () = tokio::time::sleep_until(self.deadline + grace) => Err(self.too_long().into()),
        }
    }

    /// Carries it out; the version it became.
    pub(crate) async fn carry_out(&self) -> Result<TemplateName, Halt> {
        self.go_on()?;
        let known = self.know().await?;
        let steps = u32::try_from(known.plan.steps.len()).unwrap_or(u32::MAX);
        (self.progress)(Progress { steps, ..Progress::default() });
        let version = match self.before(&known).await? {
            Some(version) => {
                for n in 0..known.plan.steps.len() {
                    self.tell_step(&known, n, true);
                }
                (self.progress)(Progress { steps, done: steps, cached: steps });
                self.notice(format!("nothing has changed: {} is this template", version.name));
                version.name
            }
            None => self.build(&known).await?,
        };
        self.move_tags(&version).await?;
        Ok(version)
    }

    /// Reads the recipe and finds out what it means here.
    async fn know(&self) -> Result<Known, Halt> {
        let folder = context::folder(&self.dir);
        let path = self.request.recipe_path.clone();
        let given = self.request.recipe.clone();
        let opened = blocking(move || {
            let context = Context::open(&folder)?;
            let text = match given {
                Some(text) => text,
                None => recipe_in(&context, &path)?,
            };
            Ok((context, text))
        });
        let (context, recipe) = self.unless_over(Duration::ZERO, opened).await?;
        let parsed = Recipe::parse(&recipe, &self.request.arguments)?;
        let from = parsed.from().to_owned();
        let (base, size) = base::find(self, &from).await.map_err(|halt| match halt {
            Halt::Failed(failure) => Halt::Failed(failure.on(parsed.from_line(), &format!("FROM {from}"))),
            Halt::Cancelled => Halt::Cancelled,
        })?;
        let start = mainbrella_recipe::Base { digest: base.digest.clone(), settings: base.settings.clone() };
        let planned = blocking(move || Ok((parsed.plan(&start, &context)?, context)));
        let (plan, context) = self.unless_over(Duration::ZERO, planned).await?;
        for warning in &plan.warnings {
            let Warning::UnusedArgument(name) = warning;
            self.notice(format!("the build argument {name} is not declared by the recipe"));
        }
        Ok(Known { recipe, base, size, plan, context: Arc::new(context), from })
    }

    /// The version that this would become again.
    async fn before(&self, known: &Known) -> Result<Option<Version>, Halt> {
        if self.request.no_cache {
            return Ok(None);
        }
        let versions = self.versions().await?;
        Ok(versions.into_iter().rev().find(|v| v.key == known.plan.key && v.size == known.size))
    }

    /// Versions of the family, oldest first.
    async fn versions(&self) -> Result<Vec<Version>, Halt> {
        let versions = self.ground.versions(&self.request.name).await;
        let mut versions = versions.map_err(|e| Failure::of(Reason::Internal, &e))?;
        versions.sort_by_key(|v| v.name.version());
        Ok(versions)
    }

    fn tell_step(&self, known: &Known, n: usize, cached: bool) {
        let step = &known.plan.steps[n];
        let text = crate::lines::readable(step.text.as_bytes());
        let (number, steps) = (n as u32 + 1, known.plan.steps.len() as u32);
        self.log(EventKind::Step { step: number, steps, line: step.line as u64, text, cached });
    }

    /// Builds in a machine, which is over when this returns.
    async fn build(&self, known: &Known) -> Result<TemplateName, Halt> {
        let (machine, first) = self.machine(known).await?;
        for n in 0..first {
            self.tell_step(known, n, true);
        }
        let made = self.in_machine(known, machine.as_ref(), first).await;
        self.stop(machine.as_ref()).await;
        self.trim_cache().await;
        let made = made?;
        // From here on nothing is broken off: what is begun is short, or ends by limits of its own.
        let snapshot = made.snapshot;
        let version = match self.ground.publish(&self.request.name, made).await {
            Ok(version) => version,
            Err(e) => {
                self.ground.forget_snapshot(snapshot).await;
                return Err(Failure::of(Reason::Internal, &e).into());
            }
        };
        self.notice(format!("preparing {version} in size {}", known.size));
        let prepared = self.ground.prepare(&version, known.size).await;
        if let Err(e) = &prepared {
            for line in e.said().unwrap_or_default().lines() {
                let text = crate::lines::readable(line.as_bytes());
                self.log(EventKind::Output { stream: crate::ground::Output::Stdout, text });
            }
        }
        let over = match &prepared {
            Ok(()) => self.cancel.is_cancelled().then_some(Halt::Cancelled),
            Err(e) => Some(Failure::of(Reason::Start, e).into()),
        };
        if let Some(halt) = over {
            if let Err(e) = self.ground.remove(&version).await {
                tracing::warn!(%version, internal = e.internal(), "a version that failed was not removed: {}", e.message());
            }
            return Err(halt);
        }
        Ok(version)
    }

    /// A machine as it was after the last step that is cached, and the number of those.
    async fn machine(&self, known: &Known) -> Result<(Arc<dyn Machine>, usize), Halt> {
        let mut done = if self.request.no_cache { 0 } else { known.plan.steps.len() };
        loop {
            self.go_on()?;
            let mut step = None;
            while done > 0 {
                let key = known.step_key(done - 1);
                step = self.ground.step(&key).await.map_err(|e| Failure::of(Reason::Internal, &e))?.map(|s| (key, s));
                if step.is_some() {
                    break;
                }
                done -= 1;
            }
            let below = match known.base.kind {
                BaseKind::Built { snapshot, .. } => Some(snapshot),
                _ => None,
            };
            let order = MachineOrder {
                build: self.id.clone(),
                template: known.base.origin.clone(),
                size: known.size,
                snapshot: step.as_ref().map(|(_, step)| step.snapshot).or(below),
                egress: self.request.egress.clone(),
                ttl_ms: u64::try_from((self.left() + MACHINE_GRACE).as_millis()).unwrap_or(u64::MAX),
            };
            match (self.ground.machine(order).await, step) {
                (Ok(machine), _) => return Ok((machine, done)),
                (Err(e), Some((key, step))) if matches!(e.code(), ErrorCode::SnapshotDamaged | ErrorCode::NotFound) => {
                    self.notice("a cached step cannot be used any more; it is done anew");
                    self.drop_step(&key, step.snapshot).await;
                    done -= 1;
                }
                (Err(e), _) => return Err(Failure::of(Reason::Machine, &e).into()),
            }
        }
    }

    /// The steps that are not cached, and what the machine is at the end.
    async fn in_machine(&self, known: &Known, machine: &dyn Machine, first: usize) -> Result<NewVersion, Halt> {
        let steps = known.plan.steps.len();
        let tell = |done: usize| {
            let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
            (self.progress)(Progress { steps: number(steps), done: number(done), cached: number(first) });
        };
        tell(first);
        for (n, step) in known.plan.steps.iter().enumerate().skip(first) {
            self.go_on()?;
            self.tell_step(known, n, false);
            run::step(self, machine, &known.context, step).await?;
            self.keep_step(known, n, machine).await?;
            tell(n + 1);
        }
        self.go_on()?;
        let wrote = async {
            settings::write(machine, &known.plan.settings).await.map_err(|e| Failure::of(Reason::Machine, &e))
        };
        self.unless_over(Duration::ZERO, wrote).await?;
        let save = self.ground.begin_save();
        let bytes = machine.save(save.key).await.map_err(|e| Failure::of(Reason::Machine, &e))?;
        let made = NewVersion {
            snapshot: save.key,
            size: known.size,
            bytes,
            origin: known.base.origin.clone(),
            base: known.from.clone(),
            base_digest: known.base.digest.clone(),
            recipe: known.recipe.clone(),
            key: known.plan.key.clone(),
            settings: known.plan.settings.clone(),
            packages: known.base.packages.clone(),
            held: save,
        };
        match self.go_on() {
            Ok(()) => Ok(made),
            Err(halt) => {
                self.ground.forget_snapshot(made.snapshot).await;
                Err(halt)
            }
        }
    }

    /// Saves the machine as it is after step `n`. A save is not broken off: it is on record or gone.
    async fn keep_step(&self, known: &Known, n: usize, machine: &dyn Machine) -> Result<(), Halt> {
        let key = known.step_key(n);
        let failed = |e: &mainbrella_engine::EngineError| {
            let step = &known.plan.steps[n];
            Halt::Failed(Failure::of(Reason::Machine, e).on(step.line, &step.text))
        };
        let save = self.ground.begin_save();
        let bytes = machine.save(save.key).await.map_err(|e| failed(&e))?;
        let step = CachedStep { snapshot: save.key, bytes, used_ms: self.clock.now().0 };
        let before = self.ground.step(&key).await.ok().flatten();
        if let Err(e) = self.ground.keep_step(&key, &step).await {
            self.ground.forget_snapshot(save.key).await;
            return Err(failed(&e));
        }
        if let Some(before) = before {
            self.ground.forget_snapshot(before.snapshot).await;
        }
        Ok(())
    }

    async fn drop_step(&self, key: &str, snapshot: SnapshotKey) {
        match self.ground.forget_step(key).await {
            Ok(()) => self.ground.forget_snapshot(snapshot).await,
            Err(e) => tracing::warn!(internal = e.internal(), "a cached step was not let go: {}", e.message()),
        }
    }

    /// Lets go of the steps that were used longest ago, beyond what may be cached.
    async fn trim_cache(&self) {
        let Ok(mut steps) = self.ground.steps().await else { return };
        steps.sort_by_key(|(_, step)| std::cmp::Reverse(step.used_ms));
        for (key, step) in steps.into_iter().skip(self.cached_steps) {
            self.drop_step(&key, step.snapshot).await;
        }
    }

    async fn stop(&self, machine: &dyn Machine) {
        for _ in 0..STOP_TRIES {
            match machine.stop().await {
                Ok(()) => return,
                Err(e) => {
                    tracing::warn!(internal = e.internal(), "the machine of a build did not stop: {}", e.message())
                }
            }
            tokio::time::sleep(STOP_PAUSE).await;
        }
    }

    /// Lets the family's name and the tags that were asked for point to the version, and removes versions nobody needs.
    async fn move_tags(&self, version: &TemplateName) -> Result<(), Halt> {
        let latest: TemplateName = version.family().parse().map_err(Failure::internal)?;
        for tag in self.request.tags.iter().chain([&latest]) {
            self.ground.tag(version, tag).await.map_err(|e| Failure::of(Reason::Internal, &e))?;
            if *tag == latest {
                self.notice(format!("{latest} is now {version}"));
            } else {
                self.notice(format!("{tag} points to {version}"));
            }
        }
        let versions = self.versions().await?;
        let untagged: Vec<_> = versions.into_iter().filter(|v| v.tags.is_empty() && v.name != *version).collect();
        let superfluous = untagged.len().saturating_sub(self.keep_versions);
        for old in untagged.into_iter().take(superfluous) {
            match self.ground.remove(&old.name).await {
                Ok(()) => self.notice(format!("{} was removed: no tag points to it", old.name)),
                Err(e) => tracing::warn!(version = %old.name, "an old version was not removed: {}", e.message()),
            }
        }
        Ok(())
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, Failure> + Send + 'static) -> Result<T, Failure> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| Err(Failure::internal(e)))
}

/// The recipe that is in the context.
fn recipe_in(context: &Context, path: &str) -> Result<String, Failure> {
    use std::io::Read as _;
    let failed = |why: String| Failure::new(Reason::Recipe, format!("the recipe `{path}` of the context: {why}"));
    let file = context.read(path).map_err(|e| failed(e.to_string()))?;
    let mut text = String::new();
    file.take(RECIPE_BYTES_MAX as u64 + 1).read_to_string(&mut text).map_err(|e| failed(e.to_string()))?;
    Ok(text)
}
