//! What travels over `/v1`: request and reply bodies, the error body, header names.
//!
//! Everything is camelCase JSON. Requests refuse fields they do not know; replies may grow, so a reader
//! ignores what it does not know. Instants that end in `Ms` are milliseconds since the Unix epoch;
//! durations name their unit. Rules and limits live in `mainbrella-types`.

pub mod build;
pub mod capabilities;
pub mod command;
pub mod context;
pub mod disk;
pub mod egress;
pub mod error;
pub mod file;
pub mod fork;
pub mod headers;
pub mod health;
pub mod job;
pub mod key;
pub mod machine;
pub mod preview;
pub mod process;
mod schema;
pub mod secret;
pub mod snapshot;
pub mod template;

pub use build::{Build, BuildEvent, BuildEventKind, BuildEvents, BuildFailure, BuildList, BuildState, CreateBuild};
pub use capabilities::Capabilities;
pub use command::{CommandLine, CommandResult, OmittedRange, RunCommand};
pub use context::{
    Bundle, CodeError, CodeEvent, CodeOutput, CodeResult, CodeStatus, Context, ContextList, ContextState,
    CreateContext, OutputKind, RunCode,
};
pub use disk::{DiskReport, DiskUse};
pub use egress::{EgressEvent, EgressExplanation, EgressKind, EgressLog, EgressOutcome, EgressPolicy, ResolvedAddress};
pub use error::ErrorBody;
pub use file::{
    ChangeMode, CreateFileUrl, FileEntry, FileEvent, FileEventType, FileList, FileType, FileUrl, FileWritten,
    MakeDirectory, MoveFile, RemoveFile, RemoveResult, TreeWritten, UrlMethod,
};
pub use fork::{
    ChildReceipt, ForkMachine, ForkResult, ForkedSecret, ReseedHook, Reseeded, SecretForChildren, SecretOutcome,
};
pub use health::Health;
pub use job::{
    CancelJob, ExitCause, Job, JobEvent, JobEventKind, JobEvents, JobExit, JobFrame, JobList, JobState, SendSignal,
    SignalName, StartJob, StdinAccepted, StreamName, TerminalSize,
};
pub use key::{CreateKey, Key, KeyList, KeyRole, NewKey};
pub use machine::{
    CreateMachine, ExtendMachine, Machine, MachineCapabilities, MachineLimits, MachineList, OnIdle, Reason, State,
    StopOutcome, StopResult,
};
pub use preview::{CreatePreview, Preview, PreviewList, RenewPreview};
pub use process::{Process, ProcessList};
pub use secret::{OnFork, Secret, SecretBody, SecretList, SecretRemoved};
pub use snapshot::{RestoreSnapshot, SaveSnapshot, Snapshot, SnapshotKind, SnapshotList, UpdateSnapshot};
pub use template::{
    CreateTemplate, TagTemplate, Template, TemplateDetails, TemplateKind, TemplateList, TemplateProbe, TemplateRemoved,
    TemplateVersion,
};

/// The prefix of every path of this version.
pub const V1: &str = "/v1";
