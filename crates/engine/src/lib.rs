//! Machines on this host: actors, drivers, templates, the jail, clean-up.
//!
//! This crate answers one reviewer's question: *do resources leak?* It knows neither the store nor
//! HTTP; what must be durable it hands to a [`Journal`].

pub mod cgroup;
pub mod clock;
pub mod driver;
pub mod engine;
pub mod error;
pub mod fake;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod image;
pub mod jail;
mod jobs;
pub mod journal;
pub mod machine;
pub mod microvm;
mod readers;

pub use clock::{Clock, SystemClock};
pub use driver::{
    Adoption, DiskPart, DiskUse, Driver, EgressOrder, ExitReport, ForkOrder, Forked, GuestStream, Instance,
    LaunchOrder, MachineNetwork, PauseReceipt, SaveOrder, SaveReceipt, Saving, TemplateInfo,
};
pub use engine::{Engine, EngineConfig, ForkReceipt, RecoveryReport};
pub use error::{DriverError, EngineError};
pub use journal::{Change, Journal, JournalError, KeptSecrets};
pub use machine::{
    Captured, CommandEnding, CommandOrder, CommandOutcome, DirEntry, DirPage, FileEvent, FileEventKind, FileEvents,
    FileKind, FileReader, FileStat, HookRun, LeaseChange, MachineHandle, Omitted, PathStat, PortConnection, PortError,
    Removed, Reseeded, SecretsTurn, StopOutcome, TreeWritten, WriteOptions,
};
pub use machine::{
    CodeEnd, CodeEvent, CodeOrder, CodeRun, CodeStatus, ContextInfo, ContextOrder, ContextState, Language, TextStream,
};
/// What a machine's gateway adds to requests.
pub use mainbrella_net::{Authority, Secret};
/// What the network of machines says to callers.
pub use mainbrella_net::{Denied, EgressEvent, EgressLog, EgressPage, Explanation, Outcome, Verdict};
pub use readers::{ReadOrder, SnapshotReader};
