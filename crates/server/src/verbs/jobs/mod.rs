//! Managed jobs.

pub(crate) mod act;
pub(crate) mod events;
pub(crate) mod look;
pub(crate) mod output;
mod socket;
pub(crate) mod start;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mainbrella_api as api;
use mainbrella_engine::machine::jobs::{Cause, Entry, Event, JobCommand, JobView, MachineJobs, Stream};
use mainbrella_types::{CreatedAt, MachineId, Millis};

use crate::auth::Permit;
use crate::error::ApiResult;
use crate::fence::{self, Found};
use crate::state::AppState;

/// The jobs of a generation, living or not.
async fn jobs_of(state: &AppState, permit: &Permit, id: &MachineId, created_at: CreatedAt) -> ApiResult<MachineJobs> {
    match fence::to_act(state, permit, id, created_at).await? {
        Found::Living(handle) => Ok(handle.jobs()),
        Found::Resting(record) => Ok(state.engine.jobs_of(&record).await?),
    }
}

fn cause(cause: Cause) -> api::ExitCause {
    match cause {
        Cause::Exited => api::ExitCause::Exited,
        Cause::Signalled => api::ExitCause::Signalled,
        Cause::TimedOut => api::ExitCause::TimedOut,
        Cause::Cancelled => api::ExitCause::Cancelled,
        Cause::MachineStopped => api::ExitCause::MachineStopped,
        Cause::Lost => api::ExitCause::Lost,
    }
}

/// A job as callers see it.
fn job(view: JobView) -> api::Job {
    let position = view.position;
    api::Job {
        id: view.id,
        command: match view.command {
            JobCommand::Text(text) => api::CommandLine::Text(text),
            JobCommand::Argv(argv) => api::CommandLine::Argv(argv),
        },
        state: if position.exit.is_some() { api::JobState::Ended } else { api::JobState::Running },
        exit: position.exit.map(|(exit, _)| api::JobExit {
            cause: cause(exit.cause),
            code: exit.code,
            signal: exit.signal,
        }),
        started_at: view.started_at.to_string(),
        ended_at: position.exit.map(|(_, at)| Millis(at).to_string()),
        pid: position.pid,
        timeout_ms: view.timeout_ms,
        cwd: view.cwd,
        stdin: view.stdin,
        pty: view.pty.map(|size| api::TerminalSize { cols: size.cols, rows: size.rows }),
        cursor: position.cursor,
        stdout_bytes: position.stdout_bytes,
        stderr_bytes: position.stderr_bytes,
        stdout_omitted_bytes: position.stdout_omitted,
        stderr_omitted_bytes: position.stderr_omitted,
        stdin_accepted_bytes: view.stdin_accepted,
    }
}

fn stream(stream: Stream) -> api::StreamName {
    match stream {
        Stream::Stdout => api::StreamName::Stdout,
        Stream::Stderr => api::StreamName::Stderr,
    }
}

/// An event as callers see it.
fn event(event: Event) -> api::JobEvent {
    let kind = match event.entry {
        Entry::Started { pid } => api::JobEventKind::Started { pid },
        Entry::Output { stream: of, offset, data } => {
            api::JobEventKind::Output { stream: stream(of), offset, data_base64: STANDARD.encode(data) }
        }
        Entry::Gap { stream: of, offset, length } => api::JobEventKind::Gap { stream: stream(of), offset, length },
        Entry::Exit(exit) => api::JobEventKind::Exit {
            cause: cause(exit.cause),
            code: exit.code,
            signal: exit.signal,
            stdout_bytes: exit.stdout_bytes,
            stderr_bytes: exit.stderr_bytes,
            duration_ms: exit.duration_ms,
        },
    };
    api::JobEvent { cursor: event.cursor, time: event.time_ms, kind }
}
