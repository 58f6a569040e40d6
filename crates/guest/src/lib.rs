//! The guest agent: PID 1 of the machine. Processes, files, and what is put right after a restore.
//!
//! As a library it is the same service on any stream, acting on the process's own system: a driver for tests
//! serves it in process, and jobs are then real processes of the host.

pub mod boot;
mod cgroup;
mod configure;
mod defaults;
mod dial;
mod files;
mod jobs;
pub mod port;
mod processes;
mod reaper;
mod reseed;
mod service;
mod trust;
mod usage;
mod users;

pub use cgroup::UserCgroup;
pub use defaults::Defaults;
pub use reaper::{ReapMode, Reaper};
pub use service::{Agent, AgentOptions};

/// What the agent may change outside itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Authority {
    /// It is PID 1 of a machine of its own: clock, entropy, names are its to set.
    Machine,
    /// It is a guest in somebody's process: it starts jobs and serves files, and leaves the system alone.
    Process,
}
