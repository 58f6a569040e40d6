//! Configuration: one table of keys, three sources (flag, environment, file), every mistake reported at once.
//!
//! Precedence: flag, then environment variable, then file, then default. The command line builds its
//! flags from [`KEYS`], so that a key added here appears everywhere.

mod source;
mod value;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use mainbrella_engine::microvm::network::NetworkChoice;

pub use source::{ConfigErrors, Mistake, Sources, default_data_dir};
pub use value::{Accel, LogFormat};

/// One configuration key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// Its name: the flag without the dashes, and the name in the file with `_` for `-`.
    pub name: &'static str,
    /// The environment variable.
    pub env: &'static str,
    /// What a value looks like, for help texts.
    pub placeholder: &'static str,
    /// The default, as it would be written; empty: worked out when needed, see `help`.
    pub default: &'static str,
    /// One sentence.
    pub help: &'static str,
}

macro_rules! keys {
    ($($name:literal, $env:literal, $placeholder:literal, $default:literal, $help:literal;)*) => {
        /// Every key there is.
        pub const KEYS: &[Key] =
            &[$(Key { name: $name, env: $env, placeholder: $placeholder, default: $default, help: $help },)*];
    };
}

keys! {
    "config", "MAINBRELLA_CONFIG", "FILE", "", "Configuration file (TOML). Default: mainbrella.toml in the data directory, if there is one.";
    "data-dir", "MAINBRELLA_DATA_DIR", "DIR", "", "Where everything is kept. Default: /var/lib/mainbrella as root, else mainbrella in the XDG data folder.";
    "listen", "MAINBRELLA_LISTEN", "ADDR:PORT", "127.0.0.1:8787", "Address to serve on. Other machines need a TLS proxy in front of it.";
    "allowed-hosts", "MAINBRELLA_ALLOWED_HOSTS", "NAME,…", "", "Further host names under which requests may come in. On a loopback address only loopback names are accepted by default; elsewhere any name is.";
    "preview-listen", "MAINBRELLA_PREVIEW_LISTEN", "ADDR:PORT|off", "", "Address to serve previews on; off: none are issued. Default: 127.0.0.1, at the port after that of listen.";
    "preview-domain", "MAINBRELLA_PREVIEW_DOMAIN", "NAME", "localhost", "Domain below which each preview has a host name of its own; all of them must lead to the previews' address.";
    "preview-tls-cert", "MAINBRELLA_PREVIEW_TLS_CERT", "FILE", "", "Certificates for the preview domain and all names directly below it (PEM, the chain); previews are then served by TLS.";
    "preview-tls-key", "MAINBRELLA_PREVIEW_TLS_KEY", "FILE", "", "The key of these certificates (PEM).";
    "preview-public-scheme", "MAINBRELLA_PREVIEW_PUBLIC_SCHEME", "http|https", "", "Scheme of preview URLs where a proxy stands in front, which is then believed about where requests come from.";
    "preview-public-port", "MAINBRELLA_PREVIEW_PUBLIC_PORT", "N", "", "Port of preview URLs where a proxy stands in front. Default: 443 or 80, by preview-public-scheme.";
    "preview-max-connections", "MAINBRELLA_PREVIEW_MAX_CONNECTIONS", "N", "4096", "Most open connections to previews.";
    "database", "MAINBRELLA_DATABASE", "URL", "", "postgres://…, or sqlite:FILE. Default: mainbrella.sqlite in the data directory.";
    "host-name", "MAINBRELLA_HOST_NAME", "NAME", "local", "Name of this host in machine records; must differ between hosts that share a database.";
    "accel", "MAINBRELLA_ACCEL", "auto|kvm|tcg", "auto", "What executes guest instructions. auto: KVM where a trial boot with it has succeeded.";
    "pool-size", "MAINBRELLA_POOL_SIZE", "N", "1", "Waiting VMM processes for each template size in use, which make creates faster; 0 for none.";
    "machine-network", "MAINBRELLA_MACHINE_NETWORK", "auto|off|BLOCK", "auto", "How machines get a network. auto: what this host can do, with addresses from a free 10.x.0.0/16; BLOCK: from this private block, e.g. 10.99.0.0/16, four for each machine that is open; off: no machine has one.";
    "qemu", "MAINBRELLA_QEMU", "FILE", "/usr/bin/qemu-system-x86_64", "The QEMU program.";
    "guest-agent", "MAINBRELLA_GUEST_AGENT", "FILE", "", "The guest agent, a static program. Default: mainbrella-guest beside this program.";
    "max-machines", "MAINBRELLA_MAX_MACHINES", "N", "500", "Most living machines on this host.";
    "max-machines-per-project", "MAINBRELLA_MAX_MACHINES_PER_PROJECT", "N", "500", "Most living machines of one project on this host.";
    "max-snapshots-per-project", "MAINBRELLA_MAX_SNAPSHOTS_PER_PROJECT", "N", "100", "Most snapshots one project keeps, archived ones included.";
    "keep-template-versions", "MAINBRELLA_KEEP_TEMPLATE_VERSIONS", "N", "3", "Versions of one template that are kept though no tag points to them.";
    "build-cache-steps", "MAINBRELLA_BUILD_CACHE_STEPS", "N", "64", "Steps of builds that are cached, the last used ones.";
    "builds-at-once", "MAINBRELLA_BUILDS_AT_ONCE", "N", "1", "Builds carried out at once; further ones wait for their turn.";
    "max-creating", "MAINBRELLA_MAX_CREATING", "N", "64", "Most machines being made at once; further creates are refused as overloaded.";
    "idle-timeout-seconds", "MAINBRELLA_IDLE_TIMEOUT_SECONDS", "N", "0", "Idle timeout of machines whose create names none and is not persistent; 0 for none.";
    "rate-per-second", "MAINBRELLA_RATE_PER_SECOND", "N", "10000", "Requests a second of one key.";
    "rate-burst", "MAINBRELLA_RATE_BURST", "N", "10000", "Requests one key may send at once before its rate counts.";
    "auth-failures-per-minute", "MAINBRELLA_AUTH_FAILURES_PER_MINUTE", "N", "120", "Failed authentications a minute from one address before they are answered as rate_limited.";
    "max-connections", "MAINBRELLA_MAX_CONNECTIONS", "N", "4096", "Most open connections.";
    "max-requests", "MAINBRELLA_MAX_REQUESTS", "N", "4096", "Most requests in progress; further ones are refused as overloaded.";
    "shutdown-seconds", "MAINBRELLA_SHUTDOWN_SECONDS", "N", "20", "How long requests in progress may take to finish when the service is asked to end.";
    "log-format", "MAINBRELLA_LOG_FORMAT", "text|json", "text", "Form of the log on standard error.";
    "log", "MAINBRELLA_LOG", "FILTER", "info", "What is logged, e.g. `info` or `info,mainbrella_engine=debug`.";
}

