//! `mainbrella df`.

use crate::context::Context;
use crate::failure::Failure;
use crate::output::{Tone, size};

/// Show what takes room on the service's disk
///
/// Needs a key with the role admin.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Shows it.
pub async fn run(context: &Context, _: Args) -> Result<u8, Failure> {
    let report = context.client()?.disk().await?;
    if context.output.json {
        context.output.json(&report)?;
        return Ok(0);
    }
    let plain = |text: String| (text, Tone::Plain);
    let mut rows: Vec<_> = report
        .parts
        .iter()
        .map(|p| vec![plain(p.part.clone()), plain(p.items.to_string()), plain(size(p.bytes))])
        .collect();
    if let Some(free) = report.free_bytes {
        rows.push(vec![("free".to_owned(), Tone::Faint), plain(String::new()), plain(size(free))]);
    }
    context.output.table(&["PART", "ITEMS", "BYTES"], rows)?;
    Ok(0)
}
