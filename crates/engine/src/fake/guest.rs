//! The scripted guest: a few commands, files in memory, nothing of the host touched.
//!
//! Commands (after `/bin/sh -lc`, or as argv): `true`, `exit N`, `echo TEXT`, `sleep MS`, `flood N` (N bytes of
//! output), `cat` (input to output), `printenv NAME`, `hang` (until its time-out). Anything else cannot be executed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use connectrpc::{
    ConnectError, Encodable, InboundStream, RequestContext, Response, Router, ServiceRequest, ServiceResult,
    ServiceStream,
};
use futures::StreamExt;
use mainbrella_guest_protocol::{PROTOCOL_VERSION, fault, pb};
use pb::__buffa::oneof::job_event::Event;
use tokio_util::sync::CancellationToken;

use super::files::FakeFiles;

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
}

#[derive(Default)]
struct Inside {
    generation: String,
    hostname: String,
    env: HashMap<String, String>,
    running: HashMap<String, Vec<pb::JobEvent>>,
}

struct FakeGuest {
    faults: Arc<GuestFaults>,
    inside: Arc<Mutex<Inside>>,
    files: FakeFiles,
    end: CancellationToken,
}

/// The service as a router.
pub(super) fn router(faults: Arc<GuestFaults>) -> Router {
    let files = FakeFiles::new(Arc::clone(&faults));
    Router::new().add_service(Arc::new(FakeGuest {
        faults,
        inside: Arc::default(),
        files,
        end: CancellationToken::new(),
    }))
}

impl Drop for FakeGuest {
    fn drop(&mut self) {
        self.end.cancel();
    }
}

struct Played {
    exit: pb::JobExit,
    stdout: Vec<u8>,
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

async fn play(
    words: &[String],
    stdin: &[u8],
    env: &HashMap<String, String>,
    timeout: Option<Duration>,
) -> Option<Played> {
    let started = Instant::now();
    let argument = words.get(1..).unwrap_or_default().join(" ");
    let number = || argument.parse::<u64>().unwrap_or(0);
    let (mut code, mut stdout) = (0, Vec::new());
    let mut pause = Duration::ZERO;
    match words.first().map(String::as_str) {
        Some("true") => {}
        Some("exit") => code = i32::try_from(number()).unwrap_or(1),
        Some("echo") => stdout = format!("{argument}\n").into_bytes(),
        Some("sleep") => pause = Duration::from_millis(number()),
        Some("hang") => pause = Duration::MAX,
        Some("flood") => stdout = vec![b'x'; usize::try_from(number()).unwrap_or(0)],
        Some("cat") => stdout = stdin.to_vec(),
        Some("printenv") => match env.get(&argument) {
            Some(value) => stdout = format!("{value}\n").into_bytes(),
            None => code = 1,
        },
        _ => return None,
    }
    let mut cause = pb::job_exit::Cause::CAUSE_EXITED;
    match timeout {
        Some(limit) if limit < pause => {
            tokio::time::sleep(limit).await;
            cause = pb::job_exit::Cause::CAUSE_TIMED_OUT;
        }
        _ if pause == Duration::MAX => std::future::pending().await,
        _ => tokio::time::sleep(pause).await,
    }
    let exit = pb::JobExit {
        cause: cause.into(),
        code,
        stdout_bytes: stdout.len() as u64,
        duration_us: u64::try_from(started.elapsed().as_micros()).unwrap_or(0),
        ..Default::default()
    };
    Some(Played { exit, stdout })
}

/// The events of a finished job, with its budget applied.
fn events(played: Option<Played>, limit: u64, repeat: bool) -> Vec<pb::JobEvent> {
    let mut list: Vec<Event> = Vec::new();
    match played {
        None => list.push(pb::JobNotStarted { errno: libc::ENOENT, stage: "exec".into(), ..Default::default() }.into()),
        Some(Played { exit, stdout }) => {
            list.push(pb::JobStarted { pid: 42, ..Default::default() }.into());
            let mut output = |offset: usize, data: &[u8]| {
                for (i, part) in data.chunks(64 * 1024).enumerate() {
                    let event: Event = pb::JobOutput {
                        stream: pb::Stream::STREAM_STDOUT.into(),
                        offset: (offset + i * 64 * 1024) as u64,
                        data: part.to_vec(),
                        ..Default::default()
                    }
                    .into();
                    if repeat {
                        list.push(event.clone());
                    }
                    list.push(event);
                }
            };
            let half = usize::try_from(limit / 2).unwrap_or(usize::MAX);
            if limit > 0 && stdout.len() as u64 > limit {
                let tail = stdout.len() - half;
                output(0, &stdout[..half]);
                list.push(
                    pb::JobGap {
                        stream: pb::Stream::STREAM_STDOUT.into(),
                        offset: half as u64,
                        length: (tail - half) as u64,
                        ..Default::default()
                    }
                    .into(),
                );
                let mut tail_events = events_of(tail, &stdout[tail..]);
                list.append(&mut tail_events);
            } else {
                output(0, &stdout);
            }
            list.push(exit.into());
        }
    }
    (1..)
        .zip(list)
        .map(|(sequence, event)| pb::JobEvent { sequence, event: Some(event), ..Default::default() })
        .collect()
}

fn events_of(offset: usize, data: &[u8]) -> Vec<Event> {
    let part = |(i, part): (usize, &[u8])| {
        pb::JobOutput {
            stream: pb::Stream::STREAM_STDOUT.into(),
            offset: (offset + i * 64 * 1024) as u64,
            data: part.to_vec(),
            ..Default::default()
        }
        .into()
    };
    data.chunks(64 * 1024).enumerate().map(part).collect()
}

impl FakeGuest {
    fn lock(&self) -> std::sync::MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a finished job said, once it has; follows a running one.
    fn follow(&self, job_id: String, after: u64) -> ServiceStream<pb::JobEvent> {
        let inside = Arc::clone(&self.inside);
        futures::stream::once(async move {
            loop {
                let known = inside.lock().unwrap_or_else(PoisonError::into_inner).running.get(&job_id).cloned();
                match known {
                    None => return futures::stream::iter(vec![Err(fault("job", 0, "no such job"))]),
                    Some(list) if list.is_empty() => tokio::time::sleep(Duration::from_millis(2)).await,
                    Some(list) => {
                        let rest: Vec<_> = list.into_iter().filter(|e| e.sequence > after).map(Ok).collect();
                        return futures::stream::iter(rest);
                    }
                }
            }
        })
        .flatten()
        .boxed()
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
        let mut inside = self.lock();
        inside.generation = request.generation;
        inside.hostname = request.hostname;
        inside.env = request.env.into_iter().collect();
        Response::ok(pb::ConfigureResponse { done: vec!["clock".into()], problems, ..Default::default() })
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
        let mut words: Vec<String> = request.argv.iter().map(|w| text(w)).collect();
        if words.first().is_some_and(|w| w == "/bin/sh") {
            words = words.get(2).map(|t| t.split_whitespace().map(str::to_owned).collect()).unwrap_or_default();
        }
        let mut env = self.lock().env.clone();
        env.extend(request.env);
        self.lock().running.insert(request.job_id.clone(), Vec::new());
        let (inside, id, end) = (Arc::clone(&self.inside), request.job_id.clone(), self.end.clone());
        let repeat = self.faults.repeat_output.load(Ordering::SeqCst);
        tokio::spawn(async move {
            let limit = (request.timeout_ms > 0).then(|| Duration::from_millis(request.timeout_ms));
            let played = tokio::select! {
                played = play(&words, &request.stdin, &env, limit) => played,
                () = end.cancelled() => return,
            };
            let list = events(played, request.output_limit, repeat);
            inside.lock().unwrap_or_else(PoisonError::into_inner).running.insert(id, list);
        });
        Response::ok(self.follow(request.job_id, 0))
    }

