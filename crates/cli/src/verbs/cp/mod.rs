//! `mainbrella cp`: a file or a tree, either way, streamed.

mod tree;
mod workspace;

use std::ffi::{OsStr, OsString};
use std::fs::Permissions;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use mainbrella_client::{Client, ClientError, Download, Upload, WriteOptions};
use tokio::fs::File;
use tokio::io::{AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio_util::io::ReaderStream;

use crate::context::{Context, Files};
use crate::failure::{Exit, Failure};
use crate::values::{self, MachineArg, Place, mode};

pub use workspace::{ExportArgs, ImportArgs, export, import};

const PIECE: usize = 256 * 1024;

/// Copy a file, or with -r a directory, into a machine or out of it
///
/// One of FROM and TO is in a machine: ID:/path or ID@CREATED_AT:/path; FROM may be in a snapshot, too: snapshot:ID:/path. `-` is standard input or output. When TO ends
/// with `/`, or is a directory here, the copy keeps its name. A local name with `:/` in it is written with `./` in front.
/// With -r links are copied as links, and `-` is a tar archive.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What is copied
    #[arg(value_name = "FROM")]
    from: OsString,
    /// Where it goes
    #[arg(value_name = "TO")]
    to: OsString,
    /// A directory with everything in it
    #[arg(long, short)]
    recursive: bool,
    /// Permission bits of the copy, octal [default: those of the original]
    #[arg(long, value_parser = mode, value_name = "BITS", conflicts_with = "recursive")]
    mode: Option<u32>,
    /// Fail when there is a file already
    #[arg(long, short)]
    no_clobber: bool,
    /// No progress bar
    #[arg(long, short)]
    quiet: bool,
}

/// Copies a file.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let from = Place::parse(&args.from).map_err(Failure::usage)?;
    let to = Place::parse(&args.to).map_err(Failure::usage)?;
    let copy = Copy { context, mode: args.mode, no_clobber: args.no_clobber, quiet: args.quiet };
    let work = async {
        match (from, to) {
            (from @ (Place::Remote(..) | Place::Saved(..)), to @ (Place::Local(_) | Place::Stdio)) => {
                let (source, path) = match from {
                    Place::Remote(machine, path) => (values::Source::Machine(machine), path),
                    Place::Saved(id, path) => (values::Source::Snapshot(id), path),
                    Place::Local(_) | Place::Stdio => return Ok(()),
                };
                // What is wrong with the name is said before anybody is asked.
                let target = if args.recursive { None } else { Some(copy.download_target(&path, &to)?) };
                let client = context.client()?;
                let files = context.source(&client, &source).await?;
                match target {
                    None => copy.download_tree(&client, &files, &path, to).await,
                    Some(target) => copy.download(&client, &files, &path, target).await,
                }
            }
            (_, Place::Saved(..)) => Err(Failure::usage("nothing is written into a snapshot")
                .hint("`mainbrella restore` starts a machine from it; what is changed there can be saved again.")),
            (from @ (Place::Local(_) | Place::Stdio), Place::Remote(machine, path)) if args.recursive => {
                copy.upload_tree(from, &machine, path).await
            }
            (from @ (Place::Local(_) | Place::Stdio), Place::Remote(machine, path)) => {
                copy.upload(from, &machine, path).await
            }
            (Place::Remote(..) | Place::Saved(..), Place::Remote(..)) => {
                Err(Failure::usage("both ends are in machines")
                    .hint("Copy through standard output: mainbrella cp A:/x - | mainbrella cp - B:/x"))
            }
            _ => Err(Failure::usage("neither end is in a machine").hint("Write ID:/path for the end that is.")),
        }
    };
    tokio::select! {
        // Dropping the work removes a half-written local file; the machine drops a half-sent one.
        _ = tokio::signal::ctrl_c() => Err(Failure::new(Exit::Interrupted, "interrupted", "interrupted; nothing was put in place")),
        done = work => done.map(|()| 0),
    }
}

struct Copy<'a> {
    context: &'a Context,
    /// Permission bits of the copy instead of those of the original.
    mode: Option<u32>,
    no_clobber: bool,
    quiet: bool,
}

impl<'a> Copy<'a> {
    fn quietly(context: &'a Context, quiet: bool, no_clobber: bool) -> Self {
        Self { context, mode: None, no_clobber, quiet }
    }

