//! `mainbrella egress`, and policies on the command line.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use mainbrella_client::api::{EgressKind, EgressOutcome, EgressPolicy};

use crate::context::Context;
use crate::failure::Failure;
use crate::output::{Tone, printable};
use crate::values::{HostPort, MachineArg};
use crate::verbs::get;

/// Largest policy file.
const FILE_MAX: u64 = 256 * 1024;
/// Events of one page.
const PAGE: u32 = 1000;

/// Show and change what a machine may reach, and see what it was not let through to
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// Show what a machine may reach, in the form that `set` reads
    Show {
        /// The machine
        #[arg(value_name = "ID[@CREATED_AT]")]
        machine: MachineArg,
    },
    /// Change what a machine may reach; connections made under the former policy end
    Set {
        /// The machine
        #[arg(value_name = "ID[@CREATED_AT]")]
        machine: MachineArg,
        /// off: nothing, for the rest of its life; open: every public address
        #[arg(value_enum, value_name = "off|open", required_unless_present_any = ["egress", "allow"])]
        kind: Option<Kind>,
        #[command(flatten)]
        rules: RuleArgs,
    },
    /// Say what would become of a connection, and why; nothing is connected
    Explain {
        /// The machine
        #[arg(value_name = "ID[@CREATED_AT]")]
        machine: MachineArg,
        /// A host name or an address; port 443 unless it says another
        #[arg(value_name = "HOST[:PORT]")]
        target: HostPort,
    },
    /// List denied connections and lookups, oldest first
    Log {
        /// The machine
        #[arg(value_name = "ID[@CREATED_AT]")]
        machine: MachineArg,
        /// Only what came after this number
        #[arg(long, value_name = "NUMBER", default_value = "0")]
        after: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Kind {
    Off,
    Open,
}

/// The rules of an allow-list.
#[derive(Debug, Default, clap::Args)]
pub struct RuleArgs {
    /// Let it reach only what this file names: rules, one a line (`#` begins a remark), or a policy as JSON; `-` for standard input. May
    /// be given several times
    #[arg(long = "egress", value_name = "FILE")]
    egress: Vec<PathBuf>,
    /// Let it reach only this: NAME, *.NAME or ADDRESS[/N], perhaps with :PORT. May be given several times
    #[arg(long, value_name = "RULE")]
    allow: Vec<String>,
    /// With rules: let every public host pass, and record what would have been denied
    #[arg(long)]
    dry_run: bool,
}

impl RuleArgs {
    /// The policy they make. `None`: there are none.
    pub fn policy(&self) -> Result<Option<EgressPolicy>, Failure> {
        if self.egress.is_empty() && self.allow.is_empty() {
            return if self.dry_run {
                Err(Failure::usage("--dry-run belongs to an allow-list").hint("Give rules with --egress or --allow."))
            } else {
                Ok(None)
            };
        }
        let mut policy = EgressPolicy::allow_list(self.allow.iter().cloned());
        for file in &self.egress {
            let text = read(file)?;
            if text.trim_start().starts_with('{') {
                let whole: EgressPolicy = serde_json::from_str(&text)
                    .map_err(|e| Failure::usage(format!("{} is no egress policy: {e}", file.display())))?;
                if self.egress.len() + self.allow.len() > 1 {
                    return Err(Failure::usage("a policy as JSON stands alone")
                        .hint("Write its rules one a line to add others."));
                }
                policy = whole;
            } else {
                let mut lines: Vec<String> = rules(&text).collect();
                // As `show` writes those that are no list, or not yet in force.
                if let [whole @ ("off" | "open")] = lines.iter().map(String::as_str).collect::<Vec<_>>()[..] {
                    if self.egress.len() + self.allow.len() > 1 || self.dry_run {
                        return Err(Failure::usage(format!("the policy `{whole}` stands alone")));
                    }
                    return Ok(Some(if whole == "off" { EgressPolicy::off() } else { EgressPolicy::open() }));
                }
                policy.dry_run |= lines.iter().any(|line| line == "dry-run");
                lines.retain(|line| line != "dry-run");
                policy.rules.extend(lines);
            }
        }
        policy.dry_run |= self.dry_run;
        policy.checked().map_err(Failure::usage)?;
        Ok(Some(policy))
    }
}

/// The rules in a text: one a line, without remarks.
fn rules(text: &str) -> impl Iterator<Item = String> + '_ {
    let bare = |line: &'_ str| line.split('#').next().unwrap_or("").trim().to_owned();
    text.lines().map(bare).filter(|rule| !rule.is_empty())
}

fn read(file: &Path) -> Result<String, Failure> {
    let failed = |e: std::io::Error| Failure::io(&format!("reading the egress policy {}", file.display()), &e);
    let mut text = String::new();
    if file == Path::new("-") {
        std::io::stdin().lock().take(FILE_MAX + 1).read_to_string(&mut text).map_err(failed)?;
    } else {
        std::fs::File::open(file).and_then(|f| f.take(FILE_MAX + 1).read_to_string(&mut text)).map_err(failed)?;
    }
    if text.len() as u64 > FILE_MAX {
        return Err(Failure::usage(format!("{} is larger than 256 KiB", file.display())));
    }
    Ok(text)
}

