//! `mainbrella exec`: a command in a machine as if it ran here. Output comes as it is written, Ctrl-C ends it, its exit
//! code is this program's.

mod input;
mod output;

use std::cell::Cell;
use std::time::Duration;

use mainbrella_client::api::{CommandLine, CommandResult, ExitCause, Job, StartJob};
use mainbrella_client::{Client, ClientError, MachineRef};
use mainbrella_types::{ErrorCode, limits};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::context::Context;
use crate::failure::{Exit, Failure};
use crate::values::{MachineArg, Pair, Span};
use input::Source;
use output::{Ended, Kept, Sink};

/// Exit code of a command that ran into its time-out, as `timeout(1)` has it.
const TIMED_OUT: u8 = 124;
/// How long a start that was interrupted is waited for, so that what it started can be ended.
const START_PATIENCE: Duration = Duration::from_secs(5);
/// How often a cancel that does not get through is tried, and the pause in between.
const CANCEL_TRIES: u32 = 20;
const CANCEL_PAUSE: Duration = Duration::from_millis(500);
/// How long the last words to the service may take when the outcome is known already.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Run a command in a machine
///
/// Its output is shown as it comes, byte for byte, over broken connections too. Standard input is passed on where it is a pipe or
/// a file. Ctrl-C ends the command; a second one leaves it.
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
    /// Who it runs as, by name or number; the template's user when not given
    #[arg(long, short, value_name = "USER[:GROUP]")]
    user: Option<String>,
    /// A variable over those of the machine; may be given several times
    #[arg(long, short, value_name = "NAME=VALUE")]
    env: Vec<Pair>,
    /// The command is ended after so long
    #[arg(long, short, default_value = "1h", value_name = "DURATION")]
    timeout: Span,
    /// Pass standard input on, a terminal too; at most 1 MiB
    #[arg(long, short = 'i')]
    stdin: bool,
    /// Do not touch standard input: for loops that read their own
    #[arg(long, conflicts_with = "stdin")]
    no_stdin: bool,
    /// Leave it running as a job and print its id; see `mainbrella logs` and `mainbrella jobs`
    #[arg(long, short, conflicts_with_all = ["stdin", "output_limit"])]
    detach: bool,
    /// With --json: bytes kept of each of stdout and stderr, half from the start and half from the end
    #[arg(long, default_value_t = limits::OUTPUT_LIMIT_MAX, value_name = "BYTES",
        value_parser = clap::value_parser!(u64).range(1..=limits::OUTPUT_LIMIT_MAX))]
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
    let mut signals = Signals::listen()?;
    let source = if args.no_stdin || args.detach { None } else { Source::choose(args.stdin) };
    let (limit, detach) = (args.output_limit, args.detach);
    let body = StartJob {
        command: args.shell.map_or(CommandLine::Argv(args.argv), CommandLine::Text),
        cwd: args.cwd,
        user: args.user,
        env: args.env.into_iter().map(|Pair(k, v)| (k, v)).collect(),
        timeout_ms: Some(args.timeout.millis()),
        stdin: source.is_some(),
        pty: None,
    };
    let begin = async {
        let machine = context.resolve(&client, &args.machine).await?;
        let job = client.start_job(&machine, &body, None).await.map_err(not_started)?.job;
        Ok::<_, Failure>((machine, job))
    };
    tokio::pin!(begin);
    let ((machine, job), early) = tokio::select! {
        begun = &mut begin => (begun?, None),
        number = signals.next() => match tokio::time::timeout(START_PATIENCE, &mut begin).await {
            Ok(begun) => (begun?, Some(number)),
            Err(_) => {
                context.output.note("mainbrella: left before the command was known to have started; see `mainbrella jobs`");
                return Ok(code_of(number));
            }
        },
    };
    if detach && early.is_none() {
        if context.output.json {
            context.output.json(&job)?;
        } else {
            context.output.line(&job.id)?;
        }
        return Ok(0);
    }
    let session = Session { context, client: client.clone(), machine, job, interrupted: Cell::new(None) };
    session.hold(source, signals, early, limit).await
}

/// Why a command is not known to have started, with an exit code of its own for one that could not.
pub(super) fn not_started(e: ClientError) -> Failure {
    let not_started = e.code() == Some(ErrorCode::CommandNotStarted);
    let open = matches!(e, ClientError::StoppedWaiting | ClientError::Lost { .. });
    let mut failure = Failure::from(e);
    if not_started {
        failure.exit_code = Exit::NotStarted;
    }
    if open { failure.hint("The command may be running in the machine; see `mainbrella jobs`.") } else { failure }
}

/// The signals that end a command.
struct Signals([(Signal, i32); 3]);

impl Signals {
    fn listen() -> Result<Self, Failure> {
        let one = |kind: SignalKind| {
            let number = kind.as_raw_value();
            signal(kind).map(|s| (s, number)).map_err(|e| Failure::io("listening for signals", &e))
        };
        Ok(Self([one(SignalKind::interrupt())?, one(SignalKind::terminate())?, one(SignalKind::hangup())?]))
    }

    /// Number of the next one.
    async fn next(&mut self) -> i32 {
        let [(interrupt, a), (terminate, b), (hangup, c)] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => *a,
            _ = terminate.recv() => *b,
            _ = hangup.recv() => *c,
        }
    }
}

/// Exit code of what a signal ended.
fn code_of(signal: i32) -> u8 {
    u8::try_from(signal.saturating_add(128)).unwrap_or(1)
}

struct Session<'a> {
    context: &'a Context,
    client: Client,
    machine: MachineRef,
    job: Job,
    /// The signal that this program was asked to end by.
    interrupted: Cell<Option<i32>>,
}

