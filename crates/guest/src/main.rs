//! The agent's two ways to run: as PID 1 of a machine, or on a unix socket of a process of its own, for tests.

use std::path::PathBuf;
use std::process::ExitCode;

use mainbrella_guest::{Agent, AgentOptions, Authority, ReapMode, Reaper, port};

/// The C library's allocator is slow where this is linked statically.
#[global_allocator]
static ALLOCATOR: dlmalloc::GlobalDlmalloc = dlmalloc::GlobalDlmalloc;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    match arguments.as_slice() {
        [flag, path] if flag == "--serve-unix" => match serve_unix(path.into()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("mainbrella-guest: {error}");
                ExitCode::FAILURE
            }
        },
        [] if std::process::id() == 1 => match mainbrella_guest::boot::run() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                // The kernel ends the machine when its first process does, and the host sees that.
                eprintln!("mainbrella-guest: the machine cannot start: {error}");
                ExitCode::FAILURE
            }
        },
        _ => {
            eprintln!("usage: mainbrella-guest --serve-unix PATH   (or as PID 1 of a machine, without arguments)");
            ExitCode::from(2)
        }
    }
}

fn serve_unix(path: PathBuf) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let reaper = Reaper::start(ReapMode::All)?;
        let agent = Agent::new(AgentOptions {
            authority: Authority::Process,
            reaper,
            cgroup: None,
            defaults: mainbrella_guest::Defaults::default(),
            pending: None,
        });
        port::serve_unix(&path, agent.service()).await
    })
}
