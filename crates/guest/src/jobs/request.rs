//! A job request, checked: nothing after this meets an empty argv, a NUL or an endless environment.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString};
use std::time::Duration;

use connectrpc::ConnectError;
use mainbrella_guest_protocol::limits::{
    ARGV_BYTES_MAX, ARGV_ENTRIES_MAX, ENV_BYTES_MAX, ENV_ENTRIES_MAX, JOB_ID_MAX, OUTPUT_LIMIT_MAX, PATH_MAX,
    STDIN_INLINE_MAX,
};
use mainbrella_guest_protocol::pb;

use super::spawn::{DEFAULT_PATH, Program, TerminalSize};
use crate::Defaults;
use crate::users::{Identity, is_user};

/// What a request comes to.
#[derive(Debug)]
pub(crate) struct Checked {
    pub(crate) id: String,
    pub(crate) program: Program,
    pub(crate) timeout: Option<Duration>,
    pub(crate) stdin: Vec<u8>,
    pub(crate) stdin_open: bool,
    pub(crate) output_limit: u64,
    pub(crate) forget_when_followed: bool,
    pub(crate) acked: bool,
}

fn invalid(message: &'static str) -> ConnectError {
    ConnectError::invalid_argument(message)
}

/// Who the process is to be, `USER[:GROUP]`; `None`: who the agent is.
pub(crate) fn user_of(request: &pb::StartJobRequest, defaults: &Defaults) -> Result<Option<String>, ConnectError> {
    if request.user.is_empty() {
        return Ok(defaults.user.clone());
    }
    if !is_user(&request.user) {
        return Err(invalid(
            "user: USER or USER:GROUP by name or number, at most 32 letters, digits, `_`, `.`, `-` each",
        ));
    }
    Ok(Some(request.user.clone()))
}

/// Checks `request`; `base_env` is what `Configure` set, `base_cwd` what the image says, `who` the user it runs as.
pub(crate) fn check(
    request: pb::StartJobRequest,
    base_env: &HashMap<String, String>,
    base_cwd: Option<&CStr>,
    who: Option<Identity>,
) -> Result<Checked, ConnectError> {
    let id = request.job_id;
    if id.is_empty() || id.len() > JOB_ID_MAX || !id.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(invalid("job_id: 1 to 64 visible ASCII characters"));
    }
    if request.argv.is_empty() || request.argv.len() > ARGV_ENTRIES_MAX {
        return Err(invalid("argv: 1 to 1024 entries"));
    }
    if request.argv.iter().map(|arg| arg.len() + 1).sum::<usize>() > ARGV_BYTES_MAX {
        return Err(invalid("argv: too long in all"));
    }
    if request.argv[0].is_empty() {
        return Err(invalid("argv: the program has no name"));
    }
    let argv: Result<Vec<_>, _> = request.argv.into_iter().map(CString::new).collect();
    let argv = argv.map_err(|_| invalid("argv: NUL in an argument"))?;
    if request.cwd.len() > PATH_MAX || !(request.cwd.is_empty() || request.cwd[0] == b'/') {
        return Err(invalid("cwd: an absolute path of at most 4095 bytes"));
    }
    let cwd = if request.cwd.is_empty() {
        default_cwd(base_cwd, who.as_ref())
    } else {
        CString::new(request.cwd).map_err(|_| invalid("cwd: NUL in the path"))?
    };
    if request.stdin.len() > STDIN_INLINE_MAX {
        return Err(invalid("stdin: at most 1 MiB with the request"));
    }
    if request.output_limit > OUTPUT_LIMIT_MAX {
        return Err(invalid("output_limit: at most 16 MiB"));
    }
    check_env(request.env.iter())?;
    let pty = request.pty.as_option().map(size_of).transpose()?;
    let output = match request.output_file.as_slice() {
        [] => None,
        _ if pty.is_some() => return Err(invalid("output_file: not with a terminal")),
        path if path[0] != b'/' || path.len() > PATH_MAX => {
            return Err(invalid("output_file: an absolute path of at most 4095 bytes"));
        }
        path => Some(CString::new(path).map_err(|_| invalid("output_file: NUL in the path"))?),
    };
    let home = who.as_ref().map_or("/root", |who| who.home.as_str());
    let name = who.as_ref().and_then(|who| who.name.as_deref());
    let mut env: BTreeMap<String, String> = [("PATH", DEFAULT_PATH), ("HOME", home), ("LANG", "C.UTF-8")]
        .into_iter()
        .chain(name.into_iter().flat_map(|name| [("USER", name), ("LOGNAME", name)]))
        .chain(pty.map(|_| ("TERM", "xterm-256color")))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    env.extend(base_env.iter().map(|(name, value)| (name.clone(), value.clone())));
    env.extend(request.env);
    Ok(Checked {
        id,
        program: Program { argv, cwd, env, stdin: request.stdin_open || !request.stdin.is_empty(), pty, output, who },
        timeout: (request.timeout_ms > 0).then(|| Duration::from_millis(request.timeout_ms)),
        stdin: request.stdin,
        stdin_open: request.stdin_open || pty.is_some(),
        output_limit: request.output_limit,
        forget_when_followed: request.forget_when_followed,
        acked: request.acked,
    })
}

/// Bounds on an environment, of a job or of all of them.
pub(crate) fn check_env<'a>(env: impl Iterator<Item = (&'a String, &'a String)>) -> Result<(), ConnectError> {
    let (mut entries, mut bytes) = (0, 0);
    for (name, value) in env {
        entries += 1;
        bytes += name.len() + value.len() + 2;
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(invalid("env: a name is empty or has '=' in it, or there is a NUL"));
        }
    }
    if entries > ENV_ENTRIES_MAX || bytes > ENV_BYTES_MAX {
        return Err(invalid("env: at most 256 entries and 128 KiB in all"));
    }
    Ok(())
}

/// A terminal size within reason.
pub(crate) fn size_of(size: &pb::PtySize) -> Result<TerminalSize, ConnectError> {
    let fits = |n: u32| u16::try_from(n).ok().filter(|n| (1..=4096).contains(n));
    match (fits(size.cols), fits(size.rows)) {
        (Some(cols), Some(rows)) => Ok(TerminalSize { cols, rows }),
        _ => Err(invalid("pty: 1 to 4096 columns and rows")),
    }
}

fn default_cwd(base: Option<&CStr>, who: Option<&Identity>) -> CString {
    let home = who.map_or_else(|| c"/root".to_owned(), |who| CString::new(who.home.as_str()).unwrap_or_default());
    for dir in base.into_iter().chain([c"/workspace", home.as_c_str()]) {
        let stat = rustix::fs::stat(dir);
        if stat.is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir()) {
            return dir.to_owned();
        }
    }
    c"/".to_owned()
}
