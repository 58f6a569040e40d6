//! `template build --from`: a template from a recipe, built by the service.

use std::collections::BTreeMap;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use mainbrella_client::api::{Build, BuildEventKind, BuildState, CreateBuild};
use mainbrella_client::{Client, Upload};
use mainbrella_recipe::{Context as Files, EntryKind};
use mainbrella_tree::{Archive, Meta};
use mainbrella_types::TemplateName;
use mainbrella_types::limits::RECIPE_BYTES_MAX;
use tokio_stream::wrappers::ReceiverStream;

use crate::context::Context;
use crate::failure::{Exit, Failure};
use crate::output::printable;

/// Size of a piece of the context on its way, bytes; and pieces packed ahead.
const PIECE: usize = 128 * 1024;
const AHEAD: usize = 4;

/// What a build from a recipe is told.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Build from the recipe in this directory, whose files it may copy: in the service, which may be on another machine
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
    /// The recipe [default: Dockerfile in the directory]
    #[arg(long, value_name = "FILE", requires = "from")]
    file: Option<PathBuf>,
    /// A build argument, or NAME for one that is in the environment; may be repeated
    #[arg(long, value_name = "NAME=VALUE", requires = "from", value_parser = argument)]
    build_arg: Vec<(String, String)>,
    /// The size it is built in [default: that of its base, or small]
    #[arg(long, value_name = "SIZE", requires = "from")]
    size: Option<String>,
    /// A further tag; may be repeated
    #[arg(long, value_name = "TAG", requires = "from")]
    tag: Vec<String>,
    /// Do every step anew
    #[arg(long, requires = "from")]
    no_cache: bool,
    /// Fetch the image that FROM names anew
    #[arg(long, requires = "from")]
    pull: bool,
    /// Build without a way to the internet
    #[arg(long, requires = "from")]
    no_internet: bool,
    /// Longest time it may take, seconds
    #[arg(long, value_name = "SECONDS", requires = "from")]
    timeout: Option<u64>,
}

fn argument(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) => Ok((name.to_owned(), value.to_owned())),
        // As it is in the environment, so that a value need not be on the command line.
        None => std::env::var(text)
            .map(|value| (text.to_owned(), value))
            .map_err(|_| "give NAME=VALUE, or the name of a variable that is set".to_owned()),
    }
}

impl Options {
    /// The directory, when this is a build from a recipe.
    pub(super) fn from(&self) -> Option<&Path> {
        self.from.as_deref()
    }
}

/// One name, and the labels that are given with it.
fn named(names: &[TemplateName], more: &[String]) -> Result<(String, Vec<String>), Failure> {
    let family = names.first().map(|n| n.family().to_owned()).unwrap_or_default();
    let mut tags = Vec::new();
    for name in names {
        if name.family() != family {
            return Err(Failure::usage(format!("{name} is another template than {family}"))
                .hint("One build makes one template; `mainbrella template tag` lets other names mean it."));
        }
        tags.extend(name.label().map(str::to_owned));
    }
    for tag in more {
        let label = tag.strip_prefix(&format!("{family}:")).unwrap_or(tag);
        tags.push(label.to_owned());
    }
    Ok((family, tags))
}

/// Builds a template.
pub(super) async fn build(context: &Context, names: &[TemplateName], options: Options) -> Result<u8, Failure> {
    let dir = options.from.clone().unwrap_or_default();
    let (name, tags) = named(names, &options.tag)?;
    let file = options.file.unwrap_or_else(|| dir.join("Dockerfile"));
    let recipe = read(&file)?;
    let client = context.client()?;
    let opened = tokio::task::spawn_blocking(move || Files::open(&dir)).await;
    let files = opened.map_err(|_| Failure::new(Exit::Failed, "internal", "reading the context broke off"))?;
    let files = files.map_err(|e| Failure::usage(format!("the context cannot be used: {e}")))?;
    let others = files.entries().values().filter(|e| e.kind == EntryKind::Other).count();
    if others > 0 {
        context.output.note(&format!("{others} sockets, FIFOs or devices of the context are left out"));
    }
    let body = CreateBuild {
        tags,
        recipe: Some(recipe),
        arguments: options.build_arg.into_iter().collect::<BTreeMap<_, _>>(),
        size: options.size,
        no_cache: options.no_cache,
        pull: options.pull,
        internet: options.no_internet.then_some(false),
        timeout_seconds: options.timeout,
        ..CreateBuild::new(name)
    };
    let build = client.create_build(&body).await?;
    let seen = AtomicU64::new(0);
    let carried = carry(context, &client, &build.id, files, &seen);
    let done = tokio::select! {
        biased;
        _ = tokio::signal::ctrl_c() => None,
        done = carried => Some(done),
    };
    let build = match done {
        Some(done) => {
            if done.is_err() {
                // Nobody sends the context any more, or sees how it ends.
                let _ = client.cancel_build(&build.id).await;
            }
            done?
        }
        None => {
            context.output.note("cancelling the build");
            client.cancel_build(&build.id).await?;
            follow(context, &client, &build.id, &seen).await?;
            client.build(&build.id).await?
        }
    };
    finish(context, &build)
}

