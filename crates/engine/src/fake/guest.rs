//! The scripted guest: a few commands, files in memory, nothing of the host touched.
//!
//! Commands (after `/bin/sh -lc`, or as argv): `true`, `exit N`, `echo TEXT`, `sleep MS`, `flood N` (N bytes of
//! output), `count N MS` (numbered lines, one every MS milliseconds), `cat` (input to output), `printenv NAME`, `hang`
//! (until its time-out), `size` (the terminal's size now and after each change, until its end). Anything else cannot be
//! executed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use connectrpc::{
    ConnectError, Encodable, InboundStream, RequestContext, Response, Router, ServiceRequest, ServiceResult,
    ServiceStream,
};
use mainbrella_guest_protocol::{PROTOCOL_VERSION, fault, pb};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::contexts::Bridges;
use super::files::FakeFiles;
use super::job::{FakeJob, Play};
use super::ports::FakePorts;
use crate::machine::contexts::is_bridge;

/// Faults of the guest side, on while they are set.
#[derive(Debug, Default)]
pub struct GuestFaults {
    /// `Configure` reports that entropy could not be put right.
    pub configure: AtomicBool,
    /// `Configure` never answers.
    pub mute: AtomicBool,
    /// So many of the next `Hello`s are never answered.
    pub lost_hellos: AtomicU32,
    /// Output is sent twice, as a hostile guest might.
    pub repeat_output: AtomicBool,
    /// Every write meets a full disk.
    pub disk_full: AtomicBool,
    /// File calls do not answer.
    pub mute_files: AtomicBool,
    /// Listings hold a name that leads elsewhere.
    pub hostile_listing: AtomicBool,
    /// Trees break off at their end.
    pub broken_tree: AtomicBool,
    /// Its clock stands still: no command is ended at its time limit.
    pub no_time_outs: AtomicBool,
    /// Its processes are frozen, until it is configured.
    pub frozen: AtomicBool,
    /// It believes no authority it is told to.
    pub no_trust: AtomicBool,
    /// Processes that have registered for a reseed.
    pub registered: AtomicU32,
    /// As many of them do not answer.
    pub unanswered: AtomicU32,
    /// The machine brings no kernel for code contexts.
    pub no_kernel: AtomicBool,
}

#[derive(Clone, Default)]
struct Inside {
    generation: String,
    hostname: String,
    env: HashMap<String, String>,
    jobs: HashMap<String, Arc<FakeJob>>,
}

/// One guest. It lives as long as somebody holds it, paused or not.
pub(super) struct FakeGuest {
    faults: Arc<GuestFaults>,
    inside: Arc<Mutex<Inside>>,
    files: FakeFiles,
    bridges: Bridges,
    ports: FakePorts,
    end: CancellationToken,
    /// Where its processes live: a service that ends does not take them along.
    home: Handle,
}

