//! `mainbrella resume`.

use crate::context::Context;
use crate::failure::Failure;
use crate::values::MachineArg;
use crate::verbs::get;

/// Bring a paused machine back
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The machine
    #[arg(value_name = "ID[@CREATED_AT]")]
    machine: MachineArg,
}

/// Resumes a machine.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let client = context.client()?;
    let machine = context.resolve(&client, &args.machine).await?;
    get::show(context, &client.resume(&machine).await?)?;
    Ok(0)
}