    async fn follow_job(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, pb::FollowJobRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<pb::JobEvent> + Send + use<>>> {
        let stream = self.follow(request.job_id.to_owned(), request.after_sequence);
        Response::ok(stream)
    }

    async fn get_job(
        &self,
        _: RequestContext,
        _: ServiceRequest<'_, pb::GetJobRequest>,
    ) -> ServiceResult<impl Encodable<pb::JobStatus> + Send + use<>> {
        Err::<Response<pb::JobStatus>, _>(ConnectError::unimplemented("the fake guest keeps no job status"))
    }

    async fn list_jobs(
        &self,
        _: RequestContext,
        _: ServiceRequest<'_, pb::ListJobsRequest>,
    ) -> ServiceResult<impl Encodable<pb::ListJobsResponse> + Send + use<>> {
        let status = |(id, list): (&String, &Vec<pb::JobEvent>)| pb::JobStatus {
            job_id: id.clone(),
            finished: !list.is_empty(),
            ..Default::default()
        };
        let jobs = self.lock().running.iter().map(status).collect();
        Response::ok(pb::ListJobsResponse { jobs, ..Default::default() })
    }

    async fn signal_job(
        &self,
        _: RequestContext,
        _: ServiceRequest<'_, pb::SignalJobRequest>,
    ) -> ServiceResult<impl Encodable<pb::SignalJobResponse> + Send + use<>> {
        Err::<Response<pb::SignalJobResponse>, _>(ConnectError::unimplemented("the fake guest takes no signals"))
    }

    async fn write_job_stdin(
        &self,
        _: RequestContext,
        _: ServiceRequest<'_, pb::WriteJobStdinRequest>,
    ) -> ServiceResult<impl Encodable<pb::WriteJobStdinResponse> + Send + use<>> {
        Err::<Response<pb::WriteJobStdinResponse>, _>(ConnectError::unimplemented(
            "the fake guest takes no later input",
        ))
    }

    async fn resize_job(
        &self,
        _: RequestContext,
        _: ServiceRequest<'_, pb::ResizeJobRequest>,
    ) -> ServiceResult<impl Encodable<pb::ResizeJobResponse> + Send + use<>> {
        Err::<Response<pb::ResizeJobResponse>, _>(ConnectError::unimplemented("the fake guest has no terminals"))
    }

    async fn forget_job(
        &self,
        _: RequestContext,
        request: ServiceRequest<'_, pb::ForgetJobRequest>,
    ) -> ServiceResult<impl Encodable<pb::ForgetJobResponse> + Send + use<>> {
        self.lock().running.remove(request.job_id);
        Response::ok(pb::ForgetJobResponse::default())
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
}
