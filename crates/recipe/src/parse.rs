//! The text of a recipe made into instructions, each with its line.

use std::collections::{BTreeMap, BTreeSet};

use mainbrella_types::limits::{BUILD_ARGUMENTS_MAX, RECIPE_BYTES_MAX, RECIPE_INSTRUCTIONS_MAX, RECIPE_VALUE_MAX};
use parse_dockerfile as syntax;

use crate::error::{Fault, RecipeError, shown};
use crate::words::{Scope, expand, is_name, pairs};

/// A command as it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Command {
    /// A list of words.
    Exec(Vec<String>),
    /// A line for the shell.
    Shell(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Flag {
    pub(crate) name: String,
    pub(crate) value: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Instruction {
    Arg(String),
    Env(String),
    Label(String),
    Maintainer(String),
    Run(Command),
    Copy {
        flags: Vec<Flag>,
        sources: Vec<String>,
        to: String,
    },
    Workdir(String),
    User(String),
    Expose(Vec<String>),
    Cmd(Command),
    Entrypoint(Command),
    /// Without a command: none.
    Healthcheck {
        flags: Vec<Flag>,
        command: Option<Command>,
    },
    Shell(Vec<String>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) number: usize,
    /// The instruction as it is written, on one line.
    pub(crate) text: String,
    pub(crate) instruction: Instruction,
}

/// A recipe that is well formed.
#[derive(Debug, Clone)]
pub struct Recipe {
    pub(crate) from: (usize, String),
    pub(crate) lines: Vec<Line>,
    pub(crate) escape: char,
    /// Arguments declared before `FROM`, with their values.
    pub(crate) global: BTreeMap<String, String>,
    /// What the caller gave.
    pub(crate) given: BTreeMap<String, String>,
    pub(crate) declared_before: BTreeSet<String>,
}

/// What is true of every machine; `ARG NAME` brings one into the recipe.
const PLATFORM: [(&str, &str); 6] = [
    ("TARGETPLATFORM", "linux/amd64"),
    ("TARGETOS", "linux"),
    ("TARGETARCH", "amd64"),
    ("BUILDPLATFORM", "linux/amd64"),
    ("BUILDOS", "linux"),
    ("BUILDARCH", "amd64"),
];

impl Recipe {
    /// Reads a recipe. `arguments` are build arguments by name.
    ///
    /// # Errors
    /// When it is malformed, over a limit, or holds what is not supported.
    pub fn parse(text: &str, arguments: &BTreeMap<String, String>) -> Result<Self, RecipeError> {
        let limit = |what, max: usize| Fault::Limit { what, max: max as u64 }.at(0);
        if text.len() > RECIPE_BYTES_MAX {
            return Err(limit("bytes of a recipe", RECIPE_BYTES_MAX));
        }
        if arguments.len() > BUILD_ARGUMENTS_MAX {
            return Err(limit("build arguments", BUILD_ARGUMENTS_MAX));
        }
        if let Some((name, value)) =
            arguments.iter().find(|(n, v)| !is_name(n) || v.len() > RECIPE_VALUE_MAX || v.contains('\0'))
        {
            let why = if is_name(name) { "its value is too long or has a NUL in it" } else { "that is no name" };
            let _ = value;
            return Err(Fault::Value(format!("build argument `{}`: {why}", shown(name))).at(0));
        }
        let text = text.trim_start_matches('\u{feff}');
        if text.contains('\0') {
            return Err(Fault::Syntax("the recipe has a NUL in it".to_owned()).at(0));
        }
        Reader::new(text, arguments)?.read()
    }

    /// What it begins with: the name of a template or of an image, variables put in.
    #[must_use]
    pub fn from(&self) -> &str {
        &self.from.1
    }

    /// The line of its `FROM`.
    #[must_use]
    pub fn from_line(&self) -> usize {
        self.from.0
    }
}

struct Reader<'a> {
    text: &'a str,
    escape: char,
    given: &'a BTreeMap<String, String>,
    global: BTreeMap<String, String>,
    declared: BTreeSet<String>,
    from: Option<(usize, String)>,
    lines: Vec<Line>,
}

impl<'a> Reader<'a> {
    fn new(text: &'a str, given: &'a BTreeMap<String, String>) -> Result<Self, RecipeError> {
        Ok(Self {
            text,
            escape: escape_of(text)?,
            given,
            global: PLATFORM.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            declared: BTreeSet::new(),
            from: None,
            lines: Vec::new(),
        })
    }

    fn read(mut self) -> Result<Recipe, RecipeError> {
        // One after the other: what is refused is said before what could not be read because of it.
        for (n, instruction) in syntax::parse_iter(self.text).map_err(|e| malformed(&e))?.enumerate() {
            let instruction = instruction.map_err(|e| malformed(&e))?;
            if n == RECIPE_INSTRUCTIONS_MAX {
                let fault = Fault::Limit { what: "instructions of a recipe", max: RECIPE_INSTRUCTIONS_MAX as u64 };
                return Err(fault.at(0));
            }
            self.take(instruction)?;
        }
        let from = self.from.ok_or_else(|| Fault::Syntax("there is no FROM".to_owned()).at(0))?;
        Ok(Recipe {
            from,
            lines: self.lines,
            escape: self.escape,
            global: self.global,
            given: self.given.clone(),
            declared_before: self.declared,
        })
    }

    fn number(&self, at: usize) -> usize {
        self.text.as_bytes().iter().take(at).filter(|b| **b == b'\n').count() + 1
    }

    fn take(&mut self, instruction: syntax::Instruction<'_>) -> Result<(), RecipeError> {
        use syntax::Instruction as I;
        let (at, made) = match instruction {
            I::From(i) => {
                let line = self.number(i.from.span.start);
                self.from = Some((line, self.base(&i).map_err(|f| f.at(line))?));
                return Ok(());
            }
            I::Arg(i) => {
                let at = i.arg.span.start;
                if self.from.is_none() {
                    let line = self.number(at);
                    return self.global_argument(&i.arguments.value).map_err(|f| f.at(line));
                }
                (at, Ok(Instruction::Arg(i.arguments.value.into_owned())))
            }
            I::Env(i) => (i.env.span.start, Ok(Instruction::Env(i.arguments.value.into_owned()))),
            I::Label(i) => (i.label.span.start, Ok(Instruction::Label(i.arguments.value.into_owned()))),
            I::Maintainer(i) => (i.maintainer.span.start, Ok(Instruction::Maintainer(i.name.value.into_owned()))),
            I::Workdir(i) => (i.workdir.span.start, Ok(Instruction::Workdir(i.arguments.value.into_owned()))),
            I::User(i) => (i.user.span.start, Ok(Instruction::User(i.arguments.value.into_owned()))),
            I::Expose(i) => (i.expose.span.start, Ok(Instruction::Expose(strings(i.arguments)))),
            I::Cmd(i) => (i.cmd.span.start, self.command(i.arguments).map(Instruction::Cmd)),
            I::Entrypoint(i) => (i.entrypoint.span.start, self.command(i.arguments).map(Instruction::Entrypoint)),
            I::Shell(i) => (i.shell.span.start, Ok(Instruction::Shell(strings(i.arguments)))),
            I::Run(i) => (i.run.span.start, self.run(i)),
            I::Copy(i) => (i.copy.span.start, copy(i)),
            I::Healthcheck(i) => {
                let command = match i.arguments {
                    syntax::HealthcheckArguments::Cmd { arguments, .. } => self.command(arguments).map(Some),
                    _ => Ok(None),
                };
                let flags = flags(i.options);
                (i.healthcheck.span.start, command.map(|command| Instruction::Healthcheck { flags, command }))
            }
            I::Add(i) => {
                (i.add.span.start, Err(refused("ADD", "use COPY for files of the context, and a download in RUN")))
            }
            I::Volume(i) => (
                i.volume.span.start,
                Err(refused("VOLUME", "leave it out: all of a machine's disk is its own and is kept with it")),
            ),
            I::Onbuild(i) => {
                (i.onbuild.span.start, Err(refused("ONBUILD", "write the instruction into the recipe that needs it")))
            }
            I::Stopsignal(i) => {
                (i.stopsignal.span.start, Err(refused("STOPSIGNAL", "leave it out: a machine is stopped as a whole")))
            }
            _ => (0, Err(refused("this instruction", "leave it out"))),
        };
        let number = self.number(at);
        let instruction = made.map_err(|f: Fault| f.at(number))?;
        let end = self.text[at..].lines().next().unwrap_or_default();
        self.lines.push(Line { number, text: shown(end.trim_end()), instruction });
        Ok(())
    }

    fn scope<'b>(&'b self, none: &'b BTreeMap<String, String>) -> Scope<'b> {
        Scope { env: none, arguments: &self.global }
    }

    fn global_argument(&mut self, text: &str) -> Result<(), Fault> {
        for (name, default) in arguments(text, self.escape)? {
            let value = match (self.given.get(name), default) {
                (Some(given), _) => Some(given.clone()),
                (None, Some(text)) => Some(expand(text, self.scope(&BTreeMap::new()), self.escape)?),
                (None, None) => None,
            };
            self.declared.insert(name.to_owned());
            if let Some(value) = value {
                self.global.insert(name.to_owned(), value);
            }
        }
        Ok(())
    }

    fn base(&self, from: &syntax::FromInstruction<'_>) -> Result<String, Fault> {
        if self.from.is_some() {
            return Err(Fault::unsupported(
                "a second FROM",
                "build the first stage as a template of its own and begin with it, or do its steps in this one",
            ));
        }
        let none = BTreeMap::new();
        for flag in flags(from.options.iter()) {
            let value = expand(flag.value.as_deref().unwrap_or_default(), self.scope(&none), self.escape)?;
            match (flag.name.as_str(), value.as_str()) {
                ("platform", "linux/amd64" | "linux/x86_64" | "linux/x86-64") => {}
                ("platform", _) => {
                    return Err(Fault::unsupported(
                        format!("platform `{}`", shown(&value)),
                        "machines are linux/amd64",
                    ));
                }
                (name, _) => return Err(unknown_flag(name)),
            }
        }
        if let Some((_, name)) = &from.as_
            && !name.value.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        {
            return Err(Fault::Syntax(format!("`{}` is no name of a stage", shown(&name.value))));
        }
        let base = expand(&from.image.value, self.scope(&none), self.escape)?;
        match base.as_str() {
            "" => Err(Fault::Syntax("FROM names nothing; a variable in it is empty".to_owned())),
            "scratch" => Err(Fault::unsupported("FROM scratch", "begin with a template or an image that has a shell")),
            _ if base.contains(char::is_whitespace) => Err(Fault::Syntax("FROM names two things".to_owned())),
            _ => Ok(base),
        }
    }

    fn command(&self, command: syntax::Command<'_>) -> Result<Command, Fault> {
        match command {
            syntax::Command::Exec(words) => Ok(Command::Exec(strings(words.value))),
            syntax::Command::Shell(line) => {
                let line = joined(line.value, self.escape);
                if has_here_document(&line) {
                    return Err(here_document());
                }
                Ok(Command::Shell(line))
            }
            _ => Err(Fault::Syntax("the command has a form that is not known".to_owned())),
        }
    }

    fn run(&self, run: syntax::RunInstruction<'_>) -> Result<Instruction, Fault> {
        if let Some(flag) = flags(run.options).first() {
            return Err(match flag.name.as_str() {
                "mount" => Fault::unsupported("RUN --mount", "leave it out; what a step needs is copied with COPY"),
                "network" => Fault::unsupported("RUN --network", "leave it out; the build's egress policy decides"),
                "security" => Fault::unsupported("RUN --security", "leave it out; steps run as root of their machine"),
                other => unknown_flag(other),
            });
        }
        let Some(document) = run.here_docs.first() else { return self.command(run.arguments).map(Instruction::Run) };
        let plain = matches!(&run.arguments, syntax::Command::Shell(line) if line.value.trim().is_empty());
        if !plain || document.value.starts_with("#!") || run.here_docs.len() > 1 {
            return Err(here_document());
        }
        Ok(Instruction::Run(Command::Shell(document.value.to_string())))
    }
}

fn here_document() -> Fault {
    Fault::unsupported(
        "a here-document for a program",
        "begin RUN with `<<WORD` alone for a script of the shell, or COPY the text from a file",
    )
}

fn refused(what: &str, instead: &'static str) -> Fault {
    Fault::unsupported(what, instead)
}

pub(crate) fn unknown_flag(name: &str) -> Fault {
    Fault::unsupported(format!("the flag `--{}` here", shown(name)), "leave it out")
}

fn malformed(e: &syntax::Error) -> RecipeError {
    Fault::Syntax(shown(&format!("{e:#}"))).at(e.line())
}

fn strings<'a>(words: impl IntoIterator<Item = syntax::UnescapedString<'a>>) -> Vec<String> {
    words.into_iter().map(|w| w.value.into_owned()).collect()
}

