//! Fresh random numbers for programs with generators of their own, in a machine that became another generation.
//!
//! The kernel's generator is seeded by `configure`. Then, before processes of the user go on, the executables in [`HOOKS`] are run;
//! after that, processes that registered are told: each listens on a socket in [`SEATS`] that is named after its number, is sent
//! one line and answers with one when it has seeded its generators anew. Nobody is waited for longer than a bound.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use mainbrella_guest_protocol::limits::{HOOK_NAME_MAX, HOOKS_MAX};
use mainbrella_guest_protocol::pb;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::time::{Instant, timeout, timeout_at};

use crate::Reaper;

/// Programs of the machine's owner that seed what no process does for itself.
pub(crate) const HOOKS: &str = "/etc/mainbrella/reseed.d";
/// Where processes register.
pub(crate) const SEATS: &str = "/run/mainbrella/reseed";
/// Longest time of one hook.
const HOOK_MOST: Duration = Duration::from_secs(3);
/// Longest time of all hooks together.
const HOOKS_MOST: Duration = Duration::from_secs(8);
/// Longest wait for the answers of registered processes, all together.
const ANSWERS_MOST: Duration = Duration::from_secs(5);
/// Registered processes that are told; those beyond are counted, and not told.
const TOLD_MAX: usize = 64;
/// Entries of a folder that are looked at.
const LOOKED_AT_MAX: usize = 1024;
const WORD: &[u8] = b"reseed\n";
const DONE: &[u8] = b"done\n";

/// Makes the folder in which processes of any user register.
pub(crate) fn prepare(seats: &Path) -> io::Result<()> {
    fs::create_dir_all(seats)?;
    fs::set_permissions(seats, fs::Permissions::from_mode(0o1777))
}

/// Runs the hooks, by name, one after the other.
pub(crate) async fn run_hooks(reaper: &Reaper, folder: &Path) -> Vec<pb::HookRun> {
    let until = Instant::now() + HOOKS_MOST;
    let mut runs = Vec::new();
    for (name, path) in hooks(folder) {
        runs.push(pb::HookRun { name, ..run(reaper, &path, until.min(Instant::now() + HOOK_MOST)).await });
    }
    runs
}

/// The executables of a folder, by name.
fn hooks(folder: &Path) -> Vec<(String, PathBuf)> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let executable = |path: &Path| fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0);
    let plain = |name: &str| {
        name.len() <= HOOK_NAME_MAX && !name.starts_with('.') && name.bytes().all(|b| b.is_ascii_graphic())
    };
    let mut found: Vec<_> = (entries.take(LOOKED_AT_MAX).flatten())
        .filter_map(|entry| Some((entry.file_name().into_string().ok().filter(|name| plain(name))?, entry.path())))
        .filter(|(_, path)| executable(path))
        .collect();
    found.sort();
    found.truncate(HOOKS_MAX);
    found
}

async fn run(reaper: &Reaper, path: &Path, until: Instant) -> pb::HookRun {
    let mut command = Command::new(path);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).current_dir("/").process_group(0);
    // The reaper waits for it, as for every child.
    let started = reaper.spawn(|| command.spawn().map(|child| child.id().cast_signed()));
    let Ok((pid, mut ended)) = started else {
        return pb::HookRun { not_started: true, ..Default::default() };
    };
    let (status, timed_out) = match timeout_at(until, &mut ended).await {
        Ok(status) => (status.ok(), false),
        Err(_) => {
            reaper.signal_group(pid, libc::SIGKILL);
            (ended.await.ok(), true)
        }
    };
    reaper.kill_rest_of_group(pid);
    // As a shell has it.
    let code = status.and_then(|s| s.code().or_else(|| s.signal().map(|signal| 128 + signal)));
    pb::HookRun { exit_code: code.unwrap_or(-1), timed_out, ..Default::default() }
}

/// Tells every registered process to seed its generators anew. Says how many there are and how many did.
pub(crate) async fn tell_registered(seats: &Path) -> (u32, u32) {
    let until = Instant::now() + ANSWERS_MOST;
    let registered = registered(seats);
    let told = registered.iter().take(TOLD_MAX).map(|(pid, path)| async move {
        match timeout_at(until, tell(*pid, path)).await {
            Ok(Ok(done)) => Some(done),
            // It has ended and left its socket.
            Ok(Err(e)) if e.kind() == io::ErrorKind::ConnectionRefused => {
                let _ = fs::remove_file(path);
                None
            }
            Ok(Err(_)) | Err(_) => Some(false),
        }
    });
    let answers: Vec<bool> = futures::future::join_all(told).await.into_iter().flatten().collect();
    let beyond = registered.len().saturating_sub(TOLD_MAX);
    let done = answers.iter().filter(|done| **done).count();
    (u32::try_from(answers.len() + beyond).unwrap_or(u32::MAX), u32::try_from(done).unwrap_or(u32::MAX))
}

