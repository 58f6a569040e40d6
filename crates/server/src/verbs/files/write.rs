use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use http::{HeaderMap, StatusCode};
use mainbrella_api::FileWritten;
use mainbrella_engine::WriteOptions;

use super::content::{FILE, Upload};
use super::mode_bits;
use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::{Query, SlotPath, json};
use crate::fence;
use crate::state::AppState;

/// Write a file
///
/// The body is the content, streamed, at most 5 GiB. The file is replaced whole at the end, or not at all.
/// A new one belongs to the template's user, else to root; one that is replaced keeps its owner.
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
    let upload = Upload::new(body, FILE);
    let written = async {
        let created_at = query.created_at()?;
        let path = query.take("path").ok_or_else(|| ApiError::invalid("path must be given."))?;
        let options = options(&mut query)?;
        query.finish()?;
        upload.check_announced(&headers)?;
        let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
        let write = handle.write_file(path.as_bytes(), options, upload.stream());
        permit.while_valid(upload.blaming(write)).await
    };
    let size = written.await?;
    json(StatusCode::OK, &FileWritten { size })
}

fn options(query: &mut Query) -> ApiResult<WriteOptions> {
    let mode = query.take("mode").map(|text| mode_bits(&text)).transpose()?;
    Ok(WriteOptions {
        mode,
        create_parents: query.parsed("createParents", "true or false")?.unwrap_or(true),
        exclusive: query.parsed("exclusive", "true or false")?.unwrap_or(false),
    })
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
}
