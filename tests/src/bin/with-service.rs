//! Runs a command against a service of its own: `with-service PROGRAM ARGUMENT…`.
//!
//! The command finds `MAINBRELLA_API_URL`, `MAINBRELLA_API_KEY` and `MAINBRELLA_DATA_DIR` set. Afterwards nothing may be
//! left of the service. The exit code is the command's.

use std::process::ExitCode;

use mainbrella_tests::Service;

#[tokio::main]
async fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let Some(program) = arguments.next() else {
        eprintln!("usage: with-service PROGRAM ARGUMENT…");
        return ExitCode::from(2);
    };
    let service = Service::start().await;
    let status = tokio::process::Command::new(&program)
        .args(arguments)
        .env("MAINBRELLA_API_URL", service.url())
        .env("MAINBRELLA_API_KEY", service.admin_key())
        .env("MAINBRELLA_DATA_DIR", service.data())
        .status()
        .await;
    service.finish().await;
    match status {
        Ok(status) => ExitCode::from(status.code().and_then(|c| u8::try_from(c).ok()).unwrap_or(1)),
        Err(e) => {
            eprintln!("{}: {e}", program.display());
            ExitCode::from(127)
        }
    }
}
