//! Templates, steps, snapshots and machines, as builds see them.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use async_trait::async_trait;
use mainbrella_builder::{
    BaseKind, BaseTemplate, CachedStep, Ground, Machine, MachineOrder, NewVersion, Save, Version,
};
use mainbrella_engine::EngineError;
use mainbrella_engine::image::{self, BuiltTemplate, Event, NewBuilt, Progress, oci};
use mainbrella_recipe::Settings;
use mainbrella_types::limits::{TTL_MAX_SECONDS, TTL_MIN_SECONDS};
use mainbrella_types::{
    ErrorCode, MachineRecord, MachineSpec, ProjectId, SizeClass, SnapshotKey, SnapshotKind, TemplateName,
};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::LABEL;
use super::machine::BuildMachine;
use super::settings::{WORKSPACE, of_built, of_image, to_built};
use crate::error::ApiError;
use crate::reconcile;
use crate::state::{AppState, Parts};
use crate::verbs::create::{Made, NewOne, bring_to_life};

/// See the module.
pub(super) struct ServiceGround {
    /// Not held: the service holds the builds, which hold this.
    parts: Weak<Parts>,
}

impl ServiceGround {
    pub(super) fn new(state: &AppState) -> Self {
        Self { parts: state.downgrade() }
    }

    fn state(&self) -> Result<AppState, EngineError> {
        let gone = || EngineError::new(ErrorCode::ShuttingDown, "the service is going down");
        self.parts.upgrade().map(AppState::from_parts).ok_or_else(gone)
    }
}

/// What the HTTP layer would have told, for the builder.
fn told(e: ApiError) -> EngineError {
    let error = EngineError::new(e.code, e.message);
    match e.internal {
        Some(internal) => error.because(internal),
        None => error,
    }
}

fn of_version(built: BuiltTemplate) -> BaseTemplate {
    let kind = match built.made.kind {
        SnapshotKind::Workspace => BaseKind::Built { snapshot: built.made.snapshot, size: built.made.size },
        SnapshotKind::Full => BaseKind::Full,
    };
    BaseTemplate {
        name: built.name,
        kind,
        digest: built.digest,
        settings: of_built(&built.made.settings),
        origin: built.made.origin,
        packages: built.made.packages,
    }
}

fn step_in(step: image::CachedStep) -> CachedStep {
    CachedStep { snapshot: step.snapshot, bytes: step.bytes, used_ms: step.used_ms }
}

/// Passes on what the making of an image tells.
struct Telling {
    tell: mpsc::Sender<String>,
    cancelled: CancellationToken,
    last: Mutex<String>,
}

impl Progress for Telling {
    fn event(&self, event: Event<'_>) {
        let (Event::Step(text) | Event::Line(text)) = event else { return };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if *last != text {
            text.clone_into(&mut last);
            // Never waits: it may be told from where nothing may. What is not taken in time is not told.
            let _ = self.tell.try_send(text.to_owned());
        }
    }

    fn cancelled(&self) -> bool {
        self.cancelled.is_cancelled()
    }
}

#[async_trait]
impl Ground for ServiceGround {
    async fn template(&self, name: &TemplateName) -> Result<Option<BaseTemplate>, EngineError> {
        let state = self.state()?;
        let wanted = name.clone();
        let looked = state.with_images(move |images| Ok((images.built(&wanted), images.template(&wanted).ok())));
        let (built, image) = looked.await?;
        if let Some(built) = built {
            return Ok(Some(of_version(built)));
        }
        let known = state.engine.templates().await?;
        let Some(info) = known.into_iter().find(|t| t.name == *name) else { return Ok(None) };
        let config = image.as_ref().and_then(|i| i.image.as_ref()).map(|note| of_image(&note.config));
        Ok(Some(BaseTemplate {
            origin: info.name.clone(),
            name: info.name,
            kind: BaseKind::Image,
            digest: info.digest,
            settings: config.unwrap_or_else(|| Settings { workdir: WORKSPACE.to_owned(), ..Settings::default() }),
            packages: image.map(|i| i.packages).unwrap_or_default(),
        }))
    }

    async fn import(
        &self,
        name: &TemplateName,
        reference: &str,
        tell: mpsc::Sender<String>,
        cancelled: CancellationToken,
    ) -> Result<(), EngineError> {
        let state = self.state()?;
        let (name, reference) = (name.clone(), reference.to_owned());
        let made = state.with_images(move |images| {
            let source: oci::Source = reference.parse().map_err(image::ImageError::Image)?;
            let progress = Telling { tell, cancelled, last: Mutex::default() };
            images.import_template(&name, &source, &oci::Access::default(), &progress).map(drop)
        });
        made.await?;
        state.templates.forget();
        Ok(())
    }

    async fn versions(&self, family: &TemplateName) -> Result<Vec<Version>, EngineError> {
        let family = family.family().to_owned();
        let all = self.state()?.with_images(|images| Ok(images.built_all())).await?;
        let mine = all.into_iter().filter(|b| b.name.family() == family);
        let version = |b: BuiltTemplate| Version {
            name: b.name,
            key: b.made.key,
            size: b.made.size,
            tags: b.tags,
            created_ms: b.created_ms,
            of_recipe: b.made.recipe.is_some(),
        };
        Ok(mine.map(version).collect())
    }

