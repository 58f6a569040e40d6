//! `mainbrella template`: what machines start from. Shipped recipes and images are made in the data directory of this machine,
//! templates from recipes by the service.

mod recipe;
mod versions;

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use mainbrella_client::api::TemplateList;
use mainbrella_engine::image::oci::{Access, Credentials, OciError, Source};
use mainbrella_engine::image::{Event, ImageError, ImageStore, Progress};
use mainbrella_types::TemplateName;

use crate::context::Context;
use crate::failure::{Exit, Failure};
use crate::output::{Tone, printable, size};

/// Lines of a program kept to explain its failure.
const LINES_KEPT: usize = 15;

/// Build, list, tag and remove templates
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// Build templates that come with this version, and the guest kernel if there is none; with --from a template of a recipe
    Build {
        /// Their names, e.g. python, node; with --from NAME, and NAME:TAG for tags
        #[arg(required = true, value_name = "NAME")]
        names: Vec<TemplateName>,
        /// Build again what is there
        #[arg(long, conflicts_with = "from")]
        force: bool,
        /// Fetch the newest guest kernel too
        #[arg(long, conflicts_with = "from")]
        update_kernel: bool,
        /// Show what the programs write
        #[arg(long, short, conflicts_with = "from")]
        verbose: bool,
        #[command(flatten)]
        recipe: Box<recipe::Options>,
    },
    /// Make a template of an image of a container, from a registry or from this machine
    Import {
        /// What the template is called
        #[arg(value_name = "NAME")]
        name: TemplateName,
        /// REGISTRY/NAME[:TAG][@DIGEST], or local:PATH[#IMAGE] for what `docker save` writes or an OCI layout
        #[arg(value_name = "IMAGE")]
        image: String,
        /// A registry, as in IMAGE, that may be asked without TLS; those of this machine always may
        #[arg(long, value_name = "REGISTRY")]
        plain_http: Vec<String>,
        /// Name to log in to the registry with
        #[arg(long, value_name = "USER", requires = "password_file")]
        user: Option<String>,
        /// File with the password for it; `-` reads standard input
        #[arg(long, value_name = "FILE", requires = "user")]
        password_file: Option<PathBuf>,
        /// Show what is said on the way
        #[arg(long, short)]
        verbose: bool,
    },
    /// List templates: those of the service when it can be reached, else those in the data directory
    List,
    /// Remove a template, a version or a tag. Machines made from it keep running
    Rm {
        /// Its name; NAME:vN for a version, NAME:TAG for a tag
        #[arg(value_name = "NAME")]
        name: TemplateName,
        /// Every version and tag of the name
        #[arg(long)]
        all: bool,
    },
    /// Let a name mean a version
    Tag {
        /// A version, or a name that means one
        #[arg(value_name = "SOURCE")]
        source: TemplateName,
        /// The name: NAME or NAME:TAG
        #[arg(value_name = "TARGET")]
        target: TemplateName,
    },
    /// Show all that is known of a template
    Inspect {
        /// A template, a version or a tag
        #[arg(value_name = "NAME")]
        name: TemplateName,
    },
    /// Make a template of a full snapshot: its machines begin where the saved one was
    Create {
        /// What the template is called
        #[arg(value_name = "NAME")]
        name: TemplateName,
        /// The snapshot
        #[arg(long, value_name = "ID")]
        snapshot: String,
        /// A further tag; may be repeated
        #[arg(long, value_name = "TAG")]
        tag: Vec<String>,
    },
    /// List builds, newest first; or show the log of one, and follow it to its end
    Builds {
        /// The build
        #[arg(value_name = "ID")]
        id: Option<String>,
    },
    /// Remove versions that no tag means
    Prune,
}

