//! `mainbrella logs`: what a job has said, and what it says.

use std::io::{IsTerminal as _, Write as _};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mainbrella_client::api::{ExitCause, JobEvent, JobEventKind, StreamName};
use mainbrella_client::{Client, MachineRef};

use crate::context::Context;
use crate::failure::{Exit, Failure};
use crate::output::Output;
use crate::values::MachineArg;

/// Events a page.
const PAGE: u32 = 1000;

/// Show the output of a job
///
/// Standard output and standard error as they were written; with --json one event a line.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The machine
    #[arg(value_name = "ID[@CREATED_AT]")]
    machine: MachineArg,
    /// The job, or the beginning of its id; without it the newest
    #[arg(value_name = "JOB")]
    job: Option<String>,
    /// Go on until the job ends, over broken connections
    #[arg(long, short)]
    follow: bool,
    /// Begin after this event
    #[arg(long, default_value_t = 0, value_name = "CURSOR")]
    cursor: u64,
}

/// Shows output.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let client = context.client()?;
    let machine = context.resolve(&client, &args.machine).await?;
    let job = find(&client, &machine, args.job.as_deref()).await?;
    let output = context.output;
    if args.follow {
        let mut stream = client.follow_job(&machine, &job, args.cursor);
        while let Some(event) = stream.next().await? {
            show(output, &event)?;
            // For somebody who looks; what is kept elsewhere is the job's own words and nothing else.
            if let JobEventKind::Exit { cause, code, signal, .. } = event.kind
                && std::io::stderr().is_terminal()
            {
                output.note(&format!("mainbrella: {}", ending(cause, code, signal)));
            }
        }
        return Ok(0);
    }
    let mut cursor = args.cursor;
    loop {
        let page = client.job_events(&machine, &job, cursor, PAGE).await?;
        for event in &page.events {
            show(output, event)?;
        }
        if !page.has_more || page.events.is_empty() {
            return Ok(0);
        }
        cursor = page.next_cursor;
    }
}

/// How a job ended, in words.
fn ending(cause: ExitCause, code: Option<i32>, signal: Option<i32>) -> String {
    match (cause, code, signal) {
        (ExitCause::Exited, Some(code), _) => format!("the job ended with exit code {code}"),
        (ExitCause::Signalled, _, Some(signal)) => format!("the job was ended by signal {signal}"),
        (ExitCause::TimedOut, ..) => "the job ran into its time-out".to_owned(),
        (ExitCause::Cancelled, ..) => "the job was cancelled".to_owned(),
        (ExitCause::MachineStopped, ..) => "the job ended with its machine, which was stopped".to_owned(),
        (other, ..) => format!("the job ended: {}", other.as_str()),
    }
}

/// The id of the job that is meant.
pub async fn find(client: &Client, machine: &MachineRef, begins: Option<&str>) -> Result<String, Failure> {
    let missing = || {
        Failure::new(Exit::NotFound, "not_found", "there is no such job in this machine")
            .hint("`mainbrella jobs ID` lists them.")
    };
    let begins = match begins {
        Some(whole) if whole.len() == 32 => return Ok(whole.to_owned()),
        other => other.unwrap_or(""),
    };
    let page = client.jobs(machine, 1000, None).await?;
    let mut found = page.executions.into_iter().map(|job| job.id).filter(|id| id.starts_with(begins));
    let first = found.next().ok_or_else(missing)?;
    if !begins.is_empty() && found.next().is_some() {
        return Err(Failure::usage(format!("several jobs begin with {begins}")).hint("Write more of the id."));
    }
    Ok(first)
}

fn show(output: Output, event: &JobEvent) -> Result<(), Failure> {
    if output.json {
        let text = serde_json::to_string(event).map_err(|e| Failure::io("making JSON", &e.into()))?;
        return output.line(&text);
    }
    match &event.kind {
        JobEventKind::Output { stream, data_base64, .. } => {
            let bytes = STANDARD
                .decode(data_base64)
                .map_err(|_| Failure::new(Exit::Failed, "invalid_response", "the output in an event is not base64"))?;
            match stream {
                StreamName::Stdout => output.raw(&bytes)?,
                StreamName::Stderr => std::io::stderr()
                    .lock()
                    .write_all(&bytes)
                    .map_err(|e| Failure::io("writing to standard error", &e))?,
            }
        }
        JobEventKind::Gap { length, .. } => {
            output.note(&format!("mainbrella: {length} bytes are not kept any more"));
        }
        JobEventKind::Started { .. } | JobEventKind::Exit { .. } => {}
    }
    Ok(())
}
