//! Code contexts against the scripted bridge: real lines over the real guest protocol, faults on demand.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mainbrella_engine::{
    CodeEnd, CodeEvent, CodeOrder, CodeStatus, ContextInfo, ContextOrder, ContextState, EngineError, ExitReport,
    Language, MachineHandle, TextStream,
};
use mainbrella_types::{ErrorCode, FailureKind, MachineState, limits};

use crate::Bench;

async fn machine(bench: &Bench) -> MachineHandle {
    bench.engine.create(bench.intent("small", 600_000, None)).await.expect("made")
}

fn python() -> ContextOrder {
    ContextOrder { language: Language::Python, cwd: None, env: BTreeMap::new() }
}

async fn context(machine: &MachineHandle) -> String {
    let made = machine.create_context(python()).await.expect("a context");
    assert_eq!(made.state, ContextState::Idle);
    made.id
}

fn code(text: &str) -> CodeOrder {
    CodeOrder { code: text.replace("; ", "\n"), timeout_ms: 10_000 }
}

#[derive(Debug, Default)]
struct Heard {
    stdout: String,
    stderr: String,
    results: Vec<String>,
    error: Option<String>,
    end: Option<CodeEnd>,
}

impl Heard {
    fn status(&self) -> CodeStatus {
        self.end.expect("ended").status
    }
}

async fn run(machine: &MachineHandle, id: &str, order: CodeOrder) -> Result<Heard, EngineError> {
    let mut run = machine.run_code(id, order).await?;
    let mut heard = Heard::default();
    while let Some(event) = run.next().await {
        match event? {
            CodeEvent::Text(TextStream::Stdout, text) => heard.stdout.push_str(&text),
            CodeEvent::Text(TextStream::Stderr, text) => heard.stderr.push_str(&text),
            CodeEvent::Gap(..) => {}
            CodeEvent::Result(data) | CodeEvent::Display(data) => {
                heard.results.extend(data.iter().map(|(mime, value)| format!("{mime}={}", value.get())));
            }
            CodeEvent::Error { name, .. } => heard.error = Some(name),
            CodeEvent::Done(end) => heard.end = Some(end),
        }
    }
    Ok(heard)
}

async fn refused(machine: &MachineHandle, id: &str, text: &str) -> ErrorCode {
    run(machine, id, code(text)).await.expect_err("a refusal").code()
}

