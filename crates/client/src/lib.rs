//! A thin HTTP client of the Mainbrella API, typed by `mainbrella-api`.
//!
//! It sends each request once; only [`Client::create_or_reconcile`] repeats, under one idempotency key, and a
//! [`JobStream`] connects again from the last event it gave. HTTPS is
//! required except to this machine, redirects are refused, proxies of the environment are not used.

mod address;
mod builds;
mod contexts;
mod directories;
mod egress;
mod error;
mod files;
mod jobs;
mod machines;
mod previews;
mod secrets;
mod service;
mod snapshots;
mod socket;
mod transport;

pub use address::{DEFAULT_URL, is_loopback};
pub use builds::BuildStream;
pub use directories::Watch;
pub use error::{ApiFailure, ClientError};
pub use files::{Download, FilesOf, Upload, WriteOptions};
pub use jobs::{JobStream, StartedJob};
pub use machines::{Created, ListFilter, MachineRef};
pub use snapshots::SnapshotFilter;
pub use socket::{JobMessage, JobSocket};
pub use transport::{ApiKey, Client};

pub use mainbrella_api as api;
