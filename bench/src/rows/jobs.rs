//! Managed jobs: how fast output reaches a reader through the log, a thousand short ones at once, and reading events again.

use std::time::{Duration, Instant};

use mainbrella_client::api::{CommandLine, JobEventKind, StartJob};
use mainbrella_guest_protocol::{GuestClient, pb};
use mainbrella_tests::Machine;

use super::{milliseconds, refused, some};
use crate::table::{Row, Target, Unit};
use crate::world::{Need, World, create};
use crate::{Fault, guest};

/// Output of one job, bytes: within what the log keeps whole.
const OUTPUT: u64 = 48 << 20;
/// Short jobs at once.
const SHORT: usize = 1000;
/// Records that are read again.
const RECORDS: [u64; 2] = [10, 10_000];

pub(super) async fn run(world: &World, rows: &mut Vec<Row>) -> Result<(), Fault> {
    let rig = world.rig(Need::Driver)?;
    let launched = rig.launch().await?;
    let agent = guest::attach(&*launched.instance).await?;
    guest::configure(&agent, &launched.key).await?;
    let machine = create(world.service(Need::Service)?).await?;
    throughput(world, &agent, &machine, rows).await?;
    many(&agent, &machine, rows).await?;
    replay(world, &machine, rows).await
}

fn request(id: &str, argv: &[&str]) -> pb::StartJobRequest {
    let argv = argv.iter().map(|a| a.as_bytes().to_vec()).collect();
    pb::StartJobRequest { job_id: id.into(), argv, ..Default::default() }
}

fn job(argv: &[&str]) -> StartJob {
    StartJob::new(CommandLine::Argv(argv.iter().map(|a| (*a).to_owned()).collect()))
}

/// The code with which a short job ends.
fn code(n: usize) -> i32 {
    (n % 200) as i32
}

/// Reads a job of the bare agent to its end; gives the bytes it wrote and its exit code.
async fn read_bare(agent: &GuestClient, request: pb::StartJobRequest) -> Result<(u64, i32), Fault> {
    use pb::__buffa::view::oneof::job_event::Event;
    let mut stream = agent.streams().run_job(request).await?;
    let (mut bytes, mut code) = (0, -1);
    while let Some(message) = stream.message::<pb::JobEvent>().await? {
        match &message.view().event {
            Some(Event::Output(output)) => bytes += output.data.len() as u64,
            Some(Event::Exit(exit)) => code = exit.code,
            Some(Event::NotStarted(_)) => return Err("a job of the bare agent did not start".into()),
            _ => {}
        }
    }
    Ok((bytes, code))
}

/// Follows a job of the service to its end; gives the bytes it wrote.
async fn follow(machine: &Machine, job: &str, cursor: u64) -> Result<u64, Fault> {
    let mut stream = machine.client.follow_job(&machine.name, job, cursor);
    let mut bytes = 0;
    while let Some(event) = stream.next().await.map_err(refused("events"))? {
        if let JobEventKind::Output { data_base64, .. } = event.kind {
            bytes += data_base64.len() as u64 / 4 * 3;
        }
    }
    Ok(bytes)
}

async fn throughput(world: &World, agent: &GuestClient, machine: &Machine, rows: &mut Vec<Row>) -> Result<(), Fault> {
    let rounds = world.scale.commands.clamp(2, 5);
    let argv = ["head", "-c", &OUTPUT.to_string(), "/dev/zero"];
    let (mut bare, mut logged) = (Vec::new(), Vec::new());
    for n in 0..rounds {
        let rate = |took: Duration| (OUTPUT >> 20) as f64 / took.as_secs_f64();
        let start = Instant::now();
        let (read, _) = read_bare(agent, request(&format!("flood-{n}"), &argv)).await?;
        bare.push(rate(start.elapsed()));
        let start = Instant::now();
        let started = machine.client.start_job(&machine.name, &job(&argv), None).await.map_err(refused("a job"))?;
        let followed = follow(machine, &started.job.id, 0).await?;
        logged.push(rate(start.elapsed()));
        if read != OUTPUT || followed < OUTPUT {
            return Err(format!("{read} and {followed} bytes arrived").into());
        }
        let forgotten = machine.client.forget_job(&machine.name, &started.job.id).await;
        forgotten.map_err(refused("forgetting"))?;
        crate::progress("jobs: output", n + 1, rounds);
    }
    rows.push(Row {
        group: "jobs",
        what: format!("{} MiB of job output through log and event stream", OUTPUT >> 20),
        measured: some(Unit::MebibytesPerSecond, logged)?,
        beside: Some(("bare agent socket", some(Unit::MebibytesPerSecond, bare)?)),
        target: Target::default(),
    });
    Ok(())
}

