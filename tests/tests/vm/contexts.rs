//! Code contexts: real Jupyter kernels in real machines.

use std::time::{Duration, Instant};

use base64::Engine as _;
use mainbrella_client::ClientError;
use mainbrella_client::api::context::bundle_text;
use mainbrella_client::api::{CodeResult, CodeStatus, ContextState, CreateContext, OutputKind, RunCode};
use mainbrella_tests::{Machine, Service, host};
use mainbrella_types::ErrorCode;

use crate::code;

async fn context(m: &Machine) -> String {
    let begin = Instant::now();
    let made = m.client.create_context(&m.name, &CreateContext::new("python")).await;
    let made = made.unwrap_or_else(|e| panic!("a context: {e:?}"));
    eprintln!("a context after {:?}", begin.elapsed());
    assert_eq!((made.state, made.language.as_str()), (ContextState::Idle, "python"));
    made.id
}

async fn try_run(m: &Machine, id: &str, text: &str, timeout_ms: u64) -> Result<CodeResult, ClientError> {
    let body = RunCode { code: text.to_owned(), timeout_ms: Some(timeout_ms) };
    m.client.run_code(&m.name, id, &body).await
}

async fn run(m: &Machine, id: &str, text: &str) -> CodeResult {
    try_run(m, id, text, 120_000).await.unwrap_or_else(|e| panic!("`{text}`: {e:?}"))
}

