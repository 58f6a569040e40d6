//! The data directory: may it be used, is there room, what is in it.

use std::path::{Path, PathBuf};

use mainbrella_engine::image::ImageStore;

use super::Check;
use crate::output::size;

const DATA: &str = "Data";
const GIB: u64 = 1024 * 1024 * 1024;

/// What can be said of the data directory.
pub fn checks(dir: Option<&Path>) -> Vec<Check> {
    let Some(dir) = dir else {
        return vec![Check::fail(DATA, "directory", "the home folder is not known", "Give one with --data-dir.")];
    };
    let mut checks = vec![directory(dir)];
    checks.extend(space(dir));
    checks.extend(images(dir));
    checks.push(agent());
    checks
}

/// The program that is put into guests, where the service looks for it.
fn agent() -> Check {
    const NAME: &str = "guest agent";
    let beside = || Some(std::env::current_exe().ok()?.parent()?.join("mainbrella-guest"));
    let asked = std::env::var_os("MAINBRELLA_GUEST_AGENT").filter(|v| !v.is_empty()).map(PathBuf::from);
    let Some(path) = asked.or_else(beside) else {
        return Check::warn(
            DATA,
            NAME,
            "it is not known where this program is",
            "Name it with MAINBRELLA_GUEST_AGENT.",
        );
    };
    let shown = path.display();
    let fix = "Build mainbrella-guest for x86_64-unknown-linux-musl and put it beside this program, or name it with MAINBRELLA_GUEST_AGENT.";
    match std::fs::read(&path).map(|bytes| is_static_elf(&bytes)) {
        Ok(true) => Check::ok(DATA, NAME, shown.to_string()),
        Ok(false) => Check::fail(DATA, NAME, format!("{shown} is not a static x86_64 program"), fix),
        Err(_) => Check::fail(DATA, NAME, format!("{shown} cannot be read"), fix),
    }
}

/// Whether these are the bytes of an x86_64 ELF program without an interpreter: one that can be first in a machine.
fn is_static_elf(bytes: &[u8]) -> bool {
    const X86_64: u16 = 62;
    const INTERPRETER: u32 = 3;
    let half = |at: usize| bytes.get(at..at + 2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    let word = |at: usize| bytes.get(at..at + 4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let (Some(table), Some(entry), Some(count)) = (word(32), half(54), half(56)) else { return false };
    let headers = (0..usize::from(count)).map(|n| word(table as usize + n * usize::from(entry)));
    bytes.starts_with(b"\x7fELF\x02\x01")
        && half(18) == Some(X86_64)
        && headers.into_iter().all(|kind| kind.is_some_and(|k| k != INTERPRETER))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_with_an_interpreter_is_told_from_a_static_one() {
        let mut elf = vec![0u8; 64 + 56];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        elf[18] = 62;
        elf[32] = 64;
        elf[54] = 56;
        elf[56] = 1;
        elf[64] = 1;
        assert!(is_static_elf(&elf));
        elf[64] = 3;
        assert!(!is_static_elf(&elf), "it asks for an interpreter");
        elf[56] = 2;
        assert!(!is_static_elf(&elf), "the table goes beyond the end");
        assert!(!is_static_elf(b"#!/bin/sh"));
        let this = std::fs::read("/proc/self/exe").expect("this test");
        assert!(!is_static_elf(&this) || cfg!(target_feature = "crt-static"));
    }
}
