//! From the kernel's hand-over to a serving agent, as PID 1 of a machine.
//!
//! The initramfs holds the agent as `/init`, `/modules/order` and the modules it names; nothing else. The root is an
//! overlay: the disk with serial `root` (erofs) below, the one with serial `data` (ext4) above.
//!
//! With `mainbrella.disk=later` on the kernel's command line the agent serves before the second one is mounted, and mounts
//! it when it is first told who it is: what is on that disk may then be another machine's than the one that was booted.

mod disks;
mod grow;
mod idle;
mod later;
mod modules;
mod network;
mod root;
mod system;

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::{Agent, AgentOptions, Authority, Defaults, ReapMode, Reaper, UserCgroup, port};

pub use later::PendingRoot;

/// Name of the port hosts come through.
const PORT: &str = "agent";
/// Longest wait for a device that a module just brought.
const DEVICE_MOST: Duration = Duration::from_secs(10);

/// What stopped a boot, and where.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct BootError {
    what: String,
    source: io::Error,
}

/// Names the step an error belongs to.
trait Step<T> {
    fn step(self, what: impl Into<String>) -> Result<T, BootError>;
}

impl<T, E: Into<io::Error>> Step<T> for Result<T, E> {
    fn step(self, what: impl Into<String>) -> Result<T, BootError> {
        self.map_err(|error| BootError { what: what.into(), source: error.into() })
    }
}

/// Says something on the console.
fn say(text: &str) {
    use std::io::Write;
    // Nobody may listen; a console that fails is no reason to stop.
    let _ = writeln!(io::stderr(), "mainbrella-guest: {text}");
}

/// Boots the machine and serves hosts for ever.
///
/// # Errors
/// When the machine cannot be made usable. What is only a pity is said on the console instead.
pub fn run() -> Result<(), BootError> {
    root::mount_early()?;
    system::use_console();
    modules::load(Path::new("/modules")).step("modules")?;
    let lower = disks::wait_for("root", DEVICE_MOST).step("the disk with serial `root`")?;
    let upper = disks::find("data").step("the disk with serial `data`")?;
    root::mount_lower(&lower)?;
    root::mount_cgroups()?;
    let disk = PendingRoot::new(upper);
    let (pending, defaults) = if later::is_asked_for() {
        // Those of the template, until its root is entered.
        (Some(disk), Defaults::of(Path::new(root::LOWER)))
    } else {
        (None, disk.enter()?)
    };
    idle::settle();
    let cgroup = UserCgroup::create(Path::new("/sys/fs/cgroup"), "user").step("the cgroup `user`")?;

    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(8)
        .thread_keep_alive(Duration::from_secs(1))
        .thread_stack_size(256 * 1024)
        .build()
        .step("the runtime")?;
    runtime.block_on(async {
        let reaper = Reaper::start(ReapMode::All).step("SIGCHLD")?;
        let agent =
            Agent::new(AgentOptions { authority: Authority::Machine, reaper, cgroup: Some(cgroup), pending, defaults });
        let path = wait_for_port(DEVICE_MOST).step("the virtio port `agent`")?;
        let opened = port::open(&path).step(path.display().to_string())?;
        println!("mainbrella-guest ready");
        port::serve_port(opened, agent.service()).await.step("the virtio port `agent`")
    })
}

fn wait_for_port(most: Duration) -> io::Result<std::path::PathBuf> {
    wait_for(most, || port::find(PORT))
}

/// Asks until there is an answer.
fn wait_for<T>(most: Duration, ask: impl Fn() -> io::Result<Option<T>>) -> io::Result<T> {
    let until = Instant::now() + most;
    loop {
        if let Some(found) = ask()? {
            return Ok(found);
        }
        if Instant::now() > until {
            return Err(io::Error::new(io::ErrorKind::NotFound, format!("did not appear within {most:?}")));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
