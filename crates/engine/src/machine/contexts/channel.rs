//! The way to a machine's bridge: an internal job, followed over lost links, found again after a restart.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use mainbrella_guest_protocol::host::JobStream;
use mainbrella_guest_protocol::pb::__buffa::view::oneof::job_event::Event;
use mainbrella_guest_protocol::{GuestClient, GuestError, pb};
use mainbrella_types::ErrorCode;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::registry::Contexts;
use super::wire::{Described, Lines, Order, Refusal, Said, VERSION, read};
use super::{BRIDGE, LOADER, OWN_JOB, PYTHON};
use crate::error::EngineError;
use crate::machine::command::{LINK_LOSSES_MAX, guest_failed, link_lost, not_started};
use crate::machine::link::{Link, silent};

/// How long a bridge may take to import what a kernel needs: long under software emulation on a busy host.
const HELLO_DEADLINE: Duration = Duration::from_secs(150);
/// How long a bridge that runs already may take to say who is there.
const ATTACH_DEADLINE: Duration = Duration::from_secs(20);
/// How long the start of a kernel may take; the bridge gives up before.
const START_DEADLINE: Duration = Duration::from_secs(120);
/// How long anything else may take.
const CALL_DEADLINE: Duration = Duration::from_secs(20);
/// Commands that may wait to be written.
const QUEUE: usize = 32;
/// Size of one write.
const WRITE: usize = 64 * 1024;
/// How long after its end was asked for a bridge is followed to see it.
const END_PATIENCE: Duration = Duration::from_secs(2);

type Answer = Option<Refusal>;

/// A bridge that runs, or did.
pub(super) struct Bridge {
    job_id: String,
    lines: mpsc::Sender<Vec<u8>>,
    seq: AtomicU64,
    pending: Mutex<HashMap<u64, oneshot::Sender<Answer>>>,
    hello: Mutex<Option<(String, oneshot::Sender<Hello>)>>,
    /// Why there can be no kernels, in its own words.
    unable: OnceLock<String>,
    /// Why the guest could not start it: the error number, and at what.
    refused: OnceLock<(i32, String)>,
    /// Its job is there, so that something can be written to it.
    ready: CancellationToken,
    /// Ask for its end: it does not do what was agreed on.
    end: CancellationToken,
    /// It has ended.
    ended: CancellationToken,
}

struct Hello {
    version: u64,
    seen: u64,
    contexts: Vec<Described>,
}

/// How following begins.
enum Begin {
    Start(Box<pb::StartJobRequest>),
    Attach { after: u64 },
}

impl Bridge {
    /// Starts one and waits until it can make kernels.
    ///
    /// # Errors
    /// `unsupported` when the machine has no kernel for it; else the guest does not do its part.
    pub(super) async fn start(link: &Arc<Link>, contexts: &Arc<Contexts>) -> Result<Arc<Self>, EngineError> {
        let job_id = format!("{OWN_JOB}{}", uuid::Uuid::now_v7().simple());
        let start = pb::StartJobRequest {
            job_id: job_id.clone(),
            argv: [PYTHON, "-c", LOADER, &BRIDGE.len().to_string()].map(|a| a.as_bytes().to_vec()).to_vec(),
            stdin: BRIDGE.as_bytes().to_vec(),
            stdin_open: true,
            ..Default::default()
        };
        let bridge = Self::open(link, contexts, job_id, Begin::Start(Box::new(start)));
        bridge.greet(HELLO_DEADLINE).await?;
        Ok(bridge)
    }

    /// Finds the one an earlier service left, with the contexts it holds.
    ///
    /// # Errors
    /// When the guest does not answer.
    pub(super) async fn find(
        link: &Arc<Link>,
        contexts: &Arc<Contexts>,
    ) -> Result<Option<(Arc<Self>, Vec<Described>)>, EngineError> {
        let client = link.client().await?;
        let reply = client.rpc().list_jobs(pb::ListJobsRequest::default()).await;
        let reply = reply.map_err(|e| guest_failed(&GuestError::from_connect(&e)))?;
        let found: Vec<(String, u64)> = (reply.view().jobs.iter())
            .filter(|job| super::is_bridge(job.job_id) && !job.finished)
            .map(|job| (job.job_id.to_owned(), job.last_sequence))
            .collect();
        let Some((job_id, last)) = found.last().cloned() else { return Ok(None) };
        // From the last event on, not from after it: what was said while nobody listened counts as heard then, and
        // a bridge that waits for a listener goes on.
        let bridge = Self::open(link, contexts, job_id, Begin::Attach { after: last.saturating_sub(1) });
        let hello = bridge.greet(ATTACH_DEADLINE).await?;
        if hello.version != VERSION {
            bridge.give_up("it speaks another version");
            return Ok(None);
        }
        bridge.seq.store(hello.seen, Ordering::SeqCst);
        Ok(Some((bridge, hello.contexts)))
    }

