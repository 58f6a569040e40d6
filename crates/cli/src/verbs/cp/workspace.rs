//! `mainbrella export` and `mainbrella import`: a workspace as one archive.

use std::io;
use std::path::{Path, PathBuf};

use futures::StreamExt as _;
use mainbrella_client::Upload;
use tokio::io::AsyncRead;
use tokio_util::io::ReaderStream;

use super::{Copy, PIECE, open_source, pour, standard};
use crate::context::Context;
use crate::failure::{Exit, Failure};
use crate::values::{MachineArg, Source};

/// Copy the workspace of a machine or a snapshot into an archive
///
/// What is in /workspace, as tar packed with gzip.
#[derive(Debug, clap::Args)]
pub struct ExportArgs {
    /// The machine, ID or ID@CREATED_AT; or a snapshot, snapshot:ID
    #[arg(value_name = "SOURCE")]
    source: Source,
    /// The archive; `-` is standard output
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Fail when the file exists
    #[arg(long, short)]
    no_clobber: bool,
    /// No progress bar
    #[arg(long, short)]
    quiet: bool,
}

/// Unpack an archive into the workspace of a machine
///
/// A tar archive, packed with gzip or not, goes into /workspace; what is there and not in the archive stays.
#[derive(Debug, clap::Args)]
pub struct ImportArgs {
    /// The machine
    #[arg(value_name = "ID[@CREATED_AT]")]
    machine: MachineArg,
    /// The archive; `-` is standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// No progress bar
    #[arg(long, short)]
    quiet: bool,
}

/// Runs `work`, unless the user ends it.
async fn unless_interrupted(what: &str, work: impl Future<Output = Result<(), Failure>>) -> Result<u8, Failure> {
    tokio::select! {
        _ = tokio::signal::ctrl_c() => Err(Failure::new(Exit::Interrupted, "interrupted", format!("interrupted; {what}"))),
        done = work => done.map(|()| 0),
    }
}

/// Exports a workspace.
pub async fn export(context: &Context, args: ExportArgs) -> Result<u8, Failure> {
    let copy = Copy::quietly(context, args.quiet, args.no_clobber);
    let work = async {
        if args.file == Path::new("-") && context.output.json {
            return Err(Failure::usage("--json and the archive would mix on standard output"));
        }
        if args.file.is_dir() {
            return Err(Failure::usage(format!("{} is a directory", args.file.display())));
        }
        if args.no_clobber && args.file.symlink_metadata().is_ok() {
            return Err(Failure::new(Exit::Conflict, "file_exists", format!("{} exists", args.file.display())));
        }
        let client = context.client()?;
        let files = context.source(&client, &args.source).await?;
        let download = client.export_workspace(files.of()).await?;
        if args.file == Path::new("-") {
            let bar = copy.bar(None);
            let done = pour(download, &mut standard(&io::stdout())?, &bar, "writing to standard output").await;
            bar.finish_and_clear();
            return done.map(drop);
        }
        copy.save(download, &args.file).await
    };
    unless_interrupted("nothing was put in place", work).await
}

/// Imports into a workspace.
pub async fn import(context: &Context, args: ImportArgs) -> Result<u8, Failure> {
    let copy = Copy::quietly(context, args.quiet, false);
    let work = async {
        let (reader, length): (std::pin::Pin<Box<dyn AsyncRead + Send>>, _) = if args.file == Path::new("-") {
            (Box::pin(standard(&io::stdin())?), None)
        } else {
            let (source, _) = open_source(&args.file).await?;
            (source.reader, source.length)
        };
        let client = context.client()?;
        let machine = context.resolve(&client, &args.machine).await?;
        let bar = copy.bar(length);
        let counted = bar.clone();
        let bytes = ReaderStream::with_capacity(reader, PIECE).inspect(move |piece| {
            if let Ok(piece) = piece {
                counted.inc(piece.len() as u64);
            }
        });
        let written = client.import_workspace(&machine, Upload { bytes, length: None }).await;
        bar.finish_and_clear();
        let written = written.map_err(|e| super::tree::partly(e.into()))?;
        copy.note_skipped(written.skipped);
        copy.report_tree(written.entries, written.bytes, &format!("{}:/workspace", machine.id))
    };
    unless_interrupted("what was unpacked before stays", work).await
}
