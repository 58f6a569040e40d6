//! Vocabulary and rules of the domain: ids, generations, states, leases, limits.
//!
//! Nothing here performs I/O, reads a clock or awaits; time enters as an argument ([`Millis`]).

pub mod capability;
pub mod denial;
pub mod egress;
pub mod error;
pub mod id;
pub mod lease;
pub mod limits;
pub mod machine;
pub mod secret;
pub mod signal;
pub mod size;
pub mod snapshot;
pub mod state;
pub mod time;

pub use capability::{Accelerator, DriverReport, Isolation, JailReport};
pub use denial::DenyRule;
pub use egress::{AllowList, Decision, Denial, EgressPolicy, EgressRule, HostName, Target};
pub use error::{ErrorCode, Retry};
pub use id::{Generation, GenerationKey, IdError, MachineId, ProjectId, TemplateName};
pub use lease::{Lease, LeaseEnd};
pub use machine::{MachineRecord, MachineSpec, OnIdle};
pub use secret::{Placement, SecretName, SecretSpec, SecretValue};
pub use signal::Signal;
pub use size::{SizeClass, SizeSpec};
pub use snapshot::{SnapshotKey, SnapshotKind, SnapshotRecord, check_snapshot_name, check_snapshot_ttl};
pub use state::{Failure, FailureKind, MachineState};
pub use time::{CreatedAt, Millis};
