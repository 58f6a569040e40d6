//! `mainbrella exec`: its exit code is the command's.

use std::io::{Read as _, Write as _};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mainbrella_client::ClientError;
use mainbrella_client::api::{CommandLine, OmittedRange, RunCommand};
use mainbrella_types::{ErrorCode, limits};

use crate::context::Context;
use crate::failure::{Exit, Failure};
use crate::values::{MachineArg, Pair, Span};

/// Exit code of a command that ran into its time-out, as `timeout(1)` has it.
const TIMED_OUT: u8 = 124;

/// Run a command in a machine
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "mainbrella exec [OPTIONS] <ID[@CREATED_AT]> -- <ARGV>...\n       mainbrella exec [OPTIONS] <ID[@CREATED_AT]> --shell <TEXT>"
)]
#[command(group(clap::ArgGroup::new("what").required(true).args(["shell", "argv"])))]
pub struct Args {
    /// The machine
    #[arg(value_name = "ID[@CREATED_AT]")]
    machine: MachineArg,
    /// Text for `/bin/sh -lc` instead of a program and its arguments
    #[arg(long, short = 'c', value_name = "TEXT")]
    shell: Option<String>,
    /// The program and its arguments, after `--`
    #[arg(value_name = "ARGV", last = true)]
    argv: Vec<String>,
    /// Working directory
    #[arg(long, short = 'C', value_name = "DIR")]
    cwd: Option<String>,
    /// A variable over those of the machine; may be given several times
    #[arg(long, short, value_name = "NAME=VALUE")]
    env: Vec<Pair>,
    /// The command is ended after so long
    #[arg(long, short, default_value = "1h", value_name = "DURATION")]
    timeout: Span,
    /// Send standard input, read to its end first; at most 1 MiB
    #[arg(long, short = 'i')]
    stdin: bool,
    /// Bytes kept of each of stdout and stderr, half from the start and half from the end
    #[arg(long, default_value_t = limits::OUTPUT_LIMIT_MAX, value_name = "BYTES")]
    output_limit: u64,
}

/// Runs a command.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    run_here(context, args).await.map_err(|mut failure| {
        // The codes of the other verbs would be taken for the command's.
        if !matches!(failure.exit_code, Exit::NotStarted | Exit::BrokenPipe) {
            failure.exit_code = Exit::Exec;
        }
        failure
    })
}

async fn run_here(context: &Context, args: Args) -> Result<u8, Failure> {
    let client = context.client()?;
    let stdin = if args.stdin { Some(read_input()?) } else { None };
    let machine = context.resolve(&client, &args.machine).await?;
    let command = match args.shell {
        Some(text) => CommandLine::Text(text),
        None => CommandLine::Argv(args.argv),
    };
    let body = RunCommand {
        command,
        cwd: args.cwd,
        env: args.env.into_iter().map(|Pair(k, v)| (k, v)).collect(),
        timeout_ms: Some(args.timeout.millis()),
        output_limit_bytes: Some(args.output_limit),
        stdin_base64: stdin.map(|data| STANDARD.encode(data)),
        wait_ms: None,
    };
    let result = client.run(&machine, &body).await.map_err(|e| {
        let not_started = e.code() == Some(ErrorCode::CommandNotStarted);
        let open = matches!(e, ClientError::StoppedWaiting | ClientError::Lost { .. });
        let mut failure = Failure::from(e);
        if not_started {
            failure.exit_code = Exit::NotStarted;
        }
        if open { failure.hint("The command may still be running in the machine.") } else { failure }
    })?;
    let code = if result.timed_out { TIMED_OUT } else { u8::try_from(result.exit_code & 0xff).unwrap_or(1) };
    if context.output.json {
        context.output.json(&result)?;
        return Ok(code);
    }
    let decode = |text: &str| {
        STANDARD
            .decode(text)
            .map_err(|_| Failure::new(Exit::Exec, "invalid_response", "the output in the answer is not base64"))
    };
    context.output.raw(&decode(&result.stdout_base64)?)?;
    let mut err = std::io::stderr().lock();
    err.write_all(&decode(&result.stderr_base64)?).map_err(|e| Failure::io("writing to standard error", &e))?;
    drop(err);
    for (name, gap) in [("stdout", result.stdout_omitted), ("stderr", result.stderr_omitted)] {
        if let Some(OmittedRange { offset, length }) = gap {
            context.output.note(&format!(
                "mainbrella: {length} bytes of {name} are missing after the first {offset}; send it to a file and `cp` it, or raise --output-limit"
            ));
        }
    }
    if result.timed_out {
        context
            .output
            .note(&format!("mainbrella: the command was ended after {} ms, its time-out", result.duration_ms));
    }
    Ok(code)
}

fn read_input() -> Result<Vec<u8>, Failure> {
    let mut data = Vec::new();
    std::io::stdin()
        .lock()
        .take(limits::STDIN_INLINE_MAX as u64 + 1)
        .read_to_end(&mut data)
        .map_err(|e| Failure::io("reading standard input", &e))?;
    if data.len() > limits::STDIN_INLINE_MAX {
        return Err(Failure::usage("standard input is longer than 1 MiB")
            .hint("Copy it into the machine with `mainbrella cp - ID:/path` and read it there."));
    }
    Ok(data)
}
