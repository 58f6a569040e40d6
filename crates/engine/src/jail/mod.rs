//! The jail around a VMM: what it may see and do if the guest takes it over.
//!
//! A VMM is started by re-executing the service binary as *launcher* ([`launcher_main`]), one process a start. It
//! builds the walls in a fresh single-threaded process and then becomes the VMM. The VMM opens nothing by name
//! but its own program and libraries: memory, disks, sockets and log arrive as descriptors.
//!
//! Which walls stand on this host is found out by [`probe`], which starts a real VMM and looks at it from outside.

mod launcher;
mod probe;
mod spec;
mod start;
mod walls;

pub use launcher::launcher_main;
pub use probe::{Ground, Probe, probe};
pub use spec::{JailSpec, Walls};
pub use start::{JailError, Started, start};

/// First argument of the service binary that makes it the launcher.
pub const LAUNCH_ARGUMENT: &str = "internal-launch";
