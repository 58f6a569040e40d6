//! `mainbrella shell`: a terminal in a machine, as if one sat at it.

use std::collections::BTreeMap;
use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mainbrella_client::api::{CommandLine, ExitCause, JobEvent, JobEventKind, JobFrame, StartJob, TerminalSize};
use mainbrella_client::{Client, ClientError, JobMessage, MachineRef};
use mainbrella_types::limits;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::io::AsyncReadExt as _;
use tokio::signal::unix::{SignalKind, signal};

use crate::context::Context;
use crate::failure::{Exit, Failure};
use crate::values::{MachineArg, Pair};
use crate::verbs::exec::not_started;
use crate::verbs::logs;

/// Ctrl-]: leaves the shell and lets it run.
const DETACH: u8 = 0x1d;
/// How long a broken connection is made anew before that is given up.
const RECONNECT: Duration = Duration::from_secs(60);
/// The best shell there is, as a login shell.
const LOGIN: &str = "if [ -x /bin/bash ]; then exec /bin/bash -l; else exec /bin/sh -l; fi";

/// Open a terminal in a machine
///
/// Every key goes to the machine, Ctrl-C too. Ctrl-] leaves the terminal and lets what runs in it go on; --attach comes back to it.
/// Ends with the code of what ran in it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The machine
    #[arg(value_name = "ID[@CREATED_AT]")]
    machine: MachineArg,
    /// Run this instead of a login shell, after `--`
    #[arg(value_name = "ARGV", last = true, conflicts_with = "attach")]
    argv: Vec<String>,
    /// Come back to a terminal that was left: its job, or the beginning of its id
    #[arg(long, short, value_name = "JOB")]
    attach: Option<String>,
    /// Working directory
    #[arg(long, short = 'C', value_name = "DIR")]
    cwd: Option<String>,
    /// Who it runs as, by name or number; the template's user when not given
    #[arg(long, short, value_name = "USER[:GROUP]", conflicts_with = "attach")]
    user: Option<String>,
    /// A variable over those of the machine; may be given several times
    #[arg(long, short, value_name = "NAME=VALUE")]
    env: Vec<Pair>,
}

/// Opens a terminal.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
        return Err(Failure::usage("a shell needs a terminal on standard input and output")
            .hint("`mainbrella exec` runs a command without one."));
    }
    let client = context.client()?;
    let machine = context.resolve(&client, &args.machine).await?;
    let job = match args.attach {
        Some(begins) => logs::find(&client, &machine, Some(&begins)).await?,
        None => start(&client, &machine, args).await?,
    };
    let mut session = Session { client, machine, job, cursor: 0, broken: None };
    let left = {
        let _raw = Raw::enter()?;
        session.hold().await?
    };
    match left {
        Left::Exit(cause, code, signal) => Ok(match (cause, code, signal) {
            (ExitCause::Exited, Some(code), _) => u8::try_from(code & 0xff).unwrap_or(1),
            (ExitCause::TimedOut, ..) => 124,
            (_, _, Some(n)) => u8::try_from(128 + n).unwrap_or(1),
            (cause, ..) => {
                context.output.note(&format!("mainbrella: the terminal ended: {}", cause.as_str().replace('_', " ")));
                Exit::Exec as u8
            }
        }),
        Left::Detached => {
            let Session { machine, job, .. } = &session;
            context.output.note(&format!("\nleft; `mainbrella shell {} --attach {job}` comes back", machine.id));
            Ok(0)
        }
    }
}

async fn start(client: &Client, machine: &MachineRef, args: Args) -> Result<String, Failure> {
    let command = if args.argv.is_empty() { CommandLine::Text(LOGIN.to_owned()) } else { CommandLine::Argv(args.argv) };
    let mut env: BTreeMap<String, String> = BTreeMap::new();
    if let Some(term) = std::env::var("TERM").ok().filter(|t| !t.is_empty() && t.len() < 64) {
        env.insert("TERM".to_owned(), term);
    }
    env.extend(args.env.into_iter().map(|Pair(name, value)| (name, value)));
    let body = StartJob {
        command,
        cwd: args.cwd,
        user: args.user,
        env,
        timeout_ms: Some(limits::COMMAND_TIMEOUT_MAX_MS),
        stdin: true,
        pty: Some(size()),
    };
    Ok(client.start_job(machine, &body, None).await.map_err(not_started)?.job.id)
}

/// The size of this terminal.
fn size() -> TerminalSize {
    let (cols, rows) = tcgetwinsize(std::io::stdout()).map_or((80, 24), |s| (s.ws_col, s.ws_row));
    let within = |n: u16, usual: u32| if n == 0 { usual } else { u32::from(n).min(limits::TERMINAL_SIDE_MAX) };
    TerminalSize { cols: within(cols, 80), rows: within(rows, 24) }
}

