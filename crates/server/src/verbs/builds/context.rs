use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use futures::StreamExt as _;
use http::{HeaderMap, StatusCode};
use mainbrella_api::Build;
use mainbrella_types::limits::CONTEXT_BYTES_MAX;

use super::{BuildPath, build};
use crate::auth::AdminPermit;
use crate::builds::keeper;
use crate::error::ApiResult;
use crate::extract::{Query, json};
use crate::state::AppState;
use crate::verbs::files::content::{Bound, Upload};

/// The archive has headers beside what is in it.
const CONTEXT: Bound = Bound { most: CONTEXT_BYTES_MAX + (1 << 30), message: "A context is at most 8 GiB." };

/// Send the context of a build
///
/// Needs the role admin, in the project `default`. The body is a tar archive, packed with gzip or not: the files that the recipe may
/// copy. When it is whole, the build waits for its turn; after a failure it may be sent again.
#[utoipa::path(put, path = "/v1/builds/{id}/context", tag = "builds", operation_id = "sendBuildContext",
    params(("id" = String, Path, description = "The build.")),
    request_body(content = [u8], description = "The archive.", content_type = "application/x-tar"),
    responses((status = 202, description = "Taken whole; the build waits for its turn.", body = Build)))]
pub(crate) async fn send(
    State(state): State<AppState>,
    admin: AdminPermit,
    BuildPath(id): BuildPath,
    query: Query,
    headers: HeaderMap,
    body: Body,
) -> ApiResult<Response> {
    query.finish()?;
    let permit = keeper(admin)?;
    let upload = Upload::new(body, CONTEXT);
    upload.check_announced(&headers)?;
    let taken = async {
        let mut context = state.builds()?.begin_context(&id).await?;
        let mut pieces = upload.plain();
        while let Some(piece) = pieces.next().await {
            match piece {
                Ok(piece) => context.push(piece).await?,
                Err(e) => return Err(upload.fault_or(e)),
            }
        }
        Ok(context.finish().await?)
    };
    let queued = permit.while_valid(taken).await?;
    json(StatusCode::ACCEPTED, &build(queued))
}
