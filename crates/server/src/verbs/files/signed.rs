use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::Response;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use mainbrella_api::{FileWritten, UrlMethod};
use mainbrella_engine::{MachineHandle, WriteOptions};
use mainbrella_types::{CreatedAt, MachineId};

use super::content::{Bound, FILE, Upload, range, reply};
use crate::auth::Permit;
use crate::error::ApiResult;
use crate::extract::{Query, json};
use crate::fence;
use crate::layers::RequestInfo;
use crate::signed::Grant;
use crate::state::AppState;

/// What a URL grants, to whom, on which machine.
struct Opened {
    grant: Grant,
    permit: Permit,
    handle: MachineHandle,
}

/// Checks a token for a method: what does not hold is refused in the same words, whatever it is.
async fn open(state: &AppState, info: &RequestInfo, token: &str, method: UrlMethod) -> ApiResult<Opened> {
    let peer = info.peer.map(|a| a.ip());
    let refuse = || {
        state
            .auth
            .failed(peer, "The signed URL is not valid: it is not one of this service, or is for another method.")
            .hint("Ask for a new URL with `POST /v1/machines/{id}/files/urls`.")
    };
    let grant = state.signer.open(token)?.filter(|g| g.method == method).ok_or_else(refuse)?;
    if grant.expires_ms <= state.now().0 {
        return Err(state
            .auth
            .failed(peer, "The signed URL has expired.")
            .hint("Ask for a new URL with `POST /v1/machines/{id}/files/urls`."));
    }
    let permit = state.auth.permit_of(&grant.key_id, peer, state.now()).await?;
    info.set_key(&permit.key_id);
    // Both were checked when the URL was made.
    let id: MachineId = grant.machine.parse().map_err(|_| refuse())?;
    let created_at: CreatedAt = grant.created_at.parse().map_err(|_| refuse())?;
    let handle = fence::to_act(state, &permit, &id, created_at).await?.living()?;
    Ok(Opened { grant, permit, handle })
}

/// Read a file by a signed URL
///
/// Needs no API key: the token is the credential. The bytes as they are, streamed.
#[utoipa::path(get, path = "/v1/files/{token}", tag = "files", operation_id = "readSigned", security(()),
    params(("token" = String, Path, description = "The token of the URL."),
           ("offset" = Option<u64>, Query, description = "First byte. Default 0."),
           ("length" = Option<u64>, Query, description = "Most bytes. Default: to the end.")),
    responses((status = 200, description = "The content.", body = [u8], content_type = "application/octet-stream",
        headers(("X-Mainbrella-Mode" = String, description = "Permission bits, octal."),
                ("X-Mainbrella-Size" = u64, description = "Size of the whole file, bytes."),
                ("X-Mainbrella-Mtime" = i64, description = "Last modification, seconds since the Unix epoch.")))))]
pub(crate) async fn read_signed(
    State(state): State<AppState>,
    Extension(info): Extension<Arc<RequestInfo>>,
    Path(token): Path<String>,
    mut query: Query,
) -> ApiResult<Response> {
    let Opened { grant, permit, handle } = open(&state, &info, &token, UrlMethod::Get).await?;
    let (offset, length) = range(&mut query)?;
    query.finish()?;
    let read = handle.read_file(grant.path.as_bytes(), offset, length);
    let reader = permit.while_valid(async { Ok(read.await?) }).await?;
    let mut response = reply(reader, permit);
    // A browser saves it and never shows it as a page of ours.
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_DISPOSITION, attachment(&grant.path));
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static("sandbox; default-src 'none'"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    Ok(response)
}

fn attachment(path: &str) -> HeaderValue {
    let name = path.rsplit('/').next().unwrap_or_default();
    let plain = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    let encoded: String =
        name.bytes().map(|b| if plain(&b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect();
    let text = format!("attachment; filename*=UTF-8''{encoded}");
    HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static("attachment"))
}

/// Write a file by a signed URL
///
/// Needs no API key: the token is the credential. The file is replaced whole at the end, or not at all; missing directories
/// above it are made.
#[utoipa::path(put, path = "/v1/files/{token}", tag = "files", operation_id = "writeSigned", security(()),
    params(("token" = String, Path, description = "The token of the URL.")),
    request_body(content = [u8], description = "The content.", content_type = "application/octet-stream"),
    responses((status = 200, description = "Written whole.", body = FileWritten)))]
pub(crate) async fn write_signed(
    State(state): State<AppState>,
    Extension(info): Extension<Arc<RequestInfo>>,
    Path(token): Path<String>,
    query: Query,
    headers: HeaderMap,
    body: Body,
) -> ApiResult<Response> {
    let opened = open(&state, &info, &token, UrlMethod::Put).await;
    let bound = match opened.as_ref().ok().and_then(|o| o.grant.max_bytes) {
        Some(most) => Bound { most, message: "The body is larger than the signed URL allows." },
        None => FILE,
    };
    let upload = Upload::new(body, bound);
    let written = async {
        let Opened { grant, permit, handle } = opened?;
        query.finish()?;
        upload.check_announced(&headers)?;
        let options = WriteOptions { create_parents: true, ..WriteOptions::default() };
        let write = handle.write_file(grant.path.as_bytes(), options, upload.stream());
        permit.while_valid(upload.blaming(write)).await
    };
    let size = written.await?;
    json(StatusCode::OK, &FileWritten { size })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_break_out_of_the_header() {
        let value = |path| attachment(path).to_str().expect("text").to_owned();
        assert_eq!(value("/tmp/a b\"\r\né.txt"), "attachment; filename*=UTF-8''a%20b%22%0D%0A%C3%A9.txt");
        assert_eq!(value("/tmp/"), "attachment; filename*=UTF-8''");
    }
}