/// This terminal, every key as it is; put back when dropped.
struct Raw(Termios);

impl Raw {
    fn enter() -> Result<Self, Failure> {
        let failed = |e: rustix::io::Errno| Failure::io("setting the terminal", &e.into());
        let before = tcgetattr(std::io::stdin()).map_err(failed)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(std::io::stdin(), OptionalActions::Drain, &raw).map_err(failed)?;
        Ok(Self(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // Nothing better can be done when the terminal is gone.
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Drain, &self.0);
    }
}

/// How a terminal was left.
enum Left {
    Exit(ExitCause, Option<i32>, Option<i32>),
    Detached,
}

struct Session {
    client: Client,
    machine: MachineRef,
    job: String,
    cursor: u64,
    broken: Option<Instant>,
}

impl Session {
    /// Holds the terminal until what runs in it ends or it is left, over broken connections.
    async fn hold(&mut self) -> Result<Left, Failure> {
        let mut resized = signal(SignalKind::window_change()).map_err(|e| Failure::io("listening for signals", &e))?;
        let mut keys = tokio::io::stdin();
        loop {
            let error = match self.connected(&mut keys, &mut resized).await {
                Ok(left) => return Ok(left),
                Err(Break::Here(failure)) => return Err(failure),
                Err(Break::There(error)) => error,
            };
            let since = *self.broken.get_or_insert_with(Instant::now);
            let again = error.is_retryable() || matches!(error, ClientError::Lost { .. } | ClientError::StoppedWaiting);
            if !again || since.elapsed() > RECONNECT {
                return Err(error.into());
            }
            // Ctrl-] works without a connection, too.
            let mut byte = [0u8; 64];
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(500)) => {}
                read = keys.read(&mut byte) => {
                    if read.map_or(true, |n| n == 0 || byte[..n].contains(&DETACH)) {
                        return Ok(Left::Detached);
                    }
                }
            }
        }
    }

    async fn connected(
        &mut self,
        keys: &mut tokio::io::Stdin,
        resized: &mut tokio::signal::unix::Signal,
    ) -> Result<Left, Break> {
        let mut socket = self.client.attach_job(&self.machine, &self.job, self.cursor).await?;
        let TerminalSize { cols, rows } = size();
        socket.send(&JobFrame::Resize { cols, rows }).await?;
        let mut buffer = vec![0u8; 16 * 1024];
        loop {
            tokio::select! {
                message = socket.next() => match message? {
                    Some(JobMessage::Event(event)) => {
                        self.broken = None;
                        self.cursor = event.cursor;
                        if let Some(left) = shown(event).map_err(Break::Here)? {
                            return Ok(left);
                        }
                    }
                    // That the job has ended is told by its exit, which is on its way.
                    Some(JobMessage::Refused { code, .. }) if code == "job_ended" => {}
                    Some(JobMessage::Refused { message, .. }) => {
                        let mut err = std::io::stderr().lock();
                        let _ = write!(err, "\r\nmainbrella: {message}\r\n");
                    }
                    None => return Err(ClientError::StoppedWaiting.into()),
                },
                read = keys.read(&mut buffer) => {
                    let n = read.map_err(|e| Break::Here(Failure::io("reading the terminal", &e)))?;
                    let typed = &buffer[..n];
                    let until = typed.iter().position(|b| *b == DETACH);
                    socket.write(&typed[..until.unwrap_or(n)]).await?;
                    if n == 0 || until.is_some() {
                        socket.close().await;
                        return Ok(Left::Detached);
                    }
                }
                _ = resized.recv() => {
                    let TerminalSize { cols, rows } = size();
                    socket.send(&JobFrame::Resize { cols, rows }).await?;
                }
            }
        }
    }
}

/// Why a connection ended: something here, or the connection.
enum Break {
    Here(Failure),
    There(ClientError),
}

impl From<ClientError> for Break {
    fn from(e: ClientError) -> Self {
        Self::There(e)
    }
}

fn shown(event: JobEvent) -> Result<Option<Left>, Failure> {
    match event.kind {
        JobEventKind::Output { data_base64, .. } => {
            let bytes = STANDARD
                .decode(data_base64)
                .map_err(|_| Failure::new(Exit::Failed, "invalid_response", "the output in an event is not base64"))?;
            let mut out = std::io::stdout().lock();
            let written = out.write_all(&bytes).and_then(|()| out.flush());
            written.map_err(|e| Failure::io("writing to the terminal", &e))?;
            Ok(None)
        }
        JobEventKind::Exit { cause, code, signal, .. } => Ok(Some(Left::Exit(cause, code, signal))),
        JobEventKind::Started { .. } | JobEventKind::Gap { .. } => Ok(None),
    }
}
