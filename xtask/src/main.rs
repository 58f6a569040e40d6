//! Checks of the house.
//!
//! `cargo xtask openapi` rewrites `openapi/v1.json`; `cargo xtask tidy` checks the invariants of `ARCHITECTURE.md`.

mod tidy;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_owned).unwrap_or_default()
}

fn main() -> ExitCode {
    let command = std::env::args().nth(1);
    let done = match command.as_deref() {
        Some("openapi") => openapi(&root()),
        Some("tidy") => tidy(&root()),
        _ => Err("usage: cargo xtask openapi | tidy".to_owned()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn openapi(root: &Path) -> Result<(), String> {
    let file = root.join("openapi/v1.json");
    let say = |e: std::io::Error| format!("{} cannot be written: {e}", file.display());
    std::fs::create_dir_all(root.join("openapi")).map_err(say)?;
    let text = mainbrella_server::openapi::text();
    if std::fs::read_to_string(&file).is_ok_and(|old| old == text) {
        println!("openapi/v1.json is up to date");
        return Ok(());
    }
    std::fs::write(&file, text).map_err(say)?;
    println!("openapi/v1.json rewritten");
    Ok(())
}

fn tidy(root: &Path) -> Result<(), String> {
    let findings = tidy::run(root)?;
    if findings.is_empty() {
        println!("tidy");
        return Ok(());
    }
    let lines: Vec<String> = findings.iter().map(ToString::to_string).collect();
    Err(format!("{}\n{} finding(s)", lines.join("\n"), lines.len()))
}
