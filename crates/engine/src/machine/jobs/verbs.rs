//! What may be done with the jobs of a running machine.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use connectrpc::ErrorCode as Code;
use mainbrella_guest_protocol::{GuestError, pb};
use mainbrella_job_log::Stream;
use mainbrella_types::{ErrorCode, limits};

use super::capture::capture;
use super::job::{Job, Note, Phase, Waited, is_full};
use super::pull::{self, Holding};
use super::{JobOrder, JobView, MachineJobs, StartKey, StartedJob, StdinWritten, TerminalSize};
use crate::error::EngineError;
use crate::machine::command::{CommandEnding, CommandOrder, CommandOutcome};
use crate::machine::handle::{MachineHandle, Shared};
use crate::machine::link::silent;

/// How long a guest may take to say whether a job runs.
const START_WAIT: Duration = Duration::from_secs(30);
/// How long after its own time-out a command may still take to be reported. After it the host answers for a guest that lags.
const REPORT_GRACE: Duration = Duration::from_secs(15);
/// Outputs above this size are not read on a thread that serves others.
const INLINE_BYTES: u64 = 128 * 1024;

/// What a job promises of its log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Promise {
    /// It survives the service.
    Durable,
    /// One answer, to a caller who waits for it.
    Answer,
}

impl MachineHandle {
    /// The jobs of the machine, to look at.
    #[must_use]
    pub fn jobs(&self) -> MachineJobs {
        MachineJobs { shelf: Arc::clone(&self.shared.shelf) }
    }

    /// Starts a job and waits until its process runs. The start goes on when the caller stops waiting. With a key, a
    /// second start gives the job of the first.
    ///
    /// # Errors
    /// When the machine does not run, the process could not be made, the key was used for another job, or the guest
    /// fell silent; then the job may be there all the same, and is listed if so.
    pub async fn start_job(&self, order: JobOrder, key: Option<StartKey>) -> Result<StartedJob, EngineError> {
        let this = self.clone();
        // In a task of its own: a caller that goes away must not leave a start half done.
        let task = tokio::spawn(async move {
            let (job, replayed) = match key {
                None => (this.begin(order, None, Promise::Durable).await?, false),
                Some(key) => {
                    let _one = this.shared.shelf.keyed.lock().await;
                    let before = this.shared.shelf.by_key(&key.key, this.shared.clock.now());
                    let same = before.as_ref().is_none_or(|job| job.has_body(&key));
                    if !same {
                        return Err(EngineError::new(
                            ErrorCode::IdempotencyConflict,
                            "this Idempotency-Key was used for a job with another body",
                        ));
                    }
                    match before {
                        Some(job) => (job, true),
                        None => (this.begin(order, Some(&key), Promise::Durable).await?, false),
                    }
                }
            };
            let settled = this.settled(&job).await;
            // Who asks again is told how it ended, also where it never began: else they would ask for ever.
            if !(replayed && job.is_over() && job.phase().refusal().is_none()) {
                settled?;
            }
            Ok(StartedJob { job: job.view(), replayed })
        });
        task.await
            .unwrap_or_else(|e| Err(EngineError::new(ErrorCode::Internal, "the start failed").because(e.to_string())))
    }

    /// Runs a command and waits for its end, or for as long as the order says. The command goes on when the caller
    /// stops waiting, and is then kept as a job; one whose end was waited for is let go of.
    ///
    /// # Errors
    /// When the machine does not run, the command could not be started, or the guest fell silent. A command that
    /// fails is not an error.
    pub async fn run(&self, order: CommandOrder) -> Result<CommandOutcome, EngineError> {
        let (limit, patience) = (order.output_limit, order.wait_ms.map(Duration::from_millis));
        let report = Duration::from_millis(order.timeout_ms).saturating_add(REPORT_GRACE);
        let job = self.begin(order.into_job(), None, Promise::Answer).await?;
        let wait = patience.map_or(report, |patience| patience.min(report));
        let waited = job.comes_to(Phase::is_over, wait).await;
        let over = waited == Waited::Came;
        let phase = job.phase();
        if let Some(refusal) = phase.refusal() {
            return Err(refusal);
        }
        if let Phase::Disbelieved(why) = &phase {
            self.shared.shelf.let_go(&job, self.shared.clock.now());
            return Err(silent(why));
        }
        let late = waited == Waited::TooLong && patience.is_none_or(|patience| patience > report);
        if waited == Waited::OutOfReach || (late && phase == Phase::Starting) {
            return self.unless_gone(async { Err(silent("the end of a command was not reported in time")) }).await;
        }
        if late {
            let (this, id) = (self.clone(), job.id.clone());
            // Whether it hears this is not waited for: its clock or its agent is what lags.
            tokio::spawn(async move { this.cancel_job(&id, Duration::ZERO).await });
        }
        let outcome = outcome(&job, limit, self.shared.clock.now()).await?;
        match outcome {
            Some(mut outcome) => {
                if late && outcome.ending == CommandEnding::Running {
                    outcome.ending = CommandEnding::Overdue;
                }
                if over {
                    let (shared, job) = (Arc::clone(&self.shared), job);
                    tokio::task::spawn_blocking(move || shared.shelf.let_go(&job, shared.clock.now()));
                }
                Ok(outcome)
            }
            // Its machine ended under it.
            None => self.unless_gone(async { Err(silent("the machine ended")) }).await,
        }
    }