    async fn upload(&self, from: Place, machine: &MachineArg, path: String) -> Result<(), Failure> {
        let (source, name, mode): (_, Option<OsString>, _) = match &from {
            Place::Local(local) => {
                let (source, mode) = open_source(local).await?;
                (source, local.file_name().map(OsStr::to_owned), Some(mode))
            }
            _ => (Source { reader: Box::pin(standard(&io::stdin())?), length: None }, None, None),
        };
        let path = if path.ends_with('/') {
            let name = name
                .as_deref()
                .ok_or_else(|| Failure::usage("standard input has no name; write the whole path in the machine"))?;
            let name = name.to_str().ok_or_else(|| {
                Failure::usage("the name of the file is not UTF-8; write the whole path in the machine")
            })?;
            format!("{path}{name}")
        } else {
            path
        };
        let client = self.context.client()?;
        let machine = self.context.resolve(&client, machine).await?;
        let bar = self.bar(source.length);
        let counted = bar.clone();
        let bytes: Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>> = match source.length {
            // A file that grows meanwhile is copied as long as it was.
            Some(n) => Box::pin(ReaderStream::with_capacity(source.reader.take(n), PIECE)),
            None => Box::pin(ReaderStream::with_capacity(source.reader, PIECE)),
        };
        let bytes = bytes.inspect(move |piece| {
            if let Ok(piece) = piece {
                counted.inc(piece.len() as u64);
            }
        });
        let options = WriteOptions { mode: self.mode.or(mode), create_parents: true, exclusive: self.no_clobber };
        let written = client.write_file(&machine, &path, &options, Upload { bytes, length: source.length }).await;
        bar.finish_and_clear();
        let written = written?;
        self.report(written.size, &format!("{}:{path}", machine.id))
    }

    /// Where a file of the machine goes to; `None`: standard output.
    fn download_target(&self, path: &str, to: &Place) -> Result<Option<PathBuf>, Failure> {
        match to {
            Place::Local(local) => self.local_target(local, path).map(Some),
            _ if self.context.output.json => Err(Failure::usage("--json and the file would mix on standard output")),
            _ => Ok(None),
        }
    }

    async fn download(
        &self,
        client: &Client,
        files: &Files,
        path: &str,
        target: Option<PathBuf>,
    ) -> Result<(), Failure> {
        let download = client.read_file(files.of(), path, None, None).await?;
        let Some(target) = target else {
            let bar = self.bar(download.length.or(download.size));
            let done = pour(download, &mut standard(&io::stdout())?, &bar, "writing to standard output").await;
            bar.finish_and_clear();
            return done.map(drop);
        };
        self.save(download, &target).await
    }

    async fn save(&self, download: Download, target: &Path) -> Result<(), Failure> {
        let bar = self.bar(download.length.or(download.size));
        let what = format!("writing {}", target.display());
        let failed = |e: io::Error| Failure::io(&what, &e);
        let special = std::fs::metadata(target).is_ok_and(|m| !m.is_file());
        let total = if special {
            // A device or a pipe is written to, not replaced.
            let mut file = tokio::fs::OpenOptions::new().write(true).open(target).await.map_err(failed)?;
            pour(download, &mut file, &bar, &what).await?
        } else {
            // Through a link to where it points; a half-received file never stands where the whole one belongs.
            let place = std::fs::canonicalize(target).unwrap_or_else(|_| target.to_owned());
            let bits = self.mode.or(download.mode);
            let half = Half::beside(&place).map_err(failed)?;
            let mut file = File::create_new(&half.path).await.map_err(failed)?;
            let total = pour(download, &mut file, &bar, &what).await?;
            if let Some(bits) = bits {
                file.set_permissions(Permissions::from_mode(bits & 0o777)).await.map_err(failed)?;
            }
            file.sync_all().await.map_err(failed)?;
            half.put(&place, self.no_clobber).map_err(failed)?;
            total
        };
        bar.finish_and_clear();
        self.report(total, &target.display().to_string())
    }

