//! Style that matters is a check, with the reason in its message. One line a finding.

mod arrows;
mod text;

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Something that is not as `ARCHITECTURE.md` says.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// Where: a path from the root, with a line where there is one.
    pub place: String,
    /// What, and why it matters.
    pub what: String,
}

impl Finding {
    fn new(place: impl Into<String>, what: impl Into<String>) -> Self {
        Self { place: place.into(), what: what.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.what)
    }
}

/// Checks the project in `root`.
///
/// # Errors
/// When it cannot be read at all.
pub fn run(root: &Path) -> Result<Vec<Finding>, String> {
    let crates = arrows::crates(&metadata(root)?)?;
    let mut findings = arrows::check(&crates);
    findings.extend(arrows::check_table(&crates, &read(&root.join("ARCHITECTURE.md"))));
    findings.extend(text::check_readme(&read(&root.join("README.md"))));
    for file in files(root)? {
        let path = root.join(&file);
        let Ok(content) = std::fs::read(&path) else { continue };
        // Images and other binary files have no lines.
        if let Ok(content) = String::from_utf8(content) {
            findings.extend(text::check(&file, &content));
        }
    }
    findings.sort();
    Ok(findings)
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn metadata(root: &Path) -> Result<serde_json::Value, String> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let args = ["metadata", "--no-deps", "--format-version=1", "--offline"];
    let output = output(Command::new(cargo).args(args).current_dir(root))?;
    serde_json::from_slice(&output).map_err(|e| format!("cargo metadata cannot be read: {e}"))
}

/// Every file that is, or would be, committed.
fn files(root: &Path) -> Result<Vec<String>, String> {
    let args = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let output = output(Command::new("git").args(args).current_dir(root))?;
    let names = output.split(|b| *b == 0).filter(|n| !n.is_empty());
    Ok(names.map(|n| String::from_utf8_lossy(n).into_owned()).filter(|n| root.join(n).is_file()).collect())
}

fn output(command: &mut Command) -> Result<Vec<u8>, String> {
    let name = PathBuf::from(command.get_program()).display().to_string();
    let output = command.output().map_err(|e| format!("{name} cannot be started: {e}"))?;
    if output.status.success() {
        Ok(output.stdout)
    } else {
        Err(format!("{name} failed: {}", String::from_utf8_lossy(&output.stderr).trim()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_project_is_tidy() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace").to_owned();
        let findings = run(&root).expect("readable");
        let lines: Vec<String> = findings.iter().map(ToString::to_string).collect();
        assert!(findings.is_empty(), "\n{}", lines.join("\n"));
    }
}
