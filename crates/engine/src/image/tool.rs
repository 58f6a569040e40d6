//! Runs a program of the host with a time limit, keeps the tail of what it writes, and ends it and
//! its children when it must not go on.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::error::ImageError;
use super::progress::{Event, Progress};

/// Where programs are looked for: the environment of the service may be bare.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Longest line kept, bytes.
const LINE_MAX: usize = 4096;
/// Lines of standard error kept for the error.
const TAIL_LINES: usize = 40;
/// Most bytes of standard output kept.
const STDOUT_MAX: usize = 16 * 1024 * 1024;
/// How long a program may take to end after it was asked to.
const GRACE: Duration = Duration::from_secs(10);
/// How often the time limit and cancellation are looked at.
const TICK: Duration = Duration::from_millis(100);

/// A program to run, once.
pub(super) struct Tool {
    name: &'static str,
    command: Command,
    limit: Duration,
    death: Signal,
    lock: Option<OwnedFd>,
}

/// Where `program` is.
pub(super) fn find(program: &'static str, package: &'static str) -> Result<PathBuf, ImageError> {
    PATH.split(':')
        .map(|dir| Path::new(dir).join(program))
        .find(|path| path.is_file())
        .ok_or(ImageError::MissingTool { tool: program, package })
}

impl Tool {
    /// `program` of Debian package `package`, to be ended after `limit`.
    pub(super) fn new(program: &'static str, package: &'static str, limit: Duration) -> Result<Self, ImageError> {
        let mut command = Command::new(find(program, package)?);
        // The rest of the environment is passed on unread: apt takes proxies from it.
        command
            .env("PATH", PATH)
            .env("LC_ALL", "C.UTF-8")
            .env("DEBIAN_FRONTEND", "noninteractive")
            .env_remove("LANGUAGE")
            .env_remove("APT_CONFIG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        Ok(Self { name: program, command, limit, death: Signal::SIGTERM, lock: None })
    }

    /// `program` in process and mount namespaces of its own: when it is ended, all it started and mounted ends with it,
    /// at once. Only for who may mount.
    pub(super) fn contained(program: &'static str, package: &'static str, limit: Duration) -> Result<Self, ImageError> {
        let path = find(program, package)?;
        let mut tool = Self::new("unshare", "util-linux", limit)?
            .args(["--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--"])
            .arg(path);
        // The outer process does not listen to SIGTERM while it waits for the inner.
        tool.death = Signal::SIGKILL;
        tool.name = program;
        Ok(tool)
    }

    /// Lets the program and all it starts hold `lock` too: who waits for it then waits for them, should this process die.
    pub(super) fn holding(mut self, lock: OwnedFd) -> Self {
        self.lock = Some(lock);
        self
    }

    /// What happens between fork and exec: the program ends when the thread that started it does.
    fn prepare(&mut self) {
        let death = self.death as libc::c_int;
        let lock = self.lock.as_ref().map(AsRawFd::as_raw_fd);
        // SAFETY: prctl with PR_SET_PDEATHSIG and fcntl with F_SETFD only set attributes of the calling process and of its
        // descriptor, take no pointers and are async-signal-safe; `lock` is open: `self` owns it until after the fork.
        unsafe {
            self.command.pre_exec(move || {
                if libc::prctl(libc::PR_SET_PDEATHSIG, death) != 0 {
                    return Err(io::Error::last_os_error());
                }
                match lock {
                    Some(fd) if libc::fcntl(fd, libc::F_SETFD, 0) != 0 => Err(io::Error::last_os_error()),
                    _ => Ok(()),
                }
            });
        }
    }

    pub(super) fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.command.arg(arg);
        self
    }

    pub(super) fn args<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(mut self, args: I) -> Self {
        self.command.args(args);
        self
    }

    pub(super) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    pub(super) fn dir(mut self, dir: &Path) -> Self {
        self.command.current_dir(dir);
        self
    }

    /// Runs it to its end and returns its standard output. Lines of standard error are passed on.
    pub(super) fn run(self, progress: &dyn Progress) -> Result<Vec<u8>, ImageError> {
        self.run_with(progress, |_| {})
    }