    /// Begins a job: it is on disk, or where that is full and nothing was promised in memory, and its task runs.
    async fn begin(&self, order: JobOrder, key: Option<&StartKey>, promise: Promise) -> Result<Arc<Job>, EngineError> {
        let shared = &self.shared;
        let _pass = self.enter().await?;
        let place = Arc::clone(&shared.commands).try_acquire_owned();
        let _place = place
            .map_err(|_| EngineError::new(ErrorCode::Overloaded, "the machine runs as many commands as it may"))?;
        let id = uuid::Uuid::now_v7().simple().to_string();
        let now = shared.clock.now();
        let note = Note {
            command: order.command.clone(),
            cwd: order.cwd.clone(),
            timeout_ms: order.timeout_ms,
            stdin: order.stdin_open,
            pty: order.pty,
            started_ms: now.0,
            key: key.map(|k| (hex::encode(k.key), hex::encode(k.body))),
            forgotten: false,
        };
        let volatile = promise == Promise::Answer;
        let job = Job::create(shared.shelf.dir(), &id, note, order.stdin.len() as u64, volatile).map_err(|e| {
            let code = if is_full(&e) { ErrorCode::HostFull } else { ErrorCode::Internal };
            EngineError::new(code, "the log of the job could not be made").because(e.to_string())
        })?;
        let job = Arc::new(job);
        if !shared.shelf.put(&job, now) {
            let _ = job.log.remove();
            return Err(self.over());
        }
        let pty = order.pty.map(|size| pb::PtySize { cols: size.cols, rows: size.rows, ..Default::default() });
        let request = pb::StartJobRequest {
            job_id: id,
            argv: order.command.argv(),
            cwd: order.cwd.unwrap_or_default().into_bytes(),
            user: order.user.unwrap_or_default(),
            env: order.env.into_iter().collect(),
            timeout_ms: order.timeout_ms,
            stdin_open: order.stdin_open,
            stdin: order.stdin.to_vec(),
            pty: pty.map(buffa::MessageField::some).unwrap_or_default(),
            acked: true,
            ..Default::default()
        };
        pull::spawn(Arc::clone(shared), Arc::clone(&job), Some(request), Holding { _pass, _place });
        Ok(job)
    }

    /// Waits until a job runs, or is known never to.
    async fn settled(&self, job: &Job) -> Result<(), EngineError> {
        let waited = job.comes_to(|phase| *phase != Phase::Starting, START_WAIT).await;
        if let Some(refusal) = job.phase().refusal() {
            return Err(refusal);
        }
        match waited {
            Waited::Came if job.log.position().pid.is_none() && job.is_over() => {
                // It ended before it began: with its machine.
                self.unless_gone(async { Err(silent("the job's start was not reported")) }).await
            }
            Waited::Came => Ok(()),
            _ => self.unless_gone(async { Err(silent("the job's start was not reported in time")) }).await,
        }
    }

    fn acting(&self, id: &str) -> Result<Arc<Job>, EngineError> {
        let job = self.shared.shelf.get(id)?;
        if job.is_over() {
            return Err(ended());
        }
        Ok(job)
    }

