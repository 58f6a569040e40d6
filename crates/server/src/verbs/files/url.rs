use axum::extract::State;
use axum::response::Response;
use http::{HeaderMap, StatusCode, Uri, header};
use mainbrella_api::{CreateFileUrl, FileUrl, UrlMethod};
use mainbrella_engine::machine::files::check_path;
use mainbrella_types::{CreatedAt, limits};

use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::{JsonBody, Query, SlotPath, json};
use crate::fence;
use crate::signed::Grant;
use crate::state::AppState;

/// Make a URL that reads or writes one file without an API key
///
/// It names one path of this generation and one method, and ends after `expiresInSeconds`, with the machine, or when the API
/// key that asked for it is revoked. It can be used any number of times until then. The address in it is the one this request
/// came to; behind a proxy that sets `X-Forwarded-Proto: https` it is an https one.
#[utoipa::path(post, path = "/v1/machines/{id}/files/urls", tag = "files", operation_id = "createFileUrl",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    request_body = CreateFileUrl,
    responses((status = 200, description = "The URL. It is a secret.", body = FileUrl)))]
pub(crate) async fn create_url(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
    headers: HeaderMap,
    uri: Uri,
    JsonBody(body): JsonBody<CreateFileUrl>,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    check_path(body.path.as_bytes())?;
    let seconds = body.expires_in_seconds.unwrap_or(limits::SIGNED_URL_DEFAULT_SECONDS);
    if !(limits::SIGNED_URL_MIN_SECONDS..=limits::SIGNED_URL_MAX_SECONDS).contains(&seconds) {
        return Err(ApiError::invalid("expiresInSeconds must be 10 to 3600."));
    }
    if body.max_bytes.is_some_and(|n| n > limits::FILE_BYTES_MAX) {
        return Err(ApiError::invalid("maxBytes must be at most 5368709120."));
    }
    if body.max_bytes.is_some() && body.method == UrlMethod::Get {
        return Err(ApiError::invalid("maxBytes is for the method PUT."));
    }
    // A machine that cannot be used gets no URL; one that ends later ends its URLs.
    fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let base = base(&headers, &uri)?;
    let expires = state.now().plus(seconds * 1000);
    let grant = Grant {
        key_id: permit.key_id.clone(),
        machine: id.to_string(),
        created_at: created_at.to_string(),
        method: body.method,
        path: body.path,
        expires_ms: expires.0,
        max_bytes: body.max_bytes,
    };
    let token = state.signer.sign(&grant)?;
    let url = FileUrl {
        url: format!("{base}/v1/files/{token}"),
        expires_at: CreatedAt(expires).to_string(),
        method: body.method,
    };
    json(StatusCode::OK, &url)
}

/// The address this request came to. Whoever sent it reads it back; the host was checked on the way in.
fn base(headers: &HeaderMap, uri: &Uri) -> ApiResult<String> {
    let host = uri.authority().map(|a| a.as_str()).or_else(|| headers.get(header::HOST)?.to_str().ok());
    let host = host.ok_or_else(|| ApiError::invalid("The Host header is missing."))?;
    let https = headers.get("x-forwarded-proto").is_some_and(|v| v.as_bytes().eq_ignore_ascii_case(b"https"));
    Ok(format!("{}://{host}", if https { "https" } else { "http" }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    #[test]
    fn the_address_is_the_one_that_was_used() {
        let mut headers = HeaderMap::new();
        let plain = Uri::from_static("/v1/x");
        assert!(base(&headers, &plain).is_err());
        headers.insert(header::HOST, HeaderValue::from_static("box:8787"));
        assert_eq!(base(&headers, &plain).expect("an address"), "http://box:8787");
        headers.insert("x-forwarded-proto", HeaderValue::from_static("https"));
        assert_eq!(base(&headers, &Uri::from_static("http://two/v1/x")).expect("an address"), "https://two");
        headers.insert("x-forwarded-proto", HeaderValue::from_static("javascript"));
        assert_eq!(base(&headers, &plain).expect("an address"), "http://box:8787");
    }
}
