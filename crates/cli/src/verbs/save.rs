//! `mainbrella save`.

use mainbrella_client::ClientError;
use mainbrella_client::api::{SaveSnapshot, SnapshotKind, StopOutcome};

use crate::context::Context;
use crate::failure::Failure;
use crate::output::size;
use crate::values::{MachineArg, Span};

/// Save a running machine under a name; prints the id of the snapshot
///
/// The files are saved, and with --full memory and processes, too. The machine goes on, unless it is to be stopped afterwards.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The machine
    #[arg(value_name = "ID[@CREATED_AT]")]
    machine: MachineArg,
    /// What it is called in lists; several may have the same name
    name: String,
    /// Save memory and processes, too
    #[arg(long)]
    full: bool,
    /// Stop the machine when it is saved
    #[arg(long)]
    stop: bool,
    /// It is removed after so long: a minute to a year [default: when somebody does]
    #[arg(long, value_name = "DURATION")]
    ttl: Option<Span>,
    /// Repeating the call with this key and the same options gives the same snapshot
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
}

/// Saves a machine.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let client = context.client()?;
    let machine = context.resolve(&client, &args.machine).await?;
    let kind = if args.full { SnapshotKind::Full } else { SnapshotKind::Workspace };
    let body = SaveSnapshot { name: args.name, kind, stop: args.stop, ttl_seconds: args.ttl.map(Span::seconds) };
    let key = args.idempotency_key.unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
    let mut saved = client.save(&machine, &body, &key).await;
    if matches!(&saved, Err(e) if e.is_ambiguous() || e.is_retryable()) {
        // Under its key it is saved once, however often it is asked for.
        saved = client.save(&machine, &body, &key).await;
    }
    let saved = saved.map_err(|e| doubtful(e, &key))?;
    if context.output.json {
        context.output.json(&saved)?;
        return Ok(0);
    }
    context.output.line(&saved.id)?;
    let fate = match saved.stop_outcome {
        Some(StopOutcome::Stopped) => "; the machine is stopped",
        Some(StopOutcome::Uncertain) => "; the machine is being stopped",
        None => "",
    };
    context.output.note(&format!("mainbrella: {} saved{fate}", size(saved.bytes)));
    Ok(0)
}

/// Says how to find out what became of a call whose outcome is open.
pub fn doubtful(e: ClientError, key: &str) -> Failure {
    let ambiguous = e.is_ambiguous();
    let failure = Failure::from(e);
    if !ambiguous {
        return failure;
    }
    let hint =
        format!("{} The same command with --idempotency-key {key} finds what was made, if anything.", failure.hint);
    failure.hint(hint.trim().to_owned())
}
