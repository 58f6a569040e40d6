//! Managed jobs on real machines: input, terminals, replay over a killed service, endings, many at once, the shell.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mainbrella_client::JobMessage;
use mainbrella_client::api::{
    CommandLine, ExitCause, Job, JobEvent, JobEventKind, JobFrame, JobState, SignalName, StartJob, StreamName,
    TerminalSize,
};
use mainbrella_tests::{Machine, Service, host, program};
use mainbrella_types::ErrorCode;
use rustix::process::Signal;
use sha2::{Digest as _, Sha256};

use crate::code;

fn shell(text: &str) -> StartJob {
    StartJob::new(CommandLine::Text(text.to_owned()))
}

async fn start(m: &Machine, body: &StartJob) -> Job {
    m.client.start_job(&m.name, body, None).await.expect("started").job
}

async fn ended(m: &Machine, job: &Job) -> Job {
    let job = m.client.wait_job(&m.name, &job.id, Duration::from_secs(60)).await.expect("waited");
    assert_eq!(job.state, JobState::Ended, "{job:?}");
    job
}

fn ending(job: &Job) -> (ExitCause, Option<i32>, Option<i32>) {
    let exit = job.exit.expect("it has ended");
    (exit.cause, exit.code, exit.signal)
}

/// What a follower was given, checked as it comes.
#[derive(Default)]
pub(super) struct Heard {
    cursor: u64,
    offsets: [u64; 2],
    sums: [Sha256; 2],
    pub(super) text: [String; 2],
    exit: Option<(ExitCause, Option<i32>)>,
}

impl Heard {
    fn take(&mut self, event: JobEvent) {
        assert!(event.cursor > self.cursor, "{} after {}", event.cursor, self.cursor);
        assert!(self.exit.is_none(), "nothing comes after the exit");
        self.cursor = event.cursor;
        match event.kind {
            JobEventKind::Output { stream, offset, data_base64 } => {
                let i = usize::from(stream == StreamName::Stderr);
                let data = STANDARD.decode(data_base64).expect("base64");
                assert_eq!(offset, self.offsets[i], "bytes follow one another");
                self.offsets[i] += data.len() as u64;
                self.sums[i].update(&data);
                if self.text[i].len() < 100_000 {
                    self.text[i].push_str(&String::from_utf8_lossy(&data));
                }
            }
            JobEventKind::Gap { .. } => panic!("nothing is missing"),
            JobEventKind::Started { pid } => assert!(pid > 1),
            JobEventKind::Exit { cause, code, stdout_bytes, stderr_bytes, .. } => {
                assert_eq!([stdout_bytes, stderr_bytes], self.offsets);
                self.exit = Some((cause, code));
            }
        }
    }

    /// Follows to the end.
    pub(super) async fn all(m: &Machine, job: &Job) -> Self {
        let mut heard = Self::default();
        let mut stream = m.client.follow_job(&m.name, &job.id, 0);
        while let Some(event) = stream.next().await.expect("followed") {
            heard.take(event);
        }
        heard
    }

