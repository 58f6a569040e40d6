//! `mainbrella context`: code whose state survives from one run to the next.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mainbrella_client::api::context::bundle_text;
use mainbrella_client::api::{CodeResult, CodeStatus, Context as Made, ContextState, CreateContext, RunCode};
use mainbrella_types::limits;

use crate::context::Context;
use crate::failure::{Exit, Failure};
use crate::output::{Output, Tone, span};
use crate::values::{MachineArg, Pair, Span};

/// Exit code of code that ran into its time limit.
const TIMED_OUT: u8 = 124;
/// Files of one name that are looked past when a result is saved.
const NAMES_MAX: u32 = 10_000;

/// Run code in contexts that keep their state
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// Start a context; prints its id
    Create {
        /// The machine
        #[arg(value_name = "ID[@CREATED_AT]")]
        machine: MachineArg,
        /// What it runs
        #[arg(long, default_value = "python", value_name = "LANGUAGE")]
        language: String,
        /// Where it begins
        #[arg(long, short = 'C', value_name = "DIR")]
        cwd: Option<String>,
        /// A variable over those of the machine; may be given several times
        #[arg(long, short, value_name = "NAME=VALUE")]
        env: Vec<Pair>,
    },
    /// List the contexts of a machine
    List {
        /// The machine
        #[arg(value_name = "ID[@CREATED_AT]")]
        machine: MachineArg,
    },
    /// Run code and print what it says and shows
    ///
    /// Without CODE it is read from --file, else from standard input. Ends with 0; 1 after an exception; 124 at the time limit;
    /// 130 when it was interrupted. Ctrl-C interrupts it; its state is kept.
    Run {
        /// The machine
        #[arg(value_name = "ID[@CREATED_AT]")]
        machine: MachineArg,
        /// The context, as `context list` shows it
        #[arg(value_name = "CONTEXT")]
        id: String,
        /// The code
        #[arg(value_name = "CODE", conflicts_with = "file", allow_hyphen_values = true)]
        code: Option<String>,
        /// Read the code from this file; - is standard input
        #[arg(long, short, value_name = "FILE")]
        file: Option<PathBuf>,
        /// It is interrupted after so long
        #[arg(long, short, default_value = "60s", value_name = "DURATION")]
        timeout: Span,
        /// Save pictures, HTML, JSON and the like here, each in a new file named by what it is
        #[arg(long, short, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Begin anew: all state is gone, the id stays
    Restart {
        /// The machine
        #[arg(value_name = "ID[@CREATED_AT]")]
        machine: MachineArg,
        /// The context
        #[arg(value_name = "CONTEXT")]
        id: String,
    },
    /// Interrupt what runs, as Ctrl-C does; state is kept
    Interrupt {
        /// The machine
        #[arg(value_name = "ID[@CREATED_AT]")]
        machine: MachineArg,
        /// The context
        #[arg(value_name = "CONTEXT")]
        id: String,
    },
    /// End contexts
    Rm {
        /// The machine
        #[arg(value_name = "ID[@CREATED_AT]")]
        machine: MachineArg,
        /// The contexts
        #[arg(value_name = "CONTEXT", required = true)]
        ids: Vec<String>,
    },
}

/// Does what is asked of contexts.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let client = context.client()?;
    let output = context.output;
    match args.verb {
        Verb::Create { machine, language, cwd, env } => {
            let machine = context.resolve(&client, &machine).await?;
            let env = env.into_iter().map(|Pair(k, v)| (k, v)).collect();
            let made = client.create_context(&machine, &CreateContext { language, cwd, env }).await?;
            if output.json { output.json(&made)? } else { output.line(&made.id)? }
        }
        Verb::List { machine } => {
            let machine = context.resolve(&client, &machine).await?;
            let contexts = client.contexts(&machine).await?;
            if output.json {
                output.json(&mainbrella_client::api::ContextList { contexts })?;
            } else {
                let now = jiff::Timestamp::now().as_millisecond();
                let rows = contexts.iter().map(|c| row(c, now)).collect();
                output.table(&["CONTEXT", "LANGUAGE", "STATE", "AGE"], rows)?;
            }
        }
        Verb::Run { machine, id, code, file, timeout, out } => {
            let code = code.map_or_else(|| read(file.as_deref()), Ok)?;
            let machine = context.resolve(&client, &machine).await?;
            // Before anything runs: what it shows must have a place to go.
            if let Some(dir) = &out {
                std::fs::create_dir_all(dir).map_err(|e| Failure::io(&format!("making {}", dir.display()), &e))?;
            }
            let body = RunCode { code, timeout_ms: Some(timeout.millis()) };
            let result = client.run_code(&machine, &id, &body).await?;
            return tell(output, &result, out.as_deref());
        }
        Verb::Restart { machine, id } => {
            let machine = context.resolve(&client, &machine).await?;
            told(output, &client.restart_context(&machine, &id).await?)?;
        }
        Verb::Interrupt { machine, id } => {
            let machine = context.resolve(&client, &machine).await?;
            told(output, &client.interrupt_context(&machine, &id).await?)?;
        }
        Verb::Rm { machine, ids } => {
            let machine = context.resolve(&client, &machine).await?;
            for id in ids {
                client.close_context(&machine, &id).await?;
            }
        }
    }
    Ok(0)
}