    fn open(link: &Arc<Link>, contexts: &Arc<Contexts>, job_id: String, begin: Begin) -> Arc<Self> {
        let (lines, queue) = mpsc::channel(QUEUE);
        let bridge = Arc::new(Self {
            job_id,
            lines,
            seq: AtomicU64::new(0),
            pending: Mutex::default(),
            hello: Mutex::default(),
            unable: OnceLock::new(),
            refused: OnceLock::new(),
            ready: CancellationToken::new(),
            end: CancellationToken::new(),
            ended: CancellationToken::new(),
        });
        let follower = Follower { bridge: bridge.clone(), link: link.clone(), contexts: contexts.clone() };
        tokio::spawn(follower.live(begin, queue));
        bridge
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.is_cancelled() || self.end.is_cancelled()
    }

    /// Ends it: it did not do its part.
    pub(super) fn give_up(&self, why: &str) {
        if !self.has_ended() {
            tracing::warn!(job = self.job_id, why, "ending the code contexts of a machine");
        }
        self.end.cancel();
    }

    fn pending(&self) -> MutexGuard<'_, HashMap<u64, oneshot::Sender<Answer>>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What callers are told when it ended before it answered.
    fn lost(&self) -> EngineError {
        if let Some((errno, stage)) = self.refused.get() {
            return not_started(*errno, stage);
        }
        match self.unable.get() {
            Some(why) => {
                EngineError::new(ErrorCode::Unsupported, "the machine's template brings no kernel for this language")
                    .because(why.clone())
            }
            None => silent("the bridge ended"),
        }
    }

    async fn greet(&self, deadline: Duration) -> Result<Hello, EngineError> {
        let nonce = uuid::Uuid::new_v4().simple().to_string();
        let (tell, told) = oneshot::channel();
        *self.hello.lock().unwrap_or_else(PoisonError::into_inner) = Some((nonce.clone(), tell));
        let line = Order::Hello { nonce: &nonce }.line(None);
        let asked = async {
            self.lines.send(line).await.map_err(|_| self.lost())?;
            tokio::select! {
                biased;
                hello = told => hello.map_err(|_| self.lost()),
                () = self.ended.cancelled() => Err(self.lost()),
            }
        };
        match tokio::time::timeout(deadline, asked).await {
            Ok(hello) => hello,
            Err(_) => {
                self.give_up("it did not say who is there");
                Err(silent("the bridge did not say who is there"))
            }
        }
    }

    /// Has a command carried out.
    ///
    /// # Errors
    /// When the bridge ends or does not answer; that it refuses is an answer.
    pub(super) async fn call(&self, order: &Order<'_>) -> Result<Answer, EngineError> {
        let deadline = match order {
            Order::Start { .. } | Order::Restart { .. } => START_DEADLINE,
            _ => CALL_DEADLINE,
        };
        let (tell, told) = oneshot::channel();
        let call = async {
            // Numbered and queued in one step: they are carried out in the order of their numbers or not at all.
            let place = self.lines.reserve().await.map_err(|_| self.lost())?;
            {
                let mut pending = self.pending();
                let seq = self.seq.fetch_add(1, Ordering::SeqCst) + 1;
                pending.insert(seq, tell);
                place.send(order.line(Some(seq)));
            }
            tokio::select! {
                biased;
                answer = told => answer.map_err(|_| self.lost()),
                () = self.ended.cancelled() => Err(self.lost()),
            }
        };
        match tokio::time::timeout(deadline, call).await {
            Ok(answer) => answer,
            Err(_) => {
                self.give_up("it did not answer a command");
                Err(silent("the bridge did not answer a command"))
            }
        }
    }
}

struct Follower {
    bridge: Arc<Bridge>,
    link: Arc<Link>,
    contexts: Arc<Contexts>,
}

