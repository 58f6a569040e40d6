//! `mainbrella preview`.

use mainbrella_client::api::{CreatePreview, Preview, RenewPreview};

use crate::context::Context;
use crate::failure::Failure;
use crate::output::{Tone, span};
use crate::values::{MachineArg, Span};

/// Make a port of a machine reachable for a while
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// Make a preview; its URL, which is a secret, is shown this once
    Create {
        /// The machine
        #[arg(value_name = "ID[@CREATED_AT]")]
        machine: MachineArg,
        /// 1024 to 65535; the server may listen on loopback alone, and may be started later
        port: u32,
        /// How long it lasts: 60s to 1h, not longer than the machine [default: 15m]
        #[arg(long, value_name = "DURATION")]
        ttl: Option<Span>,
        /// Show the URL with the token in its path, for clients that cannot resolve host names of its own
        #[arg(long)]
        path: bool,
        /// Repeating a create with this key and the same options gives the same preview
        #[arg(long, value_name = "KEY")]
        idempotency_key: Option<String>,
    },
    /// List the active previews of a machine
    List {
        /// The machine
        #[arg(value_name = "ID[@CREATED_AT]")]
        machine: MachineArg,
    },
    /// Let a preview last longer; its URL stays the same
    Renew {
        /// The machine
        #[arg(value_name = "ID[@CREATED_AT]")]
        machine: MachineArg,
        /// The preview, as `preview list` shows it
        id: String,
        /// How long it lasts from now: 60s to 1h, not longer than the machine [default: 15m]
        #[arg(long, value_name = "DURATION")]
        ttl: Option<Span>,
    },
    /// End a preview and close what is open over it
    Revoke {
        /// The machine
        #[arg(value_name = "ID[@CREATED_AT]")]
        machine: MachineArg,
        /// The preview, as `preview list` shows it
        id: String,
    },
}

/// Makes, lists, renews or revokes previews.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let client = context.client()?;
    match args.verb {
        Verb::Create { machine, port, ttl, path, idempotency_key } => {
            let machine = context.resolve(&client, &machine).await?;
            let key = idempotency_key.unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
            let body = CreatePreview { port, ttl_seconds: ttl.map(Span::seconds) };
            let mut made = client.create_preview(&machine, &body, &key).await;
            if matches!(&made, Err(e) if e.is_ambiguous() || e.is_retryable()) {
                // Under its key it is made once, however often it is asked for.
                made = client.create_preview(&machine, &body, &key).await;
            }
            let preview = made?;
            if context.output.json {
                context.output.json(&preview)?;
                return Ok(0);
            }
            let url = if path { &preview.path_url } else { &preview.url };
            context.output.line(url.as_deref().unwrap_or_default())?;
            let left = span(preview.expires_at - jiff::Timestamp::now().as_millisecond());
            context.output.note(&format!(
                "Preview {} of port {} lasts {left}. Whoever has this URL reaches the port; it is not shown again.",
                preview.id, preview.port
            ));
        }
        Verb::List { machine } => {
            let machine = context.resolve(&client, &machine).await?;
            let list = client.previews(&machine).await?;
            if context.output.json {
                context.output.json(&list)?;
                return Ok(0);
            }
            let now = jiff::Timestamp::now().as_millisecond();
            let rows = list.previews.iter().map(|p| {
                let plain = |s: String| (s, Tone::Plain);
                let made = format!("{} ago", span(now - p.created_at_ms));
                vec![plain(p.id.clone()), plain(p.port.to_string()), plain(made), plain(span(p.expires_at - now))]
            });
            context.output.table(&["ID", "PORT", "MADE", "LEFT"], rows.collect())?;
        }
        Verb::Renew { machine, id, ttl } => {
            let machine = context.resolve(&client, &machine).await?;
            let body = RenewPreview { ttl_seconds: ttl.map(Span::seconds) };
            let renewed: Preview = client.renew_preview(&machine, &id, &body).await?;
            if context.output.json {
                context.output.json(&renewed)?;
            } else {
                let left = span(renewed.expires_at - jiff::Timestamp::now().as_millisecond());
                context.output.line(&format!("{} lasts {left}", renewed.id))?;
            }
        }
        Verb::Revoke { machine, id } => {
            let machine = context.resolve(&client, &machine).await?;
            client.revoke_preview(&machine, &id).await?;
            if context.output.json {
                context.output.json(&serde_json::json!({ "id": id, "revoked": true }))?;
            } else {
                context.output.line(&format!("{id} revoked"))?;
            }
        }
    }
    Ok(0)
}