/// The whole configuration, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerConfig {
    /// Where everything is kept.
    pub data_dir: PathBuf,
    /// Address to serve on.
    pub listen: SocketAddr,
    /// Further accepted host names, lower case.
    pub allowed_hosts: Vec<String>,
    /// Address to serve previews on; `None`: none are issued.
    pub preview_listen: Option<SocketAddr>,
    /// Domain below which each preview has a name, lower case.
    pub preview_domain: String,
    /// Certificates and their key, for TLS of previews.
    pub preview_tls: Option<(PathBuf, PathBuf)>,
    /// Whether callers use https, where a proxy stands in front and that is said.
    pub preview_public_https: Option<bool>,
    /// The port callers use, where a proxy stands in front.
    pub preview_public_port: Option<u16>,
    /// Most open connections to previews.
    pub preview_max_connections: u32,
    /// Database URL; `None`: the embedded one in the data directory. May hold a password: see its `Debug`.
    pub database: Option<DatabaseUrl>,
    /// Name of this host in machine records.
    pub host_name: String,
    /// What executes guest instructions.
    pub accel: Accel,
    /// Waiting VMM processes for each template size in use.
    pub pool_size: u32,
    /// How machines get a network.
    pub machine_network: NetworkChoice,
    /// QEMU's program.
    pub qemu: PathBuf,
    /// The guest agent; `None`: `mainbrella-guest` beside this program.
    pub guest_agent: Option<PathBuf>,
    /// Most living machines on this host.
    pub max_machines: u32,
    /// Most living machines of one project.
    pub max_machines_per_project: u32,
    /// Most snapshots of one project.
    pub max_snapshots_per_project: u32,
    /// Versions of one template that are kept without a tag.
    pub keep_template_versions: u32,
    /// Steps of builds that are cached.
    pub build_cache_steps: u32,
    /// Builds carried out at once.
    pub builds_at_once: u32,
    /// Most machines being made at once.
    pub max_creating: u32,
    /// Idle timeout of a create that names none; `None`: no idle timeout.
    pub idle_timeout: Option<Duration>,
    /// Requests a second of one key, at least 1.
    pub rate_per_second: u32,
    /// Burst of one key, at least 1.
    pub rate_burst: u32,
    /// Failed authentications a minute of one address, at least 1.
    pub auth_failures_per_minute: u32,
    /// Most open connections.
    pub max_connections: u32,
    /// Most requests in progress.
    pub max_requests: u32,
    /// How long requests may take to finish at the end.
    pub shutdown_grace: Duration,
    /// Form of the log.
    pub log_format: LogFormat,
    /// What is logged.
    pub log_filter: String,
}

/// A database URL. Its password does not show in `Debug` output.
#[derive(Clone, PartialEq, Eq)]
pub struct DatabaseUrl(pub String);

impl std::fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.split(':').next().unwrap_or_default())?;
        f.write_str(":…")
    }
}