/// The text of the value a run gave.
fn value(result: &CodeResult) -> String {
    let given = result.results.iter().rev().find(|r| r.r#type == OutputKind::Result);
    let given = given.unwrap_or_else(|| panic!("a value: {result:?}"));
    bundle_text(&given.data, "text/plain").expect("text")
}

async fn until(m: &Machine, id: &str, state: ContextState) {
    host::until("the state of the context", Duration::from_secs(20), async || {
        m.client.context(&m.name, id).await.expect("there").state == state
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn state_survives_and_every_kind_of_output_comes_apart() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    let id = context(&m).await;
    let first =
        run(&m, &id, "import sys, os\nx = 41\nprint('out', os.getcwd())\nprint('err', file=sys.stderr)\nx + 1").await;
    assert_eq!((first.status, first.execution_count), (CodeStatus::Ok, Some(1)));
    assert_eq!((first.stdout.as_str(), first.stderr.as_str()), ("out /workspace\n", "err\n"));
    assert_eq!(value(&first), "42");
    let second = run(&m, &id, "def f(n): return x * n\nf(2)").await;
    assert_eq!((value(&second).as_str(), second.execution_count), ("82", Some(2)));

    let error = run(&m, &id, "print('before')\nf(1) / 0").await;
    assert_eq!((error.status, error.stdout.as_str()), (CodeStatus::Error, "before\n"));
    let raised = error.error.expect("an exception");
    assert_eq!((raised.name.as_str(), raised.value.as_str()), ("ZeroDivisionError", "division by zero"));
    assert!(raised.traceback.iter().any(|l| l.contains("f(1) / 0")), "{raised:?}");
    assert!(!raised.traceback.concat().contains('\u{1b}'), "no colours: {raised:?}");
    let error = run(&m, &id, "1 +").await.error.expect("an exception");
    assert_eq!(error.name, "SyntaxError");
    let error = run(&m, &id, "input('? ')").await.error.expect("an exception");
    assert!(error.name.contains("StdinNotImplemented"), "{error:?}");
    // Output of programs counts as the code's own.
    assert_eq!(run(&m, &id, "print(os.system('echo from a program'))").await.stdout, "from a program\n0\n");

    // Another one, with surroundings of its own.
    let mut other = CreateContext::new("python");
    other.cwd = Some("/tmp".into());
    other.env = [("GREETING".to_owned(), "h\u{e9}".to_owned())].into();
    let begin = Instant::now();
    let other = m.client.create_context(&m.name, &other).await.expect("another").id;
    eprintln!("a further context after {:?}", begin.elapsed());
    let seen = run(&m, &other, "import os; print(os.getcwd(), os.environ['GREETING'], 'x' in globals())").await;
    assert_eq!(seen.stdout, "/tmp h\u{e9} False\n");
    let both = tokio::join!(
        run(&m, &id, "import time\nt = time.time()\ntime.sleep(1.5)\n(t, time.time())"),
        run(&m, &other, "import time\nt = time.time()\ntime.sleep(1.5)\n(t, time.time())"),
    );
    let span = |r: &CodeResult| -> (f64, f64) {
        let text = value(r);
        let (a, b) = text.trim_matches(['(', ')']).split_once(", ").expect("two times");
        (a.parse().expect("a time"), b.parse().expect("a time"))
    };
    let (a, b) = (span(&both.0), span(&both.1));
    assert!(a.0 < b.1 && b.0 < a.1, "at once: {a:?} {b:?}");
    assert_eq!(m.client.contexts(&m.name).await.expect("list").len(), 2);

    // A new kernel: same id, surroundings kept, state gone.
    let again = m.client.restart_context(&m.name, &other).await.expect("restarted");
    assert_eq!((again.id.as_str(), again.state), (other.as_str(), ContextState::Idle));
    let seen = run(&m, &other, "import os; print(os.getcwd(), os.environ['GREETING'], 't' in globals())").await;
    assert_eq!(seen.stdout, "/tmp h\u{e9} False\n");
    assert_eq!(value(&run(&m, &id, "x").await), "41", "the other is untouched");
    m.client.close_context(&m.name, &other).await.expect("closed");
    assert_eq!(code(try_run(&m, &other, "1", 1000).await), ErrorCode::NotFound);
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn plots_and_other_rich_results_come_by_their_type() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    let id = context(&m).await;
    let begin = Instant::now();
    let plot = run(&m, &id, "import matplotlib.pyplot as plt\nplt.plot([1, 4, 2])\nplt.show()").await;
    eprintln!("the first plot after {:?}", begin.elapsed());
    assert_eq!(plot.status, CodeStatus::Ok, "{plot:?}");
    let figure = plot.results.iter().find(|r| r.data.contains_key("image/png")).unwrap_or_else(|| panic!("{plot:?}"));
    assert_eq!(figure.r#type, OutputKind::Display);
    let png = bundle_text(&figure.data, "image/png").expect("base64");
    let png = base64::engine::general_purpose::STANDARD.decode(png.replace('\n', "")).expect("base64");
    assert!(png.starts_with(b"\x89PNG\r\n") && png.len() > 2000, "{} bytes", png.len());

    let rich = run(
        &m,
        &id,
        "from IPython.display import HTML, JSON, display\ndisplay(HTML('<b>bold</b>'))\nJSON({'a': [1, 2]})",
    )
    .await;
    assert_eq!(rich.results.len(), 2, "{rich:?}");
    assert_eq!(bundle_text(&rich.results[0].data, "text/html").as_deref(), Some("<b>bold</b>"));
    assert_eq!(rich.results[1].r#type, OutputKind::Result);
    let json: serde_json::Value = serde_json::from_str(rich.results[1].data["application/json"].get()).expect("JSON");
    assert_eq!(json, serde_json::json!({"a": [1, 2]}));

    // Twenty million letters, a picture too large, and more pictures than are kept.
    let begin = Instant::now();
    let flood = run(&m, &id, "print('begin'); print('a' * 20_000_000); print('end')").await;
    eprintln!("20 MB of output after {:?}", begin.elapsed());
    assert_eq!((flood.status, flood.truncated), (CodeStatus::Ok, true));
    let missing = flood.stdout_omitted.expect("a gap");
    assert_eq!(flood.stdout.len() as u64 + missing.length, 20_000_000 + 11);
    assert!(flood.stdout.len() <= 1024 * 1024 && flood.stdout.len() > 900 * 1024, "{}", flood.stdout.len());
    assert!(flood.stdout.starts_with("begin\naaaa") && flood.stdout.ends_with("aaaa\nend\n"));
    let large = "from IPython.display import display\ndisplay({'image/png': 'A' * 5_000_000, 'text/plain': 'a picture'}, raw=True)";
    let large = run(&m, &id, large).await;
    assert!(large.truncated && large.results.len() == 1, "{large:?}");
    assert_eq!(large.results[0].data.keys().collect::<Vec<_>>(), ["text/plain"]);
    let many = run(&m, &id, "for n in range(1000): display({'text/html': str(n)}, raw=True)").await;
    assert!(many.truncated && many.results.len() == 256, "{}", many.results.len());
    assert_eq!(value(&run(&m, &id, "1 + 1").await), "2", "and it goes on");
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn code_ends_at_its_time_limit_at_an_interrupt_and_with_its_caller() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    let id = context(&m).await;
    run(&m, &id, "import time\nx = 1").await;
    let slow = try_run(&m, &id, "print('begun', flush=True)\ntime.sleep(600)", 2000).await.expect("a result");
    assert_eq!((slow.status, slow.stdout.as_str()), (CodeStatus::TimedOut, "begun\n"));
    assert!((2000..9000).contains(&slow.duration_ms), "{}", slow.duration_ms);

    let running = {
        let (m, id) = (m.clone(), id.clone());
        tokio::spawn(async move { run(&m, &id, "print('begun', flush=True)\nwhile True: pass").await })
    };
    until(&m, &id, ContextState::Busy).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    m.client.interrupt_context(&m.name, &id).await.expect("interrupted");
    let stopped = running.await.expect("joined");
    assert_eq!((stopped.status, stopped.stdout.as_str()), (CodeStatus::Interrupted, "begun\n"));
    assert_eq!(stopped.error.expect("an exception").name, "KeyboardInterrupt");

    // The caller goes away.
    let gone = tokio::time::timeout(Duration::from_secs(2), run(&m, &id, "time.sleep(600)")).await;
    assert!(gone.is_err());
    let begin = Instant::now();
    assert_eq!(value(&run(&m, &id, "x").await), "1", "its state is there");
    assert!(begin.elapsed() < Duration::from_secs(15), "the next one had its turn: {:?}", begin.elapsed());

    // What does not listen is killed.
    let stubborn = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True:\n    try: time.sleep(60)\n    except KeyboardInterrupt: pass";
    let killed = try_run(&m, &id, stubborn, 2000).await.expect("a result");
    assert_eq!(killed.status, CodeStatus::TimedOut, "{killed:?}");
    assert_eq!(code(try_run(&m, &id, "x", 1000).await), ErrorCode::ContextDead);
    m.client.restart_context(&m.name, &id).await.expect("restarted");
    assert_eq!(value(&run(&m, &id, "'alive'").await), "'alive'");
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_kernel_is_told_within_two_seconds_and_a_killed_bridge_too() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    let (id, other) = (context(&m).await, context(&m).await);
    let pid = value(&run(&m, &id, "import os, time; os.getpid()").await);
    let running = {
        let (m, id) = (m.clone(), id.clone());
        tokio::spawn(async move { (try_run(&m, &id, "time.sleep(600)", 700_000).await, Instant::now()) })
    };
    until(&m, &id, ContextState::Busy).await;
    m.text(&format!("kill -9 {pid}")).await;
    let killed = Instant::now();
    let (answer, told) = running.await.expect("joined");
    assert_eq!(code(answer), ErrorCode::ContextDead);
    assert!(told.saturating_duration_since(killed) < Duration::from_secs(2), "{:?}", told - killed);
    assert_eq!(m.client.context(&m.name, &id).await.expect("kept").state, ContextState::Dead);
    assert_eq!(code(try_run(&m, &id, "1", 1000).await), ErrorCode::ContextDead);
    assert_eq!(value(&run(&m, &other, "1").await), "1", "the other one lives");
    m.client.restart_context(&m.name, &id).await.expect("restarted");
    assert_eq!(value(&run(&m, &id, "'time' in globals()").await), "False");

    // The user may kill whatever there is: also what all kernels hang on.
    let running = {
        let (m, id) = (m.clone(), id.clone());
        tokio::spawn(async move { (try_run(&m, &id, "import time; time.sleep(600)", 700_000).await, Instant::now()) })
    };
    until(&m, &id, ContextState::Busy).await;
    m.text("pkill -9 -f '^/usr/bin/python3'").await;
    let killed = Instant::now();
    let (answer, told) = running.await.expect("joined");
    assert_eq!(code(answer), ErrorCode::ContextDead);
    assert!(told.saturating_duration_since(killed) < Duration::from_secs(2), "{:?}", told - killed);
    for id in [&id, &other] {
        assert_eq!(m.client.context(&m.name, id).await.expect("kept").state, ContextState::Dead);
        m.client.restart_context(&m.name, id).await.expect("restarted");
        assert_eq!(value(&run(&m, id, "1").await), "1");
    }
    let left = m.text("pgrep -fc '^/usr/bin/python3'").await;
    assert!(left.trim().parse::<u32>().expect("a number") <= 4, "bridge, nursery and two kernels: {left}");
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn contexts_outlive_a_killed_service_and_abandoned_code_ends() {
    let mut service = Service::start().await;
    let m = service.machine().await;
    let id = context(&m).await;
    let created = m.client.context(&m.name, &id).await.expect("there").created_at;
    run(&m, &id, "import time\nx = 'kept'").await;
    let cut = {
        let (m, id) = (m.clone(), id.clone());
        let text = "while True:\n    print('y' * 1000)\n    time.sleep(0.001)";
        tokio::spawn(async move { try_run(&m, &id, text, 3_600_000).await.map(drop) })
    };
    until(&m, &id, ContextState::Busy).await;
    service.look();
    service.kill();
    assert!(cut.await.expect("joined").is_err(), "its caller lost the connection");
    // Long enough for its output to fill whatever there is between it and a host that is not there.
    tokio::time::sleep(Duration::from_secs(5)).await;
    service.launch().await;
    let m = service.attach(m.name.clone());
    let list = m.client.contexts(&m.name).await.expect("listed");
    assert_eq!(
        list.iter().map(|c| (c.id.as_str(), c.created_at.as_str())).collect::<Vec<_>>(),
        [(id.as_str(), created.as_str())]
    );
    let begin = Instant::now();
    assert_eq!(value(&run(&m, &id, "x").await), "'kept'");
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    service.crash().await;
    let m = service.attach(m.name.clone());
    assert_eq!(value(&run(&m, &id, "x").await), "'kept'");
    let second = context(&m).await;
    assert_eq!(value(&run(&m, &second, "2").await), "2");
    service.finish().await;
}
