//! Real machines paused and resumed through the whole service: jobs, contexts, files, kills of the service in between.

use std::time::Duration;

use mainbrella_client::api::{
    CommandLine, CreateContext, CreatePreview, ForkMachine, OnIdle, RunCode, StartJob, State,
};
use mainbrella_tests::{Machine, Service, Setup, host, machine_body};
use mainbrella_types::ErrorCode;

use crate::code;

/// Long enough for what is written and read back under emulation.
const PATIENCE: Duration = Duration::from_secs(60);

async fn pause(m: &Machine) {
    let paused = m.client.pause(&m.name).await.unwrap_or_else(|e| panic!("pause: {e:?}"));
    assert_eq!(paused.state, State::Paused);
}

async fn resume(m: &Machine) {
    let back = m.client.resume(&m.name).await.unwrap_or_else(|e| panic!("resume: {e:?}"));
    assert_eq!(back.state, State::Running);
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_files_and_processes_go_on_over_pauses_and_kills_of_the_service() {
    let mut service = Service::start().await;
    let mut m = service.machine().await;
    // Numbers, one a tenth of a second, to its output and to a file it holds open; each is written once.
    let counting =
        "exec 3>/workspace/seen; i=0; while [ $i -lt 120 ]; do i=$((i+1)); echo $i; echo $i >&3; sleep 0.1; done";
    let job =
        m.client.start_job(&m.name, &StartJob::new(CommandLine::Text(counting.into())), None).await.expect("started");
    m.sh("head -c 3000000 /dev/urandom >/workspace/data; sha256sum /workspace/data >/workspace/sum").await;
    let before = m.sh("cat /proc/sys/kernel/random/boot_id; cat /etc/machine-id").await.text();
    for round in 0..3 {
        pause(&m).await;
        assert_eq!(service.vmms().len(), 0, "{round}: nothing runs");
        assert_eq!(code(m.try_sh("true").await), ErrorCode::MachineNotRunning);
        if round == 1 {
            break;
        }
        resume(&m).await;
        assert_eq!(m.sh("sha256sum -c /workspace/sum").await.text(), "/workspace/data: OK\n", "{round}");
    }
    // The service dies while the machine is paused.
    service.crash().await;
    m = service.attach(m.name.clone());
    assert_eq!(m.record().await.state, State::Paused);
    assert_eq!(code(m.try_sh("true").await), ErrorCode::MachineNotRunning);
    resume(&m).await;
    let late = m.sh("date +%s").await.text().trim().parse::<i64>().expect("a number");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs() as i64;
    assert!((now - late).abs() <= 2, "its clock is right: {late} at {now}");
    assert_eq!(
        m.sh("cat /proc/sys/kernel/random/boot_id; cat /etc/machine-id").await.text(),
        before,
        "the same machine"
    );
    let ended = m.client.wait_job(&m.name, &job.job.id, PATIENCE).await.expect("it goes on to its end");
    assert_eq!(ended.exit.and_then(|e| e.code), Some(0));
    let mut said = String::new();
    let mut follow = m.client.follow_job(&m.name, &job.job.id, 0);
    while let Some(event) = follow.next().await.expect("its log") {
        if let mainbrella_client::api::JobEventKind::Output { data_base64, .. } = event.kind {
            use base64::Engine as _;
            let bytes = base64::engine::general_purpose::STANDARD.decode(data_base64).expect("base64");
            said.push_str(&String::from_utf8(bytes).expect("text"));
        }
    }
    let all: String = (1..=120).map(|n| format!("{n}\n")).collect();
    assert_eq!(said, all, "nothing of its output is lost or repeated");
    assert_eq!(m.sh("cat /workspace/seen").await.text(), all, "nor of what it wrote");
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_machine_is_stopped_and_leaves_nothing_and_its_preview_says_what_it_is() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    let asked = CreatePreview { port: 3000, ttl_seconds: None };
    m.client.create_preview(&m.name, &asked, "one").await.expect("a preview");
    pause(&m).await;
    assert_eq!(code(m.client.create_preview(&m.name, &asked, "two").await), ErrorCode::MachineNotRunning);
    m.stop().await;
    let left = std::fs::read_dir(service.data().join("machines")).expect("the folder").count();
    assert_eq!(left, 0, "nothing of it is left");
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_of_a_running_machine_go_on_each_by_itself() {
    let mut service = Service::start().await;
    let trunk = service.machine().await;
    let counting = "i=0; while [ $i -lt 80 ]; do i=$((i+1)); echo $i; sleep 0.1; done";
    let counting = StartJob::new(CommandLine::Text(counting.into()));
    let job = trunk.client.start_job(&trunk.name, &counting, None).await.expect("started");
    trunk
        .sh("mkdir -p /workspace/repo; cd /workspace/repo && head -c 2000000 /dev/urandom >data && sha256sum data >sum")
        .await;
    let asked = ForkMachine { count: Some(2), ..ForkMachine::default() };
    let made = trunk.client.fork(&trunk.name, &asked, Some("k")).await;
    let made = made.unwrap_or_else(|e| panic!("fork: {e:?}; {}", service.log()));
    eprintln!("the source stood still for {:?} ms; {:?} bytes of memory", made.still_ms, made.memory_bytes);
    service.look();
    assert_eq!(made.children.iter().filter(|c| c.state == State::Running).count(), 2);
    let children: Vec<Machine> = made.children.iter().map(|child| service.attach(child.into())).collect();
    let mut told = std::collections::HashSet::new();
    for m in children.iter().chain([&trunk]) {
        assert_eq!(m.sh("cd /workspace/repo && sha256sum -c sum").await.text(), "data: OK\n");
        let ids = m.sh("hostname; cat /etc/machine-id; head -c 16 /dev/urandom | od -An -tx1").await.text();
        assert!(
            ids.lines().all(|line| told.insert(line.to_owned())),
            "name, machine-id, random numbers of its own: {ids}"
        );
        m.write("/workspace/mine", m.name.id.clone()).await.expect("written");
    }
    for m in children.iter().chain([&trunk]) {
        assert_eq!(m.sh("cat /workspace/mine").await.text(), m.name.id, "no other machine's write is seen");
    }
    trunk.stop().await;
    let one = ForkMachine::default();
    let again =
        children[0].client.fork(&children[0].name, &one, None).await.expect("a fork of a fork, its source gone");
    service.look();
    let grandchild = service.attach((&again.children[0]).into());
    assert_eq!(grandchild.sh("cd /workspace/repo && sha256sum -c sum").await.text(), "data: OK\n");
    let ended = children[1].client.wait_job(&children[1].name, &job.job.id, PATIENCE).await.expect("its own copy");
    assert_eq!(ended.exit.and_then(|e| e.code), Some(0));
    let all: usize = (1..=80).map(|n: u32| n.to_string().len() + 1).sum();
    assert_eq!(ended.stdout_bytes, all as u64, "nothing is lost or repeated");
    service.finish().await;
}

/// One reply of a preview, whole.
async fn fetch(url: &str, path: &str) -> (u16, String) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let host = url.strip_prefix("http://").expect("http").split('/').next().expect("a host");
    let port = host.rsplit_once(':').expect("a port").1;
    let mut stream = tokio::net::TcpStream::connect(format!("127.0.0.1:{port}")).await.expect("connected");
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("a reply");
    let status = text.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or_else(|| panic!("no reply: {text:?}"));
    (status, text.split_once("\r\n\r\n").map_or(String::new(), |(_, body)| body.to_owned()))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unused_machine_is_paused_and_a_preview_request_a_command_and_a_file_each_bring_it_back() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port();
    let arguments = vec!["--preview-listen".to_owned(), format!("127.0.0.1:{port}")];
    let mut service = Service::with(Setup { arguments, ..Setup::default() }).await;
    let mut body = machine_body();
    (body.idle_timeout_seconds, body.on_idle) = (Some(6), OnIdle::Pause);
    let m = service.create(&body).await.expect("made");
    assert!(m.record().await.auto_resume, "it comes back by itself unless it is told not to");
    m.write("/workspace/index.html", "served\n").await.expect("written");
    // A server that is no job of anybody's, so that it is no use by itself.
    m.sh("cd /workspace && setsid -f python3 -m http.server --bind 127.0.0.1 3000 >/tmp/log 2>&1 </dev/null").await;
    let asked = CreatePreview { port: 3000, ttl_seconds: None };
    let url = m.client.create_preview(&m.name, &asked, "one").await.expect("a preview").url.expect("told once");
    host::until("the server", PATIENCE, async || fetch(&url, "/index.html").await.0 == 200).await;
    let paused = async |m: &Machine| {
        host::until("it is paused", PATIENCE, async || m.record().await.state == State::Paused).await;
    };
    paused(&m).await;
    assert_eq!(service.vmms().len(), 0, "nothing runs");
    assert_eq!(fetch(&url, "/index.html").await, (200, "served\n".to_owned()), "a request wakes it");
    paused(&m).await;
    // A restart of the service changes nothing of it.
    service.crash().await;
    let m = service.attach(m.name.clone());
    assert_eq!(m.record().await.state, State::Paused);
    let all = futures::future::join_all((0..6).map(|n| {
        let m = m.clone();
        async move { m.text(&format!("cat /workspace/index.html; echo {n}")).await }
    }));
    for (n, said) in all.await.into_iter().enumerate() {
        assert_eq!(said, format!("served\n{n}\n"), "all who need it wait for one return");
    }
    assert_eq!(service.vmms().len(), 1);
    // A job goes on over a pause that was asked for, when the next call brings the machine back.
    let counting = StartJob::new(CommandLine::Text("for i in $(seq 40); do echo $i; sleep 0.1; done".into()));
    let job = m.client.start_job(&m.name, &counting, None).await.expect("started");
    pause(&m).await;
    assert_eq!(m.read("/workspace/index.html").await.expect("read"), b"served\n");
    let ended = m.client.wait_job(&m.name, &job.job.id, PATIENCE).await.expect("it goes on to its end");
    let all: usize = (1..=40).map(|n: u32| n.to_string().len() + 1).sum();
    assert_eq!((ended.exit.and_then(|e| e.code), ended.stdout_bytes), (Some(0), all as u64));
    service.finish().await;
}

/// Draws numbers when it is asked, from the module's own generators. Without the library it has the same in each copy.
const WARM: &str = r#"
import os, random, sys, time
import numpy
if sys.argv[1] == "registered":
    import mainbrella_reseed
random.seed(1)
numpy.random.seed(1)
me = "/tmp/" + sys.argv[1]
open(me + ".ready", "w").close()
while True:
    if os.path.exists(me + ".ask"):
        os.unlink(me + ".ask")
        with open(me + ".half", "w") as said:
            said.write(f"{random.random()} {numpy.random.random()}")
        os.rename(me + ".half", me + ".said")
    time.sleep(0.05)
"#;
const WARM_NODE: &str = r#"
const crypto = require('crypto');
const fs = require('fs');
if (process.argv[2] === 'registered') require('mainbrella-reseed');
Math.random();
crypto.randomBytes(8);
const me = '/tmp/' + process.argv[2];
setInterval(() => {
  if (!fs.existsSync(me + '.ask')) return;
  fs.unlinkSync(me + '.ask');
  fs.writeFileSync(me + '.half', Math.random() + ' ' + crypto.randomBytes(8).toString('hex'));
  fs.renameSync(me + '.half', me + '.said');
}, 50);
fs.writeFileSync(me + '.ready', '');
"#;

async fn warm(m: &Machine, command: &str, name: &str) {
    m.sh(&format!("setsid -f {command} {name} >/tmp/{name}.log 2>&1 </dev/null")).await;
    let look = format!("test -e /tmp/{name}.ready; echo $?; cat /tmp/{name}.log");
    let mut seen = String::new();
    for _ in 0..240 {
        seen = m.sh(&look).await.text();
        if seen.starts_with("0\n") {
            return;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    panic!("{command} {name} is not warm: {seen}");
}

/// What a warm program says, as its words.
async fn drawn(m: &Machine, name: &str) -> Vec<String> {
    let ask = format!(
        "touch /tmp/{name}.ask; for i in $(seq 200); do test -e /tmp/{name}.said && break; sleep 0.05; done; cat /tmp/{name}.said"
    );
    m.text(&ask).await.split_whitespace().map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn two_children_of_warm_python_programs_draw_numbers_of_their_own_and_the_receipt_says_what_was_done() {
    let mut service = Service::start().await;
    let python = service.machine().await;
    python.write("/workspace/warm.py", WARM).await.expect("written");
    for name in ["registered", "plain"] {
        warm(&python, "python3 /workspace/warm.py", name).await;
    }
    let context = python.client.create_context(&python.name, &CreateContext::new("python")).await.expect("made").id;
    let run = async |m: &Machine, code: &str| {
        let body = RunCode { code: code.to_owned(), timeout_ms: Some(120_000) };
        m.client.run_code(&m.name, &context, &body).await.expect("ran").stdout
    };
    run(&python, "import random; random.seed(1)").await;
    let hooks = "mkdir -p /etc/mainbrella/reseed.d && cd /etc/mainbrella/reseed.d && printf '#!/bin/sh\\nod -An -tx1 -N8 /dev/urandom >/root/hook\\n' >10-draws \
                 && printf '#!/bin/sh\\nexit 4\\n' >20-fails && chmod 755 10-draws 20-fails";
    python.text(hooks).await;
    let two = ForkMachine { count: Some(2), ..ForkMachine::default() };
    let made =
        python.client.fork(&python.name, &two, None).await.unwrap_or_else(|e| panic!("fork: {e:?}; {}", service.log()));
    for receipt in &made.receipts {
        let hooks: Vec<_> = receipt.random.hooks.iter().map(|h| (h.name.as_str(), h.exit_code, h.timed_out)).collect();
        assert_eq!(hooks, [("10-draws", Some(0), false), ("20-fails", Some(4), false)]);
        // The program and the kernel of the context.
        assert_eq!((receipt.random.kernel, receipt.random.registered, receipt.random.acknowledged), (true, 2, 2));
    }
    let children: Vec<Machine> = made.children.iter().map(|child| service.attach(child.into())).collect();
    let [a, b] = children.as_slice() else { panic!("two") };
    assert_eq!(
        drawn(a, "plain").await,
        drawn(b, "plain").await,
        "what is not registered goes on with the same sequence"
    );
    let (ours, theirs) = (drawn(a, "registered").await, drawn(b, "registered").await);
    assert!(ours.len() == 2 && ours[0] != theirs[0] && ours[1] != theirs[1], "random and NumPy: {ours:?} {theirs:?}");
    let draw = "print(random.random())";
    assert_ne!(run(a, draw).await, run(b, draw).await, "kernels of contexts register themselves");
    assert_ne!(
        a.text("cat /root/hook").await,
        b.text("cat /root/hook").await,
        "the kernel's numbers are fresh when hooks run"
    );

    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_children_of_a_warm_node_program_draw_numbers_of_their_own() {
    let mut service = Service::start().await;
    let mut body = mainbrella_client::api::CreateMachine::new("node");
    let two = ForkMachine { count: Some(2), ..ForkMachine::default() };
    body.size = "small".to_owned();
    let node = service.create(&body).await.expect("made");
    node.write("/workspace/warm.js", WARM_NODE).await.expect("written");
    for name in ["registered", "plain"] {
        warm(&node, "node /workspace/warm.js", name).await;
    }
    let made =
        node.client.fork(&node.name, &two, None).await.unwrap_or_else(|e| panic!("fork: {e:?}; {}", service.log()));
    for receipt in &made.receipts {
        assert_eq!((receipt.random.registered, receipt.random.acknowledged), (1, 1));
    }
    let children: Vec<Machine> = made.children.iter().map(|child| service.attach(child.into())).collect();
    let [a, b] = children.as_slice() else { panic!("two") };
    assert_eq!(drawn(a, "plain").await[0], drawn(b, "plain").await[0]);
    let (ours, theirs) = (drawn(a, "registered").await, drawn(b, "registered").await);
    assert_ne!(ours[0], theirs[0], "Math.random");
    eprintln!("crypto.randomBytes of two children of one warm Node process: {} and {}", ours[1], theirs[1]);
    service.finish().await;
}
