//! Creating a machine: at the driver and through the API, with and without a waiting VMM, beside a bare restore. One of each
//! in turn, so that whatever else the host does meets all of them.

use std::time::{Duration, Instant};

use mainbrella_engine::driver::Driver as _;
use mainbrella_engine::microvm::MicroVmConfig;
use mainbrella_tests::{Machine, Service};

use super::{milliseconds, refused};
use crate::table::{Row, Samples, Target};
use crate::world::{Need, Rig, SIZE, World, create, stocked, template};
use crate::{Fault, bare, guest};

/// The moments of one create.
#[derive(Default)]
struct Times {
    answered: Vec<Duration>,
    first: Vec<Duration>,
}

pub(super) async fn run(world: &World, rows: &mut Vec<Row>) -> Result<(), Fault> {
    let (cold, warm) = (world.rig(Need::Driver)?, world.rig(Need::WarmDriver)?);
    let (service, warm_service) = (world.service(Need::Service)?, world.service(Need::WarmService)?);
    let frozen = cold.driver.ready(&template(), SIZE).await.ok_or("the template is not frozen")?;
    let report = cold.driver.report();
    let accelerator = report.accelerator.ok_or("the driver names no accelerator")?;
    let qemu = MicroVmConfig::new(cold.dir.path().to_owned()).qemu;
    let (mut restored, mut bare_answered) = (Vec::new(), Vec::new());
    let mut times: [Times; 4] = Default::default();
    // The first of each warms caches of the host and is not counted.
    for n in 0..=world.scale.creates {
        let one = bare::restore(cold.dir.path(), &qemu, &frozen, accelerator, report.jail.seccomp).await?;
        let results = [
            by_driver(cold).await?,
            {
                warm.stocked().await?;
                by_driver(warm).await?
            },
            by_api(service).await?,
            {
                stocked(warm_service, "python").await?;
                by_api(warm_service).await?
            },
        ];
        if n == 0 {
            continue;
        }
        crate::progress("create", n, world.scale.creates);
        restored.push(one.restored);
        bare_answered.push(one.answered);
        for (all, (answered, first)) in times.iter_mut().zip(results) {
            all.answered.push(answered);
            all.first.push(first);
        }
        // The waiting VMMs get ready now, not while the next bare one is measured.
        warm.stocked().await?;
        stocked(warm_service, "python").await?;
    }
    let floor = milliseconds(&restored)?;
    let mut row =
        |what: &str, times: &[Duration], beside: Option<(&'static str, &Samples)>, target| -> Result<(), Fault> {
            rows.push(Row {
                group: "create",
                what: what.to_owned(),
                measured: milliseconds(times)?,
                beside: beside.map(|(what, samples)| (what, samples.clone())),
                target,
            });
            Ok(())
        };
    let bare = Some(("bare QEMU start and restore", &floor));
    let [cold, warm, api, warm_api] = &times;
    row("bare QEMU → agent answers, no jail", &bare_answered, bare, Target::default())?;
    row(
        "create → agent answers, no waiting VMM",
        &cold.answered,
        bare,
        Target { value: Some(60.0), ratio: Some(1.6) },
    )?;
    row("create → agent answers, waiting VMM", &warm.answered, bare, Target::value(25.0))?;
    row("create → first `true` finished, no waiting VMM", &cold.first, None, Target::value(150.0))?;
    row("create → first `true` finished, waiting VMM", &warm.first, None, Target::value(150.0))?;
    row("create through the API, no waiting VMM", &api.answered, bare, Target::default())?;
    row("create through the API, waiting VMM", &warm_api.answered, bare, Target::default())?;
    row("create through the API → first `true`, no waiting VMM", &api.first, None, Target::value(150.0))?;
    row("create through the API → first `true`, waiting VMM", &warm_api.first, None, Target::value(150.0))
}

async fn by_driver(rig: &Rig) -> Result<(Duration, Duration), Fault> {
    let start = Instant::now();
    let machine = rig.launch().await?;
    let client = guest::attach(&*machine.instance).await?;
    let answered = start.elapsed();
    guest::configure(&client, &machine.key).await?;
    guest::run(&client, &["true"]).await?;
    let first = start.elapsed();
    client.close();
    rig.driver.destroy(&machine.key).await?;
    Ok((answered, first))
}

async fn by_api(service: &Service) -> Result<(Duration, Duration), Fault> {
    let start = Instant::now();
    let machine = create(service).await?;
    let answered = start.elapsed();
    let out = machine.run(&Machine::argv_order(&["true"])).await.map_err(refused("the first `true`"))?;
    let first = start.elapsed();
    if out.raw.exit_code != 0 {
        return Err(format!("`true` ended with {}", out.raw.exit_code).into());
    }
    machine.client.stop(&machine.name).await.map_err(refused("stop"))?;
    Ok((answered, first))
}
