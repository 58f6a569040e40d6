//! Builds templates from recipes: steps in a machine, cached, logged.
//!
//! [`Builds`] keeps builds, their files and their logs, and carries them out, one after the other. What a build stands on —
//! templates, machines, snapshots — it reaches through [`Ground`] and [`Machine`]; it knows neither HTTP nor the store.
//!
//! A build plans its recipe, starts a machine from the last step that is cached (or from what `FROM` names), carries out what
//! is left, and saves the machine after each step. Whatever ends it, its machine is stopped and every snapshot it made is
//! either on record (as a step, or as a template) or gone.

mod base;
mod carry;
mod context;
mod copy;
mod failure;
mod ground;
mod lines;
mod log;
mod names;
mod record;
mod registry;
mod run;
mod settings;

pub use context::ContextError;
pub use failure::{Failure, Reason};
pub use ground::{
    BaseKind, BaseTemplate, CachedStep, Ground, Machine, MachineOrder, NewVersion, Node, NodeKind, Output, RunEnd,
    RunOrder, Save, Version,
};
pub use log::{Event, EventKind, LogReader, OutputStream};
pub use record::{Build, BuildRequest, BuildState};
pub use registry::{Builds, BuildsError, ContextUpload, Limits};
