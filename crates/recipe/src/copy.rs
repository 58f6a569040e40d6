//! `COPY`: what of the context goes where.

use mainbrella_types::limits::{CONTEXT_BYTES_MAX, PATH_MAX};

use crate::context::{Context, Entry, EntryKind};
use crate::error::{Fault, shown};
use crate::key::Key;
use crate::parse::{Flag, unknown_flag};
use crate::pattern::{Pattern, clean};
use crate::words::{Scope, expand};

/// One thing to copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyEntry {
    /// Its path in the context.
    pub from: String,
    /// Where it goes, from [`Copy::to`]; empty: there itself.
    pub to: String,
    /// What it is.
    pub entry: Entry,
    /// SHA-256 of a file, in hexadecimal.
    pub digest: Option<String>,
}

/// What one `COPY` does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copy {
    /// What is copied: folders before what is in them.
    pub entries: Vec<CopyEntry>,
    /// Where to: absolute.
    pub to: String,
    /// [`Self::to`] is a directory, made if it is missing. Otherwise the one file goes there, or into it if it is a directory.
    pub into: bool,
    /// `USER` or `USER:GROUP` by name or number that all of it belongs to; `None`: root.
    pub owner: Option<String>,
    /// Permissions of all that is copied; `None`: as they are.
    pub mode: Option<u32>,
    /// Size of the files, bytes.
    pub bytes: u64,
}

