//! The command line, and from it to a verb.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::context::{Context, Global};
use crate::failure::Failure;
use crate::verbs::{
    completions, contexts, cp, create, df, doctor, egress, env, exec, extend, fork, get, jobs, key, list, logs, ls,
    pause, preview, restore, resume, save, secret, serve, shell, snapshots, stop, template, watch,
};

const EXIT_CODES: &str = "\
Exit codes:
  0  done                       4  no key, or it may not do this
  1  failed                     5  the service cannot be reached or is busy
  2  wrong use                  6  the state of the machine forbids it
  3  no such thing              7  this host cannot do it
`exec` and `shell` end with the code of their command: 124 when it timed out, 128+n after signal n,
127 when it could not be started, 125 when exec itself failed.

Machines are named ID or ID@CREATED_AT. A bare ID means the newest machine in that slot; it is
looked up once, and the verb then acts on that machine or on none.";

/// One virtual machine for each agent session, on your own host.
#[derive(Debug, Parser)]
#[command(name = "mainbrella", version, about, after_help = EXIT_CODES, max_term_width = 100, subcommand_required = true, arg_required_else_help = true, disable_help_subcommand = true)]
pub struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Create(create::Args),
    List(list::Args),
    Get(get::Args),
    Exec(exec::Args),
    Context(contexts::Args),
    Shell(shell::Args),
    Jobs(jobs::Args),
    Logs(logs::Args),
    Ps(jobs::PsArgs),
    Cp(cp::Args),
    Ls(ls::Args),
    Watch(watch::Args),
    Preview(preview::Args),
    Extend(extend::Args),
    Fork(fork::Args),
    Pause(pause::Args),
    Resume(resume::Args),
    Save(save::Args),
    Restore(restore::Args),
    Snapshots(snapshots::Args),
    Export(cp::ExportArgs),
    Import(cp::ImportArgs),
    Egress(egress::Args),
    Secret(secret::Args),
    Stop(stop::Args),
    Template(template::Args),
    Df(df::Args),
    Key(key::Args),
    Env(env::Args),
    Doctor(doctor::Args),
    Serve(serve::Args),
    Completions(completions::Args),
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            // Help goes to standard output with code 0, mistakes to standard error with code 2.
            let _ = e.print();
            return ExitCode::from(u8::try_from(e.exit_code()).unwrap_or(2));
        }
    };
    let context = Context::new(cli.global);
    let json = context.output.json;
    match run(&context, cli.verb) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            failure.print(json);
            ExitCode::from(failure.exit_code as u8)
        }
    }
}

fn run(context: &Context, verb: Verb) -> Result<u8, Failure> {
    match verb {
        Verb::Serve(args) => serve::run(context, &args),
        Verb::Completions(args) => completions::run(context, &args),
        Verb::Env(args) => env::run(context, &args),
        verb => {
            let runtime = runtime()?;
            let done = runtime.block_on(client_verb(context, verb));
            // A thread that still waits for standard input must not hold the end.
            runtime.shutdown_background();
            done
        }
    }
}

async fn client_verb(context: &Context, verb: Verb) -> Result<u8, Failure> {
    match verb {
        Verb::Create(args) => create::run(context, args).await,
        Verb::List(args) => list::run(context, args).await,
        Verb::Get(args) => get::run(context, args).await,
        Verb::Exec(args) => exec::run(context, args).await,
        Verb::Context(args) => contexts::run(context, args).await,
        Verb::Shell(args) => shell::run(context, args).await,
        Verb::Jobs(args) => jobs::run(context, args).await,
        Verb::Logs(args) => logs::run(context, args).await,
        Verb::Ps(args) => jobs::ps(context, args).await,
        Verb::Cp(args) => cp::run(context, args).await,
        Verb::Ls(args) => ls::run(context, args).await,
        Verb::Watch(args) => watch::run(context, args).await,
        Verb::Preview(args) => preview::run(context, args).await,
        Verb::Extend(args) => extend::run(context, args).await,
        Verb::Fork(args) => fork::run(context, args).await,
        Verb::Pause(args) => pause::run(context, args).await,
        Verb::Resume(args) => resume::run(context, args).await,
        Verb::Save(args) => save::run(context, args).await,
        Verb::Restore(args) => restore::run(context, args).await,
        Verb::Snapshots(args) => snapshots::run(context, args).await,
        Verb::Export(args) => cp::export(context, args).await,
        Verb::Import(args) => cp::import(context, args).await,
        Verb::Egress(args) => egress::run(context, args).await,
        Verb::Secret(args) => secret::run(context, args).await,
        Verb::Stop(args) => stop::run(context, args).await,
        Verb::Template(args) => template::run(context, args).await,
        Verb::Df(args) => df::run(context, args).await,
        Verb::Key(args) => key::run(context, args).await,
        Verb::Doctor(args) => doctor::run(context, &args).await,
        Verb::Serve(_) | Verb::Completions(_) | Verb::Env(_) => Ok(0),
    }
}

/// A runtime for the client's verbs, which wait far more than they work.
fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::io("starting the runtime", &e))
}
