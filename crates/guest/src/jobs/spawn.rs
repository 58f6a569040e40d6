//! From a request to a running process: everything is prepared before the fork, and the child does nothing but
//! system calls until it is another program.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{Gid, Mode, OFlags, Uid, fchown};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;
use tokio::sync::oneshot;

use crate::reaper::{Reaper, WaitStatus};
use crate::users::Identity;

/// Where programs are looked for when nobody says.
pub(crate) const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Size of a terminal.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TerminalSize {
    pub(crate) cols: u16,
    pub(crate) rows: u16,
}

impl TerminalSize {
    pub(crate) fn winsize(self) -> Winsize {
        Winsize { ws_row: self.rows, ws_col: self.cols, ws_xpixel: 0, ws_ypixel: 0 }
    }
}

/// What to start.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) argv: Vec<CString>,
    pub(crate) cwd: CString,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) stdin: bool,
    pub(crate) pty: Option<TerminalSize>,
    /// The file its output is appended to, instead of pipes.
    pub(crate) output: Option<CString>,
    /// Who it runs as; `None`: who the agent is.
    pub(crate) who: Option<Identity>,
}

/// Our ends of what the child was given.
#[derive(Debug)]
pub(crate) enum Channels {
    Pipes {
        stdin: Option<OwnedFd>,
        stdout: OwnedFd,
        stderr: OwnedFd,
    },
    Pty {
        master: OwnedFd,
    },
    /// Its output goes to a file.
    File {
        stdin: Option<OwnedFd>,
    },
}

/// A child that may not yet be the program.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) pid: i32,
    pub(crate) exited: oneshot::Receiver<WaitStatus>,
    pub(crate) channels: Channels,
    /// Ends without a byte when the program runs; else carries a [`Failure`].
    pub(crate) verdict: OwnedFd,
}

/// Why there is no process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) stage: &'static str,
    pub(crate) errno: i32,
}

impl Failure {
    fn at(stage: &'static str) -> impl Fn(rustix::io::Errno) -> Self {
        move |errno| Self { stage, errno: errno.raw_os_error() }
    }

    fn io(stage: &'static str) -> impl Fn(io::Error) -> Self {
        move |error| Self { stage, errno: error.raw_os_error().unwrap_or(0) }
    }

    /// Reads what a child wrote before it gave up.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: [u8; 8] = bytes.try_into().ok()?;
        let (stage, errno) = bytes.split_at(4);
        let stage = STAGES.get(u32::from_ne_bytes(stage.try_into().ok()?) as usize)?;
        Some(Self { stage, errno: i32::from_ne_bytes(errno.try_into().ok()?) })
    }
}

const STAGES: [&str; 5] = ["cwd", "exec", "pty", "fork", "user"];
const STAGE_CWD: u32 = 0;
const STAGE_EXEC: u32 = 1;
const STAGE_PTY: u32 = 2;
const STAGE_FORK: u32 = 3;
const STAGE_USER: u32 = 4;

/// Starts `program`; `cgroup` is the open `cgroup.procs` it moves itself into.
pub(crate) fn start(reaper: &Reaper, program: &Program, cgroup: Option<&File>) -> Result<Started, Failure> {
    let plan = Plan::new(program);
    let (verdict, verdict_child) = pipe_with(PipeFlags::CLOEXEC).map_err(Failure::at("fork"))?;
    let (channels, child_fds) = open_channels(program)?;
    let fds = ChildFds {
        stdio: child_fds.raw(),
        verdict: verdict_child.as_raw_fd(),
        cgroup: cgroup.map_or(-1, AsRawFd::as_raw_fd),
        pty: program.pty.is_some(),
    };
    let forked = reaper.spawn(|| {
        // SAFETY: the child goes straight to `Plan::run`.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            // SAFETY: we are the child just forked; the plan and the descriptors are our copies.
            0 => unsafe { plan.run(&fds) },
            pid => Ok(pid),
        }
    });
    let (pid, exited) = forked.map_err(Failure::io("fork"))?;
    drop(child_fds);
    drop(verdict_child);
    Ok(Started { pid, exited, channels, verdict })
}

enum ChildEnds {
    Pipes(OwnedFd, OwnedFd, OwnedFd),
    Pty(OwnedFd),
}

impl ChildEnds {
    fn raw(&self) -> [RawFd; 3] {
        match self {
            Self::Pipes(stdin, stdout, stderr) => [stdin.as_raw_fd(), stdout.as_raw_fd(), stderr.as_raw_fd()],
            Self::Pty(slave) => [slave.as_raw_fd(); 3],
        }
    }
}

