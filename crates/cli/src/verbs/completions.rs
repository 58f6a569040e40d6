//! `mainbrella completions`.

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::command::Cli;
use crate::context::Context;
use crate::failure::Failure;

/// Print a completion script for a shell
///
/// bash: mainbrella completions bash > ~/.local/share/bash-completion/completions/mainbrella
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the script.
pub fn run(context: &Context, args: &Args) -> Result<u8, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "mainbrella", &mut script);
    context.output.raw(&script)?;
    Ok(0)
}
