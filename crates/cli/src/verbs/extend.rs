//! `mainbrella extend`.

use mainbrella_client::api::ExtendMachine;

use crate::context::Context;
use crate::failure::Failure;
use crate::values::{MachineArg, Span};
use crate::verbs::get;

/// Give a machine more time
#[derive(Debug, clap::Args)]
#[command(override_usage = "mainbrella extend [OPTIONS] <ID[@CREATED_AT]> [--ttl <DURATION>] [--idle <DURATION>]")]
#[command(group(clap::ArgGroup::new("lease").required(true).multiple(true).args(["ttl", "idle"])))]
pub struct Args {
    /// The machine
    #[arg(value_name = "ID[@CREATED_AT]")]
    machine: MachineArg,
    /// It may live at least so long from now; never shortens what it has
    #[arg(long, value_name = "DURATION")]
    ttl: Option<Span>,
    /// It ends when nobody uses it for so long, counted from now
    #[arg(long, value_name = "DURATION")]
    idle: Option<Span>,
}

/// Changes the lease of a machine.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let client = context.client()?;
    let machine = context.resolve(&client, &args.machine).await?;
    let body =
        ExtendMachine { ttl_seconds: args.ttl.map(Span::seconds), idle_timeout_seconds: args.idle.map(Span::seconds) };
    get::show(context, &client.extend(&machine, &body).await?)?;
    Ok(0)
}
