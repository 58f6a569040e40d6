//! Machines paused, resumed and forked, with different amounts of memory changed, in a small machine and in a large one. The
//! floor is what nobody can leave out: a plain write of as many bytes to the same file system, and a bare QEMU that saves or
//! loads its devices' state; both in turn with the rest.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use mainbrella_engine::driver::{Driver as _, ForkOrder, Instance};
use mainbrella_engine::microvm::MicroVmConfig;
use mainbrella_types::{EgressPolicy, GenerationKey, SizeClass};

use super::memory::{SETTLE, unique_mebibytes};
use super::{milliseconds, some};
use crate::table::{Row, Target, Unit};
use crate::world::{Launched, Need, Rig, World, template};
use crate::{Fault, bare, guest};

/// Machines of 1 GiB and of 4 GiB.
const SIZES: [SizeClass; 2] = [SizeClass::Small, SizeClass::Large];
/// Millions of bytes that a machine changes beside what every machine does.
const CHANGED: [u64; 3] = [10, 60, 500];
/// What pause and resume are measured with.
const MIDDLE: u64 = 60;
/// Children of the largest fork.
const MANY: usize = 8;
/// Forks of one machine: its disk gets a layer with each.
const FORKS_EACH: usize = 4;

/// Seconds of a plain write of `bytes` into a new file of `folder`, and of reading it again.
pub(super) fn plain(folder: &Path, bytes: u64, durable: bool) -> Result<(Duration, Duration), Fault> {
    let piece: Vec<u8> = (0..1u32 << 20).map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
    let path = folder.join("plain");
    let start = Instant::now();
    let mut file = File::create(&path)?;
    let mut left = bytes;
    while left > 0 {
        let n = left.min(piece.len() as u64);
        file.write_all(&piece[..usize::try_from(n)?])?;
        left -= n;
    }
    if durable {
        file.sync_all()?;
    }
    let written = start.elapsed();
    let start = Instant::now();
    let (mut file, mut room) = (File::open(&path)?, vec![0; piece.len()]);
    while file.read(&mut room)? > 0 {}
    let read = start.elapsed();
    std::fs::remove_file(path)?;
    Ok((written, read))
}

/// What one kind of machine took.
#[derive(Default)]
struct Times {
    still: Vec<Duration>,
    still_floor: Vec<Duration>,
    child: Vec<Duration>,
    child_floor: Vec<Duration>,
    own_bytes: u64,
}

struct Ground<'a> {
    rig: &'a Rig,
    size: SizeClass,
}

impl Ground<'_> {
    async fn bare(&self) -> Result<bare::Bare, Fault> {
        let frozen = self.rig.driver.ready(&template(), self.size).await.ok_or("the template is not frozen")?;
        let report = self.rig.driver.report();
        let accelerator = report.accelerator.ok_or("the driver names no accelerator")?;
        let dir = self.rig.dir.path();
        let qemu = MicroVmConfig::new(dir.to_owned()).qemu;
        bare::restore(dir, &qemu, &frozen, accelerator, report.jail.seccomp).await
    }

    /// A machine that has changed this much.
    async fn machine(&self, megabytes: u64) -> Result<Launched, Fault> {
        let machine = self.rig.launch_sized(self.size, EgressPolicy::Off).await?;
        let client = guest::attach(&*machine.instance).await?;
        guest::configure(&client, &machine.key).await?;
        // One random piece, many times: random enough to be no hole, and soon made.
        let text = format!(
            "import os\npiece = os.urandom(1000000)\nwith open('/dev/shm/changed', 'wb') as f:\n    \
             for _ in range({megabytes}):\n        f.write(piece)\n"
        );
        guest::run(&client, &["python3", "-c", &text]).await?;
        client.close();
        Ok(machine)
    }

    async fn forks(&self, megabytes: u64, count: usize) -> Result<Times, Fault> {
        let mut times = Times::default();
        let mut machine = self.machine(megabytes).await?;
        for n in 0..count {
            if n > 0 && n % FORKS_EACH == 0 {
                self.rig.driver.destroy(&machine.key).await?;
                machine = self.machine(megabytes).await?;
            }
            let (still, answered, bytes) = self.fork(&machine.key, 1).await?;
            let bare = self.bare().await?;
            let (written, read) = plain(self.rig.dir.path(), bytes, false)?;
            times.still.push(still);
            times.still_floor.push(written + bare.saved);
            times.child.push(answered);
            times.child_floor.push(written + bare.saved + read + bare.answered);
            times.own_bytes = bytes;
        }
        self.rig.driver.destroy(&machine.key).await?;
        Ok(times)
    }

    /// How long the source stood still, and how long it was until all children had answered.
    async fn fork(&self, source: &GenerationKey, children: usize) -> Result<(Duration, Duration, u64), Fault> {
        let orders = orders(children);
        let start = Instant::now();
        let forked = self.rig.driver.fork(source, &orders).await?;
        let children: Vec<Box<dyn Instance>> = forked.children.into_iter().collect::<Result<_, _>>()?;
        let answers = children.iter().map(|child| guest::attach(&**child));
        let clients = futures::future::try_join_all(answers).await?;
        let answered = start.elapsed();
        clients.iter().for_each(mainbrella_guest_protocol::GuestClient::close);
        drop(children);
        self.destroy(&orders).await?;
        Ok((Duration::from_millis(forked.still_ms), answered, forked.memory_bytes))
    }

    /// Memory that the source has for itself, and what each of its children has when it idles after one `true`, MiB.
    async fn unique(&self, source: &GenerationKey, children: usize) -> Result<(f64, Vec<f64>), Fault> {
        let orders = orders(children);
        let forked = self.rig.driver.fork(source, &orders).await?;
        for (child, order) in forked.children.into_iter().zip(&orders) {
            let child = child?;
            let client = guest::attach(&*child).await?;
            guest::configure(&client, &order.key).await?;
            guest::run(&client, &["true"]).await?;
            client.close();
        }
        tokio::time::sleep(SETTLE).await;
        let of = |key: &GenerationKey| unique_mebibytes(self.rig.driver.vmm_pid(key).ok_or("a machine is gone")?);
        let values = orders.iter().map(|order| of(&order.key)).collect::<Result<Vec<f64>, Fault>>()?;
        let source = of(source)?;
        self.destroy(&orders).await?;
        Ok((source, values))
    }

    async fn destroy(&self, orders: &[ForkOrder]) -> Result<(), Fault> {
        for order in orders {
            self.rig.driver.destroy(&order.key).await?;
        }
        Ok(())
    }
}

