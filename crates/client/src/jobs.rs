//! Managed jobs: start, look, wait, act, follow.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;
use reqwest::header::ACCEPT;
use reqwest::{Method, RequestBuilder, Response};

use mainbrella_api::{
    CancelJob, Job, JobEvent, JobEventKind, JobEvents, JobList, ProcessList, SendSignal, SignalName, StartJob,
    StdinAccepted, TerminalSize, headers,
};

use crate::error::ClientError;
use crate::machines::MachineRef;
use crate::transport::{Client, with_json};

/// How long a stream of events that broke is taken up again before that is given up.
const RECONNECT: Duration = Duration::from_secs(60);
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// The service gives a sign of life every ten seconds; after so long without one the connection is given up.
const SILENCE_MAX: Duration = Duration::from_secs(35);
/// Longest event on its way, bytes: 256 KiB of output as base64, and some.
const EVENT_MAX: usize = 1024 * 1024;

/// A started job.
#[derive(Clone, Debug)]
pub struct StartedJob {
    /// The job.
    pub job: Job,
    /// An earlier start with this key had started it.
    pub replayed: bool,
}

impl Client {
    fn job_url(&self, machine: &MachineRef, verb: &[&str], query: &[(&str, &str)]) -> url::Url {
        let segments: Vec<&str> = ["v1", "machines", &machine.id].into_iter().chain(verb.iter().copied()).collect();
        self.endpoint(&segments, [("createdAt", machine.created_at.as_str())].into_iter().chain(query.iter().copied()))
    }

    /// Starts a job, once.
    ///
    /// # Errors
    /// [`ClientError`]. When it is ambiguous, send the same body with the same key again.
    pub async fn start_job(
        &self,
        machine: &MachineRef,
        body: &StartJob,
        idempotency_key: Option<&str>,
    ) -> Result<StartedJob, ClientError> {
        let mut request = self.request(Method::POST, self.bound(machine, &["jobs"])).timeout(self.answer_timeout());
        if let Some(key) = idempotency_key {
            request = request.header(headers::IDEMPOTENCY_KEY, key);
        }
        let response = self.send(with_json(request, body)).await?;
        let replayed = response.headers().get(headers::IDEMPOTENCY_REPLAYED).is_some_and(|v| v == "true");
        Ok(StartedJob { job: self.parse(response).await?, replayed })
    }

    /// One page of jobs, newest first. `cursor`: the `next_cursor` of the page before.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn jobs(&self, machine: &MachineRef, limit: u32, cursor: Option<&str>) -> Result<JobList, ClientError> {
        let limit = limit.to_string();
        let query: Vec<_> = [("limit", limit.as_str())].into_iter().chain(cursor.map(|c| ("cursor", c))).collect();
        self.json(self.request(Method::GET, self.job_url(machine, &["jobs"], &query)), Duration::ZERO).await
    }

    /// A job as it is now.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn job(&self, machine: &MachineRef, job: &str) -> Result<Job, ClientError> {
        self.json(self.request(Method::GET, self.bound(machine, &["jobs", job])), Duration::ZERO).await
    }

    /// A job as it is when it has ended, or after `wait` (at most a minute).
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn wait_job(&self, machine: &MachineRef, job: &str, wait: Duration) -> Result<Job, ClientError> {
        let ms = wait.as_millis().to_string();
        let url = self.job_url(machine, &["jobs", job, "wait"], &[("timeoutMs", &ms)]);
        self.json(self.request(Method::GET, url), wait).await
    }

    /// Asks a job to end, with `grace` between TERM and KILL.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn cancel_job(
        &self,
        machine: &MachineRef,
        job: &str,
        grace: Option<Duration>,
    ) -> Result<Job, ClientError> {
        let grace_ms = grace.map(|g| u64::try_from(g.as_millis()).unwrap_or(u64::MAX));
        let request = self.request(Method::POST, self.bound(machine, &["jobs", job, "cancel"]));
        self.json(with_json(request, &CancelJob { grace_ms }), Duration::ZERO).await
    }

    /// Sends a signal to a job's process group.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn signal_job(&self, machine: &MachineRef, job: &str, signal: SignalName) -> Result<Job, ClientError> {
        let request = self.request(Method::POST, self.bound(machine, &["jobs", job, "signal"]));
        self.json(with_json(request, &SendSignal { signal }), Duration::ZERO).await
    }

    /// Changes the size of a job's terminal.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn resize_job(&self, machine: &MachineRef, job: &str, size: TerminalSize) -> Result<Job, ClientError> {
        let request = self.request(Method::POST, self.bound(machine, &["jobs", job, "resize"]));
        self.json(with_json(request, &size), Duration::ZERO).await
    }

    /// Writes to a job's input; `eof`: nothing more will come. Never repeated.
    ///
    /// # Errors
    /// [`ClientError`]; after an ambiguous one the input may have arrived and counts as accepted.
    pub async fn write_job_stdin(
        &self,
        machine: &MachineRef,
        job: &str,
        data: impl Into<Bytes>,
        eof: bool,
    ) -> Result<StdinAccepted, ClientError> {
        let url = self.job_url(machine, &["jobs", job, "stdin"], &[("eof", if eof { "true" } else { "false" })]);
        let request = self.request(Method::POST, url).header("content-type", "application/octet-stream");
        self.json(request.body(data.into()), Duration::ZERO).await
    }

    /// Forgets a job that has ended.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn forget_job(&self, machine: &MachineRef, job: &str) -> Result<(), ClientError> {
        let request = self.request(Method::DELETE, self.bound(machine, &["jobs", job]));
        self.send(request.timeout(self.answer_timeout())).await.map(|_| ())
    }

    /// One page of the events of a job after `cursor`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn job_events(
        &self,
        machine: &MachineRef,
        job: &str,
        cursor: u64,
        limit: u32,
    ) -> Result<JobEvents, ClientError> {
        let (cursor, limit) = (cursor.to_string(), limit.to_string());
        let url = self.job_url(machine, &["jobs", job, "events"], &[("cursor", &cursor), ("limit", &limit)]);
        self.json(self.request(Method::GET, url), Duration::ZERO).await
    }

    /// Follows the events of a job after `cursor` until its exit. A connection that breaks is made anew from where it
    /// broke: nothing is lost and nothing comes twice.
    #[must_use]
    pub fn follow_job(&self, machine: &MachineRef, job: &str, cursor: u64) -> JobStream {
        JobStream {
            client: self.clone(),
            machine: machine.clone(),
            job: job.to_owned(),
            cursor,
            response: None,
            held: Vec::new(),
            ready: VecDeque::new(),
            over: false,
        }
    }

    /// The processes of a machine.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn processes(&self, machine: &MachineRef) -> Result<ProcessList, ClientError> {
        self.json(self.request(Method::GET, self.bound(machine, &["processes"])), Duration::ZERO).await
    }

    /// Sends a signal to one process of a machine.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn signal_process(&self, machine: &MachineRef, pid: u32, signal: SignalName) -> Result<(), ClientError> {
        let request = self.request(Method::POST, self.bound(machine, &["processes", &pid.to_string(), "signal"]));
        let request = with_json(request, &SendSignal { signal }).timeout(self.answer_timeout());
        self.send(request).await.map(|_| ())
    }

    pub(crate) fn events_request(&self, machine: &MachineRef, job: &str, cursor: u64) -> RequestBuilder {
        let cursor = cursor.to_string();
        self.request(Method::GET, self.job_url(machine, &["jobs", job, "events"], &[("cursor", &cursor)]))
    }
}

