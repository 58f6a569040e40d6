use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mainbrella_api::{Context, CreateContext};
use mainbrella_engine::machine::files::check_path;
use mainbrella_engine::{ContextOrder, Language};
use mainbrella_types::machine::check_env;

use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::{JsonBody, Query, SlotPath, json};
use crate::fence;
use crate::state::AppState;

/// Make a code context
///
/// Starts a kernel in the machine and waits until it answers. A caller that goes away before gets none. Contexts are the
/// machine's: they outlive a restart of the service, and end with the machine.
#[utoipa::path(post, path = "/v1/machines/{id}/contexts", tag = "contexts", operation_id = "createContext",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    request_body = CreateContext,
    responses((status = 201, description = "It waits for code.", body = Context)))]
pub(crate) async fn create(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
    JsonBody(body): JsonBody<CreateContext>,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let order = order(body)?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let made = permit.while_valid(async { Ok(handle.create_context(order).await?) }).await?;
    json(StatusCode::CREATED, &super::context(made))
}

fn order(body: CreateContext) -> ApiResult<ContextOrder> {
    let language: Language =
        body.language.parse().map_err(|_| ApiError::invalid("language must be `python`, the only one there is."))?;
    check_env(&body.env)?;
    if let Some(cwd) = &body.cwd {
        check_path(cwd.as_bytes())
            .map_err(|_| ApiError::invalid("cwd must be an absolute path of at most 4095 bytes."))?;
    }
    Ok(ContextOrder { language, cwd: body.cwd, env: body.env })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_out_of_bounds_is_refused() {
        let parse = |v: serde_json::Value| order(serde_json::from_value(v).expect("a request"));
        assert!(parse(json!({"language": "python", "cwd": "/tmp", "env": {"A": "b"}})).is_ok());
        for bad in [
            json!({"language": "cobol"}),
            json!({"language": "Python"}),
            json!({"language": "python", "cwd": "tmp"}),
            json!({"language": "python", "env": {"A=B": "c"}}),
        ] {
            assert!(parse(bad.clone()).is_err(), "{bad}");
        }
    }
}