/// An absolute path without `.`, `..` and empty parts; `path` is seen from `base`, which is one.
pub(crate) fn absolute(base: &str, path: &str) -> Result<String, Fault> {
    let whole = if path.starts_with('/') { path.to_owned() } else { format!("{base}/{path}") };
    let mut parts: Vec<&str> = Vec::new();
    for part in whole.split('/').filter(|p| !matches!(*p, "" | ".")) {
        match part {
            // As from the root of a file system.
            ".." => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    let out = format!("/{}", parts.join("/"));
    if out.len() > PATH_MAX || out.contains('\0') {
        return Err(Fault::Limit { what: "bytes of a path", max: PATH_MAX as u64 });
    }
    Ok(out)
}

/// A user or group by name or number, with or without a group.
pub(crate) fn owner(text: &str) -> Result<String, Fault> {
    let fine = |part: &str| {
        (1..=32).contains(&part.len())
            && !part.starts_with('-')
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
    };
    let (user, group) = text.split_once(':').map_or((text, None), |(user, group)| (user, Some(group)));
    if fine(user) && group.is_none_or(fine) {
        Ok(text.to_owned())
    } else {
        Err(Fault::Value(format!("`{}` is no USER or USER:GROUP, by name or number", shown(text))))
    }
}

pub(crate) struct Written<'a> {
    pub(crate) flags: &'a [Flag],
    pub(crate) sources: &'a [String],
    pub(crate) to: &'a str,
}

/// Works out what is copied, reading every file for its digest.
pub(crate) fn resolve(
    written: &Written<'_>,
    scope: Scope<'_>,
    escape: char,
    workdir: &str,
    context: &Context,
) -> Result<Copy, Fault> {
    let (mut belongs, mut mode) = (None, None);
    for flag in written.flags {
        let value = expand(flag.value.as_deref().unwrap_or_default(), scope, escape)?;
        match flag.name.as_str() {
            "chown" => belongs = Some(owner(&value)?),
            "chmod" => mode = Some(octal(&value)?),
            // How the builder stores it is its own affair.
            "link" if matches!(value.as_str(), "" | "true" | "false") => {}
            "from" => {
                return Err(Fault::unsupported(
                    "COPY --from",
                    "build that stage or image as a template of its own and begin with it, or fetch the files in RUN",
                ));
            }
            other => return Err(unknown_flag(other)),
        }
    }
    let target = expand(written.to, scope, escape)?;
    if target.is_empty() {
        return Err(Fault::Value("the destination of COPY is empty".to_owned()));
    }
    let folder =
        target.ends_with('/') || target == "." || target == ".." || target.ends_with("/.") || target.ends_with("/..");
    let mut found: Vec<(String, &Entry)> = Vec::new();
    for source in written.sources {
        select(&expand(source, scope, escape)?, context, &mut found)?;
    }
    if found.len() > 1 && !folder {
        return Err(Fault::Value("several things are copied: the destination must end with `/`".to_owned()));
    }
    let mut copy =
        Copy { entries: Vec::new(), to: absolute(workdir, &target)?, into: folder, owner: belongs, mode, bytes: 0 };
    for (path, entry) in found {
        match &entry.kind {
            EntryKind::Directory => {
                copy.into = true;
                let base = if path.is_empty() { 0 } else { path.len() + 1 };
                for (below, entry) in context.below(&path) {
                    copy.add(context, below, below[base..].to_owned(), entry)?;
                }
            }
            EntryKind::Link { .. } => {
                return Err(Fault::Value(format!(
                    "`{}` is a symbolic link; name what it leads to, or the folder it is in",
                    shown(&path)
                )));
            }
            _ => {
                let name = path.rsplit('/').next().unwrap_or(&path).to_owned();
                copy.add(context, &path, if folder { name } else { String::new() }, entry)?;
            }
        }
    }
    Ok(copy)
}

/// Permissions in octal.
fn octal(text: &str) -> Result<u32, Fault> {
    let digits = (1..=5).contains(&text.len()) && text.bytes().all(|b| (b'0'..=b'7').contains(&b));
    let mode = u32::from_str_radix(text, 8).ok().filter(|m| digits && *m <= 0o7777);
    mode.ok_or_else(|| Fault::Value(format!("--chmod={}: give permissions in octal, as in 755", shown(text))))
}

/// Entries a source of `COPY` means.
fn select<'a>(source: &str, context: &'a Context, found: &mut Vec<(String, &'a Entry)>) -> Result<(), Fault> {
    static ROOT: Entry = Entry { kind: EntryKind::Directory, mode: 0o755 };
    if source.starts_with("http://") || source.starts_with("https://") {
        return Err(Fault::unsupported("a URL in COPY", "download it in RUN"));
    }
    let path = clean(source).ok_or_else(|| {
        Fault::Value(format!("`{}` is outside the context; copy it into the context first", shown(source)))
    })?;
    let nothing = || Fault::NotFound(shown(source));
    if path.is_empty() {
        found.push((path, &ROOT));
        return Ok(());
    }
    if let Some(entry) = context.entries().get(&path) {
        found.push((path, entry));
        return Ok(());
    }
    if !path.contains(['*', '?', '[', '\\']) {
        return Err(nothing());
    }
    let pattern =
        Pattern::new(&path, false).ok_or_else(|| Fault::Syntax(format!("`{}` is not a pattern", shown(source))))?;
    let before = found.len();
    let depth = path.matches('/').count();
    let fits = |p: &&str| p.matches('/').count() == depth && pattern.matches(p);
    for (path, entry) in context.entries().iter().filter(|(p, _)| fits(&p.as_str())) {
        found.push((path.clone(), entry));
    }
    if found.len() == before { Err(nothing()) } else { Ok(()) }
}

impl Copy {
    fn add(&mut self, context: &Context, from: &str, to: String, entry: &Entry) -> Result<(), Fault> {
        let digest = match entry.kind {
            EntryKind::File { bytes } => {
                self.bytes = self.bytes.saturating_add(bytes);
                if self.bytes > CONTEXT_BYTES_MAX {
                    return Err(Fault::Limit { what: "bytes that one COPY takes", max: CONTEXT_BYTES_MAX });
                }
                Some(context.digest(from)?)
            }
            EntryKind::Other => {
                return Err(Fault::Value(format!(
                    "`{}` is a socket, FIFO or device: leave it out with .dockerignore",
                    shown(from)
                )));
            }
            _ => None,
        };
        self.entries.push(CopyEntry { from: from.to_owned(), to, entry: entry.clone(), digest });
        Ok(())
    }

    /// All that the result depends on.
    pub(crate) fn describe(&self, key: &mut Key) {
        let mode = self.mode.map_or_else(String::new, |m| format!("{m:o}"));
        key.list([self.to.as_str(), if self.into { "into" } else { "to" }, self.owner.as_deref().unwrap_or(""), &mode]);
        for one in &self.entries {
            let mode = format!("{:o}", one.entry.mode);
            let (kind, content) = match &one.entry.kind {
                EntryKind::Link { target } => ("link", target.as_str()),
                EntryKind::Directory => ("directory", ""),
                _ => ("file", one.digest.as_deref().unwrap_or("")),
            };
            // A name goes with the entry where it may be put into a folder that exists.
            let name = if self.into { "" } else { one.from.rsplit('/').next().unwrap_or("") };
            key.list([one.to.as_str(), name, kind, &mode, content]);
        }
    }
}
