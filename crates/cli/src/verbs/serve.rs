//! `mainbrella serve`: the service.

use clap::{Arg, ArgMatches, Command};
use mainbrella_server::ServerConfig;
use mainbrella_server::config::KEYS;

use crate::context::Context;
use crate::failure::{Exit, Failure};

/// Serve machines from this host.
#[derive(Clone, Debug, Default)]
pub struct Args {
    flags: Vec<(String, String)>,
}

/// The key that every verb has anyway.
const EVERYWHERE: &str = "data-dir";

impl clap::FromArgMatches for Args {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut args = Self::default();
        args.update_from_arg_matches(matches)?;
        Ok(args)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        let given = |name: &str| matches.try_get_one::<String>(name).ok().flatten().cloned();
        self.flags = KEYS
            .iter()
            .filter(|k| k.name != EVERYWHERE)
            .filter_map(|k| Some((k.name.to_owned(), given(k.name)?)))
            .collect();
        Ok(())
    }
}

impl clap::Args for Args {
    fn augment_args(mut command: Command) -> Command {
        command = command
            .about("Serve machines from this host")
            .long_about(
                "Serve machines from this host.\n\nEvery option can also stand in the environment or in the configuration \
                 file (TOML, `_` for `-`). An option on the command line goes before the environment, and that before the file.",
            );
        for key in KEYS.iter().filter(|k| k.name != EVERYWHERE) {
            let default = if key.default.is_empty() { String::new() } else { format!(" [default: {}]", key.default) };
            command = command.arg(Arg::new(key.name).long(key.name).value_name(key.placeholder).help(format!(
                "{}{default} [env: {}]",
                key.help.trim_end_matches('.'),
                key.env
            )));
        }
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// Serves until told to end.
pub fn run(context: &Context, args: &Args) -> Result<u8, Failure> {
    let mut flags = args.flags.clone();
    if let Some(dir) = &context.global.data_dir {
        let dir = dir.to_str().ok_or_else(|| Failure::usage("the path of the data directory must be UTF-8"))?;
        flags.push((EVERYWHERE.to_owned(), dir.to_owned()));
    }
    let config = ServerConfig::load(flags).map_err(|e| Failure::usage(e.to_string()))?;
    mainbrella_server::logging::init(config.log_format, &config.log_filter);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::io("starting the runtime", &e))?;
    runtime.block_on(mainbrella_server::run(config)).map_err(|e| {
        let text = e.to_string();
        let (message, hint) = text.split_once("; ").unwrap_or((&text, ""));
        Failure::new(Exit::Failed, "start_failed", message.to_owned()).hint(hint.to_owned())
    })?;
    Ok(0)
}
