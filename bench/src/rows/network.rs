//! Network seats: made and let go of by themselves, and what they add to a create.

use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mainbrella_engine::driver::Driver as _;
use mainbrella_net::namespace::Namespace;
use mainbrella_net::resolve::Host;
use mainbrella_net::{NetError, Seat, SeatOrder, Uplink, UplinkConfig, tap};
use mainbrella_types::EgressPolicy;

use super::milliseconds;
use crate::table::{Row, Target};
use crate::world::{Need, Rig, World};
use crate::{Fault, guest};

/// The moments of one seat.
#[derive(Default)]
struct Times {
    prepared: Vec<Duration>,
    attached: Vec<Duration>,
    gone: Vec<Duration>,
}

pub(super) async fn run(world: &World, rows: &mut Vec<Row>) -> Result<(), Fault> {
    let (plain, warm) = (world.rig(Need::WarmPlainDriver)?, world.rig(Need::WarmDriver)?);
    let policies: [EgressPolicy; 3] =
        [EgressPolicy::Off, EgressPolicy::Open, "allow-list example.org".parse().map_err(|e| format!("{e}"))?];
    let mut created: [Vec<Duration>; 4] = Default::default();
    for n in 0..=world.scale.creates {
        let mut took = vec![create(plain, EgressPolicy::Off).await?];
        for policy in &policies {
            took.push(create(warm, policy.clone()).await?);
        }
        if n > 0 {
            crate::progress("network", n, world.scale.creates);
            created.iter_mut().zip(took).for_each(|(all, one)| all.push(one));
        }
    }
    let seats = u32::try_from(world.scale.creates * 5)?;
    let seats = tokio::task::spawn_blocking(move || seats_alone(seats)).await?.map_err(|e| format!("{e}"))?;
    let (floor, seats) = seats;
    let mut row =
        |what: &str, times: &[Duration], beside: Option<(&'static str, &[Duration])>, target| -> Result<(), Fault> {
            let beside = beside.map(|(name, times)| Ok::<_, Fault>((name, milliseconds(times)?))).transpose()?;
            rows.push(Row { group: "network", what: what.to_owned(), measured: milliseconds(times)?, beside, target });
            Ok(())
        };
    let [without, off, open, listed] = &created;
    let beside = Some(("create without a network card", without.as_slice()));
    row("create → agent answers, `off`, waiting VMM", off, beside, Target::ratio(1.2))?;
    row("create → agent answers, `open`, waiting VMM", open, beside, Target::ratio(1.2))?;
    row("create → agent answers, `allow-list`, waiting VMM", listed, beside, Target::ratio(1.2))?;
    let beside = Some(("an empty namespace made by a new process", floor.as_slice()));
    row("seat: rules and link, made ahead", &seats[0].prepared, beside, Target::default())?;
    for (policy, times) in ["off", "open", "allow-list"].iter().zip(&seats) {
        row(&format!("seat: put under `{policy}`"), &times.attached, beside, Target::default())?;
    }
    for (policy, times) in ["off", "open", "allow-list"].iter().zip(&seats) {
        row(&format!("seat: end of one under `{policy}`"), &times.gone, beside, Target::default())?;
    }
    Ok(())
}

/// A create up to the first answer of the agent.
async fn create(rig: &Rig, policy: EgressPolicy) -> Result<Duration, Fault> {
    rig.stocked().await?;
    let start = Instant::now();
    let machine = rig.launch_with(policy).await?;
    let client = guest::attach(&*machine.instance).await?;
    let took = start.elapsed();
    client.close();
    rig.driver.destroy(&machine.key).await?;
    Ok(took)
}

/// What stands for a VMM: a process in a network namespace of its own.
fn vmm() -> std::io::Result<Child> {
    let mut command = Command::new("sleep");
    command.arg("600").stdin(Stdio::null()).stdout(Stdio::null());
    // SAFETY: one system call, which is allowed between fork and exec.
    unsafe {
        command.pre_exec(|| {
            rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET)?;
            Ok(())
        });
    }
    command.spawn()
}

/// Seats without machines, on a host of their own: the times of the floor, and of seats under `off`, `open`, `allow-list`.
fn seats_alone(count: u32) -> Result<(Vec<Duration>, [Times; 3]), NetError> {
    let io = |what: &'static str| move |e| NetError::Io(what, e);
    let host = Namespace::new()?;
    host.run(|| {
        let block = "10.250.0.0/16".parse().map_err(|_| NetError::Config("the block".to_owned()))?;
        let uplink = Arc::new(Uplink::open(UplinkConfig { instance: "bench".to_owned(), block })?);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(io("a runtime"))?;
        let (mut floor, mut all): (Vec<Duration>, [Times; 3]) = Default::default();
        for n in 0..=count {
            for (which, times) in all.iter_mut().enumerate() {
                let start = Instant::now();
                let mut process = vmm().map_err(io("a process"))?;
                let namespace = Namespace::of_process(i32::try_from(process.id()).unwrap_or(i32::MAX))
                    .map_err(io("its namespace"))?;
                let empty = start.elapsed();
                let held = namespace.run(|| tap::open().map_err(io("a tap")))?;
                let start = Instant::now();
                Seat::prepare(&namespace)?;
                let prepared = start.elapsed();
                let policy = match which {
                    0 => EgressPolicy::Off,
                    1 => EgressPolicy::Open,
                    _ => "allow-list example.org".parse().map_err(|e| NetError::Config(format!("{e}")))?,
                };
                let order = SeatOrder {
                    namespace,
                    uplink: Some(uplink.clone()),
                    outside: Arc::new(Host::default()),
                    log: Arc::default(),
                    secrets: Arc::default(),
                };
                let start = Instant::now();
                let seat = runtime.block_on(Seat::attach(order, policy))?;
                let attached = start.elapsed();
                let start = Instant::now();
                process.kill().and_then(|()| process.wait()).map_err(io("ending a process"))?;
                drop(held);
                runtime.block_on(seat.close());
                let gone = start.elapsed();
                // The first of each warms caches of the host and is not counted.
                if n > 0 {
                    floor.push(empty);
                    times.prepared.push(prepared);
                    times.attached.push(attached);
                    times.gone.push(gone);
                }
            }
        }
        drop(runtime);
        uplink.close()?;
        Ok((floor, all))
    })
}