async fn many(agent: &GuestClient, machine: &Machine, rows: &mut Vec<Row>) -> Result<(), Fault> {
    let start = Instant::now();
    let script = |n: usize| format!("exit {}", code(n));
    let all = (0..SHORT).map(|n| async move {
        match read_bare(agent, request(&format!("short-{n}"), &["sh", "-c", &script(n)])).await? {
            (_, found) if found == code(n) => Ok::<(), Fault>(()),
            (_, found) => Err(format!("short job {n} of the bare agent ended with {found}").into()),
        }
    });
    futures::future::try_join_all(all).await?;
    let bare = start.elapsed();
    let start = Instant::now();
    let all = (0..SHORT).map(|n| async move {
        let key = format!("short-{n}");
        let started = loop {
            match machine.client.start_job(&machine.name, &job(&["sh", "-c", &script(n)]), Some(&key)).await {
                // More at once than the rate of a key allows, or than the machine begins in time: it comes again.
                Err(e) if e.is_retryable() || e.is_ambiguous() => tokio::time::sleep(Duration::from_millis(20)).await,
                other => break other.map_err(refused("a job"))?,
            }
        };
        loop {
            let wait = machine.client.wait_job(&machine.name, &started.job.id, Duration::from_secs(60)).await;
            match wait {
                Ok(job) if job.exit.is_some_and(|exit| exit.code == Some(code(n))) => return Ok::<(), Fault>(()),
                Ok(job) => return Err(format!("short job {n} ended with {:?}", job.exit).into()),
                Err(e) if e.is_retryable() || e.is_ambiguous() => tokio::time::sleep(Duration::from_millis(20)).await,
                Err(e) => return Err(refused("waiting")(e)),
            }
        }
    });
    futures::future::try_join_all(all).await?;
    rows.push(Row {
        group: "jobs",
        what: format!("{SHORT} short jobs at once, each with its own code"),
        measured: milliseconds(&[start.elapsed()])?,
        beside: Some(("bare agent socket", milliseconds(&[bare])?)),
        target: Target::default(),
    });
    crate::progress("jobs: many", 1, 1);
    Ok(())
}

/// A job with many small records is read from so many before its end.
async fn replay(world: &World, machine: &Machine, rows: &mut Vec<Row>) -> Result<(), Fault> {
    // Each line is a write of its own, and read on its own: it is given the time.
    let script = "import os, time\nfor n in range(10500): os.write(1, b'%d\\n' % n); time.sleep(0.002)";
    let started = machine.client.start_job(&machine.name, &job(&["python3", "-c", script]), None).await;
    let id = started.map_err(refused("a job"))?.job.id;
    let ended = loop {
        let job = machine.client.wait_job(&machine.name, &id, Duration::from_secs(60)).await;
        let job = job.map_err(refused("waiting"))?;
        if job.exit.is_some() {
            break job;
        }
    };
    for records in RECORDS {
        let from = ended.cursor.saturating_sub(records);
        let (mut events, mut raw) = (Vec::new(), Vec::new());
        for n in 0..world.scale.commands {
            let start = Instant::now();
            machine.client.job(&machine.name, &id).await.map_err(refused("a look"))?;
            raw.push(start.elapsed());
            let start = Instant::now();
            follow(machine, &id, from).await?;
            events.push(start.elapsed());
            crate::progress("jobs: replay", n + 1, world.scale.commands);
        }
        rows.push(Row {
            group: "jobs",
            what: format!("reading the last {} events of a job again", ended.cursor - from),
            measured: milliseconds(&events)?,
            beside: Some(("a look at the job", milliseconds(&raw)?)),
            target: Target::default(),
        });
    }
    Ok(())
}