    /// Asks a job to end: TERM to its process group, KILL to what is left after `grace`. A job that has ended stays as
    /// it is.
    ///
    /// # Errors
    /// `not_found`, or when the guest cannot be asked; then it may be asked again.
    pub async fn cancel_job(&self, id: &str, grace: Duration) -> Result<JobView, EngineError> {
        let job = self.shared.shelf.get(id)?;
        if job.is_over() {
            return Ok(job.view());
        }
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        self.send_signal(pb::SignalJobRequest { job_id: id.to_owned(), cancel: true, grace_ms, ..Default::default() })
            .await?;
        Ok(job.view())
    }

    /// Sends a signal to a job's process group.
    ///
    /// # Errors
    /// `not_found`, `job_ended`, or when it is not known whether the guest did it.
    pub async fn signal_job(&self, id: &str, signal: i32) -> Result<JobView, EngineError> {
        let job = self.acting(id)?;
        let request = pb::SignalJobRequest { job_id: id.to_owned(), signal, ..Default::default() };
        if self.send_signal(request).await? { Ok(job.view()) } else { Err(ended()) }
    }

    /// Says whether there was a process to take it.
    async fn send_signal(&self, request: pb::SignalJobRequest) -> Result<bool, EngineError> {
        let _pass = self.enter().await?;
        let link = self.link()?;
        let call = async {
            let client = link.client().await?;
            match client.rpc().signal_job(request).await {
                Ok(answer) => Ok(answer.view().delivered),
                Err(e) => match GuestError::from_connect(&e) {
                    // It has been forgotten: it had ended.
                    fault if fault.code == Code::NotFound => Ok(false),
                    fault => Err(silent(&fault.to_string())),
                },
            }
        };
        self.unless_gone(call).await
    }

    /// Gives the terminal of a job another size; the job hears of it by SIGWINCH.
    ///
    /// # Errors
    /// `not_found`, `job_ended`, or `invalid_request` for a job without a terminal.
    pub async fn resize_job(&self, id: &str, size: TerminalSize) -> Result<JobView, EngineError> {
        let job = self.acting(id)?;
        if job.note().pty.is_none() {
            return Err(EngineError::new(ErrorCode::InvalidRequest, "the job does not run on a terminal"));
        }
        let _pass = self.enter().await?;
        let link = self.link()?;
        let size_field = pb::PtySize { cols: size.cols, rows: size.rows, ..Default::default() };
        let request = pb::ResizeJobRequest { job_id: id.to_owned(), size: size_field.into(), ..Default::default() };
        let call = async {
            let client = link.client().await?;
            client.rpc().resize_job(request).await.map(|_| ()).map_err(|e| match GuestError::from_connect(&e) {
                fault if matches!(fault.code, Code::NotFound | Code::FailedPrecondition) => ended(),
                fault => silent(&fault.to_string()),
            })
        };
        self.unless_gone(call).await?;
        job.change_note(|note| note.pty = Some(size));
        Ok(job.view())
    }

    /// Writes to the input of a job, all of `data` or nothing. `end`: nothing more will come.
    ///
    /// # Errors
    /// `payload_too_large`, `stdin_closed`, `stdin_full` and `stdin_limit` took nothing. After any other failure it is
    /// not known whether the input arrived; it is counted as accepted and must not be sent again.
    pub async fn write_job_stdin(&self, id: &str, data: Bytes, end: bool) -> Result<StdinWritten, EngineError> {
        let job = self.acting(id)?;
        if data.len() > limits::JOB_STDIN_WRITE_MAX {
            return Err(EngineError::new(ErrorCode::PayloadTooLarge, "one write is at most 64 KiB; nothing was taken"));
        }
        let takes = {
            let note = job.note();
            note.stdin || note.pty.is_some()
        };
        if !takes {
            return Err(closed());
        }
        let _pass = self.enter().await?;
        let link = self.link()?;
        let mut known = job.writing.lock().await;
        let call = async {
            let client = link.client().await?;
            if !*known {
                // After a restart of the service: the guest has counted.
                let request = pb::GetJobRequest { job_id: id.to_owned(), ..Default::default() };
                let status = client.rpc().get_job(request).await.map_err(|e| match GuestError::from_connect(&e) {
                    fault if fault.code == Code::NotFound => ended(),
                    fault => silent(&fault.to_string()),
                })?;
                job.accepted.fetch_max(status.view().stdin_accepted, Ordering::Relaxed);
                *known = true;
            }
            let length = data.len() as u64;
            let before = job.accepted.load(Ordering::Relaxed);
            if before.saturating_add(length) > limits::JOB_STDIN_TOTAL_MAX {
                return Err(EngineError::new(
                    ErrorCode::StdinLimit,
                    format!("a job takes at most 1 MiB of input, and took {before} bytes; nothing of this was taken"),
                ));
            }
            // Counted before it is sent: what may have arrived stays counted.
            job.accepted.fetch_add(length, Ordering::Relaxed);
            let uncount = || job.accepted.fetch_sub(length, Ordering::Relaxed);
            let request = pb::WriteJobStdinRequest {
                job_id: id.to_owned(),
                data: data.to_vec(),
                eof: end,
                no_wait: true,
                ..Default::default()
            };
            match client.rpc().write_job_stdin(request).await {
                Ok(answer) => {
                    let accepted = job.accepted.load(Ordering::Relaxed);
                    let pending = answer.view().pending.min(limits::JOB_STDIN_PENDING_MAX);
                    Ok(StdinWritten { accepted, pending, closed: end })
                }
                Err(e) => {
                    let fault = GuestError::from_connect(&e);
                    match (fault.stage.as_str(), fault.errno) {
                        ("stdin", libc::EAGAIN) => {
                            uncount();
                            Err(EngineError::new(
                                ErrorCode::StdinFull,
                                "the job has not read its input; nothing of this was taken",
                            ))
                        }
                        ("stdin", libc::EPIPE) => {
                            uncount();
                            Err(closed())
                        }
                        _ if fault.code == Code::NotFound => {
                            uncount();
                            Err(ended())
                        }
                        _ => Err(EngineError::new(
                            ErrorCode::GuestUnavailable,
                            "it is not known whether the input arrived; it counts as accepted",
                        )
                        .because(fault.to_string())),
                    }
                }
            }
        };
        self.unless_gone(call).await
    }
}