/// Builds, lists or removes templates.
pub async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    match args.verb {
        Verb::Build { names, recipe, .. } if recipe.from().is_some() => recipe::build(context, &names, *recipe).await,
        Verb::Build { names, force, update_kernel, verbose, .. } => {
            let cancelled = flag_at_interrupt();
            let context = context.clone();
            tokio::task::spawn_blocking(move || build(&context, &names, force, update_kernel, verbose, &cancelled))
                .await
                .map_err(|_| Failure::new(Exit::Failed, "internal", "the build broke off"))?
        }
        Verb::Import { name, image, plain_http, user, password_file, verbose } => {
            let source: Source = image
                .parse()
                .map_err(|e: mainbrella_engine::image::oci::OciError| failure(&ImageError::Image(e), None))?;
            let credentials = user.zip(password_file).map(|(user, file)| login(user, &file)).transpose()?;
            let access = Access { plain: plain_http.into_iter().collect(), credentials };
            let cancelled = flag_at_interrupt();
            let context = context.clone();
            tokio::task::spawn_blocking(move || import(&context, &name, &source, &access, verbose, &cancelled))
                .await
                .map_err(|_| Failure::new(Exit::Failed, "internal", "the import broke off"))?
        }
        Verb::List => list(context).await,
        Verb::Tag { source, target } => versions::tag(context, source.as_str(), target.as_str()).await,
        Verb::Inspect { name } => versions::inspect(context, name.as_str()).await,
        Verb::Create { name, snapshot, tag } => versions::create(context, name.as_str(), &snapshot, tag).await,
        Verb::Builds { id: None } => versions::builds(context).await,
        Verb::Builds { id: Some(id) } => recipe::show(context, &id).await,
        Verb::Prune => versions::prune(context).await,
        Verb::Rm { name, all } => {
            let known = served(context).await;
            let versioned = known.is_some_and(|list| versions::is_versioned(&list.templates, name.as_str()));
            if all || name.label().is_some() || versioned {
                return versions::remove(context, name.as_str(), all).await;
            }
            let context = context.clone();
            tokio::task::spawn_blocking(move || remove(&context, &name))
                .await
                .map_err(|_| Failure::new(Exit::Failed, "internal", "the removal broke off"))?
        }
    }
}

/// A flag that Ctrl-C sets.
fn flag_at_interrupt() -> Arc<AtomicBool> {
    let cancelled = Arc::new(AtomicBool::new(false));
    let flag = cancelled.clone();
    tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            flag.store(true, Ordering::Relaxed);
        }
    });
    cancelled
}

/// Longest password that is read, bytes.
const PASSWORD_MAX: u64 = 64 * 1024;

fn login(user: String, file: &Path) -> Result<Credentials, Failure> {
    let unreadable = |e: std::io::Error| {
        Failure::new(
            Exit::Usage,
            "invalid_request",
            format!("the password could not be read from {}: {e}", file.display()),
        )
        .hint("Give a file that holds it, or `-` and the password on standard input.")
    };
    let mut password = String::new();
    let read = if file == Path::new("-") {
        std::io::stdin().lock().take(PASSWORD_MAX).read_to_string(&mut password)
    } else {
        std::fs::File::open(file).and_then(|f| f.take(PASSWORD_MAX).read_to_string(&mut password))
    };
    read.map_err(unreadable)?;
    password.truncate(password.trim_end_matches(['\r', '\n']).len());
    Ok(Credentials { user, password })
}

fn import(
    context: &Context,
    name: &TemplateName,
    source: &Source,
    access: &Access,
    verbose: bool,
    cancelled: &AtomicBool,
) -> Result<u8, Failure> {
    let store = ImageStore::open(&context.data_dir()?).map_err(|e| failure(&e, None))?;
    let teller = Teller::new(context, verbose, cancelled, "kernel");
    store.kernel(&teller).map_err(|e| failure(&e, Some(&teller)))?;
    teller.end();
    let teller = Teller::new(context, verbose, cancelled, name.as_str());
    let image = store.import_template(name, source, access, &teller).map_err(|e| failure(&e, Some(&teller)))?;
    let (_, took) = teller.end();
    let from = image.image.as_ref().map(|i| i.digest.clone()).unwrap_or_default();
    if context.output.json {
        context.output.json(&serde_json::json!({
            "name": name.as_str(), "digest": image.digest, "imageBytes": image.bytes, "sourceDigest": from,
        }))?;
    } else {
        context.output.line(&format!(
            "{name}  {}  {}  made in {} s",
            size(image.bytes),
            image.digest,
            took.as_secs()
        ))?;
    }
    Ok(0)
}

