use axum::extract::State;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::StatusCode;
use mainbrella_api::{CommandLine, CommandResult, OmittedRange, RunCommand};
use mainbrella_engine::machine::files::check_path;
use mainbrella_engine::{Captured, CommandEnding, CommandOrder, CommandOutcome};
use mainbrella_types::limits;
use mainbrella_types::machine::{check_env, check_user};

use crate::auth::Permit;
use crate::error::{ApiError, ApiResult};
use crate::extract::{JsonBody, Query, SlotPath, json};
use crate::fence;
use crate::state::AppState;

/// Run a command and wait for it
///
/// A non-zero exit code is a normal result. Text runs as `/bin/sh -lc TEXT`; a list of arguments runs directly. At the time-out
/// the command is ended and its partial output returned with `timedOut`; when `waitMs` passes first the command goes on and
/// its partial output is returned with `stillRunning`. The command goes on, too, when the caller goes away. What goes on is a
/// job, kept under `jobId`.
#[utoipa::path(post, path = "/v1/machines/{id}/commands/run", tag = "commands", operation_id = "runCommand",
    params(("id" = String, Path, description = "The slot."),
           ("createdAt" = String, Query, description = "The generation that is meant.")),
    request_body = RunCommand,
    responses((status = 200, description = "The command ended, or timed out.", body = CommandResult)))]
pub(crate) async fn run(
    State(state): State<AppState>,
    permit: Permit,
    SlotPath(id): SlotPath,
    mut query: Query,
    JsonBody(body): JsonBody<RunCommand>,
) -> ApiResult<Response> {
    let created_at = query.created_at()?;
    query.finish()?;
    let order = order(body)?;
    let handle = fence::to_act(&state, &permit, &id, created_at).await?.living()?;
    let outcome = permit.while_valid(async { Ok(handle.run(order).await?) }).await?;
    json(StatusCode::OK, &result(outcome))
}

/// Checks a request and turns it into what the engine takes.
fn order(body: RunCommand) -> ApiResult<CommandOrder> {
    check_command(&body.command)?;
    check_env(&body.env)?;
    check_cwd(body.cwd.as_deref())?;
    body.user.as_deref().map_or(Ok(()), check_user)?;
    let timeout_ms = body.timeout_ms.unwrap_or(limits::COMMAND_TIMEOUT_DEFAULT_MS);
    if !(1..=limits::COMMAND_TIMEOUT_MAX_MS).contains(&timeout_ms) {
        return Err(ApiError::invalid("timeoutMs must be 1 to 86400000."));
    }
    let output_limit = body.output_limit_bytes.unwrap_or(limits::OUTPUT_LIMIT_DEFAULT);
    if !(1..=limits::OUTPUT_LIMIT_MAX).contains(&output_limit) {
        return Err(ApiError::invalid("outputLimitBytes must be 1 to 16777216."));
    }
    let stdin = match body.stdin_base64 {
        Some(text) => STANDARD.decode(text).map_err(|_| ApiError::invalid("stdinBase64 must be padded base64."))?,
        None => Vec::new(),
    };
    if stdin.len() > limits::STDIN_INLINE_MAX {
        return Err(ApiError::invalid("stdinBase64 must decode to at most 1 MiB."));
    }
    if body.wait_ms.is_some_and(|wait| !(1..=limits::COMMAND_TIMEOUT_MAX_MS).contains(&wait)) {
        return Err(ApiError::invalid("waitMs must be 1 to 86400000."));
    }
    let (text, argv) = match body.command {
        CommandLine::Text(text) => (Some(text), Vec::new()),
        CommandLine::Argv(argv) => (None, argv),
    };
    Ok(CommandOrder {
        text,
        argv,
        cwd: body.cwd,
        user: body.user,
        env: body.env,
        timeout_ms,
        stdin: Bytes::from(stdin),
        output_limit,
        wait_ms: body.wait_ms,
    })
}

/// Checks what is to be run.
pub(crate) fn check_command(command: &CommandLine) -> ApiResult<()> {
    let argv = match command {
        CommandLine::Text(text) => std::slice::from_ref(text),
        CommandLine::Argv(argv) => argv.as_slice(),
    };
    let bytes: usize = argv.iter().map(String::len).sum();
    let no_program = matches!(command, CommandLine::Argv(argv) if argv.first().is_none_or(String::is_empty));
    if no_program || argv.len() > limits::ARGV_ENTRIES_MAX {
        return Err(ApiError::invalid(
            "command must be a text, or 1 to 1024 arguments of which the first is the program.",
        ));
    }
    if bytes > limits::COMMAND_BYTES_MAX || argv.iter().any(|a| a.contains('\0')) {
        return Err(ApiError::invalid("command must be at most 128 KiB and without NUL."));
    }
    Ok(())
}