fn open_channels(program: &Program) -> Result<(Channels, ChildEnds), Failure> {
    if let Some(size) = program.pty {
        let failed = Failure::at("pty");
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = rustix::pty::openpt(flags).map_err(&failed)?;
        rustix::pty::grantpt(&master).map_err(&failed)?;
        rustix::pty::unlockpt(&master).map_err(&failed)?;
        let name = rustix::pty::ptsname(&master, Vec::new()).map_err(&failed)?;
        let slave = rustix::fs::open(&*name, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty());
        let slave = slave.map_err(&failed)?;
        rustix::termios::tcsetwinsize(&slave, size.winsize()).map_err(&failed)?;
        if let Some(who) = &program.who {
            fchown(&slave, Some(Uid::from_raw(who.uid)), None).map_err(&failed)?;
        }
        set_nonblocking(&master).map_err(&failed)?;
        return Ok((Channels::Pty { master }, ChildEnds::Pty(slave)));
    }
    let failed = Failure::at("fork");
    let (stdin, stdin_child) = if program.stdin {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).map_err(&failed)?;
        set_nonblocking(&write).map_err(&failed)?;
        (Some(write), read)
    } else {
        // A command that reads input it was not given sees its end.
        let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        (None, null.map_err(&failed)?)
    };
    if program.stdin {
        give(&stdin_child, program.who.as_ref()).map_err(Failure::at("user"))?;
    }
    if let Some(path) = &program.output {
        let file = open_output(path, program.who.as_ref()).map_err(Failure::at("output"))?;
        let again = rustix::io::fcntl_dupfd_cloexec(&file, 3).map_err(&failed)?;
        return Ok((Channels::File { stdin }, ChildEnds::Pipes(stdin_child, file, again)));
    }
    let (stdout, stdout_child) = pipe_with(PipeFlags::CLOEXEC).map_err(&failed)?;
    let (stderr, stderr_child) = pipe_with(PipeFlags::CLOEXEC).map_err(&failed)?;
    set_nonblocking(&stdout).map_err(&failed)?;
    set_nonblocking(&stderr).map_err(&failed)?;
    for end in [&stdout_child, &stderr_child] {
        give(end, program.who.as_ref()).map_err(Failure::at("user"))?;
    }
    Ok((Channels::Pipes { stdin, stdout, stderr }, ChildEnds::Pipes(stdin_child, stdout_child, stderr_child)))
}

/// Makes a pipe the user's: a program may open it once more, as `/dev/stdout`.
fn give(pipe: &OwnedFd, who: Option<&Identity>) -> Result<(), rustix::io::Errno> {
    who.map_or(Ok(()), |who| fchown(pipe, Some(Uid::from_raw(who.uid)), Some(Gid::from_raw(who.gid))))
}

/// Opens a file to append to; one that is made belongs to the user. Anything that is no regular file is refused, and not
/// waited for.
fn open_output(path: &CString, who: Option<&Identity>) -> Result<OwnedFd, rustix::io::Errno> {
    let flags =
        OFlags::WRONLY | OFlags::APPEND | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let made = rustix::fs::open(path, flags | OFlags::CREATE | OFlags::EXCL, Mode::from_raw_mode(0o644));
    let file = match made {
        Ok(file) => {
            give(&file, who)?;
            file
        }
        Err(rustix::io::Errno::EXIST) => rustix::fs::open(path, flags, Mode::empty())?,
        Err(errno) => return Err(errno),
    };
    let kind = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode);
    if kind != rustix::fs::FileType::RegularFile {
        return Err(rustix::io::Errno::INVAL);
    }
    rustix::fs::fcntl_setfl(&file, OFlags::APPEND)?;
    Ok(file)
}

fn set_nonblocking(fd: &OwnedFd) -> Result<(), rustix::io::Errno> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK)
}

struct ChildFds {
    stdio: [RawFd; 3],
    verdict: RawFd,
    cgroup: RawFd,
    pty: bool,
}

/// Pointers for `execve`, made before the fork: a child of a threaded process may not allocate.
struct Plan<'a> {
    cwd: &'a CString,
    who: Option<&'a Identity>,
    /// Where the program may be, in order.
    candidates: Vec<CString>,
    argv: Vec<*const libc::c_char>,
    /// For a script without `#!`: the shell, the script (its place is filled in the child), the arguments.
    script_argv: Vec<Cell<*const libc::c_char>>,
    env: Vec<*const libc::c_char>,
    _env: Vec<CString>,
}

impl<'a> Plan<'a> {
    fn new(program: &'a Program) -> Self {
        let env: Vec<CString> =
            program.env.iter().filter_map(|(name, value)| CString::new(format!("{name}={value}")).ok()).collect();
        let name = program.argv[0].as_bytes();
        let candidates = if name.contains(&b'/') {
            vec![program.argv[0].clone()]
        } else {
            let path = program.env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
            path.split(':')
                .filter_map(|dir| {
                    let dir = if dir.is_empty() { "." } else { dir };
                    let name = std::ffi::OsStr::from_bytes(name);
                    CString::new(Path::new(dir).join(name).as_os_str().as_bytes()).ok()
                })
                .collect()
        };
        let argv: Vec<_> = program.argv.iter().map(|arg| arg.as_ptr()).chain([std::ptr::null()]).collect();
        let script_argv =
            [c"/bin/sh".as_ptr(), std::ptr::null()].into_iter().chain(argv[1..].iter().copied()).map(Cell::new);
        let env_pointers = env.iter().map(|entry| entry.as_ptr()).chain([std::ptr::null()]).collect();
        Self {
            cwd: &program.cwd,
            who: program.who.as_ref(),
            candidates,
            script_argv: script_argv.collect(),
            argv,
            env: env_pointers,
            _env: env,
        }
    }

