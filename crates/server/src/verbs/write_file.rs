use std::io;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use axum::body::{Body, BodyDataStream, Bytes};
use axum::extract::State;
use axum::response::Response;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use http::{HeaderMap, StatusCode, header};
use mainbrella_api::FileWritten;
use mainbrella_engine::WriteOptions;
use mainbrella_types::{ErrorCode, limits};

use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::{Query, SlotPath, json};
use crate::fence;
use crate::state::AppState;

/// Longest pause of a caller between two pieces of a body.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// What is still read of a refused body, so that a caller who only sends learns why.
const DRAIN_BYTES: usize = 1024 * 1024 * 1024;
const DRAIN_WAIT: Duration = Duration::from_secs(2);

/// Write a file
///
/// The body is the content, streamed, at most 5 GiB. The file is replaced whole at the end, or not at all.
#[utoipa::path(put, path = "/v1/machines/{id}/files/content", tag = "files", operation_id = "writeFile",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant."),
           ("path" = String, Query, description = "Absolute path in the machine, UTF-8, percent-encoded."),
           ("mode" = Option<String>, Query, description = "Permission bits, octal, e.g. 0644. Default: those of the file that is replaced, else 0644."),
           ("createParents" = Option<bool>, Query, description = "Make missing directories above it. Default true."),
           ("exclusive" = Option<bool>, Query, description = "Fail when the path exists. Default false.")),
    request_body(content = [u8], description = "The content.", content_type = "application/octet-stream"),
    responses((status = 200, description = "Written whole.", body = FileWritten)))]
pub(crate) async fn write_file(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
    headers: HeaderMap,
    body: Body,
) -> ApiResult<Response> {
    let upload = Upload::new(body);
    let written = async {
        let created_at = query.created_at()?;
        let path = query.take("path").ok_or_else(|| ApiError::invalid("path must be given."))?;
        let options = options(&mut query)?;
        query.finish()?;
        if announced(&headers).is_some_and(|n| n > limits::FILE_BYTES_MAX) {
            return Err(too_large());
        }
        let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
        let write = handle.write_file(path.as_bytes(), options, upload.stream());
        permit.while_valid(async { write.await.map_err(|e| upload.fault().unwrap_or_else(|| e.into())) }).await
    };
    match written.await {
        Ok(size) => json(StatusCode::OK, &FileWritten { size }),
        Err(e) => {
            upload.drain().await;
            Err(e)
        }
    }
}

fn options(query: &mut Query) -> ApiResult<WriteOptions> {
    let mode = match query.take("mode") {
        Some(text) => {
            let octal = (1..=5).contains(&text.len()) && text.bytes().all(|b| (b'0'..=b'7').contains(&b));
            let bits = u32::from_str_radix(&text, 8).ok().filter(|m| octal && *m <= 0o7777);
            Some(bits.ok_or_else(|| ApiError::invalid("mode must be octal permission bits such as 0644."))?)
        }
        None => None,
    };
    Ok(WriteOptions {
        mode,
        create_parents: query.parsed("createParents", "true or false")?.unwrap_or(true),
        exclusive: query.parsed("exclusive", "true or false")?.unwrap_or(false),
    })
}

fn announced(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn too_large() -> ApiError {
    ApiError::new(ErrorCode::PayloadTooLarge, "A file is at most 5 GiB.")
}

/// A body on its way to a guest. The engine reads it; what it leaves can be drained.
struct Upload {
    body: Arc<tokio::sync::Mutex<BodyDataStream>>,
    fault: Arc<std::sync::Mutex<Option<ApiError>>>,
}

impl Upload {
    fn new(body: Body) -> Self {
        Self { body: Arc::new(tokio::sync::Mutex::new(body.into_data_stream())), fault: Arc::default() }
    }

    /// The pieces, up to the first fault of the caller.
    fn stream(&self) -> BoxStream<'static, io::Result<Bytes>> {
        let (body, fault) = (self.body.clone(), self.fault.clone());
        let start = Some((body, fault, 0u64));
        futures::stream::unfold(start, |left| async move {
            let (body, fault, mut total) = left?;
            let next = tokio::time::timeout(PAUSE_MAX, async { body.lock().await.next().await }).await;
            let error = match next {
                Ok(None) => return None,
                Ok(Some(Ok(piece))) => {
                    total = total.saturating_add(piece.len() as u64);
                    if total <= limits::FILE_BYTES_MAX {
                        return Some((Ok(piece), Some((body, fault, total))));
                    }
                    too_large()
                }
                Ok(Some(Err(_))) => ApiError::invalid("The body ended before it was whole."),
                Err(_) => {
                    ApiError::invalid("The body paused for more than 30 seconds.").status(StatusCode::REQUEST_TIMEOUT)
                }
            };
            *fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            Some((Err(io::Error::other("the caller's body broke off")), None))
        })
        .boxed()
    }

    /// What was wrong with the body.
    fn fault(&self) -> Option<ApiError> {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    async fn drain(&self) {
        let read = async {
            let mut body = self.body.lock().await;
            let mut left = DRAIN_BYTES;
            while let Some(Ok(piece)) = body.next().await {
                left = left.saturating_sub(piece.len());
                if left == 0 {
                    break;
                }
            }
        };
        let _ = tokio::time::timeout(DRAIN_WAIT, read).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(raw: &str) -> ApiResult<WriteOptions> {
        options(&mut Query::parse(raw).expect("a query"))
    }

    #[test]
    fn modes_are_octal_and_flags_are_words() {
        let o = parse("mode=0755&exclusive=true").expect("valid");
        assert_eq!(o, WriteOptions { mode: Some(0o755), create_parents: true, exclusive: true });
        assert!(!parse("createParents=false").expect("valid").create_parents);
        for bad in ["mode=888", "mode=", "mode=%2B44", "mode=10000", "mode=000644", "exclusive=1", "createParents="] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_stands_still_or_breaks_is_the_callers_fault() {
        let still = Upload::new(Body::from_stream(futures::stream::pending::<io::Result<Bytes>>()));
        assert!(still.stream().next().await.expect("an item").is_err());
        assert_eq!(still.fault().map(|e| e.http_status()), Some(StatusCode::REQUEST_TIMEOUT));
        let pieces = [Ok(Bytes::from_static(b"ab")), Err(io::Error::other("gone"))];
        let broken = Upload::new(Body::from_stream(futures::stream::iter(pieces)));
        let got: Vec<_> = broken.stream().collect().await;
        assert!(got.len() == 2 && got[0].is_ok() && got[1].is_err());
        assert_eq!(broken.fault().map(|e| e.code()), Some(ErrorCode::InvalidRequest));
        broken.drain().await;
    }
}
