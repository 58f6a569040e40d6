//! What builds of templates stand on in this service: its machines, its templates, its snapshots.

mod ground;
mod machine;
mod settings;

use std::collections::HashSet;
use std::sync::Arc;

use mainbrella_builder::{Builds, BuildsError, ContextError, Limits};
use mainbrella_engine::EngineError;
use mainbrella_engine::image::{ImageError, ImageStore};
use mainbrella_types::{ErrorCode, ProjectId, SnapshotKey};

use crate::auth::{AdminPermit, Permit};
use crate::error::{ApiError, ApiResult, chain};
use crate::state::AppState;

pub(crate) use ground::remove_version;

/// Where builds are kept in the data directory.
const FOLDER: &str = "builds";
/// The label of a machine that something is built in.
pub(crate) const LABEL: &str = "mainbrella.build";

/// Opens the builds, after the machines were taken over.
pub(crate) async fn open(state: &AppState) -> Result<(), EngineError> {
    let limits = Limits {
        at_once: state.config.builds_at_once as usize,
        keep_versions: state.config.keep_template_versions as usize,
        cached_steps: state.config.build_cache_steps as usize,
    };
    let ground = Arc::new(ground::ServiceGround::new(state));
    let opened = Builds::open(&state.config.data_dir.join(FOLDER), ground, state.clock(), limits).await;
    let builds = opened.map_err(|e| {
        EngineError::new(ErrorCode::Internal, "the builds of templates could not be opened").because(e.to_string())
    })?;
    // Opened once: a second time is only in tests, over the same state.
    let _ = state.builds.set(builds);
    Ok(())
}

impl AppState {
    /// The builds, once the service has started.
    pub(crate) fn builds(&self) -> ApiResult<&Builds> {
        self.builds.get().ok_or_else(|| ApiError::new(ErrorCode::ShuttingDown, "The service is starting."))
    }

    /// Does something with the templates on this host, where it may block.
    pub(crate) async fn with_images<T: Send + 'static>(
        &self,
        work: impl FnOnce(&ImageStore) -> Result<T, ImageError> + Send + 'static,
    ) -> Result<T, EngineError> {
        let dir = self.config.data_dir.clone();
        let done = tokio::task::spawn_blocking(move || work(&ImageStore::open(&dir)?)).await;
        let failed = |e: tokio::task::JoinError| {
            EngineError::new(ErrorCode::Internal, "the templates could not be looked at").because(e.to_string())
        };
        done.map_err(failed)?.map_err(|e| image_failed(&e))
    }
}

/// Snapshots that belong to templates and to steps of builds.
pub(crate) async fn kept_snapshots(state: &AppState) -> Result<HashSet<SnapshotKey>, EngineError> {
    state.with_images(ImageStore::kept_snapshots).await
}

/// What a caller is told of the shelf of templates.
pub(crate) fn image_failed(e: &ImageError) -> EngineError {
    let code = match e {
        ImageError::NotBuilt(_) => ErrorCode::TemplateNotFound,
        ImageError::NameTaken(_) | ImageError::Labelled(_) | ImageError::Numbered(_) => ErrorCode::InvalidRequest,
        ImageError::Tagged { .. } => ErrorCode::TemplateInUse,
        ImageError::TooMany { .. } => ErrorCode::TemplateLimit,
        ImageError::DiskFull => ErrorCode::HostFull,
        ImageError::NotRoot | ImageError::MissingTool { .. } => ErrorCode::Unsupported,
        // What registries answer is told: it is what the caller named.
        ImageError::Image(_) => ErrorCode::CreateFailed,
        ImageError::Cancelled => ErrorCode::DeadlineExceeded,
        _ => {
            return EngineError::new(ErrorCode::Internal, "the templates of this host could not be used")
                .because(chain(e));
        }
    };
    EngineError::new(code, e.to_string()).because(chain(e))
}

impl From<BuildsError> for ApiError {
    fn from(e: BuildsError) -> Self {
        let code = match &e {
            BuildsError::NotFound(_) => ErrorCode::NotFound,
            BuildsError::TooMany(_) => ErrorCode::Overloaded,
            BuildsError::NotAwaiting { .. } | BuildsError::Sending(_) => ErrorCode::BuildState,
            BuildsError::Context(ContextError::TooLarge { .. }) => ErrorCode::PayloadTooLarge,
            BuildsError::Context(ContextError::Archive(_)) => ErrorCode::InvalidRequest,
            BuildsError::Context(ContextError::Full) => ErrorCode::HostFull,
            BuildsError::Closing => ErrorCode::ShuttingDown,
            BuildsError::Context(ContextError::System(_)) | BuildsError::Io(_) => return Self::internal(e.to_string()),
        };
        let error = Self::new(code, crate::error::sentence(e.to_string()));
        match code {
            ErrorCode::NotFound => error.hint("`GET /v1/builds` lists the builds that are remembered."),
            ErrorCode::Overloaded => error.hint("Cancel builds that are not needed, or try again when some are over."),
            _ => error,
        }
    }
}

/// A caller who may build, tag and remove templates, which are everybody's: an admin of the project that was there first.
pub(crate) fn keeper(AdminPermit(permit): AdminPermit) -> ApiResult<Permit> {
    if permit.project == ProjectId::default_project() {
        return Ok(permit);
    }
    Err(ApiError::new(
        ErrorCode::Forbidden,
        "Templates are shared by all projects; this key is of another project than `default`.",
    )
    .hint("Use an admin key of the project `default` to build, tag or remove templates."))
}
