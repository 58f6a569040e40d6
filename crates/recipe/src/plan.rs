//! From a recipe to what is to be done.

use std::collections::{BTreeMap, BTreeSet};

use mainbrella_types::limits::{ARGV_ENTRIES_MAX, COMMAND_BYTES_MAX, ENV_BYTES_MAX, ENV_ENTRIES_MAX, RECIPE_STEPS_MAX};

use crate::context::Context;
use crate::copy::{self, Copy, Written, absolute, owner};
use crate::error::{Fault, RecipeError, shown};
use crate::health::Probe;
use crate::key::Key;
use crate::parse::{Command, Instruction, Line, Recipe, arguments};
use crate::settings::{Settings, ports};
use crate::words::{Scope, expand, is_name, pairs};

/// Labels of one template.
const LABELS_MAX: usize = 256;
/// Ports of one template.
const PORTS_MAX: usize = 2048;

/// What a recipe begins with, once it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base {
    /// Digest of it: what is on its disk and, where it runs, in its memory.
    pub digest: String,
    /// What its machines are set to.
    pub settings: Settings,
}

/// Something that changes the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StepKind {
    /// Run a command.
    Run {
        /// The command.
        argv: Vec<String>,
        /// Its environment, build arguments among it.
        env: BTreeMap<String, String>,
        /// Where it runs.
        workdir: String,
        /// As whom; `None`: root.
        user: Option<String>,
    },
    /// Copy from the context.
    Copy(Copy),
    /// Make a directory, if it is missing.
    Workdir {
        /// Where: absolute.
        path: String,
        /// Whose; `None`: root's.
        user: Option<String>,
    },
}

/// One step of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The line it stands on.
    pub line: usize,
    /// The instruction, for people.
    pub text: String,
    /// What is done.
    pub kind: StepKind,
    /// What its result depends on, in 64 hexadecimal digits: equal keys have equal results as far as can be told.
    pub key: String,
}

/// Something that is not wrong and probably not meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Warning {
    /// A build argument was given and is not declared.
    UnusedArgument(String),
}

/// What a build does, and what comes out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// What is done, in order.
    pub steps: Vec<Step>,
    /// What machines of the template are set to.
    pub settings: Settings,
    /// What the finished template depends on, in 64 hexadecimal digits.
    pub key: String,
    /// What was probably not meant.
    pub warnings: Vec<Warning>,
}

impl Recipe {
    /// Works out what is to be done on top of `base`, with the files of `context`, which are read for their digests.
    ///
    /// # Errors
    /// The first thing that is wrong, with its line.
    pub fn plan(&self, base: &Base, context: &Context) -> Result<Plan, RecipeError> {
        let mut planner = Planner {
            recipe: self,
            context,
            settings: base.settings.clone(),
            arguments: BTreeMap::new(),
            declared: self.declared_before.clone(),
            own_cmd: false,
            key: base.digest.clone(),
            steps: Vec::new(),
        };
        for line in &self.lines {
            planner.take(line).map_err(|f| f.at(line.number))?;
        }
        let unused = self.given.keys().filter(|name| !planner.declared.contains(*name));
        let warnings = unused.cloned().map(Warning::UnusedArgument).collect();
        let mut key = Key::after(&planner.key);
        describe(&planner.settings, &mut key);
        Ok(Plan { steps: planner.steps, settings: planner.settings, key: key.finish(), warnings })
    }
}

fn describe(s: &Settings, key: &mut Key) {
    key.list(s.env.iter().flat_map(|(k, v)| [k.as_str(), v.as_str()]));
    key.list([s.workdir.as_str(), s.user.as_deref().unwrap_or("")]);
    for words in [&s.entrypoint, &s.cmd, &s.shell] {
        key.list(words.iter().map(String::as_str));
    }
    key.list(s.labels.iter().flat_map(|(k, v)| [k.as_str(), v.as_str()]));
    let ports: Vec<String> = s.ports.iter().map(ToString::to_string).collect();
    key.list(ports.iter().map(String::as_str));
    if let Some(probe) = &s.probe {
        key.list(probe.argv.iter().map(String::as_str));
        let times = [probe.interval, probe.timeout, probe.start_period, probe.start_interval];
        let numbers: Vec<String> =
            times.iter().map(|t| t.as_nanos().to_string()).chain([probe.retries.to_string()]).collect();
        key.list(numbers.iter().map(String::as_str));
    }
}

