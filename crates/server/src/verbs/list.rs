use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::MachineList;
use mainbrella_store::{Cursor, ListQuery};
use mainbrella_types::{MachineState, limits};

use crate::auth::Permit;
use crate::convert;
use crate::error::{ApiError, ApiResult};
use crate::extract::{Query, json};
use crate::state::AppState;

/// List machines, newest first
#[utoipa::path(get, path = "/v1/machines", tag = "machines", operation_id = "listMachines",
    params(("limit" = Option<u32>, Query, description = "Most machines of the page, 1 to 1000. Default 100."),
           ("cursor" = Option<String>, Query, description = "`nextCursor` of the page before."),
           ("state" = Option<String>, Query, description = "Only machines in this state."),
           ("metadata.KEY" = Option<String>, Query, description = "Only machines whose label KEY has this value; may be given for several labels.")),
    responses((status = 200, description = "One page.", body = MachineList)))]
pub(crate) async fn list(State(state): State<AppState>, permit: Permit, mut query: Query) -> ApiResult<Response> {
    let limit = query.parsed::<u32>("limit", "a whole number from 1 to 1000")?.unwrap_or(limits::LIST_LIMIT_DEFAULT);
    if !(1..=limits::LIST_LIMIT_MAX).contains(&limit) {
        return Err(ApiError::invalid("limit must be a whole number from 1 to 1000."));
    }
    let before = query.parsed::<Cursor>("cursor", "a nextCursor as it was returned")?;
    let states = query.parsed::<MachineState>("state", "one of the machine states")?;
    let metadata = query.prefixed("metadata.");
    query.finish()?;
    if metadata.len() > limits::METADATA_ENTRIES_MAX {
        return Err(ApiError::invalid("metadata must be at most 32 labels."));
    }
    let asked = ListQuery { project: permit.project, states: states.into_iter().collect(), metadata, before, limit };
    let page = state.store.list(&asked).await?;
    let traits = state.traits();
    let machines = page.machines.iter().map(|record| {
        // Living machines as their actors know them, so that lists and looks agree.
        match state.engine.machine(&record.key) {
            Some(handle) if !record.state.is_final() => convert::machine(&handle.watch().borrow(), &traits),
            _ => convert::machine(record, &traits),
        }
    });
    let machines = machines.collect();
    json(StatusCode::OK, &MachineList { machines, next_cursor: page.next.map(|c| c.to_string()) })
}
