//! `mainbrella secret`.

use std::io::{IsTerminal as _, Read as _};
use std::path::{Path, PathBuf};

use mainbrella_client::api::{OnFork, Secret, SecretBody};
use mainbrella_types::{SecretName, limits};

use crate::context::Context;
use crate::failure::Failure;
use crate::output::{Tone, printable, span};
use crate::values::{HostPort, MachineArg};

/// Let requests of a machine carry credentials that it never sees
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// Have the value of a secret added to what a machine sends to one host over TLS; replaces one of the same name
    #[command(group(clap::ArgGroup::new("place").required(true).args(["header", "basic"])))]
    Set {
        /// The machine
        #[arg(value_name = "ID[@CREATED_AT]")]
        machine: MachineArg,
        /// 1 to 64 of a-z, 0-9, `-` and `_`
        name: SecretName,
        /// The one host that is sent the value, by its exact name; port 443 unless it says another
        #[arg(long, value_name = "HOST[:PORT]")]
        host: HostPort,
        /// The value is the whole value of this header, e.g. `Bearer …` of Authorization
        #[arg(long, value_name = "NAME")]
        header: Option<String>,
        /// The value is the password of this user, sent as HTTP basic credentials
        #[arg(long, value_name = "USER")]
        basic: Option<String>,
        /// Copies that `fork` makes of the machine get it, too
        #[arg(long)]
        inherit: bool,
        /// Read the value from this file, without a line break at its end; `-` for standard input [default: standard input]
        #[arg(long, value_name = "FILE", conflicts_with = "value_env")]
        value_file: Option<PathBuf>,
        /// Take the value from this environment variable
        #[arg(long, value_name = "VAR")]
        value_env: Option<String>,
    },
    /// List the secrets of a machine; values are never shown
    List {
        /// The machine
        #[arg(value_name = "ID[@CREATED_AT]")]
        machine: MachineArg,
    },
    /// Remove a secret; requests that begin later go without it
    Remove {
        /// The machine
        #[arg(value_name = "ID[@CREATED_AT]")]
        machine: MachineArg,
        /// The secret, as `secret list` shows it
        name: SecretName,
    },
}

/// Sets, lists or removes secrets.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    match args.verb {
        Verb::Set { machine, name, host: HostPort { host, port }, header, basic, inherit, value_file, value_env } => {
            // Before anything is asked of the service: what cannot be read changes nothing.
            let value = value(value_file.as_deref(), value_env.as_deref())?;
            let on_fork = if inherit { OnFork::Inherit } else { OnFork::Drop };
            let body = SecretBody { host, port: Some(port), header, username: basic, value, on_fork };
            let client = context.client()?;
            let machine = context.resolve(&client, &machine).await?;
            let secret = client.set_secret(&machine, name.as_str(), &body).await?;
            if context.output.json {
                context.output.json(&secret)?;
            } else {
                let (name, host) = (printable(&secret.name), printable(&secret.host));
                context.output.line(&format!("{name} set for {host}:{}", secret.port))?;
            }
        }
        Verb::List { machine } => {
            let client = context.client()?;
            let machine = context.resolve(&client, &machine).await?;
            let list = client.secrets(&machine).await?;
            if context.output.json {
                context.output.json(&list)?;
                return Ok(0);
            }
            let now = jiff::Timestamp::now().as_millisecond();
            let rows = list.secrets.iter().map(|s| row(s, now)).collect();
            context.output.table(&["NAME", "HOST", "SENT AS", "IN FORKS", "SET"], rows)?;
        }
        Verb::Remove { machine, name } => {
            let client = context.client()?;
            let machine = context.resolve(&client, &machine).await?;
            let removed = client.remove_secret(&machine, name.as_str()).await?.removed;
            if context.output.json {
                context.output.json(&serde_json::json!({ "name": name.as_str(), "removed": removed }))?;
            } else if removed {
                context.output.line(&format!("{name} removed"))?;
            } else {
                context.output.line(&format!("there was no secret {name}"))?;
            }
        }
    }
    Ok(0)
}

/// A secret as a line of a table.
fn row(secret: &Secret, now: i64) -> Vec<(String, Tone)> {
    let made = secret.created_at.parse::<jiff::Timestamp>().map(jiff::Timestamp::as_millisecond);
    let age = made.map_or_else(|_| secret.created_at.clone(), |at| format!("{} ago", span(now - at)));
    let sent = match (&secret.header, &secret.username) {
        (Some(header), _) => format!("header {header}"),
        (None, Some(user)) => format!("password of {user}"),
        (None, None) => String::new(),
    };
    let host = format!("{}:{}", secret.host, secret.port);
    let forks = if secret.on_fork == OnFork::Inherit { "too" } else { "no" };
    [secret.name.clone(), host, sent, forks.to_owned(), age].map(|text| (text, Tone::Plain)).into()
}

