//! `mainbrella snapshots`.

use mainbrella_client::SnapshotFilter;
use mainbrella_client::api::{Snapshot, SnapshotKind, SnapshotList, UpdateSnapshot};

use crate::context::Context;
use crate::failure::Failure;
use crate::output::{Tone, printable, size, span};

/// What was saved of machines
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// List snapshots, newest first
    List {
        /// Only of this kind
        #[arg(long, value_enum, value_name = "workspace|full")]
        kind: Option<Kind>,
        /// Only those that were put aside
        #[arg(long)]
        archived: bool,
        /// Only those of exactly this name
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
        /// At most so many
        #[arg(long, default_value_t = 100, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
        limit: u32,
    },
    /// Show one snapshot
    Get {
        /// The snapshot
        id: String,
    },
    /// Rename a snapshot, or put it aside
    Update {
        /// The snapshot
        id: String,
        /// Another name
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
        /// Put it aside, or take it up again
        #[arg(long, value_name = "true|false")]
        archived: Option<bool>,
    },
    /// Delete snapshots; machines that were started from them go on
    Rm {
        /// The snapshots
        #[arg(required = true)]
        ids: Vec<String>,
    },
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Kind {
    Workspace,
    Full,
}

/// Lists, shows, changes or deletes snapshots.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let client = context.client()?;
    match args.verb {
        Verb::List { kind, archived, name, limit } => {
            let kind = kind.map(|kind| match kind {
                Kind::Workspace => SnapshotKind::Workspace,
                Kind::Full => SnapshotKind::Full,
            });
            let limit = limit as usize;
            let page = u32::try_from(limit.min(1000)).unwrap_or(1000);
            let filter = SnapshotFilter { kind, archived: archived.then_some(true), name, limit: Some(page) };
            let (mut snapshots, mut cursor) = (Vec::new(), None);
            let more = loop {
                let page = client.snapshots(&filter, cursor.as_deref()).await?;
                snapshots.extend(page.snapshots);
                cursor = page.next_cursor;
                if snapshots.len() >= limit || cursor.is_none() {
                    break cursor.is_some() || snapshots.len() > limit;
                }
            };
            snapshots.truncate(limit);
            if context.output.json {
                context.output.json(&SnapshotList { snapshots, next_cursor: None })?;
                return Ok(0);
            }
            let now = jiff::Timestamp::now().as_millisecond();
            let rows = snapshots.iter().map(|s| row(s, now)).collect();
            context.output.table(&["ID", "KIND", "SAVED", "TAKES", "TEMPLATE", "SIZE", "NAME"], rows)?;
            if more {
                context.output.note(&format!("there are more; --limit {} shows them", limit.saturating_mul(10)));
            }
        }
        Verb::Get { id } => show(context, &client.snapshot(&id).await?)?,
        Verb::Update { id, name, archived } => {
            if name.is_none() && archived.is_none() {
                return Err(Failure::usage("nothing is to be changed").hint("Say --name, --archived or both."));
            }
            show(context, &client.update_snapshot(&id, &UpdateSnapshot { name, archived }).await?)?;
        }
        Verb::Rm { ids } => {
            for id in ids {
                client.delete_snapshot(&id).await?;
                if context.output.json {
                    context.output.json(&serde_json::json!({ "id": id, "deleted": true }))?;
                } else {
                    context.output.line(&format!("{} deleted", printable(&id)))?;
                }
            }
        }
    }
    Ok(0)
}

fn row(s: &Snapshot, now: i64) -> Vec<(String, Tone)> {
    let plain = |text: String| (text, Tone::Plain);
    let tone = if s.archived { Tone::Faint } else { Tone::Plain };
    vec![
        plain(s.id.clone()),
        plain(s.kind.as_str().to_owned()),
        plain(format!("{} ago", span(now - s.created_at_ms))),
        plain(size(s.bytes)),
        plain(s.catalog_id.clone()),
        plain(s.size.clone()),
        (if s.archived { format!("{} (archived)", s.name) } else { s.name.clone() }, tone),
    ]
}

/// Prints a snapshot: one fact a line.
fn show(context: &Context, s: &Snapshot) -> Result<(), Failure> {
    if context.output.json {
        return context.output.json(s);
    }
    let now = jiff::Timestamp::now().as_millisecond();
    let mut facts = vec![
        ("snapshot", s.id.clone()),
        ("name", printable(&s.name)),
        ("kind", s.kind.as_str().to_owned()),
        ("saved from", s.source.clone()),
        ("saved", format!("{} ago", span(now - s.created_at_ms))),
        ("template", s.catalog_id.clone()),
        ("size", s.size.clone()),
        ("internet", if s.internet { "on".to_owned() } else { "off".to_owned() }),
        ("takes", size(s.bytes)),
        ("archived", if s.archived { "yes".to_owned() } else { "no".to_owned() }),
    ];
    if let Some(at) = s.expires_at_ms {
        facts.push(("is removed", format!("in {}", span(at - now))));
    }
    let text: Vec<String> = facts.iter().map(|(name, value)| format!("{name:<12}{value}")).collect();
    context.output.line(&text.join("\n"))
}
