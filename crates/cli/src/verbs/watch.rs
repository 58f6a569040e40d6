//! `mainbrella watch`: what happens in a directory of a machine.

use std::ffi::OsString;

use mainbrella_client::api::FileEventType;

use super::ls::remote;
use crate::context::Context;
use crate::failure::Failure;
use crate::output::{Tone, printable};

/// Show what happens in a directory of a machine, until it is gone
///
/// One line an event: created, modified, removed, renamed, attributes; overflow when something may have been missed. With
/// --json each line is a JSON object. Ctrl-C ends it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// ID:/path or ID@CREATED_AT:/path
    #[arg(value_name = "PLACE")]
    place: OsString,
    /// Only the directory itself, not what is below
    #[arg(long)]
    flat: bool,
}

/// Shows events as they come.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let (machine, path) = remote(&args.place)?;
    let client = context.client()?;
    let machine = context.resolve(&client, &machine).await?;
    let mut watch = client.watch_files(&machine, &path, !args.flat).await?;
    while let Some(event) = watch.next().await? {
        if context.output.json {
            let text = serde_json::to_string(&event).map_err(|e| Failure::io("making JSON", &e.into()))?;
            context.output.line(&text)?;
            continue;
        }
        let (word, tone) = match event.r#type {
            FileEventType::Ready => {
                context.output.note(&format!("watching {}:{}", machine.id, printable(&path)));
                continue;
            }
            FileEventType::Created => ("created", Tone::Good),
            FileEventType::Modified => ("modified", Tone::Plain),
            FileEventType::Removed => ("removed", Tone::Bad),
            FileEventType::Renamed => ("renamed", Tone::Busy),
            FileEventType::Attributes => ("attributes", Tone::Faint),
            FileEventType::Overflow => ("overflow", Tone::Bad),
            FileEventType::Ended => ("ended", Tone::Faint),
            FileEventType::Error | FileEventType::Unknown => continue,
        };
        let mut line = format!("{} {}", context.output.paint(&format!("{word:<10}"), tone), printable(&event.path));
        if let Some(new) = &event.new_path {
            line = format!("{line} -> {}", printable(new));
        }
        context.output.line(&line)?;
    }
    Ok(0)
}