/// Goes on with the jobs of a machine that was adopted.
pub(crate) fn resume(shared: &Arc<Shared>) {
    for job in shared.shelf.running() {
        // As many as were running have a place, and the gate was opened a moment ago.
        let (Some(pass), Ok(place)) = (shared.gate.enter(), Arc::clone(&shared.commands).try_acquire_owned()) else {
            continue;
        };
        pull::spawn(Arc::clone(shared), job, None, Holding { _pass: pass, _place: place });
    }
}

fn ended() -> EngineError {
    EngineError::new(ErrorCode::JobEnded, "the job has ended")
}

fn closed() -> EngineError {
    EngineError::new(ErrorCode::StdinClosed, "the job takes no more input; nothing of this was taken")
}

/// What a command came to; `None`: its machine ended first.
async fn outcome(
    job: &Arc<Job>,
    limit: u64,
    now: mainbrella_types::Millis,
) -> Result<Option<CommandOutcome>, EngineError> {
    use mainbrella_job_log::Cause;
    let position = job.log.position();
    let started = mainbrella_types::Millis(job.note().started_ms);
    let (ending, duration_ms) = match position.exit {
        None => (CommandEnding::Running, started.until(now)),
        Some((exit, _)) => {
            let signal = exit.signal.unwrap_or(libc::SIGKILL);
            let ending = match (exit.cause, exit.code) {
                (Cause::Exited, code) => CommandEnding::Exited(code.unwrap_or(0)),
                (Cause::Cancelled, Some(code)) => CommandEnding::Exited(code),
                (Cause::Signalled | Cause::Cancelled, _) => CommandEnding::Signalled(signal),
                (Cause::TimedOut, _) => CommandEnding::TimedOut,
                (Cause::MachineStopped | Cause::Lost, _) => return Ok(None),
            };
            (ending, exit.duration_ms)
        }
    };
    let both = {
        let job = Arc::clone(job);
        move || {
            Ok::<_, std::io::Error>((
                capture(&job.log, Stream::Stdout, limit)?,
                capture(&job.log, Stream::Stderr, limit)?,
            ))
        }
    };
    let read = if position.stdout_bytes + position.stderr_bytes <= INLINE_BYTES {
        both()
    } else {
        tokio::task::spawn_blocking(both).await.unwrap_or_else(|e| Err(std::io::Error::other(e)))
    };
    let (stdout, stderr) = read.map_err(|e| {
        EngineError::new(ErrorCode::Internal, "the output of the command could not be read").because(e.to_string())
    })?;
    let (job_id, duration) = (job.id.clone(), Duration::from_millis(duration_ms));
    Ok(Some(CommandOutcome { ending, stdout, stderr, duration, job_id }))
}
