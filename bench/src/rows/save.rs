//! Machines saved, and others started from what was saved. The floor is a plain durable write of as many bytes to the same file
//! system; for starting from one, a plain create of the driver in the same run.

use std::time::{Duration, Instant};

use mainbrella_engine::driver::{Driver as _, LaunchOrder, SaveOrder};
use mainbrella_types::{EgressPolicy, GenerationKey, SizeClass, SnapshotKey, SnapshotKind};

use super::{milliseconds, snapshot};
use crate::table::{Row, Target};
use crate::world::{Need, Rig, World, template};
use crate::{Fault, guest};

/// Millions of bytes written to the disk before each save.
const WRITTEN: u64 = 20;
const SIZE: SizeClass = SizeClass::Small;

/// Until the agent has answered and mounted its disk.
async fn start(rig: &Rig, snapshot: Option<SnapshotKey>) -> Result<(GenerationKey, Duration), Fault> {
    let key = GenerationKey::new(uuid::Uuid::now_v7());
    let order = LaunchOrder {
        key,
        template: template(),
        size: SIZE,
        egress: EgressPolicy::Off.into(),
        snapshot,
        disk_only: false,
    };
    let begun = Instant::now();
    let machine = rig.driver.launch(&order).await?;
    let client = guest::attach(&*machine).await?;
    guest::configure(&client, &key).await?;
    let took = begun.elapsed();
    client.close();
    Ok((key, took))
}

pub(super) async fn run(world: &World, rows: &mut Vec<Row>) -> Result<(), Fault> {
    let rig = world.rig(Need::Driver)?;
    let count = world.scale.snapshots;
    for kind in [SnapshotKind::Workspace, SnapshotKind::Full] {
        let (mut still, mut saved, mut floor, mut started, mut fresh) = (vec![], vec![], vec![], vec![], vec![]);
        for n in 0..count {
            let machine = rig.launch_sized(SIZE, EgressPolicy::Off).await?;
            let client = guest::attach(&*machine.instance).await?;
            guest::configure(&client, &machine.key).await?;
            let write = format!("head -c {WRITTEN}000000 /dev/urandom > /root/x && sync");
            guest::run(&client, &["/bin/sh", "-c", &write]).await?;
            client.close();
            let order = SaveOrder { snapshot: SnapshotKey::new(uuid::Uuid::now_v7()), kind };
            let begun = Instant::now();
            let receipt = rig.driver.save(&machine.key, &order).await?.durable.await?;
            saved.push(begun.elapsed());
            still.push(Duration::from_millis(receipt.still_ms));
            floor.push(snapshot::plain(rig.dir.path(), receipt.memory_bytes + receipt.disk_bytes, true)?.0);
            rig.driver.destroy(&machine.key).await?;
            // The first of its kind freezes what it starts from.
            let (first, _) = start(rig, Some(order.snapshot)).await?;
            let (again, took) = start(rig, Some(order.snapshot)).await?;
            let (plain, beside) = start(rig, None).await?;
            started.push(took);
            fresh.push(beside);
            for key in [first, again, plain] {
                rig.driver.destroy(&key).await?;
            }
            rig.driver.forget(&order.snapshot).await?;
            crate::progress("save", n + 1, count);
        }
        let mut row = |what: String, times: &[Duration], beside: Option<(&'static str, &[Duration])>| {
            let beside = beside.map(|(name, times)| Ok::<_, Fault>((name, milliseconds(times)?))).transpose()?;
            rows.push(Row { group: "save", what, measured: milliseconds(times)?, beside, target: Target::default() });
            Ok::<_, Fault>(())
        };
        row(format!("save {kind}: machine stands still, {WRITTEN} MB written"), &still, None)?;
        row(format!("save {kind}: until it is durable"), &saved, Some(("plain durable write", &floor)))?;
        row(format!("start from {kind} → agent configured"), &started, Some(("plain create", &fresh)))?;
    }
    Ok(())
}
