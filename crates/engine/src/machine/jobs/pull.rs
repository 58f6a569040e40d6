//! The task of one running job: from the guest to the log, then the acknowledgement.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use connectrpc::ErrorCode as Code;
use futures::FutureExt as _;
use mainbrella_guest_protocol::host::JobStream;
use mainbrella_guest_protocol::pb::__buffa::view::oneof::job_event::Event as Told;
use mainbrella_guest_protocol::{GuestClient, GuestError, pb};
use mainbrella_job_log::{Cause, Entry, Event, Exit, Stream};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::job::{Job, is_full};
use crate::error::EngineError;
use crate::machine::command::{guest_failed, link_lost, not_started};
use crate::machine::gate::Pass;
use crate::machine::handle::Shared;

/// Bytes that are taken from the guest before they are written together.
const BATCH_BYTES: usize = 256 * 1024;
/// Events that are taken from the guest before they are written together.
const BATCH_EVENTS: usize = 256;
/// Writes above this size are not made on a thread that serves others.
const INLINE_BYTES: usize = 32 * 1024;
/// What the host holds without having said so: above it an acknowledgement is sent at once, else after [`ACK_QUIET`].
const ACK_BYTES: usize = 256 * 1024;
const ACK_QUIET: Duration = Duration::from_millis(50);
/// Pause before a guest that is out of reach is tried again; doubles up to [`RETRY_MAX`].
const RETRY_FIRST: Duration = Duration::from_millis(20);
const RETRY_MAX: Duration = Duration::from_secs(2);
/// Pause before a log that could not be written is written again.
const DISK_RETRY: Duration = Duration::from_millis(500);
/// How often in a row a living guest may refuse to be followed.
const REFUSALS_MAX: u32 = 5;

/// What a job holds of its machine while it runs.
pub(crate) struct Holding {
    pub(crate) _pass: Pass,
    pub(crate) _place: OwnedSemaphorePermit,
}

