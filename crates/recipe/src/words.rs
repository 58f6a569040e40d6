//! Words of an instruction: quotes, escapes and variables.

use std::collections::BTreeMap;

use mainbrella_types::limits::RECIPE_VALUE_MAX;

use crate::error::{Fault, shown};

/// Variables inside the defaults of variables, this deep.
const DEPTH_MAX: usize = 16;

/// Where variables are looked up: the environment first, then build arguments.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scope<'a> {
    pub(crate) env: &'a BTreeMap<String, String>,
    pub(crate) arguments: &'a BTreeMap<String, String>,
}

impl Scope<'_> {
    fn get(&self, name: &str) -> Option<&str> {
        self.env.get(name).or_else(|| self.arguments.get(name)).map(String::as_str)
    }
}

/// Whether `name` can be a variable.
pub(crate) fn is_name(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
        && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

struct Reader<'a> {
    rest: std::iter::Peekable<std::str::Chars<'a>>,
    scope: Scope<'a>,
    escape: char,
    out: String,
}

/// `text` with its variables put in, and its quotes and escapes taken off. One word: blanks do not divide it.
pub(crate) fn expand(text: &str, scope: Scope<'_>, escape: char) -> Result<String, Fault> {
    let mut reader = Reader { rest: text.chars().peekable(), scope, escape, out: String::new() };
    reader.run(None, 0)?;
    Ok(reader.out)
}

impl Reader<'_> {
    fn put(&mut self, text: &str) -> Result<(), Fault> {
        if self.out.len() + text.len() > RECIPE_VALUE_MAX {
            return Err(Fault::Limit {
                what: "bytes of a value with its variables put in",
                max: RECIPE_VALUE_MAX as u64,
            });
        }
        self.out.push_str(text);
        Ok(())
    }

    fn put_char(&mut self, c: char) -> Result<(), Fault> {
        self.put(c.encode_utf8(&mut [0; 4]))
    }

    /// Up to `end`, which is taken, or to the end of the text.
    fn run(&mut self, end: Option<char>, depth: usize) -> Result<(), Fault> {
        if depth > DEPTH_MAX {
            return Err(Fault::Limit { what: "variables inside variables", max: DEPTH_MAX as u64 });
        }
        while let Some(c) = self.rest.next() {
            match c {
                _ if Some(c) == end => return Ok(()),
                '\'' => loop {
                    match self.rest.next() {
                        Some('\'') => break,
                        Some(c) => self.put_char(c)?,
                        None => return Err(Fault::Syntax("a `'` is not closed".to_owned())),
                    }
                },
                '"' => self.double(depth)?,
                '$' => self.variable(depth)?,
                c if c == self.escape => match self.rest.next() {
                    Some(c) => self.put_char(c)?,
                    // At the very end it stands for itself.
                    None => self.put_char(c)?,
                },
                c => self.put_char(c)?,
            }
        }
        match end {
            Some(end) => Err(Fault::Syntax(format!("a `${{` is not closed with `{end}`"))),
            None => Ok(()),
        }
    }

    fn double(&mut self, depth: usize) -> Result<(), Fault> {
        while let Some(c) = self.rest.next() {
            match c {
                '"' => return Ok(()),
                '$' => self.variable(depth)?,
                c if c == self.escape => match self.rest.peek().copied() {
                    Some(next) if next == '"' || next == '$' || next == self.escape => {
                        self.rest.next();
                        self.put_char(next)?;
                    }
                    _ => self.put_char(c)?,
                },
                c => self.put_char(c)?,
            }
        }
        Err(Fault::Syntax("a `\"` is not closed".to_owned()))
    }

    fn name(&mut self) -> String {
        let mut name = String::new();
        while let Some(c) = self.rest.peek().copied().filter(|c| c.is_ascii_alphanumeric() || *c == '_') {
            // A digit in front is a name by itself: `$1x` is the first argument and an `x`.
            if name.is_empty() && c.is_ascii_digit() {
                self.rest.next();
                return c.to_string();
            }
            name.push(c);
            self.rest.next();
        }
        name
    }

    fn variable(&mut self, depth: usize) -> Result<(), Fault> {
        if self.rest.peek() != Some(&'{') {
            let name = self.name();
            if name.is_empty() {
                return self.put("$");
            }
            let value = self.scope.get(&name).unwrap_or_default().to_owned();
            return self.put(&value);
        }
        self.rest.next();
        let name = self.name();
        if name.is_empty() {
            return Err(Fault::Syntax("`${` is not followed by the name of a variable".to_owned()));
        }
        let value = self.scope.get(&name).map(str::to_owned);
        let mut operator = self.rest.next();
        let full = operator == Some(':');
        if full {
            operator = self.rest.next();
        }
        let set = value.as_ref().is_some_and(|v| !full || !v.is_empty());
        let value = value.unwrap_or_default();
        match operator {
            Some('}') if !full => self.put(&value),
            Some('-') => {
                let other = self.word(depth)?;
                self.put(if set { &value } else { &other })
            }
            Some('+') => {
                let other = self.word(depth)?;
                self.put(if set { &other } else { "" })
            }
            Some('?') => {
                let message = self.word(depth)?;
                if !set {
                    let message = if message.is_empty() { "it is not set".to_owned() } else { shown(&message) };
                    return Err(Fault::Unset(format!("${name}: {message}")));
                }
                self.put(&value)
            }
            None => Err(Fault::Syntax(format!("`${{{}` is not closed with `}}`", shown(&name)))),
            Some(c @ ('#' | '%' | '/')) if !full => Err(Fault::unsupported(
                format!("`${{{}{c}…}}`", shown(&name)),
                "work the value out in a RUN instruction, or give it with --build-arg",
            )),
            Some(_) => Err(Fault::Syntax(format!(
                "`${{{}` is followed by something other than `}}`, `:-`, `:+`, `:?`, `-`, `+` or `?`",
                shown(&name)
            ))),
        }
    }

    /// What stands behind an operator, up to the closing brace.
    fn word(&mut self, depth: usize) -> Result<String, Fault> {
        let before = std::mem::take(&mut self.out);
        let read = self.run(Some('}'), depth + 1);
        let word = std::mem::replace(&mut self.out, before);
        read.map(|()| word)
    }
}

