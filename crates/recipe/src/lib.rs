//! Recipes of templates, in the syntax of Dockerfiles.
//!
//! [`Recipe::parse`] reads one and says what it starts from; [`Recipe::plan`] then knows that start and the [`Context`] and
//! says what is to be done, in order: the [`Step`]s that change a machine, each with the key its result is kept under, and
//! what the template is at the end ([`Settings`]). Nothing is run here. What is not supported is refused with the line it
//! stands on, never passed over.

mod context;
mod copy;
mod error;
mod health;
mod key;
mod parse;
mod pattern;
mod plan;
mod settings;
mod words;

pub use context::{Context, Entry, EntryKind};
pub use copy::{Copy, CopyEntry};
pub use error::{Fault, RecipeError};
pub use health::Probe;
pub use parse::Recipe;
pub use plan::{Base, Plan, Step, StepKind, Warning};
pub use settings::{Port, Protocol, Settings};