struct Planner<'a> {
    recipe: &'a Recipe,
    context: &'a Context,
    settings: Settings,
    arguments: BTreeMap<String, String>,
    declared: BTreeSet<String>,
    own_cmd: bool,
    key: String,
    steps: Vec<Step>,
}

impl Planner<'_> {
    fn scope(&self) -> Scope<'_> {
        Scope { env: &self.settings.env, arguments: &self.arguments }
    }

    fn expand(&self, text: &str) -> Result<String, Fault> {
        expand(text, self.scope(), self.recipe.escape)
    }

    fn take(&mut self, line: &Line) -> Result<(), Fault> {
        match &line.instruction {
            Instruction::Arg(text) => self.argument(text),
            Instruction::Env(text) => {
                let made = self.values(text, true)?;
                self.settings.env.extend(made);
                check_env(&self.settings.env)
            }
            Instruction::Label(text) => {
                let made = self.values(text, true)?;
                self.settings.labels.extend(made);
                self.check_labels()
            }
            Instruction::Maintainer(text) => {
                self.settings.labels.insert("maintainer".to_owned(), text.clone());
                self.check_labels()
            }
            Instruction::Run(command) => self.run(line, command),
            Instruction::Copy { flags, sources, to } => {
                let written = Written { flags, sources, to };
                let copy =
                    copy::resolve(&written, self.scope(), self.recipe.escape, &self.settings.workdir, self.context)?;
                let mut key = Key::after(&self.key);
                key.part(b"copy");
                copy.describe(&mut key);
                self.step(line, StepKind::Copy(copy), key)
            }
            Instruction::Workdir(text) => {
                let path = absolute(&self.settings.workdir, &self.expand(text)?)?;
                self.settings.workdir.clone_from(&path);
                let user = self.settings.user.clone();
                let mut key = Key::after(&self.key);
                key.list(["workdir", &path, user.as_deref().unwrap_or("")]);
                self.step(line, StepKind::Workdir { path, user }, key)
            }
            Instruction::User(text) => {
                let user = owner(&self.expand(text)?)?;
                let root = matches!(user.as_str(), "root" | "0" | "root:root" | "0:0");
                self.settings.user = (!root).then_some(user);
                Ok(())
            }
            Instruction::Expose(words) => {
                for word in words {
                    // A variable may stand for several.
                    for one in self.expand(word)?.split_whitespace() {
                        self.settings.ports.extend(ports(one)?);
                    }
                }
                if self.settings.ports.len() > PORTS_MAX {
                    return Err(Fault::Limit { what: "ports of a template", max: PORTS_MAX as u64 });
                }
                Ok(())
            }
            Instruction::Cmd(command) => {
                self.own_cmd = true;
                self.settings.cmd = self.words(command, true)?;
                Ok(())
            }
            Instruction::Entrypoint(command) => {
                self.settings.entrypoint = self.words(command, true)?;
                // A line for the shell takes no words behind it; what the base starts with does not fit a new one.
                if matches!(command, Command::Shell(_)) || !self.own_cmd {
                    self.settings.cmd = Vec::new();
                }
                Ok(())
            }
            Instruction::Healthcheck { flags, command } => {
                self.settings.probe = match command {
                    Some(command) => {
                        let argv = self.words(command, false)?;
                        Some(Probe::with(argv, flags)?)
                    }
                    None if !flags.is_empty() => {
                        return Err(Fault::Syntax("HEALTHCHECK NONE takes no flags".to_owned()));
                    }
                    None => None,
                };
                Ok(())
            }
            Instruction::Shell(words) => {
                check_words(words)?;
                self.settings.shell.clone_from(words);
                Ok(())
            }
        }
    }

    fn argument(&mut self, text: &str) -> Result<(), Fault> {
        for (name, default) in arguments(text, self.recipe.escape)? {
            self.declared.insert(name.to_owned());
            let value = match (self.recipe.given.get(name), default) {
                (Some(given), _) => Some(given.clone()),
                (None, Some(text)) => Some(self.expand(text)?),
                (None, None) => self.recipe.global.get(name).cloned(),
            };
            if let Some(value) = value {
                self.arguments.insert(name.to_owned(), value);
            }
        }
        check_env(&self.arguments)
    }

    fn values(&self, text: &str, legacy: bool) -> Result<Vec<(String, String)>, Fault> {
        let escape = self.recipe.escape;
        let one = |(name, value): (&str, &str)| {
            let name = self.expand(name)?;
            if name.is_empty() || name.contains(['=', '\0', '\n']) || name.len() > 256 {
                return Err(Fault::Value(format!("`{}` is no name", shown(&name))));
            }
            Ok((name, self.expand(value)?))
        };
        pairs(text, escape, legacy)?.into_iter().map(one).collect()
    }

    fn check_labels(&self) -> Result<(), Fault> {
        if self.settings.labels.len() > LABELS_MAX {
            return Err(Fault::Limit { what: "labels of a template", max: LABELS_MAX as u64 });
        }
        let bytes: usize = self.settings.labels.iter().map(|(k, v)| k.len() + v.len()).sum();
        if bytes > ENV_BYTES_MAX {
            return Err(Fault::Limit { what: "bytes of a template's labels", max: ENV_BYTES_MAX as u64 });
        }
        Ok(())
    }

    /// The words of a command; an empty list means none, where that may be.
    fn words(&self, command: &Command, none: bool) -> Result<Vec<String>, Fault> {
        let words = match command {
            Command::Exec(words) => words.clone(),
            Command::Shell(line) if line.is_empty() => Vec::new(),
            Command::Shell(line) => self.settings.shell.iter().chain([line]).cloned().collect(),
        };
        if words.is_empty() && none {
            return Ok(words);
        }
        check_words(&words)?;
        Ok(words)
    }

    fn run(&mut self, line: &Line, command: &Command) -> Result<(), Fault> {
        let argv = self.words(command, false)?;
        let mut env = self.arguments.clone();
        env.extend(self.settings.env.clone());
        check_env(&env)?;
        let (workdir, user) = (self.settings.workdir.clone(), self.settings.user.clone());
        let mut key = Key::after(&self.key);
        key.part(b"run");
        key.list(argv.iter().map(String::as_str));
        key.list(env.iter().flat_map(|(k, v)| [k.as_str(), v.as_str()]));
        key.list([workdir.as_str(), user.as_deref().unwrap_or("")]);
        self.step(line, StepKind::Run { argv, env, workdir, user }, key)
    }

    fn step(&mut self, line: &Line, kind: StepKind, key: Key) -> Result<(), Fault> {
        if self.steps.len() == RECIPE_STEPS_MAX {
            return Err(Fault::Limit { what: "steps of a recipe (RUN, COPY, WORKDIR)", max: RECIPE_STEPS_MAX as u64 });
        }
        self.key = key.finish();
        self.steps.push(Step { line: line.number, text: line.text.clone(), kind, key: self.key.clone() });
        Ok(())
    }
}

