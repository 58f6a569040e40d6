//! Creating a machine while many are alive, beside creating one on an empty host.

use std::time::{Duration, Instant};

use mainbrella_tests::Service;

use super::{milliseconds, refused};
use crate::Fault;
use crate::table::{Row, Target};
use crate::world::{Need, World, create};

/// Memory reckoned for one idle machine, MiB, and kept free for everything else.
const MACHINE_MIB: u64 = 80;
const RESERVE_MIB: u64 = 2048;

pub(super) async fn run(world: &World, rows: &mut Vec<Row>) -> Result<(), Fault> {
    let service = world.service(Need::Service)?;
    let fits = available_mib()?.saturating_sub(RESERVE_MIB) / MACHINE_MIB;
    let alive = world.scale.alive.min(usize::try_from(fits)?);
    if alive < world.scale.alive {
        eprintln!("bench: this host has memory for {alive} machines of the {} wanted", world.scale.alive);
    }
    if alive == 0 {
        return Err("this host has no memory for a machine".into());
    }
    measure(service, 1).await?;
    let empty = measure(service, world.scale.crowded).await?;
    for n in 0..alive {
        create(service).await?;
        crate::progress("alive", n + 1, alive);
    }
    let crowded = measure(service, world.scale.crowded).await?;
    rows.push(Row {
        group: "alive",
        what: format!("create through the API with {alive} machines alive, no waiting VMM"),
        measured: milliseconds(&crowded)?,
        beside: Some(("first creates", milliseconds(&empty)?)),
        target: Target::ratio(1.5),
    });
    Ok(())
}

async fn measure(service: &Service, count: usize) -> Result<Vec<Duration>, Fault> {
    let mut times = Vec::new();
    for _ in 0..count {
        let start = Instant::now();
        let machine = create(service).await?;
        times.push(start.elapsed());
        machine.client.stop(&machine.name).await.map_err(refused("stop"))?;
    }
    Ok(times)
}

fn available_mib() -> Result<u64, Fault> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:")).ok_or("no MemAvailable in /proc/meminfo")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? / 1024)
}
