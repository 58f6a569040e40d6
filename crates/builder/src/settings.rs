//! What a machine is told of its commands, in files of its own.

use std::io;

use bytes::Bytes;
use futures::StreamExt as _;
use mainbrella_engine::EngineError;
use mainbrella_recipe::Settings;
use mainbrella_tree::{Archive, Meta};

use crate::ground::{Machine, NodeKind};

/// Where the guest agent looks, from the root.
const COMMANDS: &str = "etc/mainbrella/commands";
const USER: &str = "etc/mainbrella/user";
const LOGS: &str = "var/log";
const PROFILES: &str = "/etc/profile.d";
const PROFILE: &str = "etc/profile.d/zz-image-path.sh";

/// The directory, then the variables, each ended by a NUL. At the root nothing is said of the directory: commands then begin
/// where those of every machine do.
fn commands(settings: &Settings) -> Vec<u8> {
    let workdir = Some(settings.workdir.as_str()).filter(|dir| *dir != "/").unwrap_or_default();
    let mut out = format!("{workdir}\0");
    for (name, value) in &settings.env {
        out.push_str(&format!("{name}={value}\0"));
    }
    out.into_bytes()
}

/// Writes what machines of the template are set to; the last thing that is done in the machine.
pub(crate) async fn write(machine: &dyn Machine, settings: &Settings) -> Result<(), EngineError> {
    let file = Meta { mode: 0o644, uid: 0, gid: 0, mtime: 0 };
    let mut archive = Archive::default();
    archive.directory("etc/mainbrella", Meta { mode: 0o755, ..file });
    // Where the start command's output goes; small images have no such place.
    if machine.look(&format!("/{LOGS}")).await?.is_none() {
        archive.directory(LOGS, Meta { mode: 0o755, ..file });
    }
    let mut put = |path: &str, text: &[u8]| {
        archive.file(path, text.len() as u64, file);
        archive.content(text);
        archive.pad(text.len() as u64);
    };
    put(COMMANDS, &commands(settings));
    if let Some(user) = &settings.user {
        put(USER, user.as_bytes());
    }
    // Login shells begin with a search path of their own: the template's is set again after that.
    let profiles = machine.look(PROFILES).await?.is_some_and(|node| node.kind == NodeKind::Directory);
    if let Some(path) = settings.env.get("PATH").filter(|_| profiles) {
        put(PROFILE, format!("export PATH='{}'\n", path.replace('\'', "'\\''")).as_bytes());
    }
    archive.end();
    if settings.user.is_none() {
        machine.remove(&format!("/{USER}")).await?;
    }
    let piece: io::Result<Bytes> = Ok(archive.take().into());
    machine.unpack("/", futures::stream::iter([piece]).boxed()).await
}