    /// As [`Self::run`]; `on_line` sees every line of standard error.
    pub(super) fn run_with(
        mut self,
        progress: &dyn Progress,
        mut on_line: impl FnMut(&str),
    ) -> Result<Vec<u8>, ImageError> {
        let start = Instant::now();
        self.prepare();
        let mut child = self.command.spawn().map_err(|e| ImageError::io(format!("starting {}", self.name), e))?;
        let (sender, receiver) = mpsc::sync_channel::<String>(256);
        let stderr = child.stderr.take();
        let stdout = child.stdout.take();
        // Both threads end when the last holder of the pipe does; they own nothing that must be joined.
        std::thread::spawn(move || stderr.map(|pipe| send_lines(pipe, &sender)));
        let (out_sender, out_receiver) = mpsc::sync_channel(1);
        std::thread::spawn(move || {
            let mut kept = Vec::new();
            if let Some(mut pipe) = stdout {
                let read = Read::by_ref(&mut pipe).take(STDOUT_MAX as u64).read_to_end(&mut kept);
                let drained = io::copy(&mut pipe, &mut io::sink());
                drop((read, drained));
            }
            drop(out_sender.send(kept));
        });

        let mut tail = std::collections::VecDeque::with_capacity(TAIL_LINES);
        let mut note = |line: String| {
            on_line(&line);
            progress.event(Event::Line(&line));
            if tail.len() == TAIL_LINES {
                tail.pop_front();
            }
            tail.push_back(line);
        };
        let mut ended = None;
        let stopped = loop {
            match receiver.recv_timeout(TICK) {
                Ok(line) => note(line),
                // Standard error closed: only the end of the program is waited for now.
                Err(RecvTimeoutError::Disconnected) if ended.is_none() => std::thread::sleep(Duration::from_millis(5)),
                Err(RecvTimeoutError::Disconnected) => break None,
                Err(RecvTimeoutError::Timeout) if ended.is_some_and(|(_, at): (_, Instant)| at.elapsed() > GRACE) => {
                    // A background child keeps the pipe; what it may still write is not waited for.
                    break None;
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if ended.is_none() {
                let status = child.try_wait().map_err(|e| ImageError::io(format!("waiting for {}", self.name), e))?;
                ended = status.map(|s| (s, Instant::now()));
            }
            if ended.is_none() && progress.cancelled() {
                break Some(ImageError::Cancelled);
            }
            if ended.is_none() && start.elapsed() > self.limit {
                let seconds = self.limit.as_secs();
                break Some(ImageError::TimedOut { tool: self.name.to_owned(), seconds, detail: String::new() });
            }
        };
        let tail = || tail.iter().map(String::as_str).collect::<Vec<_>>().join("\n");
        if let Some(error) = stopped {
            end(&mut child);
            return Err(match error {
                ImageError::TimedOut { tool, seconds, .. } => ImageError::TimedOut { tool, seconds, detail: tail() },
                other => other,
            });
        }
        let Some((status, _)) = ended else { return Err(ImageError::malformed("a program ended without a status")) };
        tracing::debug!(tool = self.name, %status, elapsed_ms = start.elapsed().as_millis() as u64, "program ended");
        if !status.success() {
            let mut detail = tail();
            if detail.is_empty() {
                detail = status.to_string();
            }
            return Err(ImageError::from_output(self.name, detail));
        }
        Ok(out_receiver.recv_timeout(GRACE).unwrap_or_default())
    }
}

/// Asks the program's whole process group to end, then makes it.
fn end(child: &mut Child) {
    let group = i32::try_from(child.id()).map(Pid::from_raw).ok();
    let signal = |s| group.map(|g| killpg(g, s));
    signal(Signal::SIGTERM);
    let asked = Instant::now();
    while asked.elapsed() < GRACE {
        if matches!(child.try_wait(), Ok(Some(_)) | Err(_)) {
            break;
        }
        std::thread::sleep(TICK);
    }
    signal(Signal::SIGKILL);
    if let Err(error) = child.wait() {
        tracing::warn!(%error, "a program could not be waited for");
    }
}

/// Sends each line (ended by LF or CR), cut to [`LINE_MAX`], lossy UTF-8, without control characters.
fn send_lines(pipe: impl Read, sender: &SyncSender<String>) {
    let mut reader = BufReader::new(pipe);
    let mut line = Vec::new();
    loop {
        let Ok(chunk) = reader.fill_buf() else { return };
        if chunk.is_empty() {
            if !line.is_empty() {
                drop(sender.send(printable(&line)));
            }
            return;
        }
        let end = chunk.iter().position(|b| matches!(b, b'\n' | b'\r'));
        let part = end.unwrap_or(chunk.len());
        let room = LINE_MAX.saturating_sub(line.len());
        line.extend_from_slice(&chunk[..part.min(room)]);
        let used = part + usize::from(end.is_some());
        reader.consume(used);
        if end.is_some() {
            if !line.is_empty() && sender.send(printable(&line)).is_err() {
                return;
            }
            line.clear();
        }
    }
}

fn printable(line: &[u8]) -> String {
    String::from_utf8_lossy(line).chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::super::progress::Silent;
    use super::*;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn sh(script: &str, limit: Duration) -> Tool {
        Tool::new("sh", "dash", limit).expect("sh").arg("-c").arg(script)
    }

    #[test]
    fn output_is_returned_and_errors_are_passed_on_line_by_line() {
        let lines = Mutex::new(Vec::new());
        let out = sh("echo out; printf 'a\\rb\\n' >&2; printf tail >&2", Duration::from_secs(5))
            .run_with(&Silent, |l| lines.lock().expect("lock").push(l.to_owned()))
            .expect("runs");
        assert_eq!(out, b"out\n");
        assert_eq!(*lines.lock().expect("lock"), ["a", "b", "tail"]);
    }

    #[test]
    fn a_failure_carries_the_last_lines() {
        let e = sh("for i in $(seq 100); do echo line $i >&2; done; exit 3", Duration::from_secs(5))
            .run(&Silent)
            .expect_err("fails");
        let detail = e.detail().expect("has one");
        assert!(
            detail.ends_with("line 100") && !detail.contains("line 60\n") && detail.contains("line 61\n"),
            "{detail}"
        );
    }

    #[test]
    fn a_program_that_hangs_is_ended_with_its_children() {
        let dir = tempfile::tempdir().expect("dir");
        let file = dir.path().join("pid");
        let script = format!("sleep 300 & echo $! > {}; echo started >&2; wait", file.display());
        let e = sh(&script, Duration::from_millis(500)).run(&Silent).expect_err("times out");
        assert!(matches!(e, ImageError::TimedOut { .. }), "{e:?}");
        assert_eq!(e.detail(), Some("started"));
        let pid: i32 = std::fs::read_to_string(file).expect("pid").trim().parse().expect("number");
        let gone = (0..50).any(|_| {
            std::thread::sleep(Duration::from_millis(20));
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.is_empty() || stat.contains(") Z")
        });
        assert!(gone, "the child of the program lives on");
    }

    #[test]
    fn cancelling_ends_it() {
        struct Stop(AtomicBool);
        impl Progress for Stop {
            fn event(&self, _: Event<'_>) {
                self.0.store(true, Ordering::Relaxed);
            }
            fn cancelled(&self) -> bool {
                self.0.load(Ordering::Relaxed)
            }
        }
        let start = Instant::now();
        let e = sh("echo x >&2; exec sleep 300", Duration::from_secs(60)).run(&Stop(AtomicBool::new(false)));
        assert!(matches!(e, Err(ImageError::Cancelled)), "{e:?}");
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn a_lock_is_held_until_the_last_child_of_the_program_ends() {
        use rustix::fs::{FlockOperation::NonBlockingLockExclusive, flock};
        let file = tempfile::NamedTempFile::new().expect("file");
        let lock = std::fs::File::open(file.path()).expect("open");
        flock(&lock, NonBlockingLockExclusive).expect("locks");
        let held = OwnedFd::from(lock.try_clone().expect("dup"));
        sh("sleep 0.6 >/dev/null 2>&1 &", Duration::from_secs(5)).holding(held).run(&Silent).expect("runs");
        drop(lock);
        let other = std::fs::File::open(file.path()).expect("open");
        assert!(flock(&other, NonBlockingLockExclusive).is_err(), "held by the child");
        let free = (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(20));
            flock(&other, NonBlockingLockExclusive).is_ok()
        });
        assert!(free, "let go when the child ended");
    }

    #[test]
    fn a_missing_program_names_its_package() {
        let e = find("no-such-program-here", "some-package").expect_err("missing");
        assert!(e.to_string().contains("apt install some-package"), "{e}");
    }
}
