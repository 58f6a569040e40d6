use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::SnapshotList;
use mainbrella_store::{SnapshotCursor, SnapshotQuery};
use mainbrella_types::{SnapshotKind, check_snapshot_name, limits};

use super::snapshot;
use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::{Query, json};
use crate::state::AppState;

/// List snapshots, newest first
#[utoipa::path(get, path = "/v1/snapshots", tag = "snapshots", operation_id = "listSnapshots",
    params(("limit" = Option<u32>, Query, description = "Most snapshots of the page, 1 to 1000. Default 100."),
           ("cursor" = Option<String>, Query, description = "`nextCursor` of the page before."),
           ("kind" = Option<String>, Query, description = "Only `workspace` or only `full` ones."),
           ("archived" = Option<bool>, Query, description = "Only those that were put aside, or only the others."),
           ("name" = Option<String>, Query, description = "Only those of exactly this name.")),
    responses((status = 200, description = "One page.", body = SnapshotList)))]
pub(crate) async fn list(State(state): State<AppState>, permit: Permit, mut query: Query) -> ApiResult<Response> {
    let limit = query.parsed::<u32>("limit", "a whole number from 1 to 1000")?.unwrap_or(limits::LIST_LIMIT_DEFAULT);
    if !(1..=limits::LIST_LIMIT_MAX).contains(&limit) {
        return Err(ApiError::invalid("limit must be a whole number from 1 to 1000."));
    }
    let before = query.parsed::<SnapshotCursor>("cursor", "a nextCursor as it was returned")?;
    let kind = query.parsed::<SnapshotKind>("kind", "`workspace` or `full`")?;
    let archived = query.parsed::<bool>("archived", "true or false")?;
    let name = query.take("name");
    query.finish()?;
    name.as_deref().map_or(Ok(()), check_snapshot_name)?;
    let asked = SnapshotQuery { project: permit.project, kind, archived, name, before, limit, now: state.now() };
    let page = state.store.list_snapshots(&asked).await?;
    let snapshots = page.snapshots.iter().map(snapshot).collect();
    json(StatusCode::OK, &SnapshotList { snapshots, next_cursor: page.next.map(|c| c.to_string()) })
}
