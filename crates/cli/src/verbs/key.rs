//! `mainbrella key`.

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use mainbrella_client::api::{CreateKey, KeyRole};

use crate::context::Context;
use crate::failure::Failure;
use crate::output::{Tone, span};

/// Make, list and revoke API keys
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// Make a key; its secret is shown this once
    Create {
        /// A label for people
        name: String,
        /// user: machines; admin: keys and templates too
        #[arg(long, default_value = "user", value_enum)]
        role: Role,
        /// Write the secret to this new file (0600) instead of standard output
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// List the keys of the project
    List,
    /// Revoke a key; calls with it fail from then on
    Revoke {
        /// Its id, as `key list` shows it
        id: String,
    },
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Role {
    User,
    Admin,
}

/// Makes, lists or revokes keys.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let client = context.client()?;
    match args.verb {
        Verb::Create { name, role, output } => {
            let role = match role {
                Role::User => KeyRole::User,
                Role::Admin => KeyRole::Admin,
            };
            // The file first: a secret that is shown once must have a place to go.
            let file = output.as_deref().map(new_file).transpose()?;
            let key = match client.create_key(&CreateKey { name, role }).await {
                Ok(key) => key,
                Err(e) => {
                    if let Some(path) = &output {
                        let _ = std::fs::remove_file(path);
                    }
                    return Err(e.into());
                }
            };
            if let (Some(mut file), Some(path)) = (file, &output) {
                writeln!(file, "{}", key.secret).and_then(|()| file.sync_all()).map_err(|e| {
                    Failure::io(&format!("writing {} (revoke key {} and make another)", path.display(), key.id), &e)
                })?;
                context.output.note(&format!("key {} is in {}", key.id, path.display()));
            } else if context.output.json {
                context.output.json(&key)?;
            } else {
                context.output.line(&key.secret)?;
                context
                    .output
                    .note("This secret is not shown again; keep it in a secret manager or a file of mode 0600.");
            }
        }
        Verb::List => {
            let list = client.keys().await?;
            if context.output.json {
                context.output.json(&list)?;
                return Ok(0);
            }
            let now = jiff::Timestamp::now().as_millisecond();
            let rows = list.keys.iter().map(|k| {
                let state = match k.revoked_at_ms {
                    None => ("valid".to_owned(), Tone::Good),
                    Some(at) => (format!("revoked {} ago", span(now - at)), Tone::Faint),
                };
                let plain = |s: &str| (s.to_owned(), Tone::Plain);
                vec![
                    plain(&k.id),
                    plain(&k.name),
                    plain(k.role.as_str()),
                    plain(&format!("{} ago", span(now - k.created_at_ms))),
                    state,
                ]
            });
            context.output.table(&["ID", "NAME", "ROLE", "MADE", "STATE"], rows.collect())?;
        }
        Verb::Revoke { id } => {
            client.revoke_key(&id).await?;
            if context.output.json {
                context.output.json(&serde_json::json!({ "id": id, "revoked": true }))?;
            } else {
                context.output.line(&format!("{id} revoked"))?;
            }
        }
    }
    Ok(0)
}

fn new_file(path: &Path) -> Result<std::fs::File, Failure> {
    std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(|e| {
        let failure = Failure::io(&format!("making {}", path.display()), &e);
        if e.kind() == std::io::ErrorKind::AlreadyExists {
            return failure.hint("Nothing is overwritten and no key was made: name a file that is not there yet.");
        }
        failure
    })
}
