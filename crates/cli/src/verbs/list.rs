//! `mainbrella list`.

use mainbrella_client::ListFilter;
use mainbrella_client::api::{Machine, MachineList, State};

use crate::context::Context;
use crate::failure::Failure;
use crate::output::{Tone, span};
use crate::values::Pair;

/// Machines a page.
const PAGE: u32 = 200;

/// List machines, newest first
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Those that have ended too; they are kept for seven days
    #[arg(long, short)]
    all: bool,
    /// Only those in this state
    #[arg(long, value_name = "STATE", value_parser = state)]
    state: Option<State>,
    /// Only those with this label; may be given several times
    #[arg(long = "label", value_name = "NAME=VALUE")]
    labels: Vec<Pair>,
    /// At most so many
    #[arg(long, short = 'n', default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    limit: u32,
}

fn state(s: &str) -> Result<State, String> {
    s.parse::<mainbrella_types::MachineState>().map(State::from).map_err(|_| {
        let all: Vec<&str> = mainbrella_types::MachineState::ALL.iter().map(|s| s.as_str()).collect();
        format!("one of {}", all.join(", "))
    })
}

/// Lists machines.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let client = context.client()?;
    let limit = args.limit as usize;
    let filter = ListFilter {
        state: args.state,
        metadata: args.labels.into_iter().map(|Pair(k, v)| (k, v)).collect(),
        limit: Some(PAGE.min(args.limit.saturating_add(1))),
    };
    let mut machines: Vec<Machine> = Vec::new();
    let mut cursor: Option<String> = None;
    let more = loop {
        let page = client.list(&filter, cursor.as_deref()).await?;
        machines.extend(page.machines.into_iter().filter(|m| args.all || args.state.is_some() || !m.state.is_final()));
        if machines.len() > limit {
            machines.truncate(limit);
            break true;
        }
        match page.next_cursor {
            Some(next) if cursor.as_ref() != Some(&next) => cursor = Some(next),
            _ => break false,
        }
    };
    if context.output.json {
        context.output.json(&MachineList { machines, next_cursor: None })?;
        return Ok(0);
    }
    let now = jiff::Timestamp::now().as_millisecond();
    let rows = machines.iter().map(|m| row(m, now)).collect();
    context.output.table(&["ID", "CREATED_AT", "STATE", "TEMPLATE", "SIZE", "ENDS", "LABELS"], rows)?;
    if more {
        context.output.note(&format!("there are more; --limit {} shows them", limit * 10));
    }
    Ok(0)
}

/// The colour of a state.
pub fn tone(state: State) -> Tone {
    match state {
        State::Running => Tone::Good,
        State::Failed => Tone::Bad,
        State::Stopped => Tone::Faint,
        State::Creating | State::Pausing | State::Paused | State::Resuming | State::Stopping => Tone::Busy,
    }
}

fn row(m: &Machine, now: i64) -> Vec<(String, Tone)> {
    let ends = match (m.ended_at_ms, &m.reason) {
        (Some(at), reason) => {
            let why = reason.as_ref().map(|r| format!(", {}", r.code)).unwrap_or_default();
            format!("{} ago{why}", span(now - at))
        }
        (None, _) => {
            let next = m.idle_deadline_ms.map_or(m.hard_deadline_ms, |idle| idle.min(m.hard_deadline_ms));
            let why = if next < m.hard_deadline_ms { " if idle" } else { "" };
            format!("in {}{why}", span(next - now))
        }
    };
    let labels: Vec<String> = m.metadata.iter().map(|(k, v)| format!("{k}={v}")).collect();
    let plain = |s: &str| (s.to_owned(), Tone::Plain);
    vec![
        plain(&m.id),
        plain(&m.created_at),
        (m.state.as_str().to_owned(), tone(m.state)),
        plain(&m.catalog_id),
        plain(&m.size),
        (ends, Tone::Plain),
        plain(&labels.join(" ")),
    ]
}
