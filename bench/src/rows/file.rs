//! A large file through the API, beside the raw channel: the same bytes through the same kind of virtio port and agent, with
//! a bare client instead of the service. Both in turn, the order changing, on a machine each.

use std::time::{Duration, Instant};

use bytes::Bytes;
use mainbrella_guest_protocol::GuestClient;
use mainbrella_tests::{Machine, Service};

use super::{refused, some};
use crate::table::{Row, Target, Unit};
use crate::world::{Need, World, create};
use crate::{Fault, guest};

const PATH: &str = "/root/bench.bin";
/// What a client hands over at once.
const PIECE: usize = 256 * 1024;

pub(super) async fn run(world: &World, rows: &mut Vec<Row>) -> Result<(), Fault> {
    let rig = world.rig(Need::Driver)?;
    let service = world.service(Need::Service)?;
    let launched = rig.launch().await?;
    let client = guest::attach(&*launched.instance).await?;
    guest::configure(&client, &launched.key).await?;
    let machine = create(service).await?;
    let length = world.scale.file;
    let piece = noise()?;
    let (mut raw_writes, mut raw_reads, mut api_writes, mut api_reads) = (vec![], vec![], vec![], vec![]);
    let (mut write_growth, mut read_growth) = (Vec::new(), Vec::new());
    let total = world.scale.transfers * 4;
    for n in 0..world.scale.transfers {
        let at = n * 4;
        let step = |done: usize| crate::progress("file", at + done, total);
        let (raw, api) = if n % 2 == 0 {
            let raw = raw(&client, length, &piece).await?;
            step(2);
            (raw, through_api(service, &machine, length, &piece).await?)
        } else {
            let api = through_api(service, &machine, length, &piece).await?;
            step(2);
            (raw(&client, length, &piece).await?, api)
        };
        step(4);
        let rate = |took: Duration| length as f64 / f64::from(1 << 20) / took.as_secs_f64();
        raw_writes.push(rate(raw.0));
        raw_reads.push(rate(raw.1));
        api_writes.push(rate(api.write.0));
        api_reads.push(rate(api.read.0));
        write_growth.push(api.write.1);
        read_growth.push(api.read.1);
    }
    let size = if length >= 1 << 30 { format!("{} GiB", length >> 30) } else { format!("{} MiB", length >> 20) };
    for (what, api, raw) in [("write", api_writes, raw_writes), ("read", api_reads, raw_reads)] {
        rows.push(Row {
            group: "file",
            what: format!("{what} a file of {size} through the API"),
            measured: some(Unit::MebibytesPerSecond, api)?,
            beside: Some(("raw channel", some(Unit::MebibytesPerSecond, raw)?)),
            target: Target::ratio(0.8),
        });
    }
    for (what, growth) in [("writing", write_growth), ("reading", read_growth)] {
        rows.push(Row {
            group: "file",
            what: format!("growth of the service's resident memory while {what} it"),
            measured: some(Unit::Mebibytes, growth)?,
            beside: None,
            target: Target::value(16.0),
        });
    }
    Ok(())
}

/// Bytes that nothing on the way could make shorter.
fn noise() -> Result<Vec<u8>, Fault> {
    let mut piece = vec![0u8; PIECE];
    getrandom::fill(&mut piece)?;
    Ok(piece)
}

async fn raw(client: &GuestClient, length: u64, piece: &[u8]) -> Result<(Duration, Duration), Fault> {
    let start = Instant::now();
    guest::write(client, PATH, length, piece).await?;
    let written = start.elapsed();
    let start = Instant::now();
    complete(guest::read(client, PATH).await?, length)?;
    let read = start.elapsed();
    guest::run(client, &["rm", PATH]).await?;
    guest::run(client, &["sync"]).await?;
    Ok((written, read))
}

/// Time and growth of the service, MiB, of each direction.
struct Both {
    write: (Duration, f64),
    read: (Duration, f64),
}

async fn through_api(service: &Service, machine: &Machine, length: u64, piece: &[u8]) -> Result<Both, Fault> {
    let bytes = Bytes::copy_from_slice(piece);
    let part = move |at: u64| bytes.slice(..usize::try_from(length - at).unwrap_or(usize::MAX).min(bytes.len()));
    let peak = Peak::begin(service.pid())?;
    let start = Instant::now();
    complete(machine.write_stream(PATH, length, part).await.map_err(refused("write"))?, length)?;
    let write = (start.elapsed(), peak.growth_mib()?);
    let peak = Peak::begin(service.pid())?;
    let start = Instant::now();
    let mut download = machine.client.read_file(&machine.name, PATH, None, None).await.map_err(refused("read"))?;
    let mut size = 0;
    while let Some(chunk) = download.chunk().await.map_err(refused("read"))? {
        size += chunk.len() as u64;
    }
    let read = (start.elapsed(), peak.growth_mib()?);
    complete(size, length)?;
    for argv in [&["rm", PATH][..], &["sync"]] {
        machine.run(&Machine::argv_order(argv)).await.map_err(refused("tidying"))?;
    }
    Ok(Both { write, read })
}

fn complete(got: u64, length: u64) -> Result<(), Fault> {
    if got == length { Ok(()) } else { Err(format!("{got} of {length} bytes went through").into()) }
}

/// The highest resident memory of a process from some moment on, as the kernel keeps it.
struct Peak {
    pid: i32,
    before_kib: u64,
}

impl Peak {
    fn begin(pid: i32) -> Result<Self, Fault> {
        // 5: forget the peak so far.
        std::fs::write(format!("/proc/{pid}/clear_refs"), "5")?;
        Ok(Self { pid, before_kib: kib(pid, "VmRSS:")? })
    }

    fn growth_mib(&self) -> Result<f64, Fault> {
        Ok(kib(self.pid, "VmHWM:")?.saturating_sub(self.before_kib) as f64 / 1024.0)
    }
}

fn kib(pid: i32, name: &str) -> Result<u64, Fault> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text.lines().find_map(|l| l.strip_prefix(name)).ok_or("the service is gone")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}