fn told(output: Output, context: &Made) -> Result<(), Failure> {
    if output.json { output.json(context) } else { output.line(&format!("{} {}", context.id, word(context.state))) }
}

fn word(state: ContextState) -> &'static str {
    match state {
        ContextState::Starting => "starting",
        ContextState::Idle => "idle",
        ContextState::Busy => "busy",
        ContextState::Dead => "dead",
    }
}

fn row(context: &Made, now: i64) -> Vec<(String, Tone)> {
    let tone = match context.state {
        ContextState::Starting | ContextState::Busy => Tone::Busy,
        ContextState::Idle => Tone::Good,
        ContextState::Dead => Tone::Bad,
    };
    let made = context.created_at.parse::<jiff::Timestamp>().map(jiff::Timestamp::as_millisecond);
    let age = made.map_or_else(|_| context.created_at.clone(), |at| span(now - at));
    let plain = |text: String| (text, Tone::Plain);
    vec![plain(context.id.clone()), plain(context.language.clone()), (word(context.state).to_owned(), tone), plain(age)]
}

/// Code from a file, or from standard input.
fn read(file: Option<&Path>) -> Result<String, Failure> {
    let most = limits::CODE_BYTES_MAX as u64 + 1;
    let mut code = String::new();
    let (name, done) = match file.filter(|f| f.as_os_str() != "-") {
        Some(path) => {
            let read = std::fs::File::open(path).and_then(|f| f.take(most).read_to_string(&mut code));
            (path.display().to_string(), read)
        }
        None => ("standard input".to_owned(), std::io::stdin().lock().take(most).read_to_string(&mut code)),
    };
    done.map_err(|e| Failure::io(&format!("reading the code from {name}"), &e))?;
    if code.len() > limits::CODE_BYTES_MAX {
        return Err(Failure::usage(format!("the code in {name} is longer than 1 MiB"))
            .hint("Copy it into the machine with `mainbrella cp` and import it there."));
    }
    Ok(code)
}

/// Prints what code did, and saves what is more than text; gives the exit code.
fn tell(output: Output, result: &CodeResult, out: Option<&Path>) -> Result<u8, Failure> {
    let code = match result.status {
        CodeStatus::Ok => 0,
        CodeStatus::Error => 1,
        CodeStatus::TimedOut => TIMED_OUT,
        CodeStatus::Interrupted => Exit::Interrupted as u8,
    };
    let mut saved = Vec::new();
    if let Some(dir) = out {
        for (n, shown) in (1..).zip(&result.results) {
            let count = result.execution_count.unwrap_or(0);
            for (mime, value) in &shown.data {
                if let Some(content) = content(mime, value.get()) {
                    saved.push((save(dir, &format!("{count}-{n}"), content.0, &content.1)?, mime));
                }
            }
        }
    }
    if output.json {
        output.json(result)?;
        return Ok(code);
    }
    output.raw(result.stdout.as_bytes())?;
    if !result.stderr.is_empty() {
        let mut err = std::io::stderr().lock();
        err.write_all(result.stderr.as_bytes()).map_err(|e| Failure::io("writing to standard error", &e))?;
    }
    for shown in &result.results {
        if let Some(text) = bundle_text(&shown.data, "text/plain") {
            output.line(&text)?;
        }
    }
    for (path, mime) in saved {
        output.note(&format!("saved {} ({mime})", path.display()));
    }
    for (name, gap) in [("stdout", &result.stdout_omitted), ("stderr", &result.stderr_omitted)] {
        if let Some(gap) = gap {
            output.note(&format!(
                "mainbrella: {} bytes of {name} are missing after the first {}",
                gap.length, gap.offset
            ));
        }
    }
    if let Some(error) = &result.error {
        output.note(error.traceback.join("\n").trim_end());
    }
    match result.status {
        CodeStatus::TimedOut => output
            .note(&format!("mainbrella: the code was interrupted after {} ms, its time limit", result.duration_ms)),
        CodeStatus::Interrupted => output.note("mainbrella: the code was interrupted"),
        CodeStatus::Ok | CodeStatus::Error => {}
    }
    if result.truncated && result.stdout_omitted.is_none() && result.stderr_omitted.is_none() {
        output.note("mainbrella: some results were larger than what is passed on");
    }
    Ok(code)
}

