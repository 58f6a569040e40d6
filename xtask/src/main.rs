//! Checks of the house.
//!
//! `cargo xtask openapi` rewrites `openapi/v1.json`, `cargo xtask docs` the generated pages of `docs/`; `cargo xtask tidy`
//! checks the invariants of `ARCHITECTURE.md`.

mod tidy;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_owned).unwrap_or_default()
}

fn main() -> ExitCode {
    let command = std::env::args().nth(1);
    let done = match command.as_deref() {
        Some("openapi") => rewrite(&root(), "openapi/v1.json", &mainbrella_server::openapi::text()),
        Some("docs") => rewrite(&root(), "docs/configuration.md", &mainbrella_server::config::reference()),
        Some("tidy") => tidy(&root()),
        _ => Err("usage: cargo xtask openapi | docs | tidy".to_owned()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn rewrite(root: &Path, name: &str, text: &str) -> Result<(), String> {
    let file = root.join(name);
    if std::fs::read_to_string(&file).is_ok_and(|old| old == text) {
        println!("{name} is up to date");
        return Ok(());
    }
    let folder = file.parent().unwrap_or(root);
    std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&file, text))
        .map_err(|e| format!("{name} cannot be written: {e}"))?;
    println!("{name} rewritten");
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
