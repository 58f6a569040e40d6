//! The groups of rows.

mod alive;
mod create;
mod file;
mod get;
mod jobs;
mod memory;
mod network;
mod preview;
mod save;
mod snapshot;
mod template;
mod warm;

use std::time::Duration;

use crate::Fault;
use crate::table::{Row, Samples, Unit};
use crate::world::{Need, World};

/// Rows that are measured together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// Creating machines, and their first command.
    Create,
    /// A command in a machine that ran one before.
    Warm,
    /// Memory of an idle machine.
    Memory,
    /// Creating with many machines alive.
    Alive,
    /// A large file.
    File,
    /// Looking at a machine.
    Get,
    /// Managed jobs.
    Jobs,
    /// Network seats, and what they add to a create.
    Network,
    /// The ingress of previews.
    Preview,
    /// Pausing, resuming and forking.
    Snapshot,
    /// Saving, and starting from what was saved.
    Save,
    /// Templates that start warm.
    Template,
}

impl Group {
    /// All of them, in the order of the table.
    pub const ALL: [Self; 12] = [
        Self::Create,
        Self::Warm,
        Self::Memory,
        Self::Alive,
        Self::File,
        Self::Get,
        Self::Jobs,
        Self::Network,
        Self::Preview,
        Self::Snapshot,
        Self::Save,
        Self::Template,
    ];

    /// Its word for `--only`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Warm => "warm",
            Self::Memory => "memory",
            Self::Alive => "alive",
            Self::File => "file",
            Self::Get => "get",
            Self::Jobs => "jobs",
            Self::Network => "network",
            Self::Preview => "preview",
            Self::Snapshot => "snapshot",
            Self::Save => "save",
            Self::Template => "template",
        }
    }

    /// What must run for it.
    pub fn needs(self) -> &'static [Need] {
        match self {
            Self::Create => &[Need::Driver, Need::WarmDriver, Need::Service, Need::WarmService],
            Self::Warm | Self::File | Self::Jobs => &[Need::Driver, Need::Service],
            Self::Memory => &[Need::Driver, Need::WarmDriver],
            Self::Alive => &[Need::Service],
            Self::Get => &[Need::FewRecords, Need::ManyRecords],
            Self::Network => &[Need::WarmPlainDriver, Need::WarmDriver],
            Self::Preview => &[],
            Self::Snapshot | Self::Save => &[Need::Driver],
            Self::Template => &[Need::WarmService, Need::Service],
        }
    }

    /// Measures it. Rows that are ready before something fails are kept.
    pub async fn run(self, world: &World, rows: &mut Vec<Row>) -> Result<(), Fault> {
        match self {
            Self::Create => create::run(world, rows).await,
            Self::Warm => warm::run(world, rows).await,
            Self::Memory => memory::run(world, rows).await,
            Self::Alive => alive::run(world, rows).await,
            Self::File => file::run(world, rows).await,
            Self::Get => get::run(world, rows).await,
            Self::Jobs => jobs::run(world, rows).await,
            Self::Network => network::run(world, rows).await,
            Self::Preview => preview::run(world, rows).await,
            Self::Snapshot => snapshot::run(world, rows).await,
            Self::Save => save::run(world, rows).await,
            Self::Template => template::run(world, rows).await,
        }
    }
}

/// Durations as samples in milliseconds.
fn milliseconds(times: &[Duration]) -> Result<Samples, Fault> {
    some(Unit::Milliseconds, times.iter().map(|t| t.as_secs_f64() * 1000.0).collect())
}

fn some(unit: Unit, values: Vec<f64>) -> Result<Samples, Fault> {
    Samples::new(unit, values).ok_or_else(|| "nothing was measured".into())
}

/// What a service answered instead.
fn refused(what: &str) -> impl Fn(mainbrella_client::ClientError) -> Fault {
    move |e| format!("{what}: {e:?}").into()
}
