//! The data directory: may it be used, is there room, what is in it.

use std::path::Path;

use mainbrella_engine::image::ImageStore;

use super::Check;
use crate::output::size;

pub(super) const DATA: &str = "Data";
const GIB: u64 = 1024 * 1024 * 1024;

/// What can be said of the data directory.
pub fn checks(dir: Option<&Path>) -> Vec<Check> {
    let Some(dir) = dir else {
        return vec![Check::fail(DATA, "directory", "the home folder is not known", "Give one with --data-dir.")];
    };
    let mut checks = vec![directory(dir)];
    checks.extend(space(dir));
    checks.extend(images(dir));
    checks.push(super::agent::check(dir));
    checks
}

fn directory(dir: &Path) -> Check {
    let shown = dir.display().to_string();
    let fix = "Choose another with --data-dir, or run as the user that owns it.";
    if dir.is_dir() {
        return match rustix::fs::access(dir, rustix::fs::Access::WRITE_OK) {
            Ok(()) => Check::ok(DATA, "directory", shown),
            Err(_) => Check::fail(DATA, "directory", format!("{shown} may not be written by this user"), fix),
        };
    }
    if dir.symlink_metadata().is_ok() {
        return Check::fail(DATA, "directory", format!("{shown} is not a directory"), fix);
    }
    let writable = present(dir).is_some_and(|p| rustix::fs::access(p, rustix::fs::Access::WRITE_OK).is_ok());
    if writable {
        Check::ok(DATA, "directory", format!("{shown} is made at the first start"))
    } else {
        Check::fail(DATA, "directory", format!("{shown} cannot be made by this user"), fix)
    }
}

/// The nearest folder above that exists.
fn present(dir: &Path) -> Option<&Path> {
    dir.ancestors().find(|p| p.is_dir())
}

fn space(dir: &Path) -> Option<Check> {
    let free = rustix::fs::statvfs(present(dir)?).map(|s| s.f_bavail.saturating_mul(s.f_frsize)).ok()?;
    let detail = format!("{} free", size(free));
    let fix = "A template takes 1 to 3 GiB, and every machine what it writes; free some, or choose another --data-dir.";
    Some(match free {
        f if f < GIB => Check::fail(DATA, "disk space", detail, fix),
        f if f < 5 * GIB => Check::warn(DATA, "disk space", detail, fix),
        _ => Check::ok(DATA, "disk space", detail),
    })
}

fn images(dir: &Path) -> Vec<Check> {
    const BUILD: &str = "mainbrella template build python";
    let none = || Check::fail(DATA, "templates", "none is built", BUILD);
    if !dir.is_dir() {
        return vec![none()];
    }
    let Ok(store) = ImageStore::open(dir) else {
        return vec![Check::fail(
            DATA,
            "templates",
            "they cannot be read by this user",
            "Run as the user that owns the data directory.",
        )];
    };
    let kernel = match store.current_kernel() {
        Some(kernel) => Check::ok(DATA, "guest kernel", kernel.version),
        None => Check::fail(DATA, "guest kernel", "is not there", BUILD),
    };
    let built: Vec<String> = store.templates().iter().map(|t| format!("{} ({})", t.name, size(t.bytes))).collect();
    let templates = if built.is_empty() { none() } else { Check::ok(DATA, "templates", built.join(", ")) };
    vec![kernel, templates]
}
