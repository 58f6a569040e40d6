//! The WebSocket of a job: its events out, input and signals in.

use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, Utf8Bytes, WebSocket, close_code};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::SplitSink;
use futures::{FutureExt as _, SinkExt as _, StreamExt as _};
use mainbrella_api::JobFrame;
use mainbrella_engine::MachineHandle;
use mainbrella_engine::machine::jobs::Follower;
use mainbrella_types::{ErrorCode, limits};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::events::{READ_BYTES, READ_EVENTS};
use super::start::terminal;
use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};

/// Largest frame of a caller: a full write as base64, and some.
pub(super) const MESSAGE_MAX: usize = 128 * 1024;
const _: () = assert!(MESSAGE_MAX > limits::JOB_STDIN_WRITE_MAX / 3 * 4);
/// How often the other end is asked for a sign of life, and how long it may give none.
const PING: Duration = Duration::from_secs(20);
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// Longest time one frame may take to be sent: a reader that takes nothing is let go.
const SEND_MAX: Duration = Duration::from_secs(30);
/// How long input waits for room before its writer is told.
const ROOM_WAIT: Duration = Duration::from_secs(30);
const ROOM_STEP: Duration = Duration::from_millis(20);

/// What a socket connects.
pub(super) struct Ends {
    pub(super) follower: Follower,
    /// The machine, if it lives.
    pub(super) handle: Option<MachineHandle>,
    pub(super) job: String,
    pub(super) permit: Permit,
    pub(super) closing: CancellationToken,
}

type Out = SplitSink<WebSocket, Message>;

/// Serves a socket until the job has ended and been told, or either side goes away. The job goes on.
pub(super) async fn serve(socket: WebSocket, ends: Ends) {
    let Ends { mut follower, handle, job, permit, closing } = ends;
    let (mut out, mut incoming) = socket.split();
    let mut heard = Instant::now();
    let mut ping = tokio::time::interval_at(Instant::now() + PING, PING);
    // One thing at a time is done for the caller; until it is done nothing more is read.
    let mut doing: Option<BoxFuture<'static, ApiResult<()>>> = None;
    let (code, why) = loop {
        tokio::select! {
            biased;
            () = permit.revoked() => break (close_code::POLICY, "the API key was revoked"),
            () = closing.cancelled() => break (close_code::RESTART, "the service is going down"),
            done = async { match doing.as_mut() { Some(doing) => doing.await, None => std::future::pending().await } } => {
                doing = None;
                // Time spent on what was asked is no silence.
                heard = Instant::now();
                if let Err(e) = done && !send(&mut out, error(&e)).await {
                    return;
                }
            }
            message = incoming.next(), if doing.is_none() => {
                heard = Instant::now();
                match message {
                    Some(Ok(Message::Text(text))) => doing = Some(act(handle.clone(), job.clone(), text)),
                    Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                    Some(Ok(Message::Binary(_))) => break (close_code::UNSUPPORTED, "frames must be text"),
                    // What is malformed or too large has been answered by the library.
                    Some(Ok(Message::Close(_)) | Err(_)) | None => return,
                }
            }
            events = follower.next(READ_BYTES, READ_EVENTS) => match events {
                Ok(events) if events.is_empty() => break (close_code::NORMAL, "the job has ended"),
                Ok(events) => {
                    for event in events {
                        let text = serde_json::to_string(&super::event(event)).unwrap_or_default();
                        if !send(&mut out, text).await {
                            return;
                        }
                    }
                }
                Err(e) => {
                    tracing::warn!(internal = e.internal().unwrap_or_default(), "a job's events could not be read");
                    break (close_code::ERROR, "the events could not be read");
                }
            },
            _ = ping.tick() => {
                if heard.elapsed() > SILENCE_MAX && doing.is_none() {
                    break (close_code::AWAY, "no sign of life");
                }
                if !deliver(&mut out, Message::Ping(Bytes::new())).await {
                    return;
                }
            }
        }
    };
    let frame = CloseFrame { code, reason: Utf8Bytes::from_static(why) };
    if deliver(&mut out, Message::Close(Some(frame))).await {
        // The other end says good-bye too; it is not waited for long.
        let _ =
            tokio::time::timeout(Duration::from_secs(1), async { while let Some(Ok(_)) = incoming.next().await {} })
                .await;
    }
}

async fn send(out: &mut Out, text: String) -> bool {
    deliver(out, Message::Text(text.into())).await
}

async fn deliver(out: &mut Out, message: Message) -> bool {
    matches!(tokio::time::timeout(SEND_MAX, out.send(message)).await, Ok(Ok(())))
}

fn error(e: &ApiError) -> String {
    let hint = e.hint.as_deref().unwrap_or(e.code.hint());
    serde_json::json!({"type": "error", "code": e.code.as_str(), "message": e.message, "hint": hint}).to_string()
}

/// Does what a frame asks.
fn act(handle: Option<MachineHandle>, job: String, text: Utf8Bytes) -> BoxFuture<'static, ApiResult<()>> {
    async move {
        let frame: JobFrame = serde_json::from_str(&text)
            .map_err(|_| ApiError::invalid("The frame is none of stdin, eof, resize and signal as documented."))?;
        let Some(handle) = handle else {
            return Err(ApiError::new(ErrorCode::MachineNotRunning, "The machine is not running."));
        };
        match frame {
            JobFrame::Stdin { data_base64 } => {
                let data =
                    STANDARD.decode(data_base64).map_err(|_| ApiError::invalid("dataBase64 must be padded base64."))?;
                write(&handle, &job, data.into(), false).await
            }
            JobFrame::Eof => write(&handle, &job, Bytes::new(), true).await,
            JobFrame::Resize { cols, rows } => {
                handle.resize_job(&job, terminal(mainbrella_api::TerminalSize { cols, rows })?).await?;
                Ok(())
            }
            JobFrame::Signal { signal } => {
                handle.signal_job(&job, signal.signal()?.number()).await?;
                Ok(())
            }
        }
    }
    .boxed()
}

/// Writes, waiting for room: a refusal for want of room took nothing.
async fn write(handle: &MachineHandle, job: &str, data: Bytes, end: bool) -> ApiResult<()> {
    let until = Instant::now() + ROOM_WAIT;
    loop {
        match handle.write_job_stdin(job, data.clone(), end).await {
            Ok(_) => return Ok(()),
            Err(e) if e.code() == ErrorCode::StdinFull && Instant::now() < until => tokio::time::sleep(ROOM_STEP).await,
            Err(e) => return Err(e.into()),
        }
    }
}