async fn until(machine: &MachineHandle, id: &str, state: ContextState) {
    let end = Instant::now() + Duration::from_secs(5);
    loop {
        let now: ContextInfo = machine.context(id).await.expect("there");
        if now.state == state {
            return;
        }
        assert!(Instant::now() < end, "{now:?} instead of {state:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn state_survives_between_runs_and_each_kind_of_output_comes_apart() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    let (a, b) = (context(&machine).await, context(&machine).await);
    let first = run(&machine, &a, code("set x 42; print out; err problem; value 7; picture 5000")).await.expect("ran");
    assert_eq!((first.stdout.as_str(), first.stderr.as_str(), first.status()), ("out\n", "problem\n", CodeStatus::Ok));
    assert_eq!(first.results[0], "text/plain=\"7\"");
    assert!(first.results.iter().any(|r| r.len() > 5000 && r.starts_with("image/png=")));
    let second = run(&machine, &a, code("get x")).await.expect("ran");
    assert_eq!(
        (second.results[0].as_str(), second.end.expect("ended").execution_count),
        ("text/plain=\"42\"", Some(2))
    );
    // The other one is another one.
    let other = run(&machine, &b, code("get x")).await.expect("ran");
    assert_eq!((other.error.as_deref(), other.status()), (Some("NameError"), CodeStatus::Error));
    machine.restart_context(&a).await.expect("restarted");
    assert_eq!(run(&machine, &a, code("get x")).await.expect("ran").status(), CodeStatus::Error);
    assert_eq!(machine.contexts().await.expect("listed").len(), 2);
    machine.close_context(&a).await.expect("closed");
    assert_eq!(refused(&machine, &a, "value 1").await, ErrorCode::NotFound);
    assert_eq!(machine.close_context(&a).await.expect_err("gone").code(), ErrorCode::NotFound);
}

#[tokio::test]
async fn runs_of_one_context_wait_for_their_turn_and_too_many_are_refused() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    let id = context(&machine).await;
    let mut runs = Vec::new();
    for i in 0..=limits::CODE_QUEUE_MAX {
        let (machine, id) = (machine.clone(), id.clone());
        runs.push(tokio::spawn(async move { run(&machine, &id, code(&format!("sleep 10; set x {i}; get x"))).await }));
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let mut late = None;
    for _ in 0..3 {
        let (machine, id) = (machine.clone(), id.clone());
        late = late.or(tokio::time::timeout(Duration::from_millis(5), run(&machine, &id, code("value 1"))).await.ok());
    }
    for (i, done) in runs.into_iter().enumerate() {
        let heard = done.await.expect("joined").expect("ran");
        assert_eq!(heard.results, [format!("text/plain=\"{i}\"")]);
        assert_eq!(heard.end.expect("ended").execution_count, Some(i as u64 + 1), "in the order of asking");
    }
    if let Some(refusal) = late {
        assert_eq!(refusal.expect_err("too many").code(), ErrorCode::Overloaded);
    }
    for _ in 1..limits::CONTEXTS_MAX {
        context(&machine).await;
    }
    assert_eq!(machine.create_context(python()).await.expect_err("full").code(), ErrorCode::Overloaded);
}

#[tokio::test]
async fn links_that_break_neither_lose_nor_repeat_anything() {
    let bench = Bench::new();
    let record = bench.intent("small", 600_000, None);
    let machine = bench.engine.create(record.clone()).await.expect("made");
    let (a, b) = (context(&machine).await, context(&machine).await);
    let expected: String = (0..300).map(|n| format!("{n}\n")).collect();
    let cutter = {
        let driver = bench.driver.clone();
        tokio::spawn(async move {
            for i in 0..40u64 {
                tokio::time::sleep(Duration::from_millis(7 + i * 13 % 31)).await;
                driver.cut(&record.key);
            }
        })
    };
    let chat = |id: String| {
        let machine = machine.clone();
        async move {
            for n in 1..=3u64 {
                let heard = run(&machine, &id, code("chat 300")).await.expect("ran");
                assert_eq!(heard.end.expect("ended").execution_count, Some(n), "carried out once");
                assert_eq!(heard.stdout.len(), 1090);
                assert_eq!(heard.status(), CodeStatus::Ok);
                yield_stdout(&heard.stdout);
            }
        }
    };
    tokio::join!(chat(a.clone()), chat(b));
    cutter.await.expect("joined");
    let heard = run(&machine, &a, code("chat 300")).await.expect("ran");
    assert_eq!(heard.stdout, expected);
}

fn yield_stdout(text: &str) {
    assert!(text.lines().enumerate().all(|(i, l)| l == i.to_string()), "out of order");
}

#[tokio::test]
async fn a_killed_kernel_is_told_at_once_and_a_restart_revives_it() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    let id = context(&machine).await;
    let begin = Instant::now();
    let e = run(&machine, &id, code("set x 1; print before; die")).await.expect_err("dead");
    assert!(begin.elapsed() < Duration::from_secs(2));
    assert_eq!((e.code(), e.message()), (ErrorCode::ContextDead, "the context's kernel was ended by signal 9"));
    until(&machine, &id, ContextState::Dead).await;
    assert_eq!(refused(&machine, &id, "value 1").await, ErrorCode::ContextDead);
    assert_eq!(machine.interrupt_context(&id).await.expect_err("dead").code(), ErrorCode::ContextDead);
    assert_eq!(machine.restart_context(&id).await.expect("revived").state, ContextState::Idle);
    assert_eq!(run(&machine, &id, code("value 1")).await.expect("ran").status(), CodeStatus::Ok);
}

#[tokio::test]
async fn a_time_limit_interrupts_and_kills_what_does_not_listen() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    let id = context(&machine).await;
    let slow = CodeOrder { timeout_ms: 50, ..code("print begun; sleep 60000") };
    let heard = run(&machine, &id, slow).await.expect("ended");
    assert_eq!((heard.stdout.as_str(), heard.status()), ("begun\n", CodeStatus::TimedOut));
    until(&machine, &id, ContextState::Idle).await;
    let stubborn = CodeOrder { timeout_ms: 50, ..code("print begun; hang") };
    let heard = run(&machine, &id, stubborn).await.expect("ended");
    assert_eq!((heard.stdout.as_str(), heard.status()), ("begun\n", CodeStatus::TimedOut));
    assert_eq!(refused(&machine, &id, "value 1").await, ErrorCode::ContextDead);
}

