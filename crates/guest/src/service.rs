//! The service of `guest.proto`: checks what comes in and hands it to the part that does it.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use connectrpc::{
    ConnectError, InboundStream, RequestContext, Response, Router, ServiceRequest, ServiceResult, ServiceStream,
};
use mainbrella_guest_protocol::guest_side::{self, GuestService};
use mainbrella_guest_protocol::{PROTOCOL_VERSION, fault, pb};
use pb::GuestExt as _;
use tokio::sync::Semaphore;

use crate::boot::PendingRoot;
use crate::defaults::Defaults;
use crate::dial::Dials;
use crate::files::Owner;
use crate::jobs::{Jobs, check_env, size_of};
use crate::{Authority, Reaper, UserCgroup, configure, files, processes, reseed, trust, usage, users};

/// File operations at once. A host keeps to fewer; this only bounds the memory of one that does not.
const FILE_OPERATIONS_MAX: usize = 64;
/// Watches at once, for the same reason.
const WATCHES_MAX: usize = 32;
/// Longest wait for all processes of the user to stop.
const FREEZE_MOST: Duration = Duration::from_secs(5);
/// Longest time between TERM and KILL of a cancelled job, milliseconds.
const GRACE_MAX_MS: u64 = 60_000;

/// What an agent works on.
#[derive(Debug)]
pub struct AgentOptions {
    /// What it may change.
    pub authority: Authority,
    /// Who waits for its children.
    pub reaper: Reaper,
    /// Where processes of the user go; `None`: they stay where the agent is, and cannot be frozen.
    pub cgroup: Option<UserCgroup>,
    /// A root that is entered when the machine is first told who it is.
    pub pending: Option<PendingRoot>,
    /// What commands have when nobody says otherwise.
    pub defaults: Defaults,
}

/// The agent. One for a machine; serves any number of connections, one after the other or at once.
#[derive(Debug)]
pub struct Agent {
    authority: Authority,
    cgroup: Option<UserCgroup>,
    pending: Mutex<Option<PendingRoot>>,
    reaper: Reaper,
    jobs: Jobs,
    files: Arc<Semaphore>,
    watches: Arc<Semaphore>,
    dials: Dials,
    boot_id: String,
    state: Mutex<Configured>,
}

#[derive(Debug, Default)]
struct Configured {
    generation: String,
    hostname: Option<String>,
    env: Arc<HashMap<String, String>>,
    defaults: Arc<Defaults>,
    frozen: bool,
    /// Whether it believes an authority of the host's: programs are pointed to it whatever environment they are given.
    trusting: bool,
}

impl Agent {
    /// An agent that nothing was asked of yet.
    pub fn new(options: AgentOptions) -> Arc<Self> {
        // Not the kernel's own boot id: that is drawn when first read, and must be drawn in each restored machine anew.
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap_or_default();
        Arc::new(Self {
            authority: options.authority,
            jobs: Jobs::new(options.reaper.clone(), options.cgroup.clone()),
            reaper: options.reaper,
            cgroup: options.cgroup,
            pending: Mutex::new(options.pending),
            files: Arc::new(Semaphore::new(FILE_OPERATIONS_MAX)),
            watches: Arc::new(Semaphore::new(WATCHES_MAX)),
            dials: Dials::default(),
            boot_id: boot_id.trim().to_owned(),
            state: Mutex::new(Configured {
                env: Arc::new(options.defaults.env.clone()),
                defaults: Arc::new(options.defaults),
                ..Configured::default()
            }),
        })
    }

    /// The service to give to [`guest_side::serve`], once made.
    pub fn service(self: &Arc<Self>) -> GuestService {
        guest_side::service(self.clone().register(Router::new()))
    }

    fn state(&self) -> MutexGuard<'_, Configured> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whom files belong to that the host writes; `None`: whoever the agent is, also where the image names nobody who is
    /// there.
    async fn owner(&self) -> Result<Option<Owner>, ConnectError> {
        let Some(user) = self.state().defaults.user.clone() else { return Ok(None) };
        let found = blocking(move || Ok(users::resolve(&user, Path::new("/etc")))).await?;
        Ok(found.ok().map(|who| Owner { uid: who.uid, gid: who.gid }))
    }

    async fn file_seat(&self) -> Result<tokio::sync::OwnedSemaphorePermit, ConnectError> {
        self.files.clone().acquire_owned().await.map_err(|_| ConnectError::unavailable("the agent is ending"))
    }
}