/// Shows, changes, explains.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    match args.verb {
        Verb::Show { machine } => {
            let client = context.client()?;
            let policy = context.inspect(&client, &machine).await?.egress;
            if context.output.json {
                context.output.json(&policy)?;
            } else {
                context.output.line(&text(&policy))?;
            }
            Ok(0)
        }
        Verb::Set { machine, kind, rules } => {
            // Before anything is asked of the service: what cannot be read changes nothing.
            let policy = match (kind, rules.policy()?) {
                (Some(Kind::Off), None) => EgressPolicy::off(),
                (Some(Kind::Open), None) => EgressPolicy::open(),
                (None, Some(policy)) => policy,
                _ => return Err(Failure::usage("give either off or open, or rules with --egress or --allow")),
            };
            let client = context.client()?;
            let machine = context.resolve(&client, &machine).await?;
            get::show(context, &client.set_egress(&machine, &policy).await?)?;
            Ok(0)
        }
        Verb::Explain { machine, target } => explain(context, &machine, &target).await,
        Verb::Log { machine, after } => log(context, &machine, after).await,
    }
}

/// A policy as `set --egress` reads it.
fn text(policy: &EgressPolicy) -> String {
    let remark = match (policy.policy, policy.dry_run) {
        (EgressKind::Off, _) => return "off".to_owned(),
        (EgressKind::Open, _) => return "open".to_owned(),
        (EgressKind::AllowList, true) => "# allow-list; other public hosts pass and are recorded:\ndry-run",
        (EgressKind::AllowList, false) => "# allow-list",
    };
    std::iter::once(remark).chain(policy.rules.iter().map(String::as_str)).collect::<Vec<_>>().join("\n")
}

fn tone(outcome: EgressOutcome) -> Tone {
    match outcome {
        EgressOutcome::Allowed => Tone::Good,
        EgressOutcome::WouldDeny => Tone::Busy,
        EgressOutcome::Denied => Tone::Bad,
    }
}

async fn explain(context: &Context, machine: &MachineArg, target: &HostPort) -> Result<u8, Failure> {
    let client = context.client()?;
    let machine = context.resolve(&client, machine).await?;
    let said = client.explain_egress(&machine, &target.host, target.port).await?;
    if context.output.json {
        context.output.json(&said)?;
        return Ok(0);
    }
    let outcome = context.output.paint(said.outcome.as_str(), tone(said.outcome));
    let mut lines = vec![format!("{}:{}  {outcome}: {}", printable(&said.host), said.port, printable(&said.reason))];
    lines.extend(said.addresses.iter().map(|a| match &a.reserved {
        Some(kind) => format!("  {}  left out: {}", printable(&a.address), printable(kind)),
        None => format!("  {}", printable(&a.address)),
    }));
    context.output.line(&lines.join("\n"))?;
    Ok(0)
}

async fn log(context: &Context, machine: &MachineArg, after: u64) -> Result<u8, Failure> {
    let client = context.client()?;
    let machine = context.resolve(&client, machine).await?;
    let mut log = client.egress_log(&machine, after, Some(PAGE)).await?;
    while log.has_more {
        let next = client.egress_log(&machine, log.next_cursor, Some(PAGE)).await?;
        let events = std::mem::take(&mut log.events);
        log = next;
        log.events.splice(0..0, events);
    }
    if context.output.json {
        context.output.json(&log)?;
        return Ok(0);
    }
    let rows = log.events.iter().map(|e| {
        let at = i64::try_from(e.time_ms).ok().and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok());
        let host = e.name.clone().or_else(|| e.address.clone()).unwrap_or_default();
        vec![
            (e.sequence.to_string(), Tone::Faint),
            (at.map(|t| format!("{t:.0}")).unwrap_or_default(), Tone::Plain),
            (e.outcome.as_str().to_owned(), tone(e.outcome)),
            (format!("{host}:{}", e.port), Tone::Plain),
            (e.rule.clone(), Tone::Plain),
            (e.reason.clone(), Tone::Plain),
        ]
    });
    context.output.table(&["NUMBER", "TIME", "OUTCOME", "HOST", "RULE", "REASON"], rows.collect())?;
    if context.output.watched() {
        context.output.note(&format!("{} denied, {} would have been, in all", log.denied, log.would_deny));
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_show_prints_is_what_set_reads() {
        let policy = EgressPolicy::allow_list(["example.org", "*.example.org:8443", "93.184.216.0/24"]);
        let read: Vec<String> = rules(&text(&policy)).collect();
        assert_eq!(read, policy.rules);
        assert_eq!(rules("  # nothing\n\n a.example # b\r\nc.example").collect::<Vec<_>>(), ["a.example", "c.example"]);
    }
}
