use axum::body::Bytes;
use axum::extract::State;
use axum::response::Response;
use futures::{Stream, StreamExt as _};
use mainbrella_api::{FileEvent, FileEventType};
use mainbrella_engine::{FileEvent as Seen, FileEventKind, FileEvents};

use super::{lossy, path_of};
use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::{Query, SlotPath};
use crate::fence;
use crate::sse;
use crate::state::AppState;

/// Watch a directory
///
/// Server-sent events: each `data:` is one `FileEvent` as JSON, and a comment comes every ten seconds. The first event is
/// `ready`; from then on everything is told, or `overflow` says that something was missed. The last is `ended`, or `error`.
/// Mounted file systems below are not watched. Eight watches at once on a machine; a watch is no use of it.
#[utoipa::path(get, path = "/v1/machines/{id}/files/watch", tag = "files", operation_id = "watchFiles",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant."),
           ("path" = String, Query, description = "Absolute path of a directory in the machine, UTF-8, percent-encoded."),
           ("recursive" = Option<bool>, Query, description = "Everything below it too. Default true.")),
    responses((status = 200, description = "The events.", body = FileEvent, content_type = "text/event-stream")))]
pub(crate) async fn watch(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    let path = path_of(&mut query)?;
    let recursive = query.parsed::<bool>("recursive", "true or false")?.unwrap_or(true);
    query.finish()?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let events = permit.while_valid(async { Ok(handle.watch_dir(path.as_bytes(), recursive).await?) }).await?;
    let frames = told(path.clone(), events).map(Ok);
    Ok(sse::reply(permit, state.closing.clone(), frames, move |e| Some(frame(&failed(&path, &e)))))
}

fn plain(kind: FileEventType, path: String) -> FileEvent {
    FileEvent { r#type: kind, path, new_path: None, code: None, message: None, hint: None }
}

fn wire(seen: Seen) -> FileEvent {
    let kind = match seen.kind {
        FileEventKind::Created => FileEventType::Created,
        FileEventKind::Modified => FileEventType::Modified,
        FileEventKind::Removed => FileEventType::Removed,
        FileEventKind::Renamed => FileEventType::Renamed,
        FileEventKind::Attributes => FileEventType::Attributes,
        FileEventKind::Overflow => FileEventType::Overflow,
        FileEventKind::Ended => FileEventType::Ended,
    };
    FileEvent { new_path: seen.new_path.as_deref().map(lossy), ..plain(kind, lossy(&seen.path)) }
}

fn failed(path: &str, e: &ApiError) -> FileEvent {
    FileEvent {
        code: Some(e.code().as_str().to_owned()),
        message: Some(e.message.clone().into_owned()),
        hint: Some(e.hint.as_deref().unwrap_or(e.code().hint()).to_owned()),
        ..plain(FileEventType::Error, path.to_owned())
    }
}

fn frame(event: &FileEvent) -> Bytes {
    // JSON has no line breaks of its own.
    let text = serde_json::to_string(event).unwrap_or_default();
    format!("data: {text}\n\n").into()
}

/// The frames of a watch, to its end.
fn told(path: String, events: FileEvents) -> impl Stream<Item = Bytes> + Send {
    let first = frame(&plain(FileEventType::Ready, path.clone()));
    let rest = futures::stream::unfold(Some(events), move |events| {
        let path = path.clone();
        async move {
            let mut events = events?;
            match events.next().await? {
                Ok(seen) => Some((frame(&wire(seen)), Some(events))),
                Err(e) => Some((frame(&failed(&path, &e.into())), None)),
            }
        }
    });
    futures::stream::iter([first]).chain(rest)
}
