use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::FileList;
use mainbrella_engine::MachineHandle;
use mainbrella_types::limits;

use super::{entry, lossy, path_of};
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{Query, SlotPath, json};
use crate::fence;
use crate::state::AppState;

/// List a directory
///
/// One level, sorted by the bytes of the names. A link to a directory is followed; links in it are told as links. Pages
/// are counted by `offset`: what changes meanwhile can be missing from them or in them twice.
#[utoipa::path(get, path = "/v1/machines/{id}/files/list", tag = "files", operation_id = "listFiles",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant."),
           ("path" = String, Query, description = "Absolute path in the machine, UTF-8, percent-encoded."),
           ("offset" = Option<u64>, Query, description = "First entry: 0, or the `nextOffset` of the page before."),
           ("limit" = Option<u32>, Query, description = "Most entries, 1 to 1000. Default 100.")),
    responses((status = 200, description = "A page.", body = FileList)))]
pub(crate) async fn list(
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

/// Which entries are asked for.
pub(crate) struct Asked {
    path: String,
    offset: u64,
    limit: u32,
}

impl Asked {
    pub(crate) fn of(mut query: Query) -> ApiResult<Self> {
        let path = path_of(&mut query)?;
        let offset = query.parsed::<u64>("offset", "a whole number")?.unwrap_or(0);
        let limit = query.parsed::<u32>("limit", "1 to 1000")?.unwrap_or(limits::LIST_LIMIT_DEFAULT);
        query.finish()?;
        Ok(Self { path, offset, limit })
    }

    pub(crate) async fn answer(self, machine: &MachineHandle, permit: &Permit) -> ApiResult<Response> {
        let Self { path, offset, limit } = self;
        let page = permit.while_valid(async { Ok(machine.list_dir(path.as_bytes(), offset, limit).await?) }).await?;
        let above = path.trim_end_matches('/');
        let entries = page.entries.into_iter().map(|e| entry(format!("{above}/{}", lossy(&e.name)), &e.name, e.stat));
        let next_offset = page.more.then_some(offset + u64::from(limit));
        json(StatusCode::OK, &FileList { entries: entries.collect(), next_offset })
    }
}
