//! Contents on their way: bodies of replies and of requests.

use std::io;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use axum::body::{Body, BodyDataStream, Bytes};
use axum::response::Response;
use futures::stream::BoxStream;
use futures::{Stream, StreamExt as _};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use mainbrella_api::headers::{FILE_MODE, FILE_MTIME, FILE_SIZE};
use mainbrella_engine::{EngineError, FileReader};
use mainbrella_types::{ErrorCode, limits};

use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::Query;

/// Longest pause of a caller between two pieces of a body.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// The part of a file that is asked for.
pub(crate) fn range(query: &mut Query) -> ApiResult<(u64, Option<u64>)> {
    let offset = query.parsed::<u64>("offset", "a whole number of bytes")?.unwrap_or(0);
    let length = query.parsed::<u64>("length", "a whole number of bytes")?;
    if i64::try_from(offset).is_err() {
        return Err(ApiError::invalid("offset must be less than 2^63."));
    }
    Ok((offset, length))
}

/// A body that breaks off where the machine did, and when its key is revoked.
pub(crate) fn stream(chunks: BoxStream<'static, Result<Bytes, EngineError>>, permit: Permit) -> Body {
    let revoked = async move { permit.revoked().await };
    let span = tracing::Span::current();
    Body::from_stream(cut_off(chunks, revoked).map(move |chunk| {
        chunk.map_err(|e| {
            let internal = e.internal().unwrap_or_default();
            tracing::warn!(parent: &span, code = e.code().as_str(), internal, "a file transfer broke off");
            io::Error::other(e.message().to_owned())
        })
    }))
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

/// A file as a reply.
pub(crate) fn reply(reader: FileReader, permit: Permit) -> Response {
    let stat = reader.stat;
    let mut response = Response::new(stream(reader.chunks, permit));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(FILE_SIZE, HeaderValue::from(stat.size));
    headers.insert(FILE_MTIME, HeaderValue::from(stat.mtime_s));
    if let Ok(mode) = HeaderValue::from_str(&format!("{:04o}", stat.mode & 0o7777)) {
        headers.insert(FILE_MODE, mode);
    }
    response
}

/// A body on its way to a guest. The engine reads it; what it leaves is taken by the outermost layer.
pub(crate) struct Upload {
    body: Arc<tokio::sync::Mutex<BodyDataStream>>,
    fault: Arc<std::sync::Mutex<Option<ApiError>>>,
    bound: Bound,
}

/// Most bytes of a body, and what is said of more.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    pub(crate) most: u64,
    pub(crate) message: &'static str,
}

/// A file.
pub(crate) const FILE: Bound = Bound { most: limits::FILE_BYTES_MAX, message: "A file is at most 5 GiB." };
/// A tree.
pub(crate) const TREE: Bound =
    Bound { most: limits::TREE_BYTES_MAX, message: "An archive of a tree is at most 32 GiB." };

impl Bound {
    fn exceeded(self) -> ApiError {
        ApiError::new(ErrorCode::PayloadTooLarge, self.message)
    }
}

impl Upload {
    pub(crate) fn new(body: Body, bound: Bound) -> Self {
        let body = Arc::new(tokio::sync::Mutex::new(body.into_data_stream()));
        Self { body, fault: Arc::default(), bound }
    }

    /// Refuses a body that says it is too large, before it is sent.
    pub(crate) fn check_announced(&self, headers: &HeaderMap) -> ApiResult<()> {
        let announced =
            || headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse::<u64>().ok().filter(|n| *n > self.bound.most);
        announced().map_or(Ok(()), |_| Err(self.bound.exceeded()))
    }

    /// What the engine made of the body; the caller's own fault goes before what followed from it.
    pub(crate) async fn blaming<T>(&self, work: impl Future<Output = Result<T, EngineError>>) -> ApiResult<T> {
        work.await.map_err(|e| self.fault().unwrap_or_else(|| e.into()))
    }

    /// The pieces, up to the first fault of the caller.
    pub(crate) fn stream(&self) -> BoxStream<'static, io::Result<Bytes>> {
        let (body, fault, bound) = (self.body.clone(), self.fault.clone(), self.bound);
        let start = Some((body, fault, 0u64));
        futures::stream::unfold(start, move |left| async move {
            let (body, fault, mut total) = left?;
            let next = tokio::time::timeout(PAUSE_MAX, async { body.lock().await.next().await }).await;
            let error = match next {
                Ok(None) => return None,
                Ok(Some(Ok(piece))) => {
                    total = total.saturating_add(piece.len() as u64);
                    if total <= bound.most {
                        return Some((Ok(piece), Some((body, fault, total))));
                    }
                    bound.exceeded()
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

    /// As [`Self::stream`], of what is packed in a gzip stream where the body is one.
    pub(crate) fn plain(&self) -> BoxStream<'static, io::Result<Bytes>> {
        let fault = Arc::clone(&self.fault);
        super::gzip::plain(self.stream(), move |message| {
            // What came first is to blame.
            fault.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| ApiError::invalid(message));
        })
    }

    /// What was wrong with the body, or what `e` says.
    pub(crate) fn fault_or(&self, e: io::Error) -> ApiError {
        self.fault().unwrap_or_else(|| ApiError::internal(e.to_string()))
    }

    /// What was wrong with the body.
    fn fault(&self) -> Option<ApiError> {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_body_that_stands_still_or_breaks_is_the_callers_fault() {
        let still = Upload::new(Body::from_stream(futures::stream::pending::<io::Result<Bytes>>()), FILE);
        assert!(still.stream().next().await.expect("an item").is_err());
        assert_eq!(still.fault().map(|e| e.http_status()), Some(StatusCode::REQUEST_TIMEOUT));
        let pieces = [Ok(Bytes::from_static(b"ab")), Err(io::Error::other("gone"))];
        let broken = Upload::new(Body::from_stream(futures::stream::iter(pieces)), FILE);
        let got: Vec<_> = broken.stream().collect().await;
        assert!(got.len() == 2 && got[0].is_ok() && got[1].is_err());
        assert_eq!(broken.fault().map(|e| e.code()), Some(ErrorCode::InvalidRequest));
    }

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
