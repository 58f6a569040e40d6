//! `mainbrella stop`.

use std::time::Duration;

use mainbrella_client::api::{StopOutcome, StopResult};
use mainbrella_client::{Client, ClientError, MachineRef};

use crate::context::Context;
use crate::failure::{Exit, Failure};
use crate::values::MachineArg;

/// A stop is fenced and idempotent: asking again is safe.
const ATTEMPTS: u32 = 4;

/// Stop machines; files in them are lost
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The machines
    #[arg(value_name = "ID[@CREATED_AT]", required = true)]
    machines: Vec<MachineArg>,
}

/// Stops machines, each on its own: one that fails does not keep the others alive.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let client = context.client()?;
    let mut results: Vec<StopResult> = Vec::new();
    let mut failed: Option<Failure> = None;
    for arg in &args.machines {
        let outcome = match context.resolve(&client, arg).await {
            Ok(machine) => stop(&client, &machine).await.map_err(Failure::from),
            Err(e) => Err(e),
        };
        match outcome {
            Ok(result) => {
                let name = MachineRef::from(&result.machine);
                if !context.output.json {
                    let word = if result.outcome == StopOutcome::Stopped { "stopped" } else { "uncertain" };
                    context.output.line(&format!("{name} {word}"))?;
                }
                if result.outcome == StopOutcome::Uncertain {
                    failed.get_or_insert(
                        Failure::new(
                            Exit::Failed,
                            "cleanup_uncertain",
                            format!("the clean-up of {name} is not confirmed"),
                        )
                        .hint("The service goes on with it; stop it again to see the outcome."),
                    );
                }
                results.push(result);
            }
            Err(e) if args.machines.len() > 1 => {
                e.print(context.output.json);
                failed.get_or_insert(Failure::new(e.exit_code, &e.code, "not every machine was stopped"));
            }
            Err(e) => return Err(e),
        }
    }
    if context.output.json {
        context.output.json(&serde_json::json!({ "results": results }))?;
    }
    failed.map_or(Ok(0), Err)
}

async fn stop(client: &Client, machine: &MachineRef) -> Result<StopResult, ClientError> {
    let mut attempt = 0;
    loop {
        attempt += 1;
        let again = match client.stop(machine).await {
            Ok(r) if r.outcome == StopOutcome::Stopped || attempt >= ATTEMPTS => return Ok(r),
            Ok(_) => true,
            Err(e) => {
                let lost = matches!(e, ClientError::Lost { .. })
                    || (e.is_retryable() && !matches!(e, ClientError::Connect { .. }));
                if !lost || attempt >= ATTEMPTS {
                    return Err(e);
                }
                lost
            }
        };
        if again {
            tokio::time::sleep(Duration::from_millis(200) * 2u32.pow(attempt - 1)).await;
        }
    }
}
