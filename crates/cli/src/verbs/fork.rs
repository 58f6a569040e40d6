//! `mainbrella fork`.

use std::collections::BTreeMap;

use mainbrella_client::api::fork::Reissue;
use mainbrella_client::api::{ForkMachine, OnFork, SecretForChildren, SecretOutcome, State};
use mainbrella_types::SecretName;

use crate::context::Context;
use crate::failure::{Exit, Failure};
use crate::output::printable;
use crate::values::{MachineArg, Pair, Span};

/// Make copies of a running machine, which goes on
///
/// Each has the memory, processes, disk and jobs that the machine has now, and is a machine of its own. Prints one name a line.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The machine
    #[arg(value_name = "ID[@CREATED_AT]")]
    machine: MachineArg,
    /// How many
    #[arg(long, short = 'n', value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    count: u32,
    /// How long each may live [default: an hour]
    #[arg(long, value_name = "DURATION")]
    ttl: Option<Span>,
    /// After how long without use each ends [default: as the source]
    #[arg(long, value_name = "DURATION")]
    idle: Option<Span>,
    /// A label, over those of the source; may be given several times
    #[arg(long, short, value_name = "NAME=VALUE")]
    label: Vec<Pair>,
    /// Each gets this secret of the machine, too; may be given several times
    #[arg(long, value_name = "NAME")]
    secret_inherit: Vec<SecretName>,
    /// None gets this secret, whatever it was set with; may be given several times
    #[arg(long, value_name = "NAME")]
    secret_drop: Vec<SecretName>,
    /// Each gets this secret with the value in an environment variable; may be given several times
    #[arg(long, value_name = "NAME=VAR")]
    secret_reissue: Vec<Pair>,
    /// Repeating the call with this key gives the same machines
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
}

/// Forks a machine.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let client = context.client()?;
    let machine = context.resolve(&client, &args.machine).await?;
    let metadata: BTreeMap<String, String> = args.label.into_iter().map(|Pair(k, v)| (k, v)).collect();
    let secrets = wishes(args.secret_inherit, args.secret_drop, args.secret_reissue)?;
    let body = ForkMachine {
        secrets,
        count: Some(args.count),
        ttl_seconds: args.ttl.map(Span::seconds),
        idle_timeout_seconds: args.idle.map(Span::seconds),
        metadata,
    };
    let key = args.idempotency_key.unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
    let made = client.fork(&machine, &body, Some(&key)).await?;
    if context.output.json {
        context.output.json(&made)?;
    } else {
        for child in made.children.iter().filter(|child| child.state == State::Running) {
            context.output.line(&format!("{}@{}", child.id, child.created_at))?;
        }
        for secret in made.receipts.first().into_iter().flat_map(|receipt| &receipt.secrets) {
            let what = match secret.outcome {
                SecretOutcome::Dropped => "stays with the source",
                SecretOutcome::Inherited => "was handed on",
                SecretOutcome::Reissued => "was handed on with another value",
            };
            context.output.note(&format!("mainbrella: the secret {} {what}", printable(&secret.name)));
        }
        for receipt in &made.receipts {
            let (random, child) = (&receipt.random, printable(&receipt.id));
            if random.acknowledged < random.registered {
                let (done, all) = (random.acknowledged, random.registered);
                context.output.note(&format!(
                    "mainbrella: {child}: only {done} of {all} registered programs drew new random numbers"
                ));
            }
            for hook in random.hooks.iter().filter(|hook| hook.exit_code != Some(0)) {
                context.output.note(&format!("mainbrella: {child}: the reseed hook {} failed", printable(&hook.name)));
            }
        }
        if let Some(ms) = made.still_ms {
            context.output.note(&format!("mainbrella: the source stood still for {ms} ms"));
        }
    }
    let missing = made.children.iter().filter(|child| child.state == State::Failed).count();
    if missing > 0 {
        context.output.note(&format!("mainbrella: {missing} of the copies could not be made"));
        return Ok(Exit::Failed as u8);
    }
    Ok(0)
}

/// What the children get of secrets that are named.
fn wishes(
    inherit: Vec<SecretName>,
    drop: Vec<SecretName>,
    reissue: Vec<Pair>,
) -> Result<BTreeMap<String, SecretForChildren>, Failure> {
    let plain = |policy| move |name: SecretName| Ok::<_, Failure>((name.to_string(), SecretForChildren::Plain(policy)));
    let another = |Pair(name, variable): Pair| {
        let missing = || Failure::usage(format!("there is no text in the environment variable {variable}"));
        let reissue = std::env::var(&variable).map_err(|_| missing())?;
        Ok((name, SecretForChildren::Reissue(Reissue { reissue })))
    };
    let all = inherit.into_iter().map(plain(OnFork::Inherit)).chain(drop.into_iter().map(plain(OnFork::Drop)));
    let mut wishes = BTreeMap::new();
    for wish in all.chain(reissue.into_iter().map(another)) {
        let (name, wish) = wish?;
        if wishes.insert(name.clone(), wish).is_some() {
            return Err(Failure::usage(format!("the secret {name} is named twice")));
        }
    }
    Ok(wishes)
}