/// Divides `text` at blanks that are neither quoted nor escaped. Quotes and escapes stay.
pub(crate) fn split(text: &str, escape: char) -> Vec<&str> {
    let mut words = Vec::new();
    let (mut begin, mut quote) = (None, None);
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        if quote.is_none() && c.is_whitespace() {
            if let Some(begin) = begin.take() {
                words.push(&text[begin..at]);
            }
            continue;
        }
        begin.get_or_insert(at);
        match quote {
            Some(q) if q == c => quote = None,
            None if matches!(c, '\'' | '"') => quote = Some(c),
            _ => {}
        }
        if c == escape && quote != Some('\'') {
            chars.next();
        }
    }
    if let Some(begin) = begin {
        words.push(&text[begin..]);
    }
    words
}

/// `NAME=VALUE…`, or `NAME the rest of the line` where `legacy`; values are as written.
pub(crate) fn pairs<'a>(text: &'a str, escape: char, legacy: bool) -> Result<Vec<(&'a str, &'a str)>, Fault> {
    let words = split(text, escape);
    let Some(first) = words.first() else {
        return Err(Fault::Syntax("there is nothing behind the instruction".to_owned()));
    };
    if !first.contains('=') {
        let rest = text.trim_start()[first.len()..].trim();
        if !legacy || rest.is_empty() {
            return Err(Fault::Syntax(format!("`{}` has no `=` and value", shown(first))));
        }
        return Ok(vec![(first, rest)]);
    }
    let pair = |word: &&'a str| {
        let (name, value) = word.split_once('=').filter(|(name, _)| !name.is_empty()).ok_or_else(|| {
            Fault::Syntax(format!("`{}` is not NAME=VALUE; put values with blanks in quotes", shown(word)))
        })?;
        Ok((name, value))
    };
    words.iter().map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn with(text: &str) -> Result<String, Fault> {
        let env = [("A", "one"), ("E", ""), ("P", "/bin:/usr")].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        let arguments = [("A", "shadowed"), ("B", "two")].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        expand(text, Scope { env: &env, arguments: &arguments }, '\\')
    }

    #[test]
    fn variables_quotes_and_escapes_are_those_of_a_dockerfile() {
        for (text, want) in [
            ("$A", "one"),
            ("$A$B-${A}x", "onetwo-onex"),
            ("$nothing.", "."),
            ("${A:-x}", "one"),
            ("${E:-x}", "x"),
            ("${E-x}", ""),
            ("${Z-x}", "x"),
            ("${Z:-${B:-y}}", "two"),
            ("${Z:-'}'}", "}"),
            ("${A:+x}", "x"),
            ("${E:+x}", ""),
            ("${E+x}", "x"),
            ("${A:?no}", "one"),
            ("\\$A", "$A"),
            ("'$A'", "$A"),
            ("\"$A \\\" \\$ \\x\"", "one \" $ \\x"),
            ("a\\ b", "a b"),
            ("$P:/x", "/bin:/usr:/x"),
            ("$", "$"),
            ("a$", "a$"),
            ("$.x", "$.x"),
            ("$1x", "x"),
            ("\\", "\\"),
            ("é$A", "éone"),
        ] {
            assert_eq!(with(text).as_deref(), Ok(want), "{text}");
        }
        for bad in [
            "'a",
            "\"a",
            "${A",
            "${",
            "${}",
            "${A:",
            "${A:x}",
            "${A=x}",
            "${Z:-x",
            "${Z:?is needed}",
            "${A#x}",
            "${A/x/y}",
        ] {
            assert!(with(bad).is_err(), "{bad}");
        }
        assert_eq!(with("${Z:?is needed}").expect_err("unset").to_string(), "$Z: is needed");
    }

    #[test]
    fn what_grows_without_end_is_stopped() {
        let env = [("A".to_owned(), "x".repeat(40_000))].into();
        let scope = Scope { env: &env, arguments: &BTreeMap::new() };
        assert!(matches!(expand("$A$A", scope, '\\'), Err(Fault::Limit { .. })));
        assert!(matches!(expand(&"${Z:-".repeat(100_000), scope, '\\'), Err(Fault::Limit { .. })));
    }

    #[test]
    fn lines_are_divided_into_pairs() {
        assert_eq!(pairs("a=b c=\"d e\" f=g\\ h", '\\', true), Ok(vec![("a", "b"), ("c", "\"d e\""), ("f", "g\\ h")]));
        assert_eq!(pairs("key the rest = it", '\\', true), Ok(vec![("key", "the rest = it")]));
        assert_eq!(pairs("a= b=c", '\\', true), Ok(vec![("a", ""), ("b", "c")]));
        assert!(pairs("a=b c", '\\', true).is_err() && pairs("=b", '\\', true).is_err());
        assert!(pairs("key value", '\\', false).is_err() && pairs("key", '\\', true).is_err());
        assert_eq!(split("a 'b c'\td\\ e `f", '`'), ["a", "'b c'", "d\\", "e", "`f"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[$\\{\\}:+?\"'\\\\`a-cA-C =é#/%-]{0,60}") {
            let _ = with(&text);
            let _ = pairs(&text, '\\', true);
            let _ = pairs(&text, '`', false);
        }

        #[test]
        fn plain_text_stays_as_it_is(text in "[a-zA-Z0-9 ./:=_-]{0,60}") {
            prop_assert_eq!(with(&text), Ok(text));
        }

        #[test]
        fn words_hold_all_but_blanks(text in "[a-z' \"\\\\]{0,60}") {
            let kept: usize = split(&text, '\\').iter().map(|w| w.len()).sum();
            prop_assert!(kept <= text.len());
            prop_assert!(text.chars().filter(|c| !c.is_whitespace()).count() <= kept);
        }
    }
}