fn registered(seats: &Path) -> Vec<(i32, PathBuf)> {
    let Ok(entries) = fs::read_dir(seats) else { return Vec::new() };
    (entries.take(LOOKED_AT_MAX).flatten())
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()))
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path())))
        .collect()
}

/// Says whether the process did it.
async fn tell(pid: i32, path: &Path) -> io::Result<bool> {
    let mut stream = UnixStream::connect(path).await?;
    // Whoever took another's place answers for nobody.
    if stream.peer_cred()?.pid() != Some(pid) {
        return Ok(false);
    }
    stream.write_all(WORD).await?;
    let mut said = [0u8; DONE.len()];
    timeout(ANSWERS_MOST, stream.read_exact(&mut said)).await??;
    Ok(said == *DONE)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::ReapMode;
    use tokio::net::UnixListener;

    fn hook(folder: &Path, name: &str, text: &str, mode: u32) {
        let path = folder.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[tokio::test]
    async fn hooks_are_run_in_order_and_each_tells_how_it_ended() {
        let reaper = Reaper::start(ReapMode::Known).unwrap();
        let t = tempfile::tempdir().unwrap();
        assert!(run_hooks(&reaper, &t.path().join("none")).await.is_empty());
        let said = t.path().join("said");
        let say = |n: u8, end: &str| format!("#!/bin/sh\necho {n} >>{}\n{end}\n", said.display());
        hook(t.path(), "20-second", &say(2, "exit 3"), 0o755);
        hook(t.path(), "10-first", &say(1, ""), 0o700);
        hook(t.path(), "30-killed", &say(3, "kill -9 $$"), 0o755);
        hook(t.path(), "40-not-executable", &say(4, ""), 0o644);
        hook(t.path(), ".hidden", &say(5, ""), 0o755);
        hook(t.path(), "50-no-program", "#!/no/such/program\n", 0o755);
        fs::create_dir(t.path().join("60-folder")).unwrap();
        let runs = run_hooks(&reaper, t.path()).await;
        let told: Vec<_> = runs.iter().map(|r| (r.name.as_str(), r.exit_code, r.timed_out, r.not_started)).collect();
        let expected = [
            ("10-first", 0, false, false),
            ("20-second", 3, false, false),
            ("30-killed", 137, false, false),
            ("50-no-program", 0, false, true),
        ];
        assert_eq!(told, expected);
        assert_eq!(fs::read_to_string(said).unwrap(), "1\n2\n3\n");
    }

    #[tokio::test]
    async fn a_hook_that_does_not_end_is_ended_with_all_it_started() {
        let reaper = Reaper::start(ReapMode::Known).unwrap();
        let t = tempfile::tempdir().unwrap();
        let note = t.path().join("pid");
        hook(t.path(), "slow", &format!("#!/bin/sh\nsleep 600 & echo $! >{}\nwait\n", note.display()), 0o755);
        let run = run(&reaper, &t.path().join("slow"), Instant::now() + Duration::from_secs(1)).await;
        assert!(run.timed_out && run.exit_code == 137, "{run:?}");
        let pid: i32 = fs::read_to_string(note).unwrap().trim().parse().unwrap();
        let gone = async {
            // SAFETY: takes no pointers.
            while unsafe { libc::kill(pid, 0) } == 0
                && !fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default().contains(") Z ")
            {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(Duration::from_secs(10), gone).await.unwrap();
    }

    #[tokio::test]
    async fn registered_processes_are_told_and_those_that_do_not_answer_are_not_waited_for_long() {
        let t = tempfile::tempdir().unwrap();
        prepare(&t.path().join("seats")).unwrap();
        let seats = t.path().join("seats");
        assert_eq!(tell_registered(&seats).await, (0, 0));
        let own = UnixListener::bind(seats.join(std::process::id().to_string())).unwrap();
        let answers = tokio::spawn(async move {
            loop {
                let (mut peer, _) = own.accept().await.unwrap();
                let mut word = [0; 7];
                peer.read_exact(&mut word).await.unwrap();
                assert_eq!(word, *b"reseed\n");
                peer.write_all(b"done\n").await.unwrap();
            }
        });
        // Another's number; one that has ended; what is no socket; one that never answers.
        let _other = UnixListener::bind(seats.join("1")).unwrap();
        drop(UnixListener::bind(seats.join("2")).unwrap());
        fs::write(seats.join("3"), "").unwrap();
        assert_eq!(tell_registered(&seats).await, (2, 1));
        assert!(!seats.join("2").exists(), "what the dead left is removed");
        answers.abort();
    }
}
