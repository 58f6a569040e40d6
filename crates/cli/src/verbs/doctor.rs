//! `mainbrella doctor`.

use crate::context::Context;
use crate::doctor::{self, Level};
use crate::failure::Failure;
use crate::output::{Tone, printable};

/// Say what this machine has, what it lacks, and what to do about it
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Checks this machine; code 1 when something must be done first.
pub async fn run(context: &Context, _: &Args) -> Result<u8, Failure> {
    let report = doctor::examine(context).await;
    let code = u8::from(!report.ok);
    if context.output.json {
        context.output.json(&report)?;
        return Ok(code);
    }
    let mut area = "";
    for check in &report.checks {
        if check.area != area {
            area = check.area;
            context.output.line(area)?;
        }
        let (word, tone) = match check.level {
            Level::Ok => ("ok  ", Tone::Good),
            Level::Warn => ("warn", Tone::Busy),
            Level::Fail => ("fail", Tone::Bad),
        };
        context.output.line(&format!(
            "  {}  {}: {}",
            context.output.paint(word, tone),
            check.name,
            printable(&check.detail)
        ))?;
        if !check.fix.is_empty() {
            context.output.line(&format!("        {}", printable(&check.fix)))?;
        }
    }
    let count = |level| report.checks.iter().filter(|c| c.level == level).count();
    let (failed, warned) = (count(Level::Fail), count(Level::Warn));
    context.output.line(&match (failed, warned) {
        (0, 0) => "All is well.".to_owned(),
        (0, n) => format!("Machines can be made; {n} remark(s)."),
        (n, _) => format!("{n} thing(s) must be done first."),
    })?;
    Ok(code)
}
