//! Blocking commands: a job, followed to its end, with a budget for what is kept of its output.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use mainbrella_guest_protocol::pb::__buffa::view::oneof::job_event::Event;
use mainbrella_guest_protocol::{GuestClient, GuestError, pb};
use mainbrella_types::ErrorCode;

use crate::error::EngineError;
use crate::machine::link::{Link, silent};

/// How long after its own time-out a command may still take to be reported, before the guest counts as silent.
const REPORT_GRACE: Duration = Duration::from_secs(15);
/// How often a followed command may lose its link before it is given up.
const LINK_LOSSES_MAX: u32 = 5;
/// How long after a broken stream the end of its connection may be noticed.
const LINK_LOSS_NOTICE: Duration = Duration::from_secs(1);

/// A command to run.
#[derive(Clone, Debug, Default)]
pub struct CommandOrder {
    /// Program and arguments.
    pub argv: Vec<Vec<u8>>,
    /// Working directory; `None`: `/workspace`.
    pub cwd: Option<Vec<u8>>,
    /// Environment on top of the machine's own.
    pub env: BTreeMap<String, String>,
    /// Time limit in the guest, milliseconds.
    pub timeout_ms: u64,
    /// Standard input; the command then sees its end.
    pub stdin: Bytes,
    /// Bytes kept of each stream: half head, half tail.
    pub output_limit: u64,
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
}

/// Collects one stream from what a guest says of it. Trusts nothing: never holds more than the limit,
/// and takes only bytes at the position where the last ones ended.
#[derive(Debug)]
struct Collector {
    bytes: BytesMut,
    next: u64,
    omitted: Option<Omitted>,
    limit: u64,
}

impl Collector {
    fn new(limit: u64) -> Self {
        Self { bytes: BytesMut::new(), next: 0, omitted: None, limit }
    }

    fn take(&mut self, offset: u64, data: &[u8]) -> Result<(), &'static str> {
        if offset != self.next {
            return Err("output out of order");
        }
        if (self.bytes.len() + data.len()) as u64 > self.limit {
            return Err("more output than was asked for");
        }
        self.bytes.extend_from_slice(data);
        self.next += data.len() as u64;
        Ok(())
    }

    fn skip(&mut self, offset: u64, length: u64) -> Result<(), &'static str> {
        if offset != self.next || self.omitted.is_some() || length == 0 {
            return Err("a gap out of order");
        }
        self.omitted = Some(Omitted { offset, length });
        self.next = offset.checked_add(length).ok_or("a gap without end")?;
        Ok(())
    }

    fn finish(self, total: u64) -> Result<Captured, &'static str> {
        if self.next != total {
            return Err("output is missing");
        }
        Ok(Captured { bytes: self.bytes.freeze(), omitted: self.omitted, total })
    }
}

/// Runs `order` as job `job_id` and waits for its end.
///
/// A link that breaks meanwhile is dialled again and the job followed from where it was: nothing is lost
/// and nothing is started twice.
pub(crate) async fn run(link: &Link, job_id: String, order: CommandOrder) -> Result<CommandOutcome, EngineError> {
    let limit = Duration::from_millis(order.timeout_ms).saturating_add(REPORT_GRACE);
    match tokio::time::timeout(limit, follow(link, job_id.clone(), order)).await {
        Ok(result) => {
            forget(link, job_id).await;
            result
        }
        Err(_) => Err(silent("the end of a command was not reported in time")),
    }
}

/// Lets the guest forget a job whose result is known, without making the caller wait. (The guest could forget
/// by itself once it has sent the exit, but what it has sent may be lost with the link.)
async fn forget(link: &Link, job_id: String) {
    if let Ok(client) = link.client().await {
        tokio::spawn(async move {
            let request = pb::ForgetJobRequest { job_id, ..Default::default() };
            if let Err(e) = client.rpc().forget_job(request).await {
                tracing::debug!(error = %GuestError::from_connect(&e), "a finished job was not forgotten");
            }
        });
    }
}

