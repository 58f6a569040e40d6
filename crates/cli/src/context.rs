//! What every verb needs to know: where the service is, the key, the data directory, how to talk.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use mainbrella_client::api::Machine;
use mainbrella_client::{ApiKey, Client, DEFAULT_URL, FilesOf, MachineRef, is_loopback};
use url::Url;

use crate::failure::{Exit, Failure};
use crate::output::Output;
use crate::values::{MachineArg, Source};

/// Longest key file that is read, bytes.
const KEY_FILE_MAX: u64 = 4096;

/// Options of every verb.
#[derive(Clone, Debug, clap::Args)]
pub struct Global {
    /// Address of the service; https unless it is this machine [env: MAINBRELLA_API_URL] [default: http://127.0.0.1:8787]
    #[arg(long, global = true, value_name = "URL", help_heading = "Everywhere")]
    pub url: Option<String>,
    /// File with the API key [env: MAINBRELLA_API_KEY_FILE]. Else the key in MAINBRELLA_API_KEY, else the first key of a service on this machine
    #[arg(long, global = true, value_name = "FILE", help_heading = "Everywhere")]
    pub api_key_file: Option<PathBuf>,
    /// Where the service on this machine keeps its data [env: MAINBRELLA_DATA_DIR] [default: /var/lib/mainbrella as root, else in the XDG data folder]
    #[arg(long, global = true, value_name = "DIR", help_heading = "Everywhere")]
    pub data_dir: Option<PathBuf>,
    /// JSON for programs instead of text for people
    #[arg(long, global = true, help_heading = "Everywhere")]
    pub json: bool,
}

/// The options, and what follows from them.
#[derive(Clone, Debug)]
pub struct Context {
    /// The options.
    pub global: Global,
    /// How to talk.
    pub output: Output,
}

/// Where a key was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// In this file.
    File(PathBuf),
    /// In `MAINBRELLA_API_KEY`.
    Environment,
}

impl Context {
    /// From the options, and from the environment what they do not say.
    pub fn new(mut global: Global) -> Self {
        let variable = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty());
        global.url = global.url.or_else(|| variable("MAINBRELLA_API_URL").map(|v| v.to_string_lossy().into_owned()));
        global.api_key_file = global.api_key_file.or_else(|| variable("MAINBRELLA_API_KEY_FILE").map(PathBuf::from));
        global.data_dir = global.data_dir.or_else(|| variable("MAINBRELLA_DATA_DIR").map(PathBuf::from));
        let output = Output { json: global.json };
        Self { global, output }
    }

    /// Address of the service.
    pub fn url(&self) -> &str {
        self.global.url.as_deref().filter(|u| !u.is_empty()).unwrap_or(DEFAULT_URL)
    }

    /// The data directory of a service on this machine.
    pub fn data_dir(&self) -> Result<PathBuf, Failure> {
        let chosen = self.global.data_dir.clone().filter(|d| !d.as_os_str().is_empty());
        chosen.or_else(mainbrella_server::config::default_data_dir).ok_or_else(|| {
            Failure::usage("the home folder is not known, so there is no default data directory")
                .hint("Give one with --data-dir or MAINBRELLA_DATA_DIR.")
        })
    }

    /// The API key, from where it was found first.
    pub fn key(&self) -> Result<(String, KeySource), Failure> {
        if let Some(file) = &self.global.api_key_file {
            return Ok((read_key(file)?, KeySource::File(file.clone())));
        }
        if let Ok(key) = std::env::var("MAINBRELLA_API_KEY")
            && !key.trim().is_empty()
        {
            return Ok((key.trim().to_owned(), KeySource::Environment));
        }
        // The key of this machine's service is offered to this machine only.
        let local = Url::parse(self.url()).is_ok_and(|u| is_loopback(&u));
        let file = self.data_dir().ok().map(|d| d.join("keys").join("admin.key")).filter(|_| local);
        match file {
            Some(file) if file.exists() => Ok((read_key(&file)?, KeySource::File(file))),
            _ => Err(Failure::new(Exit::Auth, "no_key", "no API key was given").hint(
                "Set MAINBRELLA_API_KEY or --api-key-file; on the machine of the service `eval \"$(mainbrella env)\"` \
                 as the user that runs it.",
            )),
        }
    }

    /// A client with the key.
    pub fn client(&self) -> Result<Client, Failure> {
        let (key, _) = self.key()?;
        Ok(Client::new(self.url(), Some(ApiKey::new(&key)?))?)
    }

    /// The machine that is meant, and exactly which generation of it: a bare slot is looked up once.
    pub async fn resolve(&self, client: &Client, arg: &MachineArg) -> Result<MachineRef, Failure> {
        match &arg.created_at {
            Some(at) => Ok(MachineRef { id: arg.id.clone(), created_at: at.clone() }),
            None => Ok(MachineRef::from(&client.machine(&arg.id, None).await?)),
        }
    }

    /// Whose files are meant.
    pub async fn source(&self, client: &Client, arg: &Source) -> Result<Files, Failure> {
        Ok(match arg {
            Source::Machine(machine) => Files::Machine(self.resolve(client, machine).await?),
            Source::Snapshot(id) => Files::Snapshot(id.clone()),
        })
    }

    /// The machine that is meant, as it is now.
    pub async fn inspect(&self, client: &Client, arg: &MachineArg) -> Result<Machine, Failure> {
        Ok(client.machine(&arg.id, arg.created_at.as_deref()).await?)
    }
}

/// Whose files are read, as the service knows it.
pub enum Files {
    /// A generation of a machine.
    Machine(MachineRef),
    /// A snapshot.
    Snapshot(String),
}

impl Files {
    /// For the client.
    pub fn of(&self) -> FilesOf<'_> {
        match self {
            Self::Machine(machine) => FilesOf::Machine(machine),
            Self::Snapshot(id) => FilesOf::Snapshot(id),
        }
    }
}

fn read_key(path: &Path) -> Result<String, Failure> {
    let failed = |e: &std::io::Error| {
        let mut f = Failure::io(&format!("the API key file {} cannot be read", path.display()), e);
        f.exit_code = Exit::Auth;
        f.code = "no_key".to_owned();
        f.hint("Name a readable file with --api-key-file, or set MAINBRELLA_API_KEY.")
    };
    let file = File::open(path).map_err(|e| failed(&e))?;
    let open_to_others = file.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o077 != 0);
    let mut text = String::new();
    file.take(KEY_FILE_MAX).read_to_string(&mut text).map_err(|e| failed(&e))?;
    if open_to_others {
        eprintln!("warning: {} can be read by other users; `chmod 600` it", path.display());
    }
    Ok(text.trim().to_owned())
}