fn build(
    context: &Context,
    names: &[TemplateName],
    force: bool,
    update_kernel: bool,
    verbose: bool,
    cancelled: &AtomicBool,
) -> Result<u8, Failure> {
    let store = ImageStore::open(&context.data_dir()?).map_err(|e| failure(&e, None))?;
    // A name that cannot be built is said before half an hour of building.
    let known = store.recipes().map_err(|e| failure(&e, None))?;
    if let Some(unknown) = names.iter().find(|n| !known.iter().any(|r| r.name == **n)) {
        let all: Vec<&str> = known.iter().map(|r| r.name.as_str()).collect();
        return Err(Failure::new(Exit::NotFound, "template_not_found", format!("there is no recipe `{unknown}`"))
            .hint(format!("Known are: {}.", all.join(", "))));
    }
    let mut made = Vec::new();
    let teller = Teller::new(context, verbose, cancelled, "kernel");
    let kernel = if update_kernel { store.update_kernel(&teller) } else { store.kernel(&teller) };
    kernel.map_err(|e| failure(&e, Some(&teller)))?;
    teller.end();
    for name in names {
        let teller = Teller::new(context, verbose, cancelled, name.as_str());
        let image = store.build_template(name.as_str(), force, &teller).map_err(|e| failure(&e, Some(&teller)))?;
        let (cached, took) = teller.end();
        if !context.output.json {
            let how = if cached { "up to date".to_owned() } else { format!("built in {} s", took.as_secs()) };
            context.output.line(&format!("{name}  {}  {}  {how}", size(image.bytes), image.digest))?;
        }
        made.push(serde_json::json!({ "name": name.as_str(), "digest": image.digest, "imageBytes": image.bytes, "cached": cached }));
    }
    if context.output.json {
        context.output.json(&serde_json::json!({ "templates": made }))?;
    }
    Ok(0)
}

fn failure(e: &ImageError, teller: Option<&Teller<'_>>) -> Failure {
    if let Some(t) = teller {
        t.end();
    }
    let (exit, code) = match e {
        ImageError::Cancelled => (Exit::Interrupted, "interrupted"),
        ImageError::NotBuilt(_) | ImageError::UnknownRecipe { .. } => (Exit::NotFound, "template_not_found"),
        ImageError::Network { .. } | ImageError::Image(OciError::Unreachable { .. }) => (Exit::Unavailable, "network"),
        ImageError::Image(OciError::Denied(_)) => (Exit::Auth, "denied"),
        ImageError::Image(OciError::NotFound(_)) => (Exit::NotFound, "image_not_found"),
        ImageError::Image(OciError::Name { .. }) | ImageError::NameTaken(_) | ImageError::Labelled(_) => {
            (Exit::Usage, "invalid_request")
        }
        _ => (Exit::Failed, "build_failed"),
    };
    // The first half of the sentence says what, the second what to do.
    let text = e.to_string();
    let (message, hint) = text.split_once("; ").unwrap_or((&text, ""));
    let said = e.detail().map(|d| d.lines().rev().take(LINES_KEPT).collect::<Vec<_>>()).unwrap_or_default();
    let said: String = said.iter().rev().map(|l| format!("\n  {}", printable(l))).collect();
    Failure::new(exit, code, format!("{message}{said}")).hint(hint.to_owned())
}

/// The templates of the service, when it can be reached.
async fn served(context: &Context) -> Option<TemplateList> {
    context.client().ok()?.with_answer_timeout(Duration::from_secs(3)).templates().await.ok()
}

async fn list(context: &Context) -> Result<u8, Failure> {
    if let Some(list) = served(context).await {
        if context.output.json {
            context.output.json(&list)?;
            return Ok(0);
        }
        let rows = list.templates.iter().map(|t| {
            let frozen = if t.frozen_sizes.is_empty() { "-".to_owned() } else { t.frozen_sizes.join(" ") };
            let tags = if t.tags.is_empty() { "-".to_owned() } else { t.tags.join(" ") };
            let mut row = row(&t.name, t.image_bytes, &t.digest, &frozen);
            row.insert(1, (tags, Tone::Plain));
            row
        });
        context.output.table(&["NAME", "TAGS", "BYTES", "READY SIZES", "DIGEST"], rows.collect())?;
        return Ok(0);
    }
    let dir = context.data_dir()?;
    let images = if dir.is_dir() {
        tokio::task::spawn_blocking(move || ImageStore::open(&dir).map(|s| s.templates()))
            .await
            .map_err(|_| Failure::new(Exit::Failed, "internal", "the list broke off"))?
            .map_err(|e| failure(&e, None))?
    } else {
        Vec::new()
    };
    if context.output.json {
        let list: Vec<_> = images
            .iter()
            .map(|i| serde_json::json!({ "name": i.name.as_str(), "digest": i.digest, "imageBytes": i.bytes }))
            .collect();
        context.output.json(&serde_json::json!({ "templates": list }))?;
        return Ok(0);
    }
    context.output.note("the service cannot be asked; these are in the data directory");
    let rows = images.iter().map(|i| row(i.name.as_str(), i.bytes, &i.digest, "?")).collect();
    context.output.table(&["NAME", "IMAGE", "READY SIZES", "DIGEST"], rows)?;
    Ok(0)
}

