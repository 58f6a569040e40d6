//! Machines on this host: actors, drivers, templates, the jail, clean-up.
//!
//! This crate answers one reviewer's question: *do resources leak?* It knows neither the store nor
//! HTTP; what must be durable it hands to a [`Journal`].

pub mod driver;
pub mod error;
pub mod journal;

pub use driver::{Adoption, Driver, ExitReport, GuestStream, Instance, LaunchOrder};
pub use error::{DriverError, EngineError};
pub use journal::{Change, Journal, JournalError};