/// The events of a job as they come. Holds little more than one event.
#[derive(Debug)]
pub struct JobStream {
    client: Client,
    machine: MachineRef,
    job: String,
    cursor: u64,
    response: Option<Response>,
    held: Vec<u8>,
    ready: VecDeque<JobEvent>,
    over: bool,
}

impl JobStream {
    /// Cursor of the last event given.
    #[must_use]
    pub fn cursor(&self) -> u64 {
        self.cursor
    }

    /// The next event; `None` after the exit.
    ///
    /// # Errors
    /// [`ClientError`] when the service refuses, or cannot be reached again within a minute. A later call tries again.
    pub async fn next(&mut self) -> Result<Option<JobEvent>, ClientError> {
        let (mut since, mut pause) = (None, PAUSE_FIRST);
        loop {
            if let Some(event) = self.ready.pop_front() {
                self.cursor = event.cursor;
                self.over = matches!(event.kind, JobEventKind::Exit { .. });
                return Ok(Some(event));
            }
            if self.over {
                return Ok(None);
            }
            let error = match self.more().await {
                Ok(()) => {
                    (since, pause) = (None, PAUSE_FIRST);
                    continue;
                }
                Err(e) => e,
            };
            (self.response, self.held) = (None, Vec::new());
            let begun = *since.get_or_insert_with(Instant::now);
            let again = error.is_retryable() || matches!(error, ClientError::Lost { .. } | ClientError::StoppedWaiting);
            if !again || begun.elapsed() > RECONNECT {
                return Err(error);
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Reads on, connecting where there is no connection.
    async fn more(&mut self) -> Result<(), ClientError> {
        let response = match &mut self.response {
            Some(response) => response,
            none => {
                let request = self.client.events_request(&self.machine, &self.job, self.cursor);
                let request = request.header(ACCEPT, "text/event-stream");
                let wait = tokio::time::timeout(self.client.answer_timeout(), self.client.send(request));
                none.insert(wait.await.map_err(|_| ClientError::StoppedWaiting)??)
            }
        };
        let chunk =
            tokio::time::timeout(SILENCE_MAX, response.chunk()).await.map_err(|_| ClientError::StoppedWaiting)?;
        match chunk.map_err(|e| self.client.failed(e))? {
            Some(chunk) => self.held.extend_from_slice(&chunk),
            // The service ended it without an exit: it is going down.
            None => return Err(ClientError::StoppedWaiting),
        }
        let mut taken = 0;
        while let Some(length) = self.held[taken..].windows(2).position(|w| w == b"\n\n") {
            let block = &self.held[taken..taken + length];
            taken += length + 2;
            for line in block.split(|b| *b == b'\n') {
                if let Some(data) = line.strip_prefix(b"data: ") {
                    let event: JobEvent = serde_json::from_slice(data)
                        .map_err(|_| ClientError::Malformed("an event does not have the expected fields"))?;
                    let last = self.ready.back().map_or(self.cursor, |e| e.cursor);
                    if event.cursor > last {
                        self.ready.push_back(event);
                    }
                }
            }
        }
        self.held.drain(..taken);
        if self.held.len() > EVENT_MAX {
            return Err(ClientError::Malformed("an event is too long"));
        }
        Ok(())
    }
}
