//! `mainbrella get`.

use mainbrella_client::api::{EgressKind, Machine, OnIdle};

use crate::context::Context;
use crate::failure::Failure;
use crate::output::{printable, span};
use crate::values::MachineArg;
use crate::verbs::list;

/// Show one machine
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The machine
    #[arg(value_name = "ID[@CREATED_AT]")]
    machine: MachineArg,
}

/// Shows a machine.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let client = context.client()?;
    let machine = context.inspect(&client, &args.machine).await?;
    show(context, &machine)?;
    Ok(0)
}

/// What it may reach, in a few words.
fn reach(m: &Machine) -> String {
    match (m.egress.policy, m.egress.rules.len(), m.egress.dry_run) {
        _ if !m.internet => "off".to_owned(),
        (EgressKind::AllowList, _, true) => "on; a dry run of an allow-list".to_owned(),
        (EgressKind::AllowList, 1, false) => "what 1 rule allows".to_owned(),
        (EgressKind::AllowList, n, false) => format!("what {n} rules allow"),
        _ => "on".to_owned(),
    }
}

/// Prints a machine: one fact a line.
pub fn show(context: &Context, m: &Machine) -> Result<(), Failure> {
    if context.output.json {
        return context.output.json(m);
    }
    let now = jiff::Timestamp::now().as_millisecond();
    let instant = |ms: i64| {
        let at = jiff::Timestamp::from_millisecond(ms).map(|t| format!("{t:.0}")).unwrap_or_default();
        if ms >= now { format!("{at} (in {})", span(ms - now)) } else { format!("{at} ({} ago)", span(now - ms)) }
    };
    let mut facts = vec![
        ("machine", format!("{}@{}", m.id, m.created_at)),
        ("state", context.output.paint(m.state.as_str(), list::tone(m.state))),
        ("template", m.catalog_id.clone()),
        (
            "size",
            format!("{}: {} MiB, {} vCPU, {} MiB disk", m.size, m.limits.memory_mib, m.limits.vcpus, m.limits.disk_mib),
        ),
        ("isolation", m.isolation.clone()),
        ("internet", reach(m)),
    ];
    if let Some(at) = m.started_at_ms {
        facts.push(("answered first", instant(at)));
    }
    match m.ended_at_ms {
        Some(at) => facts.push(("ended", instant(at))),
        None => {
            facts.push(("ends", instant(m.hard_deadline_ms)));
            if let (Some(at), Some(timeout)) = (m.idle_deadline_ms, m.idle_timeout_seconds) {
                let timeout = span(i64::try_from(timeout).unwrap_or(i64::MAX / 1000).saturating_mul(1000));
                let what = if m.on_idle == OnIdle::Pause { "pauses if idle" } else { "ends if idle" };
                facts.push((what, format!("{}, after {timeout} without use", instant(at))));
            }
        }
    }
    if m.auto_resume && !m.state.is_final() {
        facts.push(("when paused", "the next use resumes it".to_owned()));
    }
    if let Some(reason) = &m.reason {
        facts.push(("reason", format!("{}: {}", reason.code, printable(&reason.message))));
    }
    facts.extend(m.metadata.iter().map(|(k, v)| ("label", printable(&format!("{k}={v}")))));
    let text: Vec<String> = facts.iter().map(|(name, value)| format!("{name:<15}{value}")).collect();
    context.output.line(&text.join("\n"))
}
