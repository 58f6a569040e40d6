//! Jobs: the table of them, and what may be asked of each.

mod job;
mod log;
mod pump;
mod request;
mod spawn;
mod stdin;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use connectrpc::ConnectError;
use futures::Stream;
use mainbrella_guest_protocol::limits::JOBS_MAX;
use mainbrella_guest_protocol::pb;
use tokio::sync::Semaphore;

use job::Budget;
pub(crate) use job::Job;
pub(crate) use request::{check_env, size_of};
pub(crate) use stdin::StdinError;

use crate::service::blocking;
use crate::{Defaults, Reaper, UserCgroup, users};

/// Background writers whose output nobody reads any more, at once. They are drained, so that a server started
/// with `&` does not die of its own log.
const LEFTOVERS_MAX: usize = 256;

/// All jobs of the machine. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Jobs {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    table: Mutex<HashMap<String, Arc<Job>>>,
    reaper: Reaper,
    cgroup: Option<UserCgroup>,
    budget: Arc<Budget>,
    leftovers: Arc<Semaphore>,
    births: AtomicU64,
}

impl Jobs {
    /// An empty table. Jobs are moved to `cgroup` where there is one.
    pub(crate) fn new(reaper: Reaper, cgroup: Option<UserCgroup>) -> Self {
        Self {
            inner: Arc::new(Inner {
                table: Mutex::default(),
                reaper,
                cgroup,
                budget: Arc::new(Budget::of_this_machine()),
                leftovers: Arc::new(Semaphore::new(LEFTOVERS_MAX)),
                births: AtomicU64::new(0),
            }),
        }
    }

    fn table(&self) -> MutexGuard<'_, HashMap<String, Arc<Job>>> {
        self.inner.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the job of `request`, or finds the one that has its id.
    ///
    /// # Errors
    /// A request out of bounds, or a table full of running jobs. That a process could not be started is not an
    /// error: the job exists and its log says so.
    pub(crate) async fn start(
        &self,
        request: pb::StartJobRequest,
        base_env: &HashMap<String, String>,
        defaults: &Defaults,
    ) -> Result<Arc<Job>, ConnectError> {
        if let Some(job) = self.table().get(&request.job_id) {
            return Ok(job.clone());
        }
        let (who, unknown) = match request::user_of(&request, defaults)? {
            None => (None, None),
            Some(text) => match blocking(move || Ok(users::resolve(&text, Path::new("/etc")))).await? {
                Ok(who) => (Some(who), None),
                Err(unknown) => (None, Some(unknown)),
            },
        };
        let checked = request::check(request, base_env, defaults.cwd.as_deref(), who)?;
        let mut table = self.table();
        if let Some(job) = table.get(&checked.id) {
            return Ok(job.clone());
        }
        make_room(&mut table, &self.inner.budget)?;
        let birth = self.inner.births.fetch_add(1, Ordering::Relaxed);
        let job = Arc::new(Job::new(&checked, birth, self.inner.reaper.clone(), self.inner.budget.clone()));
        table.insert(checked.id.clone(), job.clone());
        drop(table);
        match unknown {
            Some(unknown) => pump::not_started(&job, unknown.stage, unknown.errno),
            None => pump::launch(&job, &checked, self.inner.cgroup.as_ref(), self.inner.leftovers.clone()),
        }
        Ok(job)
    }

    /// Finds a job.
    ///
    /// # Errors
    /// `NotFound` when there is none with that id.
    pub(crate) fn get(&self, id: &str) -> Result<Arc<Job>, ConnectError> {
        self.table().get(id).cloned().ok_or_else(|| ConnectError::not_found("no such job"))
    }

    /// All jobs, oldest first.
    pub(crate) fn list(&self) -> Vec<pb::JobStatus> {
        let mut jobs: Vec<_> = self.table().values().cloned().collect();
        jobs.sort_by_key(|job| job.birth());
        jobs.iter().map(|job| job.status()).collect()
    }

    /// Forgets a finished job.
    ///
    /// # Errors
    /// `NotFound`, or `FailedPrecondition` while it runs.
    pub(crate) fn forget(&self, id: &str) -> Result<(), ConnectError> {
        let mut table = self.table();
        match table.get(id) {
            None => Err(ConnectError::not_found("no such job")),
            Some(job) if !job.is_finished() => Err(ConnectError::failed_precondition("the job is running")),
            Some(_) => {
                table.remove(id);
                Ok(())
            }
        }
    }

    /// Number of the first process of each running job, and its id. That is also the number of the job's session.
    pub(crate) fn sessions(&self) -> HashMap<i32, String> {
        let running = self.table().values().filter(|job| !job.is_finished()).cloned().collect::<Vec<_>>();
        running.iter().map(|job| (job.pid(), job.id().to_owned())).filter(|(pid, _)| *pid > 0).collect()
    }

    /// Everything of `job` after event `after`, then what comes, until its last event.
    ///
    /// # Errors
    /// `OutOfRange` for a cursor from the future, `ResourceExhausted` for too many followers.
    pub(crate) fn follow(
        &self,
        job: Arc<Job>,
        after: u64,
    ) -> Result<impl Stream<Item = Result<pb::JobEvent, ConnectError>> + Send + use<>, ConnectError> {
        let seat = job.seat(after)?;
        let jobs = self.clone();
        Ok(futures::stream::unfold((seat, jobs), async move |(mut seat, jobs)| {
            let Some((sequence, event)) = seat.next().await else {
                if seat.job().forgets_itself() {
                    jobs.table().remove(seat.job().id());
                }
                return None;
            };
            Some((Ok(event.wire(sequence)), (seat, jobs)))
        }))
    }
}

/// Makes a place in the table by forgetting finished jobs, oldest first, where needed.
fn make_room(table: &mut HashMap<String, Arc<Job>>, budget: &Budget) -> Result<(), ConnectError> {
    while table.len() >= JOBS_MAX || budget.is_spent() {
        // What the host has not said to hold is not thrown away for room.
        let oldest = table.values().filter(|job| job.is_finished() && !job.is_owed()).min_by_key(|job| job.birth());
        match oldest.map(|job| job.id().to_owned()) {
            Some(id) => {
                table.remove(&id);
            }
            None if table.len() >= JOBS_MAX => {
                return Err(ConnectError::resource_exhausted("too many jobs are running"));
            }
            None => return Ok(()),
        }
    }
    Ok(())
}
