//! A command in a machine that ran one before: through the HTTP API and the Python SDK, beside the bare agent socket.

use std::process::Stdio;
use std::time::{Duration, Instant};

use mainbrella_tests::{Machine, Service};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::{milliseconds, refused};
use crate::table::{Row, Target};
use crate::world::{Need, World, create};
use crate::{Fault, guest};

/// Commands of each kind that are not counted.
const UNCOUNTED: usize = 5;
/// Longest wait for the SDK.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) async fn run(world: &World, rows: &mut Vec<Row>) -> Result<(), Fault> {
    let rig = world.rig(Need::Driver)?;
    let service = world.service(Need::Service)?;
    let launched = rig.launch().await?;
    let client = guest::attach(&*launched.instance).await?;
    guest::configure(&client, &launched.key).await?;
    let machine = create(service).await?;
    let order = Machine::argv_order(&["true"]);
    let mut sdk = Sdk::start(service, &machine).await?;
    let (mut bare, mut http, mut python) = (Vec::new(), Vec::new(), Vec::new());
    for n in 0..world.scale.commands + UNCOUNTED {
        let start = Instant::now();
        guest::run(&client, &["true"]).await?;
        let by_socket = start.elapsed();
        let start = Instant::now();
        machine.run(&order).await.map_err(refused("`true`"))?;
        let by_http = start.elapsed();
        let by_sdk = sdk.run().await?;
        if n >= UNCOUNTED {
            crate::progress("warm", n - UNCOUNTED + 1, world.scale.commands);
            bare.push(by_socket);
            http.push(by_http);
            python.push(by_sdk);
        }
    }
    let peer = milliseconds(&bare)?;
    for (what, times) in [("warm `true` through the HTTP API", &http), ("warm `true` through the Python SDK", &python)]
    {
        rows.push(Row {
            group: "warm",
            what: what.to_owned(),
            measured: milliseconds(times)?,
            beside: Some(("bare agent socket", peer.clone())),
            target: Target::ratio(1.3),
        });
    }
    Ok(())
}

/// A Python process that runs one command for every line it gets, and answers with the nanoseconds it took.
struct Sdk {
    to: ChildStdin,
    from: Lines<BufReader<ChildStdout>>,
    /// Ended when it is dropped.
    _process: Child,
}

const SCRIPT: &str = r#"
import os, sys, time
from mainbrella import Mainbrella
client = Mainbrella(os.environ["MAINBRELLA_API_KEY"], base_url=os.environ["MAINBRELLA_API_URL"])
sandbox = client.connect(sys.argv[1], sys.argv[2])
for _ in sys.stdin:
    start = time.perf_counter_ns()
    result = sandbox.commands.run(["true"])
    took = time.perf_counter_ns() - start
    if result.exit_code != 0:
        sys.exit(f"`true` ended with {result.exit_code}")
    print(took, flush=True)
"#;

impl Sdk {
    async fn start(service: &Service, machine: &Machine) -> Result<Self, Fault> {
        let sdk = concat!(env!("CARGO_MANIFEST_DIR"), "/../sdk/python/src");
        let mut process = Command::new("python3")
            .args(["-c", SCRIPT, &machine.name.id, &machine.name.created_at])
            .env("PYTHONPATH", sdk)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("MAINBRELLA_API_URL", service.url())
            .env("MAINBRELLA_API_KEY", service.admin_key())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let to = process.stdin.take().ok_or("no standard input")?;
        let from = BufReader::new(process.stdout.take().ok_or("no standard output")?).lines();
        Ok(Self { to, from, _process: process })
    }

    async fn run(&mut self) -> Result<Duration, Fault> {
        self.to.write_all(b"\n").await?;
        let line = tokio::time::timeout(PATIENCE, self.from.next_line()).await??;
        Ok(Duration::from_nanos(line.ok_or("the Python SDK failed, see above")?.parse()?))
    }
}
