//! `mainbrella restore`.

use mainbrella_client::MachineRef;
use mainbrella_client::api::RestoreSnapshot;

use super::save::doubtful;
use crate::context::Context;
use crate::failure::Failure;
use crate::values::{OnIdle, Pair, Span, Switch};

/// Start a new machine from a snapshot; prints its name, ID@CREATED_AT
///
/// It has the template, size and internet policy that were saved.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The snapshot, as `snapshots list` shows it
    snapshot: String,
    /// A name of your own, which can be used again when the machine has ended
    #[arg(long, value_name = "ID")]
    slot: Option<String>,
    /// It ends after so long, whatever it does
    #[arg(long, default_value = "1h", value_name = "DURATION")]
    ttl: Span,
    /// It ends when nobody uses it for so long
    #[arg(long, value_name = "DURATION")]
    idle: Option<Span>,
    /// Whether it ends then or is paused; a paused one goes on with its next use
    #[arg(long, value_enum, default_value = "stop", value_name = "stop|pause")]
    on_idle: OnIdle,
    /// Whether the next use resumes it when it is paused [default: on with --on-idle pause]
    #[arg(long, value_enum, value_name = "on|off")]
    auto_resume: Option<Switch>,
    /// No idle timeout, whatever the service's default is
    #[arg(long)]
    persistent: bool,
    /// A label to find it by; may be given several times
    #[arg(long = "label", value_name = "NAME=VALUE")]
    labels: Vec<Pair>,
    /// A variable for every command in it, over those that were saved
    #[arg(long, short, value_name = "NAME=VALUE")]
    env: Vec<Pair>,
    /// Repeating a restore with the same key and options gives the same machine
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
}

/// Starts a machine.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let client = context.client()?;
    let body = RestoreSnapshot {
        slot: args.slot,
        ttl_seconds: Some(args.ttl.seconds()),
        idle_timeout_seconds: args.idle.map(Span::seconds),
        on_idle: args.on_idle.into(),
        auto_resume: args.auto_resume.map(Switch::is_on),
        persistent: args.persistent,
        metadata: args.labels.into_iter().map(|Pair(k, v)| (k, v)).collect(),
        env: args.env.into_iter().map(|Pair(k, v)| (k, v)).collect(),
        ..RestoreSnapshot::default()
    };
    let key = args.idempotency_key.unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
    let mut made = client.restore(&args.snapshot, &body, &key).await;
    if matches!(&made, Err(e) if e.is_ambiguous() || e.is_retryable()) {
        // Under its key it is made once, however often it is asked for.
        made = client.restore(&args.snapshot, &body, &key).await;
    }
    let machine = made.map_err(|e| doubtful(e, &key))?.machine;
    if context.output.json {
        context.output.json(&machine)?;
    } else {
        context.output.line(&MachineRef::from(&machine).to_string())?;
    }
    Ok(0)
}