    /// The local path a file of the machine goes to.
    fn local_target(&self, local: &Path, remote: &str) -> Result<PathBuf, Failure> {
        let into = local.is_dir() || local.as_os_str().as_bytes().ends_with(b"/");
        let target = if into {
            let name = remote.rsplit('/').next().filter(|n| !n.is_empty() && *n != "." && *n != "..");
            let name = name.ok_or_else(|| {
                Failure::usage("the path in the machine has no file name").hint("With -r cp copies directories.")
            })?;
            local.join(name)
        } else {
            local.to_owned()
        };
        if target.is_dir() {
            return Err(Failure::usage(format!("{} is a directory", target.display())));
        }
        if self.no_clobber && target.symlink_metadata().is_ok() {
            return Err(Failure::new(Exit::Conflict, "file_exists", format!("{} exists", target.display())));
        }
        Ok(target)
    }

    fn bar(&self, length: Option<u64>) -> ProgressBar {
        if self.quiet || !self.context.output.watched() {
            return ProgressBar::hidden();
        }
        let (bar, template) = match length {
            Some(n) => (ProgressBar::new(n), "{bar:30} {bytes} of {total_bytes}, {binary_bytes_per_sec}, {eta} left"),
            None => (ProgressBar::new_spinner(), "{spinner} {bytes}, {binary_bytes_per_sec}"),
        };
        bar.set_draw_target(ProgressDrawTarget::stderr());
        match ProgressStyle::with_template(template) {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        }
    }

    fn report(&self, size: u64, place: &str) -> Result<(), Failure> {
        if self.context.output.json {
            self.context.output.json(&serde_json::json!({ "size": size, "to": place }))?;
        } else if self.context.output.watched() && !self.quiet {
            self.context.output.note(&format!("{} to {}", crate::output::size(size), crate::output::printable(place)));
        }
        Ok(())
    }
}

/// Standard input or output, as a file of the runtime.
fn standard(stream: &impl AsFd) -> Result<File, Failure> {
    let fd = stream.as_fd().try_clone_to_owned().map_err(|e| Failure::io("using standard input and output", &e))?;
    Ok(File::from_std(fd.into()))
}

struct Source {
    reader: Pin<Box<dyn tokio::io::AsyncRead + Send>>,
    length: Option<u64>,
}

async fn open_source(path: &Path) -> Result<(Source, u32), Failure> {
    let what = format!("reading {}", path.display());
    let file = File::open(path).await.map_err(|e| Failure::io(&what, &e))?;
    let meta = file.metadata().await.map_err(|e| Failure::io(&what, &e))?;
    if meta.is_dir() {
        return Err(Failure::usage(format!("{} is a directory", path.display())).hint("With -r cp copies directories."));
    }
    // Pipes and files of /proc do not know how long they are.
    let length = (meta.is_file() && meta.len() > 0).then_some(meta.len());
    Ok((Source { reader: Box::pin(file), length }, meta.permissions().mode() & 0o777))
}

async fn pour<W: AsyncWrite + Unpin>(
    mut from: Download,
    to: &mut W,
    bar: &ProgressBar,
    what: &str,
) -> Result<u64, Failure> {
    let mut total = 0;
    let again = |e: ClientError| Failure::from(e).hint("The copy is incomplete; copy again.");
    while let Some(bytes) = from.chunk().await.map_err(again)? {
        to.write_all(&bytes).await.map_err(|e| Failure::io(what, &e))?;
        total += bytes.len() as u64;
        bar.inc(bytes.len() as u64);
    }
    to.flush().await.map_err(|e| Failure::io(what, &e))?;
    Ok(total)
}

/// A half-received file, gone when it is dropped.
struct Half {
    path: PathBuf,
}

impl Half {
    fn beside(place: &Path) -> io::Result<Self> {
        let folder = match place.parent() {
            Some(p) if p.as_os_str().is_empty() => Path::new("."),
            Some(p) => p,
            None => return Err(io::ErrorKind::IsADirectory.into()),
        };
        Ok(Self { path: folder.join(format!(".mainbrella-{}", uuid::Uuid::new_v4().simple())) })
    }

    fn put(self, place: &Path, exclusive: bool) -> io::Result<()> {
        if exclusive { std::fs::hard_link(&self.path, place) } else { std::fs::rename(&self.path, place) }
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        // After a rename there is nothing under this name any more.
        let _ = std::fs::remove_file(&self.path);
    }
}
