//! The whole service over the fake driver: for trying clients and for measuring the HTTP layer without machines.
//!
//! `cargo run -p mainbrella-server --example serve_fake -- --data-dir DIR [--KEY VALUE]…`; the first API key is in
//! `DIR/keys/admin.key`. The guest is scripted: see `mainbrella_engine::fake`.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use mainbrella_engine::SystemClock;
use mainbrella_engine::fake::FakeDriver;
use mainbrella_server::start::{StartError, on_signals, prepare, run_with};
use mainbrella_server::{ServerConfig, logging};

#[tokio::main]
async fn main() -> ExitCode {
    match serve().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}

async fn serve() -> Result<(), StartError> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let flags = words.chunks(2).filter_map(|pair| match pair {
        [name, value] => Some((name.trim_start_matches('-').to_owned(), value.clone())),
        _ => None,
    });
    let config = ServerConfig::load(flags)?;
    logging::init(config.log_format, &config.log_filter);
    let clock = Arc::new(SystemClock);
    let ending = on_signals()?;
    let ground = prepare(&config, clock.as_ref()).await?;
    run_with(config, ground, Arc::new(FakeDriver::new(Duration::from_millis(20))), clock, ending).await
}
