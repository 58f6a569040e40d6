use std::io;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::response::Response;
use futures::StreamExt as _;
use http::{HeaderValue, header};
use mainbrella_api::headers::{FILE_SIZE, OUTPUT_OMITTED};
use mainbrella_engine::machine::jobs::{JobOutput, Stream};

use super::jobs_of;
use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::{Query, TwoPath};
use crate::state::AppState;

/// Bytes read from the log at once.
const PIECE: usize = 256 * 1024;

/// Read the output of a job
///
/// The bytes of one stream as they are, from `offset` on, as far as there are any now. Bytes that are not kept any more are left
/// out, and `X-Mainbrella-Omitted` says which; a body stops where more than one such part would be in it.
#[utoipa::path(get, path = "/v1/machines/{id}/jobs/{jobId}/output", tag = "jobs", operation_id = "jobOutput",
    params(("id" = String, Path, description = "The slot."),
           ("jobId" = String, Path, description = "The job."),
           ("createdAt" = String, Query, description = "The generation that is meant."),
           ("stream" = Option<String>, Query, description = "`stdout` or `stderr`. Default `stdout`."),
           ("offset" = Option<u64>, Query, description = "First byte. Default 0."),
           ("length" = Option<u64>, Query, description = "Bytes of the stream to look at, kept or not. Default: all there are.")),
    responses((status = 200, description = "The bytes.", body = [u8], content_type = "application/octet-stream",
        headers(("X-Mainbrella-Size" = u64, description = "Bytes the stream has so far."),
                ("X-Mainbrella-Omitted" = String, description = "`OFFSET+LENGTH` of the part that is left out; not sent where nothing is.")))))]
pub(crate) async fn output(
    State(state): State<AppState>,
    permit: Permit,
    TwoPath(id, job): TwoPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    let stream = match query.take("stream").as_deref() {
        None | Some("stdout") => Stream::Stdout,
        Some("stderr") => Stream::Stderr,
        Some(_) => return Err(ApiError::invalid("stream must be stdout or stderr.")),
    };
    let offset = query.parsed::<u64>("offset", "a whole number of bytes")?.unwrap_or(0);
    let length = query.parsed::<u64>("length", "a whole number of bytes")?;
    query.finish()?;
    let output = jobs_of(&state, &permit, &id, created_at).await?.output(&job, stream, offset)?;
    let position = output.position();
    let size = if stream == Stream::Stdout { position.stdout_bytes } else { position.stderr_bytes };
    let end = length.map_or(size, |n| offset.saturating_add(n)).min(size);
    let gap = output.gaps().into_iter().find_map(|(from, length)| {
        let (from, to) = (from.max(offset), (from + length).min(end));
        (from < to).then_some((from, to - from))
    });
    let pieces = pieces(Copying { output, at: offset, end, gap });
    let revoked = Box::pin(async move { permit.revoked().await });
    let mut response = Response::new(Body::from_stream(pieces.take_until(revoked)));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(FILE_SIZE, HeaderValue::from(size));
    if let Some((from, missing)) = gap
        && let Ok(value) = HeaderValue::from_str(&format!("{from}+{missing}"))
    {
        headers.insert(OUTPUT_OMITTED, value);
    }
    Ok(response)
}

struct Copying {
    output: JobOutput,
    at: u64,
    end: u64,
    /// The part that was announced to be missing.
    gap: Option<(u64, u64)>,
}

fn pieces(start: Copying) -> impl futures::Stream<Item = io::Result<Bytes>> + Send {
    futures::stream::unfold(Some(start), |copying| async move {
        let mut c = copying?;
        if c.at >= c.end {
            return None;
        }
        match c.output.next(PIECE).await {
            Ok(None) => None,
            Ok(Some((from, data))) => {
                let announced = c.gap == Some((c.at, from.saturating_sub(c.at)));
                if from >= c.end || (from > c.at && !announced) {
                    return None;
                }
                let room = usize::try_from(c.end - from).unwrap_or(usize::MAX);
                let data = data.slice(..data.len().min(room));
                c.at = from + data.len() as u64;
                Some((Ok(data), Some(c)))
            }
            Err(e) => {
                tracing::warn!(internal = e.internal().unwrap_or_default(), "a job's output could not be read");
                Some((Err(io::Error::other("the log could not be read")), None))
            }
        }
    })
}
