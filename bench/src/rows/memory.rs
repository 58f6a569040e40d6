//! Memory that an idle machine has for itself.
//!
//! Measured from `/proc/PID/smaps_rollup` of its VMM: `Private_Clean` + `Private_Dirty` (+ swap), that is PSS without what is
//! shared, while several machines of the same template are alive; with one alone, the template's pages would count as its own.

use std::time::Duration;

use super::some;
use crate::table::{Row, Target, Unit};
use crate::world::{Need, Rig, World};
use crate::{Fault, guest};

/// How long a machine is left alone before it is looked at.
pub(super) const SETTLE: Duration = Duration::from_secs(5);

pub(super) async fn run(world: &World, rows: &mut Vec<Row>) -> Result<(), Fault> {
    for (need, what) in [
        (Need::Driver, "unique memory of an idle machine, after one `true`"),
        (Need::WarmDriver, "the same, from a waiting VMM"),
    ] {
        let rig = world.rig(need)?;
        let mut keys = Vec::new();
        for n in 0..world.scale.idle {
            if need == Need::WarmDriver {
                rig.stocked().await?;
            }
            keys.push(start(rig).await?);
            crate::progress("memory", n + 1, world.scale.idle);
        }
        if need == Need::WarmDriver {
            rig.stocked().await?;
        }
        tokio::time::sleep(SETTLE).await;
        let mut values = Vec::new();
        for key in &keys {
            let pid = rig.driver.vmm_pid(key).ok_or("a machine is gone")?;
            values.push(unique_mebibytes(pid)?);
        }
        rows.push(Row {
            group: "memory",
            what: what.to_owned(),
            measured: some(Unit::Mebibytes, values)?,
            beside: None,
            target: Target::value(20.0),
        });
    }
    Ok(())
}

async fn start(rig: &Rig) -> Result<mainbrella_types::GenerationKey, Fault> {
    let machine = rig.launch().await?;
    let client = guest::attach(&*machine.instance).await?;
    guest::configure(&client, &machine.key).await?;
    guest::run(&client, &["true"]).await?;
    client.close();
    Ok(machine.key)
}

/// What the process `pid` has for itself, MiB.
pub(super) fn unique_mebibytes(pid: i32) -> Result<f64, Fault> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let mut sum = 0.0;
    for name in ["Private_Clean:", "Private_Dirty:", "Swap:"] {
        let line = text.lines().find_map(|l| l.strip_prefix(name)).ok_or("smaps_rollup has another form")?;
        sum += line.trim().trim_end_matches(" kB").parse::<f64>()?;
    }
    Ok(sum / 1024.0)
}
