//! `mainbrella ls`: what is in a directory of a machine.

use std::ffi::OsString;

use mainbrella_client::api::{FileEntry, FileList, FileType};

use crate::context::Context;
use crate::failure::Failure;
use crate::output::{Tone, printable, size};
use crate::values::{Place, Source};

/// Entries a page.
const PAGE: u32 = 1000;

/// List a directory in a machine or a snapshot
///
/// Sorted by the bytes of the names. Names that are not UTF-8 are shown with � in them; --json has their bytes.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// ID:/path, ID@CREATED_AT:/path or snapshot:ID:/path
    #[arg(value_name = "PLACE")]
    place: OsString,
    /// Kind, permission bits, owner, size and time too
    #[arg(long, short)]
    long: bool,
    /// The entry itself, not what is in it
    #[arg(long, short)]
    directory: bool,
    /// At most so many
    #[arg(long, short = 'n', default_value_t = 10_000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    limit: u32,
}

/// Lists a directory, or tells of one entry.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let (source, path) = match Place::parse(&args.place).map_err(Failure::usage)? {
        Place::Saved(id, path) => (Source::Snapshot(id), path),
        _ => remote(&args.place).map(|(machine, path)| (Source::Machine(machine), path))?,
    };
    let client = context.client()?;
    let files = context.source(&client, &source).await?;
    let entry = client.stat_file(files.of(), &path, !args.directory).await?;
    let mut entries = Vec::new();
    let mut more = None;
    if args.directory || entry.r#type != FileType::Directory {
        entries.push(entry);
    } else {
        let limit = u64::from(args.limit);
        let mut offset = 0;
        loop {
            let page = client.list_files(files.of(), &path, offset, PAGE.min(args.limit)).await?;
            entries.extend(page.entries);
            more = page.next_offset;
            match page.next_offset {
                Some(next) if next < limit && next > offset => offset = next,
                _ => break,
            }
        }
        let most = usize::try_from(limit).unwrap_or(usize::MAX);
        if entries.len() > most {
            entries.truncate(most);
            more = Some(limit);
        }
    }
    if context.output.json {
        context.output.json(&FileList { entries, next_offset: more })?;
        return Ok(0);
    }
    if args.long {
        let rows = entries.iter().map(row).collect();
        context.output.table(&["MODE", "OWNER", "SIZE", "MODIFIED", "NAME"], rows)?;
    } else if !entries.is_empty() {
        let lines: Vec<String> = entries
            .iter()
            .map(|e| context.output.paint(&format!("{}{}", printable(&e.name), mark(e)), tone(e)))
            .collect();
        context.output.line(&lines.join("\n"))?;
    }
    if more.is_some() {
        context.output.note(&format!("there are more; --limit {} shows them", u64::from(args.limit) * 10));
    }
    Ok(0)
}

/// A place in a machine.
pub fn remote(place: &OsString) -> Result<(crate::values::MachineArg, String), Failure> {
    match Place::parse(place).map_err(Failure::usage)? {
        Place::Remote(machine, path) => Ok((machine, path)),
        _ => {
            Err(Failure::usage("the place must be in a machine")
                .hint("Write ID:/path; `mainbrella list` lists machines."))
        }
    }
}

fn mark(e: &FileEntry) -> &'static str {
    match e.r#type {
        FileType::Directory => "/",
        FileType::Symlink => "@",
        FileType::File | FileType::Other => "",
    }
}

fn tone(e: &FileEntry) -> Tone {
    match e.r#type {
        FileType::Directory => Tone::Busy,
        FileType::Symlink => Tone::Good,
        FileType::File | FileType::Other => Tone::Plain,
    }
}

fn row(e: &FileEntry) -> Vec<(String, Tone)> {
    let kind = match e.r#type {
        FileType::File => '-',
        FileType::Directory => 'd',
        FileType::Symlink => 'l',
        FileType::Other => '?',
    };
    let time = jiff::Timestamp::from_second(e.mtime).map_or_else(|_| "?".to_owned(), |t| t.to_string());
    let name = match &e.symlink_target {
        Some(target) => format!("{} -> {target}", e.name),
        None => format!("{}{}", e.name, mark(e)),
    };
    let plain = |text: String| (text, Tone::Plain);
    vec![
        plain(format!("{kind} {}", e.mode)),
        plain(format!("{}:{}", e.uid, e.gid)),
        plain(size(e.size)),
        plain(time),
        (name, tone(e)),
    ]
}
