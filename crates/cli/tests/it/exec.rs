//! `exec`: bytes, codes, input, signals and broken connections, against a scripted service.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json as value};

use crate::support::{KEY, Reply, Request, Service, error, json, machine, mainbrella, run, run_with, snapshot, told};

const AT: &str = "m-1@2026-10-08T12:00:00.000Z";
const LONG: Duration = Duration::from_secs(20);

fn job(state: &str) -> Value {
    value!({
        "id": "0198d3f2000000000000000000000001", "command": "x", "state": state, "exit": null,
        "startedAt": "2026-10-08T12:00:01.000Z", "endedAt": null, "pid": 7, "timeoutMs": 3_600_000, "cwd": null,
        "stdin": false, "pty": null, "cursor": 1, "stdoutBytes": 0, "stderrBytes": 0, "stdoutOmittedBytes": 0,
        "stderrOmittedBytes": 0, "stdinAcceptedBytes": 0,
    })
}

/// An event as the service writes it.
fn event(cursor: u64, kind: &str, more: Value) -> Vec<u8> {
    let mut event = value!({"cursor": cursor, "time": 1, "type": kind});
    for (k, v) in more.as_object().expect("an object") {
        event[k] = v.clone();
    }
    format!("id: {cursor}\nevent: {kind}\ndata: {event}\n\n").into_bytes()
}

fn output(cursor: u64, stream: &str, offset: u64, data: &[u8]) -> Vec<u8> {
    event(cursor, "output", value!({"stream": stream, "offset": offset, "dataBase64": STANDARD.encode(data)}))
}

fn exit(cursor: u64, cause: &str, code: Option<i32>, signal: Option<i32>) -> Vec<u8> {
    let more = value!({"cause": cause, "code": code, "signal": signal, "stdoutBytes": 0, "stderrBytes": 0, "durationMs": 1000});
    event(cursor, "exit", more)
}

const STREAM: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

fn piece(stream: &mut TcpStream, data: &[u8]) {
    let _ = stream.write_all(format!("{:x}\r\n", data.len()).as_bytes());
    let _ = stream.write_all(data).and_then(|()| stream.write_all(b"\r\n"));
}

/// A whole stream of events.
fn events(parts: &[Vec<u8>]) -> Reply {
    let parts = parts.to_vec();
    Reply::Live(Arc::new(move |stream| {
        let _ = stream.write_all(STREAM);
        for part in &parts {
            piece(stream, part);
        }
        piece(stream, b"");
    }))
}

/// What a request is for.
fn what(request: &Request) -> &str {
    let (method, target) = request.line.split_once(' ').expect("method and target");
    let path = target.split('?').next().unwrap_or_default();
    match path.rsplit('/').next().unwrap_or_default() {
        "m-1" => "machine",
        "jobs" => "start",
        _ if method == "DELETE" => "forget",
        last => last,
    }
}

/// Answers all that a command needs but its events.
fn serving(request: &Request, events: impl FnOnce() -> Reply) -> Reply {
    match what(request) {
        "machine" => json(200, machine("m-1", 90)),
        "start" => json(201, job("running")),
        "cancel" => json(200, job("running")),
        "stdin" => json(200, value!({"acceptedBytes": request.body.len(), "pendingBytes": 0, "closed": false})),
        "forget" => json(204, value!(null)),
        "events" => events(),
        other => panic!("{other}: {}", request.line),
    }
}

fn telling(parts: &[Vec<u8>]) -> Service {
    let parts = parts.to_vec();
    Service::answering(move |request| serving(request, || events(&parts)))
}

fn command(service: &Service, words: &[&str]) -> Command {
    let mut command = mainbrella();
    command.env("MAINBRELLA_API_URL", &service.url).env("MAINBRELLA_API_KEY", KEY).args(words);
    command
}

fn spawn(service: &Service, words: &[&str]) -> Child {
    let mut command = command(service, words);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts")
}

