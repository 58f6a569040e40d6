//! `mainbrella extend`.

use mainbrella_client::api::ExtendMachine;

use crate::context::Context;
use crate::failure::Failure;
use crate::values::{MachineArg, OnIdle, Span, Switch};
use crate::verbs::get;

/// Give a machine more time
#[derive(Debug, clap::Args)]
#[command(override_usage = "mainbrella extend [OPTIONS] <ID[@CREATED_AT]>")]
#[command(group(clap::ArgGroup::new("lease").required(true).multiple(true).args(["ttl", "idle", "on_idle", "auto_resume"])))]
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
    /// Whether it ends then or is paused
    #[arg(long, value_enum, value_name = "stop|pause")]
    on_idle: Option<OnIdle>,
    /// Whether the next use resumes it when it is paused [default: on with --on-idle pause, else as it is]
    #[arg(long, value_enum, value_name = "on|off")]
    auto_resume: Option<Switch>,
}

/// Changes the lease of a machine.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let client = context.client()?;
    let machine = context.resolve(&client, &args.machine).await?;
    let body = ExtendMachine {
        ttl_seconds: args.ttl.map(Span::seconds),
        idle_timeout_seconds: args.idle.map(Span::seconds),
        on_idle: args.on_idle.map(Into::into),
        auto_resume: args.auto_resume.map(Switch::is_on),
    };
    get::show(context, &client.extend(&machine, &body).await?)?;
    Ok(0)
}
