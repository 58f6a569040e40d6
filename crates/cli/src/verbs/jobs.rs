//! `mainbrella jobs` and `mainbrella ps`: what runs in a machine, and what ran.

use mainbrella_client::api::{CommandLine, ExitCause, Job, JobList, JobState, SignalName};

use crate::context::Context;
use crate::failure::Failure;
use crate::output::{Tone, span};
use crate::values::MachineArg;

/// Jobs a page.
const PAGE: u32 = 200;

/// List the jobs of a machine, newest first
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The machine
    #[arg(value_name = "ID[@CREATED_AT]")]
    machine: MachineArg,
    /// Only those that run
    #[arg(long, short)]
    running: bool,
    /// At most so many
    #[arg(long, short = 'n', default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    limit: u32,
}

/// Lists jobs.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let client = context.client()?;
    let machine = context.resolve(&client, &args.machine).await?;
    let limit = args.limit as usize;
    let mut jobs: Vec<Job> = Vec::new();
    let mut cursor: Option<String> = None;
    let more = loop {
        let page = client.jobs(&machine, PAGE, cursor.as_deref()).await?;
        jobs.extend(page.executions.into_iter().filter(|j| !args.running || j.state == JobState::Running));
        if jobs.len() > limit {
            jobs.truncate(limit);
            break true;
        }
        match page.next_cursor {
            Some(next) if cursor.as_ref() != Some(&next) => cursor = Some(next),
            _ => break false,
        }
    };
    if context.output.json {
        context.output.json(&JobList { executions: jobs, next_cursor: None })?;
        return Ok(0);
    }
    let now = jiff::Timestamp::now().as_millisecond();
    context
        .output
        .table(&["JOB", "STATE", "STARTED", "OUTPUT", "COMMAND"], jobs.iter().map(|j| row(j, now)).collect())?;
    if more {
        context.output.note(&format!("there are more; --limit {} shows them", limit * 10));
    }
    Ok(0)
}

fn row(job: &Job, now: i64) -> Vec<(String, Tone)> {
    let (state, tone) = match &job.exit {
        None => ("running".to_owned(), Tone::Good),
        Some(exit) => match (exit.cause, exit.code, exit.signal) {
            (ExitCause::Exited, Some(0), _) => ("exit 0".to_owned(), Tone::Faint),
            (ExitCause::Exited, Some(code), _) => (format!("exit {code}"), Tone::Bad),
            (ExitCause::Signalled, _, Some(n)) => (format!("signal {n}"), Tone::Bad),
            (cause, ..) => (cause.as_str().replace('_', " "), Tone::Busy),
        },
    };
    let started = job.started_at.parse::<jiff::Timestamp>().map(jiff::Timestamp::as_millisecond);
    let started = started.map_or_else(|_| job.started_at.clone(), |at| format!("{} ago", span(now - at)));
    let plain = |text: String| (text, Tone::Plain);
    let output = format!("{} B", job.stdout_bytes + job.stderr_bytes);
    vec![plain(job.id.clone()), (state, tone), plain(started), plain(output), plain(shown(&job.command))]
}

/// A command on one line.
fn shown(command: &CommandLine) -> String {
    match command {
        CommandLine::Text(text) => text.clone(),
        CommandLine::Argv(argv) => argv.join(" "),
    }
}

/// List the processes of a machine
#[derive(Debug, clap::Args)]
pub struct PsArgs {
    /// The machine
    #[arg(value_name = "ID[@CREATED_AT]")]
    machine: MachineArg,
    /// Send a signal to this process instead; may be given several times
    #[arg(long, value_name = "PID")]
    kill: Vec<u32>,
    /// Which signal --kill sends
    #[arg(long, value_name = "SIGNAL", default_value = "TERM", requires = "kill")]
    signal: String,
}

/// Lists or signals processes.
pub async fn ps(context: &Context, args: PsArgs) -> Result<u8, Failure> {
    let client = context.client()?;
    let machine = context.resolve(&client, &args.machine).await?;
    if !args.kill.is_empty() {
        for pid in args.kill {
            client.signal_process(&machine, pid, SignalName::Name(args.signal.clone())).await?;
        }
        return Ok(0);
    }
    let list = client.processes(&machine).await?;
    if context.output.json {
        context.output.json(&list)?;
        return Ok(0);
    }
    let now = jiff::Timestamp::now().as_millisecond();
    let rows = list.processes.iter().map(|p| {
        let command = if p.argv.is_empty() { format!("[{}]", p.command) } else { p.argv.join(" ") };
        let cells = [
            p.pid.to_string(),
            p.ppid.to_string(),
            p.uid.to_string(),
            p.state.clone(),
            format!("{} MiB", p.rss_bytes >> 20),
            span(i64::try_from(p.cpu_time_ms).unwrap_or(i64::MAX)),
            span(now - p.started_at_ms),
            command,
        ];
        cells.into_iter().map(|text| (text, Tone::Plain)).collect()
    });
    context.output.table(&["PID", "PPID", "UID", "STATE", "MEMORY", "CPU", "AGE", "COMMAND"], rows.collect())?;
    if list.truncated {
        context.output.note("there are more processes than can be listed");
    }
    Ok(0)
}