#[tokio::test]
async fn an_interrupt_and_a_caller_that_goes_away_end_the_code_and_nothing_else() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    let id = context(&machine).await;
    let running = {
        let (machine, id) = (machine.clone(), id.clone());
        tokio::spawn(async move { run(&machine, &id, code("set x 1; sleep 60000")).await })
    };
    until(&machine, &id, ContextState::Busy).await;
    machine.interrupt_context(&id).await.expect("interrupted");
    assert_eq!(running.await.expect("joined").expect("ended").status(), CodeStatus::Interrupted);

    for _ in 0..3 {
        let mut going = machine.run_code(&id, code("print begun; sleep 60000")).await.expect("begun");
        assert!(matches!(going.next().await, Some(Ok(CodeEvent::Text(TextStream::Stdout, text))) if text == "begun\n"));
        drop(going);
        // The next one gets its turn as soon as the abandoned one has ended.
        let next = tokio::time::timeout(Duration::from_secs(2), run(&machine, &id, code("get x"))).await;
        assert_eq!(next.expect("at once").expect("ran").results, ["text/plain=\"1\""]);
    }
    // One that still waits for its turn just goes away.
    let first = machine.run_code(&id, code("sleep 100")).await.expect("begun");
    let second = tokio::time::timeout(Duration::from_millis(20), machine.run_code(&id, code("set x 2"))).await;
    assert!(second.is_err(), "it waits");
    drop(first);
    assert_eq!(run(&machine, &id, code("get x")).await.expect("ran").results, ["text/plain=\"1\""]);
}

#[tokio::test]
async fn a_bridge_that_breaks_the_rules_is_ended_and_a_new_one_begins() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    let (id, other) = (context(&machine).await, context(&machine).await);
    for breach in ["garbage", "flood"] {
        let bystander = {
            let (machine, other) = (machine.clone(), other.clone());
            tokio::spawn(async move { run(&machine, &other, code("sleep 60000")).await })
        };
        until(&machine, &other, ContextState::Busy).await;
        let e = run(&machine, &id, code(&format!("{breach}; sleep 60000"))).await.expect_err(breach);
        assert_eq!(e.code(), ErrorCode::ContextDead, "{breach}: {e:?}");
        let e = bystander.await.expect("joined").expect_err("all kernels ended");
        assert_eq!(e.code(), ErrorCode::ContextDead);
        for id in [&id, &other] {
            assert_eq!(machine.context(id).await.expect("kept").state, ContextState::Dead);
            assert_eq!(machine.restart_context(id).await.expect("revived").state, ContextState::Idle);
        }
        assert_eq!(run(&machine, &id, code("value 1")).await.expect("ran").status(), CodeStatus::Ok);
    }
}

#[tokio::test]
async fn a_bridge_that_falls_silent_is_ended() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    let id = context(&machine).await;
    let mut silent = machine.run_code(&id, code("mute; sleep 60000")).await.expect("begun");
    // Only the wait for what never comes is made short.
    tokio::time::pause();
    let e = silent.next().await.expect("the last thing said").expect_err("silent");
    tokio::time::resume();
    assert_eq!(e.code(), ErrorCode::ContextDead, "{e:?}");
    until(&machine, &id, ContextState::Dead).await;
}

#[tokio::test]
async fn contexts_are_found_again_after_a_restart_and_abandoned_code_is_interrupted() {
    let bench = Bench::new();
    let record = bench.intent("small", 600_000, None);
    let machine = bench.engine.create(record.clone()).await.expect("made");
    let order = ContextOrder { cwd: Some("/tmp".into()), ..python() };
    let made = machine.create_context(order).await.expect("made");
    let (id, dead) = (made.id.clone(), context(&machine).await);
    run(&machine, &id, code("set x 5")).await.expect("ran");
    run(&machine, &dead, code("die")).await.expect_err("dead");
    let mut running = machine.run_code(&id, code("chat 100000")).await.expect("begun");
    assert!(running.next().await.is_some());
    bench.engine.shutdown().await;
    let before = Instant::now();

    let bench = bench.restart();
    bench.engine.recover().await.expect("recovered");
    let again = bench.engine.machine(&record.key).expect("adopted");
    let list = again.contexts().await.expect("found");
    assert_eq!(list.iter().map(|c| c.id.as_str()).collect::<Vec<_>>(), [id.as_str(), dead.as_str()]);
    assert_eq!((list[0].created_at, list[1].state), (made.created_at, ContextState::Dead));
    // Nobody waits for what ran: it makes room.
    let heard = run(&again, &id, code("get x")).await.expect("ran");
    assert_eq!(heard.results, ["text/plain=\"5\""]);
    assert!(before.elapsed() < Duration::from_secs(5));
    assert_eq!(again.restart_context(&dead).await.expect("revived").state, ContextState::Idle);
    assert!(matches!(running.next().await, Some(Err(_)) | None | Some(Ok(_))));
}

