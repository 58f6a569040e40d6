use axum::extract::State;
use axum::response::Response;
use mainbrella_engine::MachineHandle;

use super::content::{range, reply};
use super::path_of;
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{Query, SlotPath};
use crate::fence;
use crate::state::AppState;

/// Read a file
///
/// The bytes as they are, streamed. A transfer that breaks off ends the connection before the last chunk.
#[utoipa::path(get, path = "/v1/machines/{id}/files/content", tag = "files", operation_id = "readFile",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant."),
           ("path" = String, Query, description = "Absolute path in the machine, UTF-8, percent-encoded."),
           ("offset" = Option<u64>, Query, description = "First byte. Default 0."),
           ("length" = Option<u64>, Query, description = "Most bytes. Default: to the end.")),
    responses((status = 200, description = "The content.", body = [u8], content_type = "application/octet-stream",
        headers(("X-Mainbrella-Mode" = String, description = "Permission bits, octal."),
                ("X-Mainbrella-Size" = u64, description = "Size of the whole file, bytes."),
                ("X-Mainbrella-Mtime" = i64, description = "Last modification, seconds since the Unix epoch.")))))]
pub(crate) async fn read_file(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    let asked = Asked::of(query)?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    asked.answer(&handle, permit).await
}

/// Which part of which file is asked for.
pub(crate) struct Asked {
    path: String,
    offset: u64,
    length: Option<u64>,
}

impl Asked {
    pub(crate) fn of(mut query: Query) -> ApiResult<Self> {
        let path = path_of(&mut query)?;
        let (offset, length) = range(&mut query)?;
        query.finish()?;
        Ok(Self { path, offset, length })
    }

    pub(crate) async fn answer(self, machine: &MachineHandle, permit: Permit) -> ApiResult<Response> {
        let Self { path, offset, length } = self;
        let read = async { Ok(machine.read_file(path.as_bytes(), offset, length).await?) };
        let reader = permit.while_valid(read).await?;
        Ok(reply(reader, permit))
    }
}
