//! One step in a machine.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainbrella_recipe::{Context, Step, StepKind};
use mainbrella_types::limits::COMMAND_TIMEOUT_MAX_MS;
use tokio::sync::mpsc;

use crate::carry::Work;
use crate::copy;
use crate::failure::{Failure, Halt, Reason};
use crate::ground::{Machine, Output, RunEnd, RunOrder};
use crate::lines::Lines;
use crate::log::EventKind;

/// How much later than a command's own time limit the build gives up waiting for its end.
const GRACE: Duration = Duration::from_secs(5);

/// Carries out one step.
pub(crate) async fn step(work: &Work, machine: &dyn Machine, context: &Arc<Context>, step: &Step) -> Result<(), Halt> {
    let done = match &step.kind {
        StepKind::Run { argv, env, workdir, user } => {
            let left = work.left();
            let order = RunOrder {
                argv: argv.clone(),
                env: env.clone(),
                workdir: workdir.clone(),
                user: user.clone(),
                timeout_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX).clamp(1, COMMAND_TIMEOUT_MAX_MS),
            };
            work.unless_over(GRACE, run(work, machine, order)).await
        }
        StepKind::Copy(planned) => work.unless_over(Duration::ZERO, copy::copy(machine, context, planned)).await,
        StepKind::Workdir { path, user } => {
            work.unless_over(Duration::ZERO, copy::workdir(machine, path, user.as_deref())).await
        }
    };
    done.map_err(|halt| match halt {
        Halt::Failed(failure) => Halt::Failed(failure.on(step.line, &step.text)),
        Halt::Cancelled => Halt::Cancelled,
    })
}

async fn run(work: &Work, machine: &dyn Machine, order: RunOrder) -> Result<(), Failure> {
    let (sender, receiver) = mpsc::channel(64);
    let (ended, ()) = tokio::join!(machine.run(order, sender), collect(work, receiver));
    match ended.map_err(|e| Failure::of(Reason::Step, &e))? {
        RunEnd::Exited(0) => Ok(()),
        RunEnd::Exited(code) => Err(Failure::new(Reason::Step, format!("the command exited with code {code}"))),
        RunEnd::Signalled(signal) => {
            let why = if signal == 9 { "; the machine may be too small for it: build in a larger size" } else { "" };
            Err(Failure::new(Reason::Step, format!("the command was ended by signal {signal}{why}")))
        }
        RunEnd::TimedOut => Err(work.too_long()),
    }
}

/// Takes what a command writes into the log, line by line.
async fn collect(work: &Work, mut receiver: mpsc::Receiver<(Output, Bytes)>) {
    let (mut out, mut err) = (Lines::default(), Lines::default());
    while let Some((stream, bytes)) = receiver.recv().await {
        let lines = match stream {
            Output::Stdout => out.push(&bytes),
            Output::Stderr => err.push(&bytes),
        };
        for text in lines {
            work.log(EventKind::Output { stream, text });
        }
    }
    for (stream, rest) in [(Output::Stdout, out.rest()), (Output::Stderr, err.rest())] {
        if let Some(text) = rest {
            work.log(EventKind::Output { stream, text });
        }
    }
}