#[tokio::test]
async fn a_bridge_of_another_version_is_not_half_understood() {
    let bench = Bench::new();
    let record = bench.intent("small", 600_000, None);
    let machine = bench.engine.create(record.clone()).await.expect("made");
    let id = context(&machine).await;
    run(&machine, &id, code("upgrade 7")).await.expect("ran");
    bench.engine.shutdown().await;
    let bench = bench.restart();
    bench.engine.recover().await.expect("recovered");
    let again = bench.engine.machine(&record.key).expect("adopted");
    assert_eq!(again.contexts().await.expect("listed"), []);
    let fresh = context(&again).await;
    assert_eq!(run(&again, &fresh, code("value 1")).await.expect("ran").status(), CodeStatus::Ok);
}

#[tokio::test]
async fn a_machine_that_dies_ends_its_runs_at_once_with_the_reason() {
    let bench = Bench::new();
    let record = bench.intent("small", 600_000, None);
    let machine = bench.engine.create(record.clone()).await.expect("made");
    let id = context(&machine).await;
    let running = {
        let (machine, id) = (machine.clone(), id.clone());
        tokio::spawn(async move { run(&machine, &id, code("sleep 60000")).await })
    };
    until(&machine, &id, ContextState::Busy).await;
    let killed = Instant::now();
    bench.driver.kill(&record.key, ExitReport::Vmm("its VMM was killed".into()));
    let e = running.await.expect("joined").expect_err("the machine died");
    assert!(killed.elapsed() < Duration::from_secs(2), "{:?}", killed.elapsed());
    assert_eq!(e.code(), ErrorCode::MachineNotRunning, "{e:?}");
    assert_eq!(machine.contexts().await.expect_err("over").code(), ErrorCode::MachineNotRunning);
}

#[tokio::test]
async fn what_cannot_be_made_says_why() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    let nowhere = ContextOrder { cwd: Some("/none".into()), ..python() };
    assert_eq!(machine.create_context(nowhere).await.expect_err("refused").code(), ErrorCode::CommandNotStarted);
    assert_eq!(machine.contexts().await.expect("listed"), []);
    assert_eq!(refused(&machine, "ctx-none", "value 1").await, ErrorCode::NotFound);

    bench.driver.guest.no_kernel.store(true, Ordering::SeqCst);
    let bare = bench.engine.create(bench.intent("bare", 600_000, None)).await.expect("made");
    let e = bare.create_context(python()).await.expect_err("no kernel");
    assert_eq!(e.code(), ErrorCode::Unsupported, "{e:?}");
    assert_eq!(bare.contexts().await.expect("listed"), []);
}

#[tokio::test(start_paused = true)]
async fn running_code_is_use_and_a_context_that_waits_is_not() {
    let bench = Bench::new();
    let machine = bench.engine.create(bench.intent("small", 3_600_000, Some(5_000))).await.expect("made");
    let id = context(&machine).await;
    let long = CodeOrder { timeout_ms: 120_000, ..code("sleep 60000") };
    assert_eq!(run(&machine, &id, long).await.expect("ran to its end").status(), CodeStatus::Ok);
    assert_eq!(machine.record().state, MachineState::Running);
    let mut watch = machine.watch();
    let idle = tokio::time::timeout(Duration::from_secs(60), watch.wait_for(|r| r.state.is_final())).await;
    let last = idle.expect("in time").expect("actor").clone();
    assert_eq!(last.ending.expect("has one").kind, FailureKind::StopIdle);
}

#[tokio::test]
async fn a_context_nobody_waits_for_is_closed_again() {
    let bench = Bench::new();
    let machine = machine(&bench).await;
    for ms in [0u64, 1, 2, 5] {
        let _ = tokio::time::timeout(Duration::from_millis(ms), machine.create_context(python())).await;
    }
    let end = Instant::now() + Duration::from_secs(5);
    loop {
        let left = machine.contexts().await.expect("listed");
        // One that was made within its time has an owner who got its id.
        if left.iter().all(|c| c.state == ContextState::Idle) && left.len() <= 4 {
            break;
        }
        assert!(Instant::now() < end, "{left:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