fn check_env(env: &BTreeMap<String, String>) -> Result<(), Fault> {
    let bytes: usize = env.iter().map(|(k, v)| k.len() + v.len()).sum();
    if env.len() > ENV_ENTRIES_MAX {
        return Err(Fault::Limit { what: "variables of a template", max: ENV_ENTRIES_MAX as u64 });
    }
    if bytes > ENV_BYTES_MAX {
        return Err(Fault::Limit { what: "bytes of a template's variables", max: ENV_BYTES_MAX as u64 });
    }
    match env.keys().find(|name| !is_name(name) && name.contains(char::is_control)) {
        Some(name) => Err(Fault::Value(format!("`{}` is no name of a variable", shown(name)))),
        None => Ok(()),
    }
}

fn check_words(words: &[String]) -> Result<(), Fault> {
    if words.first().is_none_or(String::is_empty) {
        return Err(Fault::Syntax("the command is empty".to_owned()));
    }
    if words.iter().any(|w| w.contains('\0')) {
        return Err(Fault::Value("a command has a NUL in it".to_owned()));
    }
    if words.len() > ARGV_ENTRIES_MAX || words.iter().map(|w| w.len() + 1).sum::<usize>() > COMMAND_BYTES_MAX {
        return Err(Fault::Limit { what: "bytes of a command", max: COMMAND_BYTES_MAX as u64 });
    }
    Ok(())
}