/// Shows the log of a build, follows it to its end, and ends as it did.
pub(super) async fn show(context: &Context, id: &str) -> Result<u8, Failure> {
    let client = context.client()?;
    follow(context, &client, id, &AtomicU64::new(0)).await?;
    finish(context, &client.build(id).await?)
}

fn read(file: &Path) -> Result<String, Failure> {
    let what = format!("reading the recipe {}", file.display());
    let mut text = String::new();
    let from = std::fs::File::open(file).map_err(|e| Failure::io(&what, &e))?;
    from.take(RECIPE_BYTES_MAX as u64 + 1).read_to_string(&mut text).map_err(|e| Failure::io(&what, &e))?;
    Ok(text)
}

/// Sends the context and shows the log to its end.
async fn carry(context: &Context, client: &Client, id: &str, files: Files, seen: &AtomicU64) -> Result<Build, Failure> {
    client.send_context(id, Upload { bytes: packed(files), length: None }).await?;
    follow(context, client, id, seen).await?;
    Ok(client.build(id).await?)
}

/// Shows the log as it comes, from after the event that was `seen` last: a line for each step, and what its command writes
/// below it.
async fn follow(context: &Context, client: &Client, id: &str, seen: &AtomicU64) -> Result<(), Failure> {
    let mut log = client.follow_build(id, seen.load(Ordering::Relaxed));
    while let Some(event) = log.next().await? {
        seen.store(event.sequence, Ordering::Relaxed);
        match event.kind {
            BuildEventKind::Step { step, steps, text, cached, .. } => {
                let cached = if cached { " (cached)" } else { "" };
                context.output.note(&format!("[{step}/{steps}] {}{cached}", printable(&text)));
            }
            BuildEventKind::Output { text, .. } => {
                context.output.note(&format!("  {}", printable(&text.replace('\t', "    "))));
            }
            BuildEventKind::Notice { text } => context.output.note(&printable(&text)),
            BuildEventKind::Done { .. } => {}
        }
    }
    Ok(())
}

fn finish(context: &Context, build: &Build) -> Result<u8, Failure> {
    if build.state == BuildState::Succeeded {
        if context.output.json {
            context.output.json(build)?;
            return Ok(0);
        }
        let ms = build.ended_at_ms.unwrap_or_default() - build.started_at_ms.unwrap_or_default();
        let (name, steps, cached) = (build.template.as_deref().unwrap_or("?"), build.steps, build.steps_cached);
        let text = format!("{}  {steps} steps, {cached} cached  {} s", printable(name), ms.max(0) / 1000);
        context.output.line(&text)?;
        return Ok(0);
    }
    if build.state == BuildState::Cancelled {
        return Err(Failure::new(Exit::Interrupted, "cancelled", "the build was cancelled")
            .hint("Steps that were done stay cached; build again to go on from there."));
    }
    let Some(failure) = &build.failure else {
        return Err(Failure::new(Exit::Failed, "build_failed", "the build failed"));
    };
    let line = failure.line.map(|line| format!("line {line}: ")).unwrap_or_default();
    let instruction = failure.instruction.as_deref().map(|i| format!("{}: ", printable(i))).unwrap_or_default();
    let message = printable(failure.message.trim_end_matches('.'));
    Err(Failure::new(Exit::Failed, "build_failed", format!("{line}{instruction}{message}")))
}

