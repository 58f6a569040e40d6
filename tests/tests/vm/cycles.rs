//! A machine paused and brought back again and again while it works, and machines that are deleted on the way.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mainbrella_client::api::{CommandLine, JobEventKind, StartJob, State};
use mainbrella_tests::{Machine, Service, host};

const CYCLES: usize = 20;
const PATIENCE: Duration = Duration::from_secs(120);
/// How often a state that passes is looked for.
const TRIES: usize = 8;

/// Writes numbered records with their digests, to a file with a name, to one without and to its output, and looks all the time
/// whether its memory and what it wrote are as they were.
const KEEPER: &str = r#"
import hashlib, os, sys, tempfile, time
memory = bytearray(os.urandom(30_000_000))
digest = hashlib.sha256(memory).hexdigest()
named = open("/workspace/records", "w")
nameless = tempfile.TemporaryFile("w+", dir="/workspace")
written = hashlib.sha256()

def check():
    if hashlib.sha256(memory).hexdigest() != digest:
        sys.exit("memory is not as it was")
    nameless.seek(0)
    if hashlib.sha256(nameless.read().encode()).digest() != written.digest():
        sys.exit("the file without a name is not as it was")

n = 0
while not os.path.exists("/workspace/stop"):
    n += 1
    line = f"{n} {hashlib.sha256(str(n).encode()).hexdigest()}\n"
    named.write(line)
    named.flush()
    os.fsync(named.fileno())
    nameless.write(line)
    written.update(line.encode())
    print(line, end="", flush=True)
    if n % 10 == 0:
        check()
    time.sleep(0.02)
check()
"#;

async fn records(m: &Machine) -> usize {
    m.text("wc -l </workspace/records").await.trim().parse().expect("a number")
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_pauses_of_a_machine_at_work_lose_nothing() {
    let mut service = Service::start().await;
    let mut m = service.machine().await;
    m.write("/workspace/keeper.py", KEEPER).await.expect("written");
    let start = StartJob::new(CommandLine::Text("exec python3 /workspace/keeper.py".into()));
    let job = m.client.start_job(&m.name, &start, None).await.expect("started").job.id;
    host::until("the first record", PATIENCE, async || m.sh("test -s /workspace/records").await.raw.exit_code == 0)
        .await;
    let mut before = 0;
    for cycle in 0..CYCLES {
        let paused =
            m.client.pause(&m.name).await.unwrap_or_else(|e| panic!("{cycle}: pause: {e:?}; {}", service.log()));
        assert_eq!((paused.state, service.vmms().len()), (State::Paused, 0), "{cycle}");
        if cycle % 7 == 3 {
            service.crash().await;
            m = service.attach(m.name.clone());
        }
        let back =
            m.client.resume(&m.name).await.unwrap_or_else(|e| panic!("{cycle}: resume: {e:?}; {}", service.log()));
        assert_eq!(back.state, State::Running, "{cycle}");
        if cycle % 7 == 5 {
            service.crash().await;
            m = service.attach(m.name.clone());
        }
        let seen = before;
        host::until("it goes on", PATIENCE, async || {
            before = records(&m).await;
            before > seen
        })
        .await;
    }
    m.text("touch /workspace/stop").await;
    let ended = m.client.wait_job(&m.name, &job, Duration::from_secs(60)).await.expect("it ends");
    let mut said = String::new();
    let mut follow = m.client.follow_job(&m.name, &job, 0);
    while let Some(event) = follow.next().await.expect("its log") {
        if let JobEventKind::Output { data_base64, .. } = event.kind {
            said.push_str(&String::from_utf8(STANDARD.decode(data_base64).expect("base64")).expect("text"));
        }
    }
    assert_eq!(ended.exit.and_then(|e| e.code), Some(0), "its memory and its file without a name: {said}");
    let lines = said.lines().count();
    eprintln!("{lines} records over {CYCLES} pauses");
    assert!(lines > CYCLES, "{lines}");
    for (n, line) in (1..).zip(said.lines()) {
        use sha2::{Digest as _, Sha256};
        let digest = hex::encode(Sha256::digest(n.to_string()));
        assert_eq!(line, format!("{n} {digest}"), "the log has no gap and nothing twice");
    }
    assert_eq!(String::from_utf8(m.read("/workspace/records").await.expect("read")).expect("text"), said);
    service.finish().await;
}

/// Stops machines until one was seen in the state that passes when `change` is asked for.
async fn stopped_while(service: &mut Service, state: State, change: impl AsyncFn(Machine)) {
    for _ in 0..TRIES {
        let m = service.machine().await;
        m.text("head -c 60000000 /dev/urandom >/dev/shm/much").await;
        if state == State::Resuming {
            m.client.pause(&m.name).await.expect("paused");
        }
        let end = if state == State::Resuming { State::Running } else { State::Paused };
        let seen = async {
            loop {
                let now = m.record().await.state;
                if now == state || now == end && state == State::Pausing {
                    m.stop().await;
                    return now == state;
                }
                if now.is_final() {
                    return false;
                }
            }
        };
        // A state that was passed already is not waited for.
        let (seen, ()) = futures::join!(async { tokio::time::timeout(PATIENCE, seen).await.unwrap_or(false) }, async {
            change(m.clone()).await;
            if state == State::Resuming && m.record().await.state == State::Running {
                m.stop().await;
            }
        });
        assert_eq!(m.record().await.state, State::Stopped);
        assert!(service.keys().is_empty() && service.vmms().is_empty(), "nothing of it is left");
        if seen {
            return;
        }
    }
    panic!("no machine was seen {state:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_is_deleted_in_every_state_and_leaves_nothing() {
    let mut service = Service::start().await;
    let running = service.machine().await;
    running.stop().await;
    let paused = service.machine().await;
    paused.client.pause(&paused.name).await.expect("paused");
    paused.stop().await;
    assert!(service.keys().is_empty());
    // Whether a change succeeds before the machine ends is its own affair.
    stopped_while(&mut service, State::Pausing, async |m| drop(m.client.pause(&m.name).await)).await;
    stopped_while(&mut service, State::Resuming, async |m| drop(m.client.resume(&m.name).await)).await;
    service.finish().await;
}
