//! What is wrong with a recipe, and where.

/// A recipe that cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{fault}", place(*line))]
pub struct RecipeError {
    /// The line the instruction begins on, from 1; 0 when it is about the recipe as a whole.
    pub line: usize,
    /// What is wrong.
    pub fault: Fault,
}

/// What is wrong with an instruction.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// It is not written as it must be.
    #[error("{0}")]
    Syntax(String),
    /// It is known, and not done here.
    #[error("{what} is not supported; {instead}")]
    Unsupported {
        /// The instruction, flag or form.
        what: String,
        /// What to do.
        instead: &'static str,
    },
    /// A value is not one that can be used.
    #[error("{0}")]
    Value(String),
    /// Something is over its limit.
    #[error("{what}: at most {max}")]
    Limit {
        /// What there is too much of.
        what: &'static str,
        /// The limit.
        max: u64,
    },
    /// Nothing in the context is called that.
    #[error("`{0}` is not in the context, or `.dockerignore` leaves it out")]
    NotFound(String),
    /// A variable that must be set is not.
    #[error("{0}")]
    Unset(String),
    /// The context could not be read.
    #[error("the context could not be read: {0}")]
    Context(String),
}

fn place(line: usize) -> String {
    if line == 0 { String::new() } else { format!("line {line}: ") }
}

impl Fault {
    /// At `line`.
    pub(crate) fn at(self, line: usize) -> RecipeError {
        RecipeError { line, fault: self }
    }

    pub(crate) fn unsupported(what: impl Into<String>, instead: &'static str) -> Self {
        Self::Unsupported { what: what.into(), instead }
    }
}

/// Text of a stranger, short enough and without what would disturb a terminal.
pub(crate) fn shown(text: &str) -> String {
    const MOST: usize = 80;
    let mut out: String = text.chars().take(MOST).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    if text.chars().nth(MOST).is_some() {
        out.push('…');
    }
    out
}
