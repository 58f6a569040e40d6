//! The program that is put into guests, where the service looks for it.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use mainbrella_server::ServerConfig;

use super::Check;
use super::data::DATA;

const NAME: &str = "guest agent";
const FLAG: &str = "--guest-agent";
const VARIABLE: &str = "MAINBRELLA_GUEST_AGENT";

/// Looks at the agent that a service with this data directory uses, or would use.
pub fn check(dir: &Path) -> Check {
    let Some(path) = path(dir, Path::new("/proc")) else {
        let fix = "Name it with --guest-agent or MAINBRELLA_GUEST_AGENT.";
        return Check::warn(DATA, NAME, "it is not known where this program is", fix);
    };
    let shown = path.display();
    let fix = "Build mainbrella-guest for x86_64-unknown-linux-musl and put it beside this program, or name it with \
               --guest-agent or MAINBRELLA_GUEST_AGENT.";
    match std::fs::read(&path).map(|bytes| is_static_elf(&bytes)) {
        Ok(true) => Check::ok(DATA, NAME, shown.to_string()),
        Ok(false) => Check::fail(DATA, NAME, format!("{shown} is not a static x86_64 program"), fix),
        Err(_) => Check::fail(DATA, NAME, format!("{shown} cannot be read"), fix),
    }
}

/// In the order of the service: its flag, its environment, the configuration file, beside its program. What a running
/// service was told goes before what one started from here would be told.
fn path(dir: &Path, proc: &Path) -> Option<PathBuf> {
    let beside = |program: PathBuf| Some(program.parent()?.join("mainbrella-guest"));
    let service = holder(dir, proc).map(|pid| proc.join(pid.to_string()));
    let told = service.as_deref().and_then(told);
    let configured = || {
        let flags = [("data-dir".to_owned(), dir.to_str()?.to_owned())];
        ServerConfig::load(flags).ok()?.guest_agent
    };
    told.or_else(configured)
        .or_else(|| beside(std::fs::read_link(service?.join("exe")).ok()?))
        .or_else(|| beside(std::env::current_exe().ok()?))
}

/// The process that holds the data directory: the owner of the lock on `service.lock`.
fn holder(dir: &Path, proc: &Path) -> Option<u32> {
    let inode = format!(":{}", std::fs::metadata(dir.join("service.lock")).ok()?.ino());
    let locks = std::fs::read_to_string(proc.join("locks")).ok()?;
    locks.lines().find_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let (kind, pid, file) = (fields.next()?, fields.nth(2)?, fields.next()?);
        (kind == "FLOCK" && file.ends_with(&inode)).then(|| pid.parse().ok()).flatten()
    })
}

/// What a running service was told on its command line or in its environment.
fn told(process: &Path) -> Option<PathBuf> {
    let line = std::fs::read(process.join("cmdline")).ok()?;
    let mut words = line.split(|b| *b == 0);
    while let Some(word) = words.next() {
        match word.strip_prefix(FLAG.as_bytes()) {
            Some(b"") => return words.next().map(to_path),
            Some([b'=', value @ ..]) => return Some(to_path(value)),
            _ => {}
        }
    }
    let environment = std::fs::read(process.join("environ")).ok()?;
    let mut variables = environment.split(|b| *b == 0);
    variables
        .find_map(|v| v.strip_prefix(VARIABLE.as_bytes())?.strip_prefix(b"="))
        .filter(|v| !v.is_empty())
        .map(to_path)
}

fn to_path(bytes: &[u8]) -> PathBuf {
    OsStr::from_bytes(bytes).into()
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

    #[test]
    fn it_is_looked_for_where_the_service_has_it() {
        let (dir, proc) = (tempfile::tempdir().expect("temp dir"), tempfile::tempdir().expect("temp dir"));
        let (dir, proc) = (dir.path(), proc.path());
        let looked = || path(dir, proc).expect("a path");
        let here = std::env::current_exe().expect("this program");
        assert_eq!(looked(), here.with_file_name("mainbrella-guest"), "beside this program");
        std::fs::write(dir.join("mainbrella.toml"), "guest_agent = \"/from/the/file\"\n").expect("write");
        assert_eq!(looked(), Path::new("/from/the/file"));

        let lock = dir.join("service.lock");
        std::fs::write(&lock, "").expect("write");
        let inode = std::fs::metadata(&lock).expect("there").ino();
        std::fs::create_dir(proc.join("77")).expect("a process");
        std::os::unix::fs::symlink("/opt/bin/mainbrella", proc.join("77/exe")).expect("link");
        let process = |line: &[u8], environment: &[u8]| {
            std::fs::write(proc.join("77/cmdline"), line).expect("write");
            std::fs::write(proc.join("77/environ"), environment).expect("write");
        };
        process(b"mainbrella\0serve\0--guest-agent\0/by/flag\0", b"MAINBRELLA_GUEST_AGENT=/by/variable\0");
        let other =
            format!("1: POSIX  ADVISORY  WRITE 5 fe:00:{inode} 0 EOF\n2: FLOCK  ADVISORY  WRITE 6 fe:00:1 0 EOF\n");
        std::fs::write(proc.join("locks"), &other).expect("write");
        assert_eq!(looked(), Path::new("/from/the/file"), "no service has this directory");
        let held = format!("{other}3: FLOCK  ADVISORY  WRITE 77 fe:00:{inode} 0 EOF\n");
        std::fs::write(proc.join("locks"), held).expect("write");
        assert_eq!(looked(), Path::new("/by/flag"));
        process(b"mainbrella\0serve\0--guest-agent=/by/flag\0", b"");
        assert_eq!(looked(), Path::new("/by/flag"));
        process(b"mainbrella\0serve\0", b"A=b\0MAINBRELLA_GUEST_AGENT=/by/variable\0");
        assert_eq!(looked(), Path::new("/by/variable"));
        process(b"mainbrella\0serve\0", b"A=b\0");
        assert_eq!(looked(), Path::new("/from/the/file"));
        std::fs::remove_file(dir.join("mainbrella.toml")).expect("remove");
        assert_eq!(looked(), Path::new("/opt/bin/mainbrella-guest"), "beside the program of the service");
    }
}
