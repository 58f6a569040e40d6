//! Blocking commands: what is asked, what comes of it, and how a guest's refusals read.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use mainbrella_guest_protocol::{GuestClient, GuestError};
use mainbrella_types::ErrorCode;

use crate::error::EngineError;
use crate::machine::jobs::{JobCommand, JobOrder};
use crate::machine::link::silent;

/// How often a followed command may lose its link before it is given up.
pub(super) const LINK_LOSSES_MAX: u32 = 5;
/// How long after a broken stream the end of its connection may be noticed.
const LINK_LOSS_NOTICE: Duration = Duration::from_secs(1);

/// A command to run.
#[derive(Clone, Debug, Default)]
pub struct CommandOrder {
    /// Text for `/bin/sh -lc`, instead of a program and arguments.
    pub text: Option<String>,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Working directory; `None`: `/workspace`.
    pub cwd: Option<String>,
    /// Who it runs as, `USER[:GROUP]` by name or number; `None`: the template's user.
    pub user: Option<String>,
    /// Environment on top of the machine's own.
    pub env: BTreeMap<String, String>,
    /// Time limit in the guest, milliseconds.
    pub timeout_ms: u64,
    /// Standard input; the command then sees its end.
    pub stdin: Bytes,
    /// Bytes kept of each stream: half head, half tail.
    pub output_limit: u64,
    /// How long its end is waited for, milliseconds; `None`: until it comes.
    pub wait_ms: Option<u64>,
}

impl CommandOrder {
    pub(crate) fn into_job(self) -> JobOrder {
        JobOrder {
            command: self.text.map_or(JobCommand::Argv(self.argv), JobCommand::Text),
            cwd: self.cwd,
            user: self.user,
            env: self.env,
            timeout_ms: self.timeout_ms,
            stdin: self.stdin,
            stdin_open: false,
            pty: None,
        }
    }
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandEnding {
    /// It exited with this code.
    Exited(i32),
    /// It was ended by this signal.
    Signalled(i32),
    /// It was ended at its time limit.
    TimedOut,
    /// Its time limit passed and the guest did not say that it ended. It was told to end it once more, and the command is
    /// kept as a job.
    Overdue,
    /// It has not ended; it was waited for no longer.
    Running,
}

/// Bytes of a stream that were not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Omitted {
    /// Position of the first of them in the stream.
    pub offset: u64,
    /// How many.
    pub length: u64,
}

/// What was kept of a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Captured {
    /// Head and tail, joined at [`Captured::omitted`].
    pub bytes: Bytes,
    /// What is missing between them.
    pub omitted: Option<Omitted>,
    /// Bytes the stream produced in all.
    pub total: u64,
}

/// The result of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandOutcome {
    /// How it ended.
    pub ending: CommandEnding,
    /// Standard output.
    pub stdout: Captured,
    /// Standard error.
    pub stderr: Captured,
    /// Time it took in the guest.
    pub duration: Duration,
    /// Id of the job it was or is.
    pub job_id: String,
}

/// Whether a stream ended because its connection did. The stream may learn of it first.
pub(crate) async fn link_lost(client: &GuestClient, fault: &GuestError) -> bool {
    let unexplained = fault.errno == 0 && fault.stage.is_empty();
    unexplained && tokio::time::timeout(LINK_LOSS_NOTICE, client.closed()).await.is_ok()
}

pub(crate) fn not_started(errno: i32, stage: &str) -> EngineError {
    let why = std::io::Error::from_raw_os_error(errno);
    let nobody = |what: &str| {
        let message = format!(
            "there is no such {what} in the machine: make it there as root, or name one of its /etc/{file}, or a number",
            file = if what == "user" { "passwd" } else { "group" }
        );
        EngineError::new(ErrorCode::CommandNotStarted, message)
    };
    let what = match (stage, errno) {
        ("user", libc::ENOENT) => return nobody("user"),
        ("group", libc::ENOENT) => return nobody("group"),
        ("user" | "group", _) => "the user of the command could not be taken on",
        ("output", _) => "the file for its output could not be opened",
        ("cwd", _) => "the working directory could not be entered",
        ("exec", _) => "the program could not be executed",
        ("pty", _) => "no terminal could be made",
        _ => "no process could be made",
    };
    let code = if errno == libc::ENOSPC { ErrorCode::GuestDiskFull } else { ErrorCode::CommandNotStarted };
    EngineError::new(code, format!("{what}: {}", reason(&why)))
}

/// The text of an error number without the number.
pub(crate) fn reason(error: &std::io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_lowercase()
}

/// A call the guest refused or that never reached it.
pub(crate) fn guest_failed(fault: &GuestError) -> EngineError {
    use connectrpc::ErrorCode as Code;
    match fault.code {
        Code::ResourceExhausted if fault.errno == 0 => {
            EngineError::new(ErrorCode::Overloaded, "the machine runs too many commands at once")
                .because(fault.to_string())
        }
        Code::InvalidArgument if fault.errno == 0 => {
            EngineError::new(ErrorCode::InvalidRequest, "the machine did not accept the command")
                .because(fault.to_string())
        }
        _ if fault.errno != 0 => not_started(fault.errno, &fault.stage),
        _ => silent(&fault.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_could_not_start_says_why_without_numbers() {
        let e = not_started(libc::ENOENT, "exec");
        assert_eq!(e.code(), ErrorCode::CommandNotStarted);
        assert_eq!(e.message(), "the program could not be executed: no such file or directory");
        let e = not_started(libc::ENOENT, "group");
        assert_eq!(e.code(), ErrorCode::CommandNotStarted);
        assert_eq!(
            e.message(),
            "there is no such group in the machine: make it there as root, or name one of its /etc/group, or a number"
        );
        assert_eq!(
            not_started(libc::EFBIG, "user").message(),
            "the user of the command could not be taken on: file too large"
        );
    }
}