fn row(name: &str, bytes: u64, digest: &str, frozen: &str) -> Vec<(String, Tone)> {
    let short: String = digest.chars().take(19).collect();
    [name, &size(bytes), frozen, &short].map(|s| (s.to_owned(), Tone::Plain)).to_vec()
}

fn remove(context: &Context, name: &TemplateName) -> Result<u8, Failure> {
    let dir = context.data_dir()?;
    let none = || {
        Failure::new(Exit::NotFound, "template_not_found", format!("template `{name}` is not in {}", dir.display()))
            .hint("`mainbrella template list` shows what is there.")
    };
    if !dir.is_dir() {
        return Err(none());
    }
    let store = ImageStore::open(&dir).map_err(|e| failure(&e, None))?;
    let never = AtomicBool::new(false);
    let teller = Teller::new(context, false, &never, name.as_str());
    let was_there = store.remove_template(name, &teller).map_err(|e| failure(&e, Some(&teller)))?;
    teller.end();
    if !was_there {
        return Err(none());
    }
    if context.output.json {
        context.output.json(&serde_json::json!({ "name": name.as_str(), "removed": true }))?;
    } else {
        context.output.line(&format!("{name} removed"))?;
    }
    Ok(0)
}

/// Shows a build: a bar on a terminal, a line a step elsewhere.
struct Teller<'a> {
    bar: ProgressBar,
    watched: bool,
    verbose: bool,
    quiet: bool,
    what: String,
    cancelled: &'a AtomicBool,
    begin: Instant,
    cached: AtomicBool,
}

impl<'a> Teller<'a> {
    fn new(context: &Context, verbose: bool, cancelled: &'a AtomicBool, what: &str) -> Self {
        let watched = context.output.watched();
        let bar = if watched { ProgressBar::new_spinner() } else { ProgressBar::hidden() };
        if watched {
            bar.set_draw_target(ProgressDrawTarget::stderr());
            bar.enable_steady_tick(Duration::from_millis(120));
        }
        Self {
            bar,
            watched,
            verbose,
            quiet: context.output.json,
            what: what.to_owned(),
            cancelled,
            begin: Instant::now(),
            cached: AtomicBool::new(false),
        }
    }

    fn end(&self) -> (bool, Duration) {
        self.bar.finish_and_clear();
        (self.cached.load(Ordering::Relaxed), self.begin.elapsed())
    }

    fn style(&self, template: &str) {
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.bar.set_style(style);
        }
    }

    fn say(&self, text: &str) {
        if self.watched {
            self.bar.println(text);
        } else if !self.quiet {
            // Nobody can be told that standard error is closed.
            let _ = writeln!(std::io::stderr().lock(), "{text}");
        }
    }
}

impl Progress for Teller<'_> {
    fn event(&self, event: Event<'_>) {
        match event {
            Event::Step(step) => {
                if self.watched {
                    self.bar.set_length(0);
                    self.style("{spinner} {msg} ({elapsed})");
                    self.bar.set_message(format!("{}: {step}", self.what));
                } else {
                    self.say(&format!("{}: {step}", self.what));
                }
            }
            Event::Fraction(part) if self.watched => {
                self.style("{spinner} {msg} {bar:30} {percent}% ({elapsed})");
                self.bar.set_length(1000);
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
                self.bar.set_position((part.clamp(0.0, 1.0) * 1000.0) as u64);
            }
            Event::Line(line) if self.verbose => {
                self.say(&format!("  {}", printable(line)));
            }
            Event::Finished { cached } => self.cached.store(cached, Ordering::Relaxed),
            _ => {}
        }
    }

    fn cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }
}
