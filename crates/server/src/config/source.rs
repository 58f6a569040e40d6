//! Where values come from, and how mistakes are gathered.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use super::{KEYS, Key};

/// One mistake in the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// The key.
    pub key: String,
    /// Where it was set: `--listen`, `MAINBRELLA_LISTEN`, `/etc/x.toml`.
    pub place: String,
    /// What is wrong and what would be right.
    pub message: String,
}

impl Mistake {
    pub(super) fn new(key: &str, place: impl Into<String>, message: impl Into<String>) -> Self {
        Self { key: key.to_owned(), place: place.into(), message: message.into() }
    }
}

/// Everything that is wrong with the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigErrors(pub Vec<Mistake>);

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the configuration has mistakes:")?;
        for m in &self.0 {
            write!(f, "\n  {} ({}): {}", m.key, m.place, m.message)?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}

/// The raw values, by source.
#[derive(Clone, Default)]
pub struct Sources {
    flags: BTreeMap<String, String>,
    environment: BTreeMap<String, String>,
    file: BTreeMap<String, String>,
    file_path: String,
    fallback_data_dir: Option<PathBuf>,
}

/// Values may be secrets; only names are shown.
impl fmt::Debug for Sources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sources")
            .field("flags", &self.flags.keys())
            .field("environment", &self.environment.keys())
            .field("file", &self.file.keys())
            .finish_non_exhaustive()
    }
}

/// Where data live when nobody says: `/var/lib/mainbrella` for root, else `mainbrella` in the XDG data
/// folder. `None` when there is no home folder.
#[must_use]
pub fn default_data_dir() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some("/var/lib/mainbrella".into());
    }
    let absolute = |v: std::ffi::OsString| Some(PathBuf::from(v)).filter(|p| p.is_absolute());
    std::env::var_os("XDG_DATA_HOME")
        .and_then(absolute)
        .or_else(|| std::env::var_os("HOME").and_then(absolute).map(|h| h.join(".local/share")))
        .map(|d| d.join("mainbrella"))
}

impl Sources {
    /// Flags alone.
    #[must_use]
    pub fn new(flags: impl IntoIterator<Item = (String, String)>) -> Self {
        Self { flags: flags.into_iter().collect(), ..Self::default() }
    }

    /// Adds values as environment variables give them.
    #[must_use]
    pub fn with_environment(mut self, variables: impl IntoIterator<Item = (String, String)>) -> Self {
        self.environment = variables.into_iter().collect();
        self
    }

    /// Adds a file: its path for messages, its text.
    ///
    /// # Errors
    /// When the text is not a flat TOML table.
    pub fn with_file(mut self, path: &str, text: &str) -> Result<Self, ConfigErrors> {
        let wrong = |message: String| ConfigErrors(vec![Mistake::new("config", path, message)]);
        // The parser's own message quotes the line, which may hold a password.
        let table: toml::Table = text.parse().map_err(|e: toml::de::Error| {
            let line = e.span().map_or(1, |s| text.get(..s.start).unwrap_or("").lines().count().max(1));
            wrong(format!("line {line} is not valid TOML: {}", e.message()))
        })?;
        let mut mistakes = Vec::new();
        for (name, value) in table {
            let text = match value {
                toml::Value::String(s) => s,
                toml::Value::Integer(n) => n.to_string(),
                toml::Value::Boolean(b) => b.to_string(),
                toml::Value::Array(items) if items.iter().all(toml::Value::is_str) => {
                    items.iter().filter_map(toml::Value::as_str).collect::<Vec<_>>().join(",")
                }
                _ => {
                    mistakes.push(Mistake::new(&name, path, "must be a text, a number or a list of texts"));
                    continue;
                }
            };
            self.file.insert(name, text);
        }
        self.file_path = path.to_owned();
        if mistakes.is_empty() { Ok(self) } else { Err(ConfigErrors(mistakes)) }
    }