impl Session<'_> {
    /// Holds on to the command to its end.
    async fn hold(
        &self,
        source: Option<Source>,
        mut signals: Signals,
        early: Option<i32>,
        limit: u64,
    ) -> Result<u8, Failure> {
        let json = self.context.output.json;
        let mut sink = if json { Sink::Kept(Box::new([Kept::new(limit), Kept::new(limit)])) } else { Sink::shown() };
        let followed = {
            let follow =
                output::follow(self.context.output, self.client.follow_job(&self.machine, &self.job.id, 0), &mut sink);
            let feed = async {
                match source {
                    Some(source) => source.send(&self.client, &self.machine, &self.job.id).await,
                    None => Ok(()),
                }
            };
            let feed = async {
                match feed.await {
                    Ok(()) => std::future::pending().await,
                    Err(failure) => failure,
                }
            };
            let stop = async {
                let first = match early {
                    Some(number) => number,
                    None => signals.next().await,
                };
                self.interrupted.set(Some(first));
                tokio::select! {
                    failed = self.cancel() => if let Err(failure) = failed { return Stopped::Failed(failure) },
                    second = signals.next() => return Stopped::Left(second),
                }
                Stopped::Left(signals.next().await)
            };
            tokio::select! {
                biased;
                ended = follow => ended,
                failure = feed => {
                    // A command that lacks part of its input must not go on as if that were all.
                    self.cancel_quickly().await;
                    return Err(failure);
                }
                stopped = stop => match stopped {
                    Stopped::Left(number) => {
                        let id = &self.job.id;
                        self.context.output.note(&format!("mainbrella: left; the command may still be running as job {id}"));
                        return Ok(code_of(number));
                    }
                    Stopped::Failed(failure) => {
                        let id = &self.job.id;
                        return Err(failure.hint(format!("The command could not be ended and may still be running as job {id}.")));
                    }
                },
            }
        };
        let ended = match followed {
            Ok(ended) => ended,
            Err(failure) if failure.exit_code == Exit::BrokenPipe => {
                self.cancel_quickly().await;
                return Err(failure);
            }
            Err(failure) => {
                let (id, machine) = (&self.job.id, &self.machine.id);
                return Err(failure.hint(format!("Go on with `mainbrella logs -f {machine} {id}`.")));
            }
        };
        let code = self.tell(ended, sink)?;
        // Its end was told: nobody asks for it any more. What cannot be let go of now is let go of with age.
        let _ = tokio::time::timeout(LAST_WORDS, self.client.forget_job(&self.machine, &self.job.id)).await;
        Ok(code)
    }

    /// Tells how it ended, and with --json what it said; gives the exit code.
    fn tell(&self, ended: Ended, sink: Sink) -> Result<u8, Failure> {
        let Ended { cause, code, signal, stdout_bytes, stderr_bytes, duration_ms } = ended;
        let (exit_code, process) = match (cause, code, signal) {
            (ExitCause::TimedOut, ..) => (-1, TIMED_OUT),
            (ExitCause::MachineStopped, ..) => {
                return Err(Failure::new(
                    Exit::Exec,
                    "machine_stopped",
                    "the machine was stopped while the command ran",
                ));
            }
            (ExitCause::Lost, ..) => {
                return Err(Failure::new(
                    Exit::Exec,
                    "lost",
                    "the machine was lost while the command ran; how it ended is not known",
                ));
            }
            (_, Some(code), _) => (code, u8::try_from(code & 0xff).unwrap_or(1)),
            (_, None, Some(number)) => (number.saturating_add(128), code_of(number)),
            (_, None, None) => (-1, Exit::Exec as u8),
        };
        let process = match (cause, self.interrupted.get()) {
            (ExitCause::Cancelled, Some(number)) => code_of(number),
            _ => process,
        };
        if let Sink::Kept(kept) = sink {
            let [out, err] = *kept;
            let ((stdout_base64, stdout_omitted), (stderr_base64, stderr_omitted)) =
                (out.finish(stdout_bytes), err.finish(stderr_bytes));
            self.context.output.json(&CommandResult {
                exit_code,
                signal: if cause == ExitCause::TimedOut { None } else { signal },
                timed_out: cause == ExitCause::TimedOut,
                stdout_base64,
                stderr_base64,
                stdout_bytes,
                stderr_bytes,
                stdout_omitted,
                stderr_omitted,
                duration_ms,
                job_id: self.job.id.clone(),
                still_running: false,
            })?;
            return Ok(process);
        }
        match cause {
            ExitCause::TimedOut => self
                .context
                .output
                .note(&format!("mainbrella: the command was ended after {duration_ms} ms, its time-out")),
            ExitCause::Cancelled if self.interrupted.get().is_none() => {
                self.context.output.note("mainbrella: the command was cancelled by somebody else");
            }
            _ => {}
        }
        Ok(process)
    }

    /// Asks the service to end the command, however often that has to be said.
    async fn cancel(&self) -> Result<(), Failure> {
        let mut tries = 0;
        loop {
            match self.client.cancel_job(&self.machine, &self.job.id, None).await {
                Ok(_) => return Ok(()),
                Err(e) if e.code() == Some(ErrorCode::NotFound) => return Ok(()),
                Err(e) if tries == CANCEL_TRIES => return Err(e.into()),
                Err(_) => tries += 1,
            }
            tokio::time::sleep(CANCEL_PAUSE).await;
        }
    }

    async fn cancel_quickly(&self) {
        // What it failed by is told already; without an answer the time-out of the command ends it.
        let _ = tokio::time::timeout(LAST_WORDS, self.cancel()).await;
    }
}

/// How this program was made to end before the command.
enum Stopped {
    /// It was asked a second time, by this signal.
    Left(i32),
    /// The command could not be ended.
    Failed(Failure),
}