    fn sum(&self, i: usize) -> String {
        hex::encode(self.sums[i].clone().finalize())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_takes_input_and_a_terminal_takes_keys_and_sizes() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    let cat =
        start(&m, &StartJob { stdin: true, ..shell("while read -r line; do echo \"<$line>\"; done; echo over >&2") })
            .await;
    let mut stream = m.client.follow_job(&m.name, &cat.id, 0);
    let mut heard = Heard::default();
    for n in 1..=5 {
        m.client.write_job_stdin(&m.name, &cat.id, format!("line {n}\n"), false).await.expect("taken");
        while !heard.text[0].contains(&format!("<line {n}>")) {
            heard.take(stream.next().await.expect("followed").expect("it goes on"));
        }
    }
    let last = m.client.write_job_stdin(&m.name, &cat.id, "", true).await.expect("taken");
    assert_eq!((last.accepted_bytes, last.closed), (35, true));
    assert_eq!(ending(&ended(&m, &cat).await), (ExitCause::Exited, Some(0), None));
    assert_eq!(code(m.client.write_job_stdin(&m.name, &cat.id, "x", false).await), ErrorCode::JobEnded);
    assert_eq!(Heard::all(&m, &cat).await.text[1], "over\n");

    let script = "stty size; trap 'stty size' WINCH; echo ready; for i in $(seq 30); do sleep 0.1; done; read -r a; echo \"<$a>\"; exec cat";
    let tty = start(&m, &StartJob { pty: Some(TerminalSize { cols: 80, rows: 24 }), ..shell(script) }).await;
    let mut socket = m.client.attach_job(&m.name, &tty.id, 0).await.expect("attached");
    let mut heard = Heard::default();
    let mut said = async |socket: &mut mainbrella_client::JobSocket, text: &str| {
        while !heard.text[0].contains(text) {
            match socket.next().await.expect("connected").expect("open") {
                JobMessage::Event(event) => heard.take(event),
                JobMessage::Refused { code, message } => panic!("{code}: {message}"),
            }
        }
    };
    said(&mut socket, "24 80\r\nready").await;
    socket.send(&JobFrame::Resize { cols: 132, rows: 43 }).await.expect("sent");
    said(&mut socket, "43 132").await;
    socket.write(b"hello\r").await.expect("sent");
    said(&mut socket, "<hello>").await;
    // Ctrl-C is a key: the terminal makes the signal of it.
    socket.write(&[3]).await.expect("sent");
    assert_eq!(ending(&ended(&m, &tty).await), (ExitCause::Signalled, None, Some(2)));
    let job = m.client.job(&m.name, &tty.id).await.expect("known");
    assert_eq!(job.pty, Some(TerminalSize { cols: 132, rows: 43 }));
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_megabytes_over_a_service_killed_again_and_again_lose_and_repeat_nothing() {
    let mut service = Service::start().await;
    let mut m = service.machine().await;
    // 3 million numbered lines, 22.9 MB, in spurts, and a line on the other output in between.
    let script = "k=0; while [ $k -lt 30 ]; do seq $((k * 100000 + 1)) $(((k + 1) * 100000)); echo $k >&2; k=$((k + 1)); sleep 0.2; done";
    let job = start(&m, &shell(script)).await;
    let mut heard = Heard::default();
    for life in 0..4u64 {
        let mut stream = m.client.follow_job(&m.name, &job.id, heard.cursor);
        let end = Instant::now() + Duration::from_millis(700 + life * 311);
        while Instant::now() < end {
            if let Ok(event) = tokio::time::timeout(Duration::from_millis(100), stream.next()).await {
                heard.take(event.expect("followed").expect("it goes on"));
            }
        }
        service.crash().await;
        m = service.attach(m.name.clone());
    }
    let mut stream = m.client.follow_job(&m.name, &job.id, heard.cursor);
    while let Some(event) = stream.next().await.expect("followed") {
        heard.take(event);
    }
    assert_eq!(heard.exit, Some((ExitCause::Exited, Some(0))));
    let mut expected = Sha256::new();
    let mut length = 0u64;
    for n in 1..=3_000_000u32 {
        let line = format!("{n}\n");
        length += line.len() as u64;
        expected.update(line);
    }
    assert!(length > 20_000_000);
    assert_eq!((heard.offsets[0], heard.sum(0)), (length, hex::encode(expected.finalize())));
    assert_eq!(heard.text[1], (0..30).map(|k| format!("{k}\n")).collect::<String>());
    // And once more, from the beginning, as somebody who was never there.
    let again = Heard::all(&m, &job).await;
    assert_eq!((again.sum(0), again.cursor), (heard.sum(0), heard.cursor));
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_vmm_ends_its_streams_in_two_seconds_and_a_stopped_machine_says_so() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    let job = start(&m, &shell("echo up; sleep 300")).await;
    let mut stream = m.client.follow_job(&m.name, &job.id, 0);
    let mut heard = Heard::default();
    while heard.text[0] != "up\n" {
        heard.take(stream.next().await.expect("followed").expect("it goes on"));
    }
    let begin = Instant::now();
    host::signal(service.only_vmm(), Signal::KILL);
    heard.take(stream.next().await.expect("followed").expect("its end"));
    assert!(begin.elapsed() < Duration::from_secs(2), "told after {:?}", begin.elapsed());
    assert_eq!(heard.exit, Some((ExitCause::Lost, None)));
    m.ended(Duration::from_secs(5)).await;
    assert_eq!(ending(&m.client.job(&m.name, &job.id).await.expect("kept")).0, ExitCause::Lost);

    let m = service.machine().await;
    let job = start(&m, &shell("echo up; sleep 300")).await;
    m.stop().await;
    let kept = m.client.job(&m.name, &job.id).await.expect("kept");
    assert_eq!(ending(&kept).0, ExitCause::MachineStopped);
    service.crash().await;
    let m = service.attach(m.name.clone());
    assert_eq!(m.client.job(&m.name, &job.id).await.expect("kept over a restart"), kept);
    assert_eq!(Heard::all(&m, &job).await.exit, Some((ExitCause::MachineStopped, None)));
    assert_eq!(code(m.client.start_job(&m.name, &shell("true"), None).await), ErrorCode::MachineNotRunning);
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn endings_processes_and_floods() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    // Much on one output takes nothing from the other.
    let flood = start(&m, &shell("head -c 100000 /dev/zero; echo one line >&2; exit 1")).await;
    let heard = Heard::all(&m, &flood).await;
    assert_eq!((heard.offsets[0], heard.text[1].as_str()), (100_000, "one line\n"));
    assert_eq!(heard.exit, Some((ExitCause::Exited, Some(1))));

    let slow = start(&m, &StartJob { timeout_ms: Some(500), ..shell("echo partial; sleep 300 | sleep 300") }).await;
    assert_eq!(ending(&ended(&m, &slow).await).0, ExitCause::TimedOut);
    assert_eq!(Heard::all(&m, &slow).await.text[0], "partial\n");
    let group = start(&m, &shell("sleep 301 & sleep 301 & wait")).await;
    m.client.cancel_job(&m.name, &group.id, Some(Duration::from_secs(2))).await.expect("asked");
    assert_eq!(ending(&ended(&m, &group).await).0, ExitCause::Cancelled);
    assert_eq!(m.text("pgrep -fc '^sleep 301' || true").await.trim(), "0", "the whole group is gone");
    let trap = start(&m, &shell("trap 'echo got it; exit 5' USR1; echo up; while :; do sleep 0.05; done")).await;
    host::until("the trap is set", Duration::from_secs(10), async || {
        m.client.job(&m.name, &trap.id).await.expect("known").stdout_bytes > 0
    })
    .await;
    m.client.signal_job(&m.name, &trap.id, SignalName::Name("SIGUSR1".into())).await.expect("sent");
    assert_eq!(ending(&ended(&m, &trap).await), (ExitCause::Exited, Some(5), None));

    // A process that left its job is listed all the same, and ended by number.
    let own = start(&m, &shell("exec sleep 302")).await;
    m.text("setsid sleep 303 >/dev/null 2>&1 & sleep 0.2").await;
    let list = m.client.processes(&m.name).await.expect("listed");
    assert!(!list.truncated && list.processes.iter().any(|p| p.pid == 1));
    let of = |what: &str| list.processes.iter().find(|p| p.argv.join(" ") == what).cloned().expect("listed");
    let (mine, other) = (of("sleep 302"), of("sleep 303"));
    assert_eq!((mine.job_id.as_deref(), other.job_id), (Some(own.id.as_str()), None));
    assert!(mine.rss_bytes > 0 && mine.uid == 0 && own.pid == Some(mine.pid));
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("clock").as_millis();
    let age = now as i64 - mine.started_at_ms;
    assert!((-2000..60_000).contains(&age), "it began {age} ms ago");
    for pid in [mine.pid, other.pid] {
        m.client.signal_process(&m.name, pid, SignalName::Number(9)).await.expect("sent");
    }
    assert_eq!(ending(&ended(&m, &own).await), (ExitCause::Signalled, None, Some(9)));
    assert_eq!(code(m.client.signal_process(&m.name, 1, SignalName::Number(9)).await), ErrorCode::NotFound);
    assert_eq!(m.text("echo alive").await, "alive\n");

    let listed = m.client.jobs(&m.name, 100, None).await.expect("listed").executions;
    let ids: Vec<&str> = listed.iter().map(|j| j.id.as_str()).collect();
    assert_eq!(ids, [&own.id, &trap.id, &group.id, &slow.id, &flood.id].map(String::as_str), "newest first, none else");

    // A blocking call that waits only so long leaves a job behind.
    let mut order = Machine::shell_order("echo begun; sleep 2; echo done");
    order.wait_ms = Some(700);
    let part = m.run(&order).await.expect("waited");
    assert!(part.raw.still_running && part.text() == "begun\n");
    let job = m.client.job(&m.name, &part.raw.job_id).await.expect("it goes on");
    assert_eq!(Heard::all(&m, &job).await.text[0], "begun\ndone\n");
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_short_jobs_at_once_none_stuck_each_with_its_own_code() {
    let mut service = Service::with(mainbrella_tests::Setup {
        arguments: vec!["--rate-per-second".into(), "100000".into(), "--rate-burst".into(), "100000".into()],
        ..Default::default()
    })
    .await;
    let m = service.machine().await;
    let begin = Instant::now();
    let started = futures::future::join_all((0..1000).map(|i| {
        let m = m.clone();
        tokio::spawn(async move {
            let body =
                StartJob::new(CommandLine::Argv(vec!["/bin/sh".into(), "-c".into(), format!("exit {}", i % 251)]));
            // Under load a start may be told to come again; nothing was done then.
            loop {
                match m.client.start_job(&m.name, &body, Some(&format!("job {i}"))).await {
                    Ok(started) => return (i, started.job),
                    Err(e) if e.is_retryable() || e.is_ambiguous() => {
                        tokio::time::sleep(Duration::from_millis(100)).await
                    }
                    Err(e) => panic!("{e:?}"),
                }
            }
        })
    }))
    .await;
    let all_started = begin.elapsed();
    let ends = futures::future::join_all(started.into_iter().map(|joined| {
        let (i, job) = joined.expect("joined");
        let m = m.clone();
        async move { (i, ended(&m, &job).await) }
    }))
    .await;
    for (i, job) in ends {
        assert_eq!(ending(&job), (ExitCause::Exited, Some(i % 251), None), "job {i}");
    }
    eprintln!("a thousand jobs: started in {all_started:?}, ended in {:?}", begin.elapsed());
    assert_eq!(m.client.jobs(&m.name, 1000, None).await.expect("listed").executions.len(), 1000);
    assert_eq!(m.text("echo still here").await, "still here\n");
    service.finish().await;
}

/// Plays a person at a terminal.
const PERSON: &str = include_str!("person.py");

#[tokio::test(flavor = "multi_thread")]
async fn a_person_at_a_terminal_and_a_reader_of_logs() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    let name = format!("{}@{}", m.name.id, m.name.created_at);
    let (url, data) = (service.url(), service.data().to_owned());
    let command = move |program: &std::path::Path| {
        let mut command = Command::new(program);
        for (name, _) in std::env::vars_os().filter(|(n, _)| n.as_encoded_bytes().starts_with(b"MAINBRELLA_")) {
            command.env_remove(name);
        }
        command.env("MAINBRELLA_API_URL", &url).env("MAINBRELLA_DATA_DIR", &data).env("TERM", "xterm-test");
        command.stdin(Stdio::null());
        command
    };
    let (make, machine) = (command.clone(), name.clone());
    let played = tokio::task::spawn_blocking(move || {
        make("python3".as_ref()).args(["-c", PERSON]).arg(program()).arg(machine).output().expect("run")
    });
    let played = played.await.expect("played");
    assert!(played.status.success(), "{}", String::from_utf8_lossy(&played.stderr));

    let job = start(&m, &shell("for i in 1 2 3; do echo $i; sleep 0.3; done; echo end >&2")).await;
    let (make, machine, id) = (command.clone(), name.clone(), job.id.clone());
    let logs = tokio::task::spawn_blocking(move || {
        make(&program()).args(["logs", "--follow", &machine, &id]).output().expect("run")
    });
    let logs = logs.await.expect("read");
    assert_eq!((logs.stdout.as_slice(), logs.stderr.as_slice()), (&b"1\n2\n3\n"[..], &b"end\n"[..]));
    let run = move |words: Vec<String>| {
        let make = command.clone();
        tokio::task::spawn_blocking(move || make(&program()).args(words).output().expect("run"))
    };
    let words = |list: &[&str]| list.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>();
    let newest = run(words(&["logs", &name])).await.expect("run");
    assert_eq!(newest.stdout, b"1\n2\n3\n");
    let jobs = run(words(&["jobs", &name])).await.expect("run");
    let table = String::from_utf8_lossy(&jobs.stdout).into_owned();
    assert!(table.contains("exit 7") && table.contains("exit 3") && table.contains(&job.id), "{table}");
    let ps = run(words(&["ps", &name])).await.expect("run");
    assert!(String::from_utf8_lossy(&ps.stdout).contains("COMMAND"));
    let bare = run(words(&["shell", &name])).await.expect("run");
    assert_eq!(bare.status.code(), Some(2), "without a terminal it is refused");
    service.finish().await;
}