    /// The child's whole life until it is the program.
    ///
    /// # Safety
    /// Only in a child just forked. Makes system calls, allocates nothing, takes no lock, never returns.
    unsafe fn run(&self, fds: &ChildFds) -> ! {
        // SAFETY: every pointer was made by the parent and is copied memory of ours here; descriptors are open.
        unsafe {
            let fail = |stage: u32| -> ! {
                let errno = *libc::__errno_location();
                let mut message = [0u8; 8];
                message[..4].copy_from_slice(&stage.to_ne_bytes());
                message[4..].copy_from_slice(&errno.to_ne_bytes());
                libc::write(fds.verdict, message.as_ptr().cast(), 8);
                libc::_exit(127)
            };
            // Signals as a program expects them: nothing blocked, nothing ignored.
            // By the system call: the C library keeps some numbers for itself, and they can be ignored all the same.
            let default = [0u64; 4];
            for signal in 1..=64 {
                libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), std::ptr::null::<u8>(), 8);
            }
            let mut none: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut none);
            libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
            if libc::setsid() < 0 {
                fail(STAGE_FORK);
            }
            // The descriptors we were given may themselves be 0, 1 or 2: lift them out of the way first.
            let mut lifted = [0; 3];
            for (i, fd) in fds.stdio.iter().enumerate() {
                lifted[i] = libc::fcntl(*fd, libc::F_DUPFD_CLOEXEC, 3);
                if lifted[i] < 0 {
                    fail(STAGE_FORK);
                }
            }
            for (i, fd) in lifted.iter().enumerate() {
                if libc::dup2(*fd, i as i32) < 0 {
                    fail(STAGE_FORK);
                }
            }
            if fds.pty && libc::ioctl(0, libc::TIOCSCTTY as _, 0) < 0 {
                fail(STAGE_PTY);
            }
            // Ours must not outlive us in a child that stands still, frozen, between here and exec.
            close_all_but(fds.verdict, fds.cgroup);
            if fds.cgroup >= 0 && libc::write(fds.cgroup, c"0".as_ptr().cast(), 1) < 0 {
                fail(STAGE_FORK);
            }
            // In a machine the agent is spared when memory ends; the user's processes are not.
            if fds.cgroup >= 0 {
                let score = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
                libc::write(score, c"0".as_ptr().cast(), 1);
                libc::close(score);
            }
            // By the system calls: the C library's functions would want all threads to agree.
            if let Some(who) = self.who
                && (libc::syscall(libc::SYS_setgroups, who.groups.len(), who.groups.as_ptr()) < 0
                    || libc::syscall(libc::SYS_setresgid, who.gid, who.gid, who.gid) < 0
                    || libc::syscall(libc::SYS_setresuid, who.uid, who.uid, who.uid) < 0)
            {
                fail(STAGE_USER);
            }
            libc::umask(0o022);
            if libc::chdir(self.cwd.as_ptr()) < 0 {
                fail(STAGE_CWD);
            }
            let mut errno = libc::ENOENT;
            for candidate in &self.candidates {
                libc::execve(candidate.as_ptr(), self.argv.as_ptr(), self.env.as_ptr());
                match *libc::__errno_location() {
                    libc::ENOENT | libc::ENOTDIR => {}
                    libc::EACCES => errno = libc::EACCES,
                    libc::ENOEXEC => {
                        self.script_argv[1].set(candidate.as_ptr());
                        libc::execve(c"/bin/sh".as_ptr(), self.script_argv.as_ptr().cast(), self.env.as_ptr());
                        errno = libc::ENOEXEC;
                        break;
                    }
                    other => {
                        errno = other;
                        break;
                    }
                }
            }
            *libc::__errno_location() = errno;
            fail(STAGE_EXEC)
        }
    }
}

/// Closes every descriptor above 2 except two.
///
/// # Safety
/// Only in a child just forked.
unsafe fn close_all_but(a: RawFd, b: RawFd) {
    let (low, high) = if a < b { (a, b) } else { (b, a) };
    let mut from = 3u32;
    for keep in [low, high] {
        if keep >= 3 {
            // SAFETY: takes no pointers.
            unsafe { close_range(from, keep as u32) };
            from = keep as u32 + 1;
        }
    }
    // SAFETY: takes no pointers.
    unsafe { close_range(from, u32::MAX) };
}

/// Closes `[from, to)`, or to the last with `u32::MAX`.
unsafe fn close_range(from: u32, to: u32) {
    let last = if to == u32::MAX {
        u32::MAX
    } else if to > from {
        to - 1
    } else {
        return;
    };
    // SAFETY: takes no pointers. Where the kernel lacks it, close-on-exec does the same a little later.
    unsafe { libc::syscall(libc::SYS_close_range, from, last, 0) };
}