fn flags<'a, F: std::borrow::Borrow<syntax::Flag<'a>>>(flags: impl IntoIterator<Item = F>) -> Vec<Flag> {
    let one = |f: F| {
        let f = f.borrow();
        Flag { name: f.name.value.to_string(), value: f.value.as_ref().map(|v| v.value.to_string()) }
    };
    flags.into_iter().map(one).collect()
}

fn copy(copy: syntax::CopyInstruction<'_>) -> Result<Instruction, Fault> {
    let mut sources = Vec::new();
    for source in copy.src {
        match source {
            syntax::Source::Path(path) => sources.push(path.value.into_owned()),
            _ => return Err(Fault::unsupported("a here-document in COPY", "put the text into a file of the context")),
        }
    }
    Ok(Instruction::Copy { flags: flags(copy.options), sources, to: copy.dest.value.into_owned() })
}

/// `NAME` or `NAME=VALUE`, once or more.
pub(crate) fn arguments(text: &str, escape: char) -> Result<Vec<(&str, Option<&str>)>, Fault> {
    let word =
        |word: &'_ str| word.split_once('=').map_or((word.len(), None), |(name, _)| (name.len(), Some(name.len() + 1)));
    let mut out = Vec::new();
    for one in crate::words::split(text, escape) {
        let (end, value) = word(one);
        let name = &one[..end];
        if !is_name(name) {
            return Err(Fault::Syntax(format!("`{}` is no name of an argument", shown(name))));
        }
        out.push((name, value.map(|at| &one[at..])));
    }
    if out.is_empty() {
        // The same words that `pairs` has for nothing.
        pairs(text, escape, false)?;
    }
    Ok(out)
}