/// The context as a tar stream.
fn packed(files: Files) -> ReceiverStream<io::Result<Bytes>> {
    let (pieces, taken) = tokio::sync::mpsc::channel(AHEAD);
    tokio::task::spawn_blocking(move || {
        let mut archive = Archive::default();
        let entries: Vec<_> = files.entries().iter().map(|(path, entry)| (path.clone(), entry.clone())).collect();
        for (path, entry) in entries {
            let meta = Meta { mode: entry.mode, uid: 0, gid: 0, mtime: 0 };
            let packed = match entry.kind {
                EntryKind::Directory => {
                    archive.directory(&path, meta);
                    Ok(true)
                }
                EntryKind::Link { target } => {
                    archive.link(&path, &target, meta);
                    Ok(true)
                }
                EntryKind::File { bytes } => file(&files, &path, bytes, meta, &mut archive, &pieces),
                EntryKind::Other => Ok(true),
            };
            match packed {
                Ok(true) => {}
                Ok(false) => return,
                Err(e) => {
                    let why = io::Error::new(e.kind(), format!("`{path}` of the context: {e}"));
                    let _ = pieces.blocking_send(Err(why));
                    return;
                }
            }
            if !flush(&mut archive, &pieces, PIECE) {
                return;
            }
        }
        archive.end();
        flush(&mut archive, &pieces, 0);
    });
    ReceiverStream::new(taken)
}

type Pieces = tokio::sync::mpsc::Sender<io::Result<Bytes>>;

/// Hands over what waits, once it is `most`; false when nobody takes it.
fn flush(archive: &mut Archive, pieces: &Pieces, most: usize) -> bool {
    archive.waiting() <= most || pieces.blocking_send(Ok(archive.take().into())).is_ok()
}

fn file(files: &Files, path: &str, size: u64, meta: Meta, archive: &mut Archive, pieces: &Pieces) -> io::Result<bool> {
    let mut file = files.read(path)?;
    let modified = file.metadata()?.modified().ok();
    let mtime = modified.and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok()).map_or(0, |d| d.as_secs() as i64);
    archive.file(path, size, Meta { mtime, ..meta });
    let mut left = size;
    let mut buffer = vec![0; PIECE];
    while left > 0 {
        let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        match file.read(&mut buffer[..most]) {
            Ok(0) => return Err(io::Error::other("it became shorter while it was read")),
            Ok(n) => {
                archive.content(&buffer[..n]);
                left -= n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
        if !flush(archive, pieces, PIECE) {
            return Ok(false);
        }
    }
    archive.pad(size);
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::StreamExt as _;

    #[test]
    fn names_and_tags_belong_to_one_template() {
        let names = |list: &[&str]| list.iter().map(|n| n.parse().expect("a name")).collect::<Vec<TemplateName>>();
        let (name, tags) = named(&names(&["app", "app:1.2"]), &["app:stable".to_owned(), "x".to_owned()]).expect("one");
        assert_eq!((name.as_str(), tags), ("app", vec!["1.2".to_owned(), "stable".to_owned(), "x".to_owned()]));
        assert!(named(&names(&["app", "other"]), &[]).is_err());
    }

    #[tokio::test]
    async fn a_context_is_packed_without_what_is_left_out() {
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(dir.path().join("src")).expect("made");
        std::fs::write(dir.path().join("src/large"), vec![b'x'; 3 * PIECE + 7]).expect("written");
        std::fs::write(dir.path().join("secret"), "s").expect("written");
        std::fs::write(dir.path().join(".dockerignore"), "secret\n").expect("written");
        let files = Files::open(dir.path()).expect("opened");
        let pieces: Vec<_> = packed(files).collect().await;
        let bytes: Vec<u8> = pieces.into_iter().flat_map(|p| p.expect("a piece")).collect();
        let to = tempfile::tempdir().expect("a folder");
        let root = std::fs::File::open(to.path()).expect("opened");
        let options = mainbrella_tree::UnpackOptions {
            owners: mainbrella_tree::Owners::Unpacker,
            mode_mask: 0o7777,
            own_root: false,
        };
        let mut unpacker = mainbrella_tree::Unpacker::new(root.into(), options);
        unpacker.push(&bytes).expect("an archive");
        unpacker.finish().expect("whole");
        assert_eq!(std::fs::read(to.path().join("src/large")).expect("there").len(), 3 * PIECE + 7);
        assert!(to.path().join(".dockerignore").exists() && !to.path().join("secret").exists());
    }
}