async fn follow(link: &Link, job_id: String, order: CommandOrder) -> Result<CommandOutcome, EngineError> {
    let mut stdout = Collector::new(order.output_limit);
    let mut stderr = Collector::new(order.output_limit);
    let start = pb::StartJobRequest {
        job_id: job_id.clone(),
        argv: order.argv,
        cwd: order.cwd.unwrap_or_default(),
        env: order.env.into_iter().collect(),
        timeout_ms: order.timeout_ms,
        stdin: order.stdin.to_vec(),
        output_limit: order.output_limit,
        ..Default::default()
    };
    let mut client = link.client().await?;
    let mut stream = client.streams().run_job(start).await.map_err(|e| guest_failed(&GuestError::from_connect(&e)))?;
    let mut seen = 0u64;
    let mut losses = 0;
    loop {
        let message = match stream.message::<pb::JobEvent>().await {
            Ok(Some(message)) => message,
            Ok(None) => return Err(silent("a command's events ended without its exit")),
            Err(e) => {
                let fault = GuestError::from_connect(&e);
                losses += 1;
                if losses > LINK_LOSSES_MAX || !link_lost(&client, &fault).await {
                    return Err(guest_failed(&fault));
                }
                client = link.client().await?;
                let resume =
                    pb::FollowJobRequest { job_id: job_id.clone(), after_sequence: seen, ..Default::default() };
                stream = client
                    .streams()
                    .follow_job(resume)
                    .await
                    .map_err(|e| guest_failed(&GuestError::from_connect(&e)))?;
                continue;
            }
        };
        let view = message.view();
        if view.sequence <= seen {
            return Err(silent("events out of order"));
        }
        seen = view.sequence;
        let collector = |stream: i32| match stream {
            1 => Some(true),
            2 => Some(false),
            _ => None,
        };
        let step = match &view.event {
            Some(Event::Started(_)) | None => Ok(()),
            Some(Event::Output(output)) => match collector(output.stream.to_i32()) {
                Some(true) => stdout.take(output.offset, output.data),
                Some(false) => stderr.take(output.offset, output.data),
                None => Err("output of an unknown stream"),
            },
            Some(Event::Gap(gap)) => match collector(gap.stream.to_i32()) {
                Some(true) => stdout.skip(gap.offset, gap.length),
                Some(false) => stderr.skip(gap.offset, gap.length),
                None => Err("a gap in an unknown stream"),
            },
            Some(Event::NotStarted(failed)) => return Err(not_started(failed.errno, failed.stage)),
            Some(Event::Exit(exit)) => {
                let ending = match exit.cause.to_i32() {
                    1 => CommandEnding::Exited(exit.code),
                    2 | 4 => CommandEnding::Signalled(exit.signal),
                    3 => CommandEnding::TimedOut,
                    _ => return Err(silent("an exit without a cause")),
                };
                return Ok(CommandOutcome {
                    ending,
                    stdout: stdout.finish(exit.stdout_bytes).map_err(silent)?,
                    stderr: stderr.finish(exit.stderr_bytes).map_err(silent)?,
                    duration: Duration::from_micros(exit.duration_us),
                });
            }
        };
        step.map_err(silent)?;
    }
}

/// Whether a stream ended because its connection did. The stream may learn of it first.
pub(crate) async fn link_lost(client: &GuestClient, fault: &GuestError) -> bool {
    let unexplained = fault.errno == 0 && fault.stage.is_empty();
    unexplained && tokio::time::timeout(LINK_LOSS_NOTICE, client.closed()).await.is_ok()
}

fn not_started(errno: i32, stage: &str) -> EngineError {
    let why = std::io::Error::from_raw_os_error(errno);
    let what = match (stage, errno) {
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
    use proptest::prelude::*;

    proptest! {
        /// Whatever a guest sends, no more than the limit is held; what is accepted is contiguous.
        #[test]
        fn a_collector_never_holds_more_than_its_limit(limit in 0u64..2000,
            steps in proptest::collection::vec((any::<bool>(), 0u64..3000, 0usize..700), 0..40)) {
            let mut c = Collector::new(limit);
            for (gap, offset, len) in steps {
                let _ = if gap { c.skip(offset, len as u64) } else { c.take(offset, &vec![7; len]) };
                prop_assert!(c.bytes.len() as u64 <= limit);
                prop_assert_eq!(c.bytes.len() as u64 + c.omitted.map_or(0, |o| o.length), c.next);
            }
        }

        /// Head, gap and tail that follow each other are accepted whole.
        #[test]
        fn a_well_behaved_stream_is_kept_whole(head in proptest::collection::vec(any::<u8>(), 0..500), gap in 1u64..10_000,
                                               tail in proptest::collection::vec(any::<u8>(), 0..500)) {
            let mut c = Collector::new(1000);
            c.take(0, &head).expect("head");
            c.skip(head.len() as u64, gap).expect("gap");
            c.take(head.len() as u64 + gap, &tail).expect("tail");
            let total = (head.len() + tail.len()) as u64 + gap;
            let got = c.finish(total).expect("complete");
            prop_assert_eq!(&got.bytes[..], &[head.clone(), tail].concat()[..]);
            prop_assert_eq!(got.omitted, Some(Omitted { offset: head.len() as u64, length: gap }));
        }
    }

    #[test]
    fn a_stream_that_is_cut_short_is_not_passed_off_as_whole() {
        let mut c = Collector::new(10);
        c.take(0, b"abc").expect("fits");
        assert_eq!(c.finish(4), Err("output is missing"));
    }

    #[test]
    fn a_command_that_could_not_start_says_why_without_numbers() {
        let e = not_started(libc::ENOENT, "exec");
        assert_eq!(e.code(), ErrorCode::CommandNotStarted);
        assert_eq!(e.message(), "the program could not be executed: no such file or directory");
    }
}