/// The service as a router.
pub(super) fn router(guest: Arc<FakeGuest>) -> Router {
    Router::new().add_service(guest)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

impl FakeGuest {
    /// A guest that was just booted.
    pub(super) fn new(faults: Arc<GuestFaults>, ports: FakePorts, home: Handle) -> Self {
        let files = FakeFiles::new(Arc::clone(&faults));
        let (inside, end, bridges) = (Arc::default(), CancellationToken::new(), Bridges::default());
        Self { faults, inside, files, bridges, ports, end, home }
    }

    /// A guest that begins as this one is now: with its files, names and environment, and its list of jobs. The jobs
    /// themselves are played once; what either guest does to one that still runs, the other sees.
    pub(super) fn forked(&self) -> Self {
        let inside = Arc::new(Mutex::new(self.lock().clone()));
        let (faults, ports, home) = (Arc::clone(&self.faults), self.ports.clone(), self.home.clone());
        let (files, bridges) = (self.files.forked(), self.bridges.clone());
        Self { faults, inside, files, bridges, ports, end: CancellationToken::new(), home }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn job(&self, id: &str) -> Result<Arc<FakeJob>, ConnectError> {
        self.lock().jobs.get(id).cloned().ok_or_else(|| ConnectError::not_found("no such job"))
    }
}

impl Drop for FakeGuest {
    fn drop(&mut self) {
        self.end.cancel();
    }
}

// The replies borrow nothing of the guest, which is less than the trait allows.
#[allow(refining_impl_trait_internal)]
impl pb::Guest for FakeGuest {
    async fn hello(
        &self,
        _: RequestContext,
        _: ServiceRequest<'_, pb::HelloRequest>,
    ) -> ServiceResult<impl Encodable<pb::HelloResponse> + Send + use<>> {
        let fewer = |left: u32| left.checked_sub(1);
        if self.faults.lost_hellos.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fewer).is_ok() {
            std::future::pending::<()>().await;
        }
        let inside = self.lock();
        Response::ok(pb::HelloResponse {
            protocol_version: PROTOCOL_VERSION,
            agent_version: "fake".into(),
            generation: inside.generation.clone(),
            frozen: self.faults.frozen.load(Ordering::SeqCst),
            hostname: inside.hostname.clone(),
            ..Default::default()
        })
    }

    async fn configure(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, pb::ConfigureRequest>,
    ) -> ServiceResult<impl Encodable<pb::ConfigureResponse> + Send + use<>> {
        let request = request.to_owned_message();
        if self.faults.mute.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        let mut problems = Vec::new();
        if self.faults.configure.load(Ordering::SeqCst) {
            problems.push(pb::Problem {
                what: "entropy".into(),
                why: "a fault was asked for".into(),
                ..Default::default()
            });
        }
        self.faults.frozen.store(false, Ordering::SeqCst);
        let mut inside = self.lock();
        inside.generation = request.generation;
        inside.hostname = request.hostname;
        inside.env = request.env.into_iter().collect();
        let mut answer =
            pb::ConfigureResponse { done: vec!["clock".into(), "entropy".into()], problems, ..Default::default() };
        if request.reseed {
            let registered = self.faults.registered.load(Ordering::SeqCst);
            let unanswered = self.faults.unanswered.load(Ordering::SeqCst);
            (answer.registered, answer.acknowledged) = (registered, registered.saturating_sub(unanswered));
            answer.hooks.push(pb::HookRun { name: "10-hook".into(), exit_code: 3, ..Default::default() });
        }
        Response::ok(answer)
    }

    async fn trust(
        &self,
        _: RequestContext,
        _: ServiceRequest<'_, pb::TrustRequest>,
    ) -> ServiceResult<impl Encodable<pb::TrustResponse> + Send + use<>> {
        if self.faults.no_trust.load(Ordering::SeqCst) {
            return Err(ConnectError::internal("a fault was asked for"));
        }
        Response::ok(pb::TrustResponse::default())
    }

    async fn quiesce(
        &self,
        _: RequestContext,
        _: ServiceRequest<'_, pb::QuiesceRequest>,
    ) -> ServiceResult<impl Encodable<pb::QuiesceResponse> + Send + use<>> {
        Response::ok(pb::QuiesceResponse::default())
    }

    async fn usage(
        &self,
        _: RequestContext,
        _: ServiceRequest<'_, pb::UsageRequest>,
    ) -> ServiceResult<impl Encodable<pb::UsageResponse> + Send + use<>> {
        Response::ok(pb::UsageResponse::default())
    }

    async fn run_job(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, pb::StartJobRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<pb::JobEvent> + Send + use<>>> {
        let request = request.to_owned_message();
        if is_bridge(&request.job_id) {
            return Response::ok(self.bridges.run(request, self.faults.no_kernel.load(Ordering::SeqCst)));
        }
        let mut words: Vec<String> = request.argv.iter().map(|w| text(w)).collect();
        if words.first().is_some_and(|w| w == "/bin/sh") {
            words = words.get(2).map(|t| t.split_whitespace().map(str::to_owned).collect()).unwrap_or_default();
        }
        let repeat = self.faults.repeat_output.load(Ordering::SeqCst);
        let (job, new) = {
            let mut inside = self.lock();
            let known = inside.jobs.get(&request.job_id).cloned();
            let new = known.is_none();
            let job = known.unwrap_or_else(|| Arc::new(FakeJob::new(&request, repeat)));
            inside.jobs.insert(request.job_id.clone(), Arc::clone(&job));
            (job, new)
        };
        if new {
            let mut env = self.lock().env.clone();
            env.extend(request.env);
            let limited = request.timeout_ms > 0 && !self.faults.no_time_outs.load(Ordering::SeqCst);
            let limit = limited.then(|| Duration::from_millis(request.timeout_ms));
            let (job, end) = (Arc::clone(&job), self.end.clone());
            self.home.spawn(async move {
                tokio::select! {
                    () = Play { job, words, env, user: request.user, limit }.run() => {}
                    () = end.cancelled() => {}
                }
            });
        }
        Response::ok(job.follow(0))
    }

    async fn follow_job(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, pb::FollowJobRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<pb::JobEvent> + Send + use<>>> {
        if is_bridge(request.job_id) {
            return Response::ok(self.bridges.follow(request.job_id, request.after_sequence)?);
        }
        Response::ok(self.job(request.job_id)?.follow(request.after_sequence))
    }

    async fn get_job(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, pb::GetJobRequest>,
    ) -> ServiceResult<impl Encodable<pb::JobStatus> + Send + use<>> {
        Response::ok(self.job(request.job_id)?.status(request.job_id))
    }

    async fn list_jobs(
        &self,
        _: RequestContext,
        _: ServiceRequest<'_, pb::ListJobsRequest>,
    ) -> ServiceResult<impl Encodable<pb::ListJobsResponse> + Send + use<>> {
        let mut jobs: Vec<_> = self.lock().jobs.iter().map(|(id, job)| job.status(id)).collect();
        jobs.extend(self.bridges.list());
        Response::ok(pb::ListJobsResponse { jobs, ..Default::default() })
    }

    async fn signal_job(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, pb::SignalJobRequest>,
    ) -> ServiceResult<impl Encodable<pb::SignalJobResponse> + Send + use<>> {
        if is_bridge(request.job_id) {
            let delivered = self.bridges.kill(request.job_id);
            return Response::ok(pb::SignalJobResponse { delivered, ..Default::default() });
        }
        let signal = if request.cancel { libc::SIGTERM } else { request.signal };
        let delivered = self.job(request.job_id)?.signal(signal, request.cancel);
        Response::ok(pb::SignalJobResponse { delivered, ..Default::default() })
    }

    async fn write_job_stdin(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, pb::WriteJobStdinRequest>,
    ) -> ServiceResult<impl Encodable<pb::WriteJobStdinResponse> + Send + use<>> {
        if is_bridge(request.job_id) {
            let accepted = self.bridges.write(request.job_id, request.data)?;
            return Response::ok(pb::WriteJobStdinResponse { accepted, ..Default::default() });
        }
        let (accepted, pending) = self.job(request.job_id)?.write(request.data, request.eof)?;
        Response::ok(pb::WriteJobStdinResponse { accepted, pending, ..Default::default() })
    }

    async fn resize_job(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, pb::ResizeJobRequest>,
    ) -> ServiceResult<impl Encodable<pb::ResizeJobResponse> + Send + use<>> {
        let request = request.to_owned_message();
        self.job(&request.job_id)?.resize(request.size.cols, request.size.rows)?;
        Response::ok(pb::ResizeJobResponse::default())
    }

    async fn forget_job(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, pb::ForgetJobRequest>,
    ) -> ServiceResult<impl Encodable<pb::ForgetJobResponse> + Send + use<>> {
        if is_bridge(request.job_id) {
            self.bridges.forget(request.job_id)?;
            return Response::ok(pb::ForgetJobResponse::default());
        }
        if !self.job(request.job_id)?.is_finished() {
            return Err(ConnectError::failed_precondition("the job is running"));
        }
        self.lock().jobs.remove(request.job_id);
        Response::ok(pb::ForgetJobResponse::default())
    }

    async fn ack_job(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, pb::AckJobRequest>,
    ) -> ServiceResult<impl Encodable<pb::AckJobResponse> + Send + use<>> {
        self.job(request.job_id)?.ack(request.sequence);
        Response::ok(pb::AckJobResponse::default())
    }

    async fn list_processes(
        &self,
        _: RequestContext,
        _: ServiceRequest<'_, pb::ListProcessesRequest>,
    ) -> ServiceResult<impl Encodable<pb::ListProcessesResponse> + Send + use<>> {
        let inside = self.lock();
        let mut processes =
            vec![pb::Process { pid: 1, state: "S".into(), command: b"init".to_vec(), ..Default::default() }];
        processes.extend(inside.jobs.iter().filter(|(_, job)| !job.is_finished()).map(|(id, job)| pb::Process {
            pid: job.pid(),
            ppid: 1,
            state: "S".into(),
            command: b"job".to_vec(),
            argv: job.argv().to_vec(),
            job_id: id.clone(),
            ..Default::default()
        }));
        processes.sort_by_key(|p| p.pid);
        Response::ok(pb::ListProcessesResponse { processes, ..Default::default() })
    }

    async fn signal_process(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, pb::SignalProcessRequest>,
    ) -> ServiceResult<impl Encodable<pb::SignalProcessResponse> + Send + use<>> {
        let job = self.lock().jobs.values().find(|job| job.pid() == request.pid && !job.is_finished()).cloned();
        let job = job.ok_or_else(|| fault("kill", libc::ESRCH, "no such process"))?;
        job.signal(request.signal, false);
        Response::ok(pb::SignalProcessResponse::default())
    }

    async fn read_file(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, pb::ReadFileRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<pb::FileChunk> + Send + use<>>> {
        Response::ok(self.files.read(request.to_owned_message()).await?)
    }

    async fn write_file(
        &self,
        _: RequestContext,
        requests: InboundStream<pb::WriteFileRequest>,
    ) -> ServiceResult<impl Encodable<pb::WriteFileResponse> + Send + use<>> {
        Response::ok(self.files.write(requests).await?)
    }

    async fn stat_file(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, pb::StatFileRequest>,
    ) -> ServiceResult<impl Encodable<pb::FileStat> + Send + use<>> {
        Response::ok(self.files.stat(request.path).await?)
    }

    async fn list_dir(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, pb::ListDirRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<pb::ListDirPage> + Send + use<>>> {
        Response::ok(self.files.list(request.to_owned_message()).await?)
    }

    async fn make_dir(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, pb::MakeDirRequest>,
    ) -> ServiceResult<impl Encodable<pb::FileStat> + Send + use<>> {
        Response::ok(self.files.make_dir(request.to_owned_message()).await?)
    }

    async fn rename(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, pb::RenameRequest>,
    ) -> ServiceResult<impl Encodable<pb::FileStat> + Send + use<>> {
        Response::ok(self.files.rename(request.to_owned_message()).await?)
    }

    async fn chmod(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, pb::ChmodRequest>,
    ) -> ServiceResult<impl Encodable<pb::FileStat> + Send + use<>> {
        Response::ok(self.files.chmod(request.to_owned_message()).await?)
    }

    async fn remove(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, pb::RemoveRequest>,
    ) -> ServiceResult<impl Encodable<pb::RemoveResponse> + Send + use<>> {
        Response::ok(self.files.remove(request.to_owned_message()).await?)
    }

    async fn pack_tree(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, pb::PackTreeRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<pb::TreeChunk> + Send + use<>>> {
        Response::ok(self.files.pack(request.path).await?)
    }

    async fn unpack_tree(
        &self,
        _: RequestContext,
        requests: InboundStream<pb::UnpackTreeRequest>,
    ) -> ServiceResult<impl Encodable<pb::UnpackTreeResponse> + Send + use<>> {
        Response::ok(self.files.unpack(requests).await?)
    }

    async fn watch_tree(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, pb::WatchTreeRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<pb::WatchEvents> + Send + use<>>> {
        Response::ok(self.files.watch(request.to_owned_message()).await?)
    }

    async fn dial(
        &self,
        _: RequestContext,
        requests: InboundStream<pb::DialRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<pb::DialResponse> + Send + use<>>> {
        Response::stream_ok(self.ports.dial(requests).await?)
    }
}