/// What is saved of a value of a MIME type, and how its file ends; `None`: it is plain text, which is printed.
fn content(mime: &str, json: &str) -> Option<(&'static str, Vec<u8>)> {
    let text = || serde_json::from_str::<String>(json).unwrap_or_else(|_| json.to_owned()).into_bytes();
    // Contents of these types are base64 in the protocol; what is not is kept as it came.
    let bytes =
        || STANDARD.decode(String::from_utf8(text()).unwrap_or_default().replace('\n', "")).unwrap_or_else(|_| text());
    Some(match mime {
        "text/plain" => return None,
        "image/png" => ("png", bytes()),
        "image/jpeg" => ("jpg", bytes()),
        "image/gif" => ("gif", bytes()),
        "image/webp" => ("webp", bytes()),
        "application/pdf" => ("pdf", bytes()),
        "image/svg+xml" => ("svg", text()),
        "text/html" => ("html", text()),
        "text/markdown" => ("md", text()),
        "text/latex" => ("tex", text()),
        "application/javascript" => ("js", text()),
        _ if mime == "application/json" || mime.ends_with("+json") => ("json", json.as_bytes().to_vec()),
        _ if mime.starts_with("text/") => ("txt", text()),
        _ => ("bin", bytes()),
    })
}

/// Writes a new file; what is there is never written over.
fn save(dir: &Path, stem: &str, ending: &str, content: &[u8]) -> Result<PathBuf, Failure> {
    for n in 1..=NAMES_MAX {
        let name = if n == 1 { format!("{stem}.{ending}") } else { format!("{stem}-{n}.{ending}") };
        let path = dir.join(name);
        let file = std::fs::OpenOptions::new().write(true).create_new(true).open(&path);
        match file.and_then(|mut file| file.write_all(content)) {
            Ok(()) => return Ok(path),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(Failure::io(&format!("writing {}", path.display()), &e)),
        }
    }
    Err(Failure::new(Exit::Failed, "io", format!("{} has no more free names", dir.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_saved_is_what_its_type_says() {
        let has = |mime: &str, json: &str| content(mime, json).map(|(e, c)| (e, String::from_utf8(c).expect("text")));
        assert_eq!(has("image/png", "\"aGk=\\n\""), Some(("png", "hi".into())));
        assert_eq!(has("image/png", "\"not base64!\""), Some(("png", "not base64!".into())));
        assert_eq!(has("text/html", "\"<b>\\u00e9</b>\""), Some(("html", "<b>é</b>".into())));
        assert_eq!(has("application/vnd.x+json", "{\"a\": 1}"), Some(("json", "{\"a\": 1}".into())));
        assert_eq!(has("text/x-y", "\"t\""), Some(("txt", "t".into())));
        assert_eq!(has("application/x", "\"aGk=\""), Some(("bin", "hi".into())));
        assert_eq!(has("text/plain", "\"x\""), None);
    }

    #[test]
    fn nothing_is_written_over() {
        let dir = tempfile::tempdir().expect("a folder");
        let one = save(dir.path(), "1-1", "png", b"a").expect("saved");
        let two = save(dir.path(), "1-1", "png", b"b").expect("saved");
        assert_eq!(
            (std::fs::read(&one).expect("read"), std::fs::read(&two).expect("read")),
            (b"a".into(), b"b".into())
        );
        assert!(one.ends_with("1-1.png") && two.ends_with("1-1-2.png"));
    }
}
