use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{Stream, StreamExt as _};
use http::{HeaderValue, header};
use mainbrella_api::headers::{FILE_MODE, FILE_MTIME, FILE_SIZE};
use mainbrella_engine::EngineError;
use mainbrella_types::ErrorCode;

use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
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
    let path = query.take("path").ok_or_else(|| ApiError::invalid("path must be given."))?;
    let offset = query.parsed::<u64>("offset", "a whole number of bytes")?.unwrap_or(0);
    let length = query.parsed::<u64>("length", "a whole number of bytes")?;
    query.finish()?;
    if i64::try_from(offset).is_err() {
        return Err(ApiError::invalid("offset must be less than 2^63."));
    }
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let reader = permit.while_valid(async { Ok(handle.read_file(path.as_bytes(), offset, length).await?) }).await?;
    let stat = reader.stat;
    let revoked = async move { permit.revoked().await };
    let span = tracing::Span::current();
    let chunks = cut_off(reader.chunks, revoked).map(move |chunk| {
        chunk.map_err(|e| {
            let internal = e.internal().unwrap_or_default();
            tracing::warn!(parent: &span, code = e.code().as_str(), internal, "a file transfer broke off");
            std::io::Error::other(e.message().to_owned())
        })
    });
    let mut response = Response::new(Body::from_stream(chunks));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(FILE_SIZE, HeaderValue::from(stat.size));
    headers.insert(FILE_MTIME, HeaderValue::from(stat.mtime_s));
    if let Ok(mode) = HeaderValue::from_str(&format!("{:04o}", stat.mode & 0o7777)) {
        headers.insert(FILE_MODE, mode);
    }
    Ok(response)
}

/// The chunks, until `revoked` is: then an error, because what is cut off must not look whole.
fn cut_off(
    chunks: BoxStream<'static, Result<Bytes, EngineError>>,
    revoked: impl Future<Output = ()> + Send + 'static,
) -> impl Stream<Item = Result<Bytes, EngineError>> + Send {
    futures::stream::unfold(Some((chunks, Box::pin(revoked))), |state| async move {
        let (mut chunks, mut revoked) = state?;
        tokio::select! {
            biased;
            () = &mut revoked => {
                Some((Err(EngineError::new(ErrorCode::Unauthenticated, "the API key was revoked")), None))
            }
            chunk = chunks.next() => chunk.map(|chunk| (chunk, Some((chunks, revoked)))),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_cut_off_does_not_look_whole() {
        let (revoke, revoked) = tokio::sync::oneshot::channel::<()>();
        let endless = futures::stream::repeat_with(|| Ok(Bytes::from_static(b"x"))).boxed();
        let mut chunks = Box::pin(cut_off(endless, async move { drop(revoked.await) }));
        assert!(chunks.next().await.expect("more").is_ok());
        revoke.send(()).expect("heard");
        let error = chunks.next().await.expect("an error").expect_err("not whole");
        assert_eq!(error.code(), ErrorCode::Unauthenticated);
        assert!(chunks.next().await.is_none());
        let two = futures::stream::iter([Ok(Bytes::new()), Ok(Bytes::new())]).boxed();
        assert_eq!(cut_off(two, std::future::pending()).count().await, 2);
    }
}
