//! Loading rules: one transaction, whole or not at all.

use std::io::Write as _;
use std::process::{Command, Stdio};

use crate::error::{NetError, io_error};

const SAID_MAX: usize = 2000;

/// Loads `rules` into the namespace of the calling thread.
pub(crate) fn load(rules: &str) -> Result<(), NetError> {
    let mut child = Command::new("nft")
        .args(["-f", "-"])
        .env_clear()
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(io_error("running nft (Debian package nftables)"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // If it has ended, its message says why.
        let _ = stdin.write_all(rules.as_bytes());
    }
    let out = child.wait_with_output().map_err(io_error("waiting for nft"))?;
    if out.status.success() {
        return Ok(());
    }
    Err(NetError::Rules(String::from_utf8_lossy(&out.stderr).chars().take(SAID_MAX).collect()))
}

/// Whether a loaded table keeps everybody else from forwarding.
pub(crate) fn has_guard(table: &str) -> bool {
    let listed = Command::new("nft")
        .args(["list", "chain", "inet", table, "guard"])
        .env_clear()
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    listed.is_ok_and(|s| s.success())
}

/// Names of the tables of family `inet`.
pub(crate) fn tables() -> Result<Vec<String>, NetError> {
    let out = Command::new("nft")
        .args(["list", "tables", "inet"])
        .env_clear()
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .map_err(io_error("running nft (Debian package nftables)"))?;
    if !out.status.success() {
        return Err(NetError::Rules(String::from_utf8_lossy(&out.stderr).chars().take(SAID_MAX).collect()));
    }
    let text = String::from_utf8_lossy(&out.stdout);
    Ok(text.lines().filter_map(|l| l.strip_prefix("table inet ")).map(|n| n.trim().to_owned()).collect())
}
