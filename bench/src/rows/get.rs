//! Looking at a machine: the real service on one processor, a store with few and with many records, in turn. Asked for are a
//! living machine (answered from memory) and one that has ended (answered from the store).

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Empty};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use mainbrella_tests::Service;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tokio::net::TcpStream;
use tokio::task::LocalSet;

use super::some;
use crate::Fault;
use crate::records::LAST_SLOT;
use crate::table::{Row, Target, Unit};
use crate::world::{Need, World, create, processor_seconds};

/// Connections, each with one request at a time.
const CONNECTIONS: usize = 16;
/// How long requests are counted for one sample.
const WINDOW: Duration = Duration::from_secs(1);
/// "Flat": with many records at least this share of what it is with few.
const FLAT: f64 = 0.9;

pub(super) async fn run(world: &World, rows: &mut Vec<Row>) -> Result<(), Fault> {
    let services = [world.service(Need::FewRecords)?, world.service(Need::ManyRecords)?];
    let own = pin(&services)?;
    let mut living = Vec::new();
    for service in services {
        let machine = create(service).await?;
        living.push((address(service, &machine.name.id), key(service)));
    }
    let ended: Vec<_> = services.iter().map(|s| (address(s, LAST_SLOT), key(s))).collect();
    let (windows, mut done) = (world.scale.windows, 0);
    for (what, asked) in [("living", living), ("ended", ended)] {
        let mut rates: [Vec<f64>; 2] = Default::default();
        let mut per_processor_second = Vec::new();
        for n in 0..=windows {
            for (i, (url, key)) in asked.iter().enumerate() {
                let before = processor_seconds(services[i].pid())?;
                let one = count(own, url.clone(), key.clone()).await?;
                let used = processor_seconds(services[i].pid())? - before;
                // The first window warms the service.
                if n > 0 {
                    rates[i].push(one.answered / one.seconds);
                    if i == 1 {
                        per_processor_second.push(one.answered / used.max(0.01));
                    }
                    done += 1;
                    crate::progress("get", done, windows * 4);
                }
            }
        }
        let [few, many] = rates;
        let few = some(Unit::RequestsPerSecond, few)?;
        rows.push(Row {
            group: "get",
            what: format!("`GET` a machine ({what}), 10 records"),
            measured: few.clone(),
            beside: None,
            target: Target::value(5000.0),
        });
        rows.push(Row {
            group: "get",
            what: format!("`GET` a machine ({what}), {} records", world.scale.records),
            measured: some(Unit::RequestsPerSecond, many)?,
            beside: Some(("10 records", few)),
            target: Target { value: Some(5000.0), ratio: Some(FLAT) },
        });
        // What one processor can answer, whoever else used it meanwhile.
        rows.push(Row {
            group: "get",
            what: "the same, a second of processor time the service used".to_owned(),
            measured: some(Unit::RequestsPerSecond, per_processor_second)?,
            beside: None,
            target: Target::value(5000.0),
        });
    }
    Ok(())
}

fn key(service: &Service) -> String {
    service.admin_key()
}

fn address(service: &Service, slot: &str) -> String {
    format!("{}/v1/machines/{slot}", service.url())
}

/// Puts the services on one processor; gives back another for the client, if there is one.
fn pin(services: &[&Service]) -> Result<Option<usize>, Fault> {
    let allowed = sched_getaffinity(None)?;
    let mut processors = (0..CpuSet::MAX_CPU).filter(|n| allowed.is_set(*n));
    let (Some(first), second) = (processors.next(), processors.next()) else {
        return Err("no processor may be used".into());
    };
    if second.is_none() {
        eprintln!("bench: one processor only: the client takes its share of it");
    }
    let mut only = CpuSet::new();
    only.set(first);
    for service in services {
        for task in fs::read_dir(format!("/proc/{}/task", service.pid()))? {
            let task = task?.file_name().to_string_lossy().parse::<i32>()?;
            if let Some(task) = Pid::from_raw(task) {
                sched_setaffinity(Some(task), &only)?;
            }
        }
    }
    Ok(second)
}

/// What one window gave.
struct Window {
    answered: f64,
    seconds: f64,
}

/// Counts requests in one window, from a thread of its own.
async fn count(processor: Option<usize>, url: String, key: String) -> Result<Window, Fault> {
    tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        // This thread goes back to where all others are: the runtime may use it again.
        let before = sched_getaffinity(None)?;
        if let Some(processor) = processor {
            let mut only = CpuSet::new();
            only.set(processor);
            sched_setaffinity(None, &only)?;
        }
        let done = LocalSet::new().block_on(&runtime, window(url, key));
        sched_setaffinity(None, &before)?;
        done
    })
    .await?
}

async fn window(url: String, key: String) -> Result<Window, Fault> {
    let uri: http::Uri = url.parse()?;
    let authority = uri.authority().ok_or("the service has no address")?.to_string();
    let path = uri.path().to_owned();
    let answered = Arc::new(AtomicU64::new(0));
    let mut clients = tokio::task::JoinSet::new();
    let start = Instant::now();
    for _ in 0..CONNECTIONS {
        let (authority, path, key, answered) = (authority.clone(), path.clone(), key.clone(), answered.clone());
        clients.spawn_local(async move {
            let stream = TcpStream::connect(&authority).await?;
            stream.set_nodelay(true)?;
            let (mut sender, connection) = http1::handshake::<_, Empty<Bytes>>(TokioIo::new(stream)).await?;
            let connection = tokio::task::spawn_local(connection);
            while start.elapsed() < WINDOW {
                let request = Request::get(&path)
                    .header("host", &authority)
                    .header("authorization", format!("Bearer {key}"))
                    .body(Empty::new())?;
                let response = sender.send_request(request).await?;
                if response.status() != 200 {
                    return Err(format!("{path}: {}", response.status()).into());
                }
                response.into_body().collect().await?;
                answered.fetch_add(1, Ordering::Relaxed);
            }
            connection.abort();
            Ok::<(), Fault>(())
        });
    }
    while let Some(done) = clients.join_next().await {
        done??;
    }
    Ok(Window { answered: answered.load(Ordering::Relaxed) as f64, seconds: start.elapsed().as_secs_f64() })
}
