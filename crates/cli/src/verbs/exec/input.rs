//! Standard input on its way to a command.

use std::time::Duration;

use mainbrella_client::{Client, ClientError, MachineRef};
use mainbrella_types::{ErrorCode, limits};
use rustix::fs::FileType;
use tokio::io::AsyncReadExt as _;

use crate::failure::{Exit, Failure};

/// Pause before input that was not taken is sent again; doubles up to [`PAUSE_MAX`].
const PAUSE_FIRST: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// Standard input that is to be passed on.
pub struct Source(());

impl Source {
    /// Standard input where it is a pipe, a socket or a file, or with `always` whatever it is.
    pub fn choose(always: bool) -> Option<Self> {
        let kind = rustix::fs::fstat(std::io::stdin()).ok().map(|s| FileType::from_raw_mode(s.st_mode));
        let piped = matches!(kind, Some(FileType::Fifo | FileType::RegularFile | FileType::Socket));
        (always || piped).then_some(Self(()))
    }

    /// Sends it to its end, as fast as the command reads. A command that takes no more is no failure.
    pub async fn send(self, client: &Client, machine: &MachineRef, job: &str) -> Result<(), Failure> {
        let mut stdin = tokio::io::stdin();
        let mut buffer = vec![0u8; limits::JOB_STDIN_WRITE_MAX];
        loop {
            let n = stdin.read(&mut buffer).await.map_err(|e| Failure::io("reading standard input", &e))?;
            if !write(client, machine, job, &buffer[..n]).await? || n == 0 {
                return Ok(());
            }
        }
    }
}

/// Writes one piece, no bytes being the end; `false`: nothing more is taken.
async fn write(client: &Client, machine: &MachineRef, job: &str, piece: &[u8]) -> Result<bool, Failure> {
    let mut pause = PAUSE_FIRST;
    loop {
        let error = match client.write_job_stdin(machine, job, piece.to_vec(), piece.is_empty()).await {
            Ok(_) => return Ok(true),
            Err(e) => e,
        };
        match error.code() {
            // How it ended is told by its events.
            Some(
                ErrorCode::StdinClosed
                | ErrorCode::JobEnded
                | ErrorCode::NotFound
                | ErrorCode::MachineNotRunning
                | ErrorCode::GenerationMismatch,
            ) => return Ok(false),
            Some(ErrorCode::StdinLimit) => {
                return Err(Failure::new(
                    Exit::Usage,
                    "stdin_limit",
                    "standard input is longer than 1 MiB; the command was ended",
                )
                .hint("Copy it into the machine with `mainbrella cp - ID:/path` and read it there."));
            }
            // It has not read what it has, or the service has no time: nothing was taken.
            _ if error.is_retryable() => {}
            _ if error.is_ambiguous() => return Err(unknown(error)),
            _ => return Err(error.into()),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Input that may have arrived is never sent again.
fn unknown(error: ClientError) -> Failure {
    let failure = Failure::from(error);
    let message =
        format!("it is not known whether all of standard input arrived, so the command was ended: {}", failure.message);
    Failure { message, ..failure }
        .hint("Copy the input into the machine with `mainbrella cp` and read it there; a copy can be repeated.")
}
