//! Composition root: configuration, authentication, verbs, reconcilers, HTTP.
//!
//! A request passes the [`layers`], proves who sent it ([`auth`]), is checked by one of the verbs, finds its
//! machine through the fence, and is carried out by engine or store. Errors have one form and two halves:
//! what the caller reads and what the log holds.

pub mod auth;
mod builds;
mod compose;
pub mod config;
mod convert;
mod directory;
pub mod error;
mod extract;
mod fence;
mod heirs;
mod idempotency;
pub mod journal;
pub mod layers;
pub mod lock;
pub mod logging;
pub mod openapi;
pub mod previews;
pub mod reconcile;
pub mod serve;
mod signed;
mod sse;
pub mod start;
pub mod state;
pub mod vault;
mod verbs;

pub use compose::run;
pub use config::ServerConfig;
pub use start::StartError;
pub use verbs::router;