/// How a pull ended.
enum Pulled {
    /// The exit is in the log.
    Exit,
    /// There is no process; why.
    Refused(EngineError),
    /// The guest does not know the job.
    Unknown,
    /// What the guest said cannot be true.
    Liar(&'static str),
    /// The link broke, or the guest refused for now.
    Again { refused: Option<GuestError> },
}

/// Pulls `job` to its end, or until the machine or the service ends. `start`: the request that starts it.
pub(crate) fn spawn(shared: Arc<Shared>, job: Arc<Job>, start: Option<pb::StartJobRequest>, holding: Holding) {
    tokio::spawn(async move {
        tokio::select! {
            biased;
            // The actor ends the logs of a machine that is over; one that is left to the next service is not ended.
            () = shared.gone.cancelled() => {}
            () = shared.detached.cancelled() => {}
            () = pull(&shared, &job, start, holding) => {}
        }
        job.log.rest();
    });
}

async fn pull(shared: &Shared, job: &Arc<Job>, start: Option<pb::StartJobRequest>, holding: Holding) {
    let mut pause = RETRY_FIRST;
    let mut refusals = 0;
    loop {
        let Some(link) = shared.link.get() else { return };
        let pulled = match link.client().await {
            Ok(client) => {
                let before = job.log.position().cursor;
                let pulled = attach(shared, job, &client, start.as_ref()).await;
                if job.log.position().cursor > before {
                    (pause, refusals) = (RETRY_FIRST, 0);
                }
                pulled
            }
            Err(e) => {
                debug!(job = job.id, internal = e.internal().unwrap_or(""), "a job's guest is out of reach");
                job.missed();
                Pulled::Again { refused: None }
            }
        };
        match pulled {
            Pulled::Exit => break,
            Pulled::Refused(error) => {
                job.refuse(&error);
                shared.shelf.let_go(job, shared.clock.now());
                break;
            }
            Pulled::Unknown => {
                job.end(Cause::Lost, shared.clock.now());
                return;
            }
            Pulled::Liar(why) => {
                warn!(job = job.id, why, "a guest says of a job what cannot be true");
                job.disbelieve(why);
                job.end(Cause::Lost, shared.clock.now());
                break;
            }
            Pulled::Again { refused } => {
                if let Some(fault) = refused {
                    refusals += 1;
                    if refusals > REFUSALS_MAX {
                        warn!(job = job.id, error = %fault, "a guest refuses to let a job be followed");
                        job.disbelieve("the guest refuses to let it be followed");
                        job.end(Cause::Lost, shared.clock.now());
                        break;
                    }
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(RETRY_MAX);
            }
        }
    }
    // Nobody is busy with it any more; only the guest has still to let go of it.
    drop(holding);
    job.log.rest();
    forget(shared, job).await;
}

/// Starts or follows the job on one connection.
async fn attach(shared: &Shared, job: &Arc<Job>, client: &GuestClient, start: Option<&pb::StartJobRequest>) -> Pulled {
    let position = job.log.position();
    let begun = position.cursor > 0;
    let stream = match start {
        Some(request) if !begun => client.streams().run_job(request.clone()).await,
        _ => {
            let after_sequence = position.cursor;
            let request = pb::FollowJobRequest { job_id: job.id.clone(), after_sequence, ..Default::default() };
            client.streams().follow_job(request).await
        }
    };
    match stream {
        Ok(stream) => carry(shared, job, client, stream).await,
        Err(e) => {
            let fault = GuestError::from_connect(&e);
            if link_lost(client, &fault).await {
                return Pulled::Again { refused: None };
            }
            match fault.code {
                Code::NotFound if fault.errno == 0 => Pulled::Unknown,
                // It holds less than we do: it is not the guest that ran this job.
                Code::OutOfRange => Pulled::Unknown,
                Code::InvalidArgument | Code::ResourceExhausted if !begun && start.is_some() => {
                    Pulled::Refused(guest_failed(&fault))
                }
                _ => Pulled::Again { refused: Some(fault) },
            }
        }
    }
}

/// Carries events from one stream into the log until it ends.
async fn carry(shared: &Shared, job: &Arc<Job>, client: &GuestClient, mut stream: JobStream) -> Pulled {
    let mut last = job.log.position().cursor;
    // What was said on the last connection may not have arrived; without it the process may wait for ever.
    let mut unacked = usize::from(last > 0);
    let mut ack_at = Instant::now();
    let mut acking: Option<futures::future::BoxFuture<'static, bool>> = None;
    loop {
        let first = tokio::select! {
            biased;
            message = stream.message::<pb::JobEvent>() => message,
            taken = async { match acking.as_mut() { Some(ack) => ack.await, None => std::future::pending().await } } => {
                acking = None;
                if !taken {
                    // The link is breaking, or the guest is slow: it is said again.
                    (unacked, ack_at) = (unacked.max(1), Instant::now() + ACK_QUIET);
                }
                continue;
            }
            () = tokio::time::sleep_until(ack_at), if unacked > 0 && acking.is_none() => {
                (unacked, acking) = (0, Some(ack(client.clone(), job.id.clone(), last)));
                // A job that says nothing holds no file open.
                job.log.rest();
                continue;
            }
        };
        let mut batch = Vec::new();
        let mut size = 0;
        let mut next = Some(first);
        let mut end = None;
        // What is there already is written together.
        while let Some(message) = next.take() {
            match message {
                Ok(Some(message)) => match read(message.view(), last, shared.clock.now().0) {
                    Ok(Some(event)) => {
                        last = event.cursor;
                        if let Entry::Output { data, .. } = &event.entry {
                            size += data.len();
                        }
                        let over = matches!(event.entry, Entry::Exit(_));
                        batch.push(event);
                        if over {
                            end = Some(Pulled::Exit);
                        } else if size < BATCH_BYTES && batch.len() < BATCH_EVENTS {
                            next = stream.message::<pb::JobEvent>().now_or_never();
                        }
                    }
                    Ok(None) => {}
                    Err(Untrue::NotStarted(error)) => end = Some(Pulled::Refused(error)),
                    Err(Untrue::Lie(why)) => end = Some(Pulled::Liar(why)),
                },
                Ok(None) => end = Some(Pulled::Liar("its events ended without an exit")),
                Err(e) => {
                    let fault = GuestError::from_connect(&e);
                    let lost = link_lost(client, &fault).await;
                    end = Some(Pulled::Again { refused: (!lost).then_some(fault) });
                }
            }
        }
        if !batch.is_empty() {
            unacked += size + batch.len() * 64;
            if let Err(why) = write(shared, job, batch).await {
                return Pulled::Liar(why);
            }
            job.publish();
            ack_at = Instant::now() + ACK_QUIET;
            if unacked >= ACK_BYTES && acking.is_none() && end.is_none() {
                (unacked, acking) = (0, Some(ack(client.clone(), job.id.clone(), last)));
            }
        }
        if let Some(end) = end {
            return end;
        }
    }
}

/// Why an event is none for the log.
enum Untrue {
    /// There never was a process.
    NotStarted(EngineError),
    /// It cannot be.
    Lie(&'static str),
}

/// Checks an event of the guest. `None`: it is of a kind this version does not know.
fn read(view: &pb::JobEventView<'_>, last: u64, time_ms: i64) -> Result<Option<Event>, Untrue> {
    if Some(view.sequence) != last.checked_add(1) {
        return Err(Untrue::Lie("its events are not one after the other"));
    }
    let stream = |number: i32| match number {
        1 => Ok(Stream::Stdout),
        2 => Ok(Stream::Stderr),
        _ => Err(Untrue::Lie("output of an unknown stream")),
    };
    let entry = match &view.event {
        Some(Told::Started(started)) if last == 0 => Entry::Started { pid: started.pid },
        Some(Told::NotStarted(failed)) if last == 0 => {
            return Err(Untrue::NotStarted(not_started(failed.errno, failed.stage)));
        }
        Some(Told::Output(output)) if last > 0 => Entry::Output {
            stream: stream(output.stream.to_i32())?,
            offset: output.offset,
            data: Bytes::copy_from_slice(output.data),
        },
        Some(Told::Exit(exit)) if last > 0 => {
            let (cause, code, signal) = match exit.cause.to_i32() {
                1 => (Cause::Exited, Some(exit.code), None),
                2 => (Cause::Signalled, None, Some(exit.signal)),
                3 => (Cause::TimedOut, None, (exit.signal > 0).then_some(exit.signal)),
                4 if exit.signal > 0 => (Cause::Cancelled, None, Some(exit.signal)),
                4 => (Cause::Cancelled, Some(exit.code), None),
                _ => return Err(Untrue::Lie("an exit without a cause")),
            };
            Entry::Exit(Exit {
                cause,
                code,
                signal,
                stdout_bytes: exit.stdout_bytes,
                stderr_bytes: exit.stderr_bytes,
                duration_ms: exit.duration_us / 1000,
            })
        }
        _ => return Err(Untrue::Lie("an event that cannot come here")),
    };
    Ok(Some(Event { cursor: view.sequence, time_ms, entry }))
}

/// Appends to the log, however long the disk takes to have room: until then the guest is not told, and waits.
async fn write(shared: &Shared, job: &Arc<Job>, batch: Vec<Event>) -> Result<(), &'static str> {
    let batch = Arc::new(batch);
    let size: usize =
        batch.iter().map(|e| if let Entry::Output { data, .. } = &e.entry { data.len() } else { 0 }).sum();
    let mut told = false;
    loop {
        let before = job.log.position().disk_bytes;
        let tight = shared.shelf.is_short();
        let written = if size <= INLINE_BYTES {
            job.log.append(&batch, tight)
        } else {
            let (job, batch) = (Arc::clone(job), Arc::clone(&batch));
            let task = tokio::task::spawn_blocking(move || job.log.append(&batch, tight));
            task.await.unwrap_or_else(|e| Err(std::io::Error::other(e)))
        };
        match written {
            Ok(()) => {
                shared.shelf.grew(before, job.log.position().disk_bytes);
                if shared.shelf.is_short() {
                    shared.shelf.make_room(shared.clock.now());
                }
                return Ok(());
            }
            Err(e) if e.kind() == std::io::ErrorKind::InvalidInput => {
                debug!(job = job.id, error = %e, "events that do not follow");
                // Those before the first that does not are true as far as anybody knows.
                for event in batch.iter() {
                    if job.log.append(std::slice::from_ref(event), tight).is_err() {
                        break;
                    }
                }
                job.publish();
                return Err("its events do not follow one another");
            }
            Err(e) if is_full(&e) && job.spill() => {
                warn!(job = job.id, error = %e, "the disk is full; a command's output is kept in memory");
            }
            Err(e) => {
                if !std::mem::replace(&mut told, true) {
                    warn!(job = job.id, error = %e, "a job's output cannot be written; the job waits");
                }
                tokio::time::sleep(DISK_RETRY).await;
            }
        }
    }
}

/// Tells the guest what it need not keep. Gives whether it knows.
fn ack(client: GuestClient, job_id: String, sequence: u64) -> futures::future::BoxFuture<'static, bool> {
    async move {
        let request = pb::AckJobRequest { job_id, sequence, ..Default::default() };
        client.rpc().ack_job(request).await.is_ok()
    }
    .boxed()
}

/// Lets the guest forget a job whose end is held here, however often that has to be said.
async fn forget(shared: &Shared, job: &Job) {
    let mut pause = RETRY_FIRST;
    loop {
        let Some(link) = shared.link.get() else { return };
        if let Ok(client) = link.client().await {
            let request = pb::ForgetJobRequest { job_id: job.id.clone(), ..Default::default() };
            match client.rpc().forget_job(request).await {
                Ok(_) => return,
                Err(e) => match GuestError::from_connect(&e).code {
                    Code::NotFound => return,
                    // It still runs there, whatever was said of it: it is not wanted any more.
                    Code::FailedPrecondition => {
                        let kill = pb::SignalJobRequest { job_id: job.id.clone(), cancel: true, ..Default::default() };
                        let _ = client.rpc().signal_job(kill).await;
                    }
                    _ => {}
                },
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RETRY_MAX);
    }
}

/// Any bytes as an event: none, or one that follows.
#[cfg(any(test, fuzzing))]
pub(crate) fn any_event(bytes: &[u8]) {
    use buffa::MessageView as _;
    for last in (0..5).chain([u64::MAX]) {
        if let Ok(view) = pb::JobEventView::decode_view(bytes)
            && let Ok(Some(event)) = read(&view, last, 7)
        {
            assert_eq!(event.cursor, last + 1);
            assert_eq!(matches!(event.entry, Entry::Started { .. }), last == 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use buffa::{Message as _, MessageView as _};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn arbitrary_bytes_are_no_event_or_one_that_follows(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            any_event(&bytes);
        }

        #[test]
        fn any_event_is_read_as_it_was_meant_or_refused(
            sequence in 0u64..4, last in 0u64..4, kind in 0u8..6, stream in -1i32..5, cause in -1i32..7,
            numbers in any::<[u64; 3]>(), code in any::<i32>(), data in prop::collection::vec(any::<u8>(), 0..50),
        ) {
            use pb::__buffa::oneof::job_event::Event as Own;
            let event: Option<Own> = match kind {
                0 => Some(pb::JobStarted { pid: 3, ..Default::default() }.into()),
                1 => Some(pb::JobOutput { stream: stream.into(), offset: numbers[0], data, ..Default::default() }.into()),
                2 => Some(pb::JobGap { offset: numbers[0], length: numbers[1], ..Default::default() }.into()),
                3 => Some(pb::JobExit { cause: cause.into(), code, signal: code, stdout_bytes: numbers[0],
                        stderr_bytes: numbers[1], duration_us: numbers[2], ..Default::default() }.into()),
                4 => Some(pb::JobNotStarted { errno: code, stage: "exec".into(), ..Default::default() }.into()),
                _ => None,
            };
            let bytes = pb::JobEvent { sequence, event, ..Default::default() }.encode_to_vec();
            let view = pb::JobEventView::decode_view(&bytes).expect("what was encoded");
            let follows = sequence == last + 1;
            match read(&view, last, 0) {
                Ok(Some(event)) => prop_assert!(follows && event.cursor == sequence && (kind == 0) == (last == 0)),
                Ok(None) => {}
                Err(Untrue::NotStarted(e)) => prop_assert!(follows && kind == 4 && last == 0 && !e.message().is_empty()),
                Err(Untrue::Lie(_)) => prop_assert!(!follows || (kind == 0) != (last == 0) || stream != 1 || cause != 1 || kind > 1),
            }
        }
    }
}
