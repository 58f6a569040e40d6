//! One machine: a task that owns its life, and what callers hold of it.
//!
//! Life (create, lease, stop, death) goes through the actor's queue, one message at a time. Use (commands,
//! files) runs on the caller's side over the shared [`link`], admitted by the [`gate`]; the actor learns of
//! it only as "in use" and "last used", so ten thousand commands do not pass through one queue.

mod actor;
mod admission;
pub mod command;
pub mod contexts;
pub mod files;
mod fork;
mod gate;
pub mod handle;
pub mod jobs;
mod link;
mod pause;
pub mod ports;
pub mod processes;
mod save;
mod secrets;

pub(crate) use actor::{LEASE_LOOK_MAX, Origin, World, assume_used, died, spawn};
pub use command::{Captured, CommandEnding, CommandOrder, CommandOutcome, Omitted};
pub use contexts::{
    CodeEnd, CodeEvent, CodeOrder, CodeRun, CodeStatus, ContextInfo, ContextOrder, ContextState, Language, TextStream,
};
pub use files::{
    DirEntry, DirPage, FileEvent, FileEventKind, FileEvents, FileKind, FileReader, FileStat, PathStat, Removed,
    TreeWritten, WriteOptions,
};
pub(crate) use gate::Pass;
pub use handle::{LeaseChange, MachineHandle, StopOutcome};
pub use jobs::MachineJobs;
pub(crate) use jobs::Shelf;
pub use link::{HookRun, Reseeded};
pub use ports::{PortConnection, PortError};
pub(crate) use save::keep_logs;
pub use secrets::SecretsTurn;

/// The job in the guest that is its template's start command. It belongs to the template: no list shows it, nobody follows it,
/// and that it runs is no use of the machine.
pub(crate) const START_JOB: &str = "mainbrella-start";
