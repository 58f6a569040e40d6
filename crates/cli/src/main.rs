//! The `mainbrella` command: a client of the service, and the service itself (`serve`).

mod command;
mod context;
mod doctor;
mod failure;
mod output;
mod values;
mod verbs;

use std::process::ExitCode;

fn main() -> ExitCode {
    // Before anything else, while this process has one thread: a VMM is started through this very binary.
    if std::env::args_os().nth(1).is_some_and(|a| a == mainbrella_engine::jail::LAUNCH_ARGUMENT) {
        mainbrella_engine::jail::launcher_main();
    }
    command::main()
}
