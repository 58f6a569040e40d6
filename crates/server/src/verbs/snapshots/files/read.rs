use axum::extract::State;
use axum::response::Response;

use super::super::SnapshotPath;
use super::reader;
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::Query;
use crate::state::AppState;
use crate::verbs::files::read::Asked;

/// Read a file of a snapshot
///
/// The bytes as they are, streamed. A transfer that breaks off ends the connection before the last chunk.
#[utoipa::path(get, path = "/v1/snapshots/{id}/files/content", tag = "snapshots", operation_id = "readSnapshotFile",
    params(("id" = String, Path, description = "The snapshot."),
           ("path" = String, Query, description = "Absolute path in the snapshot, UTF-8, percent-encoded."),
           ("offset" = Option<u64>, Query, description = "First byte. Default 0."),
           ("length" = Option<u64>, Query, description = "Most bytes. Default: to the end.")),
    responses((status = 200, description = "The content.", body = [u8], content_type = "application/octet-stream",
        headers(("X-Mainbrella-Mode" = String, description = "Permission bits, octal."),
                ("X-Mainbrella-Size" = u64, description = "Size of the whole file, bytes."),
                ("X-Mainbrella-Mtime" = i64, description = "Last modification, seconds since the Unix epoch.")))))]
pub(crate) async fn read(
    State(state): State<AppState>,
    permit: Permit,
    SnapshotPath(key): SnapshotPath,
    query: Query,
) -> ApiResult<Response> {
    let asked = Asked::of(query)?;
    let reader = reader(&state, &permit, &key).await?;
    super::read(asked.answer(reader.machine(), permit).await)
}