/// Checks a working directory.
pub(crate) fn check_cwd(cwd: Option<&str>) -> ApiResult<()> {
    match cwd.map(|cwd| check_path(cwd.as_bytes())) {
        Some(Err(_)) => Err(ApiError::invalid("cwd must be an absolute path of at most 4095 bytes.")),
        _ => Ok(()),
    }
}

fn omitted(stream: &Captured) -> Option<OmittedRange> {
    stream.omitted.map(|o| OmittedRange { offset: o.offset, length: o.length })
}

fn result(outcome: CommandOutcome) -> CommandResult {
    let (exit_code, signal, timed_out) = match outcome.ending {
        CommandEnding::Exited(code) => (code, None, false),
        CommandEnding::Signalled(n) => (n.saturating_add(128), Some(n), false),
        CommandEnding::TimedOut | CommandEnding::Overdue => (-1, None, true),
        CommandEnding::Running => (-1, None, false),
    };
    CommandResult {
        exit_code,
        signal,
        timed_out,
        stdout_base64: STANDARD.encode(&outcome.stdout.bytes),
        stderr_base64: STANDARD.encode(&outcome.stderr.bytes),
        stdout_bytes: outcome.stdout.total,
        stderr_bytes: outcome.stderr.total,
        stdout_omitted: omitted(&outcome.stdout),
        stderr_omitted: omitted(&outcome.stderr),
        duration_ms: u64::try_from(outcome.duration.as_millis()).unwrap_or(u64::MAX),
        still_running: matches!(outcome.ending, CommandEnding::Running | CommandEnding::Overdue),
        job_id: outcome.job_id,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(v: serde_json::Value) -> ApiResult<CommandOrder> {
        order(serde_json::from_value(v).expect("a request"))
    }

    #[test]
    fn text_goes_to_a_login_shell_and_arguments_go_as_they_are() {
        let o = parse(json!({"command": "echo $HOME"})).expect("valid");
        assert_eq!((o.text.as_deref(), o.argv.len()), (Some("echo $HOME"), 0));
        assert_eq!((o.timeout_ms, o.output_limit), (60_000, 1_048_576));
        let o = parse(json!({"command": ["/bin/echo", ""], "stdinBase64": "aGk=", "cwd": "/tmp"})).expect("valid");
        assert_eq!((o.text, o.argv), (None, vec!["/bin/echo".to_owned(), String::new()]));
        assert_eq!(&o.stdin[..], b"hi");
        assert_eq!(
            (o.user, parse(json!({"command": "a", "user": "app:1000"})).expect("valid").user),
            (None, Some("app:1000".to_owned()))
        );
    }

    #[test]
    fn what_is_out_of_bounds_is_refused() {
        let long = "x".repeat(limits::COMMAND_BYTES_MAX + 1);
        for bad in [
            json!({"command": []}),
            json!({"command": [""]}),
            json!({"command": "a\u{0}b"}),
            json!({"command": long}),
            json!({"command": vec!["a"; 1025]}),
            json!({"command": "a", "cwd": "tmp"}),
            json!({"command": "a", "user": ""}),
            json!({"command": "a", "user": "a:b:c"}),
            json!({"command": "a", "user": "a b"}),
            json!({"command": "a", "user": "u".repeat(33)}),
            json!({"command": "a", "timeoutMs": 0}),
            json!({"command": "a", "timeoutMs": 86_400_001}),
            json!({"command": "a", "outputLimitBytes": 0}),
            json!({"command": "a", "outputLimitBytes": 16_777_217}),
            json!({"command": "a", "waitMs": 0}),
            json!({"command": "a", "stdinBase64": "a"}),
            json!({"command": "a", "env": {"A=B": "c"}}),
            json!({"command": "a", "stdinBase64": STANDARD.encode(vec![0; limits::STDIN_INLINE_MAX + 1])}),
        ] {
            assert!(parse(bad.clone()).is_err(), "{:.60}", bad.to_string());
        }
    }

    #[test]
    fn endings_have_their_documented_codes() {
        let end = |ending| {
            result(CommandOutcome {
                ending,
                stdout: Captured::default(),
                stderr: Captured::default(),
                duration: std::time::Duration::from_micros(1999),
                job_id: "j".into(),
            })
        };
        let r = end(CommandEnding::Signalled(9));
        assert_eq!((r.exit_code, r.signal, r.timed_out, r.duration_ms), (137, Some(9), false, 1));
        let r = end(CommandEnding::TimedOut);
        assert_eq!((r.exit_code, r.signal, r.timed_out, r.still_running), (-1, None, true, false));
        let r = end(CommandEnding::Overdue);
        assert_eq!((r.exit_code, r.signal, r.timed_out, r.still_running), (-1, None, true, true));
        assert_eq!(end(CommandEnding::Exited(7)).exit_code, 7);
    }
}