/// The escape character that the directives at the top name.
fn escape_of(text: &str) -> Result<char, RecipeError> {
    syntax::parse_iter(text)
        .map(|_| {
            let directives =
                text.lines().map_while(|l| l.trim_start().strip_prefix('#')).map_while(|l| l.split_once('='));
            let known = directives.map(|(k, v)| (k.trim().to_ascii_lowercase(), v.trim().to_owned()));
            let known = known.take_while(|(k, _)| matches!(k.as_str(), "escape" | "syntax" | "check"));
            let mut seen = BTreeMap::new();
            for (key, value) in known {
                // Given twice, none counts.
                if seen.insert(key, value).is_some() {
                    return '\\';
                }
            }
            if seen.get("escape").is_some_and(|v| v == "`") { '`' } else { '\\' }
        })
        .map_err(|e| malformed(&e))
}

/// A command over several lines made into one: continuations, and the comments and empty lines between them, are gone.
fn joined(text: &str, escape: char) -> String {
    let mut out = String::new();
    let mut inside = false;
    for line in text.lines() {
        let bare = line.trim();
        if inside && (bare.is_empty() || bare.starts_with('#')) {
            continue;
        }
        match line.trim_end().strip_suffix(escape) {
            Some(kept) => {
                out.push_str(kept);
                inside = true;
            }
            None => {
                out.push_str(line.trim_end_matches('\r'));
                inside = false;
            }
        }
    }
    out.trim().to_owned()
}