fn orders(children: usize) -> Vec<ForkOrder> {
    let order = |_| ForkOrder { key: GenerationKey::new(uuid::Uuid::now_v7()), egress: EgressPolicy::Off.into() };
    (0..children).map(order).collect()
}

fn mebibytes(bytes: u64) -> u64 {
    bytes >> 20
}

pub(super) async fn run(world: &World, rows: &mut Vec<Row>) -> Result<(), Fault> {
    let rig = world.rig(Need::Driver)?;
    for size in SIZES {
        rig.driver.freeze(&template(), size).await?;
    }
    let count = world.scale.snapshots;
    let mut row =
        |what: String, times: &[Duration], beside: (&'static str, &[Duration]), target| -> Result<(), Fault> {
            let beside = Some((beside.0, milliseconds(beside.1)?));
            rows.push(Row { group: "snapshot", what, measured: milliseconds(times)?, beside, target });
            Ok(())
        };
    let ground = Ground { rig, size: SIZES[0] };
    let (mut paused, mut paused_floor, mut resumed, mut resumed_floor) = (vec![], vec![], vec![], vec![]);
    let machine = ground.machine(MIDDLE).await?;
    let mut own = 0;
    for n in 0..count {
        let start = Instant::now();
        let receipt = rig.driver.pause(&machine.key).await?;
        paused.push(start.elapsed());
        let start = Instant::now();
        let back = rig.driver.resume(&machine.key, &EgressPolicy::Off.into()).await?;
        let client = guest::attach(&*back).await?;
        resumed.push(start.elapsed());
        client.close();
        let bare = ground.bare().await?;
        let (written, read) = plain(rig.dir.path(), receipt.memory_bytes, true)?;
        paused_floor.push(written + bare.saved);
        resumed_floor.push(read + bare.answered);
        own = receipt.memory_bytes;
        crate::progress("snapshot", n + 1, count);
    }
    rig.driver.destroy(&machine.key).await?;
    let own = mebibytes(own);
    let writes = "plain durable write, and bare QEMU saves";
    row(
        format!("pause, 1 GiB machine with {own} MiB of its own"),
        &paused,
        (writes, &paused_floor),
        Target::default(),
    )?;
    let reads = "plain read, and bare QEMU answers";
    row(format!("resume → agent answers, {own} MiB"), &resumed, (reads, &resumed_floor), Target::default())?;
    for size in SIZES {
        let ground = Ground { rig, size };
        let gib = size.spec().memory_mib / 1024;
        for megabytes in CHANGED {
            let times = ground.forks(megabytes, count).await?;
            let own = mebibytes(times.own_bytes);
            let target = if megabytes == MIDDLE { Target::value(50.0) } else { Target::default() };
            let what =
                format!("fork: source stands still, {megabytes} MB changed ({own} MiB of its own), {gib} GiB machine");
            row(what, &times.still, ("plain write, and bare QEMU saves", &times.still_floor), target)?;
            if megabytes == MIDDLE {
                let floor = ("the same, plain read, and bare QEMU answers", &*times.child_floor);
                row(
                    format!("fork → child's agent answers, {gib} GiB machine"),
                    &times.child,
                    floor,
                    Target::default(),
                )?;
            }
        }
    }
    let (mut eight, mut floor) = (vec![], vec![]);
    for n in 0..count.div_ceil(3) {
        let machine = ground.machine(MIDDLE).await?;
        let (_, answered, bytes) = ground.fork(&machine.key, MANY).await?;
        rig.driver.destroy(&machine.key).await?;
        let mut sum = plain(rig.dir.path(), bytes, false)?.0;
        for child in 0..MANY {
            let bare = ground.bare().await?;
            sum += plain(rig.dir.path(), bytes, false)?.1 + bare.answered;
            if child == 0 {
                sum += bare.saved;
            }
        }
        eight.push(answered);
        floor.push(sum);
        crate::progress("snapshot, many children", n + 1, count.div_ceil(3));
    }
    let what = format!("fork of {MANY} → all agents answer, 1 GiB machine, {MIDDLE} MB changed");
    row(what, &eight, ("one write and save, and eight reads and answers in turn", &floor), Target::default())?;
    let machine = ground.machine(MIDDLE).await?;
    let (source, children) = ground.unique(&machine.key, MANY).await?;
    rig.driver.destroy(&machine.key).await?;
    rows.push(Row {
        group: "snapshot",
        what: format!("unique memory of each of {MANY} idle children, {MIDDLE} MB changed"),
        measured: some(Unit::Mebibytes, children)?,
        beside: Some(("their source", some(Unit::Mebibytes, vec![source])?)),
        target: Target::default(),
    });
    Ok(())
}
