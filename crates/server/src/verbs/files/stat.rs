use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::FileEntry;
use mainbrella_engine::MachineHandle;

use super::{entry_at, path_of};
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{Query, SlotPath, json};
use crate::fence;
use crate::state::AppState;

/// Ask what is at a path
#[utoipa::path(get, path = "/v1/machines/{id}/files/stat", tag = "files", operation_id = "statFile",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant."),
           ("path" = String, Query, description = "Absolute path in the machine, UTF-8, percent-encoded."),
           ("followSymlinks" = Option<bool>, Query, description = "Tell where a link leads instead of the link itself. Default false.")),
    responses((status = 200, description = "What is there.", body = FileEntry)))]
pub(crate) async fn stat(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    let asked = Asked::of(query)?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    asked.answer(&handle, &permit).await
}

/// What is asked about.
pub(crate) struct Asked {
    path: String,
    follow: bool,
}

impl Asked {
    pub(crate) fn of(mut query: Query) -> ApiResult<Self> {
        let path = path_of(&mut query)?;
        let follow = query.parsed::<bool>("followSymlinks", "true or false")?.unwrap_or(false);
        query.finish()?;
        Ok(Self { path, follow })
    }

    pub(crate) async fn answer(self, machine: &MachineHandle, permit: &Permit) -> ApiResult<Response> {
        let Self { path, follow } = self;
        let stat = permit.while_valid(async { Ok(machine.stat_path(path.as_bytes(), follow).await?) }).await?;
        json(StatusCode::OK, &entry_at(path, stat))
    }
}