/// Runs what may block where it may.
pub(crate) async fn blocking<T: Send + 'static>(
    f: impl FnOnce() -> Result<T, ConnectError> + Send + 'static,
) -> Result<T, ConnectError> {
    match tokio::task::spawn_blocking(f).await {
        Ok(result) => result,
        Err(_) => Err(ConnectError::internal("the work was ended before it was done")),
    }
}

// Answers are the messages themselves; the trait would allow any encoding of them.
#[allow(refining_impl_trait)]
impl pb::Guest for Agent {
    async fn hello(
        &self,
        _ctx: RequestContext,
        _request: ServiceRequest<'_, pb::HelloRequest>,
    ) -> ServiceResult<pb::HelloResponse> {
        let state = self.state();
        let hostname = match &state.hostname {
            Some(name) => name.clone(),
            None => rustix::system::uname().nodename().to_string_lossy().into_owned(),
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Response::ok(pb::HelloResponse {
            protocol_version: PROTOCOL_VERSION,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            boot_id: self.boot_id.clone(),
            hostname,
            generation: state.generation.clone(),
            clock_realtime_ns: i64::try_from(now.as_nanos()).unwrap_or(i64::MAX),
            frozen: state.frozen,
            ..Default::default()
        })
    }

    async fn configure(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::ConfigureRequest>,
    ) -> ServiceResult<pb::ConfigureResponse> {
        let request = request.to_owned_message();
        configure::check(&request)?;
        check_env(request.env.iter())?;
        let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(root) = pending {
            let failed =
                |e: crate::boot::BootError| ConnectError::data_loss(format!("the disk cannot be mounted: {e}"));
            // They lie on the disk that was mounted, where somebody may have built on the template.
            let defaults = blocking(move || root.enter().map_err(failed)).await?;
            self.state().defaults = Arc::new(defaults);
        }
        let mut answer = pb::ConfigureResponse::default();
        if self.authority == Authority::Machine {
            configure::apply(&request, &mut answer);
        }
        {
            let mut state = self.state();
            state.generation = request.generation;
            let mut env = state.defaults.env.clone();
            env.extend(request.env);
            if state.trusting {
                trust::point(&mut env);
            }
            state.env = Arc::new(env);
            if !request.hostname.is_empty() {
                state.hostname = Some(request.hostname);
            }
        }
        let reseeds = request.reseed && self.authority == Authority::Machine;
        if reseeds {
            answer.hooks = reseed::run_hooks(&self.reaper, Path::new(reseed::HOOKS)).await;
        }
        // After that, and only when all before was tried: nothing of the user runs with another machine's clock or luck.
        if !request.keep_frozen
            && let Some(cgroup) = &self.cgroup
        {
            match cgroup.set_frozen(false) {
                Ok(()) => {
                    self.state().frozen = false;
                    answer.done.push("thaw".to_owned());
                }
                Err(error) => answer.problems.push(configure::problem("thaw", &error)),
            }
        }
        // What stands still answers nobody.
        if reseeds && !request.keep_frozen {
            (answer.registered, answer.acknowledged) = reseed::tell_registered(Path::new(reseed::SEATS)).await;
        }
        Response::ok(answer)
    }

    async fn trust(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::TrustRequest>,
    ) -> ServiceResult<pb::TrustResponse> {
        let request = request.to_owned_message();
        trust::check(&request)?;
        if self.authority == Authority::Machine {
            let failed = |e: std::io::Error| fault::fault("trust", e.raw_os_error().unwrap_or(0), e.to_string());
            blocking(move || trust::apply(&request, Path::new("/")).map_err(failed)).await?;
        }
        let mut state = self.state();
        let mut env = HashMap::clone(&state.env);
        trust::point(&mut env);
        state.env = Arc::new(env);
        state.trusting = true;
        Response::ok(pb::TrustResponse::default())
    }

    async fn quiesce(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::QuiesceRequest>,
    ) -> ServiceResult<pb::QuiesceResponse> {
        let (freeze, sync) = (request.freeze, request.sync);
        if freeze && let Some(cgroup) = self.cgroup.clone() {
            let reaper = self.reaper.clone();
            let frozen = blocking(move || {
                // A child between its fork and its cgroup would be missed: none is, under the reaper's lock it
                // is either not yet forked, or freezes as soon as it moves itself in.
                let failed =
                    |error: std::io::Error| fault("freeze", error.raw_os_error().unwrap_or(0), error.to_string());
                reaper.exclusively(|| cgroup.set_frozen(true)).map_err(failed)?;
                cgroup.wait_frozen(FREEZE_MOST).map_err(|error| {
                    let _ = cgroup.set_frozen(false);
                    failed(error)
                })
            });
            frozen.await?;
            self.state().frozen = true;
        }
        if sync && self.authority == Authority::Machine {
            blocking(|| {
                rustix::fs::sync();
                Ok(())
            })
            .await?;
        }
        Response::ok(pb::QuiesceResponse::default())
    }

    async fn usage(
        &self,
        _ctx: RequestContext,
        _request: ServiceRequest<'_, pb::UsageRequest>,
    ) -> ServiceResult<pb::UsageResponse> {
        Response::ok(usage::read(self.cgroup.as_ref()))
    }

    async fn run_job(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::StartJobRequest>,
    ) -> ServiceResult<ServiceStream<pb::JobEvent>> {
        let (env, defaults) = {
            let state = self.state();
            (state.env.clone(), state.defaults.clone())
        };
        let job = self.jobs.start(request.to_owned_message(), &env, &defaults).await?;
        Response::stream_ok(self.jobs.follow(job, 0)?)
    }

    async fn follow_job(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::FollowJobRequest>,
    ) -> ServiceResult<ServiceStream<pb::JobEvent>> {
        let job = self.jobs.get(request.job_id)?;
        Response::stream_ok(self.jobs.follow(job, request.after_sequence)?)
    }

    async fn get_job(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::GetJobRequest>,
    ) -> ServiceResult<pb::JobStatus> {
        Response::ok(self.jobs.get(request.job_id)?.status())
    }

    async fn list_jobs(
        &self,
        _ctx: RequestContext,
        _request: ServiceRequest<'_, pb::ListJobsRequest>,
    ) -> ServiceResult<pb::ListJobsResponse> {
        Response::ok(pb::ListJobsResponse { jobs: self.jobs.list(), ..Default::default() })
    }

    async fn signal_job(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::SignalJobRequest>,
    ) -> ServiceResult<pb::SignalJobResponse> {
        let job = self.jobs.get(request.job_id)?;
        let delivered = if request.cancel {
            job.cancel(Duration::from_millis(request.grace_ms.min(GRACE_MAX_MS)))
        } else {
            if !(1..=64).contains(&request.signal) {
                return Err(ConnectError::invalid_argument("signal: 1 to 64"));
            }
            job.signal(request.signal)
        };
        Response::ok(pb::SignalJobResponse { delivered, ..Default::default() })
    }

    async fn write_job_stdin(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::WriteJobStdinRequest>,
    ) -> ServiceResult<pb::WriteJobStdinResponse> {
        use crate::jobs::StdinError;
        let job = self.jobs.get(request.job_id)?;
        let written = job.stdin.write(request.data, request.eof, !request.no_wait).await;
        let standing = written.map_err(|error| match error {
            StdinError::Closed => fault("stdin", rustix::io::Errno::PIPE.raw_os_error(), "input is closed"),
            StdinError::Full => fault("stdin", rustix::io::Errno::AGAIN.raw_os_error(), "too much input is pending"),
            StdinError::TooLarge => ConnectError::invalid_argument("data: at most 256 KiB at once"),
        })?;
        let (accepted, pending) = (standing.accepted, standing.pending);
        Response::ok(pb::WriteJobStdinResponse { accepted, pending, ..Default::default() })
    }

    async fn resize_job(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::ResizeJobRequest>,
    ) -> ServiceResult<pb::ResizeJobResponse> {
        let request = request.to_owned_message();
        let size = request.size.as_option().ok_or_else(|| ConnectError::invalid_argument("size: missing"))?;
        self.jobs.get(&request.job_id)?.resize(size_of(size)?)?;
        Response::ok(pb::ResizeJobResponse::default())
    }

    async fn forget_job(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::ForgetJobRequest>,
    ) -> ServiceResult<pb::ForgetJobResponse> {
        self.jobs.forget(request.job_id)?;
        Response::ok(pb::ForgetJobResponse::default())
    }

    async fn ack_job(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::AckJobRequest>,
    ) -> ServiceResult<pb::AckJobResponse> {
        let job = self.jobs.get(request.job_id)?;
        job.with_log(|log| log.ack(request.sequence));
        Response::ok(pb::AckJobResponse::default())
    }

    async fn list_processes(
        &self,
        _ctx: RequestContext,
        _request: ServiceRequest<'_, pb::ListProcessesRequest>,
    ) -> ServiceResult<pb::ListProcessesResponse> {
        let jobs = self.jobs.sessions();
        Response::ok(blocking(move || Ok(processes::list(std::path::Path::new("/proc"), &jobs))).await?)
    }

    async fn signal_process(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::SignalProcessRequest>,
    ) -> ServiceResult<pb::SignalProcessResponse> {
        processes::signal(request.pid, request.signal)?;
        Response::ok(pb::SignalProcessResponse::default())
    }

    async fn read_file(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::ReadFileRequest>,
    ) -> ServiceResult<ServiceStream<pb::FileChunk>> {
        let seat = self.file_seat().await?;
        Response::stream_ok(files::read(request.to_owned_message(), seat).await?)
    }

    async fn write_file(
        &self,
        _ctx: RequestContext,
        requests: InboundStream<pb::WriteFileRequest>,
    ) -> ServiceResult<pb::WriteFileResponse> {
        let _seat = self.file_seat().await?;
        let size = files::write(requests, self.owner().await?).await?;
        Response::ok(pb::WriteFileResponse { size, ..Default::default() })
    }

    async fn stat_file(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::StatFileRequest>,
    ) -> ServiceResult<pb::FileStat> {
        let _seat = self.file_seat().await?;
        let (path, follow) = (request.path.to_vec(), request.follow_symlinks);
        Response::ok(blocking(move || files::stat(&path, follow)).await?)
    }

    async fn list_dir(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::ListDirRequest>,
    ) -> ServiceResult<ServiceStream<pb::ListDirPage>> {
        let seat = self.file_seat().await?;
        let pages = files::list(request.to_owned_message()).await?;
        drop(seat);
        Response::stream_ok(futures::stream::iter(pages.into_iter().map(Ok)))
    }

    async fn make_dir(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::MakeDirRequest>,
    ) -> ServiceResult<pb::FileStat> {
        let _seat = self.file_seat().await?;
        let (request, owner) = (request.to_owned_message(), self.owner().await?);
        Response::ok(blocking(move || files::make_dir(&request, owner)).await?)
    }

    async fn rename(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::RenameRequest>,
    ) -> ServiceResult<pb::FileStat> {
        let _seat = self.file_seat().await?;
        let request = request.to_owned_message();
        Response::ok(blocking(move || files::rename(&request)).await?)
    }

    async fn chmod(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::ChmodRequest>,
    ) -> ServiceResult<pb::FileStat> {
        let _seat = self.file_seat().await?;
        let request = request.to_owned_message();
        Response::ok(blocking(move || files::chmod(&request)).await?)
    }

    async fn remove(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::RemoveRequest>,
    ) -> ServiceResult<pb::RemoveResponse> {
        let _seat = self.file_seat().await?;
        let request = request.to_owned_message();
        Response::ok(blocking(move || files::remove(&request)).await?)
    }

    async fn pack_tree(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::PackTreeRequest>,
    ) -> ServiceResult<ServiceStream<pb::TreeChunk>> {
        let seat = self.file_seat().await?;
        Response::stream_ok(files::pack(request.path.to_vec(), seat).await?)
    }

    async fn unpack_tree(
        &self,
        _ctx: RequestContext,
        requests: InboundStream<pb::UnpackTreeRequest>,
    ) -> ServiceResult<pb::UnpackTreeResponse> {
        let _seat = self.file_seat().await?;
        Response::ok(files::unpack(requests, self.owner().await?).await?)
    }

    async fn watch_tree(
        &self,
        _ctx: RequestContext,
        request: ServiceRequest<'_, pb::WatchTreeRequest>,
    ) -> ServiceResult<ServiceStream<pb::WatchEvents>> {
        let seat = self.watches.clone().try_acquire_owned();
        let seat = seat.map_err(|_| fault("watches", libc::EMFILE, "too many watches at once"))?;
        Response::stream_ok(files::watch(request.path.to_vec(), request.recursive, seat).await?)
    }

    async fn dial(
        &self,
        _ctx: RequestContext,
        requests: InboundStream<pb::DialRequest>,
    ) -> ServiceResult<ServiceStream<pb::DialResponse>> {
        Response::stream_ok(self.dials.dial(requests).await?)
    }
}