    async fn publish(&self, family: &TemplateName, made: NewVersion) -> Result<TemplateName, EngineError> {
        let family = family.clone();
        let new = NewBuilt {
            snapshot: made.snapshot,
            kind: SnapshotKind::Workspace,
            size: made.size,
            bytes: made.bytes,
            origin: made.origin,
            base: made.base,
            base_digest: made.base_digest,
            recipe: Some(made.recipe),
            key: made.key,
            settings: to_built(&made.settings),
            packages: made.packages,
        };
        let held = made.held;
        let state = self.state()?;
        let built = state.with_images(move |images| {
            let built = images.publish_built(&family, &new);
            drop(held);
            built
        });
        let built = built.await?;
        state.templates.forget();
        Ok(built.name)
    }

    async fn prepare(&self, version: &TemplateName, size: SizeClass) -> Result<(), EngineError> {
        self.state()?.engine.prepare_template(version, size).await
    }

    async fn tag(&self, version: &TemplateName, tag: &TemplateName) -> Result<(), EngineError> {
        let (version, tag) = (version.clone(), tag.clone());
        let state = self.state()?;
        state.with_images(move |images| images.tag(&version, &tag).map(drop)).await?;
        state.templates.forget();
        Ok(())
    }

    async fn remove(&self, version: &TemplateName) -> Result<(), EngineError> {
        remove_version(&self.state()?, version).await.map(drop)
    }

    async fn step(&self, key: &str) -> Result<Option<CachedStep>, EngineError> {
        let key = key.to_owned();
        self.state()?.with_images(move |images| Ok(images.step(&key).map(step_in))).await
    }

    async fn keep_step(&self, key: &str, step: &CachedStep) -> Result<(), EngineError> {
        let key = key.to_owned();
        let step = image::CachedStep { snapshot: step.snapshot, bytes: step.bytes, used_ms: step.used_ms };
        self.state()?.with_images(move |images| images.keep_step(&key, &step)).await
    }

    async fn forget_step(&self, key: &str) -> Result<(), EngineError> {
        let key = key.to_owned();
        self.state()?.with_images(move |images| images.forget_step(&key)).await
    }

    async fn steps(&self) -> Result<Vec<(String, CachedStep)>, EngineError> {
        let steps = self.state()?.with_images(|images| Ok(images.steps())).await?;
        Ok(steps.into_iter().map(|(key, step)| (key, step_in(step))).collect())
    }

    fn begin_save(&self) -> Save {
        let key = SnapshotKey::new(uuid::Uuid::now_v7());
        match self.state() {
            Ok(state) => Save::new(key, state.saves.begin(key)),
            // Nothing is saved any more.
            Err(_) => Save::new(key, ()),
        }
    }

    async fn forget_snapshot(&self, snapshot: SnapshotKey) {
        if let Ok(state) = self.state() {
            reconcile::forget_snapshot(&state, snapshot).await;
        }
    }

    async fn machine(&self, order: MachineOrder) -> Result<Arc<dyn Machine>, EngineError> {
        let state = self.state()?;
        let spec = MachineSpec {
            template: order.template,
            size: order.size,
            egress: order.egress,
            ttl_ms: order.ttl_ms.clamp(TTL_MIN_SECONDS * 1000, TTL_MAX_SECONDS * 1000),
            idle_timeout_ms: None,
            on_idle: Default::default(),
            auto_resume: false,
            metadata: [(LABEL.to_owned(), order.build)].into(),
            env: Default::default(),
        };
        let new = NewOne { slot: None, spec, restored_from: order.snapshot, unlisted: true };
        let made = bring_to_life(&state, &ProjectId::default_project(), new, None).await.map_err(told)?;
        let (Made::New(record) | Made::Before(record)) = made;
        let lost = || EngineError::new(ErrorCode::CreateFailed, "the machine of the build ended at once");
        let handle = state.directory.handle_of(&record).ok_or_else(lost)?;
        Ok(Arc::new(BuildMachine(handle)))
    }

    async fn stop_machines(&self, build: &str) -> Result<(), EngineError> {
        let state = self.state()?;
        let living = state.store.living(&state.config.host_name).await.map_err(|e| told(e.into()))?;
        let mut left = None;
        // Others may use the same label.
        let own = |m: &&MachineRecord| {
            m.project == ProjectId::default_project() && m.spec.metadata.get(LABEL).is_some_and(|id| id == build)
        };
        for record in living.iter().filter(own) {
            if let Some(handle) = state.directory.handle_of(record)
                && let Err(e) = handle.stop().await
            {
                left = Some(e);
            }
        }
        left.map_or(Ok(()), Err)
    }
}

/// Removes a version and all that is its own; whether there was one.
pub(crate) async fn remove_version(state: &AppState, version: &TemplateName) -> Result<bool, EngineError> {
    let version = version.clone();
    let snapshot = state.with_images(move |images| images.remove_built(&version)).await?;
    state.templates.forget();
    if let Some(snapshot) = snapshot {
        reconcile::forget_snapshot(state, snapshot).await;
    }
    Ok(snapshot.is_some())
}