impl ServerConfig {
    /// Reads flags, the environment and the file.
    ///
    /// # Errors
    /// Every mistake, each with the place it was made in.
    pub fn load(flags: impl IntoIterator<Item = (String, String)>) -> Result<Self, ConfigErrors> {
        Self::from_sources(&Sources::from_environment(flags)?)
    }

    /// What `sources` say.
    ///
    /// # Errors
    /// Every mistake, each with the place it was made in.
    pub fn from_sources(sources: &Sources) -> Result<Self, ConfigErrors> {
        let mut mistakes = sources.strangers();
        let mut read = source::Reader { sources, mistakes: &mut mistakes };
        let listen = read.parsed("listen", "an address and a port such as 127.0.0.1:8787");
        let (cert, key) =
            (read.with("preview-tls-cert", value::absolute_path), read.with("preview-tls-key", value::absolute_path));
        let (scheme, port) =
            (read.with("preview-public-scheme", value::scheme), read.with("preview-public-port", value::port));
        let config = Self {
            data_dir: sources.data_dir().unwrap_or_default(),
            listen,
            preview_listen: read.with("preview-listen", |s| value::preview_listen(s, listen)),
            preview_domain: read.with("preview-domain", value::domain),
            preview_tls: cert.clone().zip(key.clone()),
            preview_public_https: scheme,
            preview_public_port: port.or(scheme.map(|https| if https { 443 } else { 80 })),
            preview_max_connections: read.number("preview-max-connections", 1, 65_536),
            allowed_hosts: read.with("allowed-hosts", value::host_names),
            database: read.with("database", value::database),
            host_name: read.with("host-name", value::host_name),
            accel: read.with("accel", value::accel),
            pool_size: read.number("pool-size", 0, 64),
            machine_network: read.with("machine-network", value::machine_network),
            qemu: read.with("qemu", value::absolute_path).unwrap_or_default(),
            guest_agent: read.with("guest-agent", value::absolute_path),
            max_machines: read.number("max-machines", 1, 16_384),
            max_machines_per_project: read.number("max-machines-per-project", 1, 16_384),
            max_snapshots_per_project: read.number("max-snapshots-per-project", 0, 1_000_000),
            keep_template_versions: read.number("keep-template-versions", 0, 200),
            build_cache_steps: read.number("build-cache-steps", 0, 4096),
            builds_at_once: read.number("builds-at-once", 1, 16),
            max_creating: read.number("max-creating", 1, 1024),
            idle_timeout: read.with("idle-timeout-seconds", value::idle_timeout),
            rate_per_second: read.number("rate-per-second", 1, 1_000_000),
            rate_burst: read.number("rate-burst", 1, 1_000_000),
            auth_failures_per_minute: read.number("auth-failures-per-minute", 1, 1_000_000),
            max_connections: read.number("max-connections", 1, 65_536),
            max_requests: read.number("max-requests", 1, 65_536),
            shutdown_grace: Duration::from_secs(read.number("shutdown-seconds", 0, 600).into()),
            log_format: read.with("log-format", value::log_format),
            log_filter: read.with("log", value::log_filter),
        };
        if cert.is_some() != key.is_some() {
            let missing = if cert.is_some() { "preview-tls-key" } else { "preview-tls-cert" };
            mistakes.push(Mistake::new(
                missing,
                "default",
                "certificates and their key are given together or not at all",
            ));
        }
        if config.data_dir.as_os_str().is_empty() {
            mistakes.push(Mistake::new(
                "data-dir",
                "default",
                "no data directory is given and the home folder is not known",
            ));
        }
        if mistakes.is_empty() { Ok(config) } else { Err(ConfigErrors(mistakes)) }
    }
}

/// The reference page of the configuration, Markdown.
#[must_use]
pub fn reference() -> String {
    let mut page = String::from(
        "# Configuration of the service\n\n\
         <!-- Written by `cargo xtask docs` from the table of keys. -->\n\n\
         Each key can be a flag of `mainbrella serve` (`--pool-size 2`), an environment variable, or a line of the TOML file\n\
         (`pool_size = 2`; `_` for `-`). A flag goes before the environment, and that before the file. All mistakes are reported\n\
         at once.\n\n\
         | flag | environment | default | |\n|---|---|---|---|\n",
    );
    for key in KEYS {
        let default = if key.default.is_empty() { String::new() } else { format!("`{}`", key.default) };
        let placeholder = key.placeholder.replace('|', "\\|");
        page.push_str(&format!("| `--{} {placeholder}` | `{}` | {default} | {} |\n", key.name, key.env, key.help));
    }
    page
}

/// A configuration with every default and this data directory, for tests and tools.
///
/// # Panics
/// Never: a test holds every default to its own rules.
#[must_use]
pub fn defaults(data_dir: impl Into<PathBuf>) -> ServerConfig {
    let sources = Sources::new([("data-dir".to_owned(), data_dir.into().to_string_lossy().into_owned())]);
    match ServerConfig::from_sources(&sources) {
        Ok(config) => config,
        Err(e) => unreachable!("a default breaks its own rule: {e}"),
    }
}
