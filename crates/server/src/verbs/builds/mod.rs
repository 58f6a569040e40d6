//! Builds of templates. Everybody may look; who may build is an admin of the project `default`.

pub(super) mod cancel;
pub(super) mod context;
pub(super) mod create;
pub(super) mod events;
pub(super) mod get;
pub(super) mod list;

use axum::extract::{FromRequestParts, Path};
use http::request::Parts;
use mainbrella_api::{BuildFailure, BuildState, EgressPolicy};
use mainbrella_builder::{Build, BuildState as State, Failure};
use mainbrella_types::ErrorCode;

use crate::error::{ApiError, sentence};
use crate::state::AppState;

/// The `{id}` of a path.
pub(crate) struct BuildPath(pub(crate) String);

impl FromRequestParts<AppState> for BuildPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let missing = || ApiError::new(ErrorCode::NotFound, "There is no build of this id.");
        let Path(id) = Path::<String>::from_request_parts(parts, state).await.map_err(|_| missing())?;
        let fine = id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit());
        if fine { Ok(Self(id)) } else { Err(missing()) }
    }
}

fn state(state: State) -> BuildState {
    match state {
        State::AwaitingContext => BuildState::AwaitingContext,
        State::Queued => BuildState::Queued,
        State::Running => BuildState::Running,
        State::Succeeded => BuildState::Succeeded,
        State::Failed => BuildState::Failed,
        State::Cancelled => BuildState::Cancelled,
    }
}

fn failure(failure: Failure) -> BuildFailure {
    BuildFailure {
        reason: failure.reason.as_str().to_owned(),
        message: sentence(failure.message),
        line: failure.line,
        instruction: failure.instruction,
    }
}

/// A build as callers see it. Its arguments are not shown.
fn build(build: Build) -> mainbrella_api::Build {
    let request = build.request;
    let label = |tag: &mainbrella_types::TemplateName| tag.label().map(str::to_owned);
    mainbrella_api::Build {
        id: build.id,
        name: request.name.as_str().to_owned(),
        tags: request.tags.iter().filter_map(label).collect(),
        state: state(build.state),
        failure: build.failure.map(failure),
        size: request.size.map(|s| s.as_str().to_owned()),
        egress: EgressPolicy::from(&request.egress),
        timeout_seconds: request.timeout_seconds,
        steps: build.steps,
        steps_done: build.steps_done,
        steps_cached: build.steps_cached,
        template: build.template,
        created_at_ms: build.created_ms,
        started_at_ms: build.started_ms,
        ended_at_ms: build.ended_ms,
    }
}