    /// Flags, the environment of this process, and the file they name.
    ///
    /// # Errors
    /// When a file that was asked for cannot be read.
    pub(super) fn from_environment(flags: impl IntoIterator<Item = (String, String)>) -> Result<Self, ConfigErrors> {
        let variables = KEYS.iter().filter_map(|k| Some((k.env.to_owned(), std::env::var(k.env).ok()?)));
        let mut sources = Self::new(flags).with_environment(variables);
        sources.fallback_data_dir = default_data_dir();
        let asked = sources.raw("config").map(|(value, _)| value.to_owned());
        let path = match &asked {
            Some(path) => PathBuf::from(path),
            None => match sources.data_dir() {
                Some(dir) => dir.join("mainbrella.toml"),
                None => return Ok(sources),
            },
        };
        match std::fs::read_to_string(&path) {
            Ok(text) => sources.with_file(&path.display().to_string(), &text),
            // A data directory that is none is told where it is made.
            Err(e)
                if asked.is_none()
                    && matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) =>
            {
                Ok(sources)
            }
            Err(e) => Err(ConfigErrors(vec![Mistake::new(
                "config",
                path.display().to_string(),
                format!("cannot be read: {e}"),
            )])),
        }
    }

    /// The data directory, absolute; `None` when none is given and there is no home folder.
    #[must_use]
    pub fn data_dir(&self) -> Option<PathBuf> {
        let given = self.raw("data-dir").map(|(value, _)| PathBuf::from(value));
        let dir = given.or_else(|| self.fallback_data_dir.clone())?;
        std::path::absolute(dir).ok()
    }

    /// A value and the place it was set in.
    fn raw(&self, name: &str) -> Option<(&str, String)> {
        let key = KEYS.iter().find(|k| k.name == name)?;
        if let Some(v) = self.flags.get(key.name) {
            return Some((v, format!("--{}", key.name)));
        }
        // An empty variable is one that was not set.
        if let Some(v) = self.environment.get(key.env).filter(|v| !v.is_empty()) {
            return Some((v, key.env.to_owned()));
        }
        self.file.get(&in_file(key)).map(|v| (v.as_str(), self.file_path.clone()))
    }

    /// Names that no key has.
    pub(super) fn strangers(&self) -> Vec<Mistake> {
        let in_files = self.file.keys().filter(|n| !KEYS.iter().any(|k| in_file(k) == **n));
        let in_flags = self.flags.keys().filter(|n| !KEYS.iter().any(|k| k.name == **n));
        in_flags
            .map(|n| Mistake::new(n, format!("--{n}"), "there is no such key"))
            .chain(in_files.map(|n| Mistake::new(n, self.file_path.as_str(), nearest(n))))
            .collect()
    }
}

fn in_file(key: &Key) -> String {
    key.name.replace('-', "_")
}

fn nearest(name: &str) -> String {
    let dashed = KEYS.iter().find(|k| k.name == name || in_file(k).eq_ignore_ascii_case(name));
    match dashed {
        Some(k) => format!("there is no such key; {} is written {}", k.name, in_file(k)),
        None => "there is no such key".into(),
    }
}

/// Reads values and gathers mistakes. After a mistake a stand-in value is returned that is never used.
pub(super) struct Reader<'a> {
    pub(super) sources: &'a Sources,
    pub(super) mistakes: &'a mut Vec<Mistake>,
}

