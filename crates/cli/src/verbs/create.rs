//! `mainbrella create`.

use std::time::Instant;

use mainbrella_client::MachineRef;
use mainbrella_client::api::CreateMachine;
use mainbrella_types::ErrorCode;

use crate::context::Context;
use crate::failure::{Exit, Failure};
use crate::values::{OnIdle, Pair, Span, Switch};
use crate::verbs::egress::RuleArgs;

/// Create a machine; prints its name, ID@CREATED_AT
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What it starts from
    #[arg(default_value = "python", value_name = "TEMPLATE")]
    template: String,
    /// micro, small, medium or large
    #[arg(long, default_value = "small", value_name = "SIZE")]
    size: String,
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
    /// Whether it may reach the internet; `off` holds for ever [default: as the host has it]
    #[arg(long, value_enum, value_name = "on|off")]
    internet: Option<Switch>,
    #[command(flatten)]
    rules: RuleArgs,
    /// A label to find it by; may be given several times
    #[arg(long = "label", value_name = "NAME=VALUE")]
    labels: Vec<Pair>,
    /// A variable for every command in it. The machine can read it: no place for protected secrets
    #[arg(long, short, value_name = "NAME=VALUE")]
    env: Vec<Pair>,
    /// Repeating a create with the same key and options gives the same machine
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
}

/// Creates a machine.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let egress = args.rules.policy()?;
    let client = context.client()?;
    let wanted = args.internet.map(Switch::is_on);
    let body = CreateMachine {
        size: args.size,
        slot: args.slot,
        ttl_seconds: Some(args.ttl.seconds()),
        idle_timeout_seconds: args.idle.map(Span::seconds),
        on_idle: args.on_idle.into(),
        auto_resume: args.auto_resume.map(Switch::is_on),
        internet: wanted,
        egress: egress.clone(),
        persistent: args.persistent,
        metadata: args.labels.into_iter().map(|Pair(k, v)| (k, v)).collect(),
        env: args.env.into_iter().map(|Pair(k, v)| (k, v)).collect(),
        ..CreateMachine::new(args.template)
    };
    let key = args.idempotency_key.unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
    let begin = Instant::now();
    let created = client.create_or_reconcile(&body, &key).await.map_err(|e| {
        // A machine that could not be made is an outcome, not a doubt.
        let ambiguous = e.is_ambiguous() && e.code() != Some(ErrorCode::CreateFailed);
        let failure = Failure::from(e);
        if !ambiguous {
            return failure;
        }
        let hint = format!(
            "{} The same command with --idempotency-key {key} finds the machine if there is one.",
            failure.hint
        );
        failure.hint(hint.trim().to_owned())
    })?;
    let machine = created.machine;
    let name = MachineRef::from(&machine);
    // The service writes rules in its own form; those of a machine that was there already may have been changed.
    let other_rules = egress.is_some_and(|e| !created.replayed && e.checked() != machine.egress.checked());
    if other_rules || wanted.is_some_and(|internet| machine.internet != internet) {
        let stopped = client.stop(&name).await.is_ok();
        let fate = if stopped { "it was stopped" } else { "and it could not be stopped" };
        return Err(Failure::new(
            Exit::Unsupported,
            "unsupported",
            format!("{name} did not get the network setting asked for; {fate}"),
        ));
    }
    if context.output.json {
        context.output.json(&machine)?;
        return Ok(0);
    }
    context.output.line(&name.to_string())?;
    if context.output.watched() {
        let what = if created.replayed { "there already" } else { "created" };
        let took = begin.elapsed().as_secs_f64();
        context.output.note(&format!(
            "{what} in {took:.2} s: {}, {} ({} MiB, {} vCPU), {}",
            machine.catalog_id, machine.size, machine.limits.memory_mib, machine.limits.vcpus, machine.isolation
        ));
    }
    Ok(0)
}
