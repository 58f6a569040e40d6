//! `mainbrella env`.

use crate::context::Context;
use crate::failure::Failure;

/// Print shell exports for `eval "$(mainbrella env)"`
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Prints the exports that make SDK and CLI find the service.
pub fn run(context: &Context, _: &Args) -> Result<u8, Failure> {
    let (key, _) = context.key()?;
    // Checked, so that no odd byte goes where a shell reads.
    mainbrella_client::Client::new(context.url(), Some(mainbrella_client::ApiKey::new(&key)?))?;
    let mut exports = vec![("MAINBRELLA_API_URL", context.url().to_owned()), ("MAINBRELLA_API_KEY", key)];
    if let Some(dir) = context.global.data_dir.as_ref().and_then(|d| d.to_str()) {
        exports.push(("MAINBRELLA_DATA_DIR", dir.to_owned()));
    }
    if context.output.json {
        let map: std::collections::BTreeMap<_, _> = exports.into_iter().collect();
        context.output.json(&map)?;
        return Ok(0);
    }
    let mut lines: Vec<String> =
        exports.iter().map(|(name, value)| format!("export {name}={}", quoted(value))).collect();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let here = std::env::current_exe().ok().and_then(|e| e.parent().map(std::path::Path::to_path_buf));
    if let Some(dir) = here.filter(|d| !std::env::split_paths(&path).any(|p| p == *d))
        && let Some(dir) = dir.to_str()
    {
        lines.push(format!("export PATH={}:\"$PATH\"", quoted(dir)));
    }
    context.output.line(&lines.join("\n"))?;
    Ok(0)
}

/// One word of a POSIX shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}
