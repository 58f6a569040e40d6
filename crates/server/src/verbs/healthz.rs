use axum::response::Response;
use http::StatusCode;
use mainbrella_api::Health;

use crate::error::ApiResult;
use crate::extract::json;

/// Whether the service answers
///
/// Needs no key. Says nothing about machines.
#[utoipa::path(get, path = "/healthz", tag = "service", operation_id = "healthz", security(()),
    responses((status = 200, description = "The service answers.", body = Health)))]
pub(crate) async fn healthz() -> ApiResult<Response> {
    json(StatusCode::OK, &Health { status: "ok".to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() })
}