impl Reader<'_> {
    pub(super) fn with<T: Default>(&mut self, name: &str, parse: impl FnOnce(&str) -> Result<T, String>) -> T {
        let default = KEYS.iter().find(|k| k.name == name).map_or("", |k| k.default);
        let (value, place) = self.sources.raw(name).unwrap_or((default, "default".into()));
        match parse(value.trim()) {
            Ok(v) => v,
            Err(message) => {
                self.mistakes.push(Mistake::new(name, place, message));
                T::default()
            }
        }
    }

    pub(super) fn number(&mut self, name: &str, min: u32, max: u32) -> u32 {
        self.with(name, |s| {
            s.parse()
                .ok()
                .filter(|n| (min..=max).contains(n))
                .ok_or(format!("must be a whole number from {min} to {max}"))
        })
    }

    pub(super) fn parsed(&mut self, name: &str, expected: &str) -> std::net::SocketAddr {
        self.with(name, |s| std::net::SocketAddr::from_str(s).map(Some).map_err(|_| format!("must be {expected}")))
            .unwrap_or_else(|| std::net::SocketAddr::from(([127, 0, 0, 1], 0)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Accel, LogFormat, ServerConfig, defaults};
    use super::*;
    use std::time::Duration;

    fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
    }

    #[test]
    fn every_default_keeps_its_own_rules() {
        let c = defaults("/data");
        assert_eq!(c.listen.to_string(), "127.0.0.1:8787");
        assert_eq!((c.accel, c.log_format, c.idle_timeout), (Accel::Auto, LogFormat::Text, None));
        assert_eq!(c.data_dir, PathBuf::from("/data"));
        assert_eq!(c.database, None);
    }

    #[test]
    fn a_flag_beats_the_environment_beats_the_file() {
        let file = "listen = \"127.0.0.1:1\"\npool_size = 3\naccel = \"tcg\"\n";
        let sources = Sources::new(pairs(&[("listen", "127.0.0.1:3"), ("data-dir", "/d")]))
            .with_environment(pairs(&[
                ("MAINBRELLA_LISTEN", "127.0.0.1:2"),
                ("MAINBRELLA_POOL_SIZE", "5"),
                ("MAINBRELLA_ACCEL", ""),
            ]))
            .with_file("/etc/m.toml", file)
            .expect("a table");
        let c = ServerConfig::from_sources(&sources).expect("valid");
        assert_eq!((c.listen.port(), c.pool_size, c.accel), (3, 5, Accel::Tcg));
    }

    #[test]
    fn all_mistakes_are_reported_at_once_and_each_names_its_place() {
        let sources = Sources::new(pairs(&[("listen", "here"), ("data-dir", "/d")]))
            .with_environment(pairs(&[("MAINBRELLA_POOL_SIZE", "many"), ("MAINBRELLA_DATABASE", "mysql://x:hush@y")]))
            .with_file("/etc/m.toml", "accel = \"gpu\"\nmax-machines = 4\nfoo = 1\nidle_timeout_seconds = 2\n")
            .expect("a table");
        let e = ServerConfig::from_sources(&sources).expect_err("six mistakes");
        let text = e.to_string();
        for part in [
            "listen (--listen)",
            "pool-size (MAINBRELLA_POOL_SIZE)",
            "database (MAINBRELLA_DATABASE)",
            "accel (/etc/m.toml)",
            "max-machines is written max_machines",
            "foo (/etc/m.toml): there is no such key",
            "idle-timeout-seconds",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert_eq!(e.0.len(), 7);
        assert!(!text.contains("hush"), "values may be secrets");
    }

    #[test]
    fn a_broken_file_is_told_by_line_without_quoting_it() {
        let e = Sources::new([])
            .with_file("/etc/m.toml", "accel = \"tcg\"\ndatabase = postgres://u:hush@h\n")
            .expect_err("not TOML");
        assert!(e.to_string().contains("line 2") && !e.to_string().contains("hush"), "{e}");
        assert!(Sources::new([]).with_file("/f", "[section]\na = 1\n").is_err());
    }

    #[test]
    fn secrets_do_not_show_in_debug_output() {
        let sources = Sources::new(pairs(&[
            ("data-dir", "/d"),
            ("database", "postgres://u:hush@h/db"),
            ("idle-timeout-seconds", "60"),
        ]));
        let c = ServerConfig::from_sources(&sources).expect("valid");
        assert_eq!(c.idle_timeout, Some(Duration::from_secs(60)));
        assert!(!format!("{c:?} {sources:?}").contains("hush"));
    }

    #[test]
    fn keys_are_named_alike_everywhere() {
        for k in KEYS {
            assert_eq!(k.env, format!("MAINBRELLA_{}", k.name.to_uppercase().replace('-', "_")), "{}", k.name);
            assert!(k.help.ends_with('.') && !k.placeholder.is_empty(), "{}", k.name);
        }
    }
}