fn count(service: &Service, kind: &str) -> usize {
    service.requests().iter().filter(|r| what(r) == kind).count()
}

fn until(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !is() {
        assert!(Instant::now() < end, "{what} in time");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Something that a reply waits for.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    fn open(&self) {
        *self.0.0.lock().expect("unpoisoned") = true;
        self.0.1.notify_all();
    }

    fn wait(&self) {
        let open = self.0.0.lock().expect("unpoisoned");
        let (open, _) = self.0.1.wait_timeout_while(open, LONG, |open| !*open).expect("unpoisoned");
        assert!(*open, "opened in time");
    }
}

#[test]
fn a_detached_command_goes_on_as_a_job_whose_log_can_be_followed() {
    let service = telling(&[
        event(1, "started", value!({"pid": 7})),
        output(2, "stdout", 0, b"said\n"),
        exit(3, "exited", Some(3), None),
    ]);
    let id = job("running")["id"].as_str().expect("an id").to_owned();
    let out = command(&service, &["exec", AT, "--detach", "-c", "x"]).output().expect("it runs");
    assert_eq!((out.status.code(), out.stdout), (Some(0), format!("{id}\n").into_bytes()));
    assert_eq!(
        service.requests().iter().map(what).collect::<Vec<_>>(),
        ["start"],
        "it is neither followed nor let go of"
    );
    assert_eq!(service.requests()[0].json()["stdin"], false);
    let out = command(&service, &["logs", "-f", AT, &id]).output().expect("it runs");
    let words = (&out.stdout[..], &out.stderr[..]);
    assert_eq!(
        (out.status.code(), words),
        (Some(0), (&b"said\n"[..], &b""[..])),
        "elsewhere than on a terminal its own words only"
    );
}

#[test]
fn bytes_and_codes_pass_through_each_on_its_own_descriptor() {
    let bytes: Vec<u8> = (0..=255).collect();
    let service = telling(&[
        event(1, "started", value!({"pid": 7})),
        output(2, "stdout", 0, &bytes[..100]),
        output(3, "stderr", 0, b"err\xff\n"),
        output(4, "stdout", 100, &bytes[100..]),
        exit(5, "exited", Some(7), None),
    ]);
    let words =
        ["exec", "m-1", "-C", "/tmp", "-u", "app:7", "-e", "A=b", "--timeout", "5s", "--", "prog", "-x", "--", "y z"];
    let out = command(&service, &words).output().expect("it runs");
    assert_eq!((out.status.code(), out.stdout, out.stderr), (Some(7), bytes, b"err\xff\n".to_vec()));
    let requests = service.requests();
    assert_eq!(requests[1].line, "POST /v1/machines/m-1/jobs?createdAt=2026-10-08T12%3A00%3A00.000Z");
    assert_eq!(
        requests[1].json(),
        value!({"command": ["prog", "-x", "--", "y z"], "cwd": "/tmp", "user": "app:7", "env": {"A": "b"}, "timeoutMs": 5000, "stdin": false})
    );
    assert_eq!(requests.iter().map(what).collect::<Vec<_>>(), ["machine", "start", "events", "forget"]);
}

#[test]
fn it_ends_with_the_code_of_its_command() {
    let exec = |parts: &[Vec<u8>]| run(&telling(parts), &["exec", AT, "--no-stdin", "-c", "x"]);
    snapshot("exec signal", exec(&[exit(1, "signalled", None, Some(9))]));
    snapshot("exec timed out", exec(&[output(1, "stdout", 0, b"so far\n"), exit(2, "timed_out", None, Some(15))]));
    let gap = event(2, "gap", value!({"stream": "stdout", "offset": 3, "length": 70}));
    let parts =
        [output(1, "stdout", 0, b"ab\n"), gap, output(3, "stdout", 73, b"yz\n"), exit(4, "exited", Some(0), None)];
    snapshot("exec cut", exec(&parts));
    snapshot("exec cancelled", exec(&[exit(1, "cancelled", None, Some(15))]));
    snapshot(
        "exec machine stopped",
        exec(&[output(1, "stdout", 0, b"so far\n"), exit(2, "machine_stopped", None, None)]),
    );
    snapshot("exec machine lost", exec(&[exit(1, "lost", None, None)]));
    let refused = Service::start([error(422, "command_not_started", "The program could not be executed.")]);
    snapshot("exec not started", run(&refused, &["exec", AT, "-c", "x"]));
    let lost = Service::start([Reply::Cut(vec![])]);
    snapshot("exec lost", run(&lost, &["exec", AT, "--", "x"]));
    assert_eq!(lost.requests().len(), 1, "a command is never sent twice");
}

#[test]
fn json_has_the_result_as_one_document() {
    let whole = value!({"stream": "stdout", "offset": 2, "length": 5});
    let end =
        value!({"cause": "exited", "code": 3, "signal": null, "stdoutBytes": 9, "stderrBytes": 2, "durationMs": 5});
    let service = telling(&[
        output(1, "stdout", 0, b"ab"),
        event(2, "gap", whole),
        output(3, "stdout", 7, b"yz"),
        output(4, "stderr", 0, b"e\n"),
        event(5, "exit", end),
    ]);
    let text = run(&service, &["exec", AT, "--json", "--no-stdin", "-c", "x"]);
    snapshot("exec json", &text);
    let service = telling(&[output(1, "stdout", 0, b"0123456789"), exit(2, "timed_out", None, Some(9))]);
    let text = run(&service, &["exec", AT, "--json", "--output-limit", "5", "--no-stdin", "-c", "x"]);
    snapshot("exec json timed out", &text);
    let service = telling(&[exit(1, "machine_stopped", None, None)]);
    snapshot("exec json machine stopped", run(&service, &["exec", AT, "--json", "--no-stdin", "-c", "x"]));
}

#[test]
fn output_is_there_while_the_command_runs() {
    let gate = Gate::default();
    let held = gate.clone();
    let live = Reply::Live(Arc::new(move |stream: &mut TcpStream| {
        let _ = stream.write_all(STREAM);
        piece(stream, &output(1, "stdout", 0, b"early\n"));
        piece(stream, &output(2, "stderr", 0, b"note\n"));
        held.wait();
        piece(stream, &exit(3, "exited", Some(0), None));
    }));
    let service = Service::answering(move |request| serving(request, || live.clone()));
    let mut child = spawn(&service, &["exec", AT, "--no-stdin", "-c", "x"]);
    let (mut early, mut note) = ([0u8; 6], [0u8; 5]);
    child.stdout.as_mut().expect("piped").read_exact(&mut early).expect("output before the end");
    child.stderr.as_mut().expect("piped").read_exact(&mut note).expect("output before the end");
    assert_eq!((&early, &note), (b"early\n", b"note\n"));
    assert!(child.try_wait().expect("asked").is_none());
    gate.open();
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
}

#[test]
fn a_broken_connection_goes_on_where_it_broke() {
    // Cut after every byte of the first stream, once: nothing may be lost and nothing come twice.
    let all =
        [output(1, "stdout", 0, b"one "), output(2, "stdout", 4, b"two "), output(3, "stdout", 8, b"three")].concat();
    for cut in (0..all.len()).step_by(29) {
        let first = Mutex::new(true);
        let bytes = all[..cut].to_vec();
        let service = Service::answering(move |request| {
            let bytes = bytes.clone();
            serving(request, || {
                if std::mem::take(&mut *first.lock().expect("unpoisoned")) {
                    return Reply::Live(Arc::new(move |stream| {
                        let _ = stream.write_all(STREAM);
                        piece(stream, &bytes);
                    }));
                }
                let after = request.line.split_once("cursor=").map(|(_, n)| n.parse::<usize>().expect("a cursor"));
                let whole = [
                    output(1, "stdout", 0, b"one "),
                    output(2, "stdout", 4, b"two "),
                    output(3, "stdout", 8, b"three"),
                    exit(4, "exited", Some(0), None),
                ];
                events(&whole[after.expect("a cursor")..])
            })
        });
        assert_eq!(
            run(&service, &["exec", AT, "--no-stdin", "-c", "x"]),
            "code: 0\n--- stdout\none two three--- stderr\n",
            "cut at {cut}"
        );
        assert_eq!((count(&service, "events"), count(&service, "start")), (2, 1));
    }
}

#[test]
fn standard_input_of_a_pipe_is_passed_on_in_order_with_its_end() {
    let bytes: Vec<u8> = (0..300_000u32).map(|n| (n % 251) as u8).collect();
    let gate = Gate::default();
    let (held, refusals) = (gate.clone(), Mutex::new(3));
    let service = Service::answering(move |request| {
        if what(request) == "stdin" {
            if request.line.ends_with("eof=true") {
                held.open();
            }
            let mut left = refusals.lock().expect("unpoisoned");
            if *left > 0 && request.body.len() > 1000 {
                *left -= 1;
                return error(409, "stdin_full", "The job has not read its input; nothing of this was taken.");
            }
        }
        let held = held.clone();
        serving(request, || {
            Reply::Live(Arc::new(move |stream| {
                let _ = stream.write_all(STREAM);
                held.wait();
                piece(stream, &exit(1, "exited", Some(0), None));
            }))
        })
    });
    assert_eq!(run_with(&service, &["exec", AT, "--", "cat"], &bytes), "code: 0\n--- stdout\n--- stderr\n");
    let requests = service.requests();
    assert_eq!(requests.iter().find(|r| what(r) == "start").expect("started").json()["stdin"], true);
    let writes: Vec<_> = requests.iter().filter(|r| what(r) == "stdin").collect();
    assert!(writes.iter().all(|r| r.body.len() <= 65_536));
    let mut taken = Vec::new();
    // The first three that were long were refused and came again.
    let mut refused = 3;
    for write in &writes {
        if refused > 0 && write.body.len() > 1000 { refused -= 1 } else { taken.extend_from_slice(&write.body) }
    }
    assert!(taken == bytes, "{} bytes of {}", taken.len(), bytes.len());
    assert!(writes.last().is_some_and(|r| r.line.ends_with("eof=true") && r.body.is_empty()));
}

#[test]
fn standard_input_is_left_alone_where_it_should_be() {
    let ended = [exit(1, "exited", Some(0), None)];
    let asks = |words: &[&str], stdin: Stdio| {
        let service = telling(&ended);
        let out = command(&service, words).stdin(stdin).output().expect("it runs");
        assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
        let start = service.requests().into_iter().find(|r| what(r) == "start").expect("started");
        start.json()["stdin"].as_bool().expect("said")
    };
    assert!(!asks(&["exec", AT, "-c", "x"], Stdio::null()), "a device is not passed on unasked");
    assert!(asks(&["exec", AT, "-i", "-c", "x"], Stdio::null()));
    let pipe = || Stdio::from(std::io::pipe().expect("a pipe").0);
    assert!(asks(&["exec", AT, "-c", "x"], pipe()));
    assert!(!asks(&["exec", AT, "--no-stdin", "-c", "x"], pipe()), "a loop keeps what it reads");
}

#[test]
fn input_that_cannot_be_sent_whole_ends_the_command() {
    let with = |reply: Reply| {
        let service = Service::answering(move |request| match what(request) {
            "stdin" => reply.clone(),
            _ => serving(request, || {
                Reply::Live(Arc::new(|stream| {
                    let _ = stream.write_all(STREAM);
                    // For as long as the command holds on.
                    let _ = stream.read(&mut [0]);
                }))
            }),
        });
        let text = run_with(&service, &["exec", AT, "--", "cat"], b"input");
        assert_eq!((count(&service, "stdin"), count(&service, "cancel")), (1, 1), "{text}");
        text
    };
    snapshot("exec too much input", with(error(413, "stdin_limit", "A job takes at most 1 MiB.")));
    snapshot("exec input lost", with(Reply::Cut(vec![])));
}

/// A command that runs until it is cancelled; `stubborn`: until much later.
fn endless(stubborn: bool) -> Service {
    let gate = Gate::default();
    Service::answering(move |request| {
        if what(request) == "cancel" && !stubborn {
            gate.open();
        }
        let gate = gate.clone();
        serving(request, || {
            Reply::Live(Arc::new(move |stream| {
                let _ = stream.write_all(STREAM);
                piece(stream, &output(1, "stdout", 0, b"up\n"));
                if stubborn {
                    let _ = stream.read(&mut [0]);
                    return;
                }
                gate.wait();
                piece(stream, &output(2, "stdout", 3, b"down\n"));
                piece(stream, &exit(3, "cancelled", None, Some(15)));
            }))
        })
    })
}

fn signal(child: &Child, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(child.id()).expect("a pid")).expect("a pid");
    rustix::process::kill_process(pid, signal).expect("sent");
}