/// The value, from where the command line says. It is never an argument: other users of this machine can read those.
fn value(file: Option<&Path>, variable: Option<&str>) -> Result<String, Failure> {
    let ways = "Give it with --value-file or --value-env, or pipe it in.";
    let value = match (file, variable) {
        (_, Some(variable)) => std::env::var(variable)
            .map_err(|_| Failure::usage(format!("there is no text in the environment variable {variable}")))?,
        (Some(file), None) if file != Path::new("-") => {
            let opened = std::fs::File::open(file)
                .map_err(|e| Failure::io(&format!("reading the value from {}", file.display()), &e))?;
            read(opened, &file.display().to_string())?
        }
        (None, None) if std::io::stdin().is_terminal() => {
            return Err(Failure::usage("the value of the secret was not given").hint(ways));
        }
        (_, None) => read(std::io::stdin().lock(), "standard input")?,
    };
    if value.is_empty() {
        return Err(Failure::usage("the value of the secret is empty").hint(ways));
    }
    Ok(value)
}

/// A text without the line break at its end. `name` says where it comes from.
fn read(from: impl std::io::Read, name: &str) -> Result<String, Failure> {
    // Room for the line break, and for one byte that says that there are too many.
    let most = limits::SECRET_VALUE_MAX as u64 + 3;
    let mut text = String::new();
    from.take(most)
        .read_to_string(&mut text)
        .map_err(|e| Failure::io(&format!("reading the value from {name}"), &e))?;
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    if text.len() > limits::SECRET_VALUE_MAX {
        return Err(Failure::usage(format!("the value in {name} is longer than {} bytes", limits::SECRET_VALUE_MAX)));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(subcommand)]
        verb: Verb,
    }

    fn parsed(words: &str) -> Option<Verb> {
        Line::try_parse_from(["secret"].into_iter().chain(words.split(' '))).ok().map(|line| line.verb)
    }

    #[test]
    fn a_secret_goes_to_one_place_and_comes_from_one() {
        let set = parsed("set m-1@2026-10-08T12:00:00Z github --host api.github.com --header Authorization");
        let Some(Verb::Set { machine, name, host, header, basic, value_file, value_env, inherit }) = set else {
            panic!("not a set");
        };
        assert_eq!((machine.id.as_str(), name.as_str(), host.host.as_str()), ("m-1", "github", "api.github.com"));
        assert_eq!((host.port, header.as_deref(), basic), (443, Some("Authorization"), None));
        assert_eq!((value_file, value_env, inherit), (None, None, false));
        for good in [
            "set m-1 git --host git.example:8443 --basic me --value-file -",
            "set m-1 git --host git.example --basic me --value-env TOKEN",
            "list m-1",
            "remove m-1 git",
        ] {
            assert!(parsed(good).is_some(), "{good}");
        }
        for bad in [
            "set m-1 git --host git.example",
            "set m-1 git --host git.example --header A --basic me",
            "set m-1 git --header A",
            "set m-1 git --host :443 --header A",
            "set m-1 git --host git.example --header A --value-file f --value-env E",
            "set m-1 git --host git.example --header A --value v",
            "set m-1 git v --host git.example --header A",
            "set m-1 Git --host git.example --header A",
            "remove m-1 ..",
            "remove m-1",
        ] {
            assert!(parsed(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn one_line_break_at_the_end_is_none_of_the_value() {
        let at = |text: &str| read(text.as_bytes(), "a file").ok();
        for (text, value) in [("a b", "a b"), ("a\n", "a"), ("a\r\n", "a"), ("a\n\n", "a\n"), ("\n", ""), ("", "")] {
            assert_eq!(at(text).as_deref(), Some(value), "{text:?}");
        }
        let most = "x".repeat(limits::SECRET_VALUE_MAX);
        for end in ["", "\n", "\r\n"] {
            assert_eq!(at(&format!("{most}{end}")).as_deref(), Some(most.as_str()));
        }
        for more in ["x", "x\n", "xxxxxxxx"] {
            let e = read(format!("{most}{more}").as_bytes(), "a file").expect_err("too long");
            assert!(!e.message.contains("xx"), "{}", e.message);
        }
    }

    #[test]
    fn a_value_that_is_not_there_is_told() {
        let missing = Path::new("/nonexistent/value");
        assert!(value(Some(missing), None).is_err_and(|e| e.message.contains("/nonexistent/value")));
        assert!(value(None, Some("MAINBRELLA_NO_SUCH_VARIABLE")).is_err_and(|e| e.code == "usage"));
        let empty = value(Some(Path::new("/dev/null")), None).expect_err("nothing in it");
        assert!(empty.hint.contains("--value-env"), "{empty:?}");
    }

    #[test]
    fn a_row_says_where_the_value_goes() {
        let secret = Secret {
            name: "git".into(),
            host: "git.example".into(),
            port: 8443,
            header: None,
            username: Some("me".into()),
            on_fork: OnFork::Inherit,
            created_at: "2026-10-08T12:00:00.000Z".into(),
        };
        let texts = |s: &Secret| row(s, 1_791_460_800_000 + 65_000).into_iter().map(|(t, _)| t).collect::<Vec<_>>();
        assert_eq!(texts(&secret), ["git", "git.example:8443", "password of me", "too", "65s ago"]);
        let header = Secret { header: Some("authorization".into()), username: None, ..secret };
        assert_eq!(texts(&header)[2], "header authorization");
    }
}
