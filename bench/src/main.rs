//! How fast: measures Mainbrella on this host and prints one table. Started by `bench/run`.
//!
//! Every figure stands beside a floor or a peer that was measured in the same run, in turn with it. Nothing here passes or
//! fails on time: the table says what was met and what was missed, and the exit code only whether it could be measured.

mod bare;
mod conditions;
mod guest;
mod records;
mod rows;
mod table;
mod world;

use std::error::Error;
use std::io::{IsTerminal as _, Write as _};
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use futures::FutureExt as _;
use serde_json::json;
use tokio::signal::unix::{Signal, SignalKind, signal};

use conditions::Conditions;
use rows::Group;
use table::Row;
use world::{Scale, World};

/// Anything that kept something from being measured.
pub type Fault = Box<dyn Error + Send + Sync>;

/// Measures Mainbrella on this host, each figure beside a floor or a peer of the same run.
#[derive(Debug, Parser)]
#[command(name = "bench/run")]
struct Arguments {
    /// Only these groups of rows: create, warm, memory, alive, file, get, jobs, network, preview, snapshot. May be given several times.
    #[arg(long, value_name = "GROUP", value_parser = group)]
    only: Vec<Group>,
    /// Few samples: a look that takes minutes, not a figure to quote.
    #[arg(long)]
    quick: bool,
    /// Also write the rows here, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn group(text: &str) -> Result<Group, String> {
    let names: Vec<&str> = Group::ALL.iter().map(|g| g.name()).collect();
    Group::ALL.into_iter().find(|g| g.name() == text).ok_or_else(|| format!("one of {}", names.join(", ")))
}

/// Tells on standard error how far a group is.
pub fn progress(group: &str, done: usize, all: usize) {
    let mut err = std::io::stderr().lock();
    // That nobody reads it is no reason to stop.
    let _ = if err.is_terminal() {
        write!(err, "\r{group}: {done}/{all}\x1b[K{}", if done == all { "\n" } else { "" })
    } else if done == all || done.is_multiple_of(all.div_ceil(4)) {
        writeln!(err, "{group}: {done}/{all}")
    } else {
        Ok(())
    };
}

/// How a group ended.
enum End {
    Done,
    Failed(String),
    Interrupted,
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if !rustix::process::geteuid().is_root() {
        eprintln!("bench: whole machines need root; run this as root");
        return ExitCode::FAILURE;
    }
    let signals = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()));
    let (Ok(int), Ok(term)) = signals else {
        eprintln!("bench: signals cannot be listened for");
        return ExitCode::FAILURE;
    };
    measure(&arguments, (int, term)).await
}

async fn measure(arguments: &Arguments, mut signals: (Signal, Signal)) -> ExitCode {
    let scale = if arguments.quick { Scale::QUICK } else { Scale::FULL };
    let mut conditions = Conditions::begin();
    let mut rows: Vec<Row> = Vec::new();
    let mut well = true;
    for group in Group::ALL {
        if !arguments.only.is_empty() && !arguments.only.contains(&group) {
            continue;
        }
        let mut world = World::new(scale);
        let end = one(group, &mut world, &mut rows, &mut signals).await;
        let problems = world.close().await;
        well &= problems.is_empty();
        problems.iter().for_each(|p| eprintln!("bench: {}: {p}", group.name()));
        match end {
            End::Done => {}
            End::Failed(why) => {
                eprintln!("bench: {}: {why}", group.name());
                well = false;
            }
            End::Interrupted => {
                eprintln!("bench: interrupted; everything it started is gone");
                return ExitCode::from(130);
            }
        }
    }
    conditions.end();
    print!("{}\n{}", conditions.text(arguments.quick), table::render(&rows));
    if let Some(file) = &arguments.json {
        let all = json!({
            "conditions": conditions.json(arguments.quick),
            "rows": rows.iter().map(Row::json).collect::<Vec<_>>(),
        });
        if let Err(e) = std::fs::write(file, format!("{all:#}\n")) {
            eprintln!("bench: {} cannot be written: {e}", file.display());
            well = false;
        }
    }
    if well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Prepares and measures one group. What it started is in `world` when this returns.
async fn one(group: Group, world: &mut World, rows: &mut Vec<Row>, signals: &mut (Signal, Signal)) -> End {
    let told = |panic: Box<dyn std::any::Any + Send>| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
        End::Failed(text.unwrap_or("it panicked").to_owned())
    };
    // Not broken off: what is half started could not be ended.
    match AssertUnwindSafe(world.prepare(group.needs())).catch_unwind().await {
        Ok(Ok(())) => {}
        Ok(Err(e)) => return End::Failed(e.to_string()),
        Err(panic) => return told(panic),
    }
    let work = AssertUnwindSafe(group.run(world, rows)).catch_unwind();
    tokio::select! {
        done = work => match done {
            Ok(Ok(())) => End::Done,
            Ok(Err(e)) => End::Failed(e.to_string()),
            Err(panic) => told(panic),
        },
        _ = signals.0.recv() => End::Interrupted,
        _ = signals.1.recv() => End::Interrupted,
    }
}