/// Where the stream of a bridge's output is.
#[derive(Default)]
struct Position {
    /// Last event seen.
    seen: u64,
    /// Where the next byte of its output is; `None` before the first.
    next: Option<u64>,
    lines: Lines,
    /// Whether it said hello: what comes before is not ours to read.
    synced: bool,
}

impl Follower {
    async fn live(self, begin: Begin, queue: mpsc::Receiver<Vec<u8>>) {
        let writer = tokio::spawn(write_lines(self.bridge.clone(), self.link.clone(), queue));
        let over = self.contexts.over.clone();
        let end = self.bridge.end.clone();
        let why = tokio::select! {
            biased;
            // The machine is gone or the service ends: nothing is to be done for anybody here.
            () = over.cancelled() => None,
            () = end.cancelled() => Some("it was given up".to_owned()),
            why = self.follow(begin) => Some(why),
        };
        writer.abort();
        self.bridge.ended.cancel();
        if let Some(why) = why {
            tracing::debug!(job = self.bridge.job_id, why, "a bridge ended");
            self.contexts.bridge_ended(&self.bridge);
            let cleaned = tokio::select! {
                () = over.cancelled() => false,
                done = tokio::time::timeout(END_PATIENCE, self.remove()) => done.is_ok(),
            };
            tracing::debug!(job = self.bridge.job_id, cleaned, "a bridge was removed");
        }
        // Whoever waits for an answer learns that none will come.
        self.bridge.pending().clear();
        *self.bridge.hello.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Ends what may be left of it in the guest, and lets the guest forget it.
    async fn remove(&self) {
        let Ok(client) = self.link.client().await else { return };
        let kill =
            pb::SignalJobRequest { job_id: self.bridge.job_id.clone(), signal: libc::SIGKILL, ..Default::default() };
        let _ = client.rpc().signal_job(kill).await;
        for _ in 0..20 {
            let forget = pb::ForgetJobRequest { job_id: self.bridge.job_id.clone(), ..Default::default() };
            match client.rpc().forget_job(forget).await {
                Err(e) if GuestError::from_connect(&e).code == connectrpc::ErrorCode::FailedPrecondition => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                _ => return,
            }
        }
    }

    /// Follows until its end; says why it ended.
    async fn follow(&self, begin: Begin) -> String {
        let mut at = Position::default();
        if let Begin::Attach { after } = begin {
            at.seen = after;
        }
        let mut losses = 0;
        loop {
            let (client, mut stream) = match self.stream(&begin, at.seen).await {
                Ok(both) => both,
                Err(e) => {
                    losses += 1;
                    let why = e.internal().unwrap_or(e.message()).to_owned();
                    if losses > LINK_LOSSES_MAX || e.code() != ErrorCode::GuestUnavailable {
                        return why;
                    }
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            self.bridge.ready.cancel();
            loop {
                match stream.message::<pb::JobEvent>().await {
                    Ok(Some(message)) => {
                        losses = 0;
                        match self.take(&mut at, message.view()) {
                            Ok(None) => {}
                            Ok(Some(end)) => return end,
                            Err(why) => {
                                self.bridge.give_up(why);
                                return why.to_owned();
                            }
                        }
                    }
                    Ok(None) => return "its events ended without its exit".to_owned(),
                    Err(e) => {
                        let fault = GuestError::from_connect(&e);
                        losses += 1;
                        if losses > LINK_LOSSES_MAX || !link_lost(&client, &fault).await {
                            return fault.to_string();
                        }
                        break;
                    }
                }
            }
        }
    }

    async fn stream(&self, begin: &Begin, seen: u64) -> Result<(GuestClient, JobStream), EngineError> {
        let client = self.link.client().await?;
        let stream = match begin {
            // An id that exists is followed, not started again.
            Begin::Start(start) if seen == 0 => client.streams().run_job(start.as_ref().clone()).await,
            _ => {
                let request = pb::FollowJobRequest {
                    job_id: self.bridge.job_id.clone(),
                    after_sequence: seen,
                    ..Default::default()
                };
                client.streams().follow_job(request).await
            }
        };
        let stream = match stream {
            Ok(stream) => stream,
            Err(e) => {
                let fault = GuestError::from_connect(&e);
                let lost = link_lost(&client, &fault).await;
                let e = guest_failed(&fault);
                // Anything but a lost link will not be better the next time.
                return Err(if lost {
                    e
                } else {
                    EngineError::new(ErrorCode::Internal, "refused").because(fault.to_string())
                });
            }
        };
        Ok((client, stream))
    }

    /// Takes one event; says why the bridge ended when it is the last.
    fn take(&self, at: &mut Position, view: &pb::JobEventView<'_>) -> Result<Option<String>, &'static str> {
        if view.sequence <= at.seen {
            return Err("events out of order");
        }
        at.seen = view.sequence;
        match &view.event {
            Some(Event::Output(output)) if output.stream.to_i32() == 1 => {
                if at.next.is_some_and(|next| next != output.offset) {
                    return Err("output out of order");
                }
                at.next = Some(output.offset.saturating_add(output.data.len() as u64));
                let Position { lines, synced, .. } = at;
                lines.take(output.data, |line| self.line(line, synced))?;
                Ok(None)
            }
            Some(Event::Gap(gap)) if gap.stream.to_i32() == 1 => {
                if at.synced {
                    return Err("output is missing");
                }
                // Said while no service listened. What follows begins in the middle of a line.
                at.next = Some(gap.offset.saturating_add(gap.length));
                Ok(None)
            }
            Some(Event::Exit(exit)) => Ok(Some(format!("it exited: code {} signal {}", exit.code, exit.signal))),
            Some(Event::NotStarted(failed)) => {
                if failed.stage == "exec" {
                    let _ = self.bridge.unable.set(format!("{PYTHON} could not be executed: {}", failed.errno));
                }
                // The template names somebody who is not there.
                if matches!(failed.stage, "user" | "group") {
                    let _ = self.bridge.refused.set((failed.errno, failed.stage.to_owned()));
                }
                Ok(Some(format!("it was not started: {} {}", failed.stage, failed.errno)))
            }
            Some(Event::Started(_) | Event::Output(_) | Event::Gap(_)) | None => Ok(None),
        }
    }

    fn line(&self, line: &[u8], synced: &mut bool) -> Result<(), &'static str> {
        let said = match read(line) {
            Ok(said) => said,
            Err(why) if *synced => return Err(why),
            Err(_) => return Ok(()),
        };
        match said {
            Said::Hello { version, nonce, seen, contexts } => {
                let mut waiting = self.bridge.hello.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some((_, tell)) = waiting.take_if(|(asked, _)| *asked == nonce) {
                    *synced = true;
                    let _ = tell.send(Hello { version, seen, contexts });
                }
                Ok(())
            }
            Said::Unable { why } => {
                let _ = self.bridge.unable.set(why);
                Ok(())
            }
            _ if !*synced => Ok(()),
            Said::Reply { seq, refusal } => {
                if let Some(tell) = self.bridge.pending().remove(&seq) {
                    let _ = tell.send(refusal);
                }
                Ok(())
            }
            Said::Dead { id, how } => {
                self.contexts.died(&id, how);
                Ok(())
            }
            Said::Cell { id, cell, said } => self.contexts.heard(&id, &cell, said),
        }
    }
}

/// Writes commands, one whole line after the other.
async fn write_lines(bridge: Arc<Bridge>, link: Arc<Link>, mut queue: mpsc::Receiver<Vec<u8>>) {
    bridge.ready.cancelled().await;
    while let Some(line) = queue.recv().await {
        if let Err(e) = write_line(&bridge.job_id, &link, line).await {
            let why = e.internal().unwrap_or(e.message()).to_owned();
            // A bridge that has just ended is reported by its exit, which says more.
            tokio::time::sleep(END_PATIENCE).await;
            bridge.give_up(&why);
            return;
        }
    }
}

/// Writes a line. Where the link broke and it is not known what arrived, the line is ended and written again: the
/// bridge reads no half line and carries out no number twice.
async fn write_line(job_id: &str, link: &Arc<Link>, line: Vec<u8>) -> Result<(), EngineError> {
    let mut losses = 0;
    let mut again = false;
    'line: loop {
        let client = link.client().await?;
        let pieces = again.then_some(&b"\n"[..]).into_iter().chain(line.chunks(WRITE));
        for piece in pieces {
            let request =
                pb::WriteJobStdinRequest { job_id: job_id.to_owned(), data: piece.to_vec(), ..Default::default() };
            if let Err(e) = client.rpc().write_job_stdin(request).await {
                let fault = GuestError::from_connect(&e);
                losses += 1;
                if losses > LINK_LOSSES_MAX || !link_lost(&client, &fault).await {
                    return Err(guest_failed(&fault));
                }
                again = true;
                continue 'line;
            }
        }
        return Ok(());
    }
}