/// Whether a line for the shell begins a here-document, whose text would then be read as instructions.
fn has_here_document(line: &str) -> bool {
    let mut quote = None;
    let bytes = line.as_bytes();
    let mut at = 0;
    while let Some(b) = bytes.get(at) {
        match (quote, b) {
            (Some(q), b) if q == *b => quote = None,
            (None, b'\'' | b'"') => quote = Some(*b),
            (Some(b'\''), _) => {}
            (_, b'\\') => at += 1,
            (None, b'<') if bytes[at..].starts_with(b"<<") => {
                let before = at.checked_sub(1).map(|i| bytes[i]);
                let after = bytes[at + 2..].iter().find(|b| **b != b'-').copied().unwrap_or(b' ');
                let opens =
                    before.is_none_or(|b| b.is_ascii_whitespace() || b.is_ascii_digit() || b";&|()".contains(&b));
                if opens && (after.is_ascii_alphabetic() || matches!(after, b'_' | b'\'' | b'"' | b'\\')) {
                    return true;
                }
                while bytes.get(at + 1) == Some(&b'<') {
                    at += 1;
                }
            }
            _ => {}
        }
        at += 1;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_joined_as_a_shell_must_see_them() {
        assert_eq!(joined("a \\\n  # note\n\n  b \\  \n c", '\\'), "a   b  c");
        assert_eq!(joined("a `\r\n b\r", '`'), "a  b");
        assert_eq!(joined("echo '#x' # not a comment of ours", '\\'), "echo '#x' # not a comment of ours");
    }

    #[test]
    fn here_documents_are_told_from_what_looks_like_one() {
        for yes in ["cat <<EOF > x", "cat <<-'E'", "cat 3<<E", "a;<<E"] {
            assert!(has_here_document(yes), "{yes}");
        }
        for no in
            ["cat <<< word", "echo $((1 << 2))", "echo '<<EOF'", "echo \"<<EOF\"", "echo \\<<E", "a < b", "echo x<<y"]
        {
            assert!(!has_here_document(no), "{no}");
        }
    }

    #[test]
    fn the_escape_directive_counts_only_at_the_top_and_once() {
        for (text, want) in [
            ("# escape=`\nFROM a\n", '`'),
            ("#Escape = `\nFROM a\n", '`'),
            ("# syntax=x/y:1\n# escape=`\nFROM a\n", '`'),
            ("# a note\n# escape=`\nFROM a\n", '\\'),
            ("FROM a\n# escape=`\n", '\\'),
            ("\n# escape=`\nFROM a\n", '\\'),
        ] {
            assert_eq!(escape_of(text).expect("valid"), want, "{text}");
        }
        assert!(escape_of("# escape=x\nFROM a\n").is_err());
    }
}