fn up(child: &mut Child) {
    let mut line = [0u8; 3];
    child.stdout.as_mut().expect("piped").read_exact(&mut line).expect("it runs");
}

#[test]
fn ctrl_c_ends_the_command_and_its_last_words_are_heard() {
    for (number, code) in [(rustix::process::Signal::INT, 130), (rustix::process::Signal::TERM, 143)] {
        let service = endless(false);
        let mut child = spawn(&service, &["exec", AT, "--no-stdin", "-c", "x"]);
        up(&mut child);
        signal(&child, number);
        let out = child.wait_with_output().expect("it ends");
        assert_eq!((out.status.code(), out.stdout.as_slice()), (Some(code), &b"down\n"[..]));
        assert_eq!((count(&service, "cancel"), count(&service, "forget")), (1, 1));
    }
}

#[test]
fn a_second_ctrl_c_leaves_a_command_that_does_not_end() {
    let service = endless(true);
    let mut child = spawn(&service, &["exec", AT, "--no-stdin", "-c", "x"]);
    up(&mut child);
    signal(&child, rustix::process::Signal::INT);
    until("the cancel", || count(&service, "cancel") == 1);
    assert!(child.try_wait().expect("asked").is_none());
    signal(&child, rustix::process::Signal::INT);
    let out = child.wait_with_output().expect("it ends");
    let said = String::from_utf8(out.stderr).expect("text");
    assert_eq!(out.status.code(), Some(130), "{said}");
    assert!(said.contains("may still be running as job 0198d3f2"), "{said}");
    assert_eq!(count(&service, "forget"), 0, "it can still be looked at");
}

#[test]
fn a_reader_that_goes_away_ends_the_command() {
    let gate = Gate::default();
    let held = gate.clone();
    let service = Service::answering(move |request| {
        let held = held.clone();
        serving(request, || {
            Reply::Live(Arc::new(move |stream| {
                let _ = stream.write_all(STREAM);
                piece(stream, &output(1, "stdout", 0, b"up\n"));
                held.wait();
                piece(stream, &output(2, "stdout", 3, b"more\n"));
                let _ = stream.read(&mut [0]);
            }))
        })
    });
    let mut child = spawn(&service, &["exec", AT, "--no-stdin", "-c", "x"]);
    up(&mut child);
    drop(child.stdout.take());
    gate.open();
    assert_eq!(child.wait().expect("it ends").code(), Some(141));
    assert_eq!(count(&service, "cancel"), 1);
}

#[test]
fn a_service_that_does_not_answer_is_given_up_with_a_way_on() {
    let mut command = mainbrella();
    command.env("MAINBRELLA_API_KEY", KEY).args(["--url", "http://127.0.0.1:1", "exec", AT, "-c", "x"]);
    let text = told(&mut command, b"");
    assert!(text.starts_with("code: 125") && text.contains("no connection"), "{text}");
}
